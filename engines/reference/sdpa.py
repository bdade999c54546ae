"""Scaled dot-product attention, forward and backward, in plain torch: the specification that every engine is held to.

    r   = scale * q.k                    head h reads kv head h // (Hq / Hk)
    s   = softcap ? c * tanh(r / c) : r ;  s += bias ;  s = -inf where masked
    lse = log(sum_j exp s_j + [exp sink])              natural log; an empty row has -inf, or the sink
    P   = exp(s - lse), exactly 0 where masked ;  o = P v ;  an empty row has o = 0
    dP  = dO v^T ;  delta = rowsum(dO * o) ;  dS = P * (dP - delta + dLSE) ;  dR = dS * (1 - tanh^2(r / c))
    dq  = scale * dR k ;  dk = scale * dR^T q ;  dv = P^T dO ;  dBias = dS summed over broadcast axes
    dSink_h = sum over rows of exp(sink_h - lse) * (dLSE - delta)

The gradients are these formulas, not autograd's. Scores are made tile by tile, so memory stays bounded whatever the
lengths, and a value in k, v, q or dO that a row (or key) does not see never reaches it, NaN and inf included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .case import AttentionCase, AttentionPart, tiles
from .masked import Operand, masked_matmul
from .pairs import Options, Tile

__all__ = ["SdpaGrads", "compute_dtype_for", "sdpa_backward", "sdpa_forward"]

Window = tuple[int | None, int | None]


class SdpaGrads(NamedTuple):
    """Gradients of `sdpa_backward`, each in its operand's shape and dtype; None where it was not asked for."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None


