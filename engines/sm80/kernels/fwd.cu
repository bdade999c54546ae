// Attention forward: one block owns BLOCK_M rows of one head and walks the keys that those rows can see.
//
//   q stays in shared memory (or in registers: Q_IN_REGISTERS); each warp owns ROWS_M * 16 rows: their accumulators acc
//   [DV] and scores [BLOCK_N] in registers, all fp32, with a running maximum m and sum l per row
//   for each tile of BLOCK_N keys, copied ahead by cp.async:
//       s = q k^T;  p = exp2(s - m);  l += rowsum p;  acc += p v     (p rounded to 16 bits, a matrix operand as it lies)
//   o = acc / l,  lse = ln 2 * (m + log2 l)
//
// Rows per warp decide the traffic: every warp reads all of K and V from shared memory, so 32 rows (ROWS_M = 2) halve
// it against 16, at twice the accumulators. m follows the true maximum lazily: acc is rescaled only once a row's maximum
// has grown by more than 2**kSlack, which p and fp32 sums bear easily (p <= 256); most tiles then skip the rescaling.
// Exponentials of the next 16 keys are issued between the products of the present ones.
//
// `pack` query heads that share a K/V head can be folded into the rows of one tile (row = position * pack + head): short
// queries then fill tiles. Rows that are padding are written too: o = 0, lse = -inf. Tiles and why: configs.py.
#include "ptx.cuh"
#include "common.cuh"

constexpr int kD = HEAD_DIM, kDv = HEAD_DIM_V;
constexpr int kRowTiles = ROWS_M;          // 16-row tiles per warp
constexpr int kSplit = D_SPLIT;            // warps that share rows: each makes scores of a part of the keys, o of a part of the columns
constexpr int kM = WARPS / kSplit * ROWS_M * 16, kN = BLOCK_N, kOwnN = kN / kSplit;
constexpr int kStages = STAGES;
constexpr bool kQInRegisters = Q_IN_REGISTERS;
constexpr int kKeyTiles = kOwnN / 8, kOutTiles = kDv / kSplit / 8, kSteps = kD / 16, kKeySteps = kN / 16;
// After which step of q k^T the copy of the next values is issued: late where addresses would spill.
constexpr int kValueStep = kD == 192 ? kSteps - 1 : kSteps / 2;
constexpr float kSlack = 8.f;
// The maximum of a row that has seen no key yet: below every score, and exp2(-inf - kNoMaximum) is 0 where -inf - -inf
// would be NaN.
constexpr float kNoMaximum = -3e38f;

constexpr int kQBytes = kM * kD * 2, kKBytes = kN * kD * 2, kVBytes = kN * kDv * 2;
constexpr int kStashBytes = 256;
constexpr int kWarpRows = kRowTiles * 16;
constexpr int kPBytes = kSplit == 1 ? 0 : kM * kN * 2, kPartBytes = kSplit == 1 ? 0 : WARPS * kWarpRows * 4;
static_assert(kD >= kDv, "o is staged in q's tile");
static_assert(kSplit == 1 || (kDv / kSplit * 2 % 128 == 0 && !kScoreOperand && !kQInRegisters), "halves are whole swizzle periods");
static_assert(kQBytes + kStages * (kKBytes + kVBytes) + kPBytes + kPartBytes + kStashBytes == SHARED_BYTES,
              "FwdParams.shared_bytes");

// What the walk carries from tile to tile.
struct Rows {
  float acc[kRowTiles][kOutTiles][4];
  float m[kRowTiles][2], l[kRowTiles][2];  // of rows g and g + 8; l is this lane's share
  u32 q[kQInRegisters ? kRowTiles : 1][kQInRegisters ? kSteps : 1][4];
};

