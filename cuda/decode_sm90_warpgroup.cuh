// SPDX-License-Identifier: Apache-2.0
// What a warpgroup of decode_sm90 computes: the scores of a unit of keys for 64 rows, their
// probabilities, and their sum of values. Rows are the M of wgmma: warp w holds 16 w to 16 w + 15,
// of which lane l has l / 4 and l / 4 + 8, in the layout of mma.m16n8k16.
#pragma once

#include "decode_rows.cuh"
#include "mask.cuh"
#include "scores.cuh"
#include "softmax.cuh"
#include "tile_xmajor_sm90.cuh"

template <class C>
struct DecodeSm90Warpgroup {
  using Element = typename C::Element;
  using Q = SwizzledTile<C::rows, C::head_dim>;
  using Keys = typename CacheTiles<C::xmajor, C::unit, C::head_dim>::Keys;
  using Values = typename CacheTiles<C::xmajor, C::unit, C::head_dim>::Values;
  static constexpr ptx::WgmmaType kType = kWgmmaType<Element>;

  float out[1][C::head_dim / 8][4];  // unnormalised
  OnlineSoftmax<1> softmax;
  bool any;                // whether this warp has rows of the part
  int seen_from, seen_to;  // keys of this interval are seen by every row

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int row(int half) {
    return threadIdx.x / 32 % 4 * 16 + lane() / 4 + 8 * half;
  }

  // ---- A part begins ----

  __device__ __forceinline__ void begin(const DecodeSplitParams& p, const RowBlock<C>& rows) {
#pragma unroll
    for (int i = 0; i < C::head_dim / 2; ++i) out[0][i / 4][i % 4] = 0.f;
    softmax = OnlineSoftmax<1>();
    any = threadIdx.x / 32 % 4 * 16 < rows.count;
    rows.interval(p, seen_from, seen_to);
  }

  // ---- A unit ----

  // Attends to one unit of keys and values.
  __device__ __forceinline__ void attend(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                         const Q& q, const Keys& keys, Values& values,
                                         int first_key) {
    float s[1][C::unit / 8][4];
    score(s, q, keys);
    if (first_key + C::unit > rows.k_len) clear_tail(values, rows.k_len - first_key);
    if (any) {
      // A scale that is not positive turns maxima into minima: it has to come before them.
      const bool changed =
          p.softcap_log2 > 0.f || p.alibi_slopes != nullptr || !(p.scale_log2 > 0.f);
      if (changed) modify(p, rows, s, first_key);
      if (first_key < seen_from || first_key + C::unit > seen_to) mask(p, rows, s, first_key);
      softmax.template update<true>(s, out, Scaled{changed ? 1.f : p.scale_log2},
                                    [](float (&)[1][2]) {});
    } else {
#pragma unroll
      for (int i = 0; i < C::unit / 2; ++i) s[0][i / 4][i % 4] = 0.f;
    }
    accumulate(s, values);
  }

