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
constexpr int kM = WARPS * ROWS_M * 16, kN = BLOCK_N;
constexpr int kStages = STAGES;
constexpr bool kQInRegisters = Q_IN_REGISTERS;
constexpr int kKeyTiles = kN / 8, kOutTiles = kDv / 8, kSteps = kD / 16, kKeySteps = kN / 16;
constexpr float kSlack = 8.f;
// The maximum of a row that has seen no key yet: below every score, and exp2(-inf - kNoMaximum) is 0 where -inf - -inf
// would be NaN.
constexpr float kNoMaximum = -3e38f;

constexpr int kQBytes = kM * kD * 2, kKBytes = kN * kD * 2, kVBytes = kN * kDv * 2;
constexpr int kStashBytes = 256;
static_assert(kD >= kDv, "o is staged in q's tile");
static_assert(kQBytes + kStages * (kKBytes + kVBytes) + kStashBytes == SHARED_BYTES, "FwdParams.shared_bytes");

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
  // The first key of tile number t: the whole ones first, then those before them, then those after them.
  FROST_FN int tile_start(int t) const {
    if constexpr (!kHasLeft) return t * kN;
    const int n_before = (walk.full_lo - walk.lo) / kN;
    if (t < n_full) return walk.full_lo + t * kN;
    return t < n_full + n_before ? walk.lo + (t - n_full) * kN : walk.full_hi + (t - n_full - n_before) * kN;
  }
  FROST_FN u32 k_tile(int stage) const { return smem + kQBytes + stage * kKBytes; }
  FROST_FN u32 v_tile(int stage) const { return smem + kQBytes + kStages * kKBytes + stage * kVBytes; }
};
static_assert(sizeof(Block) <= kStashBytes, "the stash holds a Block");

// Whose rows a block owns.
struct Owned {
  int sequence, kv_head, head0;  // head0: the first query head of the pack
  int row0;                      // of the tile, in rows of `pack` per position
  Span query;
  bool any;                      // false: an unused slot
  FROST_FN i64 batch(const FwdArgs& a) const { return a.cu_q ? 0 : sequence; }
};

// A function of the block's number alone: the end of the kernel asks again rather than keep it all in registers.
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
FROST_FN int member_of(int row, int pack) { return pack == 1 ? 0 : row % pack; }

FROST_FN int own_row(int tid, int tile, int half) {
  return (tid / 32 * kRowTiles + tile) * 16 + half * 8 + tid % 32 / 4;
}

FROST_FN void load_k(const FwdArgs& a, const Block& b, int n0, int stage) {
  load_tile<kD, kN>(b.k_tile(stage), b.k, a.k_s * 2, n0, b.walk.first, b.walk.last, a.d);
}

FROST_FN void load_v(const FwdArgs& a, const Block& b, int n0, int stage) {
  load_tile<kDv, kN>(b.v_tile(stage), b.v, a.v_s * 2, n0, b.walk.first, b.walk.last, a.dv);
}

FROST_FN void scores(const Rows& rows, float (&s)[kRowTiles][kKeyTiles][4], u32 smem_q, u32 smem_k) {
  const int tid = thread_index(), lane = tid % 32;
  const FragmentAddress<kD> q_at(smem_q, tid / 32 * kRowTiles * 16 + a_row(lane), a_half(lane));
  const FragmentAddress<kD> k_at(smem_k, bt_row(lane), bt_half(lane));
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
  }
}

// Scores to the exp2 domain, -inf where not visible. `seen` gets a bit per key of this lane's (2 for each tile of 8)
// that at least one of the warp's rows sees.
FROST_FN void mask_scores(const FwdArgs& a, const Block& b, float (&s)[kRowTiles][kKeyTiles][4], int n0, u32& seen) {
  const int tid = thread_index(), lane = tid % 32;
  const float scale_log2 = a.scale * kLog2e;
  seen = 0;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = b.row0 + own_row(tid, i, half);
      const int position = position_of(row, a.pack);
      const KeyRange range = keys_of_row(position, b.sk, b.band);
      ScoreOperand bias = b.bias, mask = b.mask;
      if constexpr (kBias != 0) bias.base += member_of(row, a.pack) * a.bias_h * kBiasBytes;
      if constexpr (kHasMask) mask.base += member_of(row, a.pack) * a.mask_h;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = n0 + n * 8 + lane % 4 * 2 + e;
          float& x = s[i][n][half * 2 + e];
          bool keep = range.holds(key);
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
FROST_FN void raise_maximum(Rows& rows, const float (&s)[kRowTiles][kKeyTiles][4], float factor) {
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
      x = max_of(x, shuffle_xor(x, 2)) * factor;
      top[i][half] = x;
      grown |= x > rows.m[i][half] + kSlack;
    }
  }
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