// What does not change along the walk. It lives in shared memory and is read again for every tile: registers are for
// accumulators.
struct Block {
  const char *k, *v;  // of key 0
  Walk walk;
  Band band;
  int sq, sk, row0;
  int n_full, n_tiles;  // tiles without and with a mask are walked in this order
  ScoreOperand bias, mask;
  u32 smem;           // q's tile, then the stages of k, then of v
  int start, extent;  // of the sequence's rows: the first token, and how many are in the buffer
  int sequence, head0;
  // The first key of tile number t: the whole ones first, then those before them, then those after them.
  FROST_FN int tile_start(int t) const {
    if constexpr (!kHasLeft) return t * kN;
    const int n_before = (walk.full_lo - walk.lo) / kN;
    if (t < n_full) return walk.full_lo + t * kN;
    return t < n_full + n_before ? walk.lo + (t - n_full) * kN : walk.full_hi + (t - n_full - n_before) * kN;
  }
  FROST_FN u32 k_tile(int stage) const { return smem + kQBytes + stage * kKBytes; }
  FROST_FN u32 v_tile(int stage) const { return smem + kQBytes + kStages * kKBytes + stage * kVBytes; }
  FROST_FN u32 p_tile() const { return smem + kQBytes + kStages * (kKBytes + kVBytes); }
  FROST_FN u32 part_of(int warp) const { return p_tile() + kPBytes + warp * kWarpRows * 4; }  // a number per row
};
static_assert(sizeof(Block) <= kStashBytes, "the stash holds a Block");

// Whose rows a block owns.
struct Owned {
  int sequence, kv_head, head0;  // head0: the first query head of the pack
  int row0;                      // of the tile, in rows of `pack` per position
  Span query;
  bool any;                      // false: an unused slot
};

FROST_FN Owned owned_rows(const FwdArgs& a, i64 program) {
  const int heads = a.heads / a.pack;
  const Place place = place_of(program, a.n_tiles, a.cu_q ? heads : heads * a.n_seqs, a.section);
  // Causal tiles grow with their number: the longest go first, the last wave is of short ones.
  const int slot = kHasRight ? a.n_tiles - 1 - place.slot : place.slot;
  Owned own;
  own.sequence = place.head / heads;
  own.head0 = place.head % heads * a.pack;
  own.kv_head = own.head0 / a.group;
  own.row0 = slot * kM;
  own.query = {0, a.sq_max, a.sq_max};
  own.any = true;
  if (a.cu_q) {
    const Indices cu = {a.cu_q, a.cu_q_s, (a.int64_mask & 1) != 0};
    const Slot s = packed_slot<kM>(cu, slot, a.n_seqs, a.sq_max, a.pack);
    own.sequence = s.sequence;
    own.row0 = s.tile * kM;
    own.query = {s.start, s.extent, s.sequence >= 0 && s.sequence < a.n_seqs ? s.extent : 0};
    own.any = own.row0 < s.extent * a.pack;
  }
  const Indices lengths = {a.len_q, a.len_q_s, (a.int64_mask & 4) != 0};
  if (lengths.values && own.query.length > 0) own.query.length = lengths.get(own.sequence, own.query.length);
  return own;
}

// The row of a tile as (position, head of the pack).
FROST_FN int position_of(int row, int pack) { return pack == 1 ? row : row / pack; }

FROST_FN int own_row(int tid, int tile, int half) {
  return warp_of(tid) / kSplit * kWarpRows + tile * 16 + half * 8 + lane_of(tid) / 4;
}

// Which part of the keys and columns is this warp's.
FROST_FN int side_of(int tid) { return warp_of(tid) % kSplit; }

// Of the warps that share rows.
FROST_FN void rows_barrier() {
  if constexpr (kSplit == 1) {
    warp_barrier();
  } else {
    group_barrier<kSplit>(1 + warp_of(thread_index()) / kSplit);
  }
}

// x of each of this lane's rows, of which each lane of a row has the same: with what the other warp has. Between two calls
// lies a barrier of the rows' warps.
template <class Join>
FROST_FN void join_parts(const Block& b, float (&x)[kRowTiles][2], Join join) {
  if constexpr (kSplit == 2) {
    const int warp = warp_of(thread_index()), lane = lane_index();
    const u32 to = b.part_of(warp) + (lane >> 2) * 4, from = b.part_of(warp ^ 1) + (lane >> 2) * 4;
    if ((lane & 3) == 0) {
#pragma unroll
      for (int r = 0; r < kRowTiles * 2; ++r) store_shared(to + r * 32, x[r / 2][r % 2]);
    }
    rows_barrier();
#pragma unroll
    for (int r = 0; r < kRowTiles * 2; ++r) x[r / 2][r % 2] = join(x[r / 2][r % 2], load_shared_float(from + r * 32));
  }
}

