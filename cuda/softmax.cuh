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
// instead.
constexpr float kEmptyMax = __builtin_bit_cast(float, 0xff800000u);  // -inf

__device__ __forceinline__ float finite_max(float max) { return max == kEmptyMax ? 0.f : max; }

// A finite number of natural units stays finite in log2 units.
__device__ __forceinline__ float to_log2(float x) { return fminf(x * kLog2e, kLargest); }

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
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float row_max = s[mt][0][2 * half];
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) {
          row_max = fmaxf(row_max, fmaxf(s[mt][nt][2 * half], s[mt][nt][2 * half + 1]));
        }
        alpha[mt][half] = quad_max(row_max);
      }
    }
    share_max(alpha);
    bool changed = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float old_max = max[mt][half];
        max[mt][half] = fmaxf(old_max, alpha[mt][half] * scale_log2);
        alpha[mt][half] = ptx::ex2_approx(old_max - finite_max(max[mt][half]));
        changed |= alpha[mt][half] != 1.f;
      }
    }
    if (!kVote || __any_sync(0xffffffffu, changed)) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          sum[mt][half] *= alpha[mt][half];
#pragma unroll
          for (int ot = 0; ot < kOutTiles; ++ot) {
            out[mt][ot][2 * half] *= alpha[mt][half];
            out[mt][ot][2 * half + 1] *= alpha[mt][half];
          }
        }
      }
    }
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float used_max = finite_max(max[mt][half]);
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s[mt][nt][e] = ptx::ex2_approx(fmaf(s[mt][nt][e], scale_log2, -used_max));
            sum[mt][half] += s[mt][nt][e];
          }
        }
      }
    }
  }

  // After the last key, with `sum` that of the whole row: what to multiply `out` by, and the
  // natural-log lse. A sink (log2 units, -inf where there is none) joins the sum. A row without
  // keys gets factor 0 and lse = sink.
  __device__ __forceinline__ void finish(int mt, int half, float sink_log2, float& factor,
                                         float& lse) const {
    const float total_max = fmaxf(max[mt][half], sink_log2);
    const float used_max = finite_max(total_max);
    const float rescale = ptx::ex2_approx(max[mt][half] - used_max);
    const float total = sum[mt][half] * rescale + ptx::ex2_approx(sink_log2 - used_max);
    factor = total == 0.f ? 0.f : rescale * ptx::rcp_approx(total);
    lse = total == 0.f ? kEmptyMax : (used_max + ptx::lg2_approx(total)) * kLn2;
  }
};
