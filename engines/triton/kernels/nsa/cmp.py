"""Attention over compressed keys: block c covers tokens [c * stride, c * stride + length) and is seen from its last token on.

A program of the row kernels owns TOKENS query tokens of one K/V head with all heads of the group, one (token, head) pair
a row, so that the keys are read once for the group. Rows of a tile see a prefix of the compressed keys; the loop ends
where the last row's prefix does, and only the blocks beyond the first row's prefix need a mask.
    nsa_cmp_fwd          o and lse, online softmax
    nsa_cmp_importance   with the final lse: P of each selection block's overlapping keys, summed over them and the group
    nsa_cmp_dq           dQ
`nsa_cmp_dkdv`, keys stationary: BLOCK_N compressed keys and one of SPLITS shares of the row tiles that see them (in a fixed
order; with 16 tokens a key there are too few key tiles to fill a card); `nsa_cmp_sum` adds the shares in order.

Packed: block c of the sequence at offset s is row s // stride + c of k and v; rows without a block belong to nobody.
"""

import triton
import triton.language as tl

from ..bwd_common import probabilities, row_statistics, score_factor
from ..common import LN2, LOG2E, dot, dot_add, linear_pid, packed_slot
from .common import load_rows, store_rows


@triton.jit
def blocks_seen(position, length, stride, count):
    """How many compressed blocks a query at ``position`` sees, of ``count``."""
    return tl.minimum(tl.maximum(position + (1 + stride - length), 0) // stride, count)


@triton.jit
def blocks_of(tokens, length, stride):
    """Whole blocks in a sequence of so many tokens."""
    return tl.maximum(tokens - length + stride, 0) // stride


@triton.jit
def row_tile(slot, cu_ptr, stride_cu, n_seqs, tq, sk, off, length, stride, TOKENS: tl.constexpr, PACKED: tl.constexpr):
    """(first token of the sequence, its extent, tile, position of token 0, first compressed row, compressed blocks)."""
    if PACKED:
        sequence, start, extent, tile = packed_slot(cu_ptr, stride_cu, slot, n_seqs, tq, TOKENS)
        count = tl.where((sequence >= 0) & (sequence < n_seqs), blocks_of(extent, length, stride), 0)
        shift = extent * 0
        first = start // stride
    else:
        start = slot * 0
        extent = start + tq
        tile = slot
        count = blocks_of(start + sk, length, stride)
        shift = start + off
        first = start
    return start, extent, tile, shift, first, count


@triton.jit
def nsa_cmp_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od, stride_lse_b, stride_lse_h, stride_lse_s, stride_cu,
    n_programs, n_tiles, heads_kv, n_seqs, tq, sk, off, length, stride, d, dv, scale,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, STAGES: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    # The longest tiles first.
    slot = n_tiles - 1 - pid % n_tiles
    bh = (pid // n_tiles).to(tl.int64)
    b64 = bh // heads_kv
    h64 = bh % heads_kv
    start, extent, tile, shift, first, count = row_tile(slot, cu_ptr, stride_cu, n_seqs, tq, sk, off, length, stride,
                                                        TOKENS, PACKED)
    if tile * TOKENS >= extent:
        return
    rows = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (token < extent)
    head = h64 * GROUP + rows % GROUP
    t64 = (start + token).to(tl.int64)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    q = load_rows(q_ptr + b64 * stride_qb, head * stride_qh + t64 * stride_qs, valid, d_cols, stride_qd, d, EVEN_D)
    seen = tl.where(valid, blocks_seen(token + shift, length, stride, count), 0)
    last = tl.max(seen, 0)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    v_base = v_ptr + (b64 * stride_vb + h64 * stride_vh)
    factor = scale * LOG2E
    keys = tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for n0 in tl.range(0, last, BLOCK_N, num_stages=STAGES):
        readable = n0 + keys < last
        at = (first + n0 + keys).to(tl.int64)
        k = load_rows(k_base, at * stride_ks, readable, d_cols, stride_kd, d, EVEN_D)
        s = dot(q, tl.trans(k), DOT_FP32) * factor
        s = tl.where((n0 + keys)[None, :] < seen[:, None], s, float("-inf"))
        top_now = tl.maximum(top, tl.max(s, 1))
        base = tl.where(top_now == float("-inf"), 0.0, top_now)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(top - base)
        total = total * alpha + tl.sum(p, 1)
        v = load_rows(v_base, at * stride_vs, readable, dv_cols, stride_vd, dv, EVEN_DV)
        acc = dot_add(p.to(v.dtype), v, acc * alpha[:, None], DOT_FP32)
        top = top_now
    empty = top == float("-inf")
    norm = tl.where(empty, 1.0, total)
    store_rows(o_ptr + b64 * stride_ob, head * stride_oh + t64 * stride_os, valid, dv_cols, stride_od, dv,
               acc / norm[:, None], EVEN_DV)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(norm)) * LN2)
    tl.store(lse_ptr + b64 * stride_lse_b + head * stride_lse_h + t64 * stride_lse_s, lse, mask=valid)


