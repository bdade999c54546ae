// Backward, step 2: dK and dV, keys stationary.
//
//   a block owns kN keys of one K/V head: their K and V stay in shared memory, dK and dV accumulate in fp32 registers
//   for each tile of STEP query rows that see them, of every query head of the group, in a fixed order:
//       S^T = K Q^T;  P^T = exp(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta)
//       dV += P^T dO;  dK += dS^T Q           (P and dS rounded to 16 bits)
//   dK = scale * dK
//
// Scores are kept transposed: a warp owns ROWS_M * 16 keys, so P^T and dS^T are left operands out of the registers they
// were made in, and nothing but Q, dO and the statistics moves. No sum depends on an order between blocks, none needs
// scratch. With SUM_DQ the block also hands dS around and adds dS K to sums of dQ in memory: 5 products in all where
// bwd_dq makes 7, in an order that differs from run to run (no bias or mask). With D_SPLIT > 1 a group of warps owns the
// keys: each makes the scores of its part of the rows, they exchange P^T and dS^T through shared memory, and each accumulates
// its part of the columns (head dims whose accumulators do not fit one warp's registers). Tiles that every key sees come
// first and need no mask. Rows of Q and dO that see none of the keys are not read, or count as zeros: 0 * NaN would reach
// dK and dV. Padding keys get zeros.
#include "bwd.cuh"

constexpr int kRowTiles = ROWS_M, kSplit = D_SPLIT, kStages = STAGES;
constexpr int kKeyWarps = WARPS / kSplit;
constexpr int kN = kKeyWarps * kRowTiles * 16;       // keys owned
constexpr int kM = STEP;                             // query rows per step
constexpr int kOwnM = kM / kSplit;                   // whose scores one warp makes
constexpr int kScoreTiles = kOwnM / 8, kSteps = kM / 16;
constexpr int kKTiles = kD / kSplit / 8, kVTiles = kDv / kSplit / 8;
static_assert(kSplit == 1 || (kD / kSplit * 2 % 128 == 0 && kDv / kSplit * 2 % 128 == 0), "halves are whole swizzle periods");
static_assert(kOwnM % 16 == 0, "two tiles of 8 at a time");

constexpr int kKBytes = kN * kD * 2, kVBytes = kN * kDv * 2;
constexpr int kQBytes = kM * kD * 2, kOBytes = kM * kDv * 2, kStatBytes = kM * kPairBytes;
constexpr bool kSumDq = SUM_DQ;
constexpr int kScoreBytes = kN * kM * 2;             // of P or dS
constexpr int kDsBytes = kSumDq || kSplit > 1 ? kScoreBytes : 0;
constexpr int kExchangeBytes = kDsBytes + (kSplit == 1 ? 0 : kScoreBytes + WARPS * 16);
static_assert(kKBytes + kVBytes + kStages * (kQBytes + kOBytes + kStatBytes) + kExchangeBytes + kStashBytes == SHARED_BYTES,
              "DkdvParams.shared_bytes");

struct Sums {
  float k[kRowTiles][kKTiles][4], v[kRowTiles][kVTiles][4];
};

// What does not change along the walk; in shared memory, read again where it is needed.
struct Block {
  const char *q, *go, *stats;    // of row 0 of the group's first head
  float* sums;                   // likewise
  Walk walk;
  Band band;
  int sequence, kv_head, first;  // of the keys
  int start, extent;             // of the sequence's keys: the first token, and how many are in the buffer
  int sq, sk;
  u32 smem;

  FROST_FN u32 k_tile() const { return smem; }
  FROST_FN u32 v_tile() const { return smem + kKBytes; }
  FROST_FN u32 q_tile(int stage) const { return smem + kKBytes + kVBytes + stage * kQBytes; }
  FROST_FN u32 go_tile(int stage) const { return smem + kKBytes + kVBytes + kStages * kQBytes + stage * kOBytes; }
  FROST_FN u32 pairs(int stage) const {
    return smem + kKBytes + kVBytes + kStages * (kQBytes + kOBytes) + stage * kStatBytes;
  }
  FROST_FN u32 ds_tile() const { return smem + SHARED_BYTES - kStashBytes - kExchangeBytes; }
  FROST_FN u32 p_tile() const { return ds_tile() + kDsBytes; }
  FROST_FN u32 seen_at(int warp) const { return p_tile() + kScoreBytes + warp * 16; }
};
static_assert(sizeof(Block) <= kStashBytes, "the stash holds a Block");

