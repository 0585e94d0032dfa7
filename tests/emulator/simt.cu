// SPDX-License-Identifier: Apache-2.0
// Small kernels that the emulator's own tests run, and break on purpose: threads, shared memory,
// warps, atomics.
#include "ptx_sm90.cuh"

struct SumParams {
  const float* x;
  float* sums;  // one a block
  int n;
};

// Sums of blockDim.x elements: shuffles inside a warp, shared memory between warps.
extern "C" __global__ void block_sums(const __grid_constant__ SumParams p) {
  extern __shared__ __align__(16) float staged[];
  __shared__ float partial[32];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  staged[threadIdx.x] = i < p.n ? p.x[i] : 0.f;
  __syncthreads();  // staged
  float x = staged[blockDim.x - 1 - threadIdx.x];
  for (int bit = 16; bit > 0; bit /= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();  // partial
  if (threadIdx.x == 0) {
    float total = 0.f;
    for (int w = 0; w < blockDim.x / 32; ++w) total += partial[w];
    p.sums[blockIdx.x] = total;
  }
}

struct LastParams {
  const float* x;
  float* partial;     // one a block
  unsigned* arrived;  // zero
  float* total;
};

// One sum over all blocks: the block that arrives last adds up what the others left.
extern "C" __global__ void last_block(const __grid_constant__ LastParams p) {
  __shared__ bool last;
  float x = p.x[blockIdx.x * 32 + threadIdx.x];
  for (int down = 16; down > 0; down /= 2) x += __shfl_down_sync(0xffffffffu, x, down);
  if (threadIdx.x == 0) {
    p.partial[blockIdx.x] = x;
    __threadfence();
    last = atomicInc(p.arrived, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncwarp();
  if (last && threadIdx.x == 0) {
    float total = 0.f;
    for (int b = 0; b < gridDim.x; ++b) total += p.partial[b];
    *p.total = total;
  }
}

struct WarpParams {
  const int* x;  // [32]
  int* out;      // [8][32]
};

// Every warp-wide instruction once; out[i] is what lane i of each sees.
extern "C" __global__ void warp_operations(const __grid_constant__ WarpParams p) {
  const int lane = threadIdx.x, x = p.x[lane];
  int row = 0;
  auto put = [&](int value) { p.out[32 * row++ + lane] = value; };
  put(__shfl_sync(0xffffffffu, x, 5, 8));
  put(__shfl_up_sync(0xffffffffu, x, 3));
  put(__shfl_down_sync(0xffffffffu, x, 3, 16));
  put(__shfl_xor_sync(0xffffffffu, x, 9));
  put(__ballot_sync(0xffffffffu, x > 0));
  put(__any_sync(0xffffffffu, x > 1000) + 2 * __all_sync(0xffffffffu, x > -1000));
  put(__reduce_max_sync(0xffffffffu, x));
  put(__match_any_sync(0xffffffffu, x & 3));
}

struct NamedParams {
  int* out;  // [rounds]
  int rounds;
};

// A warp hands numbers to another through one word and two named barriers.
extern "C" __global__ void named_barriers(const __grid_constant__ NamedParams p) {
  __shared__ int word;
  const bool writer = threadIdx.x < 32;
  for (int i = 0; i < p.rounds; ++i) {
    if (writer) {
      if (i > 0) ptx::bar_sync(2, 64);  // free
      if (threadIdx.x == 0) word = i * i;
      __syncwarp();
      ptx::bar_arrive(1, 64);
    } else {
      ptx::bar_sync(1, 64);  // full
      if (threadIdx.x == 32) p.out[i] = word;
      __syncwarp();
      if (i + 1 < p.rounds) ptx::bar_arrive(2, 64);
    }
  }
}

struct ConvertParams {
  const float* x;
  unsigned short* bf16;
  unsigned short* f16;
  unsigned char* e4m3;
  unsigned short* from_e4m3;  // [256], as f16
  int n;
};

// Narrowing conversions of n numbers (even), and every e4m3 number.
extern "C" __global__ void conversions(const __grid_constant__ ConvertParams p) {
  for (int i = 2 * threadIdx.x; i < p.n; i += 2 * blockDim.x) {
    const float lo = p.x[i], hi = p.x[i + 1];
    *reinterpret_cast<unsigned*>(p.bf16 + i) = ptx::cvt_bf16x2(lo, hi);
    *reinterpret_cast<unsigned*>(p.f16 + i) = ptx::cvt_f16x2(lo, hi);
    *reinterpret_cast<unsigned short*>(p.e4m3 + i) = ptx::cvt_e4m3x2(lo, hi);
  }
  for (int i = threadIdx.x; i < 256; i += blockDim.x) {
    p.from_e4m3[i] = ptx::cvt_f16x2_e4m3x2_high(i << 16) & 0xffff;
  }
}
