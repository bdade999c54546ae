// What the attention kernels share: swizzled tiles and how they are filled, which rows and keys a block owns, who sees
// whom, scores.
//
// Rows are query positions and columns key positions *inside one sequence*. Lengths are clamped to the buffers, so that
// no value read from the device can send an address outside them. Base addresses and row offsets are 64-bit. Visibility
// is a band, i + off - left <= j <= i + off + right, with either side optional; causal is right = 0.
//
// Macros come from TemplateParams (params.py): BF16, HEAD_DIM, HEAD_DIM_V, EXACT (both head dims are the true ones), VEC
// (bytes of one copy), HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_MASK, BIAS (0 none, 1 the type of q, 2 fp32), WARPS.
#pragma once

constexpr bool kBf16 = BF16;
constexpr bool kExact = EXACT;
constexpr bool kHasLeft = HAS_LEFT;
constexpr bool kHasRight = HAS_RIGHT;
constexpr bool kHasSoftcap = HAS_SOFTCAP;
constexpr bool kHasMask = HAS_MASK;
constexpr int kBias = BIAS;
constexpr int kBiasBytes = kBias == 2 ? 4 : 2;
constexpr bool kScoreOperand = kHasMask || kBias != 0;
constexpr int kThreads = WARPS * 32;
constexpr int kVec = VEC;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

FROST_FN int min_of(int a, int b) { return a < b ? a : b; }
FROST_FN int max_of(int a, int b) { return a > b ? a : b; }
FROST_FN float max_of(float a, float b) { return fmaxf(a, b); }
FROST_FN i64 wide(int a) { return static_cast<i64>(a); }
// Of a thread number, which is never negative: as divisions of an int they would take rounding into account.
FROST_FN int lane_of(int tid) { return tid & 31; }
FROST_FN int warp_of(int tid) { return tid >> 5; }

// ---- tiles in shared memory --------------------------------------------------------------------------------------

// A tile of ROWS rows of D 16-bit elements. Its 16-byte chunks are permuted within each row so that the eight rows of a
// ldmatrix lie in eight different bank groups: by row % 8 where a row is a multiple of 128 bytes, else (d = 96, rows of
// 192 bytes, where every second row starts at the same bank) by row / 2 % 4.
template <int D>
struct Swizzle {
  static constexpr int kChunks = D / 8;
  static constexpr bool kFull = kChunks % 8 == 0;
  static constexpr int kPeriod = kFull ? 128 : 64;  // bytes within which chunks are permuted

  FROST_FN static int key(int row) { return kFull ? row & 7 : (row >> 1) & 3; }
  FROST_FN static u32 at(int row, int chunk) { return static_cast<u32>((row * kChunks + (chunk ^ key(row))) * 16); }
};

// Where one lane's ldmatrix row lies. `row` and `half` (0 or 1) differ by lane; steps along the row are two chunks (one
// k-step of an mma), steps down are multiples of 8 rows: both compile-time, so a step costs one xor at most.
template <int D>
struct FragmentAddress {
  u32 row_start, low;

  FROST_FN FragmentAddress(u32 tile, int row, int half)
      : row_start(tile + row * D * 2), low((half ^ Swizzle<D>::key(row)) * 16) {}
  // The same from some column on, where the columns that are stepped over are a power of two and divide it.
  FROST_FN FragmentAddress(u32 tile, int row, int half, int column) : FragmentAddress(tile, row, half) {
    constexpr u32 period = Swizzle<D>::kPeriod;
    row_start += column * 2 & ~(period - 1);
    low ^= column * 2 & (period - 1);
  }
  FROST_FN u32 at(int rows, int step) const {
    constexpr u32 period = Swizzle<D>::kPeriod;
    const u32 offset = step * 32;
    return row_start + rows * D * 2 + (low ^ (offset & (period - 1))) + (offset & ~(period - 1));
  }
};

// Where one lane's pairs of an mma's result lie in a tile: `row` is the lane's first, `column` the first column of the
// results (a multiple of 8; what `at` steps over is a power of two and divides it). Steps down are multiples of 8 rows.
template <int D>
struct ResultAddress {
  u32 row_start, low;

  FROST_FN ResultAddress(u32 tile, int row, int column, int lane)
      : row_start(tile + row * D * 2 + (lane & 3) * 4), low(Swizzle<D>::key(row) * 16) {
    constexpr u32 period = Swizzle<D>::kPeriod;
    row_start += column * 2 & ~(period - 1);
    low ^= column * 2 & (period - 1);
  }
  FROST_FN u32 at(int rows, int chunk) const {
    constexpr u32 period = Swizzle<D>::kPeriod;
    const u32 offset = chunk * 16;
    return row_start + rows * D * 2 + (low ^ (offset & (period - 1))) + (offset & ~(period - 1));
  }
};

