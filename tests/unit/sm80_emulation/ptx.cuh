// Stands in for kernels/ptx.cuh on a CPU: a block's threads are fibers, taken in turn; what a warp does together happens
// when its last lane arrives. Slow and exact about who holds which element, which addresses are touched, and when an
// asynchronous copy may be relied on: eager copies land at once, lazy ones when they are waited for and no sooner, so a
// missing wait reads garbage in one mode and an overwritten buffer shows in the other. Each warp runs as far ahead of the
// others as barriers let it (eager: the first warp leads, lazy: the last), so that a missing barrier shows too.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define FROST_FN inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define DYNAMIC_SHARED(name) unsigned char* const name = emulated::shared.data()

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(8) Chunk8 { u32 x, y; };
struct alignas(16) Chunk16 { u32 x, y, z, w; };

namespace emulated {

struct Copy { u32 to; const void* from; int present, bytes; };

struct Meeting { int arrived = 0; long generation = 0; };

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
  std::vector<Copy> open;
  bool done = false;
  const Meeting* awaited = nullptr;       // a barrier, not yet left
  long barrier_generation = 0;
  // What the lane brings to, and takes from, an operation of the whole warp.
  u32 in[8], out[4], address;
  float value;
  float* c;
};

inline std::vector<unsigned char> shared;
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting block;
inline Meeting groups[16];
inline ucontext_t scheduler;
inline int current = 0;
inline i64 block_number = 0;
inline bool lazy = false;

[[noreturn]] inline void fault(const char* what, long long a = 0, long long b = 0) {
  std::fprintf(stderr, "emulated kernel: %s (%lld, %lld), block %lld thread %d\n", what, a, b, block_number, current);
  std::abort();
}

inline void yield() {
  const int me = current;
  swapcontext(&fibers[me].context, &scheduler);
  current = me;
}

template <class Last>
void meet(Meeting& m, int size, Last last) {
  const long generation = m.generation;
  if (++m.arrived == size) {
    m.arrived = 0;
    last();
    ++m.generation;
    return;
  }
  while (m.generation == generation) yield();
}

inline Fiber& self() { return fibers[current]; }
template <class Last>
void meet_warp(Last last) {
  const int warp = current / 32;
  meet(warps[warp], 32, [&] { last(&fibers[warp * 32]); });
}

inline unsigned char* at(u32 address, int bytes) {
  if (address % bytes) fault("misaligned shared address", address, bytes);
  if (address + bytes > shared.size()) fault("address past shared memory", address, (long long)shared.size());
  return shared.data() + address;
}

inline void land(const Copy& c) {
  unsigned char* to = at(c.to, c.bytes);
  std::memset(to, 0, c.bytes);
  std::memcpy(to, c.from, c.present);
}

template <bool IS_BF16>
float widened(u16 bits) {
  if (IS_BF16) {
    const u32 word = u32(bits) << 16;
    float r;
    std::memcpy(&r, &word, 4);
    return r;
  }
  _Float16 h;
  std::memcpy(&h, &bits, 2);
  return float(h);
}

