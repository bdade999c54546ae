// What the backward kernels share: tiles of one side, products of tiles, P and dS from recomputed scores, stores.
//
// bwd_pre leaves a pair (lse, delta) per row. lse is +inf in every row that contributes nothing (padding, rows without
// keys), so P = exp(s - lse) is exactly 0 there; delta holds rowsum(dO * o) - dLSE. Without softcap and bias (kFold)
// scores and lse are in the exp2 domain and one multiply-add feeds exp2; otherwise they are natural.
#pragma once
#include "ptx.cuh"
#include "common.cuh"

constexpr int kD = HEAD_DIM, kDv = HEAD_DIM_V;
constexpr bool kFold = !kHasSoftcap && kBias == 0;
constexpr int kStashBytes = 256;
constexpr int kPairBytes = 8;  // of a row's statistics

FROST_FN Indices cu_q(const BwdArgs& a) { return {a.cu_q, a.cu_q_s, (a.int64_mask & 1) != 0}; }
FROST_FN Indices cu_kv(const BwdArgs& a) { return {a.cu_kv, a.cu_kv_s, (a.int64_mask & 2) != 0}; }
FROST_FN Indices lengths_q(const BwdArgs& a) { return {a.len_q, a.len_q_s, (a.int64_mask & 4) != 0}; }
FROST_FN Indices lengths_kv(const BwdArgs& a) { return {a.len_kv, a.len_kv_s, (a.int64_mask & 8) != 0}; }

// The tile of one side that a slot stands for: positions first .. first + BLOCK - 1 of `span`, whose length is 0 in a gap.
struct Own {
  int sequence, first;
  Span span;
  bool any;  // false: an unused slot
};

template <int BLOCK>
FROST_FN Own own_tile(const Indices& cu, const Indices& lengths, int slot, int sequence, int n_seqs, int total) {
  Own own = {sequence, slot * BLOCK, {0, total, total}, true};
  if (cu.values) {
    const Slot s = packed_slot<BLOCK>(cu, slot, n_seqs, total, 1);
    own = {s.sequence, s.tile * BLOCK, {s.start, s.extent, s.sequence >= 0 && s.sequence < n_seqs ? s.extent : 0},
           s.tile * BLOCK < s.extent};
  }
  if (lengths.values && own.span.length > 0) own.span.length = lengths.get(own.sequence, own.span.length);
  return own;
}

// A tile that is padding alone has its last position before its first: nothing to walk.
FROST_FN Walk no_walk() { return {0, 0, 0, 0, 0, 0}; }

FROST_FN const char* stats_of(const BwdArgs& a, i64 batch, int head, int start) {
  return static_cast<const char*>(a.stats) + ((batch * a.heads + head) * a.sq_max + start) * kPairBytes;
}

FROST_FN ScoreOperand bias_of(const BwdArgs& a, int sequence, int head) {
  return {static_cast<const char*>(a.bias) + (sequence * a.bias_b + head * a.bias_h) * kBiasBytes, a.bias_q, a.bias_k,
          a.bias_rows, a.bias_columns};
}

FROST_FN ScoreOperand mask_of(const BwdArgs& a, int sequence, int head) {
  return {static_cast<const char*>(a.mask) + sequence * a.mask_b + head * a.mask_h, a.mask_q, a.mask_k, a.mask_rows,
          a.mask_columns};
}

// Sums of dQ by atomic additions, fp32, in the order of the fragments that are added: for 16 rows and 8 columns 128 numbers,
// as SumLayout has them; the columns' blocks of one 16 rows lie next to each other. A sequence starts at a whole block:
// packed sequence s at number start / 16 + s, which leaves room for every sequence's last, partial block.
FROST_FN float* dq_sums(const BwdArgs& a, i64 batch, int head, int sequence, int start, int row, int columns) {
  const int block = (a.cu_q ? static_cast<u32>(start) / 16 + sequence : 0) + static_cast<u32>(row) / 16;
  return static_cast<float*>(a.sums) + ((batch * a.heads + head) * a.sum_blocks + block) * (columns * 16);
}

// ---- products --------------------------------------------------------------------------------------------------------