// Lane's (row, half) for the three kinds of operand; see ptx.cuh for the fragments.
FROST_FN int a_row(int lane) { return lane & 15; }                             // A from [row][k]
FROST_FN int a_half(int lane) { return lane >> 4; }
FROST_FN int bt_row(int lane) { return (lane & 7) + ((lane >> 4) << 3); }      // B from [n][k]: r = {b0 b1} of n, n + 8
FROST_FN int bt_half(int lane) { return (lane >> 3) & 1; }
FROST_FN int b_row(int lane) { return lane & 15; }                             // B from [k][n], transposed load
FROST_FN int b_half(int lane) { return lane >> 4; }

// The 16-byte copies of one row of a thread: every ACROSS-th chunk from its own on.
template <int D, int ACROSS, int TO = 0, int C = 0>
FROST_FN void copy_row(u32 to, const char* from, bool inside, int chunk0, int width) {
  if constexpr (C < D / 8) {
    const int present = kExact ? 16 : min_of(max_of(width * 2 - (chunk0 + C) * 16, 0), 16);
    copy_async<16, TO + C * 16, C * 16>(to, from, inside ? present : 0);
    copy_row<D, ACROSS, TO, C + ACROSS>(to, from, inside, chunk0, width);
  }
}

template <int D, int ROWS, int ACROSS, int PASS = 0>
FROST_FN void copy_rows(u32 to, const char* from, i64 pitch, int row, u32 below, u32 extent, int chunk0, int width) {
  constexpr int kDown = kThreads / ACROSS;
  if constexpr (PASS * kDown < ROWS) {
    if (ROWS % kDown == 0 || row + PASS * kDown < ROWS)
      copy_row<D, ACROSS, PASS * kDown * D * 2>(to, from, below + PASS * kDown < extent, chunk0, width);
    copy_rows<D, ROWS, ACROSS, PASS + 1>(to, from + wide(kDown) * pitch, pitch, row, below, extent, chunk0, width);
  }
}

// Fills a tile with rows row0 .. row0 + ROWS - 1 of one head. Rows outside [first, last) and columns past `width` become
// zeros and are not read: a NaN there goes nowhere. `tid` is thread_index(), asked for once by who fills several tiles.
template <int D, int ROWS>
FROST_FN void load_tile(int tid, u32 tile, const char* base, i64 pitch, int row0, int first, int last, int width) {
  if constexpr (kVec == 16) {
    constexpr int kAcross = Swizzle<D>::kFull ? 8 : 4;  // neighbouring threads read 128 (64) bytes of one row
    static_assert(kThreads / kAcross % 8 == 0, "a pass covers whole swizzle periods: a thread's chunks have one key");
    const u32 chunk0 = static_cast<u32>(tid) % kAcross, row = static_cast<u32>(tid) / kAcross;
    copy_rows<D, ROWS, kAcross>(tile + Swizzle<D>::at(row, chunk0), base + chunk0 * 16 + wide(row0 + row) * pitch, pitch, row,
                                row0 + row - first, last - first, chunk0, width);
  } else {
    constexpr int kUnits = D * 2 / kVec;  // per row
#pragma unroll 4
    for (int i = tid; i < ROWS * kUnits; i += kThreads) {
      const int row = i / kUnits, byte = i % kUnits * kVec;
      const bool inside = row0 + row >= first && row0 + row < last;
      const int present = inside ? min_of(max_of(width * 2 - byte, 0), kVec) : 0;
      copy_async<kVec>(tile + Swizzle<D>::at(row, byte / 16) + byte % 16, base + wide(row0 + row) * pitch + byte, present);
    }
  }
}

// ---- sequences -----------------------------------------------------------------------------------------------------

FROST_FN i64 load_index(const void* p, i64 at, bool is_int64) {
  return is_int64 ? static_cast<const i64*>(p)[at] : wide(static_cast<const int*>(p)[at]);
}

FROST_FN int clamp_to(i64 value, int limit) { return static_cast<int>(value < 0 ? 0 : value > limit ? wide(limit) : value); }

// Lengths or offsets on the device: where they are, their stride and type.
struct Indices {
  const void* values;
  i64 stride;
  bool is_int64;

  FROST_FN int get(i64 at, int limit) const { return clamp_to(load_index(values, at * stride, is_int64), limit); }
};

// Offsets extended by a gap before the first and one after the last sequence, so that every token is somebody's:
// e[0] = 0, e[1 .. n+1] = cu[0 .. n], e[n+2] = total.
FROST_FN int packed_edge(const Indices& cu, int edge, int n_seqs, int total) {
  if (edge <= 0) return 0;
  return edge > n_seqs + 1 ? total : cu.get(edge - 1, total);
}

