// The instructions that C++ has no name for, one function each. No CUDA header is included anywhere: NVRTC needs
// nothing but these sources. Shared memory is addressed by 32-bit offsets in the shared window throughout.
#pragma once

#define FROST_FN __device__ __forceinline__

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(8) Chunk8 { u32 x, y; };
struct alignas(16) Chunk16 { u32 x, y, z, w; };

#define DYNAMIC_SHARED(name) extern __shared__ __align__(128) unsigned char name[]

FROST_FN u32 shared_offset(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Four 8x8 matrices of 16-bit elements; lane 8i+r gives the address of row r of matrix i. Lane l then holds elements
// (l / 4, 2 (l % 4)) and the next of each; transposed: (2 (l % 4), l / 4) and the one below.
FROST_FN void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

FROST_FN void ldmatrix_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// c[16 x 8] += a[16 x 16] b[16 x 8] in fp32. With g = lane / 4, t = lane % 4: a holds rows g (a0, a2) and g + 8
// (a1, a3) at columns 2t, 2t+1 (a0, a1) and 2t+8, 2t+9 (a2, a3); b column g at rows 2t, 2t+1 (b0) and 2t+8, 2t+9 (b1);
// c rows g (c0, c1) and g + 8 (c2, c3) at columns 2t, 2t+1.
template <bool IS_BF16>
FROST_FN void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (IS_BF16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Copies `present` (0 .. BYTES) bytes from `from + FROM` to shared memory at `to + TO` and fills the rest of BYTES with
// zeros; asynchronous for 4, 8 and 16 bytes, at once for 2. Nothing is read where present is 0. The offsets are immediates
// of the instruction: as additions, the compiler would keep a 64-bit address for each.
template <int BYTES, int TO = 0, int FROM = 0>
FROST_FN void copy_async(u32 to, const void* from, int present) {
  static_assert(BYTES == 16 || BYTES == 8 || BYTES == 4 || BYTES == 2, "a copy moves 16, 8, 4 or 2 bytes");
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0 + %3], [%1 + %4], 16, %2;"
                 ::"r"(to), "l"(from), "r"(present), "n"(TO), "n"(FROM) : "memory");
  } else if constexpr (BYTES >= 4) {
    asm volatile("cp.async.ca.shared.global [%0 + %4], [%1 + %5], %2, %3;"
                 ::"r"(to), "l"(from), "n"(BYTES), "r"(present), "n"(TO), "n"(FROM) : "memory");
  } else {
    const u16 value = present ? static_cast<const u16*>(from)[FROM / 2] : u16(0);
    asm volatile("st.shared.u16 [%0 + %2], %1;" ::"r"(to), "h"(value), "n"(TO) : "memory");
  }
}

FROST_FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's committed groups are still under way.
template <int N>
FROST_FN void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

FROST_FN void store_shared(u32 to, u32 value) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory"); }
FROST_FN void store_shared(u32 to, float value) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory"); }

FROST_FN void load_shared(u32 (&r)[4], u32 from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

FROST_FN float load_shared_float(u32 from) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(from) : "memory");
  return r;
}

// Four sums of one lane in memory, of the 128 that a warp adds to: where number e of a lane lies (SumLayout::at), and the
// addition. From compute capability 9.0 on one instruction adds all four; before, neighbouring lanes add to neighbours.
struct SumLayout {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kVector = true;
#else
  static constexpr bool kVector = false;
#endif
  FROST_FN static int at(int lane, int e) { return kVector ? lane * 4 + e : e * 32 + lane; }
};

FROST_FN void add_global(float* sums, int lane, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               ::"l"(sums + SumLayout::at(lane, 0)), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e)
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(sums + SumLayout::at(lane, e)), "f"(x[e]) : "memory");
#endif
}

// 2**x to about 2 units in the last place; exp2(-inf) = 0.
FROST_FN float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

FROST_FN float log2_fast(float x) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Two floats rounded to nearest even, the first in the low half.
template <bool IS_BF16>
FROST_FN u32 pack2(float low, float high) {
  u32 r;
  if constexpr (IS_BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

template <bool IS_BF16>
FROST_FN float widen(u16 bits) {
  if constexpr (IS_BF16) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
  } else {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
    return r;
  }
}

FROST_FN void barrier() { __syncthreads(); }
// Of the threads of a group of warps; `id` is 1 .. 15, one per group.
template <int WARPS_OF_GROUP>
FROST_FN void group_barrier(int id) { asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(WARPS_OF_GROUP * 32) : "memory"); }
FROST_FN void warp_barrier() { __syncwarp(); }
FROST_FN float shuffle_xor(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
FROST_FN u32 shuffle_xor(u32 x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
FROST_FN float shuffle_from(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
FROST_FN bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }

// Volatile: read again where it is asked for. What is computed from it is then not hoisted out of loops, where it would
// hold registers that the accumulators need.
FROST_FN int thread_index() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Of another register: what is computed from it has nothing in common with what is computed from the thread's number, so
// that the compiler does not keep intermediate results of one for the other.
FROST_FN int lane_index() {
  int x;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(x));
  return x;
}

// The block's number in a folded grid. Volatile, so that what is computed from it late in a kernel is computed late.
FROST_FN i64 block_index() {
  u32 x, y, width;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(width));
  return static_cast<i64>(y) * width + x;
}
FROST_FN float as_float(u32 bits) { return __uint_as_float(bits); }
FROST_FN u32 as_bits(float x) { return __float_as_uint(x); }
FROST_FN float infinity() { return __int_as_float(0x7f800000); }
