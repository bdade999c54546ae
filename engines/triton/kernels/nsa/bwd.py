"""Selection attention backward.

`nsa_bwd_pre`: per (token, head) row the pair (lse, delta), as `bwd_pre` of dense attention has it: lse is +inf and delta
0 in rows that contribute nothing; delta = rowsum(dO * o) - dLSE.

`nsa_bwd_blocks`, blocks stationary: as in the forward a program owns a block of keys and up to `chunk_rows` of its rows.
K and V stay; dK and dV accumulate in fp32 registers; tiles of gathered Q and dO rows stream by, scores transposed:
  S^T = K Q^T;  P^T = exp(S^T - lse);  dV += P^T dO;  dP^T = V dO^T;  dS^T = P^T (dP^T - delta);  dK += dS^T Q
and each row's share of dQ from this block, scale * dS K, goes to the partial array at the row's place in the block's list.
Every product is made once; nothing is added up between programs, so nothing depends on their order.

`nsa_bwd_keys`: adds the chunks of one block in order (after what earlier launches left in the fp32 sums): dK, dV.
`nsa_bwd_queries`: adds the shares of a row's slots in order: dQ.
"""

import triton
import triton.language as tl

from ..bwd_common import probabilities, row_statistics, score_factor
from ..common import LOG2E, dot, dot_add, linear_pid
from .common import (
    block_place,
    chunk_size,
    load_all_rows,
    load_rows,
    part_place,
    rows_with_a_mask,
    store_rows,
    tile_entries,
    tile_tokens,
    work_item,
)


