// Backward, last step: sums of partial results in a fixed order, for gradients of biases and sinks.
//
//   out[b, h, r] = sum of partial[b + i, h + j, r] over i < sum_batches, j < sum_heads, and with sum_rows over all rows
//   (out_rows is 1 then). partial is fp32, contiguous [batches, heads, rows]; an axis is either kept or summed whole.
//   A thread owns one r; with sum_rows a block owns one number and adds what its threads found in order.
#include "ptx.cuh"
#include "common.cuh"

FROST_FN void store_float(void* p, i64 at, int type, float x) {
  if (type == 0) {
    static_cast<float*>(p)[at] = x;
  } else {
    static_cast<u16*>(p)[at] = static_cast<u16>(type == 1 ? pack2<false>(x, 0.f) : pack2<true>(x, 0.f));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) sdpa_bwd_reduce(const __grid_constant__ ReduceArgs a) {
  DYNAMIC_SHARED(smem);
  const i64 program = block_index();
  if (program >= a.n_programs) return;
  const int tid = thread_index();
  const int blocks = (a.out_rows + kThreads - 1) / kThreads;
  const int row = static_cast<int>(program % blocks) * kThreads + tid;
  const int head = static_cast<int>(program / blocks % a.out_heads), batch = static_cast<int>(program / blocks / a.out_heads);
  const float* partial = static_cast<const float*>(a.partial);
  const i64 to = batch * a.out_b + head * a.out_h;
  float sum = 0.f;
  for (int i = 0; i < a.sum_batches; ++i) {
    for (int j = 0; j < a.sum_heads; ++j) {
      const float* line = partial + (wide(batch + i) * a.heads + head + j) * a.rows;
      if (a.sum_rows) {
        for (int r = tid; r < a.rows; r += kThreads) sum += line[r];
      } else if (row < a.rows) {
        sum += line[row];
      }
    }
  }
  if (!a.sum_rows) {
    if (row < a.out_rows) store_float(a.out, to + row * a.out_r, a.out_type, sum);
    return;
  }
  const u32 sums = shared_offset(smem);
  store_shared(sums + tid * 4, sum);
  barrier();
  if (tid != 0) return;
  float total = 0.f;
  for (int i = 0; i < kThreads; ++i) total += load_shared_float(sums + i * 4);
  store_float(a.out, to, a.out_type, total);
}
