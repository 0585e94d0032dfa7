// SPDX-License-Identifier: Apache-2.0
// exp and log of float32 in additions and multiplications alone, each rounded to nearest: the same
// bits on every GPU, and on the emulator. For what is computed once a row; elsewhere the
// approximate instructions are faster.
#pragma once

#include "types.cuh"

// e^x for x <= 0, within 2 ulp; 0 from about -87.7 down, and for -inf. exact_exp(0) is 1.
__device__ __forceinline__ float exact_exp(float x) {
  constexpr float kLog2eRest = 1.9259630e-8f;  // what float32 leaves off kLog2e
  x = x < -88.f ? -88.f : x;                   // NaN stays NaN
  const int n = __float2int_rn(__fmul_rn(x, kLog2e));
  // e^x = 2^n 2^f, |f| <= 1/2
  const float f = fmaf(x, kLog2eRest, fmaf(x, kLog2e, -static_cast<float>(n)));
  // (2^f - 1) / f, minimax to 2e-9
  float q = 0.00015475897816941142f;
  q = fmaf(q, f, 0.0013400283642113209f);
  q = fmaf(q, f, 0.009618005715310574f);
  q = fmaf(q, f, 0.055503278970718384f);
  q = fmaf(q, f, 0.24022650718688965f);
  q = fmaf(q, f, 0.6931471824645996f);
  const float scale = __uint_as_float(static_cast<unsigned>(n + 127) << 23);  // 0 where n is -127
  return __fmul_rn(fmaf(q, f, 1.f), scale);
}

// log x for finite x >= 1, within 2 ulp of the larger of 1 and the result. exact_log(1) is 0.
__device__ __forceinline__ float exact_log(float x) {
  const unsigned bits = __float_as_uint(x);
  // x = 2^n (1 + t), sqrt(1/2) < 1 + t < sqrt(2)
  const int n = static_cast<int>(bits - 0x3f3504f3u) >> 23;
  const float t = __fsub_rn(__uint_as_float(bits - (static_cast<unsigned>(n) << 23)), 1.f);
  // log(1 + t) / t, minimax to 3e-8
  float q = 0.08959803730249405f;
  q = fmaf(q, t, -0.14482136070728302f);
  q = fmaf(q, t, 0.14917394518852234f);
  q = fmaf(q, t, -0.1654374599456787f);
  q = fmaf(q, t, 0.19958415627479553f);
  q = fmaf(q, t, -0.25002944469451904f);
  q = fmaf(q, t, 0.3333415985107422f);
  q = fmaf(q, t, -0.4999997913837433f);
  q = fmaf(q, t, 1.f);
  return fmaf(static_cast<float>(n), kLn2, __fmul_rn(q, t));
}
