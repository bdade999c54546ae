"""Which (query row, key) pairs see each other, and what is added to their scores.

Two answers to one question. `DensePairs` serves [B, H, S, D] tensors and single sequences cut out of packed ones;
`PackedPairs` serves a whole packed batch at once, mapping tokens to sequences on the device, so that no offset is
ever read by the host. Both work on tiles: a batch slice, a kv-head slice, a row slice and a key slice, with score-like
tensors shaped [b, hk, g, m, n] (g query heads per kv head).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["DensePairs", "Options", "PackedPairs", "Tile", "split_heads"]


@dataclass(frozen=True)
class Options:
    """Attention options after normalisation: `causal` has become `right = 0`, a zero softcap `None`."""

    scale: float
    left: int | None
    right: int | None
    bottom_right: bool
    softcap: float | None

    @property
    def has_band(self) -> bool:
        return self.left is not None or self.right is not None


class Tile(NamedTuple):
    """One block of scores: batches `b`, kv heads `h`, query rows `i`, keys `j`, all as slices with both ends set."""

    b: slice
    h: slice
    i: slice
    j: slice


def split_heads(x: Tensor, kv_heads: int, group: int) -> Tensor:
    """View [.., Hq | 1, S, n] as [.., Hk | 1, G | 1, S, n]: head h belongs to kv head h // G."""
    if x.shape[-3] == 1:
        return x.unsqueeze(-3)
    return x.unflatten(-3, (kv_heads, group))


def _cut(x: Tensor, b: slice, h: slice, i: slice, j: slice) -> Tensor:
    """The part of a broadcastable [B|1, Hk|1, G|1, Sq|1, Sk|1] tensor that a tile touches."""
    every = slice(None)
    picks = (b, h, every, i, j)
    return x[tuple(every if extent == 1 else pick for extent, pick in zip(x.shape, picks, strict=True))]


def _length(s: slice) -> int:
    return s.stop - s.start


def _clamped(lengths: Tensor | None, limit: int) -> Tensor | None:
    return None if lengths is None else lengths.to(torch.int64).clamp(0, limit)


def _band(rel: Tensor, opts: Options, reach: int) -> Tensor:
    """Visibility from `rel` = j - i - off. Widths are clamped to `reach` (no |rel| is larger), so int64 never wraps."""
    seen = rel <= (reach if opts.right is None else min(opts.right, reach))
    return seen if opts.left is None else seen & (rel >= -min(opts.left, reach))


def _all(*parts: Tensor | None) -> Tensor | None:
    out = None
    for part in parts:
        if part is not None:
            out = part if out is None else out & part
    return out


class DensePairs:
    """Pairs of a dense batch. `lengths_q` / `lengths_kv` ([B], any integer dtype) are clamped to the extents."""

    def __init__(
        self,
        opts: Options,
        seqlen_q: int,
        seqlen_kv: int,
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        lengths_q: Tensor | None = None,
        lengths_kv: Tensor | None = None,
        device: torch.device,
    ) -> None:
        self.opts, self.sq, self.sk, self.device = opts, seqlen_q, seqlen_kv, device
        self.bias_, self.mask_ = bias, mask
        self.lq, self.lk = _clamped(lengths_q, seqlen_q), _clamped(lengths_kv, seqlen_kv)
        self.off: int | Tensor = seqlen_kv - seqlen_q if opts.bottom_right else 0
        if opts.bottom_right and (self.lq is not None or self.lk is not None):
            ends_kv = seqlen_kv if self.lk is None else self.lk
            self.off = ends_kv - (seqlen_q if self.lq is None else self.lq)  # type: ignore[operator]

    def key_range(self, i: slice) -> slice:
        """Keys that any row of `i` can see, as far as the host knows: the whole range when offsets are on the device."""
        if not isinstance(self.off, int):
            return slice(0, self.sk)
        lo, hi = 0, self.sk
        if self.opts.left is not None:
            lo = min(self.sk, max(0, i.start + self.off - self.opts.left))
        if self.opts.right is not None:
            hi = min(self.sk, max(lo, i.stop + self.off + self.opts.right))
        return slice(lo, hi)

    def row_valid(self, at: Tile) -> Tensor | None:
        """[b, 1, 1, m]: rows below the query length; None where every row is."""
        if self.lq is None:
            return None
        rows = torch.arange(at.i.start, at.i.stop, device=self.device)
        return (rows < self.lq[at.b, None])[:, None, None, :]

    def bias(self, at: Tile) -> Tensor | None:
        return None if self.bias_ is None else _cut(self.bias_, *at)

    def visible(self, at: Tile) -> Tensor | None:
        """Boolean, broadcastable to [b, hk, g, m, n]; None where everything is visible."""
        cols = torch.arange(at.j.start, at.j.stop, device=self.device)
        valid = self.row_valid(at)
        rows_seen = None if valid is None else valid[..., None]
        cols_seen = None if self.lk is None else (cols < self.lk[at.b, None])[:, None, None, None, :]
        mask = None if self.mask_ is None else _cut(self.mask_, *at)
        return _all(self._band_at(at, cols), rows_seen, cols_seen, mask)

    def _band_at(self, at: Tile, cols: Tensor) -> Tensor | None:
        if not self.opts.has_band or self._inside_band(at):
            return None
        rows = torch.arange(at.i.start, at.i.stop, device=self.device)
        rel = (cols[None, :] - rows[:, None])[None, None, None]
        off = self.off if isinstance(self.off, int) else self.off[at.b, None, None, None, None]
        return _band(rel - off, self.opts, 2 * (self.sq + self.sk))

    def _inside_band(self, at: Tile) -> bool:
        if not isinstance(self.off, int):
            return False
        lowest = at.j.start - (at.i.stop - 1) - self.off
        highest = at.j.stop - 1 - at.i.start - self.off
        left, right = self.opts.left, self.opts.right
        return (left is None or lowest >= -left) and (right is None or highest <= right)

    def add_bias_grad(self, total: Tensor, ds: Tensor, at: Tile) -> None:
        """Add dS of a tile to `total`, shaped like the bias: summed over every axis along which the bias is broadcast."""
        _cut(total, *at).add_(_sum_to(ds, total.shape))


