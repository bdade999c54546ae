"""Selection attention forward, steps 2 and 3.

`nsa_fwd_blocks`, blocks stationary: a program owns one block of keys and up to `chunk_rows` of the (entry, head) rows
that chose it. K and V of the block are loaded once; tiles of BLOCK_M gathered query rows stream by, each a whole softmax
over the block: its normalised output and its log-sum go to the partial arrays at the row's place in the block's list, so
a tile is written as one piece and nothing is added up between programs. Rows are in token order: the first ones (tokens
inside the block) need the causal mask, all others see the block whole. Keys after the last row's position are not read.

    Why not queries stationary: a group of 16 rows re-reads 32 KB of K and V for every chosen block, 67 GB at 32k tokens
    of 64/4 heads, and sits on L2 bandwidth; and groups below 16 leave the tensor tile empty. Here a (token, block) pair
    moves 4 KB of Q, and 4 KB of partial output twice, whatever the group is.

    The tokens of the next tile are read while this one is computed and carried to the next round: addresses of Q then
    depend on registers alone, so that several tiles of Q can be on their way.

`nsa_combine`, tokens stationary: BLOCK_M (token, head) rows read the partial results of their slots, UNROLL at a time, and
merge them by their log-sums; bound by memory. Rows without blocks get o = 0, lse = -inf.
"""

import triton
import triton.language as tl