// Where the walk stands: all heads' tiles without a mask, then all heads' tiles with one. Over once member is the group:
// row is then past every row that is seen, so that copying it reads nothing.
struct Step {
  int member, row;

  FROST_FN bool over(const BwdArgs& a) const { return member == a.group; }
  template <bool MASKED>
  FROST_FN bool within(const BwdArgs& a, const Walk& w) const {
    return MASKED ? !over(a) : row >= w.full_lo && row < w.full_hi;
  }
  // Selections rather than branches: this is worked out while the tensor cores are busy.
  template <bool MASKED>
  FROST_FN void advance(const BwdArgs& a, const Walk& w) {
    row += kM;
    if constexpr (MASKED) {
      row = row == w.full_lo ? w.full_hi : row;
      const bool end = row == w.hi;
      member += end;
      row = end && member != a.group ? first_masked(w) : row;
    } else {
      const bool end = row == w.full_hi;
      member += end;
      row = end ? w.full_lo : row;
      if (member == a.group) *this = begin_masked(a, w);
    }
  }
  FROST_FN static int first_masked(const Walk& w) { return w.lo < w.full_lo ? w.lo : w.full_hi; }
  FROST_FN static Step begin_masked(const BwdArgs& a, const Walk& w) {
    const bool any = w.lo < w.full_lo || w.full_hi < w.hi;
    return {any ? 0 : a.group, first_masked(w)};
  }
  FROST_FN static Step begin(const BwdArgs& a, const Walk& w) {
    return w.full_lo < w.full_hi ? Step{0, w.full_lo} : begin_masked(a, w);
  }
};

FROST_FN void load_q(const BwdArgs& a, const Block& b, const Step& at, int stage) {
  const int tid = thread_index();
  load_tile<kD, kM>(tid, b.q_tile(stage), b.q + at.member * a.q_h * 2, a.q_s * 2, at.row, b.walk.first, b.walk.last, a.d);
}

FROST_FN void load_do(const BwdArgs& a, const Block& b, const Step& at, int stage) {
  const int tid = thread_index(), first = b.walk.first, last = b.walk.last;
  load_tile<kDv, kM>(tid, b.go_tile(stage), b.go + at.member * a.go_h * 2, a.go_s * 2, at.row, first, last, a.dv);
#pragma unroll
  for (int pass = 0; pass * kThreads < kM; ++pass) {
    const int local = pass * kThreads + tid;
    if (kM % kThreads == 0 || local < kM) {
      const bool inside = static_cast<u32>(at.row + local - first) < static_cast<u32>(last - first);
      const char* from = b.stats + (at.member * wide(a.sq_max) + at.row + local) * kPairBytes;
      copy_async<8>(b.pairs(stage) + local * kPairBytes, from, inside ? kPairBytes : 0);
    }
  }
}

// The rows that see one key, as an inclusive range; none for a padding key.
FROST_FN void rows_of_key(int key, const Block& b, int& low, int& high) {
  low = kHasRight ? key - b.band.off - b.band.right : 0;
  high = kHasLeft ? min_of(key - b.band.off + b.band.left, b.sq - 1) : b.sq - 1;
  if (key >= b.sk) high = -1;
}