FROST_FN void load_k(const FwdArgs& a, const Block& b, int n0, int stage) {
  load_tile<kD, kN>(thread_index(), b.k_tile(stage), b.k, a.k_s * 2, n0, b.walk.first, b.walk.last, a.d);
}

FROST_FN void load_v(const FwdArgs& a, const Block& b, int n0, int stage) {
  load_tile<kDv, kN>(thread_index(), b.v_tile(stage), b.v, a.v_s * 2, n0, b.walk.first, b.walk.last, a.dv);
}

// s = q k^T. The copies of the next tile are issued by `between`, once per step: their addresses are worked out while the
// tensor cores are busy.
template <class Between>
FROST_FN void scores(const Rows& rows, float (&s)[kRowTiles][kKeyTiles][4], u32 smem_q, u32 smem_k, Between between) {
  const int lane = lane_index();
  const int tid = thread_index();
  const FragmentAddress<kD> q_at(smem_q, warp_of(tid) / kSplit * kWarpRows + a_row(lane), a_half(lane));
  const FragmentAddress<kD> k_at(smem_k, side_of(tid) * kOwnN + bt_row(lane), bt_half(lane));
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][n][e] = 0.f;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    u32 q[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if constexpr (kQInRegisters) {
#pragma unroll
        for (int e = 0; e < 4; ++e) q[i][e] = rows.q[i][step][e];
      } else {
        ldmatrix(q[i], q_at.at(i * 16, step));
      }
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; n += 2) {
      u32 k[4];
      ldmatrix(k, k_at.at(n * 8, step));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<kBf16>(s[i][n], q[i], k[0], k[1]);
        mma<kBf16>(s[i][n + 1], q[i], k[2], k[3]);
      }
    }
    between(step);
  }
}

// Scores to the exp2 domain, -inf where not visible. `seen` gets a bit per key of this lane's (2 for each tile of 8)
// that at least one of the warp's rows sees.
FROST_FN void mask_scores(const FwdArgs& a, const Block& b, float (&s)[kRowTiles][kKeyTiles][4], int n0, u32& seen) {
  const int tid = thread_index();
  const int key0 = n0 + side_of(tid) * kOwnN + (lane_index() & 3) * 2;  // this lane's first
  const float scale_log2 = a.scale * kLog2e;
  int positions[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) positions[i][half] = b.row0 + own_row(tid, i, half);
  int members[kRowTiles][2] = {};
  if (a.pack != 1) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = positions[i][half];
        positions[i][half] = row / a.pack;
        members[i][half] = row - positions[i][half] * a.pack;
      }
    }
  }
  seen = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int position = positions[i][half];
      const KeyRange all = keys_of_row(position, b.sk, b.band);
      const KeyRange range = {all.low - key0, all.high - key0};
      ScoreOperand bias = b.bias, mask = b.mask;
      if constexpr (kBias != 0) bias.base += members[i][half] * a.bias_h * kBiasBytes;
      if constexpr (kHasMask) mask.base += members[i][half] * a.mask_h;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = key0 + n * 8 + e;
          float& x = s[i][n][half * 2 + e];
          bool keep = range.holds(n * 8 + e);
          if constexpr (!kHasSoftcap) x *= scale_log2;
          if constexpr (kHasMask) keep = keep && mask_at(mask, position, key);
          if constexpr (kBias != 0) {
            const float value = keep ? bias_at(bias, position, key) : 0.f;
            // A bias of -inf hides a key as a mask does, so that nothing stored there can leak either.
            keep = keep && value != -infinity();
            x += value * kLog2e;
          }
          x = keep ? x : -infinity();
          if constexpr (kScoreOperand) seen |= static_cast<u32>(keep && position < b.sq) << (n * 2 + e);
        }
      }
    }
  }
  if constexpr (kScoreOperand) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) seen |= shuffle_xor(seen, lanes);
  }
}

