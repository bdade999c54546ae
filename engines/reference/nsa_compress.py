"""Native sparse attention in plain torch: block pooling, attention over compressed keys, the choice of blocks.

Packed batches keep block c of the sequence at offset s in row s // stride + c of every compressed tensor, so that all
places follow from the offsets without a host read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .nsa import MASK_BYTES, NsaGrads, Places, _scale
from .sdpa import compute_dtype_for, sdpa_backward, sdpa_forward

__all__ = ["choose_blocks", "compress", "compress_backward", "compressed_attention", "compressed_attention_backward",
           "compressed_mask"]


class _Blocks(NamedTuple):
    """The rows of a compressed tensor: sequence (-1: no block) and number of each, and its first token."""

    seq: Tensor
    number: Tensor
    start: Tensor

    @staticmethod
    def dense(rows: int, stride: int, device: torch.device) -> _Blocks:
        c = torch.arange(rows, device=device)
        return _Blocks(torch.zeros_like(c), c, c * stride)

    @staticmethod
    def packed(cu: Tensor, total: int, rows: int, block_len: int, stride: int) -> _Blocks:
        cu = cu.to(torch.int64).clamp(0, total)
        row = torch.arange(rows, device=cu.device)
        first = cu // stride
        # Sequences share a first row where all but the last of them are empty: the last one has it.
        seq = torch.searchsorted(first, row, right=True) - 1
        last = cu.numel() - 1
        at = seq.clamp(0, max(0, last - 1))
        number = row - first[at]
        start = cu[at] + number * stride
        real = (seq >= 0) & (seq < last) & (start + block_len <= cu[(at + 1).clamp(max=last)])
        return _Blocks(torch.where(real, seq, -1), torch.where(real, number, 0), torch.where(real, start, 0))


def _blocks(cu: Tensor | None, total: int, rows: int, block_len: int, stride: int, device: torch.device) -> _Blocks:
    return _Blocks.dense(rows, stride, device) if cu is None else _Blocks.packed(cu, total, rows, block_len, stride)


def _dense(x: Tensor, packed: bool) -> Tensor:
    return x.transpose(0, 1)[None] if packed else x


# ---- pooling


def compress(x: Tensor, out: Tensor, block_len: int, stride: int, weights: Tensor | None, cu: Tensor | None) -> None:
    """Pool x [B, Hk, T, D] (packed [T, Hk, D]) into `out`; see `frost.Graph.nsa_compress`."""
    compute = compute_dtype_for(x)
    x4, out4 = _dense(x, cu is not None), _dense(out, cu is not None)
    blocks = _blocks(cu, x4.shape[2], out4.shape[2], block_len, stride, x.device)
    real = (blocks.seq >= 0)[:, None]
    total = torch.zeros(*x4.shape[:2], out4.shape[2], out4.shape[3], dtype=compute, device=x.device)
    for t in range(block_len):
        tokens = torch.where(real, x4[:, :, _at(blocks, t, x4.shape[2])].to(compute), 0.0)
        total += _weighted(tokens, weights, t, block_len, compute)
    out4.copy_(total)


def _at(blocks: _Blocks, t: int, tokens: int) -> Tensor:
    """Where token t of every block lies; inside the buffer also for rows without a block."""
    return (blocks.start + t).clamp(max=max(0, tokens - 1))


def _weighted(x: Tensor, weights: Tensor | None, t: int, block_len: int, compute: torch.dtype) -> Tensor:
    if weights is None:
        return x / block_len
    w = weights[t].to(compute)
    return x @ w if w.dim() == 2 else x * w


def compress_backward(
    x: Tensor, dout: Tensor, block_len: int, stride: int, weights: Tensor | None, cu: Tensor | None,
    out: Mapping[str, Tensor],
) -> None:
    """Gradients of `compress`: "dx" and "dweights" as far as `out` has buffers for them."""
    compute = compute_dtype_for(x)
    x4, d4 = _dense(x, cu is not None), _dense(dout, cu is not None)
    blocks = _blocks(cu, x4.shape[2], d4.shape[2], block_len, stride, x.device)
    real = (blocks.seq >= 0)[:, None]
    grad = torch.where(real, d4.to(compute), 0.0)
    dx = torch.zeros(x4.shape, dtype=compute, device=x.device) if "dx" in out else None
    dw = None if weights is None else torch.zeros(weights.shape, dtype=compute, device=x.device)
    for t in range(block_len):
        at = _at(blocks, t, x4.shape[2])
        if dx is not None:
            _add_to_tokens(dx, blocks, t, _unweighted(grad, weights, t, block_len, compute))
        if dw is not None and "dweights" in out:
            tokens = torch.where(real, x4[:, :, at].to(compute), 0.0)
            dw[t] = _weight_gradient(tokens, grad, dw[t])
    if dx is not None:
        _dense(out["dx"], cu is not None).copy_(dx)
    if dw is not None and "dweights" in out:
        out["dweights"].copy_(dw)


def _add_to_tokens(dx: Tensor, blocks: _Blocks, t: int, grad: Tensor) -> None:
    """dx[token t of each block] += grad. Token t of two blocks is never the same one, so a write needs no atomics:
    rows without a block go to one token too many, which is cut off."""
    wide = torch.zeros(*dx.shape[:2], dx.shape[2] + 1, dx.shape[3], dtype=dx.dtype, device=dx.device)
    wide[:, :, torch.where(blocks.seq >= 0, blocks.start + t, dx.shape[2])] = grad
    dx += wide[:, :, :-1]


def _unweighted(grad: Tensor, weights: Tensor | None, t: int, block_len: int, compute: torch.dtype) -> Tensor:
    if weights is None:
        return grad / block_len
    w = weights[t].to(compute)
    return grad @ w.mT if w.dim() == 2 else grad * w


def _weight_gradient(tokens: Tensor, grad: Tensor, like: Tensor) -> Tensor:
    if like.dim() == 2:
        return tokens.flatten(0, 2).mT @ grad.flatten(0, 2)
    per_channel = (tokens * grad).flatten(0, 2)
    return per_channel.sum() if like.numel() == 1 else per_channel.sum(0)


# ---- attention over compressed keys


class _Case(NamedTuple):
    places: Places
    blocks: _Blocks
    block_len: int

    @staticmethod
    def make(q4: Tensor, k4: Tensor, cu: Tensor | None, seqlen_kv: int, block_len: int, stride: int) -> _Case:
        rows = q4.shape[2]
        places = Places.dense(rows, seqlen_kv, q4.device) if cu is None else Places.packed(cu, rows)
        return _Case(places, _blocks(cu, rows, k4.shape[2], block_len, stride, q4.device), block_len)

    def mask(self, rows: slice, stride: int) -> Tensor:
        """[1, 1, rows, N]: row sees a block that ends at or before it."""
        last = self.blocks.number * stride + self.block_len - 1
        at = self.places.rows(rows)
        same = (self.blocks.seq == at.row_seq[:, None]) & (at.row_seq >= 0)[:, None]
        return (same & (last <= at.row_pos[:, None]))[None, None]


def _row_steps(rows: int, keys: int, device: torch.device) -> list[slice]:
    step = max(1, MASK_BYTES[device.type] // max(1, keys))
    return [slice(a, min(rows, a + step)) for a in range(0, rows, step)]


def compressed_mask(q: Tensor, k: Tensor, cu: Tensor | None, *, seqlen_kv: int, block_len: int, stride: int) -> Tensor:
    """Boolean [1, 1, Tq, N]: which compressed keys each row sees. q [B, Hq, Tq, D], k [B, Hk, N, D], packed ones too."""
    return _Case.make(q, k, cu, seqlen_kv, block_len, stride).mask(slice(0, q.shape[2]), stride)


def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor | None, importance: Tensor | None, *, block_len: int,
    stride: int, block_size: int, seqlen_kv: int, scale: float | None = None, cu: Tensor | None = None,
) -> None:
    """Fill o, lse and importance; see `frost.Graph.nsa_compressed_attention`."""
    packed = cu is not None
    q4, k4, v4, o4 = (_dense(x, packed) for x in (q, k, v, o))
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse3 = _dense(torch.empty(q.shape[:-1], dtype=stats, device=q.device) if lse is None else lse, packed)
    case, group = _Case.make(q4, k4, cu, seqlen_kv, block_len, stride), q4.shape[1] // k4.shape[1]
    for rows in _row_steps(q4.shape[2], k4.shape[2], q.device):
        mask = case.mask(rows, stride)
        sdpa_forward(q4[:, :, rows], k4, v4, mask=mask, scale=_scale(q, scale), out=(o4[:, :, rows], lse3[:, :, rows]))
        if importance is not None:
            _importance(_dense(importance, packed), q4, k4, lse3, case, mask, rows, group, stride, block_size,
                        _scale(q, scale))


def _importance(out: Tensor, q: Tensor, k: Tensor, lse: Tensor, case: _Case, mask: Tensor, rows: slice, group: int,
                stride: int, block_size: int, scale: float) -> None:
    compute = compute_dtype_for(q)
    first = case.blocks.number * stride
    m = torch.arange(out.shape[-1], device=q.device)
    overlaps = (first[:, None] < (m + 1) * block_size) & (first[:, None] + case.block_len > m * block_size)
    overlaps = (overlaps & (case.blocks.seq >= 0)[:, None]).to(compute)  # [N, M]
    for b in range(q.shape[0]):
        for h in range(k.shape[1]):
            heads = slice(h * group, (h + 1) * group)
            s = q[b, heads, rows].to(compute) @ k[b, h].to(compute).mT * scale
            base = lse[b, heads, rows].to(compute)[..., None]
            p = torch.where(mask[0, 0], torch.exp(s - torch.where(base == -math.inf, 0.0, base)), 0.0)
            out[b, h, rows] = (p.sum(0) @ overlaps).to(out.dtype)


def compressed_attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, *, block_len: int, stride: int, seqlen_kv: int,
    scale: float | None = None, cu: Tensor | None = None, dlse: Tensor | None = None,
    want: tuple[str, ...] = ("dq", "dk", "dv"), out: Mapping[str, Tensor] | None = None,
) -> NsaGrads:
    """Gradients through o and lse, from the forward's."""
    packed, compute, given = cu is not None, compute_dtype_for(q), out or {}
    q4, k4, v4, o4, do4, lse3 = (_dense(x, packed) for x in (q, k, v, o, do, lse))
    dlse3 = None if dlse is None else _dense(dlse, packed)
    grads = {n: given[n] if n in given else torch.empty(x.shape, dtype=x.dtype, device=x.device)
             for n, x in (("dq", q), ("dk", k), ("dv", v)) if n in want}
    sums = {n: torch.zeros(x.shape, dtype=compute, device=x.device) for n, x in (("dk", k4), ("dv", v4)) if n in want}
    case = _Case.make(q4, k4, cu, seqlen_kv, block_len, stride)
    for rows in _row_steps(q4.shape[2], k4.shape[2], q.device):
        made = sdpa_backward(
            q4[:, :, rows], k4.to(compute), v4.to(compute), o4[:, :, rows], do4[:, :, rows], lse3[:, :, rows],
            dlse=None if dlse3 is None else dlse3[:, :, rows], mask=case.mask(rows, stride), scale=_scale(q, scale),
            want=want, compute_dtype=compute,
            out={"dq": _dense(grads["dq"], packed)[:, :, rows]} if "dq" in want else None)
        for n, total in sums.items():
            total += getattr(made, n)
    for n, total in sums.items():
        _dense(grads[n], packed).copy_(total)
    return NsaGrads(*(grads.get(n) for n in NsaGrads._fields))


