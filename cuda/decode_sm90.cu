// SPDX-License-Identifier: Apache-2.0
// decode_split for up to 64 rows of a KV head, (query, head of the group), on the wgmma of Hopper:
// speculative decoding and short chunks over a paged cache, 16-bit, in one launch.
//
//   out = softmax(mask(scores(scale * q k^T))) v,   lse = natural log of the softmax denominator
//
// Grid, parts and their order: splits.cuh, as decode_split. In a block four warps bring keys and
// values, a ring of units ahead, across parts; two warpgroups take units in turn, each with its own
// sums of all rows (decode_sm90_warpgroup.cuh). Rows that a part lacks cost products, but neither
// memory nor exponentials.
// Merging: where a part ends the sums of both warpgroups are added through shared memory. Then they
// are done; or they go to the workspace, where each warp has 8 rows of its own, and the last that
// arrives at the counter of these rows adds all parts in order; or, where C::cluster blocks share a
// segment, each adds a share of the columns from the shared memory of all.
// Numerics: float32 accumulation, log2 units, P rounded to 16 bits.
// Slots past a sequence's end never reach a result; table entries past its last page are not read.

#include "decode_out.cuh"
#include "decode_sm90_warpgroup.cuh"
#include "parts.cuh"
#include "pipeline_sm90.cuh"

template <class C>
struct DecodeSm90Smem {
  // Else a slot could be in either warpgroup's turn, which then might wait for a phase of it that
  // is two ahead.
  static_assert(C::stages % 2 == 0, "each warpgroup has its slots");
  using Warpgroup = DecodeSm90Warpgroup<C>;
  // Columns of a row of sums, its max and sum, those of both warpgroups, and padding: 8 floats more
  // than columns, so that few meet a bank twice.
  static constexpr int kStats = C::head_dim, kTotal = kStats + 4, kRow = kStats + 8;
  typename Warpgroup::Q q;
  typename Warpgroup::Keys keys[C::stages];
  typename Warpgroup::Values values[C::stages];
  alignas(16) float sums[2][C::rows][kRow];  // of each warpgroup
  RingBarriers<C::stages> ring;
  Barrier met;  // of all consumers, twice a part
};

constexpr int kDecodeConsumers = 256;  // threads
constexpr int kLoaders = 4;            // warps

// What all consumers meet for, with the parity of that phase of `met`.
enum DecodeSm90Meeting {
  kQReady = 0,     // and the sums of the part before are read
  kSumsReady = 1,  // and q is read
};
// Every thread arrives: racecheck follows an mbarrier, but not always a named barrier.
template <class C>
__device__ __forceinline__ void meet(DecodeSm90Smem<C>& smem, DecodeSm90Meeting meeting) {
  arrive(smem.met);
  wait(smem.met, meeting);
}

// ---- The warps that bring keys and values ----

// One of kLoaders warps. A tensor copy is 16 tokens, which do not cross pages, and 64 columns, or
// all of an x-major cache; a warp has the same of each unit: it issues them one after the other.
template <class C>
struct DecodeSm90Loader {
  static constexpr int kBoxes = C::unit / 16;
  static constexpr int kChunks = C::head_dim / 64;
  static constexpr int kShares = kLoaders / kBoxes;  // warps that share the chunks of a box
  static constexpr int kBox = 16 * 128;              // bytes of a copy
  static_assert(kLoaders % kBoxes == 0 && kChunks % kShares == 0, "equal shares");
  const DecodeSplitParams& p;
  DecodeSm90Smem<C>& smem;
  const int warp;
  Ring<C::stages> ring;

