"""How near is near enough, in units that can be argued for."""

from __future__ import annotations

import oracle
import torch
from torch import Tensor

from engines.reference.plain import allowed_error

SHOWN = 4


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def half_ulp(x: Tensor) -> Tensor:
    """Half the distance between neighbours in x's dtype, element by element, in fp64. A millionth more than
    that, for the rounding of fp64 itself."""
    size = x.double().abs().clamp(min=torch.finfo(x.dtype).tiny)
    step = torch.finfo(x.dtype).eps * torch.exp2(torch.floor(torch.log2(size)))
    return torch.where(torch.isfinite(x), step, 0.0) / 2 * (1 + 1e-6)


def engine_error(problem: oracle.Problem) -> Tensor:
    """What the tolerance rule allows an engine's o [B, Hq, Sq, Dv] against fp64."""
    ref, plain = oracle.reference(problem), oracle.plain_composition(problem)
    return allowed_error("o", ref.o, plain.o, ref.lse)


def assert_within(got: Tensor, want: Tensor, allowed: Tensor, name: str) -> float:
    """|got - want| ≤ allowed everywhere; infinities must stand where they are expected, and NaN is never
    right.

    Returns the worst share of what is allowed.
    """
    if got.shape != want.shape:
        raise AssertionError(f"{name}: given shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    got, want = got.detach().double(), want.detach().double()
    share = torch.where(got == want, 0.0, (got - want).abs() / allowed)
    wrong = ~(share <= 1)
    if bool(wrong.any()):
        at = [tuple(i) for i in wrong.nonzero()[:SHOWN].tolist()]
        lines = [
            f"  {i}: given {got[i].item():.9g}, expected {want[i].item():.9g}, {share[i].item():.2f} x what is allowed"
            for i in at
        ]
        raise AssertionError(
            "\n".join([f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are off", *lines])
        )
    return share.max().item() if share.numel() else 0.0
