"""One attention call, cut into runs of the dense algorithm.

`AttentionCase` shows dense and packed operands alike as [B, Hk, G, S, D] views and checks the options; `parts` yields the
whole batch at once, or one padded or packed sequence at a time where lengths may be read; `tiles` bounds the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .pairs import DensePairs, Options, PackedPairs, Tile, split_heads
from .values import check_values

__all__ = ["AttentionCase", "AttentionPart", "tiles"]

SCORE_TILE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Upper bound of one score tile; a backward holds about five of them at a time. On a CPU a tile that stays in cache
halves the time (8k causal, one core: 1.0 s forward and backward at 4 MiB, 2.6 s at 64 MiB); a GPU wants few launches."""


class AttentionPart(NamedTuple):
    """One run of the dense algorithm: the whole batch, one padded batch entry or one packed sequence."""

    q: Tensor  # [b, Hk, G, Sq, D]
    k: Tensor  # [b, Hk, Sk, D]
    v: Tensor  # [b, Hk, Sk, Dv]
    pairs: DensePairs | PackedPairs
    rows: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    of_bias: Callable[[Tensor], Tensor]


class AttentionCase:
    """One call, seen as [B, Hk, G, S, D] views; `parts` cuts it into runs of the dense algorithm."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, opts: Options, given: Mapping[str, Any]) -> None:
        self.opts = opts
        self.cu_q, self.cu_kv = given["cu_seqlens_q"], given["cu_seqlens_kv"]
        self.len_q, self.len_kv = given["seq_len_q"], given["seq_len_kv"]
        self.packed = self.cu_q is not None
        self.hk, self.group = k.shape[1], q.shape[1] // max(1, k.shape[1])
        self.device = q.device
        self.q, self.k, self.v = self.rows_view(q), self.keys_view(k), self.keys_view(v)
        self.bias, self.mask = (self.pair_view(given[name]) for name in ("bias", "mask"))
        sink = given["sink"]
        self.sink = None if sink is None else sink.unflatten(0, (self.hk, self.group))
        free = q.device.type == "cpu"
        self.host_reads = free if given["host_reads"] is None else given["host_reads"]

    @staticmethod
    def make(q: Tensor, k: Tensor, v: Tensor, given: Mapping[str, Any]) -> AttentionCase:
        case = AttentionCase(q, k, v, _options(q, given), given)
        if case.host_reads:
            case.check()
        return case

    def check(self) -> None:
        pairs = [(name, x.shape[3], x.shape[4]) for name, x in (("bias", self.bias), ("mask", self.mask)) if x is not None]
        check_values(
            cu_seqlens_q=self.cu_q, cu_seqlens_kv=self.cu_kv, seq_len_q=self.len_q, seq_len_kv=self.len_kv,
            extent_q=self.q.shape[3], extent_kv=self.k.shape[2], pairs=pairs if self.packed else ())

    @property
    def has_padding(self) -> bool:
        return any(x is not None for x in (self.cu_q, self.len_q, self.len_kv))

    def rows_view(self, x: Tensor) -> Tensor:
        """[B, Hq, Sq, ..] or [T, Hq, ..] as [B, Hk, G, S, ..]."""
        x = x.transpose(0, 1)[None] if self.packed else x
        return x.unflatten(1, (self.hk, self.group))

    def keys_view(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)[None] if self.packed else x

    def pair_view(self, x: Tensor | None) -> Tensor | None:
        """A 2- to 4-dim bias or mask as [B|1, Hk|1, G|1, Sq|1, Sk|1]."""
        if x is None:
            return None
        return split_heads(x[(None,) * (4 - x.dim())], self.hk, self.group)

    def parts(self) -> Iterator[AttentionPart]:
        if self.has_padding and self.host_reads:
            yield from self._sequences()
            return
        sq, sk = self.q.shape[3], self.k.shape[2]
        pairs: DensePairs | PackedPairs
        options: dict[str, Any] = {
            "bias": self.bias, "mask": self.mask, "lengths_q": self.len_q, "lengths_kv": self.len_kv}
        if self.packed:
            pairs = PackedPairs(self.opts, sq, sk, self.cu_q, self.cu_kv, **options)
        else:
            pairs = DensePairs(self.opts, sq, sk, device=self.device, **options)
        yield AttentionPart(self.q, self.k, self.v, pairs, _same, _same, _same)

    def _sequences(self) -> Iterator[AttentionPart]:
        """Padding cut off by slicing, one sequence at a time: exact and fast where reading lengths is free."""
        ends = zip(_spans(self.cu_q, self.len_q, self.q.shape[0], self.q.shape[3]),
                   _spans(self.cu_kv, self.len_kv, self.k.shape[0], self.k.shape[2]), strict=True)
        for index, (span_q, span_kv) in enumerate(ends):
            batch = slice(0, 1) if self.packed else slice(index, index + 1)
            bias, mask = (None if x is None else _sequence_part(x, index, span_q, span_kv, self.packed)
                          for x in (self.bias, self.mask))
            pairs = DensePairs(self.opts, _len(span_q), _len(span_kv), bias=bias, mask=mask, device=self.device)

            def rows(x: Tensor, b: slice = batch, s: slice = span_q) -> Tensor:
                return x[b, :, :, s]

            def keys(x: Tensor, b: slice = batch, s: slice = span_kv) -> Tensor:
                return x[b, :, s]

            def of_bias(x: Tensor, n: int = index, a: slice = span_q, b: slice = span_kv) -> Tensor:
                return _sequence_part(x, n, a, b, self.packed)

            yield AttentionPart(rows(self.q), keys(self.k), keys(self.v), pairs, rows, keys, of_bias)


def _same(x: Tensor) -> Tensor:
    return x


def _len(s: slice) -> int:
    return s.stop - s.start


def _spans(cu: Tensor | None, lengths: Tensor | None, batch: int, extent: int) -> list[slice]:
    """Where each sequence lies along the token axis, read on the host."""
    if cu is None:
        return [slice(0, n) for n in ([extent] * batch if lengths is None else lengths.tolist())]
    bounds = cu.tolist()
    used = [math.inf] * (len(bounds) - 1) if lengths is None else lengths.tolist()
    return [slice(lo, int(min(hi, lo + n))) for lo, hi, n in zip(bounds[:-1], bounds[1:], used, strict=True)]


def _sequence_part(x: Tensor, index: int, span_q: slice, span_kv: slice, packed: bool) -> Tensor:
    """A bias-like tensor for one sequence; with packing its axes count positions of the sequence."""
    if x.shape[0] != 1:
        x = x[index:index + 1]
    for axis, span in ((3, span_q), (4, span_kv)):
        if x.shape[axis] != 1:
            x = x.narrow(axis, 0, _len(span))
    return x


def _options(q: Tensor, given: Mapping[str, Any]) -> Options:
    left, right = given["window"]
    if given["causal"]:
        if right not in (None, 0):
            raise ValueError(f"window: given a right bound of {right} with causal=True, expected None or 0")
        right = 0
    for name, width in (("left", left), ("right", right)):
        if width is not None and width < 0:
            raise ValueError(f"window: given a {name} bound of {width}, expected None (unbounded) or at least 0")
    if (given["cu_seqlens_q"] is None) != (given["cu_seqlens_kv"] is None):
        raise ValueError("cu_seqlens: given only one of cu_seqlens_q and cu_seqlens_kv, expected both or none")
    scale = given["scale"]
    # A head_dim of 0 has no scores to scale; any finite value serves.
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else float(scale)
    return Options(scale, left, right, bool(given["align_bottom_right"]), given["softcap"] or None)


def tiles(part: AttentionPart, compute: torch.dtype) -> Iterator[Tile]:
    """Cover the scores with tiles of at most SCORE_TILE_BYTES: rows first, then kv heads, then batches."""
    batch, hk, group, sq = part.q.shape[:4]
    limit = SCORE_TILE_BYTES[part.q.device.type] // compute.itemsize
    per_row = max(1, group * part.k.shape[2])
    m = max(1, min(sq, limit // per_row))
    h = max(1, min(hk, limit // (per_row * m))) if m == sq else 1
    b = max(1, min(batch, limit // (per_row * m * h))) if h == hk and m == sq else 1
    for b0 in range(0, batch, b):
        for h0 in range(0, hk, h):
            for i0 in range(0, sq, m):
                rows = slice(i0, min(sq, i0 + m))
                yield Tile(slice(b0, min(batch, b0 + b)), slice(h0, min(hk, h0 + h)), rows, part.pairs.key_range(rows))
