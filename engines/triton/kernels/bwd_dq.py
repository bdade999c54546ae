"""Backward, step 3: dQ, queries stationary.

A program owns BLOCK_M rows of one query head of one sequence.  Q and dO of these rows, and their lse and
delta, are loaded once; dQ accumulates in fp32 registers and is written once.
It loops over the key tiles that the rows' band meets: first those that need a mask (band edges, the tail of
the keys), then the tiles seen whole by every row, which carry no predicate:
  S = Q K^T;  P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  dQ += dS K;  at the end dQ *= scale
K and V tiles stream through STAGES buffers of shared memory; P and dS stay in registers.
In masked tiles P and dS are 0 where not visible, and keys that no row of the tile sees are not read
(0 * NaN).  A mask or bias masks every tile.
Row tiles are taken from the last to the first: under a causal mask the longest loops then start first.
"""

import triton
import triton.language as tl

from .bwd_common import (
    keys_seen,
    load_tile,
    own_tile,
    probabilities,
    row_statistics,
    score_factor,
    store_tile,
    tile_offsets,
)
from .common import band_keys, band_mask, dot, dot_add, linear_pid, score_tile


@triton.jit
def dq_step(dq_acc, q_tile, do_tile, lse, delta, k_at, v_at, bias_at, mask_at, k_offs, v_offs,
            stride_ks, stride_vs, stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k, bias_rows,
            bias_cols, mask_rows, mask_cols, m0, n0, sq, sk, off, window_left, window_right, d, dv, factor,
            softcap, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
            DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
            HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
            HAS_SOFTCAP: tl.constexpr, FOLD: tl.constexpr, DOT_FP32: tl.constexpr):
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    seen = n0 + keys < sk
    if MASKED:
        seen = keys_seen(n0 + keys, m0, tl.minimum(m0 + BLOCK_M, sq), sk, off, window_left, window_right,
                         HAS_LEFT, HAS_RIGHT)
    k_tile = load_tile(k_at + n0.to(tl.int64) * stride_ks + k_offs, seen, d_cols, d, MASKED, EVEN_D)
    raw = dot(q_tile, tl.trans(k_tile), DOT_FP32)
    bias = raw
    if MASKED:
        visible = band_mask((m0 + rows)[:, None], (n0 + keys)[None, :], sk, off, window_left, window_right,
                            HAS_LEFT, HAS_RIGHT)
        visible = visible & (m0 + rows < sq)[:, None]
        if HAS_MASK:
            keep = score_tile(mask_at, m0, n0, rows[:, None], keys[None, :], stride_mask_q, stride_mask_k,
                              mask_rows, mask_cols, 0, WIDE)
            visible = visible & (keep != 0)
        if HAS_BIAS:
            bias = score_tile(bias_at, m0, n0, rows[:, None], keys[None, :], stride_bias_q, stride_bias_k,
                              bias_rows, bias_cols, 0.0, WIDE).to(tl.float32)
            visible = visible & (bias != float("-inf"))
        if HAS_MASK or HAS_BIAS:
            used = tl.max(visible.to(tl.int32), 0) > 0
            k_tile = tl.where(used[:, None], k_tile, 0.0)
    p, slope = probabilities(raw, lse[:, None], bias, factor, softcap, HAS_BIAS, HAS_SOFTCAP, FOLD)
    if MASKED:
        p = tl.where(visible, p, 0.0)
    v_tile = load_tile(v_at + n0.to(tl.int64) * stride_vs + v_offs, seen, dv_cols, dv, MASKED, EVEN_DV)
    dp = dot(do_tile, tl.trans(v_tile), DOT_FP32)
    ds = p * (dp - delta[:, None])
    if HAS_SOFTCAP:
        ds = ds * slope
    if MASKED:
        ds = tl.where(p == 0.0, 0.0, ds)
    return dot_add(ds.to(k_tile.dtype), k_tile, dq_acc, DOT_FP32)