struct Slot {
  int sequence, start, extent, tile;  // sequence is -1 or n_seqs for a gap
};

// Which tile of which sequence slot number `slot` is, found without a host read of the offsets. Extended sequence s owns
// the slots from e[s] * rows / BLOCK + s on (rows: tile rows per token), always enough for all its tiles; so
// total * rows / BLOCK + n + 2 slots cover everything. Unused if tile * BLOCK >= extent * rows.
template <int BLOCK>
FROST_FN Slot packed_slot(const Indices& cu, int slot, int n_seqs, int total, int rows) {
  int low = 0, high = n_seqs + 1;
  while (low < high) {
    const int mid = (low + high + 1) / 2;
    if (packed_edge(cu, mid, n_seqs, total) * rows / BLOCK + mid <= slot) {
      low = mid;
    } else {
      high = mid - 1;
    }
  }
  const int start = packed_edge(cu, low, n_seqs, total);
  const int extent = max_of(packed_edge(cu, low + 1, n_seqs, total) - start, 0);
  // Offsets that decrease (a caller's error) could make this negative: no tile may start before its sequence.
  return {low - 1, start, extent, max_of(slot - (start * rows / BLOCK + low), 0)};
}

// One side of one sequence: tokens from `start`, of which `extent` are in the buffer and `length` are no padding.
struct Span {
  int start, extent, length;
};

FROST_FN Span other_span(const Indices& cu, const Indices& lengths, int sequence, int n_seqs, int total) {
  Span s = {0, total, total};
  if (cu.values) {
    const bool real = sequence >= 0 && sequence < n_seqs;
    s.start = real ? packed_edge(cu, sequence + 1, n_seqs, total) : 0;
    s.extent = s.length = real ? max_of(packed_edge(cu, sequence + 2, n_seqs, total) - s.start, 0) : 0;
  }
  if (lengths.values && s.length > 0) s.length = lengths.get(sequence, s.length);
  return s;
}

// ---- visibility ----------------------------------------------------------------------------------------------------

struct Band {
  int off, left, right;
};

// Positions along the side that a block walks: [lo, hi) in whole tiles, of which [full_lo, full_hi) need no mask;
// [first, last) are, to the token, those that somebody in the block sees (or is seen by).
struct Walk {
  int lo, full_lo, full_hi, hi, first, last;
};

FROST_FN Walk tile_walk(int first, int every_first, int last, int every_last, bool nobody, int block) {
  Walk w;
  nobody = nobody || last <= first;  // a band that ends before it begins, both in one tile perhaps
  w.first = first;
  w.last = nobody ? first : last;
  w.lo = first / block * block;
  w.hi = nobody ? w.lo : (last + block - 1) / block * block;
  w.full_lo = min_of((every_first + block - 1) / block * block, w.hi);
  w.full_hi = min_of(max_of(every_last / block * block, w.full_lo), w.hi);
  return w;
}

// Keys seen from rows [r0, r1] of a sequence of sk keys.
FROST_FN Walk key_walk(int r0, int r1, int sk, const Band& b, int block) {
  const int first = kHasLeft ? max_of(r0 + b.off - b.left, 0) : 0;
  const int every_first = kHasLeft ? max_of(r1 + b.off - b.left, 0) : 0;
  const int last = kHasRight ? min_of(max_of(r1 + b.off + b.right + 1, 0), sk) : sk;
  const int every_last = kHasRight ? min_of(max_of(r0 + b.off + b.right + 1, 0), sk) : sk;
  return tile_walk(first, every_first, last, every_last, r1 < r0, block);
}

// Rows that see keys [k0, k1], of a sequence of sq rows.
FROST_FN Walk row_walk(int k0, int k1, int sq, const Band& b, int block) {
  const int first = kHasRight ? max_of(k0 - b.off - b.right, 0) : 0;
  const int every_first = kHasRight ? max_of(k1 - b.off - b.right, 0) : 0;
  const int last = kHasLeft ? min_of(max_of(k1 - b.off + b.left + 1, 0), sq) : sq;
  const int every_last = kHasLeft ? min_of(max_of(k0 - b.off + b.left + 1, 0), sq) : sq;
  return tile_walk(first, every_first, last, every_last, k1 < k0, block);
}

// The keys that one row sees, as an inclusive range.
struct KeyRange {
  int low, high;
  FROST_FN bool holds(int key) const { return (!kHasLeft || key >= low) && key <= high; }
};

FROST_FN KeyRange keys_of_row(int row, int sk, const Band& b) {
  KeyRange r;
  r.low = kHasLeft ? row + b.off - b.left : 0;
  r.high = kHasRight ? min_of(row + b.off + b.right, sk - 1) : sk - 1;
  return r;
}

