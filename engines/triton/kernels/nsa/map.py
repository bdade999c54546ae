"""Selection attention, step 1: from each row's block entries to each block's rows, without atomics or host reads.

    nsa_clean    entries [.., S] of any order -> block ids, -1 for what is no block: out of range, past the row's count,
                 wholly in the future, or a duplicate of an earlier entry of the row. And for each tile of 32 tokens the
                 marks of every block: bit t says that token t of the tile chose it
    nsa_scan     per block: running sums of the marks over the tiles, and the total
    nsa_offsets  running sums over the blocks
    nsa_scatter  entry -> its place: block offset + tile offset + marks of earlier tokens: a stable counting sort, so a
                 block's rows are in token order and the result does not depend on any timing
    nsa_slots    work item -> block: blocks are cut into chunks of `chunk_rows` rows (entries x heads), so that a block
                 that every row chose is shared by many programs

A launch does the tokens [t0, t0 + n_tokens), dealt out to `parts` of `span` tokens, a whole number of tiles: a part is a
sorting problem of its own, so that programs that run at the same time read rows of the same part, which the L2 cache
holds. All arrays are per (batch, K/V head, part); entry e is slot e % S of the part's token e // S. An entry's place is
counted in the part it is in, with all entries of earlier parts before it; -1 for what is no block.

Packed: blocks of sequence s (gaps before the first and after the last offset count as sequences, see `packed_slot`) have
ids from start // BS + s on, so ids of different sequences never meet.
"""

import triton
import triton.language as tl

from ..common import linear_pid, packed_edge


@triton.jit
def token_places(tokens, cu_ptr, stride_cu, n_seqs, total, n_steps):
    """(start, length, sequence) of each token's sequence; sequence 0 and n_seqs + 1 are the gaps outside the offsets."""
    low = tokens * 0
    high = low + n_seqs + 1
    for _ in range(n_steps):
        mid = (low + high + 1) // 2
        go = packed_edge(cu_ptr, stride_cu, mid, n_seqs, total) <= tokens
        low = tl.where(go, mid, low)
        high = tl.where(go, high, tl.maximum(mid - 1, low))
    start = packed_edge(cu_ptr, stride_cu, low, n_seqs, total)
    length = tl.maximum(packed_edge(cu_ptr, stride_cu, low + 1, n_seqs, total) - start, 0)
    length = tl.where((low >= 1) & (low <= n_seqs), length, 0)
    return start, length, low


@triton.jit
def ones(bits):
    """How many of the 32 bits are set, by halves: Triton has no portable instruction for it."""
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    bits = bits + (bits >> 8)
    return (bits + (bits >> 16)) & 63


