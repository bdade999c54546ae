"""The choice of blocks: a program owns ROWS query tokens of one K/V head and holds their scores in registers.

Scores become integers that sort like them (equal zeros, NaN as -inf), forced blocks the greatest; the best one is taken
`slots` times, the lower number among equals. The taken ones go out in ascending order, their places by a running sum,
then -1. M of a few thousand times 16 rounds of two reductions: bound by the reductions, milliseconds at 128k tokens.
"""

import triton
import triton.language as tl

from ..common import linear_pid
from .map import token_places


@triton.jit
def nsa_topk(
    score_ptr, out_ptr, cu_ptr, stride_score_b, stride_score_h, stride_score_t, stride_score_m, stride_out_b, stride_out_h,
    stride_out_t, stride_out_s, stride_cu,
    n_programs, n_tiles, heads_kv, n_tokens, n_scores, slots, n_init, n_local, n_seqs, off, n_steps,
    BS: tl.constexpr, ROWS: tl.constexpr, SCORES: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr,
):
    pid = linear_pid()
    if pid >= n_programs:
        return
    tokens = (pid % n_tiles) * ROWS + tl.arange(0, ROWS)
    bh = pid // n_tiles
    b64 = (bh // heads_kv).to(tl.int64)
    h64 = (bh % heads_kv).to(tl.int64)
    inside = tokens < n_tokens
    t64 = tokens.to(tl.int64)
    if PACKED:
        start, length, _sequence = token_places(tokens, cu_ptr, stride_cu, n_seqs, n_tokens, n_steps)
        own = tl.where(length > 0, (tokens - start) // BS, -1)
    else:
        own = tl.where(tokens + off >= 0, tl.maximum(tokens + off, 0) // BS, -1)
    m = tl.arange(0, SCORES)
    there = inside[:, None] & (m[None, :] <= own[:, None]) & (m < n_scores)[None, :]
    at = score_ptr + (b64 * stride_score_b + h64 * stride_score_h) + t64[:, None] * stride_score_t
    score = tl.load(at + m[None, :].to(tl.int64) * stride_score_m, mask=there, other=0.0).to(tl.float32)
    score = tl.where(score == score, score, float("-inf"))
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    LEAST: tl.constexpr = -2147483648
    rank = bits ^ ((bits >> 31) & 2147483647)
    rank = tl.where((m < n_init)[None, :] | (m[None, :] > own[:, None] - n_local), 2147483647, rank)
    rank = tl.where(there, rank, LEAST)
    taken = tl.zeros([ROWS, SCORES], tl.int32)
    for _ in range(slots):
        best = tl.max(rank, 1)
        number = tl.min(tl.where(rank == best[:, None], m[None, :], SCORES), 1)
        hit = (m[None, :] == number[:, None]) & (best > LEAST)[:, None]
        taken = tl.where(hit, 1, taken)
        rank = tl.where(hit, LEAST, rank)
    place = tl.cumsum(taken, 1) - 1
    out = out_ptr + (b64 * stride_out_b + h64 * stride_out_h) + t64[:, None] * stride_out_t
    tl.store(out + place.to(tl.int64) * stride_out_s, m[None, :] + place * 0, mask=(taken > 0) & inside[:, None])
    s = tl.arange(0, SLOTS)
    free = (s[None, :] >= tl.sum(taken, 1)[:, None]) & (s < slots)[None, :] & inside[:, None]
    tl.store(out + s[None, :].to(tl.int64) * stride_out_s, tl.full([ROWS, SLOTS], -1, tl.int32), mask=free)
