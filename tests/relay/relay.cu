// SPDX-License-Identifier: Apache-2.0
// Copies the sequences of a packed array, tile by tile, from the array of one tensor map to that of
// another: what a launch of sm_90 can have, in little. An item is a tile of Config::rows rows of a
// (sequence, head). The blocks of a cluster each load a slice of it for all of them, and store the
// slice that the next one has loaded. Items come from a counter, or in turn. Both maps are ragged.
#include "params.cuh"
#include "ptx_sm90_tma.cuh"

template <class C>
struct alignas(128) RelaySmem {
  unsigned short tile[C::rows][C::columns];
  unsigned long long full;
  int item;
  int unused[29];
};

template <class C>
__device__ __forceinline__ int next_item(const RelaySm90Params& p, RelaySmem<C>& s, int round) {
  if (!C::counted) return blockIdx.x / C::cluster + round * (gridDim.x / C::cluster);
  if (threadIdx.x == 0) s.item = atomicAdd(p.tile_counter, 1);
  __syncthreads();
  return s.item;
}

// The last block that runs dry leaves the counters as it found them.
__device__ __forceinline__ void leave_counters(int* counters) {
  if (threadIdx.x == 0 && atomicAdd(counters + 1, 1) == int(gridDim.x) - 1) {
    counters[0] = 0;
    counters[1] = 0;
  }
}

template <class C>
__device__ __forceinline__ void meet() {
  if (C::cluster > 1) {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  } else {
    __syncthreads();
  }
}

template <class C>
__device__ void relay(const RelaySm90Params& p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  RelaySmem<C>& s = *reinterpret_cast<RelaySmem<C>*>(smem_bytes);
  constexpr int kSlice = C::rows / C::cluster, kRagged = 1 << 30;
  const unsigned full = ptx::shared_address(&s.full);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 1);
    ptx::fence_mbarrier_init();
  }
  meet<C>();
  if (C::dependent) {
    ptx::griddepcontrol_launch_dependents();
    ptx::griddepcontrol_wait();
  }
  const int rank = C::cluster > 1 ? ptx::cluster_ctarank() : 0, other = (rank + 1) % C::cluster;
  for (int round = 0;; ++round) {
    const int item = next_item<C>(p, s, round);
    if (item >= p.tiles * p.sequences * p.heads) break;
    const int head = item % p.heads, tile = item / p.heads % p.tiles;
    const int* start = p.starts + item / p.heads / p.tiles;
    const int row = kRagged - (start[1] - start[0]) + tile * C::rows;
    if (threadIdx.x == 0) {
      if (p.movers != nullptr) p.movers[item] = blockIdx.x;
      ptx::mbarrier_arrive_expect_tx(full, sizeof(s.tile));
      const unsigned slice = ptx::shared_address(s.tile[rank * kSlice]);
      const int at = row + rank * kSlice;
      if (C::cluster > 1) {
        const unsigned short all = (1 << C::cluster) - 1;
        ptx::tma_load_multicast_5d(slice, &p.from_map, full, all, p.first, at, head, kRagged,
                                   start[1]);
      } else {
        ptx::tma_load_5d(slice, &p.from_map, full, p.first, at, head, kRagged, start[1]);
      }
    }
    while (!ptx::mbarrier_try_wait(full, round % 2)) {
    }
    if (threadIdx.x == 0) {
      ptx::tma_store_5d(&p.to_map, ptx::shared_address(s.tile[other * kSlice]), 0,
                        row + other * kSlice, head, kRagged, start[1]);
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
    meet<C>();  // before others write into the tile
  }
  if (C::counted) leave_counters(p.tile_counter);
  if (threadIdx.x == 0) ptx::bulk_wait_group<0>();
}