  __device__ __forceinline__ DecodeSm90Loader(const DecodeSplitParams& params,
                                              DecodeSm90Smem<C>& shared, int warp_)
      : p(params), smem(shared), warp(warp_) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  // First token of this warp's box of a unit.
  __device__ __forceinline__ int token_of(int unit) const {
    return unit * C::unit + warp % kBoxes * 16;
  }
  __device__ __forceinline__ int page_of(int token) const {
    return divide(token, p.page_magic, p.page_shift);
  }
  // The page of this warp's box of unit first + lane * C::cluster.
  __device__ __forceinline__ int read_page(int batch, int first, int k_len) const {
    const int token = token_of(first + lane() * C::cluster);
    return token < k_len ? __ldg(PagedSequence::page_ids(p, batch) + page_of(token)) : 0;
  }

  // The units `first`, first + C::cluster, ... of a part; `pages` are those of the first 32.
  __device__ __forceinline__ void load(const Walk<C>& walk, int kv_head, int first, int pages) {
    int next_pages = 0;
    for (int i = 0; first + i * C::cluster < walk.last; ++i) {
      const int unit = first + i * C::cluster;
      if (i % 32 == 0) {
        if (i > 0) pages = next_pages;
        next_pages = read_page(walk.batch, unit + 32 * C::cluster, walk.k_len);
      }
      const int page = __shfl_sync(0xffffffffu, pages, i % 32);
      wait(smem.ring.empty[ring.slot], ring.parity ^ 1);
      __syncwarp();  // a lane that came later could find the slot full, and empty again
      if (lane() == 0) copy(token_of(unit), walk.k_len, kv_head, page);
      ring.advance();
    }
  }

 private:
  __device__ __forceinline__ void copy(int token, int k_len, int kv_head, int page) const {
    const unsigned full = ptx::shared_address(&smem.ring.full[ring.slot]);
    if (token >= k_len) {
      ptx::mbarrier_arrive(full);
      return;
    }
    ptx::mbarrier_arrive_expect_tx(full, 2 * kChunks / kShares * kBox);
    const int in_page = token - page_of(token) * p.page, box = warp % kBoxes;
    if constexpr (C::xmajor) {
      static_assert(kShares == 1, "a box is one copy of keys, and one of values");
      smem.keys[ring.slot].load(p.k_map, full, in_page, kv_head, page, 16 * box);
      smem.values[ring.slot].load(p.v_map, full, in_page, kv_head, page, 16 * box);
    } else {
#pragma unroll
      for (int i = 0; i < 2 * kChunks / kShares; ++i) {
        const bool values = i >= kChunks / kShares;
        const int c = warp / kBoxes + i % (kChunks / kShares) * kShares;
        const auto& to = values ? smem.values[ring.slot] : smem.keys[ring.slot];
        ptx::tma_load_5d(ptx::shared_address(to.data[c]) + box * kBox, values ? &p.v_map : &p.k_map,
                         full, 0, in_page, c, kv_head, page);
      }
    }
  }
};

// Rows of q to shared memory, zeros where there are none. All consumers.
template <class C>
__device__ __forceinline__ void stage_q(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                        typename DecodeSm90Warpgroup<C>::Q& to) {
  constexpr int kPieces = C::head_dim / 8;
  static_assert(C::rows * kPieces % kDecodeConsumers == 0, "whole rounds");
  const int piece = threadIdx.x % kPieces;
  const unsigned short* q_rows = rows.q_rows(p);
#pragma unroll
  for (int i = 0; i < C::rows * kPieces / kDecodeConsumers; ++i) {
    const int row = threadIdx.x / kPieces + i * (kDecodeConsumers / kPieces);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < rows.count) {
      x = __ldg(reinterpret_cast<const uint4*>(rows.q_row(q_rows, p, row) + 8 * piece));
    }
    *reinterpret_cast<uint4*>(to.data[piece / 8] + row * 128 + (piece ^ row) % 8 * 16) = x;
  }
  ptx::fence_proxy_async();
}

// ---- Merging ----

// Sums of a row, added up in a thread: kGroups times 4 columns. The code is short: where there is
// one part a block it comes cold.
template <int kGroups>
struct RowSum {
  float4 out[kGroups];
  float max, sum;

  __device__ __forceinline__ RowSum() : out{}, max(kEmptyMax), sum(0.f) {}