def sdpa_forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = False,
    align_bottom_right: bool = False, window: Window = (None, None), bias: Tensor | None = None,
    mask: Tensor | None = None, sink: Tensor | None = None, softcap: float | None = None,
    seq_len_q: Tensor | None = None, seq_len_kv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] = (None, None),
    compute_dtype: torch.dtype | None = None, host_reads: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of q [B, Hq, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv] in any strides, on any device.

    Packed: q [Tq, Hq, D], k [Tk, Hk, D], v [Tk, Hk, Dv] with both `cu_seqlens` [B + 1]. `bias` and boolean `mask` (True
    keeps) have 2 to 4 dims and broadcast to [B, Hq, Sq, Sk], packed to [B, Hq, max_q, max_kv] in positions of the
    sequence; `sink` is [Hq]; `seq_len_*` are [B]. `window` = (left, right), inclusive, None unbounded.

    Returns o, like q but Dv wide, and lse [B, Hq, Sq] or [Tq, Hq] (fp64 for fp64 inputs, else fp32), written into `out`
    where given. Scores are in `compute_dtype`: fp64 for fp64 inputs, else fp32, or fp64 where the device's fp32 matrix
    product would not be true fp32. `host_reads` says whether lengths and offsets may be read by the host (None: on the
    CPU only); they are then checked. Raises ValueError for a wrong value there or for contradicting options.
    """
    case = AttentionCase.make(q, k, v, locals())
    compute = compute_dtype or compute_dtype_for(q)
    o = out[0] if out[0] is not None else q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = out[1] if out[1] is not None else torch.empty(q.shape[:-1], dtype=_lse_dtype(q), device=q.device)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        o5, lse4 = case.rows_view(o), case.rows_view(lse)
        if case.has_padding:
            o5.zero_()
            lse4.fill_(-math.inf)
        for part in case.parts():
            _forward_part(part, part.rows(o5), part.rows(lse4), case, compute)
    return o, lse


def sdpa_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, *, dlse: Tensor | None = None,
    scale: float | None = None, causal: bool = False, align_bottom_right: bool = False, window: Window = (None, None),
    bias: Tensor | None = None, mask: Tensor | None = None, sink: Tensor | None = None, softcap: float | None = None,
    seq_len_q: Tensor | None = None, seq_len_kv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
    want: tuple[str, ...] = ("dq", "dk", "dv"), out: Mapping[str, Tensor] | None = None,
    compute_dtype: torch.dtype | None = None, host_reads: bool | None = None,
) -> SdpaGrads:
    """Gradients of `sdpa_forward` at `do` (like o) and `dlse` (like lse, or None for zero), from its saved o and lse.

    `want` names the gradients to compute, out of dq, dk, dv, dbias, dsink; `out` maps such names to buffers. dbias has
    the bias' own shape, 2 to 4 dims. Everything else is as in `sdpa_forward`. Deterministic on every device.
    """
    case = AttentionCase.make(q, k, v, locals())
    compute = compute_dtype or compute_dtype_for(q)
    sources = _wanted(want, {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsink": sink})
    grads: dict[str, Tensor] = {}
    for name in want:
        given = (out or {}).get(name)
        grads[name] = _empty_like(sources[name]) if given is None else given
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        rows = _Rows(case.rows_view(o), case.rows_view(do), case.rows_view(lse),
                     None if dlse is None else case.rows_view(dlse))
        outs = _outs(case, grads, compute)
        for part in case.parts():
            _backward_part(part, rows.of(part), outs.of(part), case, compute)
        if outs.dbias is not None:
            grads["dbias"].copy_(outs.dbias.reshape(grads["dbias"].shape))
        if outs.dsink is not None:
            grads["dsink"].copy_(outs.dsink.reshape(-1))
    return SdpaGrads(*(grads.get(name) for name in SdpaGrads._fields))


def _wanted(want: tuple[str, ...], operands: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The operand behind each gradient that is asked for."""
    found: dict[str, Tensor] = {}
    for name in want:
        if name not in operands:
            raise ValueError(f"want: given {name!r}, expected some of {list(operands)}")
        operand = operands[name]
        if operand is None:
            raise ValueError(f"want: given {name!r} without a {name[1:]}; pass {name[1:]}= or leave {name!r} out")
        found[name] = operand
    return found


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def compute_dtype_for(q: Tensor) -> torch.dtype:
    """fp64 wherever a user's switch lets the device round fp32 matrix products to TF32 or bf16."""
    if q.dtype == torch.float64:
        return torch.float64
    backend: Any = torch.backends.cuda if q.device.type == "cuda" else torch.backends.mkldnn
    return torch.float32 if backend.matmul.fp32_precision in ("none", "ieee") else torch.float64


class _Scores(NamedTuple):
    s: Tensor  # [b, hk, g, m, n], -inf where not visible
    tanh: Tensor | None  # tanh(r / c), of the raw score
    visible: Tensor | None  # boolean, broadcastable to s; None: all of it


def _scores(part: AttentionPart, q: Tensor, k: Tensor, at: Tile, opts: Options) -> _Scores:
    group, m = q.shape[2:4]
    s = torch.matmul(q.flatten(2, 3), k.transpose(-1, -2)).unflatten(2, (group, m)).mul_(opts.scale)
    tanh = None
    if opts.softcap is not None:
        tanh = torch.tanh(s / opts.softcap)
        s = tanh * opts.softcap
    visible = part.pairs.visible(at)
    bias = part.pairs.bias(at)
    if bias is not None:
        s = s + bias.to(s.dtype)
        kept = bias != -math.inf  # a bias of -inf masks as a boolean mask does
        visible = kept if visible is None else visible & kept
    if visible is not None:
        s = s.masked_fill(~visible, -math.inf)
    return _Scores(s, tanh, visible)


