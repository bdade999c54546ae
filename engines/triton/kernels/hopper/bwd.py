"""Attention backward on Hopper's own instructions, in Gluon: five matrix products a tile instead of seven.

Three kernels: ``bwd_pre_hopper`` (row statistics, accumulator set to zero), ``sdpa_bwd_hopper`` here, and
``dq_cast_hopper`` (accumulator to dq).  dQ is a sum over blocks in no fixed order: not deterministic.

A block owns BN keys of one K/V head and walks the query tiles of all heads of its group:
    S^T = K Q^T;  P^T = exp2(S^T * factor - lse);  dV += P^T dO
    dP^T = V dO^T;  dS^T = P^T (dP^T - delta);     dK += dS^T Q;  dQ tile = dS K, added to the fp32 accumulator
lse is +inf in rows that contribute nothing, so P is exactly 0 there; nothing takes a maximum, so scale may have any
sign.  One warp loads (TMA, rings of STAGES query tiles), two warpgroups compute, in one of three ways:
    BN = 128:         each owns 64 keys; they meet once a tile, for dQ needs dS of all 128 keys
    BN = 64:          both own the same 64 keys and take query tiles in turn, for grids that would not fill the card
    head dim of 256:  see bwd_d256

An output tile that products still write may cross a loop's edge only if nothing but products reads it: with
anything else the assembler gives up overlapping products altogether ("wgmma serialized").  So the first
products for the next tile are issued, awaited and turned into P inside the same iteration.
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
from .bwd_d256 import grads, load_apart, scores
from .bwd_edges import bwd_pre_hopper, dq_cast_hopper
from .bwd_parts import (
    ROWS,
    flat_stats,
    flat_tile,
    flush_dq,
    load,
    place,
    place_again,
    row_tiles,
    store_rows,
    visible,
)

__all__ = ["bwd_pre_hopper", "dq_cast_hopper", "sdpa_bwd_hopper"]


@gluon.jit
def own_keys(operands, WG: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr):
    """One of two warpgroups that own 64 keys each and exchange dS.

    ds_ring needs no barrier for its reuse: dS is written two tiles later, after the other warpgroup's dS of the tile
    between has arrived, which that one sends after its own product with the first.
    """
    tiles, ds_ring, dq_smem, bars, ds_full, dq_desc, dk_ptr, dv_ptr, out_strides, sizes, scale = operands
    k_smem, v_smem, q_ring, do_ring, stat_ring = tiles
    kv_full, full, empty = bars
    n_tiles, tiles_q, heads_k, group, sk = sizes
    dtype: gl.constexpr = q_ring.dtype
    # dQ is [BM, D]: each warpgroup computes 64 rows of it, or 64 columns.
    SPLIT_M: gl.constexpr = BM == 128
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    S_COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    kt = flat_tile(k_smem, BN, D)
    own_k = kt.slice(WG * ROWS, ROWS)
    own_v = flat_tile(v_smem, BN, D).slice(WG * ROWS, ROWS)
    tile, head_k, batch = place(gl.program_id(0), n_tiles, heads_k)
    n0 = tile * BN
    first, masked_to = row_tiles(n0, tiles_q, sk, BM, BN, CAUSAL)
    factor = scale * LOG2E
    total = group * (tiles_q - first)
    zero_s = gl.zeros([ROWS, BM], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([ROWS, 64], gl.float32, DQ_LAYOUT)
    dk = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)
    mbarrier.wait(kv_full, 0)
    mbarrier.wait(full.index(0), 0)
    s_acc = warpgroup_mma(own_k, flat_tile(q_ring.index(0), BM, D).permute([1, 0]), zero_s, use_acc=False,
                          is_async=True)
    dp_acc = warpgroup_mma(own_v, flat_tile(do_ring.index(0), BM, D).permute([1, 0]), zero_s, use_acc=False,
                           is_async=True)
    s = warpgroup_mma_wait(1, deps=[s_acc])
    lse = flat_stats(stat_ring.index(0), BM).index(0).load(S_COLS)
    p = gl.exp2(s * factor - lse[None, :])
    dp = warpgroup_mma_wait(0, deps=[dp_acc])
    i = first
    if i < masked_to:
        keep = visible(i * BM, n0 + WG * ROWS, sk, BM, CAUSAL, S_LAYOUT)
        p = gl.where(keep, p, 0.0)
        dp = gl.where(keep, dp, 0.0)
    dq_tile = (batch * heads_k + head_k) * group * tiles_q
    for it in range(total):
        # P and dP of this tile are in registers and no product is in flight.
        st = it & (STAGES - 1)
        q = flat_tile(q_ring.index(st), BM, D)
        do = flat_tile(do_ring.index(st), BM, D)
        ds_buf = ds_ring.index(it & 1)
        p16 = gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)
        dv_acc = warpgroup_mma(p16, do, dv, is_async=True)
        delta = flat_stats(stat_ring.index(st), BM).index(1).load(S_COLS)
        ds16 = (p * (dp - delta[None, :])).to(dtype)
        ds_buf.slice(WG * ROWS, ROWS).store(ds16)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(it & 1))
        ds_op = gl.convert_layout(ds16, P_LAYOUT, assert_trivial=True)
        dk_acc = warpgroup_mma(ds_op, q, dk, is_async=True)
        dv, p16 = warpgroup_mma_wait(1, deps=[dv_acc, p16])
        # After the last tile its own Q and dO take the place of the next one's: nothing reads the result.
        nxt = gl.minimum(it + 1, total - 1)
        st2 = nxt & (STAGES - 1)
        mbarrier.wait(ds_full.index(it & 1), (it >> 1) & 1)
        if SPLIT_M:
            dq_acc = warpgroup_mma(ds_buf.slice(WG * 64, 64, 1).permute([1, 0]), kt, zero_q, use_acc=False,
                                   is_async=True)
        else:
            dq_acc = warpgroup_mma(ds_buf.permute([1, 0]), kt.slice(WG * 64, 64, 1), zero_q, use_acc=False,
                                   is_async=True)
        mbarrier.wait(full.index(st2), (nxt >> (STAGES // 2)) & 1)
        s_acc = warpgroup_mma(own_k, flat_tile(q_ring.index(st2), BM, D).permute([1, 0]), zero_s, use_acc=False,
                              is_async=True)
        dq, dk, ds_op = warpgroup_mma_wait(1, deps=[dq_acc, dk_acc, ds_op])
        mbarrier.arrive(empty.index(st))
        row = (dq_tile + i) * BM
        if SPLIT_M:
            flush_dq(dq, dq_smem, dq_desc, row + WG * 64, 0)
        else:
            flush_dq(dq, dq_smem, dq_desc, row, WG * 64)
        dp_acc = warpgroup_mma(own_v, flat_tile(do_ring.index(st2), BM, D).permute([1, 0]), zero_s, use_acc=False,
                               is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_acc])
        lse = flat_stats(stat_ring.index(st2), BM).index(0).load(S_COLS)
        p = gl.exp2(s * factor - lse[None, :])
        i += 1
        if i == tiles_q:
            i = first
            dq_tile += tiles_q
        dp = warpgroup_mma_wait(0, deps=[dp_acc])
        if i < masked_to:
            keep = visible(i * BM, n0 + WG * ROWS, sk, BM, CAUSAL, S_LAYOUT)
            p = gl.where(keep, p, 0.0)
            dp = gl.where(keep, dp, 0.0)
    tma.store_wait(0)
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs = out_strides
    tile, head_k, batch = place_again(n_tiles, heads_k)
    row0 = tile * BN + WG * ROWS
    dk_base = batch.to(gl.int64) * stride_dkb + head_k.to(gl.int64) * stride_dkh
    dv_base = batch.to(gl.int64) * stride_dvb + head_k.to(gl.int64) * stride_dvh
    # V's rows of this warpgroup are read by nobody else, and now by nobody.
    store_rows(dv, own_v, dv_ptr, dv_base, row0, sk, stride_dvs, D)
    store_rows(dk * scale, own_v, dk_ptr, dk_base, row0, sk, stride_dks, D)


@gluon.jit
def own_rows(operands, WG: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
             CAUSAL: gl.constexpr):
    """One of two warpgroups that share 64 keys and take query tiles in turn; they add up dK and dV at the end."""
    tiles, ds_smem, dq_smem, bars, meet, dq_desc, dk_ptr, dv_ptr, out_strides, sizes, scale = operands
    k_smem, v_smem, q_ring, do_ring, stat_ring = tiles
    kv_full, full, empty = bars
    n_tiles, tiles_q, heads_k, group, sk = sizes
    dtype: gl.constexpr = q_ring.dtype
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    S_COLS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    kt = flat_tile(k_smem, BN, D)
    vt = flat_tile(v_smem, BN, D)
    tile, head_k, batch = place(gl.program_id(0), n_tiles, heads_k)
    n0 = tile * BN
    first, masked_to = row_tiles(n0, tiles_q, sk, BM, BN, CAUSAL)
    head = (batch * heads_k + head_k) * group
    factor = scale * LOG2E
    n_rows = tiles_q - first
    zero_s = gl.zeros([ROWS, BM], gl.float32, S_LAYOUT)
    zero_q = gl.zeros([ROWS, 64], gl.float32, DQ_LAYOUT)
    dk = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)
    dv = gl.zeros([ROWS, D], gl.float32, ACC_LAYOUT)
    mbarrier.wait(kv_full, 0)
    for it in range(WG, group * n_rows, 2):
        st = it & (STAGES - 1)
        i = first + it % n_rows
        dq_tile = (head + it // n_rows) * tiles_q + i
        q = flat_tile(q_ring.index(st), BM, D)
        do = flat_tile(do_ring.index(st), BM, D)
        stats = flat_stats(stat_ring.index(st), BM)
        mbarrier.wait(full.index(st), (it >> (STAGES // 2)) & 1)
        s_acc = warpgroup_mma(kt, q.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        dp_acc = warpgroup_mma(vt, do.permute([1, 0]), zero_s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_acc])
        lse = stats.index(0).load(S_COLS)
        p = gl.exp2(s * factor - lse[None, :])
        dp = warpgroup_mma_wait(0, deps=[dp_acc])
        if i < masked_to:
            keep = visible(i * BM, n0, sk, BM, CAUSAL, S_LAYOUT)
            p = gl.where(keep, p, 0.0)
            dp = gl.where(keep, dp, 0.0)
        p16 = gl.convert_layout(p.to(dtype), P_LAYOUT, assert_trivial=True)
        dv_acc = warpgroup_mma(p16, do, dv, is_async=True)
        delta = stats.index(1).load(S_COLS)
        ds16 = (p * (dp - delta[None, :])).to(dtype)
        ds_smem.store(ds16)
        fence_async_shared()
        gl.thread_barrier()
        ds_op = gl.convert_layout(ds16, P_LAYOUT, assert_trivial=True)
        dq_acc = warpgroup_mma(ds_smem.permute([1, 0]), kt.slice(0, 64, 1), zero_q, use_acc=False, is_async=True)
        dk_acc = warpgroup_mma(ds_op, q, dk, is_async=True)
        dq, dv, p16 = warpgroup_mma_wait(1, deps=[dq_acc, dv_acc, p16])
        flush_dq(dq, dq_smem, dq_desc, dq_tile * BM, 0)
        if D == 128:
            dq_acc = warpgroup_mma(ds_smem.permute([1, 0]), kt.slice(64, 64, 1), zero_q, use_acc=False, is_async=True)
            dk, ds_op = warpgroup_mma_wait(1, deps=[dk_acc, ds_op])
            mbarrier.arrive(empty.index(st))
            dq = warpgroup_mma_wait(0, deps=[dq_acc])
            flush_dq(dq, dq_smem, dq_desc, dq_tile * BM, 64)
        else:
            dk, ds_op = warpgroup_mma_wait(0, deps=[dk_acc, ds_op])
            mbarrier.arrive(empty.index(st))
    tma.store_wait(0)
    # The first finishes dV, the second dK; the other halves of the sums pass through the rings, which are free once
    # both are here.
    mbarrier.arrive(meet.index(0))
    mbarrier.wait(meet.index(0), 0)
    halves = q_ring._reinterpret(gl.float32, [2, ROWS, D], gl.NVMMASharedLayout(128, 32, 2))
    if WG == 0:
        halves.index(0).store(dk)
    else:
        halves.index(1).store(dv)
    mbarrier.arrive(meet.index(1))
    mbarrier.wait(meet.index(1), 0)
    stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs = out_strides
    tile, head_k, batch = place_again(n_tiles, heads_k)
    if WG == 0:
        base = batch.to(gl.int64) * stride_dvb + head_k.to(gl.int64) * stride_dvh
        store_rows(dv + halves.index(1).load(ACC_LAYOUT), vt, dv_ptr, base, tile * BN, sk, stride_dvs, D)
    else:
        base = batch.to(gl.int64) * stride_dkb + head_k.to(gl.int64) * stride_dkh
        store_rows((dk + halves.index(0).load(ACC_LAYOUT)) * scale, kt, dk_ptr, base, tile * BN, sk, stride_dks, D)


@gluon.jit(do_not_specialize=["n_tiles", "tiles_q", "heads_k", "group", "sk"])
def sdpa_bwd_hopper(q_desc, k_desc, v_desc, do_desc, stat_desc, dq_desc, dk_ptr, dv_ptr, stride_dkb, stride_dkh,
                    stride_dks, stride_dvb, stride_dvh, stride_dvs, n_tiles, tiles_q, heads_k, group, sk, scale,
                    BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """dK, dV and the fp32 sum of dQ / scale, in a one-dimensional grid of n_tiles * heads_k * batch blocks.

    Tensor maps: q, do [1, 1, BM, D] and k, v [1, 1, BN, D] over (batch, head, sequence, head_dim); stat [2, BM] and
    dq [64, 64] over ``bwd_edges``' statistics and accumulator as matrices of BM and of D columns.
    """
    dtype: gl.constexpr = q_desc.dtype
    WIDE_HEAD: gl.constexpr = D == 256
    TURNS: gl.constexpr = (BN == 64) and not WIDE_HEAD
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    k_smem = gl.allocate_shared_memory(dtype, [1, 1, BN, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [1, 1, BN, D], v_desc.layout)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BM, D], q_desc.layout)
    do_ring = gl.allocate_shared_memory(dtype, [1 if WIDE_HEAD else STAGES, 1, 1, BM, D], do_desc.layout)
    stat_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BM], stat_desc.layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [2, 64, 64], gl.NVMMASharedLayout(128, 32, 2))
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Barriers between the warpgroups, two for each way of dividing the work.
    meet = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, 1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), 1)
        mbarrier.init(empty.index(i), 1 if TURNS else 2)
    for i in gl.static_range(2):
        mbarrier.init(meet.index(i), 1 if WIDE_HEAD else 2)
    left = dq_smem.index(0)
    right = dq_smem.index(1)
    descs = (q_desc, k_desc, v_desc, do_desc, stat_desc)
    tiles = (k_smem, v_smem, q_ring, do_ring, stat_ring)
    sizes = (n_tiles, tiles_q, heads_k, group, sk)
    strides = (stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs)
    if WIDE_HEAD:
        p_ring = gl.allocate_shared_memory(dtype, [2, BN, BM], TILE)
        ds_smem = gl.allocate_shared_memory(dtype, [BN, BM], TILE)
        more = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
        mbarrier.init(more.index(0), 1)
        mbarrier.init(more.index(1), 2)
        mbarrier.init(more.index(2), 1)
        mbarrier.init(more.index(3), 2)
        bars = (kv_full, full, empty, more.index(0), more.index(1))
        swap = (meet, more.index(2), more.index(3))
        first = (tiles, p_ring, ds_smem, left, bars, swap, dq_desc, dk_ptr, dv_ptr, strides, sizes, scale)
        second = (tiles, p_ring, ds_smem, right, bars, swap, dq_desc, dk_ptr, dv_ptr, strides, sizes, scale)
        loader = (descs, tiles, bars, sizes)
        gl.warp_specialize([
            (scores, (first, BM, BN, D, CAUSAL)),
            (grads, (second, BM, BN, D, CAUSAL)),
            (load_apart, (loader, BM, BN, D, CAUSAL)),
        ], [4, 1], [240, 24])
    elif TURNS:
        ds_smem = gl.allocate_shared_memory(dtype, [2, BN, BM], TILE)
        bars = (kv_full, full, empty)
        first = (tiles, ds_smem.index(0), left, bars, meet, dq_desc, dk_ptr, dv_ptr, strides, sizes, scale)
        second = (tiles, ds_smem.index(1), right, bars, meet, dq_desc, dk_ptr, dv_ptr, strides, sizes, scale)
        loader = (descs, tiles, bars, sizes)
        gl.warp_specialize([
            (own_rows, (first, 0, BM, BN, D, STAGES, CAUSAL)),
            (own_rows, (second, 1, BM, BN, D, STAGES, CAUSAL)),
            (load, (loader, BM, BN, D, STAGES, CAUSAL)),
        ], [4, 1], [240, 24])
    else:
        ds_ring = gl.allocate_shared_memory(dtype, [2, BN, BM], TILE)
        bars = (kv_full, full, empty)
        first = (tiles, ds_ring, left, bars, meet, dq_desc, dk_ptr, dv_ptr, strides, sizes, scale)
        second = (tiles, ds_ring, right, bars, meet, dq_desc, dk_ptr, dv_ptr, strides, sizes, scale)
        loader = (descs, tiles, bars, sizes)
        gl.warp_specialize([
            (own_keys, (first, 0, BM, BN, D, STAGES, CAUSAL)),
            (own_keys, (second, 1, BM, BN, D, STAGES, CAUSAL)),
            (load, (loader, BM, BN, D, STAGES, CAUSAL)),
        ], [4, 1], [240, 24])
