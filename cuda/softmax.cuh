// SPDX-License-Identifier: Apache-2.0
// Online softmax over rows held in mma accumulator layout, and what a row without keys means. Log2
// units throughout.
//
// State of a row: max, the largest score so far; sum, of 2^(score - max) over the keys that this
// lane holds. `max` is kept as the rounded product that the exponents subtract, so every term of a
// row carries the same rounding and it cancels in out and lse.
#pragma once

#include "types.cuh"

// The max of no scores. Subtracting it would make NaN of -inf - -inf: exponents use finite_max()
// instead, which leaves all others as they are.
constexpr float kEmptyMax = __builtin_bit_cast(float, 0xff800000u);  // -inf

__device__ __forceinline__ float finite_max(float max) { return fmaxf(max, -kLargest); }

// A finite number of natural units stays finite in log2 units.
__device__ __forceinline__ float to_log2(float x) { return fminf(x * kLog2e, kLargest); }

// A row after its last key, with the max and sum of all of them. A sink (log2 units, -inf where
// there is none) joins the sum. A row without keys gets factor 0 and lse = sink.
struct FinishedRow {
  float max, rescale, sum;

  __device__ __forceinline__ FinishedRow(float keys_max, float keys_sum, float sink_log2)
      : max(finite_max(fmaxf(keys_max, sink_log2))),
        rescale(ptx::ex2_approx(keys_max - max)),
        sum(keys_sum * rescale + ptx::ex2_approx(sink_log2 - max)) {}

  // What to multiply `out` by.
  __device__ __forceinline__ float factor() const {
    return sum == 0.f ? 0.f : rescale * ptx::rcp_approx(sum);
  }
  // In natural units.
  __device__ __forceinline__ float lse() const {
    return sum == 0.f ? kEmptyMax : (max + ptx::lg2_approx(sum)) * kLn2;
  }
};

// Reductions over the four lanes that share a row.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int kMTiles>
struct OnlineSoftmax {
  float max[kMTiles][2];
  float sum[kMTiles][2];

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      max[i / 2][i % 2] = kEmptyMax;
      sum[i / 2][i % 2] = 0.f;
    }
  }

  // Scores s, where score = s * scale_log2 with scale_log2 > 0, become probabilities 2^(score -
  // max) in place; `out`, the sum of probabilities times values so far, is rescaled to the new max.
  // `share_max` combines the largest s of each row with those of warps that hold other keys of the
  // row. With kVote a warp skips the rescaling where it would multiply by one throughout.
  template <bool kVote, int kNTiles, int kOutTiles, class ShareMax>
  __device__ __forceinline__ void update(float (&s)[kMTiles][kNTiles][4],
                                         float (&out)[kMTiles][kOutTiles][4], float scale_log2,
                                         const ShareMax& share_max) {
    float alpha[kMTiles][2];  // first the largest s of each row
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) alpha[i / 2][i % 2] = largest(s, i / 2, i % 2);
    share_max(alpha);
    bool changed = false;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      alpha[i / 2][i % 2] = raise_max(i / 2, i % 2, alpha[i / 2][i % 2], scale_log2);
      changed |= alpha[i / 2][i % 2] != 1.f;
    }
    if (!kVote || __any_sync(0xffffffffu, changed)) {
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) sum[i / 2][i % 2] *= alpha[i / 2][i % 2];
      rescale(out, alpha);
    }
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) exponentiate(i / 2, i % 2, s, scale_log2);
  }

  // The same but for `out`, which the caller has to multiply by alpha later. Row by row, so that
  // the exponentials of one run beside the max of the next.
  template <int kNTiles>
  __device__ __forceinline__ void update_all_but_out(float (&alpha)[kMTiles][2],
                                                     float (&s)[kMTiles][kNTiles][4],
                                                     float scale_log2) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        alpha[mt][half] = raise_max(mt, half, largest(s, mt, half), scale_log2);
        accumulate(alpha, s, mt, half, scale_log2);
      }
    }
  }

  // Its two parts, for a caller who puts something between the exponentials of two rows.
  template <int kNTiles>
  __device__ __forceinline__ void raise_maxima(float (&alpha)[kMTiles][2],
                                               const float (&s)[kMTiles][kNTiles][4],
                                               float scale_log2) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      const float found = largest(s, i / 2, i % 2);
      alpha[i / 2][i % 2] = raise_max(i / 2, i % 2, found, scale_log2);
    }
  }
  template <int kNTiles>
  __device__ __forceinline__ void accumulate(const float (&alpha)[kMTiles][2],
                                             float (&s)[kMTiles][kNTiles][4], int mt, int half,
                                             float scale_log2) {
    const float before = sum[mt][half];
    sum[mt][half] = 0.f;
    exponentiate(mt, half, s, scale_log2);
    sum[mt][half] = fmaf(before, alpha[mt][half], sum[mt][half]);
  }

  // Of a row: the largest s, over the four lanes that share it.
  template <int kNTiles>
  static __device__ __forceinline__ float largest(const float (&s)[kMTiles][kNTiles][4], int mt,
                                                  int half) {
    float even = s[mt][0][2 * half];
    float odd = s[mt][0][2 * half + 1];
#pragma unroll
    for (int nt = 1; nt < kNTiles; ++nt) {
      even = fmaxf(even, s[mt][nt][2 * half]);
      odd = fmaxf(odd, s[mt][nt][2 * half + 1]);
    }
    return quad_max(fmaxf(even, odd));
  }

  // Returns alpha.
  __device__ __forceinline__ float raise_max(int mt, int half, float largest, float scale_log2) {
    const float old_max = max[mt][half];
    max[mt][half] = fmaxf(old_max, largest * scale_log2);
    return ptx::ex2_approx(old_max - finite_max(max[mt][half]));
  }

  template <int kOutTiles>
  static __device__ __forceinline__ void rescale(float (&out)[kMTiles][kOutTiles][4],
                                                 const float (&alpha)[kMTiles][2]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int ot = 0; ot < kOutTiles; ++ot) {
          out[mt][ot][2 * half] *= alpha[mt][half];
          out[mt][ot][2 * half + 1] *= alpha[mt][half];
        }
      }
    }
  }

  // Of a row: s becomes probabilities, which join the sum.
  template <int kNTiles>
  __device__ __forceinline__ void exponentiate(int mt, int half, float (&s)[kMTiles][kNTiles][4],
                                               float scale_log2) {
    const float used_max = finite_max(max[mt][half]);
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
      float* pair = &s[mt][nt][2 * half];
      pair[0] = ptx::ex2_approx(fmaf(pair[0], scale_log2, -used_max));
      pair[1] = ptx::ex2_approx(fmaf(pair[1], scale_log2, -used_max));
      sum[mt][half] += pair[0] + pair[1];
    }
  }

  // With `sum` that of all lanes of the row.
  __device__ __forceinline__ FinishedRow finish(int mt, int half, float sink_log2) const {
    return {max[mt][half], sum[mt][half], sink_log2};
  }
};