template <bool MASKED>
FROST_FN void attend(const FwdArgs& a, const Block& b, Rows& rows, int t) {
  const int lane = thread_index() % 32;
  float s[kRowTiles][kKeyTiles][4];
  scores(rows, s, b.smem, b.k_tile(t % kStages));
  if constexpr (kStages == 1) {
    copy_wait<0>();  // values
    barrier();       // and everybody is done with the keys
    if (t + 1 < b.n_tiles) load_k(a, b, b.tile_start(t + 1), 0);
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
  raise_maximum(rows, s, factor);

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
    } else if (t + 1 < b.n_tiles) {
      load_k(a, b, b.tile_start(t + 1), (t + 1) % kStages);
      load_v(a, b, b.tile_start(t + 1), (t + 1) % kStages);
    }
    copy_commit();
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

// Each warp turns its rows through its own rows of the tile of q, so that they are stored in whole chunks.
FROST_FN void store_output(const FwdArgs& a, Rows& rows, u32 smem) {
  const Owned own = owned_rows(a, block_index());
  const int start = own.query.start, extent = own.query.extent;
  const int tid = thread_index(), lane = tid % 32;
  if constexpr (!kQInRegisters) warp_barrier();  // every lane's reads of q are behind
  const i64 batch = own.batch(a);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float l = rows.l[i][half];
      l += shuffle_xor(l, 1);
      l += shuffle_xor(l, 2);
      const int local = own_row(tid, i, half);
      const int row = own.row0 + local;
      const int position = position_of(row, a.pack), head = own.head0 + member_of(row, a.pack);
      const bool valid = position < own.query.length;
      float lse, factor;
      finish_row(a, rows.m[i][half], l, head, lse, factor);
      if (a.lse && lane % 4 == 0 && position < extent) {
        reinterpret_cast<float*>(a.lse)[batch * a.lse_b + head * a.lse_h + wide(start + position) * a.lse_s] =
            valid ? lse : -infinity();
      }
      const bool some = valid && factor != 0.f;  // 0 * NaN: an empty row's sums are not looked at
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        const float x = some ? rows.acc[i][n][half * 2] * factor : 0.f;
        const float y = some ? rows.acc[i][n][half * 2 + 1] * factor : 0.f;
        store_shared(smem + Swizzle<kD>::at(local, n) + lane % 4 * 4, pack2<kBf16>(x, y));
      }
    }
  }
  warp_barrier();
  constexpr int kChunks = kDv / 8, kWarpRows = kRowTiles * 16;
#pragma unroll 4
  for (int at = lane; at < kWarpRows * kChunks; at += 32) {
    const int local = tid / 32 * kWarpRows + at / kChunks, chunk = at % kChunks;
    const int row = own.row0 + local;
    const int position = position_of(row, a.pack), head = own.head0 + member_of(row, a.pack);
    const int present = min_of(a.dv * 2 - chunk * 16, 16);
    if (position >= extent || present <= 0) continue;
    u32 r[4];
    load_shared(r, smem + Swizzle<kD>::at(local, chunk));
    char* to = static_cast<char*>(a.o) + (batch * a.o_b + head * a.o_h + wide(start + position) * a.o_s) * 2 + chunk * 16;
    store_row_part(to, r, present, a.o_vec);
  }
}

// Rows of a pack lie where their (position, head) says, so q has a loader of its own.
FROST_FN void load_q(const FwdArgs& a, const Block& b, const char* q) {
  constexpr int kUnits = kD * 2 / kVec;
#pragma unroll 4
  for (int i = thread_index(); i < kM * kUnits; i += kThreads) {
    const int local = i / kUnits, byte = i % kUnits * kVec;
    const int position = position_of(b.row0 + local, a.pack), member = member_of(b.row0 + local, a.pack);
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
  const i64 batch = own.batch(a);

  Block b;
  b.smem = shared_offset(smem);
  b.row0 = own.row0;
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
    const int tid = thread_index(), lane = tid % 32;
    const FragmentAddress<kD> q_at(shared_offset(smem), tid / 32 * kRowTiles * 16 + a_row(lane), a_half(lane));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) ldmatrix(rows.q[i][step], q_at.at(i * 16, step));
  }
  int t = 0;
  if constexpr (!kScoreOperand) walk_keys<false>(a, stash, rows, t);
  walk_keys<true>(a, stash, rows, t);
  store_output(a, rows, shared_offset(smem));
}