// Raw scores to P, in place. `seen` gets a bit per row of this lane's (2 for each tile of 8) that sees at least one of
// the warp's keys. m0 is the first of the rows whose scores this warp has.
template <bool MASKED>
FROST_FN void key_probabilities(const BwdArgs& a, const Block& b, float (&s)[kRowTiles][kScoreTiles][4],
                                float (&slope)[kHasSoftcap ? kRowTiles : 1][kHasSoftcap ? kScoreTiles : 1][4], u32 pairs,
                                int head, int key0, int m0, u32& seen) {
  const int lane = lane_index(), row0 = m0 + (lane & 3) * 2;  // this lane's first
  int low[kRowTiles][2], high[kRowTiles][2];
  ScoreOperand bias, mask;
  if constexpr (MASKED) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows_of_key(key0 + fragment_row(i, half), b, low[i][half], high[i][half]);
        low[i][half] -= row0;
        high[i][half] -= row0;
      }
    if constexpr (kBias != 0) bias = bias_of(a, b.sequence, head);
    if constexpr (kHasMask) mask = mask_of(a, b.sequence, head);
  }
  seen = 0;
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
    u32 pair[4];  // lse, delta of two rows
    load_shared(pair, pairs + (n * 8 + (lane & 3) * 2) * kPairBytes);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int half = c / 2, e = c % 2;
        const int row = row0 + n * 8 + e, key = key0 + fragment_row(i, half);
        float slope_here = 1.f, added = 0.f;
        bool keep = true;
        if constexpr (MASKED) {
          keep = (!kHasRight || n * 8 + e >= low[i][half]) && n * 8 + e <= high[i][half];
          if constexpr (kHasMask) keep = keep && mask_at(mask, row, key);
          if constexpr (kBias != 0) {
            added = keep ? bias_at(bias, row, key) : 0.f;
            keep = keep && added != -infinity();
          }
        }
        float& x = s[i][n][c];
        const float p = probability(a, x, as_float(pair[e * 2]), added, slope_here);
        x = !MASKED || keep ? p : 0.f;
        if constexpr (kHasSoftcap) slope[i][n][c] = !MASKED || keep ? slope_here : 0.f;
        if constexpr (MASKED && kScoreOperand) seen |= static_cast<u32>(keep) << (n * 2 + e);
      }
    }
  }
  if constexpr (MASKED && kScoreOperand) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) seen |= shuffle_xor(seen, lanes);
  }
}

// A warp's part of P^T or dS^T to where other warps find it.
FROST_FN void hand_over(const float (&c)[kRowTiles][kScoreTiles][4], u32 tile, int key, int column) {
  const int lane = lane_index();
  const ResultAddress<kM> to(tile, key + (lane >> 2), column, lane);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
        store_shared(to.at(i * 16 + half * 8, n),
                     pack2<kBf16>(c[i][n][half * 2], c[i][n][half * 2 + 1]));
}

template <bool MASKED>
FROST_FN void attend(const BwdArgs& a, const Block& b, Sums& sums, const Step& at, Step& next, int stage) {
  const int lane = lane_index(), warp = warp_of(thread_index());
  const int key = warp / kSplit * kRowTiles * 16;                 // the warp's first, in the tile
  const int side = warp % kSplit, row = side * kOwnM;
  const int head = b.kv_head * a.group + at.member;
  constexpr bool kChecked = MASKED && kScoreOperand;
  float p[kRowTiles][kScoreTiles][4], ds[kRowTiles][kScoreTiles][4];
  float slope[kHasSoftcap ? kRowTiles : 1][kHasSoftcap ? kScoreTiles : 1][4];
  const u32 pairs = b.pairs(stage) + row * kPairBytes;
  u32 seen;
  multiply<kD>(p, b.k_tile(), key, b.q_tile(stage), row, [&](int step) {
    if (step == 0) next.template advance<MASKED>(a, b.walk);
    if constexpr (kStages == 2) {
      if (step == 0) load_q(a, b, next, stage ^ 1);
      if (step == kD / 32) {
        load_do(a, b, next, stage ^ 1);
        copy_commit();
      }
    }
  });
  key_probabilities<MASKED>(a, b, p, slope, pairs, head, b.first + key, at.row + row, seen);
  multiply<kDv>(ds, b.v_tile(), key, b.go_tile(stage), row);
#pragma unroll
  for (int n = 0; n < kScoreTiles; ++n) {
    u32 pair[4];
    load_shared(pair, pairs + (n * 8 + (lane & 3) * 2) * kPairBytes);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        ds[i][n][c] = score_gradient<MASKED>(p[i][n][c], ds[i][n][c], as_float(pair[c % 2 * 2 + 1]));
        if constexpr (kHasSoftcap) ds[i][n][c] *= slope[i][n][c];
      }
    }
  }
  if constexpr (kSplit == 1) {
    if constexpr (kSumDq) hand_over(ds, b.ds_tile(), key, row);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32 left[kRowTiles][4];
      as_operand(left, p, step);
      accumulate<kDv, kChecked>(sums.v, left, b.go_tile(stage), step, 0, seen);
      as_operand(left, ds, step);
      accumulate<kD, kChecked>(sums.k, left, b.q_tile(stage), step, 0, seen);
    }
  } else {
    hand_over(p, b.p_tile(), key, row);
    hand_over(ds, b.ds_tile(), key, row);
    if constexpr (kChecked) {
      if (lane < 4) store_shared(b.seen_at(warp) + lane * 4, seen);
    }
    group_barrier<kSplit>(1 + warp / kSplit);
    if constexpr (kChecked) {
      seen = 0;
#pragma unroll
      for (int other = 0; other < kSplit; ++other) {
        const float bits = load_shared_float(b.seen_at(warp / kSplit * kSplit + other) + (lane & 3) * 4);
        seen |= as_bits(bits) << (other * kScoreTiles * 2);
      }
    }
    const FragmentAddress<kM> p_at(b.p_tile(), key + a_row(lane), a_half(lane));
    const FragmentAddress<kM> ds_at(b.ds_tile(), key + a_row(lane), a_half(lane));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32 left[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) ldmatrix(left[i], p_at.at(i * 16, step));
      accumulate<kDv, kChecked>(sums.v, left, b.go_tile(stage), step, side * (kDv / kSplit), seen);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) ldmatrix(left[i], ds_at.at(i * 16, step));
      accumulate<kD, kChecked>(sums.k, left, b.q_tile(stage), step, side * (kD / kSplit), seen);
    }
  }
}

