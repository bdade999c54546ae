// Backward, step 1: row statistics.
//
//   a block owns kRows query rows of one head of one sequence and reads o and dO of these rows once; eight lanes share a
//   row. It writes pairs of fp32, contiguous [B, Hq, Sq, 2] (packed: [Hq, T, 2]):
//       delta = rowsum(dO * o) - dLSE, so that dS = P * (dP - delta);
//       lse   = the forward's, times log2(e) where scores are in the exp2 domain; +inf in rows that contribute nothing
//   delta is 0 in these rows, whatever dO and dLSE hold. Where o is exactly 0, dO is not multiplied in: an unseen dO may
//   be NaN. With a gradient of sinks wanted (partial) also the sum over its rows of exp(sink - lse) * -delta.
// Where dQ is summed by atomic additions (sums) it also clears the sums of its rows.
//
// Nothing but memory traffic; 64 rows give every thread several loads in flight.
#include "bwd.cuh"

constexpr int kRows = BLOCK_M, kLanesPerRow = 8, kRowsAtOnce = kThreads / kLanesPerRow;
static_assert(kRows % kRowsAtOnce == 0, "whole passes");

// kVec bytes of 16-bit numbers, of which `present` are in the row.
FROST_FN void load_numbers(float (&x)[kVec / 2], const char* from, int present) {
  if (present >= kVec) {
    u16 bits[kVec / 2];
    if constexpr (kVec == 16) {
      *reinterpret_cast<Chunk16*>(bits) = *reinterpret_cast<const Chunk16*>(from);
    } else if constexpr (kVec == 8) {
      *reinterpret_cast<Chunk8*>(bits) = *reinterpret_cast<const Chunk8*>(from);
    } else if constexpr (kVec == 4) {
      *reinterpret_cast<u32*>(bits) = *reinterpret_cast<const u32*>(from);
    } else {
      bits[0] = *reinterpret_cast<const u16*>(from);
    }
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) x[i] = widen<kBf16>(bits[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec / 2; ++i) x[i] = i * 2 < present ? widen<kBf16>(reinterpret_cast<const u16*>(from)[i]) : 0.f;
  }
}

// lse as the other kernels want it. They multiply scores by scale * log2(e), rounded to fp32: with the exact ratio of that
// and scale, the rounding cancels in s - lse, however large both are.
FROST_FN float domain_of_scores(float lse, float scale) {
  if constexpr (!kFold) return lse;
  const double folded = scale * kLog2e;
  return static_cast<float>(lse * (scale == 0.f ? static_cast<double>(kLog2e) : folded / scale));
}

extern "C" __global__ void __launch_bounds__(kThreads) sdpa_bwd_pre(const __grid_constant__ BwdArgs a) {
  DYNAMIC_SHARED(smem);
  const i64 program = block_index();
  if (program >= a.n_programs) return;
  const int per_head = a.n_tiles * (a.cu_q ? 1 : a.n_seqs);
  const int head = static_cast<int>(program / per_head), index = static_cast<int>(program % per_head);
  const Own own = own_tile<kRows>(cu_q(a), lengths_q(a), index % a.n_tiles, index / a.n_tiles, a.n_seqs, a.sq_max);
  const int tid = thread_index(), part = tid % kLanesPerRow;
  const i64 batch = a.cu_q ? 0 : own.sequence;
  const u32 sums = shared_offset(smem);
  if (a.sums && own.any && own.span.length > 0) {
    const int blocks = min_of(kRows, own.span.extent - own.first + 15) / 16;
    float* to = dq_sums(a, batch, head, own.sequence, own.span.start, own.first, a.sum_columns);
    for (int i = tid; i < blocks * a.sum_columns * 4; i += kThreads) reinterpret_cast<Chunk16*>(to)[i] = {0, 0, 0, 0};
  }
  float share = 0.f;
#pragma unroll 1
  for (int local = tid / kLanesPerRow; local < kRows; local += kRowsAtOnce) {
    const int position = own.first + local;
    const bool inside = own.any && position < own.span.extent;
    const i64 token = wide(own.span.start) + position;
    const bool real = inside && position < own.span.length;
    float lse = -infinity();
    if (real) lse = static_cast<const float*>(a.lse)[batch * a.lse_b + head * a.lse_h + token * a.lse_s];
    const bool valid = lse != -infinity();
    float delta = 0.f;
    if (valid) {
      const char* o = static_cast<const char*>(a.o) + (batch * a.o_b + head * a.o_h + token * a.o_s) * 2;
      const char* go = static_cast<const char*>(a.go) + (batch * a.go_b + head * a.go_h + token * a.go_s) * 2;
      for (int byte = part * kVec; byte < a.dv * 2; byte += kLanesPerRow * kVec) {
        float x[kVec / 2], y[kVec / 2];
        load_numbers(x, o + byte, a.dv * 2 - byte);
        load_numbers(y, go + byte, a.dv * 2 - byte);
#pragma unroll
        for (int i = 0; i < kVec / 2; ++i) delta += x[i] == 0.f ? 0.f : x[i] * y[i];
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < kLanesPerRow; lanes *= 2) delta += shuffle_xor(delta, lanes);
    if (part != 0 || !inside) continue;
    if (valid && a.dlse) delta -= static_cast<const float*>(a.dlse)[batch * a.dlse_b + head * a.dlse_h + token * a.dlse_s];
    float* pair = static_cast<float*>(a.stats) + ((batch * a.heads + head) * a.sq_max + token) * 2;
    pair[0] = valid ? domain_of_scores(lse, a.scale) : infinity();
    pair[1] = delta;
    if (a.partial && valid) {
      const float sink = load_float(a.sink, head * a.sink_s, a.sink_type);
      const float p = lse == infinity() ? (sink == infinity() ? 1.f : 0.f) : exp2_fast((sink - lse) * kLog2e);
      share -= p * delta;
    }
  }
  if (!a.partial) return;
  store_shared(sums + tid * 4, share);
  barrier();
  if (tid == 0) {
    float total = 0.f;
    for (int i = 0; i < kThreads; i += kLanesPerRow) total += load_shared_float(sums + i * 4);
    static_cast<float*>(a.partial)[wide(head) * per_head + index] = total;
  }
}