// New maxima, and the rescaling of what was summed under the old ones.
FROST_FN void raise_maximum(const Block& b, Rows& rows, const float (&s)[kRowTiles][kKeyTiles][4], float factor) {
  float top[kRowTiles][2];
  bool grown = false;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x = max_of(s[i][0][half * 2], s[i][0][half * 2 + 1]);
#pragma unroll
      for (int n = 1; n < kKeyTiles; ++n) x = max_of(x, max_of(s[i][n][half * 2], s[i][n][half * 2 + 1]));
      x = max_of(x, shuffle_xor(x, 1));
      top[i][half] = max_of(x, shuffle_xor(x, 2)) * factor;
    }
  }
  join_parts(b, top, [](float x, float y) { return max_of(x, y); });
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) grown |= top[i][half] > rows.m[i][half] + kSlack;
  if (any_lane(grown)) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float m = max_of(rows.m[i][half], top[i][half]);
        const float alpha = exp2_fast(rows.m[i][half] - m);
        rows.m[i][half] = m;
        rows.l[i][half] *= alpha;
#pragma unroll
        for (int n = 0; n < kOutTiles; ++n) {
          rows.acc[i][n][half * 2] *= alpha;
          rows.acc[i][n][half * 2 + 1] *= alpha;
        }
      }
    }
  }
}

// p of element number `at` (0 .. kRowTiles * 8 - 1) of the 16 keys of `step`.
FROST_FN void exponentiate(Rows& rows, float (&s)[kRowTiles][kKeyTiles][4], float factor, int step, int at) {
  const int i = at / 8, n = step * 2 + at / 4 % 2, e = at % 4;
  const float p = exp2_fast(s[i][n][e] * factor - rows.m[i][e / 2]);
  s[i][n][e] = p;
  rows.l[i][e / 2] += p;
}

// acc += p v where two warps share rows: p crosses shared memory.
FROST_FN void add_values(const Block& b, Rows& rows, float (&s)[kRowTiles][kKeyTiles][4], float factor, int t) {
  const int tid = thread_index(), lane = lane_index(), row = warp_of(tid) / kSplit * kWarpRows, side = side_of(tid);
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step)
#pragma unroll
    for (int at = 0; at < kRowTiles * 8; ++at) exponentiate(rows, s, factor, step, at);
  const ResultAddress<kN> to(b.p_tile(), row + (lane >> 2), side * kOwnN, lane);
#pragma unroll
  for (int r = 0; r < kRowTiles * 2; ++r)
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
      store_shared(to.at(r * 8, n), pack2<kBf16>(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
  rows_barrier();
  const FragmentAddress<kN> p_at(b.p_tile(), row + a_row(lane), a_half(lane));
  const FragmentAddress<kDv> v_at(b.v_tile(t % kStages) + side * (kDv / kSplit) * 2, b_row(lane), b_half(lane));
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    u32 p[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) ldmatrix(p[i], p_at.at(i * 16, step));
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      u32 v[4];
      ldmatrix_trans(v, v_at.at(step * 16, n / 2));
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<kBf16>(rows.acc[i][n], p[i], v[0], v[1]);
        mma<kBf16>(rows.acc[i][n + 1], p[i], v[2], v[3]);
      }
    }
  }
}

template <bool MASKED>
FROST_FN void attend(const FwdArgs& a, const Block& b, Rows& rows, int t) {
  float s[kRowTiles][kKeyTiles][4];
  // After the last tile comes one that nobody sees: zeros are stored, nothing is read, and no branch is taken.
  scores(rows, s, b.smem, b.k_tile(t % kStages), [&](int step) {
    if constexpr (kStages == 2) {
      if (step == 0) load_k(a, b, b.tile_start(t + 1), (t + 1) % kStages);
      if (step == kValueStep) {
        load_v(a, b, b.tile_start(t + 1), (t + 1) % kStages);
        copy_commit();
      }
    }
  });
  if constexpr (kStages == 1) {
    copy_wait<0>();  // values
    barrier();       // and everybody is done with the keys
    load_k(a, b, b.tile_start(t + 1), 0);
    copy_commit();
  }
  float factor = 1.f;
  u32 seen = 0;
  if constexpr (kHasSoftcap) {
    const float inverse_cap = 1.f / a.softcap;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][n][e] = softcapped(s[i][n][e] * a.scale, a.softcap, inverse_cap) * kLog2e;
  }
  if constexpr (MASKED) {
    mask_scores(a, b, s, b.tile_start(t), seen);
  } else if constexpr (!kHasSoftcap) {
    factor = a.scale * kLog2e;
  }
  raise_maximum(b, rows, s, factor);
  if constexpr (kSplit == 2) return add_values(b, rows, s, factor, t);

  const int lane = lane_index();
  const FragmentAddress<kDv> v_at(b.v_tile(t % kStages), b_row(lane), b_half(lane));
  constexpr int kElements = kRowTiles * 8;
