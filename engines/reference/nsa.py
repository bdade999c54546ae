"""Native sparse attention in plain torch: selection, forward and backward, as masked attention.

A row's block entries become a boolean row over blocks, which becomes a mask over keys; the attention itself is
`sdpa_forward` and `sdpa_backward`, one K/V head and a bounded number of rows at a time. Nothing is read on the host.

    block entries e of row i:  a set; e is a block iff 0 <= e < ceil(keys / block_size), and its position is below the
    row's count where counts are given;  row i sees key j iff j's block is in the set and j <= i + off
    off = Tk - Tq (queries stand at the end of the keys); packed: positions and block numbers from 0 in each sequence
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .sdpa import compute_dtype_for, sdpa_backward, sdpa_forward

__all__ = ["NsaGrads", "Places", "selection_backward", "selection_forward", "selection_forward_reference", "selection_mask"]

MASK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Upper bound of one boolean mask tile."""


class NsaGrads(NamedTuple):
    """Gradients, each in its operand's shape and dtype; None where it was not asked for."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None


class Places(NamedTuple):
    """Where tokens stand: sequence number and position of every row and every key; int64, [rows] and [keys].

    Sequence -1 is padding (outside the offsets). `length`: keys of each row's sequence."""

    row_seq: Tensor
    row_pos: Tensor
    key_seq: Tensor
    key_pos: Tensor
    length: Tensor

    @staticmethod
    def dense(rows: int, keys: int, device: torch.device) -> Places:
        i, j = torch.arange(rows, device=device), torch.arange(keys, device=device)
        zero = torch.zeros_like
        return Places(zero(i), i + (keys - rows), zero(j), j, torch.full_like(i, keys))

    @staticmethod
    def packed(cu: Tensor, total: int) -> Places:
        """From offsets [B + 1] on any device; wrong offsets give wrong places, never one outside the buffers."""
        cu = cu.to(torch.int64).clamp(0, total)
        token = torch.arange(total, device=cu.device)
        seq = torch.searchsorted(cu, token, right=True) - 1
        seq = torch.where(seq >= cu.numel() - 1, -1, seq)
        at = seq.clamp(min=0)
        start, end = cu[at], cu[(at + 1).clamp(max=cu.numel() - 1)]
        pos = token - start
        return Places(seq, pos, seq, pos, torch.where(seq < 0, 0, end - start))

    def rows(self, part: slice) -> Places:
        return Places(self.row_seq[part], self.row_pos[part], self.key_seq, self.key_pos, self.length[part])


