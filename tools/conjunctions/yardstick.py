"""The tolerance rule's yardstick, measured in more than one order of summation.

The rule allows twice the largest error of a plain composition. Over many elements that is a fair measure of what rounding
costs. Over a few (a bias that is one number, a single query), or where the composition adds up in the very order that the
statistics it is given were made in, one measurement may be far too lucky. Reordering the columns of q and k, and those of v
and dO, changes nothing but the order of every sum over them: the largest error over a few such orders is what is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.reference.plain import plain_composition

ORDERS = 8


def _as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Reordered:
    """`reordered(n)`: the plain composition's results, o and lse from scratch and gradients from the saved `plain` o and lse,
    as those of the first measurement are; all with columns in their own places. `back` undoes a change of layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    plain: Mapping[str, Tensor]
    options: Mapping[str, Any]
    back: Callable[[Tensor], Tensor] = _as_it_is

    def __call__(self, n: int) -> dict[str, Tensor]:
        pick = torch.Generator().manual_seed(n)
        d, dv = (torch.randperm(x.shape[-1], generator=pick) for x in (self.q, self.v))
        saved = (self.plain["o"][..., dv], self.plain["lse"].float())
        options = {name: x for name, x in self.options.items() if x is not None}
        found = plain_composition(self.q[..., d], self.k[..., d], self.v[..., dv], do=self.do[..., dv], saved=saved, **options)
        # With `saved` the gradients start from it, the forward results are still the composition's own.
        moved = {"dq": d, "dk": d, "dv": dv, "o": dv}
        return {name: self.back(_restored(x, moved.get(name))) for name, x in found.items()}


def _restored(x: Tensor, order: Tensor | None) -> Tensor:
    return x if order is None else x[..., torch.argsort(order)]


def largest_error(found: Mapping[str, Tensor], name: str, ref: Tensor) -> float:
    """As the tolerance rule measures it: over all elements with a finite difference."""
    error = (found[name].double() - ref.double()).abs()
    error = error[torch.isfinite(error)]
    return error.max().item() if error.numel() else 0.0