def _forward_part(part: AttentionPart, o: Tensor, lse: Tensor, case: AttentionCase, compute: torch.dtype) -> None:
    """Fill o [b, Hk, G, Sq, Dv] and lse [b, Hk, G, Sq]."""
    k, v = part.k.to(compute), Operand.of(part.v.to(compute), case.host_reads)
    sink = None if case.sink is None else case.sink.to(compute)
    for at in tiles(part, compute):
        q = part.q[at.b, at.h, :, at.i].to(compute)
        s, _, visible = _scores(part, q, k[at.b, at.h, at.j], at, case.opts)
        top = s.amax(-1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
        if sink is not None:
            top = torch.maximum(top, sink[None, at.h, :, None])
        top = top.masked_fill(top == -math.inf, 0.0)
        p = torch.exp(s - top[..., None])
        total = p.sum(-1)
        if sink is not None:
            total = total + _exp_to(sink[None, at.h, :, None], top)
        o_tile = masked_matmul(p, visible, v.at(at.b, at.h, at.j)) / total.masked_fill(total == 0, 1.0)[..., None]
        lse_tile = top + torch.log(total)
        valid = part.pairs.row_valid(at)
        if valid is not None:
            o_tile = o_tile.masked_fill(~valid[..., None], 0.0)
            lse_tile = lse_tile.masked_fill(~valid, -math.inf)
        o[at.b, at.h, :, at.i] = o_tile.to(o.dtype)
        lse[at.b, at.h, :, at.i] = lse_tile.to(lse.dtype)


def _exp_to(x: Tensor, ref: Tensor) -> Tensor:
    """exp(x - ref) for x <= ref, with exp(inf - inf) = 1 and exp(-inf - anything) = 0."""
    e = torch.where(x == ref, 1.0, torch.exp(x - ref))
    return torch.where(x == -math.inf, 0.0, e)


class _Rows(NamedTuple):
    """What a forward saved and its caller's gradients, as [b, Hk, G, S(, Dv)] views."""

    o: Tensor
    do: Tensor
    lse: Tensor
    dlse: Tensor | None

    def of(self, part: AttentionPart) -> _Rows:
        return _Rows(*(None if x is None else part.rows(x) for x in self))  # type: ignore[arg-type]


class _Outs(NamedTuple):
    """Where gradients go: dq, dk, dv as views of the results; dbias and dsink as totals over all parts, in the
    compute dtype. None where not wanted."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dsink: Tensor | None

    def of(self, part: AttentionPart) -> _Outs:
        cuts = (part.rows, part.keys, part.keys, part.of_bias, lambda x: x)
        return _Outs(*(None if x is None else cut(x) for cut, x in zip(cuts, self, strict=True)))

    @property
    def needs_scores(self) -> bool:
        """Whether anything beyond dv, which P alone gives, is wanted."""
        return any(x is not None for x in (self.dq, self.dk, self.dbias, self.dsink))


def _outs(case: AttentionCase, grads: Mapping[str, Tensor], compute: torch.dtype) -> _Outs:
    """Views of the result buffers, zeroed where padding may be left out, and zero totals."""
    views = [None if name not in grads else view(grads[name])
             for name, view in (("dq", case.rows_view), ("dk", case.keys_view), ("dv", case.keys_view))]
    if case.has_padding:
        for x in views:
            if x is not None:
                x.zero_()
    dbias = case.bias.new_zeros(case.bias.shape, dtype=compute) if "dbias" in grads and case.bias is not None else None
    dsink = torch.zeros(case.hk, case.group, dtype=compute, device=case.device) if "dsink" in grads else None
    return _Outs(views[0], views[1], views[2], dbias, dsink)


def _delta(do: Tensor, o: Tensor, p: Tensor, p_dp: Tensor, sink_weight: Tensor | None, io: torch.dtype) -> Tensor:
    """rowsum(dO * o), [b, hk, g, m]. It equals rowsum(P * dP), but o was rounded to `io`: where the two agree up to that
    rounding the unrounded sum is taken. They differ where o is the merged result of more keys than these. P, made again
    from an fp32 lse, is off by a common factor that grows with |lse|; what it has to sum up to takes that out."""
    delta = (do * o).sum(-1)
    limits = torch.finfo(io)
    if limits.eps <= torch.finfo(do.dtype).eps:
        return delta
    total = p.sum(-1)
    whole = 1.0 if sink_weight is None else 1.0 - sink_weight
    exact = torch.where(total > 0, p_dp.sum(-1) * (whole / total), 0.0)
    rounding = limits.eps * (do.abs() * (o.abs() + limits.smallest_normal)).sum(-1)
    return torch.where((exact - delta).abs() <= rounding, exact, delta)


def _backward_part(part: AttentionPart, rows: _Rows, outs: _Outs, case: AttentionCase, compute: torch.dtype) -> None:
    opts, free = case.opts, case.host_reads
    k, v = Operand.of(part.k.to(compute), free), part.v.to(compute)
    dk, dv = k.x.new_zeros(k.x.shape), v.new_zeros(v.shape)
    for at in tiles(part, compute):
        q, o, do = (x[at.b, at.h, :, at.i].to(compute) for x in (part.q, rows.o, rows.do))
        lse = rows.lse[at.b, at.h, :, at.i].to(compute)
        k_tile = k.at(at.b, at.h, at.j)
        s, tanh, visible = _scores(part, q, k_tile.x, at, opts)
        seen = (lse != -math.inf)[..., None]
        seen = seen if visible is None else seen & visible
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).masked_fill(~seen, 0.0)
        if outs.dv is not None:
            dv[at.b, at.h, at.j] += _over_rows(p, seen, do, free)
        if not outs.needs_scores:
            continue
        dp = torch.matmul(do.flatten(2, 3), v[at.b, at.h, at.j].transpose(-1, -2)).view_as(p)
        p_dp = (p * dp).masked_fill(~seen, 0.0)
        sink = None if case.sink is None else _exp_to(case.sink.to(compute)[None, at.h, :, None], lse)
        row_term = -_delta(do, o, p, p_dp, sink, rows.o.dtype).masked_fill(~seen.expand(p.shape).any(-1), 0.0)
        if rows.dlse is not None:
            row_term = row_term + rows.dlse[at.b, at.h, :, at.i].to(compute)
        if outs.dsink is not None and case.sink is not None:
            _add_dsink(outs.dsink, case.sink.to(compute), lse, row_term, part.pairs.row_valid(at), at)
        ds = (p_dp + p * row_term[..., None]).masked_fill(~seen, 0.0)
        if outs.dbias is not None:
            part.pairs.add_bias_grad(outs.dbias, ds, at)
        if tanh is not None:
            ds = (ds * (1 - tanh * tanh)).masked_fill(~seen, 0.0)
        if outs.dq is not None:
            outs.dq[at.b, at.h, :, at.i] = (masked_matmul(ds, seen, k_tile) * opts.scale).to(outs.dq.dtype)
        if outs.dk is not None:
            dk[at.b, at.h, at.j] += _over_rows(ds, seen, q, free) * opts.scale
    for total, out in ((dk, outs.dk), (dv, outs.dv)):
        if out is not None:
            out.copy_(total)


def _over_rows(weights: Tensor, seen: Tensor, x: Tensor, host_reads: bool) -> Tensor:
    """sum over rows and the group's heads of weights[.., m, n] * x[.., m, d] as [b, hk, n, d]."""
    seen = seen.expand(weights.shape).flatten(2, 3).transpose(-1, -2)[:, :, None]
    columns = weights.flatten(2, 3).transpose(-1, -2)[:, :, None]
    return masked_matmul(columns, seen, Operand.of(x.flatten(2, 3), host_reads))[:, :, 0]


def _add_dsink(total: Tensor, sink: Tensor, lse: Tensor, row_term: Tensor, valid: Tensor | None, at: Tile) -> None:
    """Add exp(sink - lse) * (dLSE - delta) of the tile's valid rows to total [Hk, G]."""
    weight = _exp_to(sink[None, at.h, :, None], lse)
    unused = weight == 0
    if valid is not None:
        unused = unused | ~valid
    total[at.h] += (weight * row_term).masked_fill(unused, 0.0).sum((0, 3))