@triton.jit
def nsa_cmp_importance(
    q_ptr, k_ptr, lse_ptr, out_ptr, cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_lse_b, stride_lse_h, stride_lse_s, stride_imp_b, stride_imp_h, stride_imp_t, stride_imp_m, stride_cu,
    n_programs, n_tiles, heads_kv, n_seqs, tq, sk, off, length, stride, n_out, d, scale,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, TOKENS_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BS: tl.constexpr, OUTS: tl.constexpr, D_PAD: tl.constexpr, EVEN_D: tl.constexpr, PACKED: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    slot = n_tiles - 1 - pid % n_tiles
    bh = (pid // n_tiles).to(tl.int64)
    b64 = bh // heads_kv
    h64 = bh % heads_kv
    start, extent, tile, shift, first, count = row_tile(slot, cu_ptr, stride_cu, n_seqs, tq, sk, off, length, stride,
                                                        TOKENS, PACKED)
    if tile * TOKENS >= extent:
        return
    rows = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (token < extent)
    head = h64 * GROUP + rows % GROUP
    t64 = (start + token).to(tl.int64)
    d_cols = tl.arange(0, D_PAD)
    q = load_rows(q_ptr + b64 * stride_qb, head * stride_qh + t64 * stride_qs, valid, d_cols, stride_qd, d, EVEN_D)
    at = lse_ptr + b64 * stride_lse_b + head * stride_lse_h + t64 * stride_lse_s
    lse = tl.load(at, mask=valid, other=float("-inf"))
    seen = tl.where(valid & (lse != float("-inf")), blocks_seen(token + shift, length, stride, count), 0)
    lse = tl.where(seen > 0, lse, 0.0)
    last = tl.max(seen, 0)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    keys = tl.arange(0, BLOCK_N)
    own = tl.arange(0, TOKENS_PAD)
    of_token = ((rows // GROUP)[None, :] == own[:, None]) & valid[None, :]
    out_token = tile * TOKENS + own
    stored = (own < TOKENS) & (out_token < extent)
    out = out_ptr + b64 * stride_imp_b + h64 * stride_imp_h + (start + out_token).to(tl.int64)[:, None] * stride_imp_t
    for m0 in range(0, n_out, OUTS):
        m = m0 + tl.arange(0, OUTS)
        # The keys that overlap these blocks, of those that some row sees.
        lo = tl.maximum(m0 * BS - length + stride, 0) // stride
        hi = tl.minimum(((m0 + OUTS) * BS - 1) // stride + 1, last)
        sums = tl.zeros([BLOCK_M, OUTS], tl.float32)
        for n0 in range(lo, hi, BLOCK_N):
            c = n0 + keys
            k = load_rows(k_base, (first + c).to(tl.int64) * stride_ks, c < hi, d_cols, stride_kd, d, EVEN_D)
            s = (dot(q, tl.trans(k), DOT_FP32) * scale - lse[:, None]) * LOG2E
            p = tl.where((c[None, :] < seen[:, None]) & (c < hi)[None, :], tl.exp2(s), 0.0)
            overlap = (c[:, None] * stride < (m + 1)[None, :] * BS) & (c[:, None] * stride + length > m[None, :] * BS)
            sums = tl.dot(p, overlap.to(tl.float32), sums, input_precision="ieee")
        grouped = tl.dot(of_token.to(tl.float32), sums, input_precision="ieee")
        tl.store(out + m[None, :].to(tl.int64) * stride_imp_m, grouped, mask=stored[:, None] & (m < n_out)[None, :])


@triton.jit
def nsa_cmp_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, dq_ptr, cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_dob, stride_doh, stride_dos, stride_dod, stride_dqb, stride_dqh, stride_dqs, stride_dqd,
    stride_cu,
    n_programs, n_tiles, heads_kv, n_seqs, tq, sk, off, length, stride, d, dv, scale,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, FOLD: tl.constexpr,
    STAGES: tl.constexpr, DOT_FP32: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    slot = n_tiles - 1 - pid % n_tiles
    bh = (pid // n_tiles).to(tl.int64)
    b64 = bh // heads_kv
    h64 = bh % heads_kv
    start, extent, tile, shift, first, count = row_tile(slot, cu_ptr, stride_cu, n_seqs, tq, sk, off, length, stride,
                                                        TOKENS, PACKED)
    if tile * TOKENS >= extent:
        return
    rows = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + rows // GROUP
    valid = (rows < TOKENS * GROUP) & (token < extent)
    head = h64 * GROUP + rows % GROUP
    t64 = (start + token).to(tl.int64)
    seen = tl.where(valid, blocks_seen(token + shift, length, stride, count), 0)
    read = seen > 0  # a row that sees nothing may hold anything
    last = tl.max(seen, 0)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    q = load_rows(q_ptr + b64 * stride_qb, head * stride_qh + t64 * stride_qs, read, d_cols, stride_qd, d, EVEN_D)
    do = load_rows(do_ptr + b64 * stride_dob, head * stride_doh + t64 * stride_dos, read, dv_cols, stride_dod, dv, EVEN_DV)
    stats_at = stats_ptr + bh * tq * GROUP * 2
    lse, delta = row_statistics(stats_at, t64 * GROUP + rows % GROUP, read, True)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    v_base = v_ptr + (b64 * stride_vb + h64 * stride_vh)
    factor = score_factor(scale, FOLD)
    keys = tl.arange(0, BLOCK_N)
    dq = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for n0 in tl.range(0, last, BLOCK_N, num_stages=STAGES):
        readable = n0 + keys < last
        at = (first + n0 + keys).to(tl.int64)
        k = load_rows(k_base, at * stride_ks, readable, d_cols, stride_kd, d, EVEN_D)
        v = load_rows(v_base, at * stride_vs, readable, dv_cols, stride_vd, dv, EVEN_DV)
        raw = dot(q, tl.trans(k), DOT_FP32)
        p, _slope = probabilities(raw, lse[:, None], raw, factor, 1.0, False, False, FOLD)
        ds = p * (dot(do, tl.trans(v), DOT_FP32) - delta[:, None])
        ds = tl.where((n0 + keys)[None, :] < seen[:, None], ds, 0.0)
        dq = dot_add(ds.to(k.dtype), k, dq, DOT_FP32)
    store_rows(dq_ptr + b64 * stride_dqb, head * stride_dqh + t64 * stride_dqs, valid, d_cols, stride_dqd, d, dq * scale,
               EVEN_D)


@triton.jit
def nsa_cmp_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, stats_ptr, part_dk_ptr, part_dv_ptr, cu_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd, stride_vb, stride_vh,
    stride_vs, stride_vd, stride_dob, stride_doh, stride_dos, stride_dod, stride_cu,
    n_programs, n_tiles, splits, n_rows_kv, heads_kv, n_seqs, tq, sk, off, length, stride, d, dv, pitch_k, pitch_v, scale,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    EVEN_D: tl.constexpr, EVEN_DV: tl.constexpr, PACKED: tl.constexpr, FOLD: tl.constexpr, WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr, STAGES: tl.constexpr, DOT_FP32: tl.constexpr,
):
    """Packed: tiles are of the compressed rows of all sequences; a tile may hold rows of several sequences, done in turn."""
    pid = linear_pid()
    if pid >= n_programs:
        return
    split = pid % splits
    tile = pid // splits % n_tiles
    bh = (pid // splits // n_tiles).to(tl.int64)
    b64 = bh // heads_kv
    h64 = bh % heads_kv
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    d_cols = tl.arange(0, D_PAD)
    dv_cols = tl.arange(0, DV_PAD)
    k_base = k_ptr + (b64 * stride_kb + h64 * stride_kh)
    v_base = v_ptr + (b64 * stride_vb + h64 * stride_vh)
    q_base = q_ptr + (b64 * stride_qb + h64 * GROUP * stride_qh)
    do_base = do_ptr + (b64 * stride_dob + h64 * GROUP * stride_doh)
    stats_at = stats_ptr + bh * tq * GROUP * 2
    factor = score_factor(scale, FOLD)
    index = tl.arange(0, BLOCK_M)
    dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, DV_PAD], tl.float32)
    sequence = tile * 0
    n_turns = sequence + 1
    if PACKED:
        # The sequences whose rows meet the tile: from the one that owns its first row on.
        low = sequence
        high = sequence + tl.maximum(n_seqs - 1, 0)
        while low < high:
            mid = (low + high + 1) // 2
            begin = tl.minimum(tl.maximum(tl.load(cu_ptr + mid.to(tl.int64) * stride_cu), 0), tq).to(tl.int32) // stride
            go = begin <= tile * BLOCK_N
            low = tl.where(go, mid, low)
            high = tl.where(go, high, mid - 1)
        sequence = low
        n_turns = n_seqs - sequence
    turn = sequence * 0
    while turn < n_turns:
        if PACKED:
            at = cu_ptr + (sequence + turn).to(tl.int64) * stride_cu
            start = tl.minimum(tl.maximum(tl.load(at), 0), tq).to(tl.int32)
            extent = tl.maximum(tl.minimum(tl.maximum(tl.load(at + stride_cu), 0), tq).to(tl.int32) - start, 0)
            count = blocks_of(extent, length, stride)
            first = start // stride
            shift = turn * 0
        else:
            start = turn * 0
            extent = start + tq
            count = blocks_of(start + sk, length, stride)
            first = start
            shift = start + off
        block = keys - first
        real = (block >= 0) & (block < count) & (keys < n_rows_kv)
        least = tl.maximum(tile * BLOCK_N - first, 0)
        # Tokens from the first one that sees a block of the tile, in tiles of rows, dealt out to the splits in turn.
        from_token = tl.maximum(least * stride + length - 1 - shift, 0)
        some = tl.max(real.to(tl.int32), 0)
        r0 = from_token * GROUP + split * BLOCK_M
        r_end = tl.where(some > 0, extent * GROUP, 0)
        k = load_rows(k_base, keys.to(tl.int64) * stride_ks, real, d_cols, stride_kd, d, EVEN_D)
        v = load_rows(v_base, keys.to(tl.int64) * stride_vs, real, dv_cols, stride_vd, dv, EVEN_DV)
        for r in tl.range(r0, r_end, BLOCK_M * splits, num_stages=STAGES):
            rows = r + index
            token = rows // GROUP
            seen = tl.where(rows < r_end, blocks_seen(token + shift, length, stride, count), 0)
            valid = seen > 0
            h = (rows % GROUP).to(tl.int64)
            t64 = (start + token).to(tl.int64)
            q = load_rows(q_base, h * stride_qh + t64 * stride_qs, valid, d_cols, stride_qd, d, EVEN_D)
            do = load_rows(do_base, h * stride_doh + t64 * stride_dos, valid, dv_cols, stride_dod, dv, EVEN_DV)
            lse, delta = row_statistics(stats_at, t64 * GROUP + h, valid, True)
            raw = dot(k, tl.trans(q), DOT_FP32)
            p, _slope = probabilities(raw, lse[None, :], raw, factor, 1.0, False, False, FOLD)
            keep = real[:, None] & (block[:, None] < seen[None, :])
            p = tl.where(keep, p, 0.0)
            if WANT_DV:
                dv_sum = dot_add(p.to(do.dtype), do, dv_sum, DOT_FP32)
            if WANT_DK:
                ds = tl.where(keep, p * (dot(v, tl.trans(do), DOT_FP32) - delta[None, :]), 0.0)
                dk = dot_add(ds.to(q.dtype), q, dk, DOT_FP32)
        turn += 1
        if PACKED:
            # Done where the next sequence's rows begin past the tile.
            begin = tl.load(cu_ptr + tl.minimum(sequence + turn, n_seqs).to(tl.int64) * stride_cu)
            begin = tl.minimum(tl.maximum(begin, 0), tq).to(tl.int32) // stride
            turn = tl.where(begin >= (tile + 1) * BLOCK_N, n_turns, turn)
    out = (bh * splits + split) * n_rows_kv + keys
    inside = keys < n_rows_kv
    if WANT_DK:
        store_rows(part_dk_ptr, out * pitch_k, inside, d_cols, 1, d, dk * scale, EVEN_D)
    if WANT_DV:
        store_rows(part_dv_ptr, out * pitch_v, inside, dv_cols, 1, dv, dv_sum, EVEN_DV)


@triton.jit
def nsa_cmp_sum(
    part_ptr, out_ptr, stride_outb, stride_outh, stride_outs, stride_outd,
    n_programs, n_tiles, splits, n_rows_kv, heads_kv, d, pitch,
    BLOCK_M: tl.constexpr, D_PAD: tl.constexpr, EVEN_D: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    rows = (pid % n_tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    bh = (pid // n_tiles).to(tl.int64)
    inside = rows < n_rows_kv
    cols = tl.arange(0, D_PAD)
    total = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    for s in range(0, splits):
        total += load_rows(part_ptr, ((bh * splits + s) * n_rows_kv + rows) * pitch, inside, cols, 1, d, EVEN_D)
    store_rows(out_ptr + (bh // heads_kv) * stride_outb + (bh % heads_kv) * stride_outh, rows.to(tl.int64) * stride_outs,
               inside, cols, stride_outd, d, total, EVEN_D)