#pragma unroll
  for (int at = 0; at < kElements; ++at) exponentiate(rows, s, factor, 0, at);
#pragma unroll
  for (int step = 0; step < kKeySteps; ++step) {
    u32 p[kRowTiles][4];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* from = &s[i][step * 2 + e / 2][e % 2 * 2];
        p[i][e] = pack2<kBf16>(from[0], from[1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      u32 v[4];
      ldmatrix_trans(v, v_at.at(step * 16, n / 2));
      if constexpr (MASKED && kScoreOperand) {
#pragma unroll
        for (int e = 0; e < 4; ++e) v[e] = seen_values(v[e], seen, step * 2 + e % 2);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        mma<kBf16>(rows.acc[i][n], p[i], v[0], v[1]);
        mma<kBf16>(rows.acc[i][n + 1], p[i], v[2], v[3]);
      }
      if (step + 1 < kKeySteps) {
#pragma unroll
        for (int at = n * kElements / kOutTiles; at < (n + 2) * kElements / kOutTiles; ++at)
          exponentiate(rows, s, factor, step + 1, at);
      }
    }
  }
}

// The tiles from number t on that need a mask, or that need none. Tile t is, or is on its way to, stage t % kStages.
template <bool MASKED>
FROST_FN void walk_keys(const FwdArgs& a, const Block* stash, Rows& rows, int& t) {
#pragma unroll 1
  for (; t < (MASKED ? stash->n_tiles : stash->n_full); ++t) {
    copy_wait<0>();
    barrier();
    const Block& b = *stash;
    if constexpr (kStages == 1) {
      load_v(a, b, b.tile_start(t), 0);
      copy_commit();
    }
    attend<MASKED>(a, b, rows, t);
  }
}

// lse and the factor that turns acc into o, of one row. The sink joins the denominator only.
FROST_FN void finish_row(const FwdArgs& a, float m, float l, int head, float& lse, float& factor) {
  const bool empty = l == 0.f;  // a row of NaN is not empty
  lse = empty ? -infinity() : (m + log2_fast(l)) * kLn2;
  factor = empty ? 0.f : 1.f / l;
  if (a.sink) {
    const float sink = load_float(a.sink, head * a.sink_s, a.sink_type);
    const float top = max_of(lse, sink);
    const bool infinite = top == infinity() || top == -infinity();
    const float gap = infinite ? 0.f : (lse < sink ? lse : sink) - top;
    const float total = infinite ? top : top + log2_fast(1.f + exp2_fast(gap * kLog2e)) * kLn2;
    // With a sink of +inf nothing is left for the keys.
    const float share = sink == infinity() ? 0.f : exp2_fast((infinite ? 0.f : lse - total) * kLog2e);
    factor = empty ? 0.f : factor * share;
    lse = l != l ? l : total;
  }
}

