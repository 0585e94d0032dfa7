// SPDX-License-Identifier: Apache-2.0
// Storage types of tensors. Arithmetic is float32; tensor cores take 16-bit pairs packed in 32-bit
// registers.
#pragma once

#include "ptx_sm80.cuh"

struct alignas(2) bf16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    return ptx::cvt_bf16x2(lo, hi);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
};

struct alignas(2) fp16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    return ptx::cvt_f16x2(lo, hi);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLargest = 3.402823466e38f;
constexpr float kLn2 = 0.6931471805599453f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Compile-time flags as arguments: `step(True{}, n)`.
struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};