 private:
  // s = q k^T.
  static __device__ __forceinline__ void score(float (&s)[1][C::unit / 8][4], const Q& q,
                                               const Keys& keys) {
    const unsigned long long a = q.k_major(), b = keys.k_major();
    ptx::wgmma_pin(flat(s));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::head_dim / 16; ++i) {
#pragma unroll
      for (int part = 0; part < Keys::kParts; ++part) {
        ptx::Wgmma<C::unit / Keys::kParts, kType>::template ss<0, 0>(
            flat_part<Keys::kParts>(s, part), a + Q::k_major_offset(i),
            b + Keys::k_major_offset(i, part), i != 0);
      }
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(s));
  }

  // out += p v, where probabilities in accumulator layout are the A operand under another name.
  __device__ __forceinline__ void accumulate(const float (&s)[1][C::unit / 8][4],
                                             const Values& values) {
    constexpr int kSteps = C::unit / 16;
    unsigned operand[kSteps][4];
#pragma unroll
    for (int i = 0; i < C::unit / 4; ++i) {
      const int tile = tile_of<Keys::kParts, C::unit / 8>(i / 2);
      const float* pair = &s[0][tile][i % 2 * 2];
      operand[i / 4][i % 4] = Element::pack(pair[0], pair[1]);
    }
    const unsigned long long b = values.as_values();
    ptx::wgmma_pin(flat(out));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      ptx::Wgmma<C::head_dim, kType>::template rs<Values::kTransposed>(
          flat(out), operand[i], b + Values::as_values_offset(i), true);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    ptx::wgmma_pin(flat(out));
  }

  // Zeros instead of the values of tokens from `valid` on, which may be NaN: times a probability of
  // 0 that would be NaN. The fence orders them before the product, and the next copy.
  static __device__ __forceinline__ void clear_tail(Values& values, int valid) {
    values.clear_rows(valid, threadIdx.x % 128, 128);
    ptx::fence_proxy_async();
    ptx::bar_sync(1 + threadIdx.x / 128, 128);
  }

  // Scale, softcap, ALiBi.
  __device__ __forceinline__ void modify(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                         float (&s)[1][C::unit / 8][4], int first_key) const {
    if (p.softcap_log2 > 0.f) {
      const SoftCap capped(p.softcap_log2, p.scale_log2);
#pragma unroll
      for (int i = 0; i < C::unit / 2; ++i) s[0][i / 4][i % 4] = capped(s[0][i / 4][i % 4]);
    } else {
#pragma unroll
      for (int i = 0; i < C::unit / 2; ++i) {
        s[0][i / 4][i % 4] = __fmul_rn(s[0][i / 4][i % 4], p.scale_log2);
      }
    }
    if (p.alibi_slopes == nullptr) return;
    float diagonal[2];  // less the lane's first key
    float slope[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = rows.query(p, row(half));
      slope[half] = row(half) < rows.count ? rows.slope(p, row(half), query) : 0.f;
      diagonal[half] = static_cast<float>(query + rows.shift - first_key - lane_key());
    }
#pragma unroll
    for (int i = 0; i < C::unit / 2; ++i) {
      const int half = i % 4 / 2;
      const float distance = fabsf(diagonal[half] - static_cast<float>(key_of(i)));
      s[0][i / 4][i % 4] = fmaf(-slope[half], distance, s[0][i / 4][i % 4]);
    }
  }

  // Keys that a row does not see become -inf, whatever they held.
  __device__ __forceinline__ void mask(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                       float (&s)[1][C::unit / 8][4], int first_key) const {
    const int lane_first = first_key + lane_key();
    int from[2], to[2];  // what windows, causality and the length leave to a row; of key_of
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int diagonal = rows.query(p, row(half)) + rows.shift;
      from[half] = (p.window_left < 0 ? 0 : diagonal - p.window_left) - lane_first;
      const bool right = p.window_right >= 0 && p.tree_mask == nullptr;
      to[half] = (right ? min(rows.k_len, diagonal + p.window_right + 1) : rows.k_len) - lane_first;
    }
#pragma unroll
    for (int i = 0; i < C::unit / 2; ++i) {
      const int half = i % 4 / 2, key = key_of(i);
      if (key < from[half] || key >= to[half]) s[0][i / 4][i % 4] = kEmptyMax;
    }
    if (p.tree_mask != nullptr) mask_tree(p, rows, s, lane_first, to);
  }

  // And those that the tree hides.
  __device__ __forceinline__ void mask_tree(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                            float (&s)[1][C::unit / 8][4], int lane_first,
                                            const int (&to)[2]) const {
    const int first_new = rows.shift - lane_first;  // key
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row(half) >= rows.count) continue;  // the mask has no such row
      const unsigned char* tree = rows.tree_row(p, rows.query(p, row(half))) - first_new;
#pragma unroll
      for (int i = 0; i < C::unit / 4; ++i) {
        const int key = key_of(i / 2 * 4 + i % 2);
        if (key >= first_new && key < to[half] && tree[key] == 0) {
          s[0][i / 2][2 * half + i % 2] = kEmptyMax;
        }
      }
    }
  }

  // The keys of a lane: its first, of a unit, and that of score i from there on.
  static __device__ __forceinline__ int lane_key() { return lane() % 4 * 2; }
  static __device__ __forceinline__ int key_of(int i) {
    return first_key_of<Keys::kParts, C::unit / 8>(i / 4) + i % 2;
  }
};
