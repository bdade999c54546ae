// Backward, step 3: dQ, rows stationary.
//
//   a block owns kM query rows of one head: their Q and dO stay in shared memory, dQ accumulates in fp32 registers
//   for each tile of STEP keys that the rows can see:
//       S = Q K^T;  P = exp(S - lse);  dP = dO V^T;  dS = P (dP - delta);  dQ += dS K       (dS rounded to 16 bits)
//   dQ = scale * dQ
//
// A warp owns ROWS_M * 16 rows; dS is a left operand out of the registers it was made in. S and dP are made again here
// rather than kept by bwd_dkdv: two products more, and in exchange no atomics, no fp32 dQ in memory, and the same bits
// every time. Padding rows get zeros.
#include "bwd.cuh"

constexpr int kRowTiles = ROWS_M, kStages = STAGES;
constexpr int kM = WARPS * kRowTiles * 16, kN = STEP;
constexpr int kScoreTiles = kN / 8, kSteps = kN / 16, kOutTiles = kD / 8;

constexpr int kQBytes = kM * kD * 2, kOBytes = kM * kDv * 2, kKBytes = kN * kD * 2, kVBytes = kN * kDv * 2;
static_assert(kQBytes + kOBytes + kStages * (kKBytes + kVBytes) + kStashBytes == SHARED_BYTES, "DqParams.shared_bytes");

struct Rows {
  float acc[kRowTiles][kOutTiles][4];
  float lse[kRowTiles][2], delta[kRowTiles][2];
};

// What does not change along the walk; in shared memory, read again where it is needed.
struct Block {
  const char *k, *v;  // of key 0
  Walk walk;
  Band band;
  int sq, sk, row0;
  int start, extent;  // of the sequence's rows: the first token, and how many are in the buffer
  int sequence, head;
  int n_full, n_tiles;
  ScoreOperand bias, mask;
  u32 smem;
  // Tiles without a mask come first, then those before them, then those after them.
  FROST_FN int tile_start(int t) const {
    const int n_before = (walk.full_lo - walk.lo) / kN;
    if (t < n_full) return walk.full_lo + t * kN;
    return t < n_full + n_before ? walk.lo + (t - n_full) * kN : walk.full_hi + (t - n_full - n_before) * kN;
  }
  FROST_FN u32 q_tile() const { return smem; }
  FROST_FN u32 go_tile() const { return smem + kQBytes; }
  FROST_FN u32 k_tile(int stage) const { return smem + kQBytes + kOBytes + stage * kKBytes; }
  FROST_FN u32 v_tile(int stage) const { return smem + kQBytes + kOBytes + kStages * kKBytes + stage * kVBytes; }
};
static_assert(sizeof(Block) <= kStashBytes, "the stash holds a Block");

FROST_FN void load_k(const BwdArgs& a, const Block& b, int n0, int stage) {
  load_tile<kD, kN>(thread_index(), b.k_tile(stage), b.k, a.k_s * 2, n0, b.walk.first, b.walk.last, a.d);
}

FROST_FN void load_v(const BwdArgs& a, const Block& b, int n0, int stage) {
  load_tile<kDv, kN>(thread_index(), b.v_tile(stage), b.v, a.v_s * 2, n0, b.walk.first, b.walk.last, a.dv);
}

template <bool MASKED>
FROST_FN void attend(const BwdArgs& a, const Block& b, Rows& rows, int t) {
  const int row = warp_of(thread_index()) * kRowTiles * 16, stage = t % kStages;
  float p[kRowTiles][kScoreTiles][4], ds[kRowTiles][kScoreTiles][4];
  float slope[kHasSoftcap ? kRowTiles : 1][kHasSoftcap ? kScoreTiles : 1][4];
  u32 seen;
  // After the last tile comes one that nobody sees: zeros are stored, nothing is read, and no branch is taken.
  multiply<kD>(p, b.q_tile(), row, b.k_tile(stage), 0, [&](int step) {
    if constexpr (kStages == 2) {
      if (step == 0) load_k(a, b, b.tile_start(t + 1), (t + 1) % 2);
      if (step == kD / 32) {
        load_v(a, b, b.tile_start(t + 1), (t + 1) % 2);
        copy_commit();
      }
    }
  });
  row_probabilities<MASKED>(a, p, slope, rows.lse, b.bias, b.mask, b.row0 + row, b.tile_start(t), b.sq, b.sk, b.band, seen);
  multiply<kDv>(ds, b.go_tile(), row, b.v_tile(stage), 0);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        ds[i][n][e] = score_gradient<MASKED>(p[i][n][e], ds[i][n][e], rows.delta[i][e / 2]);
        if constexpr (kHasSoftcap) ds[i][n][e] *= slope[i][n][e];
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 left[kRowTiles][4];
    as_operand(left, ds, step);
    accumulate<kD, MASKED && kScoreOperand>(rows.acc, left, b.k_tile(stage), step, 0, seen);
  }
}

