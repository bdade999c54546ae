"""The yardstick of the tolerance rule: an ordinary attention in the io dtype, and the error it makes.

An accelerated kernel is held to what rounding alone costs. `plain_composition` is that cost made concrete: fp32 scores,
softmax, lse and delta, with P, dS and o rounded to the io dtype, as anyone would write it. `allowed_error` is the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .case import AttentionCase, AttentionPart
from .pairs import DensePairs, Tile
from .sdpa import compute_dtype_for

__all__ = ["allowed_error", "plain_composition"]

_ROW_RESULTS = ("o", "lse", "dq")


def allowed_error(name: str, ref: Tensor, plain: Tensor, lse: Tensor) -> Tensor:
    """Per element, the error that a result `name` (o, lse, dq, dk, dv, dbias, dsink) may have against the oracle.

    2 * (largest error of the plain composition) + 2e-5 * max(1, |ref|) * (1 + |lse| / 1024), in fp64. `ref` and
    `lse` are the fp64 oracle's. A result per row uses its row's lse, any other the largest finite one. The first
    term is rounding in the io dtype; the second is fp32's, small enough to tell true fp32 from TF32.
    """
    error = (plain.double() - ref).abs()
    finite = error[torch.isfinite(error)]
    rounding = finite.max().item() if finite.numel() else 0.0
    size = torch.where(torch.isfinite(lse), lse.abs(), 0.0).double()
    if name not in _ROW_RESULTS:
        size = size.max() if size.numel() else size.new_zeros(())
    elif ref.dim() > size.dim():
        size = size[..., None]
    return 2 * rounding + 2e-5 * ref.abs().clamp(min=1) * (1 + size / 1024)


def plain_composition(
    q: Tensor, k: Tensor, v: Tensor, *, do: Tensor | None = None, dlse: Tensor | None = None,
    saved: tuple[Tensor, Tensor] | None = None, **options: Any,
) -> dict[str, Tensor]:
    """o and lse, and where `do` is given dq, dk, dv, dbias, dsink (as far as there is a bias, a sink).

    `saved`: the (o, lse) that the backward under test is given; gradients then start from them, as its do, instead of
    from this composition's own. How each o happened to be rounded decides much of the error of a sum over rows, so two
    errors can be compared only where both start from the same o. Shapes and `options` are those of `sdpa_forward`. Lengths and offsets are read on the host, and one whole score
    matrix per kv head is made at a time.
    """
    names = ("bias", "mask", "sink", "seq_len_q", "seq_len_kv", "cu_seqlens_q", "cu_seqlens_kv", "scale", "softcap")
    given = {**dict.fromkeys(names), "causal": False, "align_bottom_right": False, "window": (None, None),
             "host_reads": True, **options}
    case = AttentionCase.make(q, k, v, given)
    compute = compute_dtype_for(q)
    out = {"o": q.new_zeros(*q.shape[:-1], v.shape[-1]),
           "lse": torch.full(q.shape[:-1], -math.inf, dtype=compute, device=q.device)}
    sums = {name: torch.zeros(x.shape, dtype=compute, device=x.device)
            for name, x in (("dq", q), ("dk", k), ("dv", v), ("dbias", given["bias"]), ("dsink", given["sink"]))
            if x is not None and do is not None}
    views = {**{name: case.rows_view(x) for name, x in out.items()},
             **{name: _VIEWS[name](case, x) for name, x in sums.items()}}
    rows = {name: case.rows_view(x) for name, x in (("do", do), ("dlse", dlse)) if x is not None}
    if saved is not None:
        rows.update(saved_o=case.rows_view(saved[0]), saved_lse=case.rows_view(saved[1]))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for part in case.parts():
            of_part = {name: part.rows(x) for name, x in rows.items()}
            cut = {name: _cut_result(part, name, x) for name, x in views.items()}
            for at in _heads(part):
                _Head(case, part, at, compute).run(of_part, cut)
    io = {"dq": q, "dk": k, "dv": v, "dbias": given["bias"], "dsink": given["sink"]}
    return {**out, **{name: x.to(io[name].dtype) for name, x in sums.items()}}


_VIEWS: dict[str, Any] = {
    "dq": AttentionCase.rows_view, "dk": AttentionCase.keys_view, "dv": AttentionCase.keys_view,
    "dbias": AttentionCase.pair_view, "dsink": lambda case, x: x.unflatten(0, (case.hk, case.group)),
}


def _cut_result(part: AttentionPart, name: str, x: Tensor) -> Tensor:
    if name in _ROW_RESULTS:
        return part.rows(x)
    if name in ("dk", "dv"):
        return part.keys(x)
    return part.of_bias(x) if name == "dbias" else x


def _heads(part: AttentionPart) -> Iterator[Tile]:
    rows, keys = slice(0, part.q.shape[3]), slice(0, part.k.shape[2])
    for b in range(part.q.shape[0]):
        for h in range(part.q.shape[1]):
            yield Tile(slice(b, b + 1), slice(h, h + 1), rows, keys)


class _Head:
    """One kv head of one batch entry or sequence, with its g query heads; forward in the constructor."""

    def __init__(self, case: AttentionCase, part: AttentionPart, at: Tile, compute: torch.dtype) -> None:
        assert isinstance(part.pairs, DensePairs)  # host_reads=True cuts packed batches into dense parts
        self.at, self.pairs, self.io, self.opts = at, part.pairs, part.q.dtype, case.opts
        self.q = part.q[at.b, at.h].to(compute)
        self.k, self.v = (x[at.b, at.h].to(compute) for x in (part.k, part.v))
        s = self.q @ self.k[:, :, None].mT * case.opts.scale
        cap = case.opts.softcap
        self.tanh = torch.tanh(s / cap) if cap is not None else None
        s = s if self.tanh is None or cap is None else cap * self.tanh
        bias, keep = part.pairs.bias(at), part.pairs.visible(at)
        s = s if bias is None else s + bias.to(compute)
        self.keep = (torch.ones_like(s, dtype=torch.bool) if keep is None else keep.expand(s.shape)) & (s != -math.inf)
        self.s = s = torch.where(self.keep, s, -math.inf)
        self.sink = None if case.sink is None else case.sink[None, at.h, :, None].to(compute)
        terms = s if self.sink is None else torch.cat([s, self.sink[..., None].expand(*s.shape[:-1], 1)], -1)
        self.lse = torch.logsumexp(terms, -1) if terms.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
        self.some = self.keep.any(-1)
        base = torch.where(self.some, self.lse, 0.0)[..., None]
        self.p = torch.where(self.keep, torch.exp(s - base), 0.0)
        self.o = (self.rounded(self.p) @ self.v[:, :, None]).to(self.io)

    def rounded(self, x: Tensor) -> Tensor:
        return x.to(self.io).to(x.dtype)

    def run(self, rows: dict[str, Tensor], out: dict[str, Tensor]) -> None:
        at, opts = self.at, self.opts
        out["o"][at.b, at.h], out["lse"][at.b, at.h] = self.o, self.lse
        if "do" not in rows:
            return
        do = rows["do"][at.b, at.h].to(self.p.dtype)
        if "saved_o" in rows:
            self.o = rows["saved_o"][at.b, at.h]
            self.lse = rows["saved_lse"][at.b, at.h].to(do.dtype)
            base = torch.where(self.some, self.lse, 0.0)[..., None]
            self.p = torch.where(self.keep, torch.exp(self.s - base), 0.0)
        delta = torch.where(self.some, (do * self.o.to(do.dtype)).sum(-1), 0.0)
        row_term = -delta if "dlse" not in rows else rows["dlse"][at.b, at.h].to(do.dtype) - delta
        dp = do @ self.v[:, :, None].mT
        ds = torch.where(self.keep, self.p * (dp + row_term[..., None]), 0.0)
        dr = ds if self.tanh is None else torch.where(self.keep, ds * (1 - self.tanh**2), 0.0)
        out["dq"][at.b, at.h] = self.rounded(dr) @ self.k[:, :, None] * opts.scale
        out["dk"][at.b, at.h] += (self.rounded(dr).mT @ self.q).sum(2) * opts.scale
        out["dv"][at.b, at.h] += (self.rounded(self.p).mT @ do).sum(2)
        if "dbias" in out:
            self.pairs.add_bias_grad(out["dbias"], ds, at)
        if self.sink is not None:
            weight = torch.where(self.lse == self.sink, 1.0, torch.exp(self.sink - self.lse))
            weight = torch.where(self.sink == -math.inf, 0.0, weight)
            out["dsink"][at.h] += torch.where(weight == 0, 0.0, weight * row_term).sum((0, 3))
