// SPDX-License-Identifier: Apache-2.0
// One kernel an instruction of sm_90, for the emulator's tests. RANK, N, TYPE and the like are put
// in by the tests.
#include "ptx_sm90_tma.cuh"
#include "ptx_sm90_wgmma.cuh"

#ifndef RANK
#define RANK 2
#endif
#ifndef N
#define N 64
#endif
#ifndef TYPE
#define TYPE bf16
#endif
#ifndef TRANS_A
#define TRANS_A 0
#endif
#ifndef TRANS_B
#define TRANS_B 0
#endif
#ifndef A_IN_REGISTERS
#define A_IN_REGISTERS 0
#endif
#ifndef STORE
#define STORE tma_store
#endif

#define CAT(a, b) a##_##b##d
#define BY_RANK(name, rank) CAT(name, rank)

__device__ __forceinline__ void wait(unsigned bar, int parity) {
  while (!ptx::mbarrier_try_wait(bar, parity)) {
  }
}

// ---- A box goes in by TMA, is seen as it lies in shared memory, and leaves by TMA ----
struct BoxParams {
  ptx::TensorMap in, out;
  unsigned* seen;  // [bytes / 4]
  int in_at[5], out_at[5];
  int bytes;
};

#if RANK == 2
#define AT(c) c[0], c[1]
#elif RANK == 3
#define AT(c) c[0], c[1], c[2]
#elif RANK == 4
#define AT(c) c[0], c[1], c[2], c[3]
#else
#define AT(c) c[0], c[1], c[2], c[3], c[4]
#endif

extern "C" __global__ void box(const __grid_constant__ BoxParams p) {
  extern __shared__ __align__(1024) unsigned char data[];
  __shared__ unsigned long long bar;
  const unsigned full = ptx::shared_address(&bar);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.in);
    ptx::mbarrier_arrive_expect_tx(full, p.bytes);
    ptx::BY_RANK(tma_load, RANK)(ptx::shared_address(data), &p.in, full, AT(p.in_at));
  }
  __syncthreads();
  wait(full, 0);
  for (int i = threadIdx.x; i < p.bytes / 4; i += blockDim.x)
    p.seen[i] = reinterpret_cast<unsigned*>(data)[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::BY_RANK(STORE, RANK)(&p.out, ptx::shared_address(data), AT(p.out_at));
    ptx::bulk_commit_group();
    ptx::bulk_wait_group<0>();
  }
}

// ---- out[i] += x[i] + 1 by contiguous copies ----
struct BulkParams {
  const float* x;
  float* copy;
  float* sum;
  int n;
};
extern "C" __global__ void bulk(const __grid_constant__ BulkParams p) {
  extern __shared__ __align__(128) float floats[];
  const unsigned data = ptx::shared_address(floats);
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) floats[i] = p.x[i] + 1.f;
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::bulk_store(p.copy, data, 4 * p.n);
    ptx::bulk_reduce_add_f32(p.sum, data, 4 * p.n);
    ptx::bulk_commit_group();
    ptx::bulk_wait_group_read<0>();
  }
}

// ---- Clusters: each block hands 4 floats to the next one, and reads those of the one before it
struct RingParams {
  float* got;   // [blocks][4]: what the block before wrote here
  float* read;  // [blocks][4]: what is read from the block before
  float* sent;  // [blocks][4]: what the block before sent to a barrier here
};
extern "C" __global__ void ring(const __grid_constant__ RingParams p) {
  __shared__ float4 mine, given, arrived;
  __shared__ unsigned long long bar;
  const unsigned full = ptx::shared_address(&bar);
  const int rank = ptx::cluster_ctarank(), size = 4;
  if (threadIdx.x == 0) {
    mine = make_float4(rank, rank + 0.25f, rank + 0.5f, rank + 0.75f);
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x == 0) {
    ptx::st_shared_cluster(ptx::mapa(ptx::shared_address(&given), (rank + 1) % size), mine);
    const float4 x =
        ptx::ld_shared_cluster(ptx::mapa(ptx::shared_address(&mine), (rank + size - 1) % size));
    reinterpret_cast<float4*>(p.read)[blockIdx.x] = x;
    const int next = (rank + 1) % size;
    ptx::st_async(ptx::mapa(ptx::shared_address(&arrived), next), mine, ptx::mapa(full, next));
    ptx::mbarrier_arrive_expect_tx(full, sizeof(float4));
  }
  while (!ptx::mbarrier_try_wait_cluster(full, 0)) {
  }
  if (threadIdx.x == 0) reinterpret_cast<float4*>(p.sent)[blockIdx.x] = arrived;
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x == 0) reinterpret_cast<float4*>(p.got)[blockIdx.x] = given;
}

