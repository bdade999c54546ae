"""Backward, step 4: dBias, and the fixed-order reduction that dBias and dSink share.

dBias is dS summed over the axes along which the bias was broadcast.  Three kernels recompute dS tile by tile
from the row statistics; none uses atomics, and every sum has a fixed order:
  bwd_bias_tile   neither sequence axis broadcast: a program owns one [BLOCK_M, BLOCK_N] tile of dBias, loops
                  over the batches and heads that share it, and writes it once, in its own type and strides.
  bwd_bias_cols   rows broadcast: a program owns BLOCK_N keys of one (batch, head), loops over the row tiles
                  that see them, and writes one fp32 number per key to the workspace [B, Hq, keys].
  bwd_bias_rows   keys broadcast: a program owns a row tile of one (batch, head), loops over its key tiles,
                  writes one fp32 number per row to the workspace [B, Hq, rows]; if rows are broadcast too, it
                  sums every n_chunks-th row tile into one number, workspace [B, Hq, n_chunks].
  bwd_reduce      adds workspace entries over the broadcast batches, heads and rows, in order.
A tile of dS accumulates in registers whole, and is folded to a line once, at the end.  P and dS are selected
by visibility, so a masked cell adds exactly 0 and no NaN of an unseen row or key gets in.
"""

import triton
import triton.language as tl

from .bwd_common import load_tile, probabilities, row_statistics, score_factor, sequence_span, tile_offsets
from .common import band_keys, band_mask, band_rows, dot, linear_pid, score_tile


@triton.jit
def operand_tile(ptr, sb, sh, ss, sd, batch, head, token, positions, limit, cols, width, BLOCK: tl.constexpr,
                 EVEN: tl.constexpr, WIDE: tl.constexpr):
    """Rows ``token``.. of one operand (int64 batch, head, token); positions at or past ``limit`` give 0."""
    at = ptr + (batch * sb + head * sh + token * ss)
    offsets = tile_offsets(tl.arange(0, BLOCK), cols, ss, sd, WIDE)
    return load_tile(at + offsets, positions < limit, cols, width, True, EVEN)


@triton.jit
def ds_tile(q_tile, k_tile, do_tile, v_tile, row_lse, row_delta, bias_at, mask_at, stride_bias_q,
            stride_bias_k, stride_mask_q, stride_mask_k, bias_rows, bias_cols, mask_rows, mask_cols, m0, n0,
            sq, sk, off, window_left, window_right, factor, softcap, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, WIDE: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
            HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DOT_FP32: tl.constexpr):
    """dS = P * (dP - delta) of one tile, exactly 0 where not visible.  The bias comes after the softcap: no
    slope here."""
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    visible = band_mask((m0 + rows)[:, None], (n0 + keys)[None, :], sk, off, window_left, window_right,
                        HAS_LEFT, HAS_RIGHT)
    visible = visible & (m0 + rows < sq)[:, None]
    if HAS_MASK:
        keep = score_tile(mask_at, m0, n0, rows[:, None], keys[None, :], stride_mask_q, stride_mask_k,
                          mask_rows, mask_cols, 0, WIDE)
        visible = visible & (keep != 0)
    bias = score_tile(bias_at, m0, n0, rows[:, None], keys[None, :], stride_bias_q, stride_bias_k, bias_rows,
                      bias_cols, 0.0, WIDE).to(tl.float32)
    visible = visible & (bias != float("-inf"))
    raw = dot(q_tile, tl.trans(k_tile), DOT_FP32)
    p, _slope = probabilities(raw, row_lse[:, None], bias, factor, softcap, True, HAS_SOFTCAP, False)
    dp = dot(do_tile, tl.trans(v_tile), DOT_FP32)
    return tl.where(visible, p * (dp - row_delta[:, None]), 0.0)


