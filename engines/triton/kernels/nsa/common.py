"""What the selection kernels share: a work item's block and rows, and gathered rows of queries.

A block's rows are (entry, head of the group) pairs, row r being head r % GROUP of entry r // GROUP: a tile of rows is
full whatever the group size is. The group is compiled in: a division by a number costs about ten instructions a row.
"""

import triton
import triton.language as tl

from ..common import packed_slot


@triton.jit
def part_place(part, parts, span, heads_kv, t0):
    """(batch, K/V head, first token) of a part of the launch, see `map.py`."""
    bh = part // parts
    return bh // heads_kv, bh % heads_kv, t0 + (part % parts).to(tl.int32) * span


@triton.jit
def chunk_size(rows, chunk_rows):
    """Rows of each work item of a block that has so many: even shares of at most `chunk_rows`, in whole tiles (128 rows,
    or `chunk_rows` where that is less, are a multiple of every BLOCK_M). No share is a small remainder."""
    tile = tl.minimum(chunk_rows, 128)
    shares = tl.maximum((rows + chunk_rows - 1) // chunk_rows, 1)
    return tl.maximum((rows + shares * tile - 1) // (shares * tile), 1) * tile


@triton.jit
def work_item(items_ptr, offsets_ptr, part, item, n_items, n_blocks, group, chunk_rows):
    """(block, its first entry, first row, end row, rows) of a work item; no rows where first >= end."""
    block = tl.load(items_ptr + part * n_items + item)
    at = offsets_ptr + part * (n_blocks + 1) + block
    first = tl.load(at)
    rows = (tl.load(at + 1) - first) * group
    size = chunk_size(rows, chunk_rows)
    r0 = (item - (first * group // chunk_rows + block)) * size
    return block, first, r0, tl.minimum(r0 + size, rows), rows


@triton.jit
def block_place(block, cu_ptr, stride_cu, n_seqs, sk, BS: tl.constexpr, PACKED: tl.constexpr):
    """(first token of the sequence, its length, first key of the block in it)."""
    if PACKED:
        _sequence, start, length, tile = packed_slot(cu_ptr, stride_cu, block, n_seqs, sk, BS)
    else:
        start = block * 0
        length = start + sk
        tile = block
    return start, length, tile * BS


@triton.jit
def rows_with_a_mask(rows_at, n_rows, shift, key0, GROUP: tl.constexpr, BS: tl.constexpr, BS_PAD: tl.constexpr):
    """(rows that do not see the whole block, the last row's position). Rows are in token order, so the first are these,
    fewer than BS entries; ``shift`` takes a token of the part to its position in the sequence."""
    n_entries = n_rows // GROUP
    index = tl.arange(0, BS_PAD)
    inside = index < tl.minimum(n_entries, BS)
    token = tl.load(rows_at + index, mask=inside, other=0)
    early = (token + shift < key0 + BS - 1) & inside
    last = tl.load(rows_at + n_entries - 1) + shift
    return tl.sum(early.to(tl.int32), 0) * GROUP, last


@triton.jit
def tile_entries(r, index, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(entry of the block, head of the group) of the rows r + index; r is a multiple of BLOCK_M. Where whole groups fill
    a tile the heads are the same in every tile, and nobody divides in the loop."""
    if BLOCK_M % GROUP == 0:
        return r // GROUP + index // GROUP, index % GROUP
    else:
        at = (r + index) // GROUP
        return at, r + index - at * GROUP


@triton.jit
def tile_tokens(rows_at, r, r1, index, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Tokens of the rows r + index. Rows at or past r1 get the last row's token: a row of this block like any other, so
    that loads need no mask, whose results nobody may use."""
    entry, _head = tile_entries(r, index, GROUP, BLOCK_M)
    return tl.load(rows_at + tl.minimum(entry, (r1 - 1) // GROUP))


@triton.jit
def load_rows(base, row_offset, keep, cols, stride_d, width, EVEN: tl.constexpr):
    """Rows at 64-bit offsets; those not kept and columns past ``width`` are not read: 0."""
    at = base + row_offset[:, None] + cols[None, :] * stride_d
    if EVEN:
        return tl.load(at, mask=keep[:, None], other=0.0)
    else:
        return tl.load(at, mask=keep[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit
def load_all_rows(base, row_offset, cols, stride_d, width, EVEN: tl.constexpr):
    """``load_rows`` without a choice of rows."""
    at = base + row_offset[:, None] + cols[None, :] * stride_d
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(cols < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, row_offset, keep, cols, stride_d, width, value, EVEN: tl.constexpr):
    at = base + row_offset[:, None] + cols[None, :] * stride_d
    keep = keep[:, None]
    if not EVEN:
        keep = keep & (cols < width)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=keep)
