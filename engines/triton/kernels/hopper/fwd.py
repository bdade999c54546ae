"""Attention forward on Hopper's own instructions, in Gluon: TMA loads, asynchronous warpgroup products, roles by warp.

A block owns BLOCK_M = 64 * WGS query rows of one head.  One warp loads: q once per tile, then K and V blocks of
BLOCK_N keys into a ring of STAGES steps; a pair of mbarriers per step says full and empty.  WGS warpgroups compute,
64 rows each, so that one's softmax runs beside another's products:
    p = softmax numerators of the last block (masked), then for every block before it:
        s = q k^T of this block and acc += p v of the block in hand are issued together;
        the softmax of s runs while acc's product is in flight
    acc += p v of the first block;  o = acc / l, lse = ln 2 * (m + log2 l)

Blocks are walked from the last to the first: only the last one that a warpgroup sees can need a mask (64 divides
BLOCK_N, so the diagonal of 64 rows lies in one block), and it is the peeled one.  Every row sees a key in that
block, which makes the running maximum finite from the start.

scale may have any sign: scores are compared before they are scaled, which needs scale >= 0, so a negative one
negates q in shared memory first (exact).

Not PERSISTENT: one tile per program.  PERSISTENT: any grid; a program takes tiles in turn, pairs of constant total
length under a causal mask, and the loader runs ahead into the next tile while this one is finished.

What keeps registers below the limit without spills: p crosses the loop's edge as packed pairs; row sums stay per thread
until the end; index tensors are split into a part per register and a part per thread.
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

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of one warpgroup


@gluon.jit
def _program():
    return gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """A ring's next buffer, and the parity of the phase that fills it."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _turns(sizes, CAUSAL: gl.constexpr):
    """How many tiles a persistent program visits, those counted that `_visit` calls absent."""
    n_programs, n_tiles, _, _, _, _ = sizes
    programs = gl.num_programs(0) * gl.num_programs(1)
    if CAUSAL:
        units = n_programs // n_tiles * ((n_tiles + 1) // 2)
        return (units - _program() + programs - 1) // programs * 2
    else:
        return (n_programs - _program() + programs - 1) // programs


@gluon.jit
def _visit(t, sizes, CAUSAL: gl.constexpr):
    """(outer, slot, present) of a persistent program's t-th tile.

    Under a causal mask a program takes pairs, a long tile and the short one that makes up for it.  Where a head has
    an odd number of tiles, its middle one has no partner; complete rounds of pairs are rotated against one another,
    so that these do not all fall to the same programs.
    """
    n_programs, n_tiles, _, _, _, _ = sizes
    programs = gl.num_programs(0) * gl.num_programs(1)
    pid = _program()
    if CAUSAL:
        per_head = (n_tiles + 1) // 2
        k = t // 2
        whole = (k + 1) * programs <= n_programs // n_tiles * per_head
        unit = k * programs + gl.where(whole, (pid + k) % programs, pid)
        near = unit % per_head
        far = n_tiles - 1 - near
        return unit // per_head, gl.where(t % 2 == 0, far, near), (t % 2 == 0) | (near != far)
    else:
        tile = t * programs + pid
        return tile // n_tiles, tile % n_tiles, t >= 0