template <bool MASKED>
FROST_FN void walk_keys(const BwdArgs& a, const Block* stash, Rows& rows, int& t) {
#pragma unroll 1
  for (; t < (MASKED ? stash->n_tiles : stash->n_full); ++t) {
    copy_wait<0>();
    barrier();
    const Block& b = *stash;
    attend<MASKED>(a, b, rows, t);
    if constexpr (kStages == 1) {
      barrier();
      load_k(a, b, b.tile_start(t + 1), 0);
      load_v(a, b, b.tile_start(t + 1), 0);
      copy_commit();
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) sdpa_bwd_dq(const __grid_constant__ BwdArgs a) {
  DYNAMIC_SHARED(smem);
  if (block_index() >= a.n_programs) return;
  const Place place = place_of(block_index(), a.n_tiles, a.cu_q ? a.heads : a.heads * a.n_seqs, a.section);
  // Causal tiles grow with their number: the longest go first, the last wave is of short ones.
  const int slot = kHasRight ? a.n_tiles - 1 - place.slot : place.slot;
  const Own own = own_tile<kM>(cu_q(a), lengths_q(a), slot, place.head / a.heads, a.n_seqs, a.sq_max);
  if (!own.any) return;
  const Span keys = other_span(cu_kv(a), lengths_kv(a), own.sequence, a.n_seqs, a.sk_max);
  const int head = place.head % a.heads, kv_head = head / a.group;
  const i64 batch = a.cu_q ? 0 : own.sequence;

  Block b;
  b.smem = shared_offset(smem);
  b.row0 = own.first;
  b.start = own.span.start;
  b.extent = own.span.extent;
  b.sequence = own.sequence;
  b.head = head;
  b.sq = own.span.length;
  b.sk = keys.length;
  b.band = {a.align_br ? b.sk - b.sq : 0, a.left, a.right};
  b.k = static_cast<const char*>(a.k) + (batch * a.k_b + kv_head * a.k_h + keys.start * a.k_s) * 2;
  b.v = static_cast<const char*>(a.v) + (batch * a.v_b + kv_head * a.v_h + keys.start * a.v_s) * 2;
  if constexpr (kBias != 0) b.bias = bias_of(a, own.sequence, head);
  if constexpr (kHasMask) b.mask = mask_of(a, own.sequence, head);
  b.walk = b.row0 >= b.sq ? no_walk() : key_walk(b.row0, min_of(b.row0 + kM, b.sq) - 1, b.sk, b.band, kN);
  if (kScoreOperand) b.walk.full_lo = b.walk.full_hi = b.walk.lo;
  b.n_full = (b.walk.full_hi - b.walk.full_lo) / kN;
  b.n_tiles = (b.walk.hi - b.walk.lo) / kN;
  const char* q = static_cast<const char*>(a.q) + (batch * a.q_b + head * a.q_h + own.span.start * a.q_s) * 2;
  const char* go = static_cast<const char*>(a.go) + (batch * a.go_b + head * a.go_h + own.span.start * a.go_s) * 2;
  const int tid = thread_index();
  load_tile<kD, kM>(tid, b.q_tile(), q, a.q_s * 2, b.row0, 0, b.sq, a.d);
  load_tile<kDv, kM>(tid, b.go_tile(), go, a.go_s * 2, b.row0, 0, b.sq, a.dv);
  if (b.n_tiles > 0) {
    load_k(a, b, b.tile_start(0), 0);
    load_v(a, b, b.tile_start(0), 0);
  }
  copy_commit();
  Block* const stash = reinterpret_cast<Block*>(smem + SHARED_BYTES - kStashBytes);
  if (tid == 0) *stash = b;

  Rows rows;
  clear(rows.acc);
  const char* stats = stats_of(a, batch, head, own.span.start);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = b.row0 + warp_of(tid) * kRowTiles * 16 + fragment_row(i, half);
      const bool inside = position < b.sq;
      const float* pair = reinterpret_cast<const float*>(stats + wide(position) * kPairBytes);
      rows.lse[i][half] = inside ? pair[0] : infinity();
      rows.delta[i][half] = inside ? pair[1] : 0.f;
    }
  }
  barrier();  // the stash
  int t = 0;
  if constexpr (!kScoreOperand) walk_keys<false>(a, stash, rows, t);
  walk_keys<true>(a, stash, rows, t);
  copy_wait<0>();
  barrier();  // nobody reads Q any more: the result is staged in its tile

  const Block& s = *stash;
  stage_result<kD>(rows.acc, a.scale, s.q_tile(), warp_of(thread_index()) * kRowTiles * 16, 0, s.sq - s.row0);
  barrier();
  const i64 token = wide(s.start) + s.row0;
  char* const gq = static_cast<char*>(a.gq) + ((a.cu_q ? 0 : wide(s.sequence)) * a.gq_b + s.head * a.gq_h + token * a.gq_s) * 2;
  store_tile<kD, kM>(s.q_tile(), gq, a.gq_s * 2, s.extent - s.row0, a.d, a.gq_vec);
}
