// SPDX-License-Identifier: Apache-2.0
// Rings of shared-memory slots that one side fills and another empties, with mbarriers between.
#pragma once

#include "ptx_sm90_tma.cuh"

using Barrier = unsigned long long;

// Returns when the phase of that parity is complete. A fresh barrier counts as one whose phase 1
// is.
__device__ __forceinline__ void wait(const Barrier& barrier, int parity) {
  const unsigned address = ptx::shared_address(&barrier);
  while (!ptx::mbarrier_try_wait(address, parity)) {
  }
}
__device__ __forceinline__ void arrive(const Barrier& barrier) {
  ptx::mbarrier_arrive(ptx::shared_address(&barrier));
}

// A number that is alike in all lanes. REDUX writes a uniform register, and so ptxas knows: where
// loops depend on others, it guards every wgmma against divergence.
__device__ __forceinline__ int uniform(int x) { return __reduce_max_sync(0xffffffffu, x); }

// Where one side is in a ring. Who reads a slot waits for `parity` of its `full` barrier; who fills
// it, for the other parity of `empty`.
template <int kSlots>
struct Ring {
  int slot = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <int kSlots>
struct RingBarriers {
  Barrier full[kSlots];
  Barrier empty[kSlots];

  // `arrivals` beside the bytes that a copy brings make a slot full; `readers` make it empty.
  __device__ __forceinline__ void init(int arrivals, int readers) {
    for (int i = 0; i < kSlots; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&full[i]), arrivals);
      ptx::mbarrier_init(ptx::shared_address(&empty[i]), readers);
    }
  }
};