def _sum_to(ds: Tensor, extents: torch.Size) -> Tensor:
    axes = [axis for axis, extent in enumerate(extents) if extent == 1 and ds.shape[axis] != 1]
    return ds.sum(axes, keepdim=True) if axes else ds


class PackedPairs:
    """Pairs of a packed batch seen as [1, H, T, D]: two tokens meet when they are of one sequence and in its band.

    Offsets may hold anything: a token belongs to a sequence only if the offsets around it say so, and every index
    made from them is clamped, so wrong values give wrong masks, never a read outside a buffer.
    """

    def __init__(
        self,
        opts: Options,
        total_q: int,
        total_kv: int,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        lengths_q: Tensor | None = None,
        lengths_kv: Tensor | None = None,
    ) -> None:
        self.opts, self.sq, self.sk = opts, total_q, total_kv
        self.bias_, self.mask_ = bias, mask
        self.seq_q, self.pos_q, len_q = _token_map(cu_seqlens_q, total_q, lengths_q)
        self.seq_kv, self.pos_kv, len_kv = _token_map(cu_seqlens_kv, total_kv, lengths_kv)
        self.off_of_row: Tensor | None = None
        if opts.bottom_right and opts.has_band and len_q.numel() and total_q:
            self.off_of_row = (len_kv - len_q)[self.seq_q.clamp(min=0)]

    def key_range(self, i: slice) -> slice:
        return slice(0, self.sk)

    def row_valid(self, at: Tile) -> Tensor | None:
        return (self.seq_q[at.i] >= 0)[None, None, None, :]

    def bias(self, at: Tile) -> Tensor | None:
        return None if self.bias_ is None else self._gather(self.bias_, at)

    def visible(self, at: Tile) -> Tensor | None:
        seq_q, seq_kv = self.seq_q[at.i, None], self.seq_kv[None, at.j]
        seen = (seq_q == seq_kv) & (seq_q >= 0)
        if self.opts.has_band:
            rel = self.pos_kv[None, at.j] - self.pos_q[at.i, None]
            if self.off_of_row is not None:
                rel = rel - self.off_of_row[at.i, None]
            seen = seen & _band(rel, self.opts, 2 * (self.sq + self.sk))
        mask = None if self.mask_ is None else self._gather(self.mask_, at)
        return _all(seen[None, None, None], mask)

    def _indices(self, x: Tensor, at: Tile) -> tuple[Tensor, Tensor, Tensor]:
        """Batch, row and column of `x` ([B|1, Hk|1, G|1, max_q|1, max_kv|1]) for each (row, key) of the tile."""
        batch = self.seq_q[at.i, None].clamp(0, x.shape[0] - 1)
        rows = self.pos_q[at.i, None].clamp(0, x.shape[3] - 1)
        cols = self.pos_kv[None, at.j].clamp(0, x.shape[4] - 1)
        return batch, rows, cols

    def _gather(self, x: Tensor, at: Tile) -> Tensor:
        if x.numel() == 0:  # declared for sequences of no token: nothing can be looked up
            return x.new_full((1, 1, 1, 1, 1), x.dtype is torch.bool)
        batch, rows, cols = self._indices(x, at)
        heads = x if x.shape[1] == 1 else x[:, at.h]
        return heads.permute(0, 3, 4, 1, 2)[batch, rows, cols].permute(2, 3, 0, 1)[None]

    def add_bias_grad(self, total: Tensor, ds: Tensor, at: Tile) -> None:
        """Like `DensePairs.add_bias_grad`. Pairs that do not see each other hold dS = 0, so that where they land is moot."""
        if total.numel() == 0:
            return
        per_head = _sum_to(ds, torch.Size((ds.shape[0], *total.shape[1:3], *ds.shape[3:])))[0]
        batch, rows, cols = self._indices(total, at)
        heads = total if total.shape[1] == 1 else total[:, at.h]
        target = heads.permute(0, 3, 4, 1, 2)
        target.index_put_((batch, rows, cols), per_head.permute(2, 3, 0, 1), accumulate=True)


def _token_map(cu_seqlens: Tensor, total: int, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `total` tokens its sequence (-1: padding) and position in it; and the [B] effective lengths.

    Shapes: cu_seqlens [B + 1]; lengths [B] or None. Nothing is read by the host.
    """
    device = cu_seqlens.device
    cu = cu_seqlens.to(torch.int64).clamp(0, total)
    tokens = torch.arange(total, device=device)
    n_seqs = cu.numel() - 1
    if n_seqs <= 0:
        return torch.full_like(tokens, -1), torch.zeros_like(tokens), cu.new_zeros(0)
    starts, ends = cu[:-1], cu[1:]
    lens = (ends - starts).clamp(min=0)
    if lengths is not None:
        lens = torch.minimum(lens, lengths.to(torch.int64).clamp(min=0))
    # The last sequence that starts at or before the token: zero-length ones before it drop out by themselves.
    seq = (torch.searchsorted(cu.contiguous(), tokens, right=True) - 1).clamp(0, n_seqs - 1)
    pos = tokens - starts[seq]
    inside = (pos >= 0) & (pos < lens[seq])
    return torch.where(inside, seq, -1), torch.where(inside, pos, 0), lens