// dQ of the present rows, as far as these keys go: dS K, added to the sums in memory. Each warp owns 32 rows and some
// columns of the product.
template <bool SUM>
FROST_FN void add_dq(const BwdArgs& a, const Block& b, const Step& at) {
  if constexpr (SUM) {
    constexpr int kRowWarps = SUM ? kM / 32 : 1, kColumnWarps = WARPS / kRowWarps, kColumns = kD / kColumnWarps;
    static_assert(!SUM || (kM % 32 == 0 && (kColumns & (kColumns - 1)) == 0 && kColumns >= 16), "whole fragments for every warp");
    const int lane = lane_index(), warp = warp_of(thread_index());
    const int row = warp % kRowWarps * 32, column = warp / kRowWarps * kColumns;
    const FragmentAddress<kM> ds_at(b.ds_tile(), bt_row(lane), bt_half(lane), row);  // [key][row], transposed load
    const FragmentAddress<kD> k_at(b.k_tile(), b_row(lane), b_half(lane), column);
    float dq[2][kColumns / 8][4];
    clear(dq);
#pragma unroll
    for (int step = 0; step < kN / 16; ++step) {
      u32 ds[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_trans(ds[i], ds_at.at(step * 16, i));
#pragma unroll
      for (int n = 0; n < kColumns / 8; n += 2) {
        u32 k[4];
        ldmatrix_trans(k, k_at.at(step * 16, n / 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<kBf16>(dq[i][n], ds[i], k[0], k[1]);
          mma<kBf16>(dq[i][n + 1], ds[i], k[2], k[3]);
        }
      }
    }
    const int position = at.row + row;
    float* sums = b.sums + (at.member * wide(a.sum_blocks) + position / 16) * (kD * 16) + column / 8 * 128;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (position + i * 16 >= b.sq) continue;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) add_global(sums + i * kD * 16 + n * 128, lane, dq[i][n]);
    }
  }
}