@triton.jit
def bwd_dq(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, bias_ptr, mask_ptr, len_q_ptr, len_kv_ptr,
           cu_q_ptr, cu_kv_ptr, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks,
           stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_dob, stride_doh, stride_dos,
           stride_dod, stride_dqb, stride_dqh, stride_dqs, stride_dqd, stride_bias_b, stride_bias_h,
           stride_bias_q, stride_bias_k, stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_k,
           stride_len_q, stride_len_kv, stride_cu_q, stride_cu_kv, n_seqs, heads_q, group, sq_max, sk_max, d,
           dv, window_left, window_right, align_br, bias_rows, bias_cols, mask_rows, mask_cols, n_tiles,
           n_programs, scale, softcap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
           D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
           WIDE: tl.constexpr, PACKED: tl.constexpr,
           HAS_LEN_Q: tl.constexpr, HAS_LEN_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
           HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FOLD: tl.constexpr,
           DOT_FP32: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    slot = n_tiles - 1 - pid % n_tiles
    head = pid // n_tiles % heads_q
    index = pid // n_tiles // heads_q * n_tiles + slot
    batch, sequence, start_q, extent, rows_q, start_k, len_k, tile = own_tile(
        index, n_tiles, cu_q_ptr, len_q_ptr, cu_kv_ptr, len_kv_ptr, stride_cu_q, stride_len_q, stride_cu_kv,
        stride_len_kv, n_seqs, sq_max, sk_max, BLOCK_M, PACKED, HAS_LEN_Q, HAS_LEN_KV)
    m0 = tile * BLOCK_M
    if m0 >= extent:
        return

    off = align_br * (len_k - rows_q)
    factor = score_factor(scale, FOLD)
    b64 = batch.to(tl.int64)
    s64 = sequence.to(tl.int64)
    h64 = head.to(tl.int64)
    hk64 = (head // group).to(tl.int64)
    token_q = (start_q + m0).to(tl.int64)
    token_k = start_k.to(tl.int64)
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    real = m0 + rows < rows_q

    q_at = q_ptr + (b64 * stride_qb + h64 * stride_qh + token_q * stride_qs)
    do_at = do_ptr + (b64 * stride_dob + h64 * stride_doh + token_q * stride_dos)
    stats = (b64 * heads_q + h64) * sq_max + token_q
    q_tile = load_tile(q_at + tile_offsets(rows, d_cols, stride_qs, stride_qd, WIDE), real, d_cols, d, True,
                       EVEN_D)
    do_tile = load_tile(do_at + tile_offsets(rows, dv_cols, stride_dos, stride_dod, WIDE), real, dv_cols, dv,
                        True, EVEN_DV)
    row_lse, row_delta = row_statistics(stats_ptr + stats * 2, rows, real, True)
    k_at = k_ptr + (b64 * stride_kb + hk64 * stride_kh + token_k * stride_ks)
    v_at = v_ptr + (b64 * stride_vb + hk64 * stride_vh + token_k * stride_vs)
    k_offs = tile_offsets(keys, d_cols, stride_ks, stride_kd, WIDE)
    v_offs = tile_offsets(keys, dv_cols, stride_vs, stride_vd, WIDE)
    bias_at = bias_ptr
    mask_at = mask_ptr
    if HAS_BIAS:
        bias_at = bias_ptr + (s64 * stride_bias_b + h64 * stride_bias_h)
    if HAS_MASK:
        mask_at = mask_ptr + (s64 * stride_mask_b + h64 * stride_mask_h)

    lo, full_lo, full_hi, hi, _first, _last = band_keys(m0, rows_q, len_k, off, window_left, window_right,
                                                      BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    if HAS_MASK or HAS_BIAS:
        full_lo = hi
        full_hi = hi
    n_before = (full_lo - lo) // BLOCK_N
    n_masked = n_before + (hi - full_hi) // BLOCK_N

    dq_acc = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
    for t in tl.range(0, n_masked, num_stages=STAGES):
        n0 = lo + t * BLOCK_N
        n0 = tl.where(t < n_before, n0, n0 + (full_hi - full_lo))
        dq_acc = dq_step(
            dq_acc, q_tile, do_tile, row_lse, row_delta, k_at, v_at, bias_at, mask_at, k_offs, v_offs,
            stride_ks, stride_vs, stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k, bias_rows,
            bias_cols, mask_rows, mask_cols, m0, n0, rows_q, len_k, off, window_left, window_right, d, dv,
            factor, softcap, True, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, WIDE, HAS_LEFT,
            HAS_RIGHT, HAS_BIAS, HAS_MASK, HAS_SOFTCAP, FOLD, DOT_FP32)
    if not (HAS_MASK or HAS_BIAS):
        for t in tl.range(0, (full_hi - full_lo) // BLOCK_N, num_stages=STAGES):
            n0 = full_lo + t * BLOCK_N
            dq_acc = dq_step(
                dq_acc, q_tile, do_tile, row_lse, row_delta, k_at, v_at, bias_at, mask_at, k_offs, v_offs,
                stride_ks, stride_vs, stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k, bias_rows,
                bias_cols, mask_rows, mask_cols, m0, n0, rows_q, len_k, off, window_left, window_right, d, dv,
                factor, softcap, False, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, WIDE, HAS_LEFT,
                HAS_RIGHT, HAS_BIAS, HAS_MASK, HAS_SOFTCAP, FOLD, DOT_FP32)

    dq_at = dq_ptr + (b64 * stride_dqb + h64 * stride_dqh + token_q * stride_dqs)
    dq_acc = tl.where(real[:, None], dq_acc * scale, 0.0)
    store_tile(dq_at + tile_offsets(rows, d_cols, stride_dqs, stride_dqd, WIDE), dq_acc, m0 + rows, extent,
               d_cols, d, EVEN_D)
