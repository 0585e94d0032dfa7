// SPDX-License-Identifier: Apache-2.0
// What lies between q k^T and the softmax: scale, softcap, ALiBi.
#pragma once

#include "mask.cuh"
#include "params.cuh"
#include "softmax.cuh"
#include "types.cuh"

// c tanh(s / c) to 1e-6 of itself, in log2 units. tanhf took longer than all else that is done for
// a score, and has a branch.
struct SoftCap {
  static constexpr float kNear = 1.4f;
  float cap;
  float power;  // z = x power is 2 log2(e) s / c

  // `unit`: s of x = 1, in log2 units.
  __device__ __forceinline__ SoftCap(float cap_log2, float unit)
      : cap(cap_log2), power(2.f * kLog2e * ptx::rcp_approx(cap_log2) * unit) {}

  // Where |z| < kNear, |s| < 0.485 c: an odd polynomial, minimax to 4e-7.
  static __device__ __forceinline__ float near_tanh(float z) {
    const float z2 = z * z;
    const float q = fmaf(fmaf(-2.6961487e-05f, z2, 0.00066027214f), z2, -0.013873561f);
    return z * fmaf(q, z2, 0.34657344f);
  }
  __device__ __forceinline__ float near(float x) const {
    return __fmul_rn(cap, near_tanh(x * power));
  }

  // Anywhere. Near 0, 1 - 2 / (1 + 2^|z|) would cancel.
  __device__ __forceinline__ float operator()(float x) const {
    const float z = x * power;
    const float far = fmaf(-2.f, ptx::rcp_approx(1.f + ptx::ex2_approx(fabsf(z))), 1.f);
    return __fmul_rn(cap, fabsf(z) < kNear ? near_tanh(z) : copysignf(far, z));
  }
};

// Softcap alone between q k^T and the mask, as OnlineSoftmax takes scores: the scale and it are
// folded into the exponent, three operations a score where SoftCap and a product take nine. To 2e-6
// of itself; the numbers are made by rawattn/softcap.py. -inf, a hidden key, stays.
struct NearSoftCap {  // |x| < p.fold_near
  float x1, x3, x5;

  __device__ __forceinline__ explicit NearSoftCap(const FwdParams& p)
      : x1(p.fold_x), x3(p.fold_x3), x5(p.fold_x5) {}

  __device__ __forceinline__ float factor(float x) const {
    const float square = x * x;
    return fmaf(fmaf(x5, square, x3), square, x1);
  }
  __device__ __forceinline__ float operator()(float x) const { return __fmul_rn(x, factor(x)); }
  __device__ __forceinline__ float above(float x, float max) const {
    return fmaf(x, factor(x), -max);
  }
};
// Any x. Near 0 it has the bits of NearSoftCap: 1 - 2 / (1 + e^2u) would cancel.
struct AnySoftCap {
  NearSoftCap near;
  float limit, power, cap;

  __device__ __forceinline__ explicit AnySoftCap(const FwdParams& p)
      : near(p), limit(p.fold_near), power(p.fold_power), cap(p.softcap_log2) {}

  // The score, as two factors.
  __device__ __forceinline__ float2 split(float x) const {
    const bool is_near = fabsf(x) < limit;
    const float tanh = fmaf(-2.f, ptx::rcp_approx(1.f + ptx::ex2_approx(fabsf(x) * power)), 1.f);
    return {is_near || x == kEmptyMax ? x : copysignf(cap, x), is_near ? near.factor(x) : tanh};
  }
  __device__ __forceinline__ float operator()(float x) const {
    const float2 score = split(x);
    return __fmul_rn(score.x, score.y);
  }
  __device__ __forceinline__ float above(float x, float max) const {
    const float2 score = split(x);
    return fmaf(score.x, score.y, -max);
  }
};

// Products s (rows of a warp) x (keys) in mma accumulator layout (mask.cuh) become scores in log2
// units: softcap or scale, then ALiBi with the slope `slope_log2`; the diagonal of row i is key
// i + k_minus_q. All is rounded as written: what ptxas fuses differs between the copies of a step,
// and a score's bits must not depend on whether its key tile has a mask.
template <int kParts = 1, int kMTiles, int kNTiles>
__device__ __forceinline__ void modify_scores(float (&s)[kMTiles][kNTiles][4], const FwdParams& p,
                                              float slope_log2, int k_minus_q, int warp_row,
                                              int first_key, int lane) {
  const auto each = [&](const auto& modified) {
#pragma unroll
    for (int i = 0; i < 4 * kMTiles * kNTiles; ++i) {
      float& x = s[i / (4 * kNTiles)][i / 4 % kNTiles][i % 4];
      x = modified(x, i);
    }
  };
  // A branch for all scores, not one each: those take longer, also to compile.
  float scale = p.scale_log2;
  if (p.softcap_log2 > 0.f) {
    const SoftCap capped(p.softcap_log2, scale);
    float top = 0.f;
    each([&](float x, int) {
      top = fmaxf(top, fabsf(x));
      return x;
    });
    // Mostly no score of a warp comes near c: the same bits for half of the instructions. On sm_100
    // both forms at once would spill, at head_dim 64 with narrow copies.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
    const bool high = true;
#else
    const bool high = __any_sync(0xffffffffu, top * fabsf(capped.power) >= SoftCap::kNear);
#endif
    if (high) {
      each([&](float x, int) { return capped(x); });
    } else {
      each([&](float x, int) { return capped.near(x); });
    }
    scale = 1.f;
  }
  if (p.alibi_slopes != nullptr) {
    const int first = warp_row + lane / 4 + k_minus_q - (first_key + 2 * (lane % 4));
    each([&](float x, int i) {
      const int mt = i / (4 * kNTiles), nt = i / 4 % kNTiles, e = i % 4;
      const float diagonal = static_cast<float>(first + 16 * mt + 8 * (e / 2));
      const int key = first_key_of<kParts, kNTiles>(nt) + e % 2;
      const float distance = fabsf(diagonal - static_cast<float>(key));
      return fmaf(x, scale, -__fmul_rn(slope_log2, distance));
    });
  } else if (scale != 1.f) {
    each([&](float x, int) { return __fmul_rn(x, scale); });
  }
}