  // Adds the first `count` of kSources: read(source, group) and read_stats(source). All reads are
  // in flight together.
  template <int kSources, class Read, class ReadStats>
  __device__ __forceinline__ void add(int count, const Read& read, const ReadStats& read_stats) {
    float4 x[kSources][kGroups];
    float2 stats[kSources];
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      stats[i] = make_float2(kEmptyMax, 0.f);
      if (i >= count) continue;
      stats[i] = read_stats(i);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) x[i][g] = read(i, g);
    }
    const float old_max = max;
#pragma unroll
    for (int i = 0; i < kSources; ++i) max = fmaxf(max, stats[i].x);
    scale(ptx::ex2_approx(old_max - finite_max(max)));
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      const float weight = ptx::ex2_approx(stats[i].x - finite_max(max));
      if (weight == 0.f) continue;  // nothing, whatever is there
      sum += weight * stats[i].y;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        out[g].x += weight * x[i][g].x;
        out[g].y += weight * x[i][g].y;
        out[g].z += weight * x[i][g].z;
        out[g].w += weight * x[i][g].w;
      }
    }
  }

 private:
  __device__ __forceinline__ void scale(float factor) {
    sum *= factor;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      out[g] =
          make_float4(out[g].x * factor, out[g].y * factor, out[g].z * factor, out[g].w * factor);
    }
  }
};

// Ends parts. Four neighbouring threads have a row, every fourth group of 4 columns each.
template <class C>
struct DecodeSm90Merge {
  using Smem = DecodeSm90Smem<C>;
  using Warpgroup = DecodeSm90Warpgroup<C>;
  static constexpr int kGroups = C::head_dim / 16;         // of a thread
  static constexpr int kSlotRow = C::head_dim + 4;         // floats; max and sum are the last
  static constexpr int kShare = C::head_dim / C::cluster;  // columns that a block of a cluster adds
  using Sum = RowSum<kGroups>;

  static __device__ __forceinline__ int row() { return threadIdx.x / 4; }
  static __device__ __forceinline__ int column(int group) {
    return 16 * group + threadIdx.x % 4 * 4;
  }

  template <class T>
  static __device__ __forceinline__ T* at(float* x) {
    return reinterpret_cast<T*>(x);
  }
  template <class T>
  static __device__ __forceinline__ const T* at(const float* x) {
    return reinterpret_cast<const T*>(x);
  }

