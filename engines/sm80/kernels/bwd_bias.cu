// Backward, step 4: dBias = dS summed over the axes along which the bias was broadcast.
//
//   neither sequence axis broadcast: a block owns one [kM, kN] tile of dBias, loops over the batches and heads that share
//     it, and writes it once, in its own type and strides (KEEP_ROWS, KEEP_COLUMNS).
//   rows broadcast: a block owns kN keys of one (batch, head), loops over the row tiles that see them, and writes one fp32
//     number per key to the workspace [B, Hq, keys] (KEEP_COLUMNS).
//   keys broadcast: a block owns a row tile of one (batch, head), loops over its key tiles, and writes one number per row,
//     [B, Hq, rows] (KEEP_ROWS); if rows are broadcast too, it sums every n_chunks-th row tile, [B, Hq, n_chunks].
//   bwd_reduce adds workspace entries over batches, heads and chunks, in order.
//
// A tile of dS accumulates in registers whole and is folded to a line once, at the end. No atomics; every sum has a fixed
// order. The bias comes after the softcap: dS is not multiplied by its slope here.
#include "bwd.cuh"

constexpr int kM = WARPS * 16, kN = STEP;
constexpr bool kKeepRows = KEEP_ROWS, kKeepColumns = KEEP_COLUMNS, kTile = kKeepRows && kKeepColumns;
constexpr int kScoreTiles = kN / 8;
constexpr int kQBytes = kM * kD * 2, kOBytes = kM * kDv * 2, kKBytes = kN * kD * 2, kVBytes = kN * kDv * 2;
static_assert(kQBytes + kOBytes + kKBytes + kVBytes == SHARED_BYTES, "BiasParams.shared_bytes");
static_assert(WARPS * kN * 4 <= SHARED_BYTES, "sums are staged where the tiles were");

// What a block works through.
struct Work {
  int tile;            // number of its tile along the kept axis, or its chunk
  int row_tile;        // with both axes kept
  int sequence, head;  // the first, where several are summed
};

FROST_FN Work work_of(const BwdArgs& a, i64 program) {
  const int across = kKeepColumns ? (a.kept_columns + kN - 1) / kN : kKeepRows ? (a.kept_rows + kM - 1) / kM : a.n_chunks;
  Work w;
  w.tile = static_cast<int>(program % across);
  program /= across;
  w.row_tile = w.tile;
  if constexpr (kTile) {
    const int down = (a.kept_rows + kM - 1) / kM;
    w.row_tile = static_cast<int>(program % down);
    program /= down;
  }
  w.head = static_cast<int>(program % a.kept_heads);
  w.sequence = static_cast<int>(program / a.kept_heads);
  return w;
}

// One sequence and head: where its operands are.
struct Head {
  const char *q, *go, *k, *v, *stats;
  ScoreOperand bias, mask;
  Band band;
  int sq, sk;
};

FROST_FN Head head_of(const BwdArgs& a, int sequence, int head) {
  const Span rows = other_span(cu_q(a), lengths_q(a), sequence, a.n_seqs, a.sq_max);
  const Span keys = other_span(cu_kv(a), lengths_kv(a), sequence, a.n_seqs, a.sk_max);
  const i64 batch = a.cu_q ? 0 : sequence;
  const int kv_head = head / a.group;
  Head h;
  h.q = static_cast<const char*>(a.q) + (batch * a.q_b + head * a.q_h + rows.start * a.q_s) * 2;
  h.go = static_cast<const char*>(a.go) + (batch * a.go_b + head * a.go_h + rows.start * a.go_s) * 2;
  h.k = static_cast<const char*>(a.k) + (batch * a.k_b + kv_head * a.k_h + keys.start * a.k_s) * 2;
  h.v = static_cast<const char*>(a.v) + (batch * a.v_b + kv_head * a.v_h + keys.start * a.v_s) * 2;
  h.stats = stats_of(a, batch, head, rows.start);
  h.bias = bias_of(a, sequence, head);
  if constexpr (kHasMask) h.mask = mask_of(a, sequence, head);
  h.sq = rows.length;
  h.sk = keys.length;
  h.band = {a.align_br ? h.sk - h.sq : 0, a.left, a.right};
  return h;
}

FROST_FN void add_tile(const BwdArgs& a, const Head& h, const Walk& walk, u32 smem, int m0, int n0,
                       float (&acc)[1][kScoreTiles][4]) {
  const u32 q_tile = smem, go_tile = q_tile + kQBytes, k_tile = go_tile + kOBytes, v_tile = k_tile + kKBytes;
  const int tid = thread_index(), row = warp_of(tid) * 16;
  barrier();  // everybody is done with the tiles
  load_tile<kD, kM>(tid, q_tile, h.q, a.q_s * 2, m0, 0, h.sq, a.d);
  load_tile<kDv, kM>(tid, go_tile, h.go, a.go_s * 2, m0, 0, h.sq, a.dv);
  load_tile<kD, kN>(tid, k_tile, h.k, a.k_s * 2, n0, walk.first, walk.last, a.d);
  load_tile<kDv, kN>(tid, v_tile, h.v, a.v_s * 2, n0, walk.first, walk.last, a.dv);
  copy_commit();
  float lse[1][2], delta[1][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int position = m0 + row + fragment_row(0, half);
    const float* pair = reinterpret_cast<const float*>(h.stats + wide(position) * kPairBytes);
    lse[0][half] = position < h.sq ? pair[0] : infinity();
    delta[0][half] = position < h.sq ? pair[1] : 0.f;
  }
  copy_wait<0>();
  barrier();
  float p[1][kScoreTiles][4], dp[1][kScoreTiles][4];
  float slope[1][kHasSoftcap ? kScoreTiles : 1][4];
  u32 seen;
  multiply<kD>(p, q_tile, row, k_tile, 0);
  row_probabilities<true>(a, p, slope, lse, h.bias, h.mask, m0 + row, n0, h.sq, h.sk, h.band, seen);
  multiply<kDv>(dp, go_tile, row, v_tile, 0);
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[0][n][e] += score_gradient<true>(p[0][n][e], dp[0][n][e], delta[0][e / 2]);
}