// ---- scores --------------------------------------------------------------------------------------------------------

// A bias or boolean mask, [B, H, Sq, Sk] in any strides (0 where broadcast). Positions at or past rows, columns hold
// nothing and are not read.
struct ScoreOperand {
  const char* base;  // of one batch and head
  i64 row_stride, column_stride;
  int rows, columns;

  FROST_FN bool inside(int row, int column) const { return row < rows && column < columns; }
};

FROST_FN float bias_at(const ScoreOperand& b, int row, int column) {
  if (!b.inside(row, column)) return 0.f;
  const i64 at = row * b.row_stride + column * b.column_stride;
  if constexpr (kBias == 2) {
    return reinterpret_cast<const float*>(b.base)[at];
  } else {
    return widen<kBf16>(reinterpret_cast<const u16*>(b.base)[at]);
  }
}

FROST_FN bool mask_at(const ScoreOperand& m, int row, int column) {
  return m.inside(row, column) && m.base[row * m.row_stride + column * m.column_stride] != 0;
}

// cap * tanh(raw / cap). 1 - 2 / (exp(2x) + 1) cannot become inf / inf (vllm#56578); near zero, where that form cancels,
// the odd series to x**9 keeps full relative precision.
FROST_FN float softcapped(float raw, float cap, float inverse_cap) {
  const float x = raw * inverse_cap;
  const float x2 = x * x;
  const float series = x * (1.f + x2 * (-0.3333333333333333f + x2 * (0.13333333333333333f + x2 * (
      -0.05396825396825397f + x2 * 0.021869488536155203f))));
  const float closed = 1.f - 2.f / (exp2_fast(x * 2.8853900817779268f) + 1.f);
  return cap * (fabsf(x) < 0.25f ? series : closed);
}

// A pair of 16-bit elements with zeros in place of those whose row nobody sees: 0 * NaN is NaN. `seen` has two bits per
// tile of 8 rows.
FROST_FN u32 seen_values(u32 pair, u32 seen, int tile) {
  const u32 bits = seen >> (tile * 2);
  return pair & ((bits & 1 ? 0xffffu : 0u) | (bits & 2 ? 0xffff0000u : 0u));
}

// A number of one of the io types, of which the kernel learns at run time: 0 fp32, 1 fp16, 2 bf16.
FROST_FN float load_float(const void* p, i64 at, int type) {
  if (type == 0) return static_cast<const float*>(p)[at];
  const u16 bits = static_cast<const u16*>(p)[at];
  return type == 1 ? widen<false>(bits) : widen<true>(bits);
}

// The block's place among programs that share K and V. Heads are taken in sections whose keys and values fit the L2
// cache together; within a section tiles are the outer axis, so that all of a section's long tiles start first.
struct Place {
  int slot, head;
};

FROST_FN Place place_of(i64 program, int n_slots, int n_heads, int section) {
  const u32 whole = static_cast<u32>(n_slots) * static_cast<u32>(section);  // at most the number of programs, below 2**31
  const int of_section = static_cast<int>(static_cast<u32>(program) / whole);
  const int within = static_cast<int>(static_cast<u32>(program) % whole);
  const int size = min_of(section, n_heads - of_section * section);
  return {within / size, of_section * section + within % size};
}

// ---- stores ----------------------------------------------------------------------------------------------------------

template <int BYTES>
FROST_FN void store_chunk(char* to, const u32 (&r)[4], int present) {
#pragma unroll
  for (int at = 0; at < 16; at += BYTES) {
    if (at + BYTES > present) continue;
    if constexpr (BYTES == 16) {
      *reinterpret_cast<Chunk16*>(to) = {r[0], r[1], r[2], r[3]};
    } else if constexpr (BYTES == 8) {
      *reinterpret_cast<Chunk8*>(to + at) = {r[at / 4], r[at / 4 + 1]};
    } else if constexpr (BYTES == 4) {
      *reinterpret_cast<u32*>(to + at) = r[at / 4];
    } else {
      *reinterpret_cast<u16*>(to + at) = static_cast<u16>(r[at / 4] >> (at % 4 * 8));
    }
  }
}

// The first `present` bytes of a chunk, in accesses of `vec` bytes, of which `present` is a multiple.
FROST_FN void store_row_part(char* to, const u32 (&r)[4], int present, int vec) {
  switch (vec) {
    case 16: store_chunk<16>(to, r, present); break;
    case 8: store_chunk<8>(to, r, present); break;
    case 4: store_chunk<4>(to, r, present); break;
    default: store_chunk<2>(to, r, present);
  }
}
