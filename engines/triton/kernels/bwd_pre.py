"""Backward, step 1: row statistics.

A program owns BLOCK_M query rows of one head of one sequence and reads o and dO of these rows once.
It writes fp32 pairs (lse, delta) to the workspace, contiguous [B, Hq, Sq, 2] (packed [Hq, T, 2]):
  delta = rowsum(dO * o) - dLSE, so that dS = P * (dP - delta);
  lse   = the forward's LSE as the other kernels want it: times log2(e) where they work in the exp2 domain
          (FOLD), and +inf in rows that must contribute nothing (padding, lse = -inf): P is exactly 0 there.
delta is 0 in these rows whatever dO and dLSE hold.  Where o is exactly 0, dO is not multiplied in, since an
unseen dO may be NaN.  With HAS_DSINK it also writes the sum over its rows of exp(sink - lse) * -delta, one
number per program, for ``bwd_reduce``.  Everything lives in registers, two [BLOCK_M, DV_PAD] tiles; the
kernel is bound by memory.
"""

import triton
import triton.language as tl

from .bwd_common import load_tile, own_tile, tile_offsets
from .common import LOG2E, linear_pid


@triton.jit
def bwd_pre(o_ptr, do_ptr, lse_ptr, dlse_ptr, sink_ptr, out_stats_ptr, out_sink_ptr, len_q_ptr,
            cu_q_ptr, stride_ob, stride_oh, stride_os, stride_od, stride_dob, stride_doh, stride_dos,
            stride_dod, stride_lse_b, stride_lse_h, stride_lse_s, stride_dlse_b, stride_dlse_h, stride_dlse_s,
            stride_sink, stride_len_q, stride_cu_q, n_seqs, heads_q, sq_max, dv, n_tiles, n_partials,
            n_programs, scale,
            BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
            PACKED: tl.constexpr, HAS_LEN_Q: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_DSINK: tl.constexpr,
            FOLD: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    slot = pid % n_tiles
    head = pid // n_tiles % heads_q
    index = pid // n_tiles // heads_q * n_tiles + slot
    batch, _sequence, start, extent, length, _other_start, _other_length, tile = own_tile(
        index, n_tiles, cu_q_ptr, len_q_ptr, cu_q_ptr, len_q_ptr, stride_cu_q, stride_len_q, stride_cu_q,
        stride_len_q, n_seqs, sq_max, sq_max, BLOCK_M, PACKED, HAS_LEN_Q, HAS_LEN_Q)

    m0 = tile * BLOCK_M
    b64 = batch.to(tl.int64)
    h64 = head.to(tl.int64)
    token0 = (start + m0).to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    cols = tl.arange(0, DV_PAD)
    valid = m0 + rows < length

    lse_at = lse_ptr + (b64 * stride_lse_b + h64 * stride_lse_h + token0 * stride_lse_s)
    stat = tl.load(lse_at + rows.to(tl.int64) * stride_lse_s, mask=valid, other=float("-inf")).to(tl.float32)
    valid = valid & (stat != float("-inf"))

    o_at = o_ptr + (b64 * stride_ob + h64 * stride_oh + token0 * stride_os)
    do_at = do_ptr + (b64 * stride_dob + h64 * stride_doh + token0 * stride_dos)
    o_tile = load_tile(o_at + tile_offsets(rows, cols, stride_os, stride_od, WIDE), valid, cols, dv, True,
                       EVEN_DV)
    do_tile = load_tile(do_at + tile_offsets(rows, cols, stride_dos, stride_dod, WIDE), valid, cols, dv, True,
                        EVEN_DV)
    o_tile = o_tile.to(tl.float32)
    delta = tl.sum(tl.where(o_tile == 0.0, 0.0, o_tile * do_tile.to(tl.float32)), 1)
    if HAS_DLSE:
        dlse_at = dlse_ptr + (b64 * stride_dlse_b + h64 * stride_dlse_h + token0 * stride_dlse_s)
        delta -= tl.load(dlse_at + rows.to(tl.int64) * stride_dlse_s, mask=valid, other=0.0).to(tl.float32)
    delta = tl.where(valid, delta, 0.0)

    if FOLD:
        # The exact ratio of the two score factors (scale * log2(e) rounded to fp32, and scale): with it the
        # rounding of the folded factor cancels in s - lse, however large both are.
        folded = scale * LOG2E
        divisor = tl.where(scale == 0.0, 1.0, scale).to(tl.float64)
        ratio = tl.where(scale == 0.0, LOG2E, folded.to(tl.float64) / divisor)
        wanted = (stat.to(tl.float64) * ratio).to(tl.float32)
    else:
        wanted = stat
    row_base = (b64 * heads_q + h64) * sq_max + token0
    inside = m0 + rows < extent
    pairs = out_stats_ptr + (row_base + rows) * 2
    tl.store(pairs, tl.where(valid, wanted, float("inf")), mask=inside)
    tl.store(pairs + 1, delta, mask=inside)

    if HAS_DSINK:
        sink_h = tl.load(sink_ptr + h64 * stride_sink).to(tl.float32)
        p_sink = tl.exp2((sink_h - tl.where(valid, stat, 0.0)) * LOG2E)
        p_sink = tl.where(stat == float("inf"), tl.where(sink_h == float("inf"), 1.0, 0.0), p_sink)
        share = tl.where(valid, -p_sink * delta, 0.0)
        tl.store(out_sink_ptr + h64 * n_partials + index, tl.sum(share, 0))