FROST_FN void store_tile_sums(const BwdArgs& a, const Work& w, const float (&acc)[1][kScoreTiles][4]) {
  const int tid = thread_index();
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = w.row_tile * kM + warp_of(tid) * 16 + fragment_row(0, c / 2);
      const int column = w.tile * kN + n * 8 + (tid & 3) * 2 + c % 2;
      if (row >= a.kept_rows || column >= a.kept_columns) continue;
      const i64 at = w.sequence * a.gbias_b + w.head * a.gbias_h + row * a.gbias_q + column * a.gbias_k;
      if constexpr (kBias == 2) {
        static_cast<float*>(a.gbias)[at] = acc[0][n][c];
      } else {
        static_cast<u16*>(a.gbias)[at] = static_cast<u16>(pack2<kBf16>(acc[0][n][c], 0.f));
      }
    }
  }
}

FROST_FN void store_column_sums(const BwdArgs& a, const Work& w, const float (&acc)[1][kScoreTiles][4], u32 smem) {
  const int tid = thread_index(), lane = lane_of(tid);
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = acc[0][n][e] + acc[0][n][2 + e];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += shuffle_xor(sum, lanes);
      if (lane < 4) store_shared(smem + (warp_of(tid) * kN + n * 8 + lane * 2 + e) * 4, sum);
    }
  }
  barrier();
  const int column = w.tile * kN + tid;
  if (tid >= kN || column >= a.kept_columns) return;
  float total = 0.f;
  for (int warp = 0; warp < WARPS; ++warp) total += load_shared_float(smem + (warp * kN + tid) * 4);
  static_cast<float*>(a.partial)[(wide(w.sequence) * a.heads + w.head) * a.kept_columns + column] = total;
}

FROST_FN void store_row_sums(const BwdArgs& a, const Work& w, const float (&acc)[1][kScoreTiles][4], u32 smem) {
  const int tid = thread_index(), lane = lane_of(tid);
  float both = 0.f;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) sum += acc[0][n][half * 2] + acc[0][n][half * 2 + 1];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    const int row = w.tile * kM + warp_of(tid) * 16 + fragment_row(0, half);
    if constexpr (kKeepRows) {
      if ((lane & 3) == 0 && row < a.kept_rows)
        static_cast<float*>(a.partial)[(wide(w.sequence) * a.heads + w.head) * a.kept_rows + row] = sum;
    }
    both += sum;
  }
  if constexpr (!kKeepRows) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) both += shuffle_xor(both, lanes);
    if (lane == 0) store_shared(smem + warp_of(tid) * 4, both);
    barrier();
    if (tid != 0) return;
    float total = 0.f;
    for (int warp = 0; warp < WARPS; ++warp) total += load_shared_float(smem + warp * 4);
    static_cast<float*>(a.partial)[(wide(w.sequence) * a.heads + w.head) * a.n_chunks + w.tile] = total;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) sdpa_bwd_bias(const __grid_constant__ BwdArgs a) {
  DYNAMIC_SHARED(memory);
  if (block_index() >= a.n_programs) return;
  const u32 smem = shared_offset(memory);
  const Work w = work_of(a, block_index());
  float acc[1][kScoreTiles][4];
  clear(acc);
#pragma unroll 1
  for (int shared_by = 0; shared_by < a.sum_batches * a.sum_heads; ++shared_by) {
    const Head h = head_of(a, w.sequence + shared_by / a.sum_heads, w.head + shared_by % a.sum_heads);
    // Row tiles: one where rows are kept; else all, or every n_chunks-th.
    const int begin = (kKeepColumns && !kKeepRows ? 0 : w.row_tile) * kM;
    const int stride = kKeepRows ? h.sq + kM : (kKeepColumns ? 1 : a.n_chunks) * kM;
#pragma unroll 1
    for (int m0 = begin; m0 < h.sq; m0 += stride) {
      const Walk walk = key_walk(m0, min_of(m0 + kM, h.sq) - 1, h.sk, h.band, kN);
      const int from = kKeepColumns ? max_of(w.tile * kN, walk.lo) : walk.lo;
      const int to = kKeepColumns ? min_of((w.tile + 1) * kN, walk.hi) : walk.hi;
#pragma unroll 1
      for (int n0 = from; n0 < to; n0 += kN) add_tile(a, h, walk, smem, m0, n0, acc);
    }
  }
  barrier();  // everybody is done with the tiles: sums are staged there
  if constexpr (kTile) {
    store_tile_sums(a, w, acc);
  } else if constexpr (kKeepColumns) {
    store_column_sums(a, w, acc, smem);
  } else {
    store_row_sums(a, w, acc, smem);
  }
}