template <bool IS_BF16>
u16 narrowed(float x) {
  if (!IS_BF16) {
    const _Float16 h = _Float16(x);
    u16 r;
    std::memcpy(&r, &h, 2);
    return r;
  }
  u32 word;
  std::memcpy(&word, &x, 4);
  if (x != x) return u16((word >> 16) | 64);
  return u16((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

// Runs body() once per thread of one block.
template <class Body>
void run_block(i64 number, int threads, int shared_bytes, Body body) {
  static Body* running;
  running = &body;
  block_number = number;
  shared.assign(shared_bytes, 0xff);  // NaN in every type
  fibers = std::vector<Fiber>(threads);
  warps.assign(threads / 32, Meeting());
  block = Meeting();
  for (Meeting& g : groups) g = Meeting();
  for (int i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.stack.resize(256 * 1024);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data();
    f.context.uc_stack.ss_size = f.stack.size();
    f.context.uc_link = &scheduler;
    makecontext(&f.context, static_cast<void (*)()>([] {
      const int me = current;
      (*running)();
      fibers[me].done = true;
    }), 0);
  }
  const int n_warps = threads / 32;
  for (bool some = true; some;) {
    some = false;
    for (int w = 0; w < n_warps; ++w) {
      const int first = (lazy ? n_warps - 1 - w : w) * 32;
      for (bool moved = true; moved;) {
        moved = false;
        for (int i = first; i < first + 32; ++i) {
          Fiber& f = fibers[i];
          if (f.done || (f.awaited && f.awaited->generation == f.barrier_generation)) continue;
          some = moved = true;
          current = i;
          swapcontext(&scheduler, &f.context);
        }
      }
    }
  }
  for (const Fiber& f : fibers)
    if (!f.done) fault("a barrier that not every thread reaches");
  for (const Fiber& f : fibers) {
    if (!f.open.empty()) fault("copies that were never committed");
    for (const auto& g : f.groups)
      if (!g.empty()) fault("copies that were never waited for");
  }
}

}  // namespace emulated

inline int thread_index() { return emulated::current; }
inline int lane_index() { return emulated::current % 32; }
inline i64 block_index() { return emulated::block_number; }
inline float as_float(u32 bits) {
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}
inline u32 as_bits(float x) {
  u32 r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline float infinity() { return INFINITY; }
inline u32 shared_offset(const void* p) {
  return static_cast<u32>(static_cast<const unsigned char*>(p) - emulated::shared.data());
}

inline void load_matrices(u32 (&r)[4], u32 address, bool transposed) {
  emulated::self().address = address;
  emulated::meet_warp([transposed](emulated::Fiber* lanes) {
    for (int m = 0; m < 4; ++m) {
      u16 matrix[8][8];
      for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], emulated::at(lanes[m * 8 + row].address, 16), 16);
      for (int l = 0; l < 32; ++l) {
        const int x = l / 4, y = l % 4 * 2;
        const u16 low = transposed ? matrix[y][x] : matrix[x][y], high = transposed ? matrix[y + 1][x] : matrix[x][y + 1];
        lanes[l].out[m] = low | u32(high) << 16;
      }
    }
  });
  for (int m = 0; m < 4; ++m) r[m] = emulated::self().out[m];
}
inline void ldmatrix(u32 (&r)[4], u32 address) { load_matrices(r, address, false); }
inline void ldmatrix_trans(u32 (&r)[4], u32 address) { load_matrices(r, address, true); }

template <bool IS_BF16>
void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  emulated::Fiber& f = emulated::self();
  for (int i = 0; i < 4; ++i) f.in[i] = a[i];
  f.in[4] = b0;
  f.in[5] = b1;
  f.c = c;
  emulated::meet_warp([](emulated::Fiber* lanes) {
    float am[16][16], bm[16][8];
    auto half = [](u32 word, int which) { return emulated::widened<IS_BF16>(u16(word >> (16 * which))); };
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      for (int e = 0; e < 2; ++e) {
        am[g][t + e] = half(lanes[l].in[0], e);
        am[g + 8][t + e] = half(lanes[l].in[1], e);
        am[g][t + 8 + e] = half(lanes[l].in[2], e);
        am[g + 8][t + 8 + e] = half(lanes[l].in[3], e);
        bm[t + e][g] = half(lanes[l].in[4], e);
        bm[t + 8 + e][g] = half(lanes[l].in[5], e);
      }
    }
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = l % 4 * 2;
      for (int e = 0; e < 4; ++e) {
        float sum = lanes[l].c[e];
        for (int k = 0; k < 16; ++k) sum += am[g + e / 2 * 8][k] * bm[k][t + e % 2];
        lanes[l].c[e] = sum;
      }
    }
  });
}

