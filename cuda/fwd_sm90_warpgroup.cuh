// SPDX-License-Identifier: Apache-2.0
// What a warpgroup of the Hopper forward kernels holds and does: 64 query rows against tiles of
// keys. Who brings the tiles, and when, is the kernel's business.
#pragma once

#include "fwd_sm90_halves.cuh"
#include "mask.cuh"
#include "params.cuh"
#include "pipeline_sm90.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "tile_xmajor_sm90.cuh"
#include "types.cuh"

template <class C>
struct FwdSm90Warpgroup {
  using Element = typename C::Element;
  using Q = SwizzledTile<64, (C::head_dim > C::value_dim ? C::head_dim : C::value_dim)>;
  using K = typename CacheTiles<C::xmajor && !C::e4m3, C::block_n, C::head_dim>::Keys;
  using V = typename CacheTiles<C::xmajor, C::block_n, C::value_dim>::Values;
  using Scores = float[1][C::block_n / 8][4];  // 64 x block_n, then probabilities
  static constexpr ptx::WgmmaType kType = kWgmmaType<Element>;
  // Whether steps with and without a mask are one: both would take longer than 3 s to compile.
  static constexpr bool kOneStep =
      C::softcap ? C::window || C::head_dim == 192 : C::scores && (C::window || C::xmajor);
  // Whether maxima are found as integers, three at a time. H200, 2026-12-01, run 6 of
  // tuning/scores.csv: 64 from 4k on takes 2 to 3 % less, 256 up to 2 %; 96, 128 and 192 / 128,
  // whose steps wait for products and not for this, up to 2 % more.
  static constexpr bool kSettle = C::head_dim == 64 || C::head_dim == 256;

  const FwdSm90Params& p;
  unsigned query[C::q_registers ? C::head_dim / 16 : 1][4];  // as A operand, or not there
  float out[1][C::value_dim / 8][4];                         // 64 x value_dim
  unsigned operand[C::block_n / 16][4];  // probabilities as A operand, 16 keys each
  float alpha[1][2];                     // what `out` is to be multiplied by
  OnlineSoftmax<1> softmax;
  FwdSm90Halves<C> halves;  // e4m3