from ..common import LN2, LOG2E, dot, linear_pid
from .common import (
    block_place,
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
def _attend_rows(
    q_base, rows_at, part_o_at, part_lse_at, k, v, lo, hi, r1, key0, shift, stride_qh, stride_qs, stride_qd, d, dv, pitch,
    factor,
    MASKED: tl.constexpr, GROUP: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    STAGES: tl.constexpr, DOT_FP32: tl.constexpr,
):
    """Rows [lo, hi) of the block, whole tiles; those at or past r1 are not there."""
    index = tl.arange(0, BLOCK_M)
    keys = key0 + tl.arange(0, BS_PAD)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    out_cols = index[:, None] * pitch + dv_cols[None, :]
    out_at = part_o_at + lo.to(tl.int64) * pitch
    token = tile_tokens(rows_at, lo, r1, index, GROUP, BLOCK_M)
    for r in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
        _entry, head = tile_entries(r, index, GROUP, BLOCK_M)
        offset = token.to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
        q = load_all_rows(q_base, offset, d_cols, stride_qd, d, EVEN_D)
        later = tile_tokens(rows_at, r + BLOCK_M, r1, index, GROUP, BLOCK_M)
        s = dot(q, tl.trans(k), DOT_FP32) * factor
        if MASKED:
            s = tl.where((keys[None, :] <= (token + shift)[:, None]) & (keys < key0 + BS)[None, :], s, float("-inf"))
        else:
            if BS_PAD != BS:
                s = tl.where((keys < key0 + BS)[None, :], s, float("-inf"))
        top = tl.max(s, 1)
        p = tl.exp2(s - top[:, None])
        total = tl.sum(p, 1)
        o = dot(p.to(v.dtype), v, DOT_FP32) * (1.0 / total)[:, None]
        valid = r + index < r1
        keep = valid[:, None]
        if not EVEN_DV:
            keep = keep & (dv_cols < dv)[None, :]
        tl.store(out_at + out_cols, o.to(part_o_at.dtype.element_ty), mask=keep)
        tl.store(part_lse_at + r + index, top + tl.log2(total), mask=valid)
        out_at += BLOCK_M * pitch
        token = later


@triton.jit
def nsa_fwd_blocks(
    q_ptr, k_ptr, v_ptr, part_o_ptr, part_lse_ptr, rows_ptr, offsets_ptr, items_ptr, cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_cu,
    n_programs, n_items, n_entries, n_blocks, heads_kv, parts, span, t0, n_seqs, sk, off, chunk_rows, d, dv, pitch, scale,
    GROUP: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
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
    readable = (index < BS) & (key0 + index < length) & (key0 + index <= last)
    key_rows = (start + key0 + index).to(tl.int64)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    v_base = v_ptr + (b64 * stride_vb + h64 * stride_vh)
    k = load_rows(k_base, key_rows * stride_ks, readable, tl.arange(0, D_PAD), stride_kd, d, EVEN_D)
    v = load_rows(v_base, key_rows * stride_vs, readable, tl.arange(0, DV_PAD), stride_vd, dv, EVEN_DV)
    q_base = q_ptr + (b64 * stride_qb + h64 * GROUP * stride_qh + part_t0.to(tl.int64) * stride_qs)
    part_row = (part * n_entries + first) * GROUP
    part_o_at = part_o_ptr + part_row * pitch
    part_lse_at = part_lse_ptr + part_row
    edge = r0 + (tl.maximum(tl.minimum(masked, r1) - r0, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    factor = scale * LOG2E
    _attend_rows(q_base, rows_at, part_o_at, part_lse_at, k, v, r0, edge, r1, key0, shift, stride_qh, stride_qs, stride_qd,
                 d, dv, pitch, factor,
                 True, GROUP, BS, BS_PAD, BLOCK_M, D_PAD, DV_PAD, EVEN_D, EVEN_DV, 1, DOT_FP32)
    _attend_rows(q_base, rows_at, part_o_at, part_lse_at, k, v, edge, r1, r1, key0, shift, stride_qh, stride_qs, stride_qd,
                 d, dv, pitch, factor,
                 False, GROUP, BS, BS_PAD, BLOCK_M, D_PAD, DV_PAD, EVEN_D, EVEN_DV, STAGES, DOT_FP32)


@triton.jit
def nsa_combine(
    part_o_ptr, part_lse_ptr, place_ptr, o_ptr, lse_ptr,
    stride_ob, stride_oh, stride_os, stride_od, stride_lse_b, stride_lse_h, stride_lse_s,
    n_programs, n_tiles, heads_kv, group, slots, parts, span, t0, n_tokens, dv, pitch,
    BLOCK_M: tl.constexpr, UNROLL: tl.constexpr, DV_PAD: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LSE: tl.constexpr,
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
    part_o_at = part_o_ptr + entries * group * pitch
    part_lse_at = part_lse_ptr + entries * group
    cols = tl.arange(0, DV_PAD)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for s0 in tl.range(0, slots, UNROLL, num_stages=1):
        # All loads before the first use, so that UNROLL rows are on their way at the same time.
        sums = ()
        outs = ()
        for u in tl.static_range(UNROLL):
            place = tl.load(place_at + s0 + u, mask=valid & (s0 + u < slots), other=-1)
            at = place.to(tl.int64) * group + head
            sums = sums + (tl.load(part_lse_at + at, mask=place >= 0, other=float("-inf")),)
            outs = outs + (load_rows(part_o_at, at * pitch, place >= 0, cols, 1, dv, EVEN_DV),)
        top_now = top
        for u in tl.static_range(UNROLL):
            top_now = tl.maximum(top_now, sums[u])
        base = tl.where(top_now == float("-inf"), 0.0, top_now)
        alpha = tl.exp2(top - base)
        total = total * alpha
        acc = acc * alpha[:, None]
        for u in tl.static_range(UNROLL):
            weight = tl.exp2(sums[u] - base)
            total += weight
            acc += outs[u].to(tl.float32) * weight[:, None]
        top = top_now
    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    b64 = bh // heads_kv
    h64 = (bh % heads_kv) * group + head
    t64 = (t0 + token).to(tl.int64)
    store_rows(o_ptr + b64 * stride_ob, h64 * stride_oh + t64 * stride_os, valid, cols, stride_od, dv,
               acc * (1.0 / total)[:, None], EVEN_DV)
    if HAS_LSE:
        lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
        tl.store(lse_ptr + b64 * stride_lse_b + h64 * stride_lse_h + t64 * stride_lse_s, lse, mask=valid)
