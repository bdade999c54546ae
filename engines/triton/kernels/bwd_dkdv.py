"""Backward, step 2: dK and dV, keys stationary.

A program owns BLOCK_N keys of one K/V head of one sequence.  K and V of these keys are loaded once; dK and dV
accumulate in fp32 registers and are written once, so no result depends on an order between programs.
It makes two passes over the query heads of the group, in a fixed order: over the row tiles that need a mask
(band edges, the tail), then over the tiles that every key sees, without any predicate.  (Two passes, not two
loops per head: what one loop keeps in registers must not live through the other.)
Scores are kept transposed, [BLOCK_N, BLOCK_M]: P^T and dS^T are left operands out of registers.
  S^T = K Q^T;  P^T = exp(S^T - lse);  dV += P^T dO;  dP^T = V dO^T;  dS^T = P^T (dP^T - delta);  dK += dS^T Q
Q, dO and ``bwd_pre``'s (lse, delta) pairs stream through STAGES buffers of shared memory.
In masked tiles P and dS are 0 where not visible, and rows of Q and dO that see no key of the tile are not
read: 0 * NaN would otherwise reach dK and dV.  Padding keys get zeros.  A mask or bias masks every tile.
"""

import triton
import triton.language as tl

from .bwd_common import (
    load_tile,
    own_tile,
    probabilities,
    row_statistics,
    rows_that_see,
    score_factor,
    store_tile,
    tile_offsets,
)
from .common import band_mask, band_rows, dot, dot_add, linear_pid, score_tile