  __device__ __forceinline__ explicit FwdSm90Warpgroup(const FwdSm90Params& params) : p(params) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ bool leader() { return threadIdx.x % 128 == 0; }
  // First row of this warp's 16, of the 64.
  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % 4 * 16; }

  // The keys that the rows of a tile see.
  __device__ __forceinline__ KeyInterval seen(const FwdSm90Tile& t) const {
    KeyInterval keys(p, {t.q_len, t.k_len});
    if (!C::window) keys.left = -1;
    return keys;
  }

  // A tile without scores so far.
  __device__ __forceinline__ void clear() {
    softmax = OnlineSoftmax<1>();
#pragma unroll
    for (int i = 0; i < C::value_dim / 2; ++i) flat(out)[i] = 0.f;
  }

  // Reads q, where registers hold it: its place is free once all warps have done so.
  __device__ __forceinline__ void take_query(const Q& q) {
    if constexpr (C::q_registers) {
#pragma unroll
      for (int i = 0; i < C::head_dim / 16; ++i) {
        ptx::ldmatrix_x4(query[i],
                         q.unit_address(warp_row() + lane() % 16, 16 * i + lane() / 16 * 8));
      }
    }
  }

  // e4m3: what FwdSm90Halves asks for.
  __device__ __forceinline__ const FwdSm90PagedParams& pages() const {
    return static_cast<const FwdSm90PagedParams&>(p);
  }

  // Starts s = q k^T.
  __device__ __forceinline__ void start_scores(Scores& s, const Q& q, const K& k) const {
    using Product = ptx::Wgmma<C::block_n / K::kParts, kType>;
    const unsigned long long a = q.k_major();
    const unsigned long long b = k.k_major();
    ptx::wgmma_pin(flat(s));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::head_dim / 16; ++i) {
#pragma unroll
      for (int part = 0; part < K::kParts; ++part) {
        auto& d = flat_part<K::kParts>(s, part);
        const unsigned long long keys = b + K::k_major_offset(i, part);
        if constexpr (C::q_registers) {
          Product::template rs<0>(d, query[i], keys, i != 0);
        } else {
          Product::template ss<0, 0>(d, a + Q::k_major_offset(i), keys, i != 0);
        }
      }
    }
    ptx::wgmma_commit_group();
  }

  // Starts out += p v.
  __device__ __forceinline__ void start_out(const V& v) {
    const unsigned long long b = v.as_values();
    ptx::wgmma_pin(flat(out));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::block_n / 16; ++i) {
      ptx::Wgmma<C::value_dim, kType>::template rs<V::kTransposed>(
          flat(out), operand[i], b + V::as_values_offset(i), true);
    }
    ptx::wgmma_commit_group();
  }

  // Until all but the last kPending products are done: their results may be used.
  template <int kPending>
  __device__ __forceinline__ void finish_scores(Scores& s) const {
    ptx::wgmma_wait_group<kPending>();
    ptx::wgmma_pin(flat(s));
  }
  template <int kPending>
  __device__ __forceinline__ void finish_out() {
    ptx::wgmma_wait_group<kPending>();
    ptx::wgmma_pin(flat(out));
  }

  // Products of rows from `row` on with the keys from `first_key` on become probabilities, and
  // enter max and sum; `out` waits for rescale(). With `overlap`, of a thread's two rows only the
  // first: score_rest() does the second.
  __device__ __forceinline__ void score(Scores& s, const FwdSm90Tile& t, int row, int first_key,
                                        bool masked, float slope_log2) {
    const int warp_first = row + warp_row();
    const auto mask = [&] {
      if (masked) mask_scores<false, K::kParts>(s, seen(t), warp_first, first_key, lane());
    };
    if constexpr (C::softcap) {
      cap(s, mask);
      return;
    }
    if constexpr (C::scores && C::e4m3) halves.scale(s);
    if constexpr (C::scores) {
      modify_scores<K::kParts>(s, p, slope_log2, t.k_len - t.q_len, warp_first, first_key, lane());
    }
    mask();
    softmax.template find_maxima<kSettle>(alpha, s);
    softmax.template raise_maxima<kSettle>(alpha, [&](int half) { return scaled(half); });
    softmax.accumulate(alpha, s, 0, 0, scaled(0));
    if constexpr (!C::overlap) softmax.accumulate(alpha, s, 0, 1, scaled(1));
  }
  // The same with a softcap. Mostly all products of a warp are near, and each row has, or had, one
  // that is positive: then maxima take half of the instructions, and scores a fifth.
  template <class Mask>
  __device__ __forceinline__ void cap(Scores& s, const Mask& mask) {
    bool quick = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      quick &= negative_bits(s, 0, half) < __float_as_uint(-p.fold_near);
    }
    mask();
    int top[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = positive_bits(s, 0, half);
      const bool known = top[half] >= 0 || softmax.max[0][half] >= 0.f;
      quick &= known && top[half] < __float_as_int(p.fold_near);
    }
    if (!__all_sync(0xffffffffu, quick)) {
      softmax.update_all_but_out(alpha, s, AnySoftCap(p));
      return;
    }
    const NearSoftCap score(p);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float largest = quad_max(__int_as_float(top[half]));
      alpha[0][half] = softmax.raise_max(0, half, largest, score);
      softmax.accumulate(alpha, s, 0, half, score);
    }
  }
  // What makes scores of products of one of the thread's rows.
  __device__ __forceinline__ Scaled scaled(int half) const {
    const float of_row = C::e4m3 ? halves.row_scale[half] : p.scale_log2;
    return {C::scores ? 1.f : of_row};
  }
  __device__ __forceinline__ void score_rest(Scores& s) {
    if constexpr (C::overlap && !C::softcap) softmax.accumulate(alpha, s, 0, 1, scaled(1));
  }

  // In place of softmax.rescale: the longer a row, the more seldom its maximum rises, and alpha is
  // 1 otherwise.
  __device__ __forceinline__ void rescale() {
#pragma unroll
    for (int i = 0; i < C::value_dim / 2; ++i) {
      flat(out)[i] = ptx::mul_unless_one(flat(out)[i], alpha[0][i / 2 % 2]);
    }
  }

  // The A operand of 16 keys: probabilities, in accumulator layout, are only renamed. Their two
  // tiles are neighbours, or each in another product.
  __device__ __forceinline__ void pack(const Scores& s) {
#pragma unroll
    for (int step = 0; step < C::block_n / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int tile = tile_of<K::kParts, C::block_n / 8>(2 * step + i / 2);
        const float* pair = &s[0][tile][2 * (i % 2)];
        operand[step][i] = Element::pack(pair[0], pair[1]);
      }
    }
  }

  __device__ __forceinline__ float slope_log2(const FwdSm90Tile& t) const {
    if (!C::scores || p.alibi_slopes == nullptr) return 0.f;
    return to_log2(p.alibi_slopes[t.batch * p.stride_alibi_batch + t.q_head]);
  }

  // What `out` is to be multiplied by, for both rows of the thread; writes lse. `row` is the first
  // of the warpgroup's, in the sequence.
  __device__ __forceinline__ void finish(float (&factor)[2], const FwdSm90Tile& t, int row) {
    const float sink_log2 = p.sink != nullptr ? to_log2(p.sink[t.q_head]) : kEmptyMax;
    float* lse = p.lse == nullptr ? nullptr
                                  : p.lse + t.q_head * p.stride_lse_head +
                                        t.batch * p.stride_lse_batch + t.q_first;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int thread_row = row + warp_row() + 8 * half + lane() / 4;
      softmax.sum[0][half] = quad_sum(softmax.sum[0][half]);
      const FinishedRow end = softmax.finish(0, half, sink_log2);
      factor[half] = end.factor();
      if (C::e4m3) factor[half] *= FwdSm90Halves<C>::v_scale(pages(), t);
      const float row_lse = end.lse();
      if (lse != nullptr && lane() % 4 == 0 && thread_row < t.q_len) lse[thread_row] = row_lse;
    }
  }

  // Two neighbours of `out`, finished.
  __device__ __forceinline__ unsigned packed_out(int ot, int half, const float (&factor)[2]) const {
    const float* pair = &out[0][ot][2 * half];
    const float left = pair[0] * factor[half], right = pair[1] * factor[half];
    if (C::e4m3 && pages().q_bf16 != 0) return bf16::pack(left, right);
    return Element::pack(left, right);
  }

  // Leaves `out` in the place of q, for a tensor copy.
  __device__ __forceinline__ void stage_out(const float (&factor)[2], const Q& staging) const {
#pragma unroll
    for (int i = 0; i < C::value_dim / 16; ++i) {
      unsigned r[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const unsigned packed = packed_out(2 * i + j / 2, j % 2, factor);
        r[j] = factor[j % 2] == 0.f ? 0 : packed;  // see clear_empty_rows
      }
      ptx::stmatrix_x4(staging.unit_address(warp_row() + lane() % 16, 16 * i + lane() / 16 * 8), r);
    }
    ptx::fence_proxy_async();
  }

  // Rows without keys, whose factor is 0. Other rows may have met a NaN in v: times 0 it would be
  // NaN in these too.
  __device__ __forceinline__ void clear_empty_rows(const float (&factor)[2]) {
    if (!__any_sync(0xffffffffu, factor[0] == 0.f || factor[1] == 0.f)) return;
#pragma unroll
    for (int i = 0; i < C::value_dim / 2; ++i) {
      if (factor[i / 2 % 2] == 0.f) flat(out)[i] = 0.f;
    }
  }

  // Stores `out` from registers, clipped to q_len rows and value_dim columns. Two lanes swap halves
  // of 16 columns, so that a lane stores 4 neighbours and a quad 32 bytes of a row, which is what
  // L2 takes as a whole.
  __device__ __forceinline__ void store_out(const float (&factor)[2], const FwdSm90Tile& t,
                                            int row) {
    clear_empty_rows(factor);
    const bool odd = lane() % 2 != 0;
    const int first_col = 8 * (lane() % 2) + 4 * (lane() % 4 / 2);
    auto* base = static_cast<unsigned short*>(p.out) + t.batch * p.stride_out_batch +
                 t.q_head * p.stride_out_head + first_col;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int thread_row = row + warp_row() + 8 * half + lane() / 4;
      unsigned short* dst = base + (t.q_first + thread_row) * p.stride_out_row;
#pragma unroll
      for (int col = 0; col < C::value_dim; col += 16) {
        const unsigned left = packed_out(col / 8, half, factor);
        const unsigned right = packed_out(col / 8 + 1, half, factor);
        const unsigned got = __shfl_xor_sync(0xffffffffu, odd ? left : right, 1);
        if (thread_row < t.q_len && col + first_col < p.value_dim) {
          *reinterpret_cast<uint2*>(dst + col) =
              odd ? make_uint2(got, right) : make_uint2(left, got);
        }
      }
    }
  }
};
