// SPDX-License-Identifier: Apache-2.0
// c = a b^T with the instructions of sm_80, for the emulator's tests: cp.async into two stages,
// ldmatrix, mma.sync. One warp a 16 x 16 tile. Rows past m are zeros and are not stored.
#include "ptx_sm80.cuh"

struct GemmParams {
  const unsigned short* a;  // [m][k]
  const unsigned short* b;  // [n][k], or [k][n] where kTransB
  float* c;                 // [m][n]
  int m, n, k;              // n, k: multiples of 16
};

#ifndef TRANS_B
#define TRANS_B 0
#endif
#ifndef MMA
#define MMA mma_m16n8k16_bf16
#endif

struct Stage {
  unsigned short a[16][24], b[16][24];
};

extern "C" __global__ void __launch_bounds__(32) gemm_sm80(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(16) Stage stages[];
  const int lane = threadIdx.x, m0 = 16 * blockIdx.x, n0 = 16 * blockIdx.y;
  auto load = [&](int step) {
    Stage& s = stages[step % 2];
    const int row = lane / 2, col = lane % 2 * 8, k0 = 16 * step;
    ptx::cp_async_16(ptx::shared_address(&s.a[row][col]), p.a + (m0 + row) * p.k + k0 + col,
                     m0 + row < p.m ? 16 : 0);
    const unsigned short* b =
        TRANS_B ? p.b + (k0 + row) * p.n + n0 + col : p.b + (n0 + row) * p.k + k0 + col;
    ptx::cp_async_16(ptx::shared_address(&s.b[row][col]), b, 16);
  };
  float d[2][4] = {};
  load(0);
  ptx::cp_async_commit_group();
  for (int step = 0; step < p.k / 16; ++step) {
    if (step + 1 < p.k / 16) load(step + 1);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<1>();
    __syncwarp();  // landed
    unsigned a[4], b[4];
    const Stage& s = stages[step % 2];
    ptx::ldmatrix_x4(a, ptx::shared_address(&s.a[lane % 16][lane / 16 * 8]));
    if (TRANS_B) {
      ptx::ldmatrix_x4_trans(b, ptx::shared_address(&s.b[lane % 16][lane / 16 * 8]));
    } else {
      ptx::ldmatrix_x4(b, ptx::shared_address(&s.b[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]));
    }
    ptx::MMA(d[0], a, b[0], b[1]);
    ptx::MMA(d[1], a, b[2], b[3]);
    __syncwarp();  // read
  }
  for (int i = 0; i < 2; ++i) {
    for (int e = 0; e < 4; ++e) {
      const int row = m0 + lane / 4 + e / 2 * 8, col = n0 + 8 * i + lane % 4 * 2 + e % 2;
      if (row < p.m) p.c[row * p.n + col] = d[i][e];
    }
  }
}
