"""Device helpers of the backward kernels: a program's tile, loads and stores, P from recomputed scores.

The row statistics come from ``bwd_pre`` as pairs: ``lse`` is +inf in every row that must contribute nothing
(padding, empty rows), so P = exp(s - lse) is exactly 0 there without any row mask, and ``delta`` already
holds rowsum(dO * o) - dLSE.  With FOLD (no softcap, no bias, 16-bit inputs) scores and ``lse`` are in the
exp2 domain and one multiply-add feeds exp2; otherwise they are natural, which costs one more multiply and
keeps P as exact as an fp32 ``lse`` allows.
"""

import triton
import triton.language as tl

from .common import (
    LOG2E,
    clamp_to,
    effective_length,
    packed_slot,
    packed_span,
    softcap_scores,
    softcap_slope,
)


@triton.jit
def own_tile(index, n_slots, own_cu, own_len, other_cu, other_len, own_cu_stride, own_len_stride,
             other_cu_stride, other_len_stride, n_seqs, own_total, other_total, BLOCK: tl.constexpr,
             PACKED: tl.constexpr, HAS_OWN_LEN: tl.constexpr, HAS_OTHER_LEN: tl.constexpr):
    """The tile that slot number ``index`` of the tiled side owns, and the sequence's span on the other side.

    ``index`` counts slots of all batches when dense (batch * n_slots + slot), slots alone when packed.
    Returns (batch, sequence, start, extent, length, other_start, other_length,
             tile): the tile covers positions
    [tile * BLOCK,
     ...) of ``extent`` positions that start at token ``start``; those at or past ``length`` are padding.
    ``batch`` is what multiplies a batch stride (0 when packed),
    ``sequence`` a valid sequence number for bias and mask.
    """
    if PACKED:
        sequence, start, extent, tile = packed_slot(own_cu, own_cu_stride, index, n_seqs, own_total, BLOCK)
        other_start, other_length = packed_span(other_cu, other_cu_stride, sequence, n_seqs, other_total)
        real = (sequence >= 0) & (sequence < n_seqs)
        sequence = tl.minimum(tl.maximum(sequence, 0), n_seqs - 1)
        length = extent
        if HAS_OWN_LEN:
            length = clamp_to(tl.load(own_len + sequence * own_len_stride, mask=real, other=0), extent)
        if HAS_OTHER_LEN:
            other_length = clamp_to(tl.load(other_len + sequence * other_len_stride, mask=real, other=0),
                                    other_length)
        length = tl.where(real, length, 0)
        batch = sequence * 0
    else:
        sequence = index // n_slots
        tile = index % n_slots
        batch = sequence
        start = sequence * 0
        other_start = start
        extent = start + own_total
        length = effective_length(own_len, sequence, own_len_stride, extent, HAS_OWN_LEN)
        other_length = effective_length(other_len, sequence, other_len_stride, other_total, HAS_OTHER_LEN)
    return batch, sequence, start, extent, length, other_start, other_length, tile


@triton.jit
def sequence_span(sequence, cu, lengths, cu_stride, lengths_stride, n_seqs, total, PACKED: tl.constexpr,
                  HAS_LEN: tl.constexpr):
    """(start, length) of one sequence on one side; start is 0 when dense. ``sequence`` has to be valid."""
    start = sequence * 0
    length = start + total
    if PACKED:
        start, length = packed_span(cu, cu_stride, sequence, n_seqs, total)
    length = effective_length(lengths, sequence, lengths_stride, length, HAS_LEN)
    return start, length


@triton.jit
def tile_offsets(rows, cols, row_stride, col_stride, WIDE: tl.constexpr):
    """[rows, cols] element offsets inside an operand tile, 32-bit unless WIDE (strides are int64 then)."""
    if WIDE:
        return rows[:, None].to(tl.int64) * row_stride + cols[None, :].to(tl.int64) * col_stride
    else:
        return rows[:, None] * row_stride + cols[None, :] * col_stride


@triton.jit
def load_tile(pointers, keep_rows, cols, width, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """An operand tile; rows not kept (if ROWS) and columns past ``width`` (unless EVEN) are not read: 0."""
    if ROWS:
        if EVEN:
            return tl.load(pointers, mask=keep_rows[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=keep_rows[:, None] & (cols < width)[None, :], other=0.0)
    else:
        if EVEN:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(cols < width)[None, :], other=0.0)


@triton.jit
def row_statistics(stats_at, positions, keep, MASKED: tl.constexpr):
    """(lse, delta) of the rows at ``positions``, from their pairs; (+inf, 0) where not kept (when MASKED).

    Read as one [rows, 2] tile: two separate rows would be read by every thread in the layout of its scores,
    which
    costs 32 asynchronous copies a thread and step (counted in the sm_90 code) where this costs one.
    """
    side = tl.arange(0, 2)[None, :]
    pointers = stats_at + positions[:, None] * 2 + side
    if MASKED:
        pairs = tl.load(pointers, mask=keep[:, None], other=float("inf"))
        delta = tl.sum(tl.where((side == 1) & keep[:, None], pairs, 0.0), 1)
    else:
        pairs = tl.load(pointers)
        delta = tl.sum(tl.where(side == 1, pairs, 0.0), 1)
    return tl.sum(tl.where(side == 0, pairs, 0.0), 1), delta


@triton.jit
def store_tile(pointers, value, rows, row_limit, cols, width, EVEN: tl.constexpr):
    """Writes a tile's rows below ``row_limit``, in the type of the output."""
    keep = (rows < row_limit)[:, None]
    if not EVEN:
        keep = keep & (cols < width)[None, :]
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=keep)


@triton.jit
def rows_that_see(rows, n0, n1, sq, off, window_left, window_right, HAS_LEFT: tl.constexpr,
                  HAS_RIGHT: tl.constexpr):
    """Rows below ``sq`` whose band holds at least one key of [n0, n1)."""
    keep = (rows < sq) & (rows >= 0) & (n1 > n0)
    if HAS_LEFT:
        keep = keep & (rows + (off - window_left) < n1)
    if HAS_RIGHT:
        keep = keep & (rows + (off + window_right) >= n0)
    return keep


@triton.jit
def keys_seen(cols, m0, m1, sk, off, window_left, window_right, HAS_LEFT: tl.constexpr,
              HAS_RIGHT: tl.constexpr):
    """Keys below ``sk`` that the band of at least one row of [m0, m1) holds."""
    keep = (cols < sk) & (cols >= 0) & (m1 > m0)
    if HAS_LEFT:
        keep = keep & (cols > m0 + (off - window_left) - 1)
    if HAS_RIGHT:
        keep = keep & (cols < m1 + (off + window_right))
    return keep


@triton.jit
def score_factor(scale, FOLD: tl.constexpr):
    """What raw dot products are multiplied by: scale, or scale * log2(e) in the exp2 domain."""
    if FOLD:
        return scale * LOG2E
    else:
        return scale


@triton.jit
def probabilities(raw, lse, bias, factor, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                  FOLD: tl.constexpr):
    """(P, slope) from raw dot products; slope is 1 - tanh**2 of the capped score (a dummy without softcap).

    ``lse`` and ``bias`` broadcast against ``raw``, so the same code serves transposed tiles.
    """
    slope = raw
    if FOLD:
        p = tl.exp2(raw * factor - lse)
    else:
        score = raw * factor
        if HAS_SOFTCAP:
            score = softcap_scores(score, softcap)
            slope = softcap_slope(score, softcap)
        if HAS_BIAS:
            score = score + bias
        p = tl.exp2((score - lse) * LOG2E)
    return p, slope
