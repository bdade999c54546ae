"""Selection attention forward, steps 2 and 3.

`nsa_fwd_blocks`, blocks stationary: a program owns one block of keys and up to `chunk_rows` of the (entry, head) rows
that chose it. K and V of the block are loaded once; tiles of BLOCK_M gathered query rows stream by, each a whole softmax
over the block: its normalised output and its log-sum go to the partial arrays, at the row's own place, so nothing is
added up between programs. Rows are in token order: the first ones (tokens inside the block) need the causal mask, all
others see the block whole. Keys after the last row's position are not read at all.

    Why not queries stationary: a group of 16 rows re-reads 32 KB of K and V for every chosen block, 67 GB at 32k tokens
    of 64/4 heads, and sits on L2 bandwidth; and groups below 16 leave the tensor tile empty. Here a (token, block) pair
    moves 4 KB of Q, and 4 KB of partial output twice, whatever the group is.

`nsa_combine`, tokens stationary: BLOCK_M (token, head) rows read the partial results of their slots and merge them by
their log-sums; bound by memory. Rows without blocks get o = 0, lse = -inf.
"""

import triton
import triton.language as tl

from ..common import LN2, LOG2E, dot, linear_pid
from .common import block_place, gathered, load_rows, rows_with_a_mask, store_rows, work_item


@triton.jit
def _attend_rows(
    q_base, rows_at, part_o_ptr, part_lse_ptr, part_row, k, v, lo, hi, r1, key0, shift, slots, t0, stride_qh,
    stride_qs, stride_qd, d, dv, pitch, factor,
    MASKED: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr,
    STAGES: tl.constexpr, DOT_FP32: tl.constexpr,
):
    """Rows [lo, hi) of the block, whole tiles; those at or past r1 are not there."""
    index = tl.arange(0, BLOCK_M)
    keys = key0 + tl.arange(0, BS_PAD)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    for r in tl.range(lo, hi, BLOCK_M, num_stages=STAGES):
        rows = r + index
        valid = rows < r1
        token, slot, head = gathered(rows_at, rows, valid, GROUP, SLOTS)
        offset = (t0 + token).to(tl.int64) * stride_qs + head.to(tl.int64) * stride_qh
        q = load_rows(q_base, offset, valid, d_cols, stride_qd, d, EVEN_D)
        s = dot(q, tl.trans(k), DOT_FP32) * factor
        if MASKED:
            position = tl.where(valid, token + shift, key0 + BS)
            s = tl.where((keys[None, :] <= position[:, None]) & (keys < key0 + BS)[None, :], s, float("-inf"))
        else:
            if BS_PAD != BS:
                s = tl.where((keys < key0 + BS)[None, :], s, float("-inf"))
        top = tl.max(s, 1)
        p = tl.exp2(s - top[:, None])
        total = tl.sum(p, 1)
        o = dot(p.to(v.dtype), v, DOT_FP32) / total[:, None]
        out = part_row + (token.to(tl.int64) * slots + slot) * GROUP + head
        store_rows(part_o_ptr, out * pitch, valid, dv_cols, 1, dv, o, EVEN_DV)
        tl.store(part_lse_ptr + out, top + tl.log2(total), mask=valid)


