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

// What makes a score of s, here s * scale with scale > 0: itself, and less the row's max, rounded
// once. Larger s must have larger scores.
struct Scaled {
  float scale;
  __device__ __forceinline__ float operator()(float s) const { return s * scale; }
  __device__ __forceinline__ float above(float s, float max) const { return fmaf(s, scale, -max); }
};

// Of a row in accumulator layout, the largest of the bits of its s and `least`, as integers: one
// instruction finds the largest of three (VIMNMX3), where fmaxf takes one for each float.
template <class Int, int kMTiles, int kNTiles>
__device__ __forceinline__ Int largest_bits(const float (&s)[kMTiles][kNTiles][4], int mt, int half,
                                            Int least) {
  Int even = least, odd = least;
#pragma unroll
  for (int nt = 0; nt < kNTiles; nt += 2) {
    const int next = nt + 1 < kNTiles ? nt + 1 : nt;
    const auto bits = [&](int tile, int e) {
      return static_cast<Int>(__float_as_uint(s[mt][tile][2 * half + e]));
    };
    even = max(max(even, bits(nt, 0)), bits(next, 0));
    odd = max(max(odd, bits(nt, 1)), bits(next, 1));
  }
  return max(even, odd);
}
// Positive floats are ordered as integers. The largest s where some are positive, else -inf.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ int positive_bits(const float (&s)[kMTiles][kNTiles][4], int mt,
                                             int half) {
  return largest_bits<int>(s, mt, half, __float_as_int(kEmptyMax));
}
// Negative ones are, downwards, as unsigned integers, above all positive ones: the most negative s
// where some are negative, else the largest.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ unsigned negative_bits(const float (&s)[kMTiles][kNTiles][4], int mt,
                                                  int half) {
  return largest_bits<unsigned>(s, mt, half, 0u);
}

template <int kMTiles>
struct OnlineSoftmax {
  float max[kMTiles][2];
  float sum[kMTiles][2];
  bool settled = false;  // no max of the warp is negative; raise_maxima<true> keeps it

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      max[i / 2][i % 2] = kEmptyMax;
      sum[i / 2][i % 2] = 0.f;
    }
  }

  // s, of which `score` makes scores (Scaled), become probabilities 2^(score - max) in place;
  // `out`, the sum of probabilities times values so far, is rescaled to the new max.
  // `share_max` combines the largest s of each row with those of warps that hold other keys of the
  // row. With kVote a warp skips the rescaling where it would multiply by one throughout.
  template <bool kVote, int kNTiles, int kOutTiles, class Score, class ShareMax>
  __device__ __forceinline__ void update(float (&s)[kMTiles][kNTiles][4],
                                         float (&out)[kMTiles][kOutTiles][4], const Score& score,
                                         const ShareMax& share_max) {
    float alpha[kMTiles][2];  // first the largest s of each row
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) alpha[i / 2][i % 2] = largest(s, i / 2, i % 2);
    share_max(alpha);
    bool changed = false;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      alpha[i / 2][i % 2] = raise_max(i / 2, i % 2, alpha[i / 2][i % 2], score);
      changed |= alpha[i / 2][i % 2] != 1.f;
    }
    if (!kVote || __any_sync(0xffffffffu, changed)) {
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) sum[i / 2][i % 2] *= alpha[i / 2][i % 2];
      rescale(out, alpha);
    }
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) exponentiate(i / 2, i % 2, s, score);
  }

  // The same but for `out`, which the caller has to multiply by alpha later. Row by row, so that
  // the exponentials of one run beside the max of the next.
  template <int kNTiles, class Score>
  __device__ __forceinline__ void update_all_but_out(float (&alpha)[kMTiles][2],
                                                     float (&s)[kMTiles][kNTiles][4],
                                                     const Score& score) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        alpha[mt][half] = raise_max(mt, half, largest(s, mt, half), score);
        accumulate(alpha, s, mt, half, score);
      }
    }
  }

  // In three parts, for a caller who puts something between them. First alpha becomes the largest s
  // of each row. With kSettle, once `settled`, in half of the instructions, and -inf for a row
  // without positive s, which does not raise its max either.
  template <bool kSettle, int kNTiles>
  __device__ __forceinline__ void find_maxima(float (&alpha)[kMTiles][2],
                                              const float (&s)[kMTiles][kNTiles][4]) const {
    if (kSettle && settled) {
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) {
        alpha[i / 2][i % 2] = quad_max(__int_as_float(positive_bits(s, i / 2, i % 2)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) alpha[i / 2][i % 2] = largest(s, i / 2, i % 2);
    }
  }
  // `score_of(half)` is that of a row.
  template <bool kSettle, class ScoreOf>
  __device__ __forceinline__ void raise_maxima(float (&alpha)[kMTiles][2],
                                               const ScoreOf& score_of) {
    bool negative = false;
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      alpha[i / 2][i % 2] = raise_max(i / 2, i % 2, alpha[i / 2][i % 2], score_of(i % 2));
      negative |= max[i / 2][i % 2] < 0.f;
    }
    if (kSettle && !settled) settled = !__any_sync(0xffffffffu, negative);
  }
  template <int kNTiles, class Score>
  __device__ __forceinline__ void accumulate(const float (&alpha)[kMTiles][2],
                                             float (&s)[kMTiles][kNTiles][4], int mt, int half,
                                             const Score& score) {
    const float before = sum[mt][half];
    sum[mt][half] = 0.f;
    exponentiate(mt, half, s, score);
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
  template <class Score>
  __device__ __forceinline__ float raise_max(int mt, int half, float largest, const Score& score) {
    const float old_max = max[mt][half];
    max[mt][half] = fmaxf(old_max, score(largest));
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
  template <int kNTiles, class Score>
  __device__ __forceinline__ void exponentiate(int mt, int half, float (&s)[kMTiles][kNTiles][4],
                                               const Score& score) {
    const float used_max = finite_max(max[mt][half]);
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
      float* pair = &s[mt][nt][2 * half];
      pair[0] = ptx::ex2_approx(score.above(pair[0], used_max));
      pair[1] = ptx::ex2_approx(score.above(pair[1], used_max));
      sum[mt][half] += pair[0] + pair[1];
    }
  }

  // With `sum` that of all lanes of the row.
  __device__ __forceinline__ FinishedRow finish(int mt, int half, float sink_log2) const {
    return {max[mt][half], sum[mt][half], sink_log2};
  }
};