def selection_mask(indices: Tensor, counts: Tensor | None, places: Places, block_size: int) -> Tensor:
    """Which keys each row sees: indices [.., rows, S], counts [.., rows] -> boolean [.., rows, keys]."""
    keys = places.key_pos.numel()
    blocks = -(-keys // block_size)
    own = -(-places.length // block_size)[:, None]  # blocks in the row's own sequence
    entry = indices.to(torch.int64)
    real = (entry >= 0) & (entry < own)
    if counts is not None:
        real = real & (torch.arange(indices.shape[-1], device=indices.device) < counts[..., None])
    chosen = torch.zeros(*indices.shape[:-1], blocks + 1, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, torch.where(real, entry, blocks), True)
    chosen[..., blocks] = False
    seen = chosen[..., places.key_pos.div(block_size, rounding_mode="floor")]
    causal = places.key_pos <= places.row_pos[:, None]
    same = (places.key_seq == places.row_seq[:, None]) & (places.row_seq >= 0)[:, None]
    return seen & causal & same


class _Case:
    """One call as dense [B, H, T, ..] views, cut into (batch, K/V head, rows)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, counts: Tensor | None, cu: Tensor | None,
                 block_size: int) -> None:
        self.is_packed, self.block_size = cu is not None, block_size
        self.q, self.k, self.v = self.view(q), self.view(k), self.view(v)
        self.indices = self.view(indices)
        self.counts = None if counts is None else self.view(counts)
        self.hk, self.group = self.k.shape[1], self.q.shape[1] // max(1, self.k.shape[1])
        rows, keys = self.q.shape[2], self.k.shape[2]
        self.places = Places.dense(rows, keys, q.device) if cu is None else Places.packed(cu, rows)

    def view(self, x: Tensor) -> Tensor:
        """[B, H, T, ..] of either layout."""
        return x.transpose(0, 1)[None] if self.is_packed else x

    def parts(self) -> Iterator[tuple[int, int, slice, Tensor]]:
        """(batch, K/V head, rows, mask [1, 1, rows, keys])."""
        rows, keys = self.q.shape[2], self.k.shape[2]
        step = max(1, MASK_BYTES[self.q.device.type] // max(1, keys))
        for b in range(self.q.shape[0]):
            for h in range(self.hk):
                for start in range(0, rows, step):
                    part = slice(start, min(rows, start + step))
                    counts = None if self.counts is None else self.counts[b, h, part]
                    mask = selection_mask(self.indices[b, h, part], counts, self.places.rows(part), self.block_size)
                    yield b, h, part, mask[None, None]

    def heads(self, h: int) -> slice:
        """The query heads of a K/V head."""
        return slice(h * self.group, (h + 1) * self.group)


def selection_forward(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, *, block_counts: Tensor | None = None,
    scale: float | None = None, cu_seqlens: Tensor | None = None, out: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """(o, lse) of selection attention; shapes as in `frost.Graph.nsa_selection`, written into `out` where given."""
    case = _Case(q, k, v, block_indices, block_counts, cu_seqlens, block_size)
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = q.new_empty(*q.shape[:-1], v.shape[-1]) if out[0] is None else out[0]
    lse = torch.empty(q.shape[:-1], dtype=stats, device=q.device) if out[1] is None else out[1]
    o4, lse3 = case.view(o), case.view(lse)
    for b, h, rows, mask in case.parts():
        at = (slice(b, b + 1), case.heads(h), rows)
        one = (slice(b, b + 1), slice(h, h + 1))
        sdpa_forward(case.q[at], case.k[one], case.v[one], mask=mask, scale=_scale(q, scale), out=(o4[at], lse3[at]))
    return o, lse


def selection_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, lse: Tensor, block_indices: Tensor, block_size: int, *,
    block_counts: Tensor | None = None, scale: float | None = None, cu_seqlens: Tensor | None = None,
    dlse: Tensor | None = None, want: tuple[str, ...] = ("dq", "dk", "dv"), out: Mapping[str, Tensor] | None = None,
) -> NsaGrads:
    """Gradients of `selection_forward` at `do` and `dlse`, from its saved o and lse. Deterministic."""
    case = _Case(q, k, v, block_indices, block_counts, cu_seqlens, block_size)
    compute = compute_dtype_for(q)
    given = out or {}
    grads = {n: given[n] if n in given else torch.empty(x.shape, dtype=x.dtype, device=x.device)
             for n, x in (("dq", q), ("dk", k), ("dv", v)) if n in want}
    sums = {n: torch.zeros(x.shape, dtype=compute, device=x.device)
            for n, x in (("dk", case.k), ("dv", case.v)) if n in want}
    saved = [case.view(x) for x in (o, do, lse)]
    dlse3 = None if dlse is None else case.view(dlse)
    dq4 = case.view(grads["dq"]) if "dq" in want else None
    for b, h, rows, mask in case.parts():
        at, one = (slice(b, b + 1), case.heads(h), rows), (slice(b, b + 1), slice(h, h + 1))
        # Operands in the compute dtype give partial sums of keys in it; o keeps its own, which says how it was rounded.
        made = sdpa_backward(
            case.q[at], case.k[one].to(compute), case.v[one].to(compute), *(x[at] for x in saved),
            dlse=None if dlse3 is None else dlse3[at], mask=mask, scale=_scale(q, scale), want=want,
            compute_dtype=compute, out=None if dq4 is None else {"dq": dq4[at]})
        for n, total in sums.items():
            total[one] += getattr(made, n)
    for n, total in sums.items():
        case.view(grads[n]).copy_(total)
    return NsaGrads(*(grads.get(n) for n in NsaGrads._fields))


def _scale(q: Tensor, scale: float | None) -> float:
    return max(1, q.shape[-1]) ** -0.5 if scale is None else float(scale)


def selection_forward_reference(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, block_size: int, *, block_counts: Tensor | None = None,
    scale: float | None = None, cu_seqlens: Tensor | None = None, return_lse: bool = False,
) -> Any:
    """Selection attention as one masked softmax, differentiable by torch's autograd: the specification, in any dtype.

    Shapes as in `frost.nsa.selection_attn`; holds whole score matrices. fp16 and bf16 are computed in fp32. Keys that no
    row sees do not take part: what they hold, NaN included, reaches neither results nor gradients. Returns o, or
    (o, lse) with `return_lse`.
    """
    case = _Case(q, k, v, block_indices, block_counts, cu_seqlens, block_size)
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keep = selection_mask(case.indices, case.counts, case.places, block_size)  # [B, Hk, rows, keys]
    used = keep.any(2)[..., None]
    keys, values = (torch.where(used, x.to(compute), 0.0) for x in (case.k, case.v))
    queries = torch.where(keep.any(3)[..., None].repeat_interleave(case.group, 1), case.q.to(compute), 0.0)
    keep = keep.repeat_interleave(case.group, 1)
    keys, values = (x.repeat_interleave(case.group, 1) for x in (keys, values))
    scores = queries @ keys.mT * _scale(q, scale)
    some = keep.any(-1, keepdim=True)
    masked = torch.where(keep, scores, -math.inf)
    lse = torch.logsumexp(torch.where(some, masked, 0.0), -1, keepdim=True) if keep.shape[-1] else masked.new_zeros(
        *masked.shape[:-1], 1)
    p = torch.where(keep, torch.exp(torch.where(keep, scores, lse) - lse), 0.0)
    o = (p @ values).to(q.dtype)
    lse = torch.where(some, lse, -math.inf)[..., 0]
    if case.is_packed:
        o, lse = o[0].transpose(0, 1), lse[0].transpose(0, 1)
    return (o, lse) if return_lse else o
