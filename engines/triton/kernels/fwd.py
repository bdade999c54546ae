"""Attention forward: one program owns BLOCK_M query rows of one head and walks the keys those rows can see.

    q stays in shared memory; acc [BLOCK_M, DV_PAD], the running maximum m and sum l in registers, all fp32
    for each block of BLOCK_N keys:
        s = q k^T;  m' = max(m, rowmax s);  p = exp2(s - m');  l, acc *= exp2(m - m')
        l += rowsum p;  acc += p v                    (p rounded to v's dtype for the matrix unit)
    o = acc / l,  lse = ln 2 * (m + log2 l)

Scores are in the exp2 domain: scale * log2 e is folded into one multiply-add.  The key range comes from the
band and splits in three: blocks cut by the band's left edge, blocks that every row sees whole (no predicate
at all), blocks cut by the right edge or by the end of the keys.  K and V stream through num_stages buffers of
shared memory.  Rows that are padding are written too: o = 0, lse = -inf.  Tiles and why: configs.py.
"""

import triton
import triton.language as tl

from .common import (
    LN2,
    LOG2E,
    band_keys,
    band_mask,
    dot,
    dot_add,
    effective_length,
    linear_pid,
    packed_slot,
    packed_span,
    score_tile,
    softcap_scores,
    tile_base,
    tile_pointers,
)