template <int R, int N>
FROST_FN void clear(float (&c)[R][N][4]) {
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][n][e] = 0.f;
}

struct Nothing {
  FROST_FN void operator()(int) const {}
};

// c = A B^T over D columns: R * 16 rows of one tile from row_a on, N * 8 rows of another from row_b on. `between` is called
// after each step of 16 columns: what it issues is worked out while the tensor cores are busy.
template <int D, int R, int N, class Between = Nothing>
FROST_FN void multiply(float (&c)[R][N][4], u32 tile_a, int row_a, u32 tile_b, int row_b, Between between = Between()) {
  const int lane = lane_index();
  const FragmentAddress<D> a_at(tile_a, row_a + a_row(lane), a_half(lane));
  const FragmentAddress<D> b_at(tile_b, row_b + bt_row(lane), bt_half(lane));
  clear(c);
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    u32 a[R][4];
#pragma unroll
    for (int i = 0; i < R; ++i) ldmatrix(a[i], a_at.at(i * 16, step));
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 b[4];
      ldmatrix(b, b_at.at(n * 8, step));
#pragma unroll
      for (int i = 0; i < R; ++i) {
        mma<kBf16>(c[i][n], a[i], b[0], b[1]);
        mma<kBf16>(c[i][n + 1], a[i], b[2], b[3]);
      }
    }
    between(step);
  }
}

// acc += A B for the 16 rows of B (a tile of D columns) that `step` names, N * 8 columns from `column` on (a multiple of
// the swizzle's period). With CHECKED, rows of B without a bit in `seen` count as zeros.
template <int D, bool CHECKED, int R, int N>
FROST_FN void accumulate(float (&acc)[R][N][4], const u32 (&a)[R][4], u32 tile_b, int step, int column, u32 seen) {
  const int lane = lane_index();
  const FragmentAddress<D> b_at(tile_b + column * 2, b_row(lane), b_half(lane));
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    u32 b[4];
    ldmatrix_trans(b, b_at.at(step * 16, n / 2));
    if constexpr (CHECKED) {
#pragma unroll
      for (int e = 0; e < 4; ++e) b[e] = seen_values(b[e], seen, step * 2 + e % 2);
    }
#pragma unroll
    for (int i = 0; i < R; ++i) {
      mma<kBf16>(acc[i][n], a[i], b[0], b[1]);
      mma<kBf16>(acc[i][n + 1], a[i], b[2], b[3]);
    }
  }
}

// The left operand of 16 columns, from accumulators as they lie.
template <int R, int N>
FROST_FN void as_operand(u32 (&a)[R][4], const float (&c)[R][N][4], int step) {
#pragma unroll
  for (int i = 0; i < R; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float* from = &c[i][step * 2 + e / 2][e % 2 * 2];
      a[i][e] = pack2<kBf16>(from[0], from[1]);
    }
  }
}

// ---- P and dS --------------------------------------------------------------------------------------------------------

// P of one raw score. `slope` becomes the derivative of the softcap there.
FROST_FN float probability(const BwdArgs& a, float raw, float lse, float bias, float& slope) {
  if constexpr (kFold) {
    return exp2_fast(raw * (a.scale * kLog2e) - lse);
  } else {
    float score = raw * a.scale;
    if constexpr (kHasSoftcap) {
      const float inverse_cap = 1.f / a.softcap;
      score = softcapped(score, a.softcap, inverse_cap);
      const float share = score * inverse_cap;
      slope = 1.f - share * share;
    }
    return exp2_fast((score + bias - lse) * kLog2e);
  }
}

// P is exactly 0 where not visible, but dP may be NaN there.
template <bool MASKED>
FROST_FN float score_gradient(float p, float dp, float delta) {
  const float ds = p * (dp - delta);
  return MASKED && p == 0.f ? 0.f : ds;
}

// Lane's rows of a warp's score tile: row r of 16-row tile i, half (0, 1).
FROST_FN int fragment_row(int i, int half) { return i * 16 + half * 8 + (lane_index() >> 2); }