  // All consumers.
  static __device__ __forceinline__ void finish(const DecodeSplitParams& p, Smem& smem,
                                                Warpgroup& group, const RowBlock<C>& rows,
                                                const Parts& parts) {
    if (group.any) leave(smem, group);
    meet(smem, kSumsReady);
    if (row() < rows.count) {
      Sum x;
      x.template add<2>(
          2, [&](int i, int g) { return *at<float4>(&smem.sums[i][row()][column(g)]); },
          [&](int i) { return *at<float2>(&smem.sums[i][row()][Smem::kStats]); });
      if constexpr (C::cluster > 1) {
        put(x, smem.sums[0][row()], Smem::kTotal);
      } else if (parts.count > 1) {
        put(x, slot_row(p, parts.slot(parts.number)), C::head_dim);
      } else {
        store(p, rows, x, 0);
      }
    }
    if constexpr (C::cluster > 1) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
      if (row() < rows.count) add_blocks(p, smem, rows);
      ptx::barrier_cluster_arrive_relaxed();  // blocks stay until they have been read
      ptx::barrier_cluster_wait();
    } else if (parts.count > 1) {
      finish_segment(p, rows, parts);
    }
  }

  // A warpgroup's sums, to shared memory.
  static __device__ __forceinline__ void leave(Smem& smem, const Warpgroup& group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = smem.sums[threadIdx.x / 128][Warpgroup::row(half)];
      const float sum = quad_sum(group.softmax.sum[0][half]);
      if (threadIdx.x % 4 == 0) {
        *at<float2>(to + Smem::kStats) = make_float2(group.softmax.max[0][half], sum);
      }
#pragma unroll
      for (int i = 0; i < C::head_dim / 8; ++i) {
        const float* pair = &group.out[0][i][2 * half];
        *at<float2>(to + 8 * i + threadIdx.x % 4 * 2) = make_float2(pair[0], pair[1]);
      }
    }
  }

  static __device__ __forceinline__ float* slot_row(const DecodeSplitParams& p, long long slot) {
    return reinterpret_cast<float*>(p.workspace) + (slot * C::rows + row()) * kSlotRow;
  }
  static __device__ __forceinline__ void put(const Sum& x, float* to, int stats) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) *at<float4>(to + column(g)) = x.out[g];
    if (threadIdx.x % 4 == 0) {
      *at<float4>(to + stats) = make_float4(x.max, x.sum, 0.f, 0.f);
    }
  }

  // To out and lse: columns from `first` on.
  template <int kCount>
  static __device__ __forceinline__ void store(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                               const RowSum<kCount>& x, int first) {
    const RowEnd<C> end(p, rows, row(), x.max, x.sum, first + threadIdx.x % 4 == 0);
#pragma unroll
    for (int g = 0; g < kCount; ++g) {
      *reinterpret_cast<uint2*>(end.out + first + column(g)) =
          make_uint2(end.pack(p, x.out[g].x, x.out[g].y), end.pack(p, x.out[g].z, x.out[g].w));
    }
  }

  // Clusters: a share of the columns, over all blocks in order of their rank.
  static __device__ __forceinline__ void add_blocks(const DecodeSplitParams& p, const Smem& smem,
                                                    const RowBlock<C>& rows) {
    const int first = ptx::cluster_ctarank() * kShare;
    const unsigned of_row = ptx::shared_address(smem.sums[0][row()]);
    RowSum<kShare / 16> x;
    x.template add<C::cluster>(
        C::cluster,
        [&](int i, int g) {
          return ptx::ld_shared_cluster(ptx::mapa(of_row + 4 * (first + column(g)), i));
        },
        [&](int i) {
          const float4 stats = ptx::ld_shared_cluster(ptx::mapa(of_row + 4 * Smem::kTotal, i));
          return make_float2(stats.x, stats.y);
        });
    store(p, rows, x, first);
  }

  // Of the warps that have the same rows, the last to arrive adds the parts, in order.
  static __device__ __forceinline__ void finish_segment(const DecodeSplitParams& p,
                                                        const RowBlock<C>& rows,
                                                        const Parts& parts) {
    const int warp = threadIdx.x / 32;
    if (warp * 8 >= rows.count) return;
    __syncwarp();  // the warp's sums are written
    unsigned arrived = 0;
    if (threadIdx.x % 32 == 0) {
      auto* counters = reinterpret_cast<unsigned*>(p.tile_counter) + C::counters * parts.first_slot;
      arrived = ptx::atom_inc_acq_rel(counters + warp, parts.count - 1);
    }
    __syncwarp();  // and those of the others come before what follows
    if (__shfl_sync(0xffffffffu, arrived, 0) != parts.count - 1 || row() >= rows.count) return;
    Sum x;
#pragma unroll 1
    for (int part = 0; part < parts.count; part += 2) {
      const auto from = [&](int i) -> const float* { return slot_row(p, parts.slot(part + i)); };
      x.template add<2>(
          parts.count - part, [&](int i, int g) { return __ldcg(at<float4>(from(i) + column(g))); },
          [&](int i) { return __ldcg(at<float2>(from(i) + C::head_dim)); });
    }
    store(p, rows, x, 0);
  }
};

// ---- The kernel ----

// The part of the block's cluster, or the first of its range; false: there is none.
template <class C>
__device__ __forceinline__ bool begin_walk(const DecodeSplitParams& p, const BlockPlace& at,
                                           Walk<C>& walk) {
  if constexpr (C::cluster > 1) {
    return walk.begin_segment(p, at.row);
  } else {
    Sizes<C> sizes(p);
    sizes.add_up(p);
    return walk.begin(p, at, sizes);
  }
}

