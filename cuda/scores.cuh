// SPDX-License-Identifier: Apache-2.0
// What lies between q k^T and the softmax: scale, softcap, ALiBi.
#pragma once

#include "params.cuh"
#include "types.cuh"

// Products s (rows of a warp) x (keys) in mma accumulator layout (mask.cuh) become scores in log2
// units. `slope_log2` is the ALiBi slope, 0 where there is none; the diagonal of row i is key
// i + k_minus_q.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void modify_scores(float (&s)[kMTiles][kNTiles][4], const FwdParams& p,
                                              float slope_log2, int k_minus_q, int warp_row,
                                              int first_key, int lane) {
  // Rounded as written: what ptxas fuses differs between the copies of this loop, and a score's
  // bits must not depend on whether its key tile has a mask.
  const auto each = [&](const auto& scaled) {
#pragma unroll
    for (int i = 0; i < 4 * kMTiles * kNTiles; ++i) {
      const int mt = i / (4 * kNTiles), nt = i / 4 % kNTiles, e = i % 4;
      const int row = warp_row + 16 * mt + 8 * (e / 2) + lane / 4;
      const int key = first_key + 8 * nt + 2 * (lane % 4) + e % 2;
      const float distance = fabsf(static_cast<float>(row + k_minus_q - key));
      s[mt][nt][e] = fmaf(-slope_log2, distance, scaled(s[mt][nt][e]));
    }
  };
  // One branch, not one a score: that takes longer, also to compile.
  if (p.softcap_log2 > 0.f) {
    const float scale_over_cap = p.scale_log2 / p.softcap_log2;
    each([&](float x) { return __fmul_rn(p.softcap_log2, tanhf(x * scale_over_cap)); });
  } else {
    each([&](float x) { return __fmul_rn(x, p.scale_log2); });
  }
}
