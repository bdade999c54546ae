"""One comparison for every numerics test: the tolerance rule, and a report that says where and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping

import oracle
import torch
from oracle import Answer, Problem
from torch import Tensor

from engines.reference.plain import allowed_error

SHOWN = 8


def assert_close_to_oracle(
    got: Tensor, ref: Tensor, plain: Tensor, *, lse: Tensor, name: str = "o", context: str = "",
) -> float:
    """Hold `got` to the oracle `ref` (fp64) within `allowed_error(name, ref, plain, lse)`, element by element.

    NaN and inf must stand exactly where the oracle has them (an oracle value beyond the io dtype's range counts as the
    inf it rounds to). `lse` is the oracle's. Returns the worst share of the allowed error that was used up (0..1).
    Raises AssertionError with the indices that differ, NaN and inf counts, and the worst error.
    """
    title = f"{name}{' of ' + context if context else ''}"
    got, ref, plain, lse = (x.detach().cpu() for x in (got, ref, plain, lse))
    if got.shape != ref.shape:
        raise AssertionError(f"{title}: given shape {tuple(got.shape)}, expected {tuple(ref.shape)}")
    rounded = ref.to(got.dtype).double()
    ref = torch.where(torch.isfinite(ref) & ~torch.isfinite(rounded), rounded, ref.double())
    allowed = allowed_error(name, ref, plain, lse)
    wide = got.double()
    exact = (wide == ref) | (torch.isnan(wide) & torch.isnan(ref))
    share = torch.where(exact, 0.0, ((wide - ref).abs() / allowed)).nan_to_num(nan=math.inf)
    wrong = share > 1
    if bool(wrong.any()):
        raise AssertionError(_report(title, wide, ref, allowed, share, wrong))
    return share.max().item() if share.numel() else 0.0


def assert_answer(
    got: Answer | Mapping[str, Tensor | None], problem: Problem, *, ref: Answer | None = None,
    plain: Answer | None = None, context: str = "",
) -> dict[str, float]:
    """Compare everything in `got` (o, lse, dq, …) with the oracle of `problem`; all failures in one error.

    `ref` and `plain` spare a second computation, or stand in where `problem` holds poison that the plain composition
    would trip over. Returns the share of the allowed error used, by name.
    """
    ref = oracle.reference(problem) if ref is None else ref
    plain = oracle.plain_composition(problem) if plain is None else plain
    shares, failures = {}, []
    for name, value in got.items():
        if value is None:
            continue
        try:
            shares[name] = assert_close_to_oracle(value, getattr(ref, name), getattr(plain, name), lse=ref.lse,
                                                  name=name, context=context)
        except AssertionError as e:
            failures.append(str(e))
    if failures:
        raise AssertionError("\n".join(failures))
    return shares


def assert_same(got: Tensor, want: Tensor, name: str = "tensor") -> None:
    """Equal bit for bit, NaN equal to NaN."""
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    if got.shape != want.shape or not bool(same.all()):
        at = [] if got.shape != want.shape else (~same).nonzero()[:SHOWN].tolist()
        raise AssertionError(f"{name}: given {tuple(got.shape)}, expected {tuple(want.shape)} bit for bit; differs at {at}")


def _report(title: str, got: Tensor, ref: Tensor, allowed: Tensor, share: Tensor, wrong: Tensor) -> str:
    counts = [f"{kind} {int(test(got).sum())} (oracle {int(test(ref).sum())})"
              for kind, test in (("NaN", torch.isnan), ("inf", torch.isinf))]
    lines = [f"{title}: {int(wrong.sum())} of {wrong.numel()} elements are off; {', '.join(counts)}"]
    finite = (got - ref).abs()[wrong]
    finite = finite[torch.isfinite(finite)]
    if finite.numel():
        lines.append(f"  worst finite error {finite.max().item():.3e}, {share[wrong & torch.isfinite(share)].max().item():.2f}"
                     f" x what is allowed")
    for at in wrong.nonzero()[:SHOWN].tolist():
        i = tuple(at)
        lines.append(f"  {at}: given {got[i].item():.7g}, expected {ref[i].item():.7g} +- {allowed.expand_as(ref)[i].item():.2e}")
    if int(wrong.sum()) > SHOWN:
        lines.append(f"  … and {int(wrong.sum()) - SHOWN} more")
    return "\n".join(lines)