@gluon.jit
def _blocks(m0, sk, CAUSAL: gl.constexpr, M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Number of key blocks that the M rows from m0 see."""
    keys = sk
    if CAUSAL:
        keys = gl.minimum(m0 + M, sk)
    return (keys + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _here(x):
    """x, opaque to the compiler, so that what follows from it is computed here and not kept in registers across the
    loop over tiles."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _partial_sum(p):
    """Row sums over the elements that one thread holds: [rows, 4], a column for each thread that shares a row."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """p rounded to dtype, neighbouring columns in one int32: [rows, columns / 2].  A loop that carries 16-bit values
    would spend a register on each."""
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32,
                                         is_pure=True, pack=1)
    else:
        return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32,
                                         is_pure=True, pack=1)


@gluon.jit
def _unpack(w, dtype: gl.constexpr, layout: gl.constexpr):
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [w], dtype=(gl.int16, gl.int16),
                                          is_pure=True, pack=1)
    p = gl.join(low, high).reshape([w.shape[0], w.shape[1] * 2]).to(dtype, bitcast=True)
    return gl.convert_layout(p, layout, assert_trivial=True)


@gluon.jit
def _split_columns(t, WIDTH: gl.constexpr):
    """A tensor [rows, columns], whose rows are spread over four threads in pieces of WIDTH, as [rows, columns / 4 /
    WIDTH, 4, WIDTH] without moving anything; the column minus the thread's part, constant in each register; and the
    thread's part. An index tensor that mixed the two would cost a register per column."""
    t = t.reshape([t.shape[0], t.shape[1] // (4 * WIDTH), 4, WIDTH])
    L: gl.constexpr = t.type.layout
    piece = gl.arange(0, t.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    thread = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    inside = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    fixed = ((piece * (4 * WIDTH)).expand_dims(0).expand_dims(2).expand_dims(3)
             + inside.expand_dims(0).expand_dims(1).expand_dims(2))
    return t, fixed, (thread * WIDTH).expand_dims(0).expand_dims(1).expand_dims(3)


@gluon.jit
def _as_rows(x, L: gl.constexpr):
    """[rows] as [rows, 1, 1, 1] beside a tensor of layout L."""
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))
    return gl.convert_layout(x, ROW, assert_trivial=True).expand_dims(1).expand_dims(2).expand_dims(3)


@gluon.jit
def _hide(s, limit):
    """-inf for columns at or past limit [rows]."""
    t, fixed, thread = _split_columns(s, 2)
    L: gl.constexpr = t.type.layout
    t = gl.where(fixed < _as_rows(limit, L) - thread, t, float("-inf"))
    return gl.convert_layout(t.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _pieces(columns, step):
    """Layouts of a [64, columns] tensor of packed pairs on the way from the accumulator's, a pair per thread and eight
    columns, to four neighbouring pairs per thread. Each step swaps one bit of the column between thread and register,
    which takes shuffles only."""
    threads = [[0, 4], [0, 2]] if step == 0 else [[0, 4], [0, 8]]
    registers = [[0, 1], [0, 8]] if step == 0 else [[0, 1], [0, 2]]
    rest = [[0, 2**i] for i in range(4, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout([*registers, *rest, [8, 0]], [*threads, [1, 0], [2, 0], [4, 0]],
                                      [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _store_rows(o, base, stride, count, dtype: gl.constexpr):
    """Writes the first count rows of an accumulator [64, columns] to base, 16 bytes per thread at once."""
    FIRST: gl.constexpr = _pieces(o.shape[1] // 2, 0)
    SECOND: gl.constexpr = _pieces(o.shape[1] // 2, 1)
    w = gl.convert_layout(_pack(o, dtype), FIRST)
    # Two conversions would be merged into one, which goes through shared memory.
    w = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [w], dtype=gl.int32, is_pure=True, pack=1)
    w = gl.convert_layout(w, SECOND)
    low, high = gl.inline_asm_elementwise("mov.b32 {$0, $1}, $2;", "=h,=h,r", [w], dtype=(gl.int16, gl.int16),
                                          is_pure=True, pack=1)
    values = gl.join(low, high).reshape(o.shape).to(dtype, bitcast=True)
    t, fixed, thread = _split_columns(values, 8)
    L: gl.constexpr = t.type.layout
    row = _as_rows(gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout)), L)
    gl.store(base + row * stride + thread + fixed, t, mask=row < count)


@gluon.jit
def _load_tile(outer, slot, stage, phase, q_stage, q_phase, q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes,
               BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
               STAGES: gl.constexpr):
    q_full, q_empty, full, empty, _ = bars
    _, n_tiles, heads_q, group, _, sk = sizes
    WGS: gl.constexpr = BLOCK_M // ROWS
    KV_BYTES: gl.constexpr = BLOCK_N * D * 2
    Q_BYTES: gl.constexpr = ROWS * D * 2
    batch = outer // heads_q
    head = outer % heads_q
    kv_head = head // group
    m0 = slot * BLOCK_M
    blocks = _blocks(m0, sk, CAUSAL, BLOCK_M, BLOCK_N)
    for w in gl.static_range(WGS):
        at = q_stage * WGS + w
        mbarrier.wait(q_empty.index(at), q_phase ^ 1)
        mbarrier.expect(q_full.index(at), Q_BYTES)
        tma.async_copy_global_to_shared(q_desc, [batch, head, m0 + w * ROWS, 0], q_full.index(at), q_s.index(at))
    # Step i holds K of block i and V of the block before it, which are used together.
    n0 = (blocks - 1) * BLOCK_N
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), KV_BYTES)
    tma.async_copy_global_to_shared(k_desc, [batch, kv_head, n0, 0], full.index(stage), k_s.index(stage))
    stage, phase = _next(stage, phase, STAGES)
    for _ in range(blocks - 1):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        mbarrier.expect(full.index(stage), 2 * KV_BYTES)
        tma.async_copy_global_to_shared(k_desc, [batch, kv_head, n0 - BLOCK_N, 0], full.index(stage), k_s.index(stage))
        tma.async_copy_global_to_shared(v_desc, [batch, kv_head, n0, 0], full.index(stage), v_s.index(stage))
        n0 -= BLOCK_N
        stage, phase = _next(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), KV_BYTES)
    tma.async_copy_global_to_shared(v_desc, [batch, kv_head, n0, 0], full.index(stage), v_s.index(stage))
    stage, phase = _next(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _load(q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
          D: gl.constexpr, CAUSAL: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
          Q_STAGES: gl.constexpr):
    n_programs, n_tiles, _, _, _, _ = sizes
    pid = _program()
    stage = pid * 0
    phase = pid * 0
    if PERSISTENT:
        turn = pid * 0
        for t in range(_turns(sizes, CAUSAL)):
            outer, slot, present = _visit(t, sizes, CAUSAL)
            if present:
                stage, phase = _load_tile(outer, slot, stage, phase, turn % Q_STAGES, turn // Q_STAGES % 2,
                                          q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes,
                                          BLOCK_M, BLOCK_N, D, CAUSAL, STAGES)
                turn += 1
    else:
        if pid < n_programs:
            slot = pid % n_tiles
            if CAUSAL:
                slot = n_tiles - 1 - slot
            _load_tile(pid // n_tiles, slot, stage, phase, 0, 0, q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes,
                       BLOCK_M, BLOCK_N, D, CAUSAL, STAGES)


@gluon.jit
def _compute_tile(outer, slot, stage, phase, q_stage, q_phase, beat, o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides,
                  lse_strides, sizes, scale,
                  W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
                  CAUSAL: gl.constexpr, HAS_LSE: gl.constexpr, STAGES: gl.constexpr):
    q_full, q_empty, full, empty, go = bars
    _, n_tiles, heads_q, _, sq, sk = sizes
    stride_ob, stride_oh, stride_os = o_strides
    stride_lse_b, stride_lse_h, stride_lse_s = lse_strides
    WGS: gl.constexpr = BLOCK_M // ROWS
    # Two warpgroups issue their products in turn (d128, s8192: +1 to 3%, d256 +1%); four do not gain from it.
    ORDERED: gl.constexpr = WGS == 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = k_s.dtype

    scale_log2 = gl.maximum(scale, -scale) * LOG2E
    q_at = q_stage * WGS + W
    q_own = q_s.index(q_at).reshape([ROWS, D])
    m0 = slot * BLOCK_M + W * ROWS
    blocks = _blocks(slot * BLOCK_M, sk, CAUSAL, BLOCK_M, BLOCK_N)
    mine = _blocks(m0, sk, CAUSAL, ROWS, BLOCK_N)
    for _ in range(blocks - mine):
        # Wholly above this warpgroup's diagonal.
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
        if ORDERED:
            mbarrier.wait(go.index(W), beat)
            mbarrier.arrive(go.index((W + 1) % WGS), count=1)
            beat ^= 1

    mbarrier.wait(q_full.index(q_at), q_phase)
    if scale < 0:
        q_own.store(-q_own.load(COPY))
        fence_async_shared()

    mbarrier.wait(full.index(stage), phase)
    zero_s = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q_own, k_s.index(stage).reshape([BLOCK_N, D]).permute((1, 0)), zero_s, use_acc=False,
                      is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = _next(stage, phase, STAGES)
    n0 = (mine - 1) * BLOCK_N
    if CAUSAL:
        # Rows at or past sk may see keys that are not there (zeros): they are not stored.
        limits = gl.arange(0, ROWS, S_ROWS) + (m0 + 1 - n0)
    else:
        limits = gl.full([ROWS], 0, gl.int32, S_ROWS) + _here(sk - n0)
    s = _hide(s * scale_log2, limits)
    m = gl.max(s, 1)
    p = gl.exp2(s - m[:, None])
    l = _partial_sum(p)
    w = _pack(p, dtype)
    L_LAYOUT: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    acc = gl.zeros([ROWS, D], gl.float32, O_LAYOUT)
    mbarrier.wait(full.index(stage), phase)
    for _ in range(mine - 1):
        p_now = _unpack(w, dtype, P_LAYOUT)
        if ORDERED:
            mbarrier.wait(go.index(W), beat)
            beat ^= 1
        s = warpgroup_mma(q_own, k_s.index(stage).reshape([BLOCK_N, D]).permute((1, 0)), zero_s,
                          use_acc=False, is_async=True)
        acc = warpgroup_mma(p_now, v_s.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
        if ORDERED:
            mbarrier.arrive(go.index((W + 1) % WGS), count=1)
        s = warpgroup_mma_wait(1, deps=[s])
        m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
        p = gl.exp2(s * scale_log2 - m_new[:, None])
        alpha = gl.exp2(m - m_new)
        l = l * gl.convert_layout(alpha, L_LAYOUT, assert_trivial=True)[:, None] + _partial_sum(p)
        m = m_new
        # Waiting here for the next step also keeps ptxas from moving the softmax behind the wait for acc, which it
        # does unless a branch stands between them.
        done = stage
        stage, phase = _next(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        acc, p = warpgroup_mma_wait(0, deps=[acc, p])
        mbarrier.arrive(empty.index(done), count=1)
        w = _pack(p, dtype)
        acc = acc * gl.convert_layout(alpha, O_ROWS, assert_trivial=True)[:, None]
    mbarrier.arrive(q_empty.index(q_at), count=1)
    p_now = _unpack(w, dtype, P_LAYOUT)
    acc = warpgroup_mma(p_now, v_s.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = _next(stage, phase, STAGES)

    l_row = gl.convert_layout(gl.sum(l, 1), S_ROWS, assert_trivial=True)
    rescale = gl.convert_layout(1.0 / l_row, O_ROWS, assert_trivial=True)
    o = acc * rescale[:, None]
    zero = _here(0)
    stride_os += zero * 16  # keeps what is known of its divisibility
    stride_lse_s += zero
    batch = outer // heads_q
    head = outer % heads_q
    o_base = o_ptr + (batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh + m0.to(gl.int64) * stride_os)
    _store_rows(o, o_base, stride_os, sq - m0, dtype)
    if HAS_LSE:
        lse = (m + gl.log2(l_row)) * LN2
        lse_base = lse_ptr + (batch.to(gl.int64) * stride_lse_b + head.to(gl.int64) * stride_lse_h
                              + m0.to(gl.int64) * stride_lse_s)
        lse_index = gl.arange(0, ROWS, S_ROWS)
        gl.store(lse_base + lse_index * stride_lse_s, lse, mask=lse_index < sq - m0)
    return stage, phase, beat


@gluon.jit
def _compute(o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale,
             W: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
             HAS_LSE: gl.constexpr, STAGES: gl.constexpr, PERSISTENT: gl.constexpr, Q_STAGES: gl.constexpr):
    n_programs, n_tiles, _, _, _, _ = sizes
    pid = _program()
    stage = pid * 0
    phase = pid * 0
    beat = pid * 0 + (W == 0)
    if PERSISTENT:
        turn = pid * 0
        for t in range(_turns(sizes, CAUSAL)):
            outer, slot, present = _visit(t, sizes, CAUSAL)
            if present:
                stage, phase, beat = _compute_tile(
                    outer, slot, stage, phase, turn % Q_STAGES, turn // Q_STAGES % 2, beat, o_ptr, lse_ptr, q_s, k_s,
                    v_s, bars, o_strides, lse_strides, sizes, scale, W, BLOCK_M, BLOCK_N, D, CAUSAL, HAS_LSE, STAGES)
                turn += 1
    else:
        if pid < n_programs:
            slot = pid % n_tiles
            if CAUSAL:
                slot = n_tiles - 1 - slot
            _compute_tile(pid // n_tiles, slot, stage, phase, 0, 0, beat, o_ptr, lse_ptr, q_s, k_s, v_s, bars,
                          o_strides, lse_strides, sizes, scale, W, BLOCK_M, BLOCK_N, D, CAUSAL, HAS_LSE, STAGES)


@gluon.jit
def sdpa_fwd_hopper(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr,
    stride_ob, stride_oh, stride_os, stride_lse_b, stride_lse_h, stride_lse_s,
    n_programs, n_tiles, heads_q, group, sq, sk, scale,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, HAS_LSE: gl.constexpr,
    STAGES: gl.constexpr, PERSISTENT: gl.constexpr,
):
    """n_programs = n_tiles * heads_q * batch tiles, n_tiles = cdiv(sq, BLOCK_M).

    Descriptors: blocks [1, 1, 64, D] of q, [1, 1, BLOCK_N, D] of k and v.  BLOCK_M: 64, 128 or 256.  Compiled for 4
    warps: the others are added here, BLOCK_M / 64 - 1 warpgroups that compute and the warp that loads.  With BLOCK_M
    64, compiled for at most 128 registers per thread, so that two blocks fit a multiprocessor.
    """
    WGS: gl.constexpr = BLOCK_M // ROWS
    # Two buffers of 128 rows of 256 do not fit beside two stages of K and V.
    Q_STAGES: gl.constexpr = 2 if PERSISTENT and D <= 128 else 1
    dtype: gl.constexpr = q_desc.dtype
    q_s = gl.allocate_shared_memory(dtype, [Q_STAGES * WGS, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WGS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_STAGES * WGS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    go = gl.allocate_shared_memory(gl.int64, [WGS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(Q_STAGES * WGS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=WGS)
    for i in gl.static_range(WGS):
        mbarrier.init(go.index(i), count=1)
    fence_async_shared()

    bars = (q_full, q_empty, full, empty, go)
    o_strides = (stride_ob, stride_oh, stride_os)
    lse_strides = (stride_lse_b, stride_lse_h, stride_lse_s)
    sizes = (n_programs, n_tiles, heads_q, group, sq, sk)
    # Registers per thread that each added role asks for; the four first warps keep what is left.
    if WGS == 1:
        gl.warp_specialize([
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 0, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_load, (q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes, BLOCK_M, BLOCK_N, D, CAUSAL, STAGES,
                     PERSISTENT, Q_STAGES)),
        ], [1], [24])
    elif WGS == 2:
        gl.warp_specialize([
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 0, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 1, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_load, (q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes, BLOCK_M, BLOCK_N, D, CAUSAL, STAGES,
                     PERSISTENT, Q_STAGES)),
        ], [4, 1], [240, 24])
    else:
        gl.warp_specialize([
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 0, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 1, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 2, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_compute, (o_ptr, lse_ptr, q_s, k_s, v_s, bars, o_strides, lse_strides, sizes, scale, 3, BLOCK_M,
                        BLOCK_N, D, CAUSAL, HAS_LSE, STAGES, PERSISTENT, Q_STAGES)),
            (_load, (q_desc, k_desc, v_desc, q_s, k_s, v_s, bars, sizes, BLOCK_M, BLOCK_N, D, CAUSAL, STAGES,
                     PERSISTENT, Q_STAGES)),
        ], [4, 4, 4, 1], [112, 112, 112, 32])