// ---- stmatrix, and the lane that elect.sync chooses ----
struct MatrixParams {
  const unsigned* fragments;  // [32][4]
  unsigned short* plain;      // [4][8][8]
  unsigned short* transposed;
  int* elected;  // how many lanes
};
extern "C" __global__ void matrices(const __grid_constant__ MatrixParams p) {
  __shared__ __align__(16) unsigned short x[4 * 8 * 8];
  const int lane = threadIdx.x;
  unsigned r[4];
  for (int i = 0; i < 4; ++i) r[i] = p.fragments[4 * lane + i];
  const unsigned row = ptx::shared_address(x + 8 * lane);
  ptx::stmatrix_x4(row, r);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) p.plain[i] = x[i];
  __syncwarp();
  ptx::stmatrix_x4_trans(row, r);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) p.transposed[i] = x[i];
  const int elected = __reduce_add_sync(0xffffffffu, ptx::elect_sync() ? 1 : 0);
  if (lane == 0) *p.elected = elected;
}

// ---- d = a b (+ d) for one wgmma shape, on shared-memory images that the test lays out ----
struct WgmmaParams {
  const uint4* a;  // image of a_bytes
  const uint4* b;
  const unsigned* a_registers;  // [steps][128][4]
  float* d;                     // [64][N]
  int a_bytes, b_bytes, a_leading, a_stride, a_step, b_leading, b_stride, b_step;
  int steps, swizzle;
};
extern "C" __global__ void __launch_bounds__(128) product(const __grid_constant__ WgmmaParams p) {
  extern __shared__ __align__(1024) uint4 image[];
  uint4* const b_image = image + p.a_bytes / 16;
  for (int i = threadIdx.x; i < p.a_bytes / 16; i += 128) image[i] = p.a[i];
  for (int i = threadIdx.x; i < p.b_bytes / 16; i += 128) b_image[i] = p.b[i];
  ptx::fence_proxy_async();
  __syncthreads();
  ptx::setmaxnreg_inc<232>();
  const auto swizzle = static_cast<ptx::Swizzle>(p.swizzle);
  using Product = ptx::Wgmma<N, ptx::WgmmaType::TYPE>;
  float d[N / 2];
  ptx::wgmma_pin(d);
  ptx::wgmma_fence();
  for (int step = 0; step < p.steps; ++step) {
    const auto a = ptx::wgmma_descriptor(ptx::shared_address(image) + step * p.a_step, p.a_leading,
                                         p.a_stride, swizzle);
    const auto b = ptx::wgmma_descriptor(ptx::shared_address(b_image) + step * p.b_step,
                                         p.b_leading, p.b_stride, swizzle);
#if A_IN_REGISTERS
    unsigned r[4];
    for (int i = 0; i < 4; ++i) r[i] = p.a_registers[(step * 128 + threadIdx.x) * 4 + i];
#endif
#if A_IN_REGISTERS && TRANS_B
    Product::rs<1>(d, r, b, step > 0);
#elif A_IN_REGISTERS && IS_8BIT
    Product::rs(d, r, b, step > 0);
#elif A_IN_REGISTERS
    Product::rs<0>(d, r, b, step > 0);
#elif IS_8BIT
    Product::ss(d, a, b, step > 0);
#else
    Product::ss<TRANS_A, TRANS_B>(d, a, b, step > 0);
#endif
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::wgmma_pin(d);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < N / 2; ++i) {
    p.d[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  }
}