template <int BYTES, int TO = 0, int FROM = 0>
void copy_async(u32 to, const void* from, int present) {
  to += TO;
  from = static_cast<const char*>(from) + FROM;
  if (present < 0 || present > BYTES) emulated::fault("bytes of a copy", present, BYTES);
  if (present && reinterpret_cast<std::uintptr_t>(from) % BYTES) emulated::fault("misaligned global address", (i64)from, BYTES);
  const emulated::Copy copy = {to, from, present, BYTES};
  if (BYTES == 2 || !emulated::lazy) return emulated::land(copy);
  emulated::self().open.push_back(copy);
}
inline void copy_commit() {
  emulated::Fiber& f = emulated::self();
  f.groups.push_back(f.open);
  f.open.clear();
}
template <int N>
void copy_wait() {
  emulated::Fiber& f = emulated::self();
  for (std::size_t i = 0; i + N < f.groups.size(); ++i) {
    for (const auto& c : f.groups[i]) emulated::land(c);
    f.groups[i].clear();
  }
}

inline void store_shared(u32 to, u32 value) { std::memcpy(emulated::at(to, 4), &value, 4); }
inline void store_shared(u32 to, float value) { std::memcpy(emulated::at(to, 4), &value, 4); }
inline void load_shared(u32 (&r)[4], u32 from) { std::memcpy(r, emulated::at(from, 16), 16); }
inline float load_shared_float(u32 from) {
  float r;
  std::memcpy(&r, emulated::at(from, 4), 4);
  return r;
}

struct SumLayout {
  static int at(int lane, int e) { return e * 32 + lane; }
};
inline void add_global(float* sums, int lane, const float (&x)[4]) {
  for (int e = 0; e < 4; ++e) sums[SumLayout::at(lane, e)] += x[e];
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }

template <bool IS_BF16>
u32 pack2(float low, float high) {
  return emulated::narrowed<IS_BF16>(low) | u32(emulated::narrowed<IS_BF16>(high)) << 16;
}
template <bool IS_BF16>
float widen(u16 bits) { return emulated::widened<IS_BF16>(bits); }

inline void wait_at(emulated::Meeting& m, int threads) {
  emulated::self().awaited = &m;
  emulated::self().barrier_generation = m.generation;
  emulated::meet(m, threads, [] {});
  emulated::self().awaited = nullptr;
}
inline void barrier() { wait_at(emulated::block, (int)emulated::fibers.size()); }
template <int WARPS_OF_GROUP>
void group_barrier(int id) {
  if (id < 1 || id > 15) emulated::fault("number of a group's barrier", id);
  wait_at(emulated::groups[id], WARPS_OF_GROUP * 32);
}
inline void warp_barrier() { emulated::meet_warp([](emulated::Fiber*) {}); }
inline float value_of(float x, int thread) {
  emulated::self().value = x;
  float r = 0;
  emulated::meet_warp([](emulated::Fiber* lanes) {
    for (int l = 0; l < 32; ++l) std::memcpy(&lanes[l].out[0], &lanes[l].value, 4);
  });
  std::memcpy(&r, &emulated::fibers[thread].out[0], 4);
  return r;
}
inline float shuffle_xor(float x, int mask) { return value_of(x, emulated::current ^ mask); }
inline float shuffle_from(float x, int lane) { return value_of(x, emulated::current / 32 * 32 + lane); }
inline u32 shuffle_xor(u32 x, int mask) {
  float f, r;
  std::memcpy(&f, &x, 4);
  r = shuffle_xor(f, mask);
  std::memcpy(&x, &r, 4);
  return x;
}
inline bool any_lane(bool x) {
  emulated::self().in[0] = x;
  emulated::meet_warp([](emulated::Fiber* lanes) {
    u32 any = 0;
    for (int l = 0; l < 32; ++l) any |= lanes[l].in[0];
    for (int l = 0; l < 32; ++l) lanes[l].out[0] = any;
  });
  return emulated::self().out[0] != 0;
}
