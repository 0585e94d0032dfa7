// SPDX-License-Identifier: Apache-2.0
// What 64 query rows of fwd_sm90_paged need where the cache is of e4m3. Products are of halves,
// which hold all its numbers; they do not see what multiplies keys and values (of a tensor, of a
// head, of a head of a sequence).
#pragma once

#include "fwd_sm90_tile.cuh"
#include "params.cuh"
#include "ptx_sm90.cuh"
#include "softmax.cuh"
#include "types.cuh"

template <class C>
struct FwdSm90Halves {
  // What products of the thread's rows are multiplied by: all of it, in log2 units, where there are
  // no other steps.
  float row_scale[2];

  // q of a tile becomes halves in its place, each row raised (types.cuh), and takes the sign of
  // what multiplies keys, or its zero; row_scale, the rest of that and what Raise divides by. Four
  // lanes share `row` and row + 8.
  template <class Q>
  __device__ __forceinline__ void halve(const FwdSm90PagedParams& p, Q& q, int row,
                                        const FwdSm90Tile& t) {
    const float of_keys =
        p.k_scale_number *
        scale_of(p.k_scale, t.batch * p.stride_k_scale_batch + t.kv_head * p.stride_k_scale_head);
    const bool q_bf16 = p.q_bf16 != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto unit = [&](int i) { return q.unit(row + 8 * half, 32 * i + threadIdx.x % 4 * 8); };
      unsigned x[C::head_dim / 8];
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < C::head_dim / 32; ++i) {
        const uint4 four = *unit(i);
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
      }
#pragma unroll
      for (const unsigned two : x) largest = larger(largest, pair_of(two, q_bf16));
      const Raise raise(quad_max(largest));
      const float factor = copysignf(of_keys == 0.f ? 0.f : raise.factor, of_keys);
#pragma unroll
      for (unsigned& two : x) two = raised(pair_of(two, q_bf16), factor);
#pragma unroll
      for (int i = 0; i < C::head_dim / 32; ++i) {
        *unit(i) = make_uint4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
      }
      row_scale[half] = raise.inverse * (of_keys == 0.f ? 1.f : fabsf(of_keys));
      // Not 0, by which a hidden key's -inf would be NaN; products are below 2^31.
      if constexpr (!C::scores) row_scale[half] = fmaxf(p.scale_log2 * row_scale[half], 1e-30f);
    }
    ptx::fence_proxy_async();
  }

  // Products of the thread's rows, where steps between them and the softmax need them whole.
  template <int kTiles>
  __device__ __forceinline__ void scale(float (&s)[1][kTiles][4]) const {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) s[0][i / 4][i % 4] *= row_scale[i % 4 / 2];
  }

  // What values are multiplied by.
  static __device__ __forceinline__ float v_scale(const FwdSm90PagedParams& p,
                                                  const FwdSm90Tile& t) {
    return p.v_scale_number * scale_of(p.v_scale, t.batch * p.stride_v_scale_batch +
                                                      t.kv_head * p.stride_v_scale_head);
  }

 private:
  static __device__ __forceinline__ float scale_of(const float* scales, int at) {
    return scales == nullptr ? 1.f : __ldg(scales + at);
  }
};