@triton.jit
def nsa_bwd_pre(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, stats_ptr,
    stride_ob, stride_oh, stride_os, stride_od, stride_dob, stride_doh, stride_dos, stride_dod,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_dlse_b, stride_dlse_h, stride_dlse_s,
    n_programs, n_tiles, heads_kv, group, n_rows, dv, scale,
    BLOCK_M: tl.constexpr, DV_PAD: tl.constexpr, EVEN_DV: tl.constexpr, HAS_DLSE: tl.constexpr, FOLD: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    rows = (pid % n_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = (pid // n_tiles).to(tl.int64)
    inside = rows < n_rows
    token = rows // group
    b64 = bh // heads_kv
    h64 = (bh % heads_kv) * group + (rows - token * group)
    t64 = token.to(tl.int64)
    cols = tl.arange(0, DV_PAD)
    at = lse_ptr + b64 * stride_lse_b + h64 * stride_lse_h + t64 * stride_lse_s
    lse = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    valid = inside & (lse != float("-inf"))
    o = load_rows(o_ptr + b64 * stride_ob, h64 * stride_oh + t64 * stride_os, valid, cols, stride_od, dv, EVEN_DV)
    do = load_rows(do_ptr + b64 * stride_dob, h64 * stride_doh + t64 * stride_dos, valid, cols, stride_dod, dv, EVEN_DV)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        dlse_at = dlse_ptr + b64 * stride_dlse_b + h64 * stride_dlse_h + t64 * stride_dlse_s
        delta -= tl.load(dlse_at, mask=valid, other=0.0).to(tl.float32)
    if FOLD:
        # The exact ratio of the two score factors, so that the rounding of the folded one cancels in s - lse.
        plain = tl.zeros([BLOCK_M], tl.float32) + scale
        folded = (plain * LOG2E).to(tl.float64)
        ratio = tl.where(plain == 0.0, LOG2E, folded / tl.where(plain == 0.0, 1.0, plain).to(tl.float64))
        lse = (lse.to(tl.float64) * ratio).to(tl.float32)
    pairs = stats_ptr + (bh * n_rows + rows) * 2
    tl.store(pairs, tl.where(valid, lse, float("inf")), mask=inside)
    tl.store(pairs + 1, tl.where(valid, delta, 0.0), mask=inside)


@triton.jit
def _differentiate_rows(
    dk, dv_sum, q_base, do_base, stats_at, rows_at, part_dq_at, k, v, lo, hi, r1, key0, shift,
    stride_qh, stride_qs, stride_qd, stride_doh, stride_dos, stride_dod, d, dv, pitch, factor, scale,
    MASKED: tl.constexpr, GROUP: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    FOLD: tl.constexpr, WANT_DQ: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, ROWS_FIRST: tl.constexpr,
    STAGES: tl.constexpr, DOT_FP32: tl.constexpr,
):
    """Adds rows [lo, hi) of the block, whole tiles; those at or past r1 are not there.

    ROWS_FIRST: score tiles are [rows, keys] instead of transposed. A warp group multiplies at least 64 rows, so with keys
    as rows a second one would repeat what the first does; with 128 queries as rows each has its own.
    """
    index = tl.arange(0, BLOCK_M)
    keys = key0 + tl.arange(0, BS_PAD)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    out_cols = index[:, None] * pitch + d_cols[None, :]
    out_at = part_dq_at + lo.to(tl.int64) * pitch
    token = tile_tokens(rows_at, lo, r1, index, GROUP, BLOCK_M)
    for r in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
        _entry, head = tile_entries(r, index, GROUP, BLOCK_M)
        h64 = head.to(tl.int64)
        t64 = token.to(tl.int64)
        q = load_all_rows(q_base, t64 * stride_qs + h64 * stride_qh, d_cols, stride_qd, d, EVEN_D)
        do = load_all_rows(do_base, t64 * stride_dos + h64 * stride_doh, dv_cols, stride_dod, dv, EVEN_DV)
        lse, delta = row_statistics(stats_at, t64 * GROUP + h64, r + index < r1, True)
        later = tile_tokens(rows_at, r + BLOCK_M, r1, index, GROUP, BLOCK_M)
        if ROWS_FIRST:
            raw = dot(q, tl.trans(k), DOT_FP32)
            p, _slope = probabilities(raw, lse[:, None], raw, factor, 1.0, False, False, FOLD)
            seen = (keys < key0 + BS)[None, :]
            if MASKED:
                seen = seen & (keys[None, :] <= (token + shift)[:, None])
        else:
            raw = dot(k, tl.trans(q), DOT_FP32)
            p, _slope = probabilities(raw, lse[None, :], raw, factor, 1.0, False, False, FOLD)
            seen = (keys < key0 + BS)[:, None]
            if MASKED:
                seen = seen & (keys[:, None] <= (token + shift)[None, :])
        if MASKED or BS_PAD != BS:
            p = tl.where(seen, p, 0.0)
        if WANT_DV:
            p16 = p.to(do.dtype)
            if ROWS_FIRST:
                p16 = tl.trans(p16)
            dv_sum = dot_add(p16, do, dv_sum, DOT_FP32)
        if WANT_DK or WANT_DQ:
            if ROWS_FIRST:
                ds = p * (dot(do, tl.trans(v), DOT_FP32) - delta[:, None])
            else:
                ds = p * (dot(v, tl.trans(do), DOT_FP32) - delta[None, :])
            if MASKED or BS_PAD != BS:
                ds = tl.where(seen, ds, 0.0)
            ds = ds.to(q.dtype)
            if ROWS_FIRST:
                ds = tl.trans(ds)
            if WANT_DK:
                dk = dot_add(ds, q, dk, DOT_FP32)
            if WANT_DQ:
                if ROWS_FIRST:
                    share = tl.trans(dot(tl.trans(k), ds, DOT_FP32)) * scale
                else:
                    share = dot(tl.trans(ds), k, DOT_FP32) * scale
                keep = (r + index < r1)[:, None]
                if not EVEN_D:
                    keep = keep & (d_cols < d)[None, :]
                tl.store(out_at + out_cols, share.to(part_dq_at.dtype.element_ty), mask=keep)
        out_at += BLOCK_M * pitch
        token = later
    return dk, dv_sum


@triton.jit
def nsa_bwd_blocks(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, part_dq_ptr, part_dk_ptr, part_dv_ptr, rows_ptr, offsets_ptr, items_ptr,
    cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_dob, stride_doh, stride_dos, stride_dod, stride_cu,
    n_programs, n_items, n_entries, n_blocks, heads_kv, parts, span, t0, n_seqs, sk, off, chunk_rows, tq, d, dv, pitch,
    pitch_k, pitch_v, scale,
    GROUP: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, FOLD: tl.constexpr,
    WANT_DQ: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, ROWS_FIRST: tl.constexpr, STAGES: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    item = pid % n_items
    part = (pid // n_items).to(tl.int64)
    block, first, r0, r1, n_rows = work_item(items_ptr, offsets_ptr, part, item, n_items, n_blocks, GROUP, chunk_rows)
    if r0 >= r1:
        return
    b64, h64, part_t0 = part_place(part, parts, span, heads_kv, t0)
    start, length, key0 = block_place(block, cu_ptr, stride_cu, n_seqs, sk, BS, PACKED)
    rows_at = rows_ptr + (part * n_entries + first)
    shift = part_t0 - start + off
    masked, last = rows_with_a_mask(rows_at, n_rows, shift, key0, GROUP, BS, BS_PAD)
    index = tl.arange(0, BS_PAD)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    readable = (index < BS) & (key0 + index < length) & (key0 + index <= last)
    key_rows = (start + key0 + index).to(tl.int64)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    v_base = v_ptr + (b64 * stride_vb + h64 * stride_vh)
    k = load_rows(k_base, key_rows * stride_ks, readable, d_cols, stride_kd, d, EVEN_D)
    v = load_rows(v_base, key_rows * stride_vs, readable, dv_cols, stride_vd, dv, EVEN_DV)
    t64 = part_t0.to(tl.int64)
    q_base = q_ptr + (b64 * stride_qb + h64 * GROUP * stride_qh + t64 * stride_qs)
    do_base = do_ptr + (b64 * stride_dob + h64 * GROUP * stride_doh + t64 * stride_dos)
    stats_at = stats_ptr + (part // parts * tq + t64) * GROUP * 2
    part_dq_at = part_dq_ptr + (part * n_entries + first) * GROUP * pitch
    edge = r0 + (tl.maximum(tl.minimum(masked, r1) - r0, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    factor = score_factor(scale, FOLD)
    dk = tl.zeros([BS_PAD, D_PAD], tl.float32)
    dv_sum = tl.zeros([BS_PAD, DV_PAD], tl.float32)
    dk, dv_sum = _differentiate_rows(
        dk, dv_sum, q_base, do_base, stats_at, rows_at, part_dq_at, k, v, r0, edge, r1, key0, shift,
        stride_qh, stride_qs, stride_qd, stride_doh, stride_dos, stride_dod, d, dv, pitch, factor, scale,
        True, GROUP, BS, BS_PAD, BLOCK_M, D_PAD, DV_PAD, EVEN_D, EVEN_DV, FOLD, WANT_DQ, WANT_DK, WANT_DV, ROWS_FIRST, 1,
        DOT_FP32)
    dk, dv_sum = _differentiate_rows(
        dk, dv_sum, q_base, do_base, stats_at, rows_at, part_dq_at, k, v, edge, r1, r1, key0, shift,
        stride_qh, stride_qs, stride_qd, stride_doh, stride_dos, stride_dod, d, dv, pitch, factor, scale,
        False, GROUP, BS, BS_PAD, BLOCK_M, D_PAD, DV_PAD, EVEN_D, EVEN_DV, FOLD, WANT_DQ, WANT_DK, WANT_DV, ROWS_FIRST, STAGES,
        DOT_FP32)
    out = (part * n_items + item) * BS + index
    if WANT_DK:
        store_rows(part_dk_ptr, out * pitch_k, index < BS, d_cols, 1, d, dk * scale, EVEN_D)
    if WANT_DV:
        store_rows(part_dv_ptr, out * pitch_v, index < BS, dv_cols, 1, dv, dv_sum, EVEN_DV)


@triton.jit
def nsa_bwd_keys(
    part_ptr, sums_ptr, offsets_ptr, cu_ptr, out_ptr,
    stride_outb, stride_outh, stride_outs, stride_outd, stride_cu,
    n_programs, n_items, n_blocks, heads_kv, group, parts, n_seqs, sk, chunk_rows, d, pitch, earlier, later,
    BS: tl.constexpr, BS_PAD: tl.constexpr, D_PAD: tl.constexpr, EVEN_D: tl.constexpr, PACKED: tl.constexpr,
):
    """dK or dV of one block: parts in order, a part's chunks in order. ``earlier``: launches before this one left their
    sums; ``later``: more are to come."""
    pid = linear_pid()
    if pid >= n_programs:
        return
    block = pid % n_blocks
    bh = (pid // n_blocks).to(tl.int64)
    index = tl.arange(0, BS_PAD)
    cols = tl.arange(0, D_PAD)
    inside = index < BS
    total = tl.zeros([BS_PAD, D_PAD], tl.float32)
    own = (pid.to(tl.int64) * BS + index) * pitch
    total += load_rows(sums_ptr, own, inside & (earlier > 0), cols, 1, d, EVEN_D)
    for i in range(0, parts):
        part = bh * parts + i
        at = offsets_ptr + part * (n_blocks + 1) + block
        first = tl.load(at)
        rows = (tl.load(at + 1) - first) * group
        item0 = part * n_items + (first * group // chunk_rows + block)
        size = chunk_size(rows, chunk_rows)
        for c in range(0, (rows + size - 1) // size):
            total += load_rows(part_ptr, ((item0 + c) * BS + index) * pitch, inside, cols, 1, d, EVEN_D)
    store_rows(sums_ptr, own, inside & (later > 0), cols, 1, d, total, EVEN_D)
    start, length, key0 = block_place(block, cu_ptr, stride_cu, n_seqs, sk, BS, PACKED)
    keep = inside & (key0 + index < length) & (later == 0)
    key_rows = (start + key0 + index).to(tl.int64)
    store_rows(out_ptr + (bh // heads_kv) * stride_outb + (bh % heads_kv) * stride_outh, key_rows * stride_outs, keep,
               cols, stride_outd, d, total, EVEN_D)


@triton.jit
def nsa_bwd_queries(
    part_ptr, place_ptr, out_ptr, stride_outb, stride_outh, stride_outs, stride_outd,
    n_programs, n_tiles, heads_kv, group, slots, parts, span, t0, n_tokens, d, pitch,
    BLOCK_M: tl.constexpr, UNROLL: tl.constexpr, D_PAD: tl.constexpr, EVEN_D: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    rows = (pid % n_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = (pid // n_tiles).to(tl.int64)
    valid = rows < n_tokens * group
    token = rows // group
    head = rows - token * group
    entries = bh * parts * span * slots
    place_at = place_ptr + entries + token.to(tl.int64) * slots
    part_at = part_ptr + entries * group * pitch
    cols = tl.arange(0, D_PAD)
    total = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for s0 in tl.range(0, slots, UNROLL, num_stages=1):
        for u in tl.static_range(UNROLL):
            place = tl.load(place_at + s0 + u, mask=valid & (s0 + u < slots), other=-1)
            at = (place.to(tl.int64) * group + head) * pitch
            total += load_rows(part_at, at, place >= 0, cols, 1, d, EVEN_D).to(tl.float32)
    h64 = (bh % heads_kv) * group + head
    t64 = (t0 + token).to(tl.int64)
    store_rows(out_ptr + (bh // heads_kv) * stride_outb, h64 * stride_outh + t64 * stride_outs, valid, cols, stride_outd,
               d, total, EVEN_D)