# ---- the choice


def choose_blocks(importance: Tensor, out: Tensor, *, block_size: int, n_init: int, n_local: int, seqlen_kv: int,
                  cu: Tensor | None = None) -> None:
    """Fill `out` with each row's blocks; see `frost.Graph.nsa_topk`."""
    score, chosen = _dense(importance, cu is not None), _dense(out, cu is not None)
    rows, blocks, wanted = score.shape[2], score.shape[3], chosen.shape[3]
    places = Places.dense(rows, seqlen_kv, out.device) if cu is None else Places.packed(cu, rows)
    m = torch.arange(blocks, device=out.device)
    own = torch.where(places.row_seq < 0, -1, places.row_pos.div(block_size, rounding_mode="floor"))[:, None]
    seen = (m <= own) & (own >= 0)
    forced = seen & ((m < n_init) | (m > own - n_local))
    taken = min(wanted, blocks)
    for b in range(score.shape[0]):
        for h in range(score.shape[1]):
            s = score[b, h].double()
            rank = torch.where(torch.isnan(s), -math.inf, s)
            # Three keys, the most significant sorted last: number (already in order), importance, class.
            order = torch.sort(rank, dim=-1, descending=True, stable=True).indices
            kind = torch.where(forced, 0, torch.where(seen, 1, 2)).gather(-1, order)
            order = order.gather(-1, torch.sort(kind, dim=-1, stable=True).indices)[:, :taken]
            picked = torch.where(seen.gather(-1, order), order, blocks)
            picked = torch.sort(picked, dim=-1).values
            chosen[b, h, :, :taken] = torch.where(picked == blocks, -1, picked).to(out.dtype)
            chosen[b, h, :, taken:] = -1
