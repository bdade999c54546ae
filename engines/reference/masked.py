"""Matrix products in which an entry that is not visible counts as absent, NaN and inf in the other operand included.

0 * NaN is NaN, so a weight of exactly 0 does not keep a bad value out. Bad values are therefore taken out of the
operand first and brought back only where a visible entry meets them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Operand", "masked_matmul"]


class Operand(NamedTuple):
    """The right-hand side [b, hk, n, d] of a masked product."""

    x: Tensor
    clean: Tensor  # x with 0 for every NaN and inf
    bad: Tensor | None  # [b, hk, n, 3d]: 1 where x is NaN, +inf, -inf; None where all of x is known to be finite

    @staticmethod
    def of(x: Tensor, host_reads: bool) -> Operand:
        """`host_reads`: whether to look at the values now, which makes the usual, finite case cost nothing later."""
        finite = torch.isfinite(x)
        if host_reads and bool(finite.all()):
            return Operand(x, x, None)
        # Zeros and ones add up exactly enough in any format to tell 0 from more than 0; bf16 is the fast one on a GPU.
        codes = torch.cat([torch.isnan(x), x == math.inf, x == -math.inf], -1)
        return Operand(x, x.masked_fill(~finite, 0.0), codes.to(_code_dtype(x)))

    def at(self, b: slice, h: slice, j: slice) -> Operand:
        return Operand(self.x[b, h, j], self.clean[b, h, j], None if self.bad is None else self.bad[b, h, j])


def _code_dtype(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.device.type == "cuda" else torch.float32


def masked_matmul(weights: Tensor, visible: Tensor | None, operand: Operand) -> Tensor:
    """weights [b, hk, g, m, n], 0 where not visible, times operand [b, hk, n, d] as [b, hk, g, m, d].

    `visible` is boolean and broadcastable to weights; None means that every entry is.
    """
    group, m = weights.shape[2:4]
    if visible is None or operand.bad is None:
        x = operand.x if visible is None else operand.clean
        return torch.matmul(weights.flatten(2, 3), x).unflatten(2, (group, m))
    out = torch.matmul(weights.flatten(2, 3), operand.clean)
    meets = torch.matmul(visible.expand(weights.shape).flatten(2, 3).to(operand.bad.dtype), operand.bad) > 0
    for met, value in zip(meets.chunk(3, -1), (math.nan, math.inf, -math.inf), strict=True):
        out = out + torch.zeros_like(out).masked_fill(met, value)
    return out.unflatten(2, (group, m))