// The rows that a warp has staged, to memory.
FROST_FN void store_rows(const FwdArgs& a, const Block& b, int tid) {
  constexpr int kChunks = kDv / 8, kStored = kWarpRows / kSplit;  // rows that a warp stores
  const int lane = lane_of(tid), first = warp_of(tid) * kStored;
  const i64 batch = a.cu_q ? 0 : b.sequence;
  char* const o = static_cast<char*>(a.o) + (batch * a.o_b + b.head0 * a.o_h + wide(b.start) * a.o_s) * 2;
  if (a.pack == 1 && a.o_vec == 16) {
    constexpr int kAtOnce = 32 / kChunks;  // rows; of 12 chunks each, eight lanes have nothing to do
    const int row = lane / kChunks, chunk = lane % kChunks;
    const bool some = row < kAtOnce && chunk * 8 < a.dv;
    const int rows = some ? b.extent - b.row0 - first - row : 0;
    char* to = o + chunk * 16 + wide(b.row0 + first + row) * a.o_s * 2;
#pragma unroll
    for (int at = 0; at < kStored; at += kAtOnce) {
      u32 r[4];
      load_shared(r, b.smem + Swizzle<kD>::at(first + row + at, chunk));
      if (at < rows) *reinterpret_cast<Chunk16*>(to) = {r[0], r[1], r[2], r[3]};
      to += wide(kAtOnce) * a.o_s * 2;
    }
    return;
  }
#pragma unroll 1
  for (int at = lane; at < kStored * kChunks; at += 32) {
    const int local = first + at / kChunks, chunk = at % kChunks;
    const int position = position_of(b.row0 + local, a.pack), member = b.row0 + local - position * a.pack;
    const int present = min_of(a.dv * 2 - chunk * 16, 16);
    if (position >= b.extent || present <= 0) continue;
    u32 r[4];
    load_shared(r, b.smem + Swizzle<kD>::at(local, chunk));
    store_row_part(o + (member * a.o_h + wide(position) * a.o_s) * 2 + chunk * 16, r, present, a.o_vec);
  }
}

// Each warp turns its rows through its own rows of the tile of q, so that they are stored in whole chunks. A row's four
// lanes share out the work on its l and m: each finishes one of the rows that they have in common.
FROST_FN void store_output(const FwdArgs& a, const Block& b, Rows& rows) {
  constexpr int kOwned = kRowTiles * 2;
  const int tid = thread_index(), lane = lane_of(tid), mine = lane % kOwned;
  rows_barrier();  // every lane's reads of q are behind
  float m = 0.f, l = 0.f;
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    float& sum = rows.l[r / 2][r % 2];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
  }
  join_parts(b, rows.l, [](float x, float y) { return x + y; });
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    if (mine == r) {
      l = rows.l[r / 2][r % 2];
      m = rows.m[r / 2][r % 2];
    }
  }
  const int row = b.row0 + own_row(tid, mine / 2, mine % 2);
  const int position = position_of(row, a.pack), head = b.head0 + row - position * a.pack;
  const bool valid = position < b.sq;
  float lse, factor;
  finish_row(a, m, l, head, lse, factor);
  if (!valid) {
    lse = -infinity();
    factor = 0.f;
  }
  if (a.lse && (lane & 3) < kOwned && side_of(tid) == 0 && position < b.extent) {
    const i64 batch = a.cu_q ? 0 : b.sequence;
    reinterpret_cast<float*>(a.lse)[batch * a.lse_b + head * a.lse_h + wide(b.start + position) * a.lse_s] = lse;
  }
  if (any_lane(factor == 0.f)) {
    // 0 * NaN: an empty row's sums are not looked at.
#pragma unroll
    for (int r = 0; r < kOwned; ++r) {
      const bool empty = shuffle_from(factor, (lane >> 2) * 4 + r) == 0.f;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (empty) rows.acc[r / 2][n][r % 2 * 2 + e] = 0.f;
    }
  }
  const ResultAddress<kD> to(b.smem, own_row(tid, 0, 0), side_of(tid) * (kDv / kSplit), lane);
#pragma unroll
  for (int r = 0; r < kOwned; ++r) {
    const float f = shuffle_from(factor, (lane >> 2) * 4 + r);
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n) {
      const float* x = &rows.acc[r / 2][n][r % 2 * 2];
      store_shared(to.at(r * 8, n), pack2<kBf16>(x[0] * f, x[1] * f));
    }
  }
  rows_barrier();
  store_rows(a, b, tid);
}

