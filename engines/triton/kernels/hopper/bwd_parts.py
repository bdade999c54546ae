"""Device helpers of the Hopper backward's main kernel: tiles, masks, the loader, and what leaves a block.

Score tiles are kept transposed, keys down and queries across: P and dS are then where the products for dV and dK
want their first operand, in registers.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

ROWS = gl.constexpr(64)  # of one warpgroup's product


@builtin
def tma_reduce_add(tensor_desc, coord, src, _semantic=None):
    """Adds the tile ``src`` (shared memory) to global memory; completes as a TMA store does.

    Gluon has no name for this operation, its builder does."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def flat_tile(tile, M: gl.constexpr, N: gl.constexpr):
    """A copied tile [1, 1, M, N] as a matrix."""
    return tile._reinterpret(tile.dtype, [M, N], gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def flat_stats(tile, M: gl.constexpr):
    """The statistics of M rows: .index(0) is lse, .index(1) is delta."""
    return tile._reinterpret(gl.float32, [2, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def place(pid, n_tiles, heads_k):
    """(key tile, K/V head, batch) of a program.  The tiles of a head come in order: under a causal mask the longest
    first, and the shortest blocks of all run last."""
    return pid % n_tiles, pid // n_tiles % heads_k, pid // n_tiles // heads_k


@gluon.jit
def place_again(n_tiles, heads_k):
    """``place`` of this program, computed anew: nothing of it stays in registers while a loop runs."""
    pid = gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return place(pid, n_tiles, heads_k)


@gluon.jit
def opaque(x):
    """``x``, of which the compiler knows nothing: what depends on it is not computed before a loop and kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def row_tiles(n0, tiles_q, sk, BM: gl.constexpr, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """(first, end of masked): query tiles [first, tiles_q) see the key tile at n0, those below the second need a mask.

    Under a causal mask keys past the end lie beyond every row that exists.
    """
    if CAUSAL:
        first = n0 // BM
        return first, first + (BN + BM - 1) // BM
    else:
        return 0, gl.where(n0 + BN > sk, tiles_q, 0)


@gluon.jit
def visible(row0, key0, sk, BM: gl.constexpr, CAUSAL: gl.constexpr, layout: gl.constexpr):
    """Mask [ROWS keys, BM queries] of the score tile whose first query is row0 and whose first key is key0."""
    keys = opaque(key0) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    rows = gl.arange(0, BM, gl.SliceLayout(0, layout))
    if CAUSAL:
        return (row0 + rows)[None, :] >= keys[:, None]
    else:
        return (keys < sk)[:, None] & (rows >= 0)[None, :]


@gluon.jit
def flush_dq(value, dq_smem, dq_desc, row, col):
    """Adds one tile of dQ to the accumulator.  The copy engine does the adding; the warps only fill its buffer."""
    tma.store_wait(0)
    dq_smem.store(value)
    fence_async_shared()
    tma_reduce_add(dq_desc, [row, col], dq_smem)


@gluon.jit
def store_rows(value, staging, ptr, base, row0, limit, stride, N: gl.constexpr):
    """Writes an accumulator [ROWS, N] in the output's type, rows below ``limit``, through ``staging`` in 16-byte
    pieces of whole rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // N, N // 8], [4, 1], [1, 0])
    staging.store(value.to(staging.dtype))
    rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    cols = gl.arange(0, N, gl.SliceLayout(0, layout))
    at = ptr + base + rows.to(gl.int64)[:, None] * stride + cols[None, :]
    gl.store(at, staging.load(layout), mask=(rows < limit)[:, None])


@gluon.jit
def load_keys(k_desc, v_desc, k_smem, v_smem, kv_full, batch, head, n0, BN: gl.constexpr, D: gl.constexpr):
    mbarrier.expect(kv_full, 4 * BN * D)
    tma.async_copy_global_to_shared(k_desc, [batch, head, n0, 0], kv_full, k_smem)
    tma.async_copy_global_to_shared(v_desc, [batch, head, n0, 0], kv_full, v_smem)


@gluon.jit
def load(operands, BM: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
         CAUSAL: gl.constexpr):
    """The loading warp: K and V once, then Q, dO and statistics of every query tile of every head of the group."""
    descs, tiles, bars, sizes = operands
    q_desc, k_desc, v_desc, do_desc, stat_desc = descs
    k_smem, v_smem, q_ring, do_ring, stat_ring = tiles
    kv_full, full, empty = bars
    n_tiles, tiles_q, heads_k, group, sk = sizes
    tile, head_k, batch = place(gl.program_id(0), n_tiles, heads_k)
    n0 = tile * BN
    first, _ = row_tiles(n0, tiles_q, sk, BM, BN, CAUSAL)
    load_keys(k_desc, v_desc, k_smem, v_smem, kv_full, batch, head_k, n0, BN, D)
    it = 0
    for g in range(group):
        head = head_k * group + g
        stat_row = (batch * heads_k * group + head) * tiles_q * 2
        for i in range(first, tiles_q):
            st = it & (STAGES - 1)
            mbarrier.wait(empty.index(st), ((it >> (STAGES // 2)) & 1) ^ 1)
            mbarrier.expect(full.index(st), 4 * BM * D + 8 * BM)
            tma.async_copy_global_to_shared(q_desc, [batch, head, i * BM, 0], full.index(st), q_ring.index(st))
            tma.async_copy_global_to_shared(stat_desc, [stat_row + i * 2, 0], full.index(st), stat_ring.index(st))
            tma.async_copy_global_to_shared(do_desc, [batch, head, i * BM, 0], full.index(st), do_ring.index(st))
            it += 1
