"""What the selection kernels share: a work item's block and rows, and gathered rows of queries.

A block's rows are (entry, head of the group) pairs, row r being head r % GROUP of entry r // GROUP: a tile of rows is
full whatever the group size is. The group is compiled in: a division by a number costs about ten instructions a row.
"""

import triton
import triton.language as tl

from ..common import packed_slot


@triton.jit
def work_item(items_ptr, offsets_ptr, bh, item, n_items, n_blocks, group, chunk_rows):
    """(block, its first entry, first row, end row) of a work item; no rows where first >= end."""
    block = tl.load(items_ptr + bh * n_items + item)
    at = offsets_ptr + bh * (n_blocks + 1) + block
    first = tl.load(at)
    rows = (tl.load(at + 1) - first) * group
    r0 = (item - (first * group // chunk_rows + block)) * chunk_rows
    return block, first, r0, tl.minimum(r0 + chunk_rows, rows), rows


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
def rows_with_a_mask(rows_at, n_rows, shift, key0, GROUP: tl.constexpr, SLOTS: tl.constexpr, BS: tl.constexpr,
                     BS_PAD: tl.constexpr):
    """(rows that do not see the whole block, the last row's position). Rows are in token order, so the first are these,
    fewer than BS entries; ``shift`` takes a token of the launch to its position in the sequence."""
    n_entries = n_rows // GROUP
    index = tl.arange(0, BS_PAD)
    entry = tl.load(rows_at + index, mask=index < tl.minimum(n_entries, BS), other=0)
    early = (entry // SLOTS + shift < key0 + BS - 1) & (index < tl.minimum(n_entries, BS))
    last = tl.load(rows_at + n_entries - 1) // SLOTS + shift
    return tl.sum(early.to(tl.int32), 0) * GROUP, last


@triton.jit
def gathered(rows_at, rows, valid, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """(token of the launch, slot, head of the group) of rows; those not valid are somebody else's."""
    at = rows // GROUP
    code = tl.load(rows_at + at, mask=valid, other=0)
    token = code // SLOTS
    return token, code - token * SLOTS, rows - at * GROUP


@triton.jit
def load_rows(base, row_offset, keep, cols, stride_d, width, EVEN: tl.constexpr):
    """Rows at 64-bit offsets; those not kept and columns past ``width`` are not read: 0."""
    at = base + row_offset[:, None] + cols[None, :] * stride_d
    if EVEN:
        return tl.load(at, mask=keep[:, None], other=0.0)
    else:
        return tl.load(at, mask=keep[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit
def store_rows(base, row_offset, keep, cols, stride_d, width, value, EVEN: tl.constexpr):
    at = base + row_offset[:, None] + cols[None, :] * stride_d
    keep = keep[:, None]
    if not EVEN:
        keep = keep & (cols < width)[None, :]
    tl.store(at, value.to(base.dtype.element_ty), mask=keep)
