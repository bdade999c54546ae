"""Before and after the Hopper backward's main kernel: row statistics with an empty accumulator, and dQ's last step.

Both are bound by memory and written in ordinary Triton.  The accumulator is fp32, contiguous
[B, Hq, tiles_q * BLOCK_M, D]; the statistics are fp32, contiguous [B, Hq, tiles_q, 2, BLOCK_M], so that one copy
brings a tile's lse and delta.  Rows past the end exist in both: nothing that touches them needs a predicate.
"""

import triton
import triton.language as tl

from ..common import LOG2E


@triton.jit(do_not_specialize=["heads_q", "sq", "tiles_q"])
def bwd_pre_hopper(o_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr, dq_acc_ptr, stride_ob, stride_oh, stride_os,
                   stride_dob, stride_doh, stride_dos, stride_lse_b, stride_lse_h, stride_lse_s, stride_dlse_b,
                   stride_dlse_h, stride_dlse_s, heads_q, sq, tiles_q, scale, BLOCK_M: tl.constexpr,
                   D: tl.constexpr, HAS_DLSE: tl.constexpr):
    """One tile of rows: lse for the exp2 domain (+inf where the row contributes nothing), delta = rowsum(dO * o) -
    dLSE, and zeros in the accumulator."""
    tile = tl.program_id(0) % tiles_q
    pair = tl.program_id(0) // tiles_q
    batch = (pair // heads_q).to(tl.int64)
    head = (pair % heads_q).to(tl.int64)
    in_tile = tl.arange(0, BLOCK_M)
    rows = (tile * BLOCK_M + in_tile).to(tl.int64)
    cols = tl.arange(0, D)
    valid = rows < sq
    lse = tl.load(lse_ptr + batch * stride_lse_b + head * stride_lse_h + rows * stride_lse_s, mask=valid,
                  other=float("-inf")).to(tl.float32)
    valid = valid & (lse != float("-inf"))
    o_tile = tl.load(o_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_os + cols[None, :],
                     mask=valid[:, None], other=0.0).to(tl.float32)
    do_tile = tl.load(do_ptr + batch * stride_dob + head * stride_doh + rows[:, None] * stride_dos + cols[None, :],
                      mask=valid[:, None], other=0.0).to(tl.float32)
    # As in bwd_pre: where o is exactly 0, dO is not multiplied in.
    delta = tl.sum(tl.where(o_tile == 0.0, 0.0, o_tile * do_tile), 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + batch * stride_dlse_b + head * stride_dlse_h + rows * stride_dlse_s, mask=valid,
                         other=0.0).to(tl.float32)
    delta = tl.where(valid, delta, 0.0)
    # The exact ratio of the rounded score factor to the scale: that rounding then cancels in s - lse.
    divisor = tl.where(scale == 0.0, 1.0, scale).to(tl.float64)
    ratio = tl.where(scale == 0.0, LOG2E, (scale * LOG2E).to(tl.float64) / divisor)
    lse2 = (lse.to(tl.float64) * ratio).to(tl.float32)
    at = stats_ptr + (pair.to(tl.int64) * tiles_q + tile) * (2 * BLOCK_M) + in_tile
    tl.store(at, tl.where(valid, lse2, float("inf")))
    tl.store(at + BLOCK_M, delta)
    acc = dq_acc_ptr + (pair.to(tl.int64) * tiles_q + tile) * (BLOCK_M * D)
    tl.store(acc + in_tile[:, None] * D + cols[None, :], tl.zeros([BLOCK_M, D], tl.float32))


@triton.jit(do_not_specialize=["heads_q", "sq", "tiles_q", "rows_pad"])
def dq_cast_hopper(acc_ptr, dq_ptr, stride_b, stride_h, stride_s, heads_q, sq, tiles_q, rows_pad, scale,
                   BLOCK_M: tl.constexpr, D: tl.constexpr):
    """dq = scale * accumulator in dq's type and strides; ``rows_pad`` rows of the accumulator belong to a head."""
    tile = tl.program_id(0) % tiles_q
    pair = tl.program_id(0) // tiles_q
    batch = (pair // heads_q).to(tl.int64)
    head = (pair % heads_q).to(tl.int64)
    rows = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    cols = tl.arange(0, D)
    keep = (rows < sq)[:, None]
    value = tl.load(acc_ptr + (pair.to(tl.int64) * rows_pad + rows[:, None]) * D + cols[None, :], mask=keep, other=0.0)
    at = dq_ptr + batch * stride_b + head * stride_h + rows[:, None] * stride_s + cols[None, :]
    tl.store(at, (value * scale).to(dq_ptr.dtype.element_ty), mask=keep)
