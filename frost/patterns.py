"""Attention written with primitives: matmul(q, kᵀ) -> scale, add bias, mask in any legal order -> softmax ->
matmul(p, v).

What may stand between the first matmul and the softmax, innermost first: scales; then at most one bias (a bias under a
later scale would be scaled too); at most one mask anywhere (under a later scale only if that is positive, or the -inf
would turn). Scales on q or k count as well. None of it may be read by anybody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from frost.graph import Tensor
from frost.opset import OPS, can_broadcast
from frost.rules import FP32_MAX

_KEYS_LAST = (0, 1, 3, 2)


@dataclass
class Unit:
    """One step to be: an op node, or a fused group of them under the op that replaces it."""

    name: str
    op: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scores:
    """What was found on the way from the softmax inwards."""

    q: Tensor | None = None
    k: Tensor | None = None
    scale: float = 1.0
    scaled: bool = False
    bias: Tensor | None = None
    mask: Tensor | None = None


class _Matcher:
    def __init__(self, units: Iterable[Unit], handed_out: Iterable[Tensor]) -> None:
        self.made_by = {t: unit for unit in units for t in unit.outputs.values()}
        self.uses = Counter([*handed_out, *(t for unit in units for t in unit.inputs.values())])

    def by(self, t: Tensor, op: str) -> Unit | None:
        """The unit that makes `t`, if it is of that op."""
        unit = self.made_by.get(t)
        return unit if unit is not None and unit.op == op else None

    def attention(self, last: Unit) -> Unit | None:
        """The sdpa that ends in the matmul `last`, if one does."""
        p, v = last.inputs["x"], last.inputs["y"]
        softmax = self.by(p, "softmax")
        if softmax is None or self.uses[p] != 1 or softmax.attrs["axis"] % p.desc.rank != p.desc.rank - 1:
            return None
        found = self.scores(softmax.inputs["x"], _Scores())
        if found is None or found.q is None or found.k is None or not abs(found.scale) <= FP32_MAX:
            return None
        extras = {n: t for n, t in (("bias", found.bias), ("mask", found.mask)) if t is not None}
        inputs = {"q": found.q, "k": found.k, "v": v, **extras}
        if not _is_attention(found.q, found.k, v, extras.values()):
            return None
        attrs = {**OPS["sdpa"].attrs, "scale": found.scale}
        return Unit(last.name, "sdpa", inputs, {"o": last.outputs["out"]}, attrs)

    def scores(self, t: Tensor, so_far: _Scores) -> _Scores | None:
        while True:
            unit = self.made_by.get(t)
            if unit is None or self.uses[t] != 1:
                return None
            if unit.op != "scale":
                break
            so_far = replace(so_far, scale=so_far.scale * unit.attrs["value"], scaled=True)
            t = unit.inputs["x"]
        x, y = unit.inputs["x"], unit.inputs.get("y")
        if unit.op == "matmul" and y is not None:
            return self.product(x, y, so_far)
        if unit.op == "mask_fill" and so_far.mask is None and (not so_far.scaled or so_far.scale > 0):
            return self.scores(x, replace(so_far, mask=y))
        if unit.op == "add" and y is not None and so_far.bias is None and not so_far.scaled:
            return self.scores(x, replace(so_far, bias=y)) or self.scores(y, replace(so_far, bias=x))
        return None

    def product(self, q: Tensor, keys: Tensor, so_far: _Scores) -> _Scores | None:
        """q times the transposed k, either of them scaled."""
        scale = so_far.scale
        while (scaled := self.by(q, "scale")) is not None:
            q, scale = scaled.inputs["x"], scale * scaled.attrs["value"]
        k = None
        while (unit := self.made_by.get(keys)) is not None:
            if unit.op == "scale":
                scale *= unit.attrs["value"]
            elif unit.op == "transpose" and k is None and tuple(unit.attrs["perm"]) == _KEYS_LAST:
                k = unit.inputs["x"]
            else:
                break
            keys = unit.inputs["x"]
        return None if k is None else replace(so_far, q=q, k=keys, scale=scale)


def _is_attention(q: Tensor, k: Tensor, v: Tensor, on_scores: Iterable[Tensor]) -> bool:
    """Whether the shapes are those of sdpa: as many K/V heads as query heads, or one for all of them."""
    if not q.desc.rank == k.desc.rank == v.desc.rank == 4:
        return False
    (b, hq, sq, d), (bk, hk, sk, _), (bv, hv, _, dv) = q.shape, k.shape, v.shape
    if not all(isinstance(n, int) and n >= 1 for n in (hq, hk, d, dv)):
        return False
    return b == bk == bv and hk == hv and hk in (1, hq) and all(
        can_broadcast(t.shape, (b, hq, sq, sk)) for t in on_scores)


def fuse_attention(units: list[Unit], handed_out: Iterable[Tensor]) -> list[Unit]:
    """The units with every attention pattern's last matmul replaced by an sdpa; what fed it is dead if nobody else
    reads it."""
    matcher = _Matcher(units, handed_out)
    return [(matcher.attention(unit) if unit.op == "matmul" else None) or unit for unit in units]