// Rows of a pack lie where their (position, head) says: a loop of its own, short rather than fast.
FROST_FN void load_q(const FwdArgs& a, const Block& b, const char* q) {
  if (a.pack == 1) return load_tile<kD, kM>(thread_index(), b.smem, q, a.q_s * 2, b.row0, 0, b.sq, a.d);
  constexpr int kUnits = kD * 2 / kVec;
#pragma unroll 1
  for (int i = thread_index(); i < kM * kUnits; i += kThreads) {
    const int local = i / kUnits, byte = i % kUnits * kVec;
    const int position = (b.row0 + local) / a.pack, member = b.row0 + local - position * a.pack;
    const int present = position < b.sq ? min_of(max_of(a.d * 2 - byte, 0), kVec) : 0;
    copy_async<kVec>(b.smem + Swizzle<kD>::at(local, byte / 16) + byte % 16,
                     q + (position * a.q_s + member * a.q_h) * 2 + byte, present);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) sdpa_fwd(const __grid_constant__ FwdArgs a) {
  DYNAMIC_SHARED(smem);
  if (block_index() >= a.n_programs) return;
  const Owned own = owned_rows(a, block_index());
  if (!own.any) return;
  const Indices cu_kv = {a.cu_kv, a.cu_kv_s, (a.int64_mask & 2) != 0};
  const Indices len_kv = {a.len_kv, a.len_kv_s, (a.int64_mask & 8) != 0};
  const Span keys = other_span(cu_kv, len_kv, own.sequence, a.n_seqs, a.sk_max);
  const i64 batch = a.cu_q ? 0 : own.sequence;

  Block b;
  b.smem = shared_offset(smem);
  b.row0 = own.row0;
  b.start = own.query.start;
  b.extent = own.query.extent;
  b.sequence = own.sequence;
  b.head0 = own.head0;
  b.sq = own.query.length;
  b.sk = keys.length;
  b.band = {a.align_br ? b.sk - b.sq : 0, a.left, a.right};
  b.k = static_cast<const char*>(a.k) + (batch * a.k_b + own.kv_head * a.k_h + keys.start * a.k_s) * 2;
  b.v = static_cast<const char*>(a.v) + (batch * a.v_b + own.kv_head * a.v_h + keys.start * a.v_s) * 2;
  if constexpr (kBias != 0) {
    b.bias = {static_cast<const char*>(a.bias) + (own.sequence * a.bias_b + own.head0 * a.bias_h) * kBiasBytes, a.bias_q,
              a.bias_k, a.bias_rows, a.bias_columns};
  }
  if constexpr (kHasMask) {
    b.mask = {static_cast<const char*>(a.mask) + own.sequence * a.mask_b + own.head0 * a.mask_h, a.mask_q, a.mask_k,
              a.mask_rows, a.mask_columns};
  }
  const int last_row = position_of(b.row0 + kM - 1, a.pack);
  b.walk = key_walk(position_of(b.row0, a.pack), min_of(last_row, b.sq - 1), b.sk, b.band, kN);
  // Unmasked tiles take the maximum before they scale, which needs a positive scale; masked ones do for the others.
  if (!(a.scale > 0.f) || kScoreOperand) b.walk.full_lo = b.walk.full_hi = b.walk.lo;
  b.n_full = (b.walk.full_hi - b.walk.full_lo) / kN;
  b.n_tiles = (b.walk.hi - b.walk.lo) / kN;

  load_q(a, b, static_cast<const char*>(a.q) + (batch * a.q_b + own.head0 * a.q_h + own.query.start * a.q_s) * 2);
  if (b.n_tiles > 0) {
    load_k(a, b, b.tile_start(0), 0);
    if constexpr (kStages == 2) load_v(a, b, b.tile_start(0), 0);
  }
  copy_commit();
  Block* const stash = reinterpret_cast<Block*>(smem + SHARED_BYTES - kStashBytes);
  if (thread_index() == 0) *stash = b;

  Rows rows;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) rows.acc[i][n][e] = 0.f;
    rows.m[i][0] = rows.m[i][1] = kNoMaximum;
    rows.l[i][0] = rows.l[i][1] = 0.f;
  }
  copy_wait<0>();
  barrier();  // the stash, and q
  if constexpr (kQInRegisters) {
    const int tid = thread_index(), lane = lane_of(tid);
    const FragmentAddress<kD> q_at(shared_offset(smem), warp_of(tid) * kWarpRows + a_row(lane), a_half(lane));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) ldmatrix(rows.q[i][step], q_at.at(i * 16, step));
  }
  int t = 0;
  if constexpr (!kScoreOperand) walk_keys<false>(a, stash, rows, t);
  walk_keys<true>(a, stash, rows, t);
  copy_wait<0>();  // of the tile after the last
  store_output(a, *stash, rows);
}