// Units of a part are dealt out to the blocks of a cluster, and there to the warpgroups.
template <class C>
__device__ __forceinline__ int block_rank() {
  return C::cluster > 1 ? ptx::cluster_ctarank() : 0;
}

template <class C>
__device__ __forceinline__ void produce(const DecodeSplitParams& p, DecodeSm90Smem<C>& smem,
                                        const BlockPlace& at, int warp) {
  DecodeSm90Loader<C> loader(p, smem, warp);
  Walk<C> walk;
  int ahead = 0;  // pages of a cluster's block, read while the length is on its way
  if constexpr (C::cluster > 1) {
    if (p.block_table != nullptr) ahead = loader.read_page(at.row, block_rank<C>(), p.max_k);
  }
  bool more = begin_walk(p, at, walk);
  while (more) {
    const int first = walk.first + block_rank<C>();
    const int pages = C::cluster > 1 && p.block_table != nullptr && walk.first == 0
                          ? ahead
                          : loader.read_page(walk.batch, first, walk.k_len);
    loader.load(walk, at.kv_head(p, walk.line), first, pages);
    more = walk.next(p, at);
  }
  if constexpr (C::cluster > 1) {
    if (walk.units > 0) {  // the consumers' two
      ptx::barrier_cluster_arrive_relaxed();
      ptx::barrier_cluster_wait();
      ptx::barrier_cluster_arrive_relaxed();
      ptx::barrier_cluster_wait();
    }
  }
}

template <class C>
__device__ __forceinline__ void consume(const DecodeSplitParams& p, DecodeSm90Smem<C>& smem,
                                        const BlockPlace& at) {
  const int mine = uniform(threadIdx.x / 128);
  DecodeSm90Warpgroup<C> group;
  Ring<C::stages> ring;
  Walk<C> walk;
  bool more = begin_walk(p, at, walk);
  while (__any_sync(0xffffffffu, more)) {  // alike in all lanes, and so for ptxas
    const RowBlock<C> rows(p, at, walk);
    stage_q(p, rows, smem.q);
    meet(smem, kQReady);
    group.begin(p, rows);
    const int first = uniform(walk.first + block_rank<C>()), last = uniform(walk.last);
    int turn = 0;
    for (int unit = first; unit < last; unit += C::cluster) {
      if (turn == mine) {
        wait(smem.ring.full[ring.slot], ring.parity);
        group.attend(p, rows, smem.q, smem.keys[ring.slot], smem.values[ring.slot], unit * C::unit);
        if (threadIdx.x % 128 == 0) arrive(smem.ring.empty[ring.slot]);
      }
      turn ^= 1;
      ring.advance();
    }
    DecodeSm90Merge<C>::finish(p, smem, group, rows, Parts(p, at, walk));
    more = walk.next(p, at);
  }
  write_empty<C>(p);
}

template <class C>
__device__ __forceinline__ void decode_sm90(const DecodeSplitParams& p) {
  using Smem = DecodeSm90Smem<C>;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  if (threadIdx.x == kDecodeConsumers) {
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    smem.ring.init(kLoaders, 1);
    ptx::mbarrier_init(ptx::shared_address(&smem.met), kDecodeConsumers);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  // Of a cluster: its line, and its sequence. What follows from it is a chain of cold instructions:
  // with uniform registers 1 x 8k keys and 16 queries took 21.4 us, not 20.8, others up to 3 % more
  // (H200, 2026-12-01, tuning/decode-variants.csv).
  const BlockPlace at(p, ptx::divergent(blockIdx.x / C::cluster));
  const int loader = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0) - kDecodeConsumers / 32;
  if (loader >= 0) {
    ptx::setmaxnreg_dec<C::producer_registers>();
    produce(p, smem, at, loader);
  } else {
    ptx::setmaxnreg_inc<C::consumer_registers>();
    consume(p, smem, at);
  }
}
