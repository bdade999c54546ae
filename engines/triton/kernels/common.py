"""Device helpers that every attention kernel of this engine shares.

Conventions.  Rows are query positions and columns are key positions *inside one sequence*: a kernel first
turns its program number into (sequence, head, tile), then works with local positions only.  Lengths are
effective lengths, already clamped to the buffers, so no value read from the device can send an address
outside them.  Visibility is a band, ``i + off - left <= j <= i + off + right`` with either side optional;
causal is ``right = 0``.  Scalar bases are 64-bit, offsets inside a tile are 32-bit unless WIDE.  Scores live
in the exp2 domain (multiplied by log2 e) where a name says so.  Helpers take two-dimensional row and column
index tensors ([M, 1] and [1, N], or transposed), so that kernels which keep score tiles transposed can use
them as they are.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def linear_pid():
    """The program's number in a folded grid (no axis above 65,535); the host keeps it below 2**31."""
    return tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)


@triton.jit
def clamp_to(value, limit):
    """``value`` (int32 or int64) clamped to [0, limit], as int32."""
    return tl.minimum(tl.maximum(value, 0), limit).to(tl.int32)


@triton.jit
def effective_length(ptr, index, stride, limit, PRESENT: tl.constexpr):
    """Length of one padded sequence: ``ptr[index * stride]`` clamped to [0, limit]; ``limit`` where no
    lengths are given. Nothing is read for an empty limit, so that a gap's sequence number may be passed with
    limit 0."""
    length = limit + 0
    if PRESENT:
        length = clamp_to(tl.load(ptr + index.to(tl.int64) * stride, mask=limit > 0, other=0), limit)
    return length


@triton.jit
def packed_edge(cu_ptr, cu_stride, edge, n_seqs, total):
    """Extended offset in [0, total]: e[0] = 0, e[1 .. n_seqs+1] = cu[0 .. n_seqs], e[n_seqs+2] = total."""
    inner = tl.minimum(tl.maximum(edge - 1, 0), n_seqs)
    value = clamp_to(tl.load(cu_ptr + inner.to(tl.int64) * cu_stride), total)
    value = tl.where(edge <= 0, 0, value)
    return tl.where(edge > n_seqs + 1, total, value)


