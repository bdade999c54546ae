"""The Hopper backward's warps at head dim 256: 64 keys a block, two warpgroups with different first halves of the work.

dK and dV of 64 keys fill the registers, half the columns in each warpgroup.  Scores need all columns, so each
warpgroup computes one of the two score-shaped products and hands its result over through shared memory:
    scores:  S^T = K Q^T, P^T = exp2(S^T * factor - lse) -> p_ring;   then dV, dK, dQ, left half
    grads:   dP^T = V dO^T, dS^T = P^T (dP^T - delta)    -> ds_smem;  then dV, dK, dQ, right half
No barrier guards the reuse of p_ring and ds_smem; the others do:
    ds_smem is written again after p_full of the next tile, which `scores` signals after its products with dS;
    p_ring's buffer is written again two tiles later, after ds_full of the tile between, which `grads` signals
    after its product with P.
dO has one buffer: there is no room for two.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common import LOG2E
from .bwd_parts import (
    ROWS,
    flat_stats,
    flat_tile,
    flush_dq,
    load_keys,
    place,
    place_again,
    row_tiles,
    store_rows,
    visible,
)


@gluon.jit
def load_apart(operands, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr):
    """As ``load``, with barriers of its own for dO."""
    descs, tiles, bars, sizes = operands
    q_desc, k_desc, v_desc, do_desc, stat_desc = descs
    k_smem, v_smem, q_ring, do_ring, stat_ring = tiles
    kv_full, full, empty, do_full, do_empty = bars
    n_tiles, tiles_q, heads_k, group, sk = sizes
    tile, head_k, batch = place(gl.program_id(0), n_tiles, heads_k)
    n0 = tile * BN
    first, _ = row_tiles(n0, tiles_q, sk, BM, BN, CAUSAL)
    load_keys(k_desc, v_desc, k_smem, v_smem, kv_full, batch, head_k, n0, BN, D)
    heads_q = heads_k * group
    total = group * (tiles_q - first)
    head = head_k * group
    i = first
    mbarrier.expect(full.index(0), 2 * BM * D + 8 * BM)
    stat_row = (batch * heads_q + head) * tiles_q * 2
    tma.async_copy_global_to_shared(q_desc, [batch, head, i * BM, 0], full.index(0), q_ring.index(0))
    tma.async_copy_global_to_shared(stat_desc, [stat_row + i * 2, 0], full.index(0), stat_ring.index(0))
    for it in range(total):
        # dO of a tile before Q of the next: `grads` starts on this dO before it releases the buffer that the
        # next Q waits for.
        mbarrier.wait(do_empty, (it & 1) ^ 1)
        mbarrier.expect(do_full, 2 * BM * D)
        tma.async_copy_global_to_shared(do_desc, [batch, head, i * BM, 0], do_full, do_ring.index(0))
        i += 1
        if i == tiles_q:
            i = first
            head += 1
        nxt = it + 1
        if nxt < total:
            st = nxt & 1
            stat_row = (batch * heads_q + head) * tiles_q * 2
            mbarrier.wait(empty.index(st), ((nxt >> 1) & 1) ^ 1)
            mbarrier.expect(full.index(st), 2 * BM * D + 8 * BM)
            tma.async_copy_global_to_shared(q_desc, [batch, head, i * BM, 0], full.index(st), q_ring.index(st))
            tma.async_copy_global_to_shared(stat_desc, [stat_row + i * 2, 0], full.index(st), stat_ring.index(st))


@gluon.jit
def scores(operands, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr):
    (tiles, p_ring, ds_smem, dq_smem, bars, swap,
     dq_desc, dk_ptr, dv_ptr, out_strides, sizes, scale) = operands
    k_smem, _, q_ring, do_ring, stat_ring = tiles
    kv_full, full, empty, do_full, do_empty = bars
    p_full, ds_full, done = swap
    n_tiles, tiles_q, heads_k, group, sk = sizes
    H: gl.constexpr = D // 2
    dtype: gl.constexpr = q_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    S_COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    kt = flat_tile(k_smem, BN, D)
    do = flat_tile(do_ring.index(0), BM, D)
    tile, head_k, batch = place(gl.program_id(0), n_tiles, heads_k)
    n0 = tile * BN
    first, masked_to = row_tiles(n0, tiles_q, sk, BM, BN, CAUSAL)
    factor = scale * LOG2E
    total = group * (tiles_q - first)
    zero_s = gl.zeros([ROWS, BM], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([ROWS, 64], gl.float32, DQ_LAYOUT)
    dk = gl.zeros([ROWS, H], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([ROWS, H], gl.float32, ACC_LAYOUT)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(kt, flat_tile(q_ring.index(0), BM, D).permute([1, 0]), zero_s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    lse = flat_stats(stat_ring.index(0), BM).index(0).load(S_COLS)
    p = gl.exp2(s * factor - lse[None, :])
    i = first
    if i < masked_to:
        p = gl.where(visible(i * BM, n0, sk, BM, CAUSAL, S_LAYOUT), p, 0.0)
    dq_tile = (batch * heads_k + head_k) * group * tiles_q
    for it in range(total):
        st = it & 1
        q = flat_tile(q_ring.index(st), BM, D)
        p16 = p.to(dtype)
        p_ring.index(st).store(p16)
        fence_async_shared()
        mbarrier.arrive(p_full.index(st))
        mbarrier.wait(do_full, it & 1)
        p_op = gl.convert_layout(p16, P_LAYOUT, assert_trivial=True)
        dv_acc = warpgroup_mma(p_op, do.slice(0, H, 1), dv, is_async=True)
        # After the last tile its own Q takes the place of the next one's: nothing reads the result.
        nxt = gl.minimum(it + 1, total - 1)
        st2 = nxt & 1
        mbarrier.wait(full.index(st2), (nxt >> 1) & 1)
        s_acc = warpgroup_mma(kt, flat_tile(q_ring.index(st2), BM, D).permute([1, 0]), zero_s, use_acc=False,
                              is_async=True)
        dv, p_op = warpgroup_mma_wait(1, deps=[dv_acc, p_op])
        mbarrier.arrive(do_empty)
        mbarrier.wait(ds_full, it & 1)
        dk_acc = warpgroup_mma(ds_smem, q.slice(0, H, 1), dk, is_async=True)
        dq_acc = warpgroup_mma(ds_smem.permute([1, 0]), kt.slice(0, 64, 1), zero_q, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(2, deps=[s_acc])
        lse = flat_stats(stat_ring.index(st2), BM).index(0).load(S_COLS)
        p = gl.exp2(s * factor - lse[None, :])
        dq, dk, p = warpgroup_mma_wait(0, deps=[dq_acc, dk_acc, p])
        # Half of dQ's half at a time: for more there are no registers.
        flush_dq(dq, dq_smem, dq_desc, (dq_tile + i) * BM, 0)
        dq_acc = warpgroup_mma(ds_smem.permute([1, 0]), kt.slice(64, 64, 1), zero_q, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq_acc])
        mbarrier.arrive(empty.index(st))
        flush_dq(dq, dq_smem, dq_desc, (dq_tile + i) * BM, 64)
        i += 1
        if i == tiles_q:
            i = first
            dq_tile += tiles_q
        if i < masked_to:
            p = gl.where(visible(i * BM, n0, sk, BM, CAUSAL, S_LAYOUT), p, 0.0)
    tma.store_wait(0)
    # K is the staging buffer of the results once neither warpgroup multiplies by it.
    mbarrier.arrive(done)
    mbarrier.wait(done, 0)
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs = out_strides
    tile, head_k, batch = place_again(n_tiles, heads_k)
    dk_base = batch.to(gl.int64) * stride_dkb + head_k.to(gl.int64) * stride_dkh
    dv_base = batch.to(gl.int64) * stride_dvb + head_k.to(gl.int64) * stride_dvh
    staging = kt.slice(0, H, 1)
    store_rows(dv, staging, dv_ptr, dv_base, tile * BN, sk, stride_dvs, H)
    store_rows(dk * scale, staging, dk_ptr, dk_base, tile * BN, sk, stride_dks, H)


@gluon.jit
def grads(operands, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr):
    (tiles, p_ring, ds_smem, dq_smem, bars, swap,
     dq_desc, dk_ptr, dv_ptr, out_strides, sizes, scale) = operands
    k_smem, v_smem, q_ring, do_ring, stat_ring = tiles
    kv_full, full, empty, do_full, do_empty = bars
    p_full, ds_full, done = swap
    n_tiles, tiles_q, heads_k, group, sk = sizes
    H: gl.constexpr = D // 2
    dtype: gl.constexpr = q_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    S_COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    kt = flat_tile(k_smem, BN, D)
    vt = flat_tile(v_smem, BN, D)
    do = flat_tile(do_ring.index(0), BM, D)
    tile, head_k, batch = place(gl.program_id(0), n_tiles, heads_k)
    n0 = tile * BN
    first, masked_to = row_tiles(n0, tiles_q, sk, BM, BN, CAUSAL)
    total = group * (tiles_q - first)
    zero_s = gl.zeros([ROWS, BM], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([ROWS, 64], gl.float32, DQ_LAYOUT)
    dk = gl.zeros([ROWS, H], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([ROWS, H], gl.float32, ACC_LAYOUT)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(do_full, 0)
    dp = warpgroup_mma(vt, do.permute([1, 0]), zero_s, use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(0, deps=[dp])
    i = first
    if i < masked_to:
        dp = gl.where(visible(i * BM, n0, sk, BM, CAUSAL, S_LAYOUT), dp, 0.0)
    dq_tile = (batch * heads_k + head_k) * group * tiles_q
    for it in range(total):
        st = it & 1
        q = flat_tile(q_ring.index(st), BM, D)
        mbarrier.wait(full.index(st), (it >> 1) & 1)
        delta = flat_stats(stat_ring.index(st), BM).index(1).load(S_COLS)
        dp -= delta[None, :]
        mbarrier.wait(p_full.index(st), (it >> 1) & 1)
        dv_acc = warpgroup_mma(p_ring.index(st), do.slice(H, H, 1), dv, is_async=True)
        ds16 = (p_ring.index(st).load(S_LAYOUT).to(gl.float32) * dp).to(dtype)
        ds_smem.store(ds16)
        fence_async_shared()
        mbarrier.arrive(ds_full)
        ds_op = gl.convert_layout(ds16, P_LAYOUT, assert_trivial=True)
        dq_acc = warpgroup_mma(ds_smem.permute([1, 0]), kt.slice(H, 64, 1), zero_q, use_acc=False, is_async=True)
        dk_acc = warpgroup_mma(ds_op, q.slice(H, H, 1), dk, is_async=True)
        dv = warpgroup_mma_wait(2, deps=[dv_acc])
        mbarrier.arrive(do_empty)
        dq = warpgroup_mma_wait(1, deps=[dq_acc])
        flush_dq(dq, dq_smem, dq_desc, (dq_tile + i) * BM, H)
        dq_acc = warpgroup_mma(ds_smem.permute([1, 0]), kt.slice(H + 64, 64, 1), zero_q, use_acc=False, is_async=True)
        # After the last tile its own dO takes the place of the next one's, as in `scores`.
        nxt = gl.minimum(it + 1, total - 1)
        mbarrier.wait(do_full, nxt & 1)
        dp_acc = warpgroup_mma(vt, do.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        dq, dk, ds_op = warpgroup_mma_wait(1, deps=[dq_acc, dk_acc, ds_op])
        mbarrier.arrive(empty.index(st))
        flush_dq(dq, dq_smem, dq_desc, (dq_tile + i) * BM, H + 64)
        i += 1
        if i == tiles_q:
            i = first
            dq_tile += tiles_q
        dp = warpgroup_mma_wait(0, deps=[dp_acc])
        if i < masked_to:
            dp = gl.where(visible(i * BM, n0, sk, BM, CAUSAL, S_LAYOUT), dp, 0.0)
    tma.store_wait(0)
    mbarrier.arrive(done)
    mbarrier.wait(done, 0)
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs = out_strides
    tile, head_k, batch = place_again(n_tiles, heads_k)
    dk_base = batch.to(gl.int64) * stride_dkb + head_k.to(gl.int64) * stride_dkh + H
    dv_base = batch.to(gl.int64) * stride_dvb + head_k.to(gl.int64) * stride_dvh + H
    staging = kt.slice(H, H, 1)
    store_rows(dv, staging, dv_ptr, dv_base, tile * BN, sk, stride_dvs, H)
    store_rows(dk * scale, staging, dk_ptr, dk_base, tile * BN, sk, stride_dks, H)
