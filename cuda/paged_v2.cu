// SPDX-License-Identifier: Apache-2.0
// PagedAttention v2: v1 (paged_v1.cu), with the keys of a sequence cut in partitions of 512 that
// blocks of their own attend to, and a second launch that merges them.
//
//              partition 0       1       2
//   sequence  |-- 512 ---|-- 512 ---|-- 300 --|         one block each: max, sum, out
//                   \          |         /
//                     paged_v2_reduce                    one block a row
//
// Grid of paged_v2: (sequences) x (queries) x (partitions) x (blocks of columns) x (query heads),
// heads fastest; blocks past the last key of their row leave at once. Grid of paged_v2_reduce:
// (sequences) x (queries) x (query heads) x (blocks of columns).
//
// A partition leaves in the workspace its max and sum, and out without the division, all float32.
// What no partition wrote is not read.

#include "paged_attend.cuh"

template <class C>
using PagedV2Smem = PagedSmem<C>;
template <class C>
using PagedV2ReduceSmem = PagedSmem<C>;

// Where partitions leave their part of a row: max, sum, then out.
__device__ __forceinline__ float* part_of(const PagedV2Params& p, const PagedRow& row,
                                          int partition) {
  const long long token = row.batch * p.queries + row.query;
  const long long number = (token * p.q_heads + row.head) * p.partitions + partition;
  return p.workspace + number * (p.value_dim + 2);
}

template <class C>
__device__ __forceinline__ void paged_v2(const PagedV2Params& p) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  PagedSmem<C>& smem = *reinterpret_cast<PagedSmem<C>*>(smem_bytes);
  const unsigned head = blockIdx.x % static_cast<unsigned>(p.q_heads);
  const unsigned block = blockIdx.x / static_cast<unsigned>(p.q_heads);
  const unsigned column_blocks = p.column_blocks, rest = block / column_blocks;
  const int partition = rest % static_cast<unsigned>(p.partitions);
  const PagedRow row(p, rest / static_cast<unsigned>(p.partitions) * p.q_heads + head,
                     block - rest * column_blocks, C::head_dim);
  const int first = partition * C::partition;
  if (!row.exists || first >= row.end) return;
  attend(smem, p, row, max(first, row.begin), min(row.end, first + C::partition));

  const PagedTotal<C> total(smem);
  float* part = part_of(p, row, partition);
  if (threadIdx.x == 0 && row.first_column == 0) {
    part[0] = total.max;
    part[1] = total.sum;
  }
  for (int d = threadIdx.x; d < row.columns; d += C::threads) {
    part[2 + row.first_column + d] = total.out(smem, d);
  }
}

template <class C>
__device__ __forceinline__ void paged_v2_reduce(const PagedV2Params& p) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  PagedSmem<C>& smem = *reinterpret_cast<PagedSmem<C>*>(smem_bytes);
  constexpr int kSteps = C::head_dim / 32;  // dimensions of a lane
  const unsigned column_blocks = p.column_blocks, number = blockIdx.x / column_blocks;
  const PagedRow row(p, number, blockIdx.x - number * column_blocks, C::head_dim);
  if (!row.exists) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float max = kEmptyMax, sum = 0.f, out[kSteps] = {};
  for (int i = warp; i < ceil_div(row.end, C::partition); i += C::warps) {
    const float* part = part_of(p, row, i);
    const float top = fmaxf(max, part[0]);
    const float alpha = ptx::ex2_approx(max - finite_max(top));
    const float weight = ptx::ex2_approx(part[0] - finite_max(top));
    max = top;
    sum = sum * alpha + part[1] * weight;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int d = 32 * step + lane;
      if (d < row.columns) {
        out[step] = fmaf(part[2 + row.first_column + d], weight, out[step] * alpha);
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) smem.out[warp][32 * step + lane] = out[step];
  if (lane == 0) {
    smem.max[warp] = max;
    smem.sum[warp] = sum;
  }
  __syncthreads();
  write_row(smem, p, row);
}