@triton.jit
def bwd_bias_tile(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dbias_ptr, bias_ptr, mask_ptr, len_q_ptr,
                  len_kv_ptr, cu_q_ptr, cu_kv_ptr, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb,
                  stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_dob,
                  stride_doh, stride_dos, stride_dod, stride_dbias_b, stride_dbias_h, stride_dbias_q,
                  stride_dbias_k, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k, stride_mask_b,
                  stride_mask_h, stride_mask_q, stride_mask_k, stride_len_q, stride_len_kv, stride_cu_q,
                  stride_cu_kv, n_seqs, heads_q, group, sq_max, sk_max, d, dv, window_left, window_right,
                  align_br, bias_rows, bias_cols, mask_rows, mask_cols, bias_heads, sum_batches, sum_heads,
                  n_programs, scale, softcap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
                  WIDE: tl.constexpr, PACKED: tl.constexpr,
                  HAS_LEN_Q: tl.constexpr, HAS_LEN_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
                  HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                  DOT_FP32: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    tiles_n = tl.cdiv(bias_cols, BLOCK_N)
    tiles_m = tl.cdiv(bias_rows, BLOCK_M)
    n0 = pid % tiles_n * BLOCK_N
    m0 = pid // tiles_n % tiles_m * BLOCK_M
    own_head = pid // tiles_n // tiles_m % bias_heads
    own_batch = pid // tiles_n // tiles_m // bias_heads
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    factor = score_factor(scale, False)
    bias_at = bias_ptr + (own_batch.to(tl.int64) * stride_bias_b + own_head.to(tl.int64) * stride_bias_h)

    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for ib in range(sum_batches):
        sequence = own_batch + ib
        start_q, rows_q = sequence_span(sequence, cu_q_ptr, len_q_ptr, stride_cu_q, stride_len_q, n_seqs,
                                        sq_max, PACKED, HAS_LEN_Q)
        start_k, len_k = sequence_span(sequence, cu_kv_ptr, len_kv_ptr, stride_cu_kv, stride_len_kv, n_seqs,
                                       sk_max, PACKED, HAS_LEN_KV)
        off = align_br * (len_k - rows_q)
        _lo, _full_lo, _full_hi, _hi, first, last = band_keys(m0, rows_q, len_k, off, window_left,
                                                              window_right,
                                                          BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        touched = (m0 < rows_q) & (n0 < last) & (n0 + BLOCK_N > first)
        s64 = sequence.to(tl.int64)
        b64 = s64 * 0 if PACKED else s64
        token_q = (start_q + m0).to(tl.int64)
        token_k = (start_k + n0).to(tl.int64)
        for ih in range(tl.where(touched, sum_heads, 0)):
            head = own_head + ih
            h64 = head.to(tl.int64)
            hk64 = (head // group).to(tl.int64)
            q_tile = operand_tile(q_ptr, stride_qb, stride_qh, stride_qs, stride_qd, b64, h64, token_q,
                                  m0 + rows, rows_q, d_cols, d, BLOCK_M, EVEN_D, WIDE)
            k_tile = operand_tile(k_ptr, stride_kb, stride_kh, stride_ks, stride_kd, b64, hk64, token_k,
                                  n0 + keys, len_k, d_cols, d, BLOCK_N, EVEN_D, WIDE)
            do_tile = operand_tile(do_ptr, stride_dob, stride_doh, stride_dos, stride_dod, b64, h64, token_q,
                                   m0 + rows, rows_q, dv_cols, dv, BLOCK_M, EVEN_DV, WIDE)
            v_tile = operand_tile(v_ptr, stride_vb, stride_vh, stride_vs, stride_vd, b64, hk64, token_k,
                                  n0 + keys, len_k, dv_cols, dv, BLOCK_N, EVEN_DV, WIDE)
            stats = (b64 * heads_q + h64) * sq_max + token_q
            real = m0 + rows < rows_q
            row_lse, row_delta = row_statistics(stats_ptr + stats * 2, rows, real, True)
            mask_at = mask_ptr
            if HAS_MASK:
                mask_at = mask_ptr + (s64 * stride_mask_b + h64 * stride_mask_h)
            acc += ds_tile(q_tile, k_tile, do_tile, v_tile, row_lse, row_delta, bias_at, mask_at,
                           stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k, bias_rows, bias_cols,
                           mask_rows, mask_cols, m0, n0, rows_q, len_k, off, window_left, window_right,
                           factor, softcap, BLOCK_M, BLOCK_N, WIDE, HAS_LEFT, HAS_RIGHT, HAS_MASK,
                           HAS_SOFTCAP, DOT_FP32)

    out = dbias_ptr + (own_batch.to(tl.int64) * stride_dbias_b + own_head.to(tl.int64) * stride_dbias_h)
    out_rows = (m0 + rows).to(tl.int64) * stride_dbias_q
    out_cols = (n0 + keys).to(tl.int64) * stride_dbias_k
    pointers = out + (out_rows[:, None] + out_cols[None, :])
    inside = (m0 + rows < bias_rows)[:, None] & (n0 + keys < bias_cols)[None, :]
    tl.store(pointers, acc.to(dbias_ptr.dtype.element_ty), mask=inside)


@triton.jit
def bwd_bias_cols(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, partial_ptr, bias_ptr, mask_ptr, len_q_ptr,
                  len_kv_ptr, cu_q_ptr, cu_kv_ptr, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb,
                  stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_dob,
                  stride_doh, stride_dos, stride_dod, stride_bias_b, stride_bias_h, stride_bias_q,
                  stride_bias_k, stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_k, stride_len_q,
                  stride_len_kv, stride_cu_q, stride_cu_kv, n_seqs, heads_q, group, sq_max, sk_max, d, dv,
                  window_left, window_right, align_br, bias_rows, bias_cols, mask_rows, mask_cols, n_programs,
                  scale, softcap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
                  DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, WIDE: tl.constexpr,
                  PACKED: tl.constexpr, HAS_LEN_Q: tl.constexpr, HAS_LEN_KV: tl.constexpr,
                  HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_MASK: tl.constexpr,
                  HAS_SOFTCAP: tl.constexpr, DOT_FP32: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    tiles_n = tl.cdiv(bias_cols, BLOCK_N)
    n0 = pid % tiles_n * BLOCK_N
    head = pid // tiles_n % heads_q
    sequence = pid // tiles_n // heads_q
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    factor = score_factor(scale, False)
    start_q, rows_q = sequence_span(sequence, cu_q_ptr, len_q_ptr, stride_cu_q, stride_len_q, n_seqs, sq_max,
                                    PACKED, HAS_LEN_Q)
    start_k, len_k = sequence_span(sequence, cu_kv_ptr, len_kv_ptr, stride_cu_kv, stride_len_kv, n_seqs,
                                   sk_max, PACKED, HAS_LEN_KV)
    off = align_br * (len_k - rows_q)
    s64 = sequence.to(tl.int64)
    b64 = s64 * 0 if PACKED else s64
    h64 = head.to(tl.int64)
    hk64 = (head // group).to(tl.int64)
    token_k = (start_k + n0).to(tl.int64)
    bias_at = bias_ptr + (s64 * stride_bias_b + h64 * stride_bias_h)
    mask_at = mask_ptr
    if HAS_MASK:
        mask_at = mask_ptr + (s64 * stride_mask_b + h64 * stride_mask_h)
    k_tile = operand_tile(k_ptr, stride_kb, stride_kh, stride_ks, stride_kd, b64, hk64, token_k, n0 + keys,
                          len_k, d_cols, d, BLOCK_N, EVEN_D, WIDE)
    v_tile = operand_tile(v_ptr, stride_vb, stride_vh, stride_vs, stride_vd, b64, hk64, token_k, n0 + keys,
                          len_k, dv_cols, dv, BLOCK_N, EVEN_DV, WIDE)
    lo, _full_lo, _full_hi, hi, _first, _last = band_rows(n0, rows_q, len_k, off, window_left, window_right,
                                                      BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for t in range((hi - lo) // BLOCK_M):
        m0 = lo + t * BLOCK_M
        token_q = (start_q + m0).to(tl.int64)
        q_tile = operand_tile(q_ptr, stride_qb, stride_qh, stride_qs, stride_qd, b64, h64, token_q, m0 + rows,
                              rows_q, d_cols, d, BLOCK_M, EVEN_D, WIDE)
        do_tile = operand_tile(do_ptr, stride_dob, stride_doh, stride_dos, stride_dod, b64, h64, token_q,
                               m0 + rows, rows_q, dv_cols, dv, BLOCK_M, EVEN_DV, WIDE)
        stats = (b64 * heads_q + h64) * sq_max + token_q
        real = m0 + rows < rows_q
        row_lse, row_delta = row_statistics(stats_ptr + stats * 2, rows, real, True)
        acc += ds_tile(q_tile, k_tile, do_tile, v_tile, row_lse, row_delta, bias_at, mask_at, stride_bias_q,
                       stride_bias_k, stride_mask_q, stride_mask_k, bias_rows, bias_cols, mask_rows,
                       mask_cols, m0, n0, rows_q, len_k, off, window_left, window_right, factor, softcap,
                       BLOCK_M, BLOCK_N, WIDE, HAS_LEFT, HAS_RIGHT, HAS_MASK, HAS_SOFTCAP, DOT_FP32)
    out = partial_ptr + (s64 * heads_q + h64) * bias_cols + n0
    tl.store(out + keys, tl.sum(acc, 0), mask=n0 + keys < bias_cols)


@triton.jit
def bwd_bias_rows(q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, partial_ptr, bias_ptr, mask_ptr, len_q_ptr,
                  len_kv_ptr, cu_q_ptr, cu_kv_ptr, stride_qb, stride_qh, stride_qs, stride_qd, stride_kb,
                  stride_kh, stride_ks, stride_kd, stride_vb, stride_vh, stride_vs, stride_vd, stride_dob,
                  stride_doh, stride_dos, stride_dod, stride_bias_b, stride_bias_h, stride_bias_q,
                  stride_bias_k, stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_k, stride_len_q,
                  stride_len_kv, stride_cu_q, stride_cu_kv, n_seqs, heads_q, group, sq_max, sk_max, d, dv,
                  window_left, window_right, align_br, bias_rows, bias_cols, mask_rows, mask_cols, n_chunks,
                  n_programs, scale, softcap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                  SUM_ROWS: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr,
                  EVEN_DV: tl.constexpr, WIDE: tl.constexpr, PACKED: tl.constexpr, HAS_LEN_Q: tl.constexpr,
                  HAS_LEN_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                  HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, DOT_FP32: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    chunk = pid % n_chunks
    head = pid // n_chunks % heads_q
    sequence = pid // n_chunks // heads_q
    rows = tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    factor = score_factor(scale, False)
    start_q, rows_q = sequence_span(sequence, cu_q_ptr, len_q_ptr, stride_cu_q, stride_len_q, n_seqs, sq_max,
                                    PACKED, HAS_LEN_Q)
    start_k, len_k = sequence_span(sequence, cu_kv_ptr, len_kv_ptr, stride_cu_kv, stride_len_kv, n_seqs,
                                   sk_max, PACKED, HAS_LEN_KV)
    off = align_br * (len_k - rows_q)
    s64 = sequence.to(tl.int64)
    b64 = s64 * 0 if PACKED else s64
    h64 = head.to(tl.int64)
    hk64 = (head // group).to(tl.int64)
    bias_at = bias_ptr + (s64 * stride_bias_b + h64 * stride_bias_h)
    mask_at = mask_ptr
    if HAS_MASK:
        mask_at = mask_ptr + (s64 * stride_mask_b + h64 * stride_mask_h)

    # Without SUM_ROWS there is one chunk per row tile of the bias, so the outer loop runs at most once.
    tiles_m = tl.cdiv(rows_q, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    repeats = tl.cdiv(tl.maximum(tiles_m - chunk, 0), n_chunks)
    if not SUM_ROWS:
        repeats = tl.minimum(repeats, 1)
    for i in range(repeats):
        m0 = (chunk + i * n_chunks) * BLOCK_M
        token_q = (start_q + m0).to(tl.int64)
        q_tile = operand_tile(q_ptr, stride_qb, stride_qh, stride_qs, stride_qd, b64, h64, token_q, m0 + rows,
                              rows_q, d_cols, d, BLOCK_M, EVEN_D, WIDE)
        do_tile = operand_tile(do_ptr, stride_dob, stride_doh, stride_dos, stride_dod, b64, h64, token_q,
                               m0 + rows, rows_q, dv_cols, dv, BLOCK_M, EVEN_DV, WIDE)
        stats = (b64 * heads_q + h64) * sq_max + token_q
        real = m0 + rows < rows_q
        row_lse, row_delta = row_statistics(stats_ptr + stats * 2, rows, real, True)
        lo, _full_lo, _full_hi, hi, _first, _last = band_keys(m0, rows_q, len_k, off, window_left,
                                                              window_right,
                                                          BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
        for t in range((hi - lo) // BLOCK_N):
            n0 = lo + t * BLOCK_N
            token_k = (start_k + n0).to(tl.int64)
            k_tile = operand_tile(k_ptr, stride_kb, stride_kh, stride_ks, stride_kd, b64, hk64, token_k,
                                  n0 + keys, len_k, d_cols, d, BLOCK_N, EVEN_D, WIDE)
            v_tile = operand_tile(v_ptr, stride_vb, stride_vh, stride_vs, stride_vd, b64, hk64, token_k,
                                  n0 + keys, len_k, dv_cols, dv, BLOCK_N, EVEN_DV, WIDE)
            acc += ds_tile(q_tile, k_tile, do_tile, v_tile, row_lse, row_delta, bias_at, mask_at,
                           stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k, bias_rows, bias_cols,
                           mask_rows, mask_cols, m0, n0, rows_q, len_k, off, window_left, window_right,
                           factor, softcap, BLOCK_M, BLOCK_N, WIDE, HAS_LEFT, HAS_RIGHT, HAS_MASK,
                           HAS_SOFTCAP, DOT_FP32)
    line = tl.sum(acc, 1)
    if SUM_ROWS:
        tl.store(partial_ptr + (s64 * heads_q + h64) * n_chunks + chunk, tl.sum(line, 0))
    else:
        positions = chunk * BLOCK_M + rows
        tl.store(partial_ptr + (s64 * heads_q + h64) * bias_rows + positions, line,
                 mask=positions < bias_rows)


@triton.jit
def bwd_reduce(partial_ptr, out_ptr, stride_out_b, stride_out_h, stride_out_r,
               heads, rows, out_heads, out_rows, sum_batches, sum_heads, n_programs,
               BLOCK: tl.constexpr, SUM_ROWS: tl.constexpr):
    """out[b, h, r] = the sum of partial[b + i, h + j, r] over i < sum_batches and j < sum_heads, and with
    SUM_ROWS over all rows (out_rows is 1 then).  partial is fp32, contiguous [batches, heads, rows].
    An axis is either kept or summed whole."""
    pid = linear_pid()
    if pid >= n_programs:
        return
    blocks = tl.cdiv(out_rows, BLOCK)
    first = pid % blocks * BLOCK
    head = pid // blocks % out_heads
    batch = pid // blocks // out_heads
    lanes = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    for ib in range(sum_batches):
        for ih in range(sum_heads):
            at = partial_ptr + ((batch + ib).to(tl.int64) * heads + head + ih) * rows
            if SUM_ROWS:
                for r0 in range(0, rows, BLOCK):
                    acc += tl.load(at + r0 + lanes, mask=r0 + lanes < rows, other=0.0)
            else:
                acc += tl.load(at + first + lanes, mask=first + lanes < rows, other=0.0)
    base = out_ptr + (batch.to(tl.int64) * stride_out_b + head.to(tl.int64) * stride_out_h)
    if SUM_ROWS:
        tl.store(base, tl.sum(acc, 0).to(out_ptr.dtype.element_ty))
    else:
        positions = first + lanes
        tl.store(base + positions.to(tl.int64) * stride_out_r, acc.to(out_ptr.dtype.element_ty),
                 mask=positions < out_rows)
