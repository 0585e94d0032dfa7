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
  const float cap = p.softcap_log2;
  const float scale_over_cap = cap > 0.f ? p.scale_log2 / cap : 0.f;
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = warp_row + 16 * mt + 8 * (e / 2) + lane / 4;
        const int key = first_key + 8 * nt + 2 * (lane % 4) + e % 2;
        float x = s[mt][nt][e];
        x = cap > 0.f ? __fmul_rn(cap, tanhf(x * scale_over_cap)) : __fmul_rn(x, p.scale_log2);
        // Rounded as written: what ptxas fuses differs between the copies of this loop, and a
        // score's bits must not depend on whether its key tile has a mask.
        s[mt][nt][e] = fmaf(-slope_log2, fabsf(static_cast<float>(row + k_minus_q - key)), x);
      }
    }
  }
}
