// Backward, step 3 where dQ was summed by atomic additions: dQ = scale * sums, in its own type and strides.
//
//   a block owns kRows query rows of one head of one sequence; a thread takes eight columns of a row at a time, which four
//   lanes of the fragments hold. Padding rows get zeros and their sums are not read. Bound by memory.
#include "bwd.cuh"

constexpr int kRows = BLOCK_M;

extern "C" __global__ void __launch_bounds__(kThreads) sdpa_bwd_cast(const __grid_constant__ BwdArgs a) {
  const i64 program = block_index();
  if (program >= a.n_programs) return;
  const int per_head = a.n_tiles * (a.cu_q ? 1 : a.n_seqs);
  const int head = static_cast<int>(program / per_head), index = static_cast<int>(program % per_head);
  const Own own = own_tile<kRows>(cu_q(a), lengths_q(a), index % a.n_tiles, index / a.n_tiles, a.n_seqs, a.sq_max);
  if (!own.any) return;
  const i64 batch = a.cu_q ? 0 : own.sequence;
  const int chunks = a.sum_columns / 8;
  for (int at = thread_index(); at < kRows * chunks; at += kThreads) {
    const int position = own.first + at / chunks, chunk = at % chunks;
    const int present = min_of(a.d * 2 - chunk * 16, 16);
    if (position >= own.span.extent || present <= 0) continue;
    u32 r[4] = {0, 0, 0, 0};
    if (position < own.span.length) {
      const float* from = dq_sums(a, batch, head, own.sequence, own.span.start, position, a.sum_columns) + chunk * 128;
      const int lane0 = position % 8 * 4, e = position % 16 / 8 * 2;
#pragma unroll
      for (int t = 0; t < 4; ++t)
        r[t] = pack2<kBf16>(from[SumLayout::at(lane0 + t, e)] * a.scale, from[SumLayout::at(lane0 + t, e + 1)] * a.scale);
    }
    char* to = static_cast<char*>(a.gq) + (batch * a.gq_b + head * a.gq_h + (wide(own.span.start) + position) * a.gq_s) * 2;
    store_row_part(to + chunk * 16, r, present, a.gq_vec);
  }
}
