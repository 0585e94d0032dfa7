// SPDX-License-Identifier: Apache-2.0
// The PTX instructions of sm_89 and newer that kernels use: conversions with 8-bit floats. One
// instruction a function, named after it, no logic.
#pragma once

#include "ptx_sm80.cuh"

namespace ptx {

// ---- Conversions (PTX ISA: cvt). `lo` lands in bits 0-7; out of range becomes the largest finite
// value. ----
__device__ __forceinline__ unsigned short cvt_e4m3x2(float lo, float hi) {
  unsigned short d;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}
__device__ __forceinline__ unsigned short cvt_e5m2x2(float lo, float hi) {
  unsigned short d;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(hi), "f"(lo));
  return d;
}
// Of bits 0-15, and 16-31, of x, where ptxas would shift an unsigned short first.
__device__ __forceinline__ unsigned cvt_f16x2_e4m3x2_low(unsigned x) {
  unsigned d;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, low;\n}"
      : "=r"(d)
      : "r"(x));
  return d;
}
__device__ __forceinline__ unsigned cvt_f16x2_e4m3x2_high(unsigned x) {
  unsigned d;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.rn.f16x2.e4m3x2 %0, high;\n}"
      : "=r"(d)
      : "r"(x));
  return d;
}

}  // namespace ptx
