// SPDX-License-Identifier: Apache-2.0
// c = a b^T with the instructions of sm_90, for the emulator's tests: a producer warp fills a ring
// of stages by TMA, a warpgroup multiplies with wgmma and leaves by TMA. A block computes 64 x kN;
// the two blocks of a cluster share b, of which each loads one half for both.
#include "ptx_sm90_tma.cuh"
#include "ptx_sm90_wgmma.cuh"

struct GemmParams {
  ptx::TensorMap a;  // [m][k], box 64 x 64
  ptx::TensorMap b;  // [n][k], box kN / kCluster x 64
  ptx::TensorMap c;  // [m][n], box 64 x 64
  int steps;         // k / 64, rounded up
};

constexpr int kN = 64, kStages = 2, kCluster = 2;

struct alignas(1024) Smem {
  unsigned short a[kStages][64 * 64];
  unsigned short b[kStages][kN * 64];
  unsigned short c[64 * kN];
  unsigned long long full[kStages], empty[kStages];
};

__device__ __forceinline__ void wait(unsigned bar, int parity) {
  while (!ptx::mbarrier_try_wait(bar, parity)) {
  }
}

__device__ __forceinline__ void produce(const GemmParams& p, Smem& s) {
  const int rank = ptx::cluster_ctarank();
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages, parity = step / kStages % 2;
    const unsigned full = ptx::shared_address(&s.full[stage]);
    wait(ptx::shared_address(&s.empty[stage]), parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, 64 * 64 * 2 + kN * 64 * 2);
    ptx::tma_load_2d(ptx::shared_address(s.a[stage]), &p.a, full, 64 * step, 64 * blockIdx.x);
    ptx::tma_load_multicast_2d(ptx::shared_address(s.b[stage] + rank * kN / kCluster * 64), &p.b,
                               full, 3, 64 * step, kN * blockIdx.y + rank * kN / kCluster);
  }
}

__device__ __forceinline__ void consume(const GemmParams& p, Smem& s) {
  float d[kN / 2];
  for (int step = 0; step < p.steps; ++step) {
    const int stage = step % kStages, parity = step / kStages % 2;
    wait(ptx::shared_address(&s.full[stage]), parity);
    const unsigned a = ptx::shared_address(s.a[stage]), b = ptx::shared_address(s.b[stage]);
    const unsigned empty = ptx::shared_address(&s.empty[stage]);
    ptx::wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      ptx::Wgmma<kN, ptx::WgmmaType::bf16>::ss<0, 0>(
          d, ptx::wgmma_descriptor(a + 32 * k, 16, 1024, ptx::Swizzle::b128),
          ptx::wgmma_descriptor(b + 32 * k, 16, 1024, ptx::Swizzle::b128), step > 0 || k > 0);
    }
    ptx::wgmma_commit_group();
    ptx::wgmma_wait_group<0>();
    if (threadIdx.x < kCluster) ptx::mbarrier_arrive_cluster(ptx::mapa(empty, threadIdx.x));
  }
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
  for (int i = 0; i < kN / 16; ++i) {
    const unsigned r[4] = {
        ptx::cvt_bf16x2(d[8 * i], d[8 * i + 1]), ptx::cvt_bf16x2(d[8 * i + 2], d[8 * i + 3]),
        ptx::cvt_bf16x2(d[8 * i + 4], d[8 * i + 5]), ptx::cvt_bf16x2(d[8 * i + 6], d[8 * i + 7])};
    ptx::stmatrix_x4(
        ptx::shared_address(s.c) + row * 128 + ((32 * i + lane / 16 * 16) ^ (row % 8 * 16)), r);
  }
  ptx::fence_proxy_async();
  ptx::bar_sync(1, 128);
  if (threadIdx.x == 0) {
    ptx::tma_store_2d(&p.c, ptx::shared_address(s.c), kN * blockIdx.y, 64 * blockIdx.x);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
  }
}

extern "C" __global__ void __launch_bounds__(160) gemm_sm90(const __grid_constant__ GemmParams p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& s = *reinterpret_cast<Smem*>(smem_bytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&s.full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&s.empty[i]), kCluster);
    }
    ptx::fence_mbarrier_init();
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x < 128) {
    consume(p, s);
  } else if (threadIdx.x == 128) {
    produce(p, s);
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();  // nobody leaves while the other may still write here
  ptx::barrier_cluster_wait();
}