@triton.jit
def dkdv_step(dk_acc, dv_acc, k_tile, v_tile, q_at, do_at, stats_at, bias_at, mask_at, q_offs,
              do_offs, stride_qs, stride_dos, stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k,
              bias_rows, bias_cols, mask_rows, mask_cols, m0, n0, sq, sk, off, window_left, window_right, d,
              dv, factor, softcap, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
              WIDE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
              HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FOLD: tl.constexpr, WANT_DK: tl.constexpr,
              WANT_DV: tl.constexpr, DOT_FP32: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    seen = m0 + rows < sq
    if MASKED:
        seen = rows_that_see(m0 + rows, n0, tl.minimum(n0 + BLOCK_N, sk), sq, off, window_left, window_right,
                             HAS_LEFT, HAS_RIGHT)
    q_tile = load_tile(q_at + m0.to(tl.int64) * stride_qs + q_offs, seen, d_cols, d, MASKED, EVEN_D)
    raw = dot(k_tile, tl.trans(q_tile), DOT_FP32)
    lse, delta = row_statistics(stats_at, m0 + rows, seen, MASKED)
    keys = tl.arange(0, BLOCK_N)
    bias = raw
    if MASKED:
        visible = band_mask((m0 + rows)[None, :], (n0 + keys)[:, None], sk, off, window_left, window_right,
                            HAS_LEFT, HAS_RIGHT)
        visible = visible & seen[None, :]
        if HAS_MASK:
            keep = score_tile(mask_at, m0, n0, rows[None, :], keys[:, None], stride_mask_q, stride_mask_k,
                              mask_rows, mask_cols, 0, WIDE)
            visible = visible & (keep != 0)
        if HAS_BIAS:
            bias = score_tile(bias_at, m0, n0, rows[None, :], keys[:, None], stride_bias_q, stride_bias_k,
                              bias_rows, bias_cols, 0.0, WIDE).to(tl.float32)
            visible = visible & (bias != float("-inf"))
    p, slope = probabilities(raw, lse[None, :], bias, factor, softcap, HAS_BIAS, HAS_SOFTCAP, FOLD)
    do_tile = load_tile(do_at + m0.to(tl.int64) * stride_dos + do_offs, seen, dv_cols, dv, MASKED, EVEN_DV)
    if MASKED:
        p = tl.where(visible, p, 0.0)
        if HAS_MASK or HAS_BIAS:
            used = tl.max(visible.to(tl.int32), 0) > 0
            q_tile = tl.where(used[:, None], q_tile, 0.0)
            do_tile = tl.where(used[:, None], do_tile, 0.0)
    if WANT_DV:
        dv_acc = dot_add(p.to(do_tile.dtype), do_tile, dv_acc, DOT_FP32)
    if WANT_DK:
        dp = dot(v_tile, tl.trans(do_tile), DOT_FP32)
        ds = p * (dp - delta[None, :])
        if HAS_SOFTCAP:
            ds = ds * slope
        if MASKED:
            # P is exactly 0 where not visible, but dP may be NaN there.
            ds = tl.where(p == 0.0, 0.0, ds)
        dk_acc = dot_add(ds.to(q_tile.dtype), q_tile, dk_acc, DOT_FP32)
    return dk_acc, dv_acc


@triton.jit
def dkdv_pass(dk_acc, dv_acc, k_tile, v_tile, q_ptr, do_ptr, stats_ptr, bias_ptr, mask_ptr, stride_qb,
              stride_qh, stride_qs, stride_qd, stride_dob, stride_doh, stride_dos, stride_dod, stride_bias_b,
              stride_bias_h, stride_bias_q, stride_bias_k, stride_mask_b, stride_mask_h, stride_mask_q,
              stride_mask_k, bias_rows, bias_cols, mask_rows, mask_cols, batch, sequence, head_kv, group,
              heads_q, token_q, sq_max, lo, n_before, skipped, n_tiles, n0, sq, sk, off, window_left,
              window_right, d, dv, factor, softcap, STAGES: tl.constexpr, MASKED: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
              EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr, HAS_LEFT: tl.constexpr,
              HAS_RIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
              HAS_SOFTCAP: tl.constexpr, FOLD: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
              DOT_FP32: tl.constexpr):
    """Adds n_tiles row tiles of every query head of the group: n_before from row ``lo`` on, others after a
    gap of ``skipped`` rows.  batch, sequence, head_kv and token_q are int64."""
    rows = tl.arange(0, BLOCK_M)
    q_offs = tile_offsets(rows, tl.arange(0, D_PAD), stride_qs, stride_qd, WIDE)
    do_offs = tile_offsets(rows, tl.arange(0, DV_PAD), stride_dos, stride_dod, WIDE)
    for g in range(group):
        head = head_kv * group + g
        q_at = q_ptr + (batch * stride_qb + head * stride_qh + token_q * stride_qs)
        do_at = do_ptr + (batch * stride_dob + head * stride_doh + token_q * stride_dos)
        stats_at = stats_ptr + ((batch * heads_q + head) * sq_max + token_q) * 2
        bias_at = bias_ptr
        mask_at = mask_ptr
        if HAS_BIAS:
            bias_at = bias_ptr + (sequence * stride_bias_b + head * stride_bias_h)
        if HAS_MASK:
            mask_at = mask_ptr + (sequence * stride_mask_b + head * stride_mask_h)
        for t in tl.range(0, n_tiles, num_stages=STAGES):
            m0 = lo + t * BLOCK_M
            if MASKED:
                m0 = tl.where(t < n_before, m0, m0 + skipped)
            dk_acc, dv_acc = dkdv_step(
                dk_acc, dv_acc, k_tile, v_tile, q_at, do_at, stats_at, bias_at, mask_at, q_offs, do_offs,
                stride_qs, stride_dos, stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k, bias_rows,
                bias_cols, mask_rows, mask_cols, m0, n0, sq, sk, off, window_left, window_right, d, dv,
                factor, softcap, MASKED, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, WIDE, HAS_LEFT,
                HAS_RIGHT, HAS_BIAS, HAS_MASK, HAS_SOFTCAP, FOLD, WANT_DK, WANT_DV, DOT_FP32)
    return dk_acc, dv_acc


@triton.jit
def bwd_dkdv(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dk_ptr, dv_ptr, bias_ptr, mask_ptr, len_q_ptr,
             len_kv_ptr, cu_q_ptr, cu_kv_ptr, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb,
             stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_dob,
             stride_doh, stride_dos, stride_dod, stride_dkb, stride_dkh, stride_dks, stride_dkd, stride_dvb,
             stride_dvh, stride_dvs, stride_dvd, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
             stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_k, stride_len_q, stride_len_kv,
             stride_cu_q, stride_cu_kv, n_seqs, heads_q, group, sq_max, sk_max, d, dv, window_left,
             window_right, align_br, bias_rows, bias_cols, mask_rows, mask_cols, n_tiles, n_programs, scale,
             softcap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, D_PAD: tl.constexpr,
             DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
             PACKED: tl.constexpr, HAS_LEN_Q: tl.constexpr, HAS_LEN_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
             HAS_RIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
             HAS_SOFTCAP: tl.constexpr, FOLD: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr,
             DOT_FP32: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    heads_kv = heads_q // group
    slot = pid % n_tiles
    head = pid // n_tiles % heads_kv
    index = pid // n_tiles // heads_kv * n_tiles + slot
    batch, sequence, start_k, extent, len_k, start_q, rows_q, tile = own_tile(
        index, n_tiles, cu_kv_ptr, len_kv_ptr, cu_q_ptr, len_q_ptr, stride_cu_kv, stride_len_kv, stride_cu_q,
        stride_len_q, n_seqs, sk_max, sq_max, BLOCK_N, PACKED, HAS_LEN_KV, HAS_LEN_Q)
    n0 = tile * BLOCK_N
    if n0 >= extent:
        return

    off = align_br * (len_k - rows_q)
    factor = score_factor(scale, FOLD)
    b64 = batch.to(tl.int64)
    s64 = sequence.to(tl.int64)
    h64 = head.to(tl.int64)
    token_k = (start_k + n0).to(tl.int64)
    token_q = start_q.to(tl.int64)
    keys = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    real = n0 + keys < len_k

    k_at = k_ptr + (b64 * stride_kb + h64 * stride_kh + token_k * stride_ks)
    v_at = v_ptr + (b64 * stride_vb + h64 * stride_vh + token_k * stride_vs)
    k_tile = load_tile(k_at + tile_offsets(keys, d_cols, stride_ks, stride_kd, WIDE), real, d_cols, d, True,
                       EVEN_D)
    v_tile = load_tile(v_at + tile_offsets(keys, dv_cols, stride_vs, stride_vd, WIDE), real, dv_cols, dv,
                       True, EVEN_DV)
    # Masked tiles are half as high where registers are short: at head dim 128 accumulators take half of them.
    MASK_M: tl.constexpr = BLOCK_M // 2 if BLOCK_M > 32 and D_PAD + DV_PAD > 128 else BLOCK_M
    lo, full_lo, full_hi, hi, _first, _last = band_rows(n0, rows_q, len_k, off, window_left, window_right,
                                                      BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_MASK or HAS_BIAS:
        full_lo = hi
        full_hi = hi
    n_before = (full_lo - lo) // MASK_M
    n_masked = n_before + (hi - full_hi) // MASK_M

    dk_acc = tl.zeros([BLOCK_N, D_PAD], dtype=tl.float32)
    dv_acc = tl.zeros([BLOCK_N, DV_PAD], dtype=tl.float32)
    dk_acc, dv_acc = dkdv_pass(
        dk_acc, dv_acc, k_tile, v_tile, q_ptr, do_ptr, stats_ptr, bias_ptr, mask_ptr, stride_qb, stride_qh,
        stride_qs, stride_qd, stride_dob, stride_doh, stride_dos, stride_dod, stride_bias_b, stride_bias_h,
        stride_bias_q, stride_bias_k, stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_k, bias_rows,
        bias_cols, mask_rows, mask_cols, b64, s64, h64, group, heads_q, token_q, sq_max, lo, n_before,
        full_hi - full_lo, n_masked, n0, rows_q, len_k, off, window_left, window_right, d, dv, factor,
        softcap, STAGES, True, MASK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, WIDE, HAS_LEFT, HAS_RIGHT,
        HAS_BIAS, HAS_MASK, HAS_SOFTCAP, FOLD, WANT_DK, WANT_DV, DOT_FP32)
    if not (HAS_MASK or HAS_BIAS):
        dk_acc, dv_acc = dkdv_pass(
            dk_acc, dv_acc, k_tile, v_tile, q_ptr, do_ptr, stats_ptr, bias_ptr, mask_ptr, stride_qb,
            stride_qh, stride_qs, stride_qd, stride_dob, stride_doh, stride_dos, stride_dod, stride_bias_b,
            stride_bias_h, stride_bias_q, stride_bias_k, stride_mask_b, stride_mask_h, stride_mask_q,
            stride_mask_k, bias_rows, bias_cols, mask_rows, mask_cols, b64, s64, h64, group, heads_q, token_q,
            sq_max, full_lo, 0, 0, (full_hi - full_lo) // BLOCK_M, n0, rows_q, len_k, off, window_left,
            window_right, d, dv, factor, softcap, STAGES, False, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D,
            EVEN_DV, WIDE, HAS_LEFT, HAS_RIGHT, HAS_BIAS, HAS_MASK, HAS_SOFTCAP, FOLD, WANT_DK, WANT_DV,
            DOT_FP32)

    # Padding keys: whatever accumulated there came from zeroed K and V and means nothing.
    positions = n0 + keys
    if WANT_DK:
        dk_at = dk_ptr + (b64 * stride_dkb + h64 * stride_dkh + token_k * stride_dks)
        dk_acc = tl.where(real[:, None], dk_acc * scale, 0.0)
        store_tile(dk_at + tile_offsets(keys, d_cols, stride_dks, stride_dkd, WIDE), dk_acc, positions,
                   extent, d_cols, d, EVEN_D)
    if WANT_DV:
        dv_at = dv_ptr + (b64 * stride_dvb + h64 * stride_dvh + token_k * stride_dvs)
        dv_acc = tl.where(real[:, None], dv_acc, 0.0)
        store_tile(dv_at + tile_offsets(keys, dv_cols, stride_dvs, stride_dvd, WIDE), dv_acc, positions,
                   extent, dv_cols, dv, EVEN_DV)
