"""Equivalence before timing.

Two checks, because a whole fp64 oracle at benchmark sizes would cost more than the benchmark. `Oracle` holds
some K/V heads (the first and the last) with all their query heads to the engines' reference in fp64, element
by element, under the library's own tolerance rule. `whole_error` then compares everything else, in chunks of
64 rows, with a candidate that passed the first check.

A backward that was given a saved o and lse is held to a yardstick that starts from the same ones: how each o
happened to be rounded decides much of the error of a sum over rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .cases import Case
from .operands import Operands

CHUNK = 64
_SLICE = 32 * CHUNK
# Two low-precision results of the same thing, relative to the chunk's norm: a few roundings of the io dtype.
WHOLE_TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}
# FROST's engines are held to the tolerance rule; a peer, which never signed it, to computing the same
# function.
PEER_SLACK = 4.0
_FLOOR = (
    0.1  # of the tensor's own rms: chunks that are nearly zero (dq of a causal first row) hold rounding only
)


class Oracle:
    """fp64 answers for the sampled heads of one case, with what the tolerance rule allows. It keeps views of
    the operands, and makes the yardstick anew for each saved (o, lse)."""

    def __init__(self, case: Case, operands: Operands, direction: str) -> None:
        self.case, self.direction, self.operands = case, direction, operands
        batches = (0, 0) if case.packed else (0, case.b - 1)
        self.heads = tuple(dict.fromkeys(zip(batches, (0, case.hk - 1))))
        self._exact = [self._exact_of(b, h) for b, h in self.heads]
        self._plain = [self._plain_of(b, h) for b, h in self.heads]

    def _allowed(self, saved: tuple[Tensor, Tensor] | None) -> list[dict[str, Tensor]]:
        """Allowed error by result, for each head. The rule's yardstick is the largest error over a whole tensor,
        so it is taken over all sampled heads together."""
        from engines.reference.plain import allowed_error

        plain = self._plain
        if saved is not None and self.direction == "bwd":
            started = [self._plain_of(b, h, saved) for b, h in self.heads]
            plain = [{**theirs, "o": own["o"], "lse": own["lse"]} for own, theirs in zip(plain, started)]
        out: list[dict[str, Tensor]] = [{} for _ in self.heads]
        lse = torch.stack([exact["lse"] for exact in self._exact])
        for name in self._exact[0]:
            exact = torch.stack([e[name] for e in self._exact])
            allowed = allowed_error(name, exact, torch.stack([p[name] for p in plain]), lse)
            for i, of_head in enumerate(out):
                of_head[name] = allowed[i]
        return out

    def _main(self, b: int, h: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        names = ("q", "k", "v", "do")
        q, k, v, do = (self._cut(getattr(self.operands, name), name, b, h) for name in names)
        return q, k, v, do

    def _options(self, b: int, h: int) -> dict[str, Any]:
        return {
            **{n: self._cut_option(n, x, b, h) for n, x in self.operands.options.items()},
            "causal": self.case.causal,
            "window": (self.case.window_left, None),
            "softcap": self.case.softcap,
        }

    def _exact_of(self, b: int, h: int) -> dict[str, Tensor]:
        """The fp64 answer for one kv head."""
        from engines.reference.sdpa import sdpa_backward, sdpa_forward

        q, k, v, do = (x.double() for x in self._main(b, h))
        how: dict[str, Any] = {
            n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
            for n, x in self._options(b, h).items()
        }
        o, lse = sdpa_forward(q, k, v, **how, host_reads=True)
        if self.direction == "fwd":
            return {"o": o, "lse": lse}
        want = ("dq", "dk", "dv", *(("dsink",) if "sink" in how else ()))
        made = sdpa_backward(q, k, v, o, do, lse, want=want, **how, host_reads=True)
        return {"o": o, "lse": lse, **{n: x for n, x in made._asdict().items() if x is not None}}

    def _plain_of(self, b: int, h: int, saved: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
        """What the plain composition in the io dtype makes of the same head."""
        from engines.reference.plain import plain_composition

        q, k, v, do = self._main(b, h)
        given = None
        if saved is not None:
            given = (self._cut(saved[0], "o", b, h), self._cut(saved[1], "lse", b, h))
        how = self._options(b, h)
        return plain_composition(q, k, v, do=do if self.direction == "bwd" else None, saved=given, **how)

    def _cut(self, x: Tensor, name: str, b: int, h: int) -> Tensor:
        group = self.case.group if name in ("q", "do", "o", "dq", "lse") else 1
        heads = slice(h * group, (h + 1) * group)
        return x[:, heads] if self.case.packed else x[b : b + 1, heads]

    def _cut_option(self, name: str, x: Tensor, b: int, h: int) -> Tensor:
        heads = slice(h * self.case.group, (h + 1) * self.case.group)
        if name in ("sink", "dsink"):
            return x[heads]
        if name.startswith("seq_len"):
            return x[b : b + 1]
        if name.startswith("cu_seqlens"):
            return x
        x = x[b : b + 1] if x.shape[0] > 1 else x
        return x[:, heads] if x.shape[1] > 1 else x

    def shares(
        self, got: Mapping[str, Tensor], saved: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, float]:
        """By result: the worst share of the allowed error (inf where NaN stands for a number). `saved`: the (o,
        lse) that a backward was given, whole; None where it has its own. They are results too: a yardstick that
        starts from a wrong o would allow wrong gradients. Gradients that sum over heads or batches beyond the
        sampled ones (dbias, and dsink with more than one batch) are not compared here."""
        out: dict[str, float] = {}
        if saved is not None:
            got = {**got, "o": saved[0], "lse": saved[1]}
        for (b, h), exact, allowed in zip(self.heads, self._exact, self._allowed(saved)):
            for name, tensor in got.items():
                if name not in exact or name == "dsink" and self.case.b > 1 and not self.case.packed:
                    continue
                part = (
                    self._cut_option(name, tensor, b, h) if name == "dsink" else self._cut(tensor, name, b, h)
                )
                share = (part.double() - exact[name]).abs() / allowed[name]
                share = share.nan_to_num(nan=math.inf, posinf=math.inf)
                out[name] = max(out.get(name, 0.0), float(share.max()) if share.numel() else 0.0)
        return out


def verdict(shares: Mapping[str, float], limit: float = 1.0) -> tuple[bool, str]:
    """Whether every result stayed within `limit` times what is allowed, and the worst share as text."""
    if not shares:
        return False, "nothing was compared"
    name, worst = max(shares.items(), key=lambda item: item[1])
    if worst <= limit:
        return True, f"{worst:.2f} {name}"
    bad = ", ".join(f"{n} {s:.3g}" for n, s in shares.items() if s > limit)
    return False, f"errors over the allowed ones by factors: {bad}"


def whole_error(got: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """By result of 3 or 4 dims: the worst relative difference of a 64-row chunk of one head; inf where there
    is a NaN."""
    out = {}
    for name in ("o", "dq", "dk", "dv"):
        if name in got and name in other:
            out[name] = _chunked(got[name], other[name])
    return out


def _chunked(a: Tensor, b: Tensor) -> float:
    axis = a.dim() - 2 if a.dim() == 4 else 0
    rms = float(b.float().square().mean().sqrt())
    worst = 0.0
    for x, y in zip(a.split(_SLICE, axis), b.split(_SLICE, axis)):  # bounds the fp32 copies
        x, y = (_rows_of_chunks(t.float(), axis) for t in (x, y))
        norm = y.square().mean((-1, -2)).sqrt().clamp(min=_FLOOR * rms)
        error = ((x - y).square().mean((-1, -2)).sqrt() / norm).nan_to_num(nan=math.inf)
        worst = max(worst, float(error.max()))
    return worst


def _rows_of_chunks(x: Tensor, axis: int) -> Tensor:
    """[.., chunks, CHUNK, D]; what doesn't fill a chunk is padded with zeros on both sides of the
    comparison."""
    x = x.movedim(axis, -2)
    pad = -x.shape[-2] % CHUNK
    if pad:
        x = torch.nn.functional.pad(x, (0, 0, 0, pad))
    return x.unflatten(-2, (-1, CHUNK))