template <bool MASKED>
FROST_FN void walk_rows(const BwdArgs& a, const Block* stash, Sums& sums, Step& at, int& stage) {
#pragma unroll 1
  while (at.template within<MASKED>(a, stash->walk)) {
    copy_wait<0>();
    barrier();
    const Block& b = *stash;
    Step next = at;
    attend<MASKED>(a, b, sums, at, next, stage);
    if constexpr (kSumDq || kStages == 1) barrier();  // all of dS is there, and nobody reads Q and dO
    if constexpr (kStages == 2) {
      stage ^= 1;
    } else {
      load_q(a, b, next, 0);
      load_do(a, b, next, 0);
      copy_commit();
    }
    if constexpr (kSumDq) add_dq<kSumDq>(a, b, at);
    at = next;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) sdpa_bwd_dkdv(const __grid_constant__ BwdArgs a) {
  DYNAMIC_SHARED(smem);
  if (block_index() >= a.n_programs) return;
  const int heads = a.heads / a.group;
  const Place place = place_of(block_index(), a.n_tiles, a.cu_kv ? heads : heads * a.n_seqs, a.section);
  const Own own = own_tile<kN>(cu_kv(a), lengths_kv(a), place.slot, place.head / heads, a.n_seqs, a.sk_max);
  if (!own.any) return;
  const Span rows = other_span(cu_q(a), lengths_q(a), own.sequence, a.n_seqs, a.sq_max);

  Block b;
  b.smem = shared_offset(smem);
  b.sequence = own.sequence;
  b.kv_head = place.head % heads;
  b.first = own.first;
  b.start = own.span.start;
  b.extent = own.span.extent;
  b.sq = rows.length;
  b.sk = own.span.length;
  b.band = {a.align_br ? b.sk - b.sq : 0, a.left, a.right};
  b.walk = b.first >= b.sk ? no_walk() : row_walk(b.first, min_of(b.first + kN, b.sk) - 1, b.sq, b.band, kM);
  // P of a padding key may be anything, which no row of dK or dV that is kept sees; sums over keys would.
  if (kScoreOperand || (kSumDq && b.first + kN > b.sk)) b.walk.full_lo = b.walk.full_hi = b.walk.lo;
  const i64 batch = a.cu_kv ? 0 : own.sequence;
  const int head = b.kv_head * a.group;
  b.q = static_cast<const char*>(a.q) + (batch * a.q_b + head * a.q_h + rows.start * a.q_s) * 2;
  b.go = static_cast<const char*>(a.go) + (batch * a.go_b + head * a.go_h + rows.start * a.go_s) * 2;
  b.stats = stats_of(a, batch, head, rows.start);
  b.sums = kSumDq ? dq_sums(a, batch, head, own.sequence, rows.start, 0, kD) : nullptr;
  const char* k = static_cast<const char*>(a.k) + (batch * a.k_b + b.kv_head * a.k_h + own.span.start * a.k_s) * 2;
  const char* v = static_cast<const char*>(a.v) + (batch * a.v_b + b.kv_head * a.v_h + own.span.start * a.v_s) * 2;
  const Walk seen = key_walk(0, b.sq - 1, b.sk, b.band, kN);  // by anybody: what lies elsewhere must not reach dQ
  const int tid = thread_index();
  load_tile<kD, kN>(tid, b.k_tile(), k, a.k_s * 2, b.first, seen.first, seen.last, a.d);
  load_tile<kDv, kN>(tid, b.v_tile(), v, a.v_s * 2, b.first, seen.first, seen.last, a.dv);
  Step at = Step::begin(a, b.walk);
  if (!at.over(a)) {
    load_q(a, b, at, 0);
    load_do(a, b, at, 0);
  }
  copy_commit();
  Block* const stash = reinterpret_cast<Block*>(smem + SHARED_BYTES - kStashBytes);
  if (thread_index() == 0) *stash = b;

  Sums sums;
  clear(sums.k);
  clear(sums.v);
  barrier();  // the stash
  int stage = 0;
  if constexpr (!kScoreOperand) walk_rows<false>(a, stash, sums, at, stage);
  walk_rows<true>(a, stash, sums, at, stage);
  copy_wait<0>();
  barrier();  // nobody reads K and V any more: results are staged in their tiles

  const int warp = warp_of(thread_index()), key = warp / kSplit * kRowTiles * 16, side = warp % kSplit;
  const Block& s = *stash;
  stage_result<kD>(sums.k, a.scale, s.k_tile(), key, side * (kD / kSplit), s.sk - s.first);
  stage_result<kDv>(sums.v, 1.f, s.v_tile(), key, side * (kDv / kSplit), s.sk - s.first);
  barrier();
  const int extent = s.extent - s.first;
  const i64 batch_now = a.cu_kv ? 0 : s.sequence, token = wide(s.start) + s.first;
  if (a.gk) {
    store_tile<kD, kN>(s.k_tile(), static_cast<char*>(a.gk) + (batch_now * a.gk_b + s.kv_head * a.gk_h + token * a.gk_s) * 2,
                       a.gk_s * 2, extent, a.d, a.gk_vec);
  }
  if (a.gv) {
    store_tile<kDv, kN>(s.v_tile(), static_cast<char*>(a.gv) + (batch_now * a.gv_b + s.kv_head * a.gv_h + token * a.gv_s) * 2,
                        a.gv_s * 2, extent, a.dv, a.gv_vec);
  }
}