@triton.jit
def nsa_clean(index_ptr, counts_ptr, cu_ptr, place_ptr, marks_ptr, stride_index_b, stride_index_h, stride_index_t,
              stride_index_s, stride_counts_b, stride_counts_h, stride_counts_t, stride_cu, n_programs, n_tiles,
              heads_kv, t0, n_tokens, n_blocks, slots, n_seqs, sk, off, n_steps,
              BS: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, PACKED: tl.constexpr,
              HAS_COUNTS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    tile = pid % n_tiles
    bh = pid // n_tiles
    b64 = (bh // heads_kv).to(tl.int64)
    h64 = (bh % heads_kv).to(tl.int64)
    index = tl.arange(0, TILE)
    rows = tile * TILE + index
    tokens = t0 + rows
    t64 = tokens.to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = rows < n_tokens
    keep = inside[:, None] & (slot < slots)[None, :]
    row_base = index_ptr + (b64 * stride_index_b + h64 * stride_index_h) + t64 * stride_index_t
    entry = tl.load(row_base[:, None] + slot[None, :].to(tl.int64) * stride_index_s, mask=keep, other=-1)
    real = keep
    if HAS_COUNTS:
        at = counts_ptr + (b64 * stride_counts_b + h64 * stride_counts_h) + t64 * stride_counts_t
        count = tl.load(at, mask=inside, other=0)
        real = real & (slot[None, :] < count[:, None])
    if PACKED:
        start, length, sequence = token_places(tokens, cu_ptr, stride_cu, n_seqs, sk, n_steps)
        position = tokens - start
        first = start // BS + sequence
    else:
        position = tokens + off
        length = rows * 0 + sk
        first = rows * 0
    blocks = (length + (BS - 1)) // BS
    real = real & (entry >= 0) & (entry < blocks[:, None])
    block = tl.where(real, entry, 0).to(tl.int32)
    real = real & (block * BS <= position[:, None])
    # An earlier equal entry is a block whenever this one is: it stands before the row's count, too.
    for s in range(0, slots - 1):
        other = tl.load(row_base + s * stride_index_s, mask=inside, other=-1)
        real = real & ((entry != other[:, None]) | (slot <= s)[None, :])
    ids = tl.where(real, block + first[:, None], -1)
    out = (pid.to(tl.int64) * TILE + index)[:, None] * slots + slot[None, :]
    tl.store(place_ptr + out, ids, mask=(slot < slots)[None, :] & (index >= 0)[:, None])
    # First 32 blocks to a word, for each token; then the words' bits across the tokens.
    bit = tl.arange(0, 32)
    for w0 in range(0, (n_blocks + 31) // 32, WORDS):
        word = w0 + tl.arange(0, WORDS)
        hit = (ids >> 5)[:, :, None] == word[None, None, :]
        chosen = tl.sum(tl.where(hit, (1 << (ids & 31))[:, :, None], 0), 1)
        marks = tl.sum(((chosen[:, :, None] >> bit[None, None, :]) & 1) << index[:, None, None], 0)
        n = word[:, None] * 32 + bit[None, :]
        tl.store(marks_ptr + pid.to(tl.int64) * n_blocks + n, marks, mask=n < n_blocks)


@triton.jit
def nsa_scan(marks_ptr, tile_sums_ptr, totals_ptr, n_programs, n_groups, n_tiles, n_blocks, TILES: tl.constexpr,
             BLOCKS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    n = (pid % n_groups) * BLOCKS + tl.arange(0, BLOCKS)
    part = (pid // n_groups).to(tl.int64)
    base = part * n_tiles * n_blocks
    carry = tl.zeros([BLOCKS], tl.int32)
    for t0 in range(0, n_tiles, TILES):
        tile = t0 + tl.arange(0, TILES)
        inside = (tile < n_tiles)[:, None] & (n < n_blocks)[None, :]
        at = base + tile[:, None].to(tl.int64) * n_blocks + n[None, :]
        sums = ones(tl.load(marks_ptr + at, mask=inside, other=0))
        before = tl.cumsum(sums, 0) - sums + carry[None, :]
        tl.store(tile_sums_ptr + at, before, mask=inside)
        carry += tl.sum(sums, 0)
    tl.store(totals_ptr + part * n_blocks + n, carry, mask=n < n_blocks)


@triton.jit
def nsa_offsets(totals_ptr, offsets_ptr, n_programs, n_blocks, BLOCKS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    part = pid.to(tl.int64)
    out = offsets_ptr + part * (n_blocks + 1)
    carry = tl.sum(tl.zeros([BLOCKS], tl.int32), 0)
    for n0 in range(0, n_blocks, BLOCKS):
        n = n0 + tl.arange(0, BLOCKS)
        sums = tl.load(totals_ptr + part * n_blocks + n, mask=n < n_blocks, other=0)
        tl.store(out + n, tl.cumsum(sums, 0) - sums + carry, mask=n < n_blocks)
        carry += tl.sum(sums, 0)
    tl.store(out + n_blocks, carry)


@triton.jit
def nsa_scatter(place_ptr, marks_ptr, tile_sums_ptr, offsets_ptr, rows_ptr, n_programs, n_tiles, n_entries, n_blocks,
                slots, parts, TILE: tl.constexpr, SLOTS: tl.constexpr):
    """Replaces the ids by places. ``n_tiles``: of a part."""
    pid = linear_pid()
    if pid >= n_programs:
        return
    tile = pid % n_tiles
    part = (pid // n_tiles).to(tl.int64)
    index = tl.arange(0, TILE)
    slot = tl.arange(0, SLOTS)
    keep = (slot < slots)[None, :] & (index >= 0)[:, None]
    entry = place_ptr + (pid.to(tl.int64) * TILE + index)[:, None] * slots + slot[None, :]
    ids = tl.load(entry, mask=keep, other=-1)
    real = ids >= 0
    at = pid.to(tl.int64) * n_blocks + ids
    marks = tl.load(marks_ptr + at, mask=real, other=0)
    place = tl.load(tile_sums_ptr + at, mask=real, other=0) + ones(marks & ((1 << index) - 1)[:, None])
    place += tl.load(offsets_ptr + part * (n_blocks + 1) + ids, mask=real, other=0)
    tl.store(rows_ptr + part * n_entries + place, tile * TILE + index[:, None] + place * 0, mask=real)
    before = ((pid // n_tiles) % parts) * n_entries
    tl.store(entry, tl.where(real, before + place, -1), mask=keep)


@triton.jit
def nsa_slots(offsets_ptr, items_ptr, n_programs, n_tiles, n_items, n_blocks, group, chunk_rows, n_steps,
              SLOTS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    item = (pid % n_tiles) * SLOTS + tl.arange(0, SLOTS)
    part = (pid // n_tiles).to(tl.int64)
    offsets = offsets_ptr + part * (n_blocks + 1)
    low = item * 0
    high = low + n_blocks - 1
    for _ in range(n_steps):
        mid = (low + high + 1) // 2
        go = tl.load(offsets + mid) * group // chunk_rows + mid <= item
        low = tl.where(go, mid, low)
        high = tl.where(go, high, tl.maximum(mid - 1, low))
    tl.store(items_ptr + part * n_items + item, low, mask=item < n_items)
