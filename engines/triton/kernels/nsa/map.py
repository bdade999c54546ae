"""Selection attention, step 1: from each row's block entries to each block's rows, without atomics or host reads.

    nsa_clean    entries [.., S] of any order -> block ids, -1 for what is no block: out of range, past the row's count,
                 wholly in the future, or a duplicate of an earlier entry of the row
    nsa_count    how many entries of each tile of ENTRIES name each block
    nsa_scan     per block: running sums over the tiles, and the total
    nsa_offsets  running sums over the blocks
    nsa_scatter  entry -> its place: block offset + tile offset + rank among equal ones in the tile: a stable counting
                 sort, so a block's rows are in token order and the result does not depend on any timing
    nsa_slots    work item -> block: blocks are cut into chunks of `chunk_rows` rows (entries x heads), so that a block
                 that every row chose is shared by many programs

All arrays are per (batch, K/V head), of the tokens [t0, t0 + n_tokens) of one launch. Entry e is slot e % S of token
t0 + e // S; in the sorted arrays it stands as token * SLOTS + slot, SLOTS the power of two, so that who reads it
need not divide by a number. Packed: blocks of sequence s (gaps before the first and after the last offset count as sequences, see
`packed_slot`) have ids from start // BS + s on, so ids of different sequences never meet.
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
def nsa_clean(index_ptr, counts_ptr, cu_ptr, clean_ptr, stride_index_b, stride_index_h, stride_index_t,
              stride_index_s, stride_counts_b, stride_counts_h, stride_counts_t, stride_cu, n_programs, n_tiles,
              heads_kv, t0, n_tokens, slots, n_seqs, sk, off, n_steps,
              BS: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
              HAS_COUNTS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    tile = pid % n_tiles
    bh = pid // n_tiles
    b64 = (bh // heads_kv).to(tl.int64)
    h64 = (bh % heads_kv).to(tl.int64)
    rows = tile * TOKENS + tl.arange(0, TOKENS)
    tokens = t0 + rows
    t64 = tokens.to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside = rows < n_tokens
    keep = inside[:, None] & (slot < slots)[None, :]
    base = index_ptr + (b64 * stride_index_b + h64 * stride_index_h)
    entry = tl.load(base + t64[:, None] * stride_index_t + slot[None, :].to(tl.int64) * stride_index_s, mask=keep,
                    other=-1)
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
    # What is no block gets a negative number of its own, so that it equals nothing.
    name = tl.where(real, block, -1 - slot[None, :])
    equal = name[:, :, None] == name[:, None, :]
    earlier = slot[None, None, :] < slot[None, :, None]
    twice = tl.max((equal & earlier).to(tl.int32), 2) > 0
    ids = tl.where(real & (twice == 0), block + first[:, None], -1)
    out = clean_ptr + (bh.to(tl.int64) * n_tokens + rows.to(tl.int64))[:, None] * slots + slot[None, :]
    tl.store(out, ids, mask=keep)


@triton.jit
def nsa_count(clean_ptr, tile_sums_ptr, n_programs, n_tiles, n_entries, n_blocks, ENTRIES: tl.constexpr,
              BLOCKS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    entries = (pid % n_tiles) * ENTRIES + tl.arange(0, ENTRIES)
    bh = (pid // n_tiles).to(tl.int64)
    ids = tl.load(clean_ptr + bh * n_entries + entries, mask=entries < n_entries, other=-1)
    out = tile_sums_ptr + pid.to(tl.int64) * n_blocks
    for n0 in range(0, n_blocks, BLOCKS):
        n = n0 + tl.arange(0, BLOCKS)
        hits = tl.sum((ids[:, None] == n[None, :]).to(tl.int32), 0)
        tl.store(out + n, hits, mask=n < n_blocks)


@triton.jit
def nsa_scan(tile_sums_ptr, totals_ptr, n_programs, n_groups, n_tiles, n_blocks, TILES: tl.constexpr,
             BLOCKS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    n = (pid % n_groups) * BLOCKS + tl.arange(0, BLOCKS)
    bh = (pid // n_groups).to(tl.int64)
    base = tile_sums_ptr + bh * n_tiles * n_blocks
    carry = tl.zeros([BLOCKS], tl.int32)
    for t0 in range(0, n_tiles, TILES):
        tile = t0 + tl.arange(0, TILES)
        inside = (tile < n_tiles)[:, None] & (n < n_blocks)[None, :]
        at = base + tile[:, None].to(tl.int64) * n_blocks + n[None, :]
        sums = tl.load(at, mask=inside, other=0)
        before = tl.cumsum(sums, 0) - sums + carry[None, :]
        tl.store(at, before, mask=inside)
        carry += tl.sum(sums, 0)
    tl.store(totals_ptr + bh * n_blocks + n, carry, mask=n < n_blocks)


@triton.jit
def nsa_offsets(totals_ptr, offsets_ptr, n_programs, n_blocks, BLOCKS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    bh = pid.to(tl.int64)
    out = offsets_ptr + bh * (n_blocks + 1)
    carry = tl.sum(tl.zeros([BLOCKS], tl.int32), 0)
    for n0 in range(0, n_blocks, BLOCKS):
        n = n0 + tl.arange(0, BLOCKS)
        sums = tl.load(totals_ptr + bh * n_blocks + n, mask=n < n_blocks, other=0)
        tl.store(out + n, tl.cumsum(sums, 0) - sums + carry, mask=n < n_blocks)
        carry += tl.sum(sums, 0)
    tl.store(out + n_blocks, carry)


@triton.jit
def nsa_scatter(clean_ptr, tile_sums_ptr, offsets_ptr, rows_ptr, n_programs, n_tiles, n_entries, n_blocks, slots,
                ENTRIES: tl.constexpr, PART: tl.constexpr, SLOTS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    e0 = (pid % n_tiles) * ENTRIES
    index = tl.arange(0, ENTRIES)
    entries = e0 + index
    bh = (pid // n_tiles).to(tl.int64)
    own = clean_ptr + bh * n_entries
    ids = tl.load(own + entries, mask=entries < n_entries, other=-1)
    real = ids >= 0
    rank = tl.zeros([ENTRIES], tl.int32)
    for p0 in range(0, ENTRIES, PART):
        part = p0 + tl.arange(0, PART)
        others = tl.load(own + e0 + part, mask=e0 + part < n_entries, other=-1)
        before = (ids[:, None] == others[None, :]) & (part[None, :] < index[:, None])
        rank += tl.sum(before.to(tl.int32), 1)
    at = tl.load(offsets_ptr + bh * (n_blocks + 1) + ids, mask=real, other=0)
    at += tl.load(tile_sums_ptr + pid.to(tl.int64) * n_blocks + ids, mask=real, other=0)
    code = entries + entries // slots * (SLOTS - slots)
    tl.store(rows_ptr + bh * n_entries + at + rank, code, mask=real)


@triton.jit
def nsa_slots(offsets_ptr, items_ptr, n_programs, n_tiles, n_items, n_blocks, group, chunk_rows, n_steps,
              SLOTS: tl.constexpr):
    pid = linear_pid()
    if pid >= n_programs:
        return
    item = (pid % n_tiles) * SLOTS + tl.arange(0, SLOTS)
    bh = (pid // n_tiles).to(tl.int64)
    offsets = offsets_ptr + bh * (n_blocks + 1)
    low = item * 0
    high = low + n_blocks - 1
    for _ in range(n_steps):
        mid = (low + high + 1) // 2
        go = tl.load(offsets + mid) * group // chunk_rows + mid <= item
        low = tl.where(go, mid, low)
        high = tl.where(go, high, tl.maximum(mid - 1, low))
    tl.store(items_ptr + bh * n_items + item, low, mask=item < n_items)