@triton.jit
def _attend(
    acc, l, m, q, k_base, v_base, bias_base, mask_base, lo, hi, m0, first, last, sq, sk, off,
    stride_ks, stride_kd, stride_vs, stride_vd, stride_bias_q, stride_bias_k, stride_mask_q, stride_mask_k,
    d, dv, window_left, window_right, bias_rows, bias_cols, mask_rows, mask_cols, scale, softcap,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WIDE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Adds keys [lo, hi), lo a multiple of BLOCK_N, to (acc, l, m).  Not MASKED promises that every row sees
    every key."""
    keys = tl.arange(0, BLOCK_N)
    row_index = tl.arange(0, BLOCK_M)[:, None]
    rows = m0 + tl.arange(0, BLOCK_M)
    d_index = tl.arange(0, D_PAD)
    dv_index = tl.arange(0, DV_PAD)
    scale_log2 = scale * LOG2E
    for n0 in tl.range(lo, hi, BLOCK_N):
        start = n0 + first * 0
        cols = start + keys
        readable = (cols >= first) & (cols < last)
        k_now = tile_pointers(k_base + start.to(tl.int64) * stride_ks, keys[:, None], d_index[None, :],
                              stride_ks, stride_kd, WIDE)
        v_now = tile_pointers(v_base + start.to(tl.int64) * stride_vs, keys[:, None], dv_index[None, :],
                              stride_vs, stride_vd, WIDE)
        if MASKED:
            if EVEN_D:
                k = tl.load(k_now, mask=readable[:, None], other=0.0)
            else:
                k = tl.load(k_now, mask=readable[:, None] & (d_index[None, :] < d), other=0.0)
        else:
            if EVEN_D:
                k = tl.load(k_now)
            else:
                k = tl.load(k_now, mask=d_index[None, :] < d, other=0.0)
        s = dot(q, tl.trans(k), DOT_FP32)
        if HAS_SOFTCAP:
            s = softcap_scores(s * scale, softcap) * LOG2E
        if MASKED:
            if not HAS_SOFTCAP:
                s = s * scale_log2
            keep = band_mask(rows[:, None], cols[None, :], sk, off, window_left, window_right,
                             HAS_LEFT, HAS_RIGHT)
            if HAS_MASK:
                kept = score_tile(mask_base, m0, start, row_index, keys[None, :], stride_mask_q,
                                  stride_mask_k, mask_rows, mask_cols, 0, WIDE)
                keep = keep & (kept != 0)
            if HAS_BIAS:
                bias = score_tile(bias_base, m0, start, row_index, keys[None, :], stride_bias_q,
                                  stride_bias_k, bias_rows, bias_cols, 0.0, WIDE).to(tl.float32)
                # A bias of -inf hides a key as a mask does, so that nothing stored there can leak either.
                keep = keep & (bias != float("-inf"))
                s = s + bias * LOG2E
            s = tl.where(keep, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            # A row that has seen no key yet: exp2(-inf - 0) = 0, where -inf - -inf would be NaN.
            m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
            p = tl.exp2(s - m_use[:, None])
            alpha = tl.exp2(m - m_use)
        else:
            if HAS_SOFTCAP:
                m_new = tl.maximum(m, tl.max(s, 1))
                p = tl.exp2(s - m_new[:, None])
            else:
                m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
                p = tl.exp2(s * scale_log2 - m_new[:, None])
            alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if MASKED:
            if EVEN_DV:
                v = tl.load(v_now, mask=readable[:, None], other=0.0)
            else:
                v = tl.load(v_now, mask=readable[:, None] & (dv_index[None, :] < dv), other=0.0)
            if HAS_MASK or HAS_BIAS:
                # 0 * NaN is NaN: values of keys that no row of the tile sees are zeroed too.
                seen = tl.max((keep & (rows[:, None] < sq)).to(tl.int32), 0) > 0
                v = tl.where(seen[:, None], v, tl.zeros_like(v))
        else:
            if EVEN_DV:
                v = tl.load(v_now)
            else:
                v = tl.load(v_now, mask=dv_index[None, :] < dv, other=0.0)
        acc = dot_add(p.to(v.dtype), v, acc, DOT_FP32)
        m = m_new
    return acc, l, m


@triton.jit
def sdpa_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    bias_ptr, mask_ptr, sink_ptr, len_q_ptr, len_kv_ptr, cu_q_ptr, cu_kv_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_bias_b, stride_bias_h, stride_bias_q, stride_bias_k,
    stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_k,
    stride_sink, stride_len_q, stride_len_kv, stride_cu_q, stride_cu_kv,
    n_programs, n_tiles, n_seqs, heads_q, group, sq_max, sk_max, d, dv, window_left, window_right, align_br,
    bias_rows, bias_cols, mask_rows, mask_cols,
    scale, softcap,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, HAS_LEN_Q: tl.constexpr,
    HAS_LEN_KV: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_SINK: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr,
    WIDE: tl.constexpr, DOT_FP32: tl.constexpr,
):
    """Grid: n_programs = n_tiles * heads_q * (1 if PACKED else n_seqs), folded.  n_tiles is cdiv(sq_max,
    BLOCK_M), or the number of packed slots.  sq_max and sk_max are buffer extents: Sq and Sk, or the packed
    totals."""
    pid = linear_pid()
    if pid >= n_programs:
        return
    outer = pid // n_tiles
    slot = pid % n_tiles
    if PACKED:
        head = outer
        batch, q_start, q_rows, tile = packed_slot(cu_q_ptr, stride_cu_q, slot, n_seqs, sq_max, BLOCK_M)
        if tile * BLOCK_M >= q_rows:
            return
        k_start, k_rows = packed_span(cu_kv_ptr, stride_cu_kv, batch, n_seqs, sk_max)
        sq = tl.where((batch >= 0) & (batch < n_seqs), q_rows, 0)
        sk = k_rows
    else:
        batch = outer // heads_q
        head = outer % heads_q
        tile = slot
        if HAS_RIGHT:
            # Causal tiles grow with their number: the longest go first, the last wave is of short ones.
            tile = n_tiles - 1 - slot
        q_start = slot * 0
        k_start = slot * 0
        q_rows = q_start + sq_max
        sq = q_rows
        sk = k_start + sk_max
    sq = effective_length(len_q_ptr, batch, stride_len_q, sq, HAS_LEN_Q)
    sk = effective_length(len_kv_ptr, batch, stride_len_kv, sk, HAS_LEN_KV)
    off = align_br * (sk - sq)
    m0 = tile * BLOCK_M
    kv_head = head // group

    m_index = tl.arange(0, BLOCK_M)
    rows = m0 + m_index
    d_index = tl.arange(0, D_PAD)
    dv_index = tl.arange(0, DV_PAD)
    q_base = tile_base(q_ptr, batch, head, q_start + m0, stride_qb, stride_qh, stride_qs)
    k_base = tile_base(k_ptr, batch, kv_head, k_start, stride_kb, stride_kh, stride_ks)
    v_base = tile_base(v_ptr, batch, kv_head, k_start, stride_vb, stride_vh, stride_vs)
    bias_base = bias_ptr
    mask_base = mask_ptr
    if HAS_BIAS:
        bias_base = bias_ptr + (batch.to(tl.int64) * stride_bias_b + head.to(tl.int64) * stride_bias_h)
    if HAS_MASK:
        mask_base = mask_ptr + (batch.to(tl.int64) * stride_mask_b + head.to(tl.int64) * stride_mask_h)

    q_tile = tile_pointers(q_base, m_index[:, None], d_index[None, :], stride_qs, stride_qd, WIDE)
    if EVEN_D:
        q = tl.load(q_tile, mask=rows[:, None] < sq, other=0.0)
    else:
        q = tl.load(q_tile, mask=(rows[:, None] < sq) & (d_index[None, :] < d), other=0.0)

    lo, full_lo, full_hi, hi, first, last = band_keys(
        m0, sq, sk, off, window_left, window_right, BLOCK_M, BLOCK_N, HAS_LEFT, HAS_RIGHT)
    # The unmasked loop takes the maximum before it scales, which needs a positive scale; other scales (rare)
    # go through the masked loop, as do bias and mask tiles.
    full_hi = tl.where(scale > 0, full_hi, full_lo)

    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    ALWAYS_MASKED: tl.constexpr = HAS_BIAS or HAS_MASK
    if HAS_LEFT and not ALWAYS_MASKED:
        acc, l, m = _attend(
            acc, l, m, q, k_base, v_base, bias_base, mask_base, lo, full_lo, m0, first, last, sq, sk, off,
            stride_ks, stride_kd, stride_vs, stride_vd, stride_bias_q, stride_bias_k, stride_mask_q,
            stride_mask_k, d, dv, window_left, window_right, bias_rows, bias_cols, mask_rows, mask_cols,
            scale, softcap,
            True, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, HAS_LEFT, HAS_RIGHT,
            HAS_BIAS, HAS_MASK, HAS_SOFTCAP, WIDE, DOT_FP32)
    if not ALWAYS_MASKED:
        acc, l, m = _attend(
            acc, l, m, q, k_base, v_base, bias_base, mask_base, full_lo, full_hi, m0, first, last, sq, sk,
            off, stride_ks, stride_kd, stride_vs, stride_vd, stride_bias_q, stride_bias_k, stride_mask_q,
            stride_mask_k, d, dv, window_left, window_right, bias_rows, bias_cols, mask_rows, mask_cols,
            scale, softcap,
            False, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, HAS_LEFT, HAS_RIGHT,
            HAS_BIAS, HAS_MASK, HAS_SOFTCAP, WIDE, DOT_FP32)
    masked_lo = full_hi
    if ALWAYS_MASKED:
        masked_lo = lo
    acc, l, m = _attend(
        acc, l, m, q, k_base, v_base, bias_base, mask_base, masked_lo, hi, m0, first, last, sq, sk, off,
        stride_ks, stride_kd, stride_vs, stride_vd, stride_bias_q, stride_bias_k, stride_mask_q,
        stride_mask_k, d, dv, window_left, window_right, bias_rows, bias_cols, mask_rows, mask_cols, scale,
        softcap,
        True, BLOCK_M, BLOCK_N, D_PAD, DV_PAD, EVEN_D, EVEN_DV, HAS_LEFT, HAS_RIGHT,
        HAS_BIAS, HAS_MASK, HAS_SOFTCAP, WIDE, DOT_FP32)

    empty = m == float("-inf")
    norm = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + tl.log2(norm)) * LN2)
    rescale = 1.0 / norm
    if HAS_SINK:
        # The sink joins the denominator only: with w = sink - lse, o shrinks by 1 / (1 + e^w).
        sink = tl.load(sink_ptr + head.to(tl.int64) * stride_sink).to(tl.float32)
        sink = sink + tl.zeros([BLOCK_M], tl.float32)
        top = tl.maximum(lse, sink)
        infinite = (top == float("inf")) | (top == float("-inf"))
        gap = tl.where(infinite, 0.0, tl.minimum(lse, sink) - top)
        total = tl.where(infinite, top, top + tl.log2(1.0 + tl.exp2(gap * LOG2E)) * LN2)
        share = tl.exp2(tl.where(infinite, 0.0, lse - total) * LOG2E)
        share = tl.where(sink == float("inf"), 0.0, share)
        acc = tl.where((sink == float("inf"))[:, None], 0.0, acc)
        rescale = rescale * share
        lse = total
    valid = rows < sq
    o = tl.where((valid & (m != float("-inf")))[:, None], acc * rescale[:, None], 0.0)
    o_base = tile_base(o_ptr, batch, head, q_start + m0, stride_ob, stride_oh, stride_os)
    o_tile = tile_pointers(o_base, m_index[:, None], dv_index[None, :], stride_os, stride_od, WIDE)
    if EVEN_DV:
        tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=rows[:, None] < q_rows)
    else:
        inside = (rows[:, None] < q_rows) & (dv_index[None, :] < dv)
        tl.store(o_tile, o.to(o_ptr.dtype.element_ty), mask=inside)
    if HAS_LSE:
        lse = tl.where(valid, lse, float("-inf"))
        lse_base = tile_base(lse_ptr, batch, head, q_start + m0, stride_lse_b, stride_lse_h, stride_lse_s)
        if WIDE:
            tl.store(lse_base + m_index.to(tl.int64) * stride_lse_s, lse, mask=rows < q_rows)
        else:
            tl.store(lse_base + m_index * stride_lse_s, lse, mask=rows < q_rows)