@triton.jit
def nsa_fwd_blocks(
    q_ptr, k_ptr, v_ptr, part_o_ptr, part_lse_ptr, rows_ptr, offsets_ptr, items_ptr, cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_cu,
    n_programs, n_items, n_entries, n_blocks, heads_kv, slots, t0, n_seqs, sk, off, chunk_rows, d, dv, pitch, scale,
    GROUP: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr, DOT_FP32: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    item = pid % n_items
    bh = (pid // n_items).to(tl.int64)
    block, first, r0, r1, n_rows = work_item(items_ptr, offsets_ptr, bh, item, n_items, n_blocks, GROUP, chunk_rows)
    if r0 >= r1:
        return
    b64 = bh // heads_kv
    h64 = bh % heads_kv
    start, length, key0 = block_place(block, cu_ptr, stride_cu, n_seqs, sk, BS, PACKED)
    rows_at = rows_ptr + (bh * n_entries + first)
    shift = t0 - start + off
    masked, last = rows_with_a_mask(rows_at, n_rows, shift, key0, GROUP, SLOTS, BS, BS_PAD)
    index = tl.arange(0, BS_PAD)
    readable = (index < BS) & (key0 + index < length) & (key0 + index <= last)
    key_rows = (start + key0 + index).to(tl.int64)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    v_base = v_ptr + (b64 * stride_vb + h64 * stride_vh)
    k = load_rows(k_base, key_rows * stride_ks, readable, tl.arange(0, D_PAD), stride_kd, d, EVEN_D)
    v = load_rows(v_base, key_rows * stride_vs, readable, tl.arange(0, DV_PAD), stride_vd, dv, EVEN_DV)
    q_base = q_ptr + (b64 * stride_qb + h64 * GROUP * stride_qh)
    part_row = bh * n_entries * GROUP
    edge = r0 + (tl.maximum(tl.minimum(masked, r1) - r0, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    factor = scale * LOG2E
    _attend_rows(q_base, rows_at, part_o_ptr, part_lse_ptr, part_row, k, v, r0, edge, r1, key0, shift, slots, t0,
                 stride_qh, stride_qs, stride_qd, d, dv, pitch, factor,
                 True, GROUP, SLOTS, BS, BS_PAD, BLOCK_M, D_PAD, DV_PAD, EVEN_D, EVEN_DV, STAGES, DOT_FP32)
    _attend_rows(q_base, rows_at, part_o_ptr, part_lse_ptr, part_row, k, v, edge, r1, r1, key0, shift, slots, t0,
                 stride_qh, stride_qs, stride_qd, d, dv, pitch, factor,
                 False, GROUP, SLOTS, BS, BS_PAD, BLOCK_M, D_PAD, DV_PAD, EVEN_D, EVEN_DV, STAGES, DOT_FP32)


@triton.jit
def nsa_combine(
    part_o_ptr, part_lse_ptr, clean_ptr, o_ptr, lse_ptr,
    stride_ob, stride_oh, stride_os, stride_od, stride_lse_b, stride_lse_h, stride_lse_s,
    n_programs, n_tiles, heads_kv, group, slots, t0, n_tokens, dv, pitch,
    BLOCK_M: tl.constexpr, SLOTS: tl.constexpr, DV_PAD: tl.constexpr, EVEN_DV: tl.constexpr, HAS_LSE: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    rows = (pid % n_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = (pid // n_tiles).to(tl.int64)
    valid = rows < n_tokens * group
    token = rows // group
    head = rows - token * group
    entry = (bh * n_tokens + token) * slots
    cols = tl.arange(0, DV_PAD)

    slot = tl.arange(0, SLOTS)
    inside = valid[:, None] & (slot < slots)[None, :]
    used = tl.load(clean_ptr + entry[:, None] + slot[None, :], mask=inside, other=-1) >= 0
    at = (entry[:, None] + slot[None, :]) * group + head[:, None]
    sums = tl.load(part_lse_ptr + at, mask=used, other=float("-inf"))
    top = tl.max(sums, 1)
    empty = top == float("-inf")
    top = tl.where(empty, 0.0, top)
    total = tl.sum(tl.exp2(sums - top[:, None]), 1)
    total = tl.where(empty, 1.0, total)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    for s in tl.range(0, slots, num_stages=STAGES):
        there = tl.load(clean_ptr + entry + s, mask=valid, other=-1) >= 0
        place = (entry + s) * group + head
        weight = tl.exp2(tl.load(part_lse_ptr + place, mask=there, other=float("-inf")) - top)
        part = load_rows(part_o_ptr, place * pitch, there, cols, 1, dv, EVEN_DV)
        acc += part.to(tl.float32) * weight[:, None]
    b64 = bh // heads_kv
    h64 = (bh % heads_kv) * group + head
    t64 = (t0 + token).to(tl.int64)
    store_rows(o_ptr + b64 * stride_ob, h64 * stride_oh + t64 * stride_os, valid, cols, stride_od, dv,
               acc / total[:, None], EVEN_DV)
    if HAS_LSE:
        lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2)
        tl.store(lse_ptr + b64 * stride_lse_b + h64 * stride_lse_h + t64 * stride_lse_s, lse, mask=valid)