// Scores of rows (queries) by columns (keys) to P. `seen` gets a bit per key of this lane's (2 for each tile of 8) that
// at least one of the warp's rows sees. `row` is the warp's first.
template <bool MASKED, int R, int N>
FROST_FN void row_probabilities(const BwdArgs& a, float (&s)[R][N][4], float (&slope)[kHasSoftcap ? R : 1][kHasSoftcap ? N : 1][4],
                                const float (&lse)[R][2], const ScoreOperand& bias, const ScoreOperand& mask, int row,
                                int n0, int sq, int sk, const Band& band, u32& seen) {
  const int key0 = n0 + (lane_index() & 3) * 2;  // this lane's first
  seen = 0;
#pragma unroll
  for (int i = 0; i < R; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = row + fragment_row(i, half);
      const KeyRange all = keys_of_row(position, sk, band);
      const KeyRange range = {all.low - key0, position < sq ? all.high - key0 : -1};
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = key0 + n * 8 + e;
          float& x = s[i][n][half * 2 + e];
          float slope_here = 1.f, added = 0.f;
          bool keep = true;
          if constexpr (MASKED) {
            keep = range.holds(n * 8 + e);
            if constexpr (kHasMask) keep = keep && mask_at(mask, position, key);
            if constexpr (kBias != 0) {
              added = keep ? bias_at(bias, position, key) : 0.f;
              keep = keep && added != -infinity();
            }
          }
          const float p = probability(a, x, lse[i][half], added, slope_here);
          x = !MASKED || keep ? p : 0.f;
          // 0 where not visible: of a score of NaN, which a hidden key may make, it would be NaN, and 0 * NaN is.
          if constexpr (kHasSoftcap) slope[i][n][half * 2 + e] = !MASKED || keep ? slope_here : 0.f;
          if constexpr (MASKED && kScoreOperand) seen |= static_cast<u32>(keep) << (n * 2 + e);
        }
      }
    }
  }
  if constexpr (MASKED && kScoreOperand) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) seen |= shuffle_xor(seen, lanes);
  }
}

// ---- a tile of results -----------------------------------------------------------------------------------------------

// Accumulators times `factor`, zeros in rows at or past `valid`, to a tile of D columns; `row` and `column` are the
// warp's first.
template <int D, int R, int N>
FROST_FN void stage_result(float (&acc)[R][N][4], float factor, u32 tile, int row, int column, int valid) {
  const int lane = lane_index();
  if (row + R * 16 > valid) {  // what a row of padding summed up may be NaN
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (row + fragment_row(i, e / 2) >= valid) acc[i][n][e] = 0.f;
  }
  const ResultAddress<D> to(tile, row + (lane >> 2), column, lane);
#pragma unroll
  for (int i = 0; i < R; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < N; ++n)
        store_shared(to.at(i * 16 + half * 8, n), pack2<kBf16>(acc[i][n][half * 2] * factor, acc[i][n][half * 2 + 1] * factor));
}

// The first `rows` rows of a staged tile to memory, `width` columns of each.
template <int D, int ROWS>
FROST_FN void store_tile(u32 tile, char* to, i64 pitch, int rows, int width, int vec) {
  constexpr int kChunks = D / 8, kAtOnce = kThreads / kChunks;  // rows per pass
  const int tid = thread_index();
  if (vec == 16) {
    const int row = tid / kChunks, chunk = tid % kChunks;
    if (row >= kAtOnce || chunk * 8 >= width) return;
    rows -= row;
    to += chunk * 16 + row * pitch;
#pragma unroll
    for (int at = 0; at < ROWS; at += kAtOnce) {
      if (at + row < ROWS && at < rows) {
        u32 r[4];
        load_shared(r, tile + Swizzle<D>::at(at + row, chunk));
        *reinterpret_cast<Chunk16*>(to) = {r[0], r[1], r[2], r[3]};
      }
      to += kAtOnce * pitch;
    }
    return;
  }
#pragma unroll 1
  for (int at = tid; at < ROWS * kChunks; at += kThreads) {
    const int row = at / kChunks, chunk = at % kChunks;
    const int present = min_of(width * 2 - chunk * 16, 16);
    if (row >= rows || present <= 0) continue;
    u32 r[4];
    load_shared(r, tile + Swizzle<D>::at(row, chunk));
    store_row_part(to + row * pitch + chunk * 16, r, present, vec);
  }
}