@triton.jit
def packed_slot(cu_ptr, cu_stride, slot, n_seqs, total, BLOCK: tl.constexpr):
    """Which tile of which sequence slot number ``slot`` is, found without any host read of the offsets.

    Sequence s of the n_seqs + 2 (the gaps before the first and after the last offset count as sequences, so
    that every token is written by someone) owns slots from ``e[s] // BLOCK + s``: consecutive first slots are
    always far enough apart for all its tiles, and ``total // BLOCK + n_seqs + 2`` slots cover everything.

    Returns (sequence, start, length, tile).  sequence is -1 or n_seqs for a gap.  The slot is unused if
    ``tile * BLOCK >= length``.
    """
    low = slot * 0
    high = low + n_seqs + 1
    while low < high:
        mid = (low + high + 1) // 2
        first = packed_edge(cu_ptr, cu_stride, mid, n_seqs, total) // BLOCK + mid
        low = tl.where(first <= slot, mid, low)
        high = tl.where(first <= slot, high, mid - 1)
    start = packed_edge(cu_ptr, cu_stride, low, n_seqs, total)
    length = tl.maximum(packed_edge(cu_ptr, cu_stride, low + 1, n_seqs, total) - start, 0)
    # Offsets that are not monotone (a caller's error) can make this negative; no tile may start before its
    # sequence.
    tile = tl.maximum(slot - (start // BLOCK + low), 0)
    return low - 1, start, length, tile


@triton.jit
def packed_span(cu_ptr, cu_stride, sequence, n_seqs, total):
    """(start, length) of one sequence on the side that the program does not tile; (0, 0) for a gap."""
    start = packed_edge(cu_ptr, cu_stride, sequence + 1, n_seqs, total)
    end = packed_edge(cu_ptr, cu_stride, sequence + 2, n_seqs, total)
    real = (sequence >= 0) & (sequence < n_seqs)
    return tl.where(real, start, 0), tl.where(real, tl.maximum(end - start, 0), 0)


@triton.jit
def band_keys(m0, sq, sk, off, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Key range of the row tile [m0, m0 + BLOCK_M): (lo, full_lo, full_hi, hi, first, last).

    lo <= full_lo <= full_hi <= hi are multiples of BLOCK_N.  Blocks in [lo, full_lo) and [full_hi, hi) need a
    mask, blocks in [full_lo, full_hi) are inside ``sk`` and seen by every row of the tile below ``sq``.
    [first, last) are the keys, to the token, that at least one row sees.
    """
    m1 = tl.minimum(m0 + BLOCK_M, sq) - 1
    first = m0 * 0
    every_lo = first
    last = first + sk
    every_hi = last
    if HAS_LEFT:
        first = tl.maximum(m0 + off - left, 0)
        every_lo = tl.maximum(m1 + off - left, 0)
    if HAS_RIGHT:
        last = tl.minimum(tl.maximum(m1 + off + right + 1, 0), sk)
        every_hi = tl.minimum(tl.maximum(m0 + off + right + 1, 0), sk)
    last = tl.where(m1 >= m0, last, 0)
    lo = first // BLOCK_N * BLOCK_N
    hi = tl.maximum((last + BLOCK_N - 1) // BLOCK_N * BLOCK_N, lo)
    full_lo = tl.minimum((every_lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N, hi)
    full_hi = tl.minimum(tl.maximum(every_hi // BLOCK_N * BLOCK_N, full_lo), hi)
    return lo, full_lo, full_hi, hi, first, last


@triton.jit
def band_rows(n0, sq, sk, off, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Row range of the key tile [n0, n0 + BLOCK_N), the mirror of ``band_keys`` with the same six results.

    Blocks of rows in [full_lo, full_hi) are inside ``sq`` and each of their rows sees every key of the tile
    below ``sk``.
    """
    n1 = tl.minimum(n0 + BLOCK_N, sk) - 1
    first = n0 * 0
    every_lo = first
    last = first + sq
    every_hi = last
    if HAS_RIGHT:
        first = tl.maximum(n0 - off - right, 0)
        every_lo = tl.maximum(n1 - off - right, 0)
    if HAS_LEFT:
        last = tl.minimum(tl.maximum(n1 - off + left + 1, 0), sq)
        every_hi = tl.minimum(tl.maximum(n0 - off + left + 1, 0), sq)
    last = tl.where(n1 >= n0, last, 0)
    lo = first // BLOCK_M * BLOCK_M
    hi = tl.maximum((last + BLOCK_M - 1) // BLOCK_M * BLOCK_M, lo)
    full_lo = tl.minimum((every_lo + BLOCK_M - 1) // BLOCK_M * BLOCK_M, hi)
    full_hi = tl.minimum(tl.maximum(every_hi // BLOCK_M * BLOCK_M, full_lo), hi)
    return lo, full_lo, full_hi, hi, first, last


@triton.jit
def band_mask(rows, cols, sk, off, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Visibility of local positions: ``rows`` and ``cols`` are index tensors of shapes that broadcast against
    each other. Says nothing about rows past the query length.  Without a band the result has ``cols``' shape
    and broadcasts."""
    if HAS_RIGHT:
        # The end of the keys joins the per-row bound: one comparison per score instead of two.
        keep = cols <= tl.minimum(rows + (off + right), sk - 1)
    else:
        keep = cols < sk
    if HAS_LEFT:
        keep = keep & (cols >= rows + (off - left))
    return keep


@triton.jit
def tile_base(ptr, batch, head, row, stride_b, stride_h, stride_s):
    """Pointer to one row of one head, in 64-bit arithmetic whatever the strides' type."""
    return ptr + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + row.to(tl.int64) * stride_s)


@triton.jit
def tile_pointers(base, row_index, col_index, row_stride, col_stride, WIDE: tl.constexpr):
    """Pointers of a tile from its (already 64-bit) base: index tensors of in-tile positions times strides, in
    32 bits unless WIDE (strides then are int64)."""
    if WIDE:
        return base + (row_index.to(tl.int64) * row_stride + col_index.to(tl.int64) * col_stride)
    else:
        return base + (row_index * row_stride + col_index * col_stride)


@triton.jit
def score_tile(base, m0, n0, row_index, col_index, row_stride, col_stride, row_limit, col_limit,
               OTHER: tl.constexpr, WIDE: tl.constexpr):
    """One tile of a bias or of a boolean mask (read as bytes) at positions m0 + row_index, n0 + col_index.

    ``base`` already holds the batch's and head's offset.  Positions at or past the limits are not read and
    give OTHER.
    """
    start = base + (m0.to(tl.int64) * row_stride + n0.to(tl.int64) * col_stride)
    inside = (m0 + row_index < row_limit) & (n0 + col_index < col_limit)
    tile = tile_pointers(start, row_index, col_index, row_stride, col_stride, WIDE)
    return tl.load(tile, mask=inside, other=OTHER)


@triton.jit
def softcap_scores(raw, cap):
    """cap * tanh(raw / cap) in fp32.

    1 - 2 / (exp(2x) + 1) cannot become inf / inf (vllm#56578); near zero, where that form cancels, the odd
    series to x**9 keeps full relative precision.
    """
    x = raw / cap
    x2 = x * x
    series = x * (1.0 + x2 * (-0.3333333333333333 + x2 * (0.13333333333333333 + x2 * (
        -0.05396825396825397 + x2 * 0.021869488536155203))))
    closed = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return cap * tl.where(tl.abs(x) < 0.25, series, closed)


@triton.jit
def softcap_slope(capped, cap):
    """1 - tanh(raw / cap)**2 from the capped score, taken before masking and before the bias is added."""
    t = capped / cap
    return 1.0 - t * t


@triton.jit
def dot(a, b, DOT_FP32: tl.constexpr):
    """a @ b in fp32.  DOT_FP32 widens the operands first: the interpreter multiplies the raw bits of bf16."""
    if DOT_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def dot_add(a, b, acc, DOT_FP32: tl.constexpr):
    """acc + a @ b in fp32, see ``dot``.  fp32 operands never go through TF32."""
    if DOT_FP32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
