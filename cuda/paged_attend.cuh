// SPDX-License-Identifier: Apache-2.0
// One query over a range of keys in an x-major cache, by one thread block: what paged_v1 and
// paged_v2 are made of. Nothing is exchanged between its warps (paged_warp.cuh) until the end, and
// nothing is kept of a tile: sequences of any length take the same memory.
#pragma once

#include "paged_warp.cuh"

// ---- A block ----

// The keys [begin, end) of a row; each warp leaves its part in shared memory.
template <class C, class Params>
__device__ __forceinline__ void attend(PagedSmem<C>& smem, const Params& p, const PagedRow& row,
                                       int begin, int end) {
  const int scale_at = row.batch * p.stride_k_scale_batch + row.kv_head * p.stride_k_scale_head;
  const float k_scale = p.k_scale != nullptr ? p.k_scale[scale_at] : 1.f;
  const float slope_log2 =
      p.alibi_slopes != nullptr
          ? to_log2(p.alibi_slopes[row.batch * p.stride_alibi_batch + row.head])
          : 0.f;
  const BlockSparse<Params> sparse(p, row);
  load_q(smem, p, row);
  PagedWarp<C, Params> warp{p, row, smem};
  for (int tile = begin + warp.number() * kTileKeys; tile < end; tile += C::warps * kTileKeys) {
    const int key = tile + warp.lane();
    const bool seen = key < end && sparse.sees(p, key) && row.sees(p, key);
    const unsigned seen_lanes = __ballot_sync(kAllLanes, seen);
    if (seen_lanes == 0) continue;
    warp.weigh(seen ? warp.score(key, k_scale, slope_log2) : kEmptyMax);
    warp.accumulate(tile, seen_lanes == kAllLanes);
  }
  warp.finish();
  __syncthreads();
}

// What the warps have in shared memory, put together: the max and sum of the row, and out of one
// dimension, not divided by the sum.
template <class C>
struct PagedTotal {
  float max = kEmptyMax;
  float sum = 0.f;

  __device__ __forceinline__ PagedTotal(const PagedSmem<C>& smem) {
#pragma unroll
    for (int w = 0; w < C::warps; ++w) max = fmaxf(max, smem.max[w]);
#pragma unroll
    for (int w = 0; w < C::warps; ++w) sum += smem.sum[w] * factor(smem, w);
  }
  __device__ __forceinline__ float factor(const PagedSmem<C>& smem, int w) const {
    return ptx::ex2_approx(smem.max[w] - finite_max(max));
  }
  __device__ __forceinline__ float out(const PagedSmem<C>& smem, int d) const {
    float x = 0.f;
#pragma unroll
    for (int w = 0; w < C::warps; ++w) x = fmaf(smem.out[w][d], factor(smem, w), x);
    return x;
  }
};

// Divides by the sum and writes out and lse of the row.
template <class C>
__device__ __forceinline__ void write_row(const PagedSmem<C>& smem, const PagedParams& p,
                                          const PagedRow& row) {
  const PagedTotal<C> total(smem);
  const float sink_log2 = p.sink != nullptr ? to_log2(p.sink[row.head]) : kEmptyMax;
  const FinishedRow end(total.max, total.sum, sink_log2);
  const int scale_at = row.batch * p.stride_v_scale_batch + row.kv_head * p.stride_v_scale_head;
  const float v_scale = p.v_scale != nullptr ? p.v_scale[scale_at] : p.out_scale;
  const float factor = end.sum == 0.f ? 0.f : end.factor() * v_scale;
  const long long first = row.offset(p.stride_out_batch, p.stride_out_row) +
                          row.head * p.stride_out_head + row.first_column;
  for (int d = threadIdx.x; d < row.columns; d += C::threads) {
    const float x = factor == 0.f ? 0.f : total.out(smem, d) * factor;
    if constexpr (sizeof(typename C::Cache) > 1) {
      static_cast<typename C::Cache*>(p.out)[first + d] = from_float<typename C::Cache>(x);
    } else if (p.q_bf16) {
      static_cast<bf16*>(p.out)[first + d] = from_float<bf16>(x);
    } else {
      static_cast<fp16*>(p.out)[first + d] = from_float<fp16>(x);
    }
  }
  if (p.lse != nullptr && threadIdx.x == 0 && row.first_column == 0) {
    p.lse[row.offset(p.stride_lse_batch, 1) + row.head * p.stride_lse_head] = end.lse();
  }
}
