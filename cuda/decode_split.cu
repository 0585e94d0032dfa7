// SPDX-License-Identifier: Apache-2.0
// Split-KV flash-decoding over a paged cache, in one launch: the last tokens of each sequence, few
// rows, against all of its keys, read once, at the speed of memory.
//
//   out = softmax(mask(scores(scale * q k^T))) v,   lse = natural log of the softmax denominator
//
// Grid: any number of blocks, one or so an SM. splits.cuh says which keys of which sequences are
// whose; nothing is planned on the host, so a captured launch follows lengths that change.
// In a block each warp is on its own: it has a ring of stages of shared memory, loads a unit of
// keys and values into each (decode_load.cuh), and attends to it (decode_warp.cuh). Units of a part
// go to the warps in turn. Warps meet only where a part ends, and their rings run ahead across
// parts. Where all segments are short, each warp has parts of its own, and warps never meet.
// Merging: first the warps of a block, through shared memory; then, where a segment has several
// parts, these, through the workspace: whichever block arrives last at the counter of the segment
// adds them all, in order of their position, so same inputs and same grid give same bits. The
// counter is back at zero then. No block waits for another. C::cluster blocks may instead share one
// segment, and exchange their sums through distributed shared memory: for few segments that is
// faster, since no workspace has to be read back.
// Numerics: float32 accumulation, log2 units, P rounded to 16 bits, 8-bit caches widened to halves.
// Slots past a sequence's end never reach a result. Of table entries past its last page clusters
// use one a warp at most, for a copy that nobody looks at: zeros where it names no page.

#include "decode_out.cuh"
#include "decode_warp.cuh"
#include "parts.cuh"

template <class C>
struct DecodeSplitSmem {
  static constexpr int kQRows = C::staged ? RowBlock<C>::kRows : 1;
  alignas(1024) unsigned char ring[C::warps][C::stages][KvTile<C>::kStageBytes];
  // Sums of a tile of each warp. Rows are 4 floats longer: no bank twice.
  float out[C::warps][8][C::head_dim + 4];
  float2 max_sum[C::warps][8];
  alignas(16) unsigned short q[2][kQRows][kQRows > 1 ? Query<C>::kStride : 8];
  Walk<C> parked[C::staged ? C::warps : 1];
  // Clusters: this block's share of the slices of every block.
  float4 peers[C::cluster][C::cluster > 1 ? 4 * C::head_dim / C::cluster : 1];
  unsigned long long full[C::warps][C::stages];
  unsigned long long arrived;         // clusters: barrier of this block's slices
  unsigned arrived_before[C::warps];  // parts of a segment, [0] or one of each warp that is alone
};

// A part's share of two neighbouring columns of a row: unnormalised, with the row's max and sum.
struct Slice {
  float2 out;
  float max, sum;

  __device__ __forceinline__ Slice() : out(make_float2(0.f, 0.f)), max(kEmptyMax), sum(0.f) {}

  // Adds the first `count` of others, (out, max, sum) each; all reads and exponentials are
  // independent of one another.
  template <int kOthers>
  __device__ __forceinline__ void add(const float4 (&others)[kOthers], int count) {
    const float old_max = max;
#pragma unroll
    for (int i = 0; i < kOthers; ++i) {
      if (i < count) max = fmaxf(max, others[i].z);
    }
    const float used_max = finite_max(max);
    scale(ptx::ex2_approx(old_max - used_max));
#pragma unroll
    for (int i = 0; i < kOthers; ++i) {
      const float weight = i < count ? ptx::ex2_approx(others[i].z - used_max) : 0.f;
      if (weight == 0.f) continue;  // nothing, whatever is there
      out.x += weight * others[i].x;
      out.y += weight * others[i].y;
      sum += weight * others[i].w;
    }
  }

 private:
  __device__ __forceinline__ void scale(float factor) {
    out.x *= factor;
    out.y *= factor;
    sum *= factor;
  }
};

// Columns `col` and the next of a row: done, to out and lse.
template <class C>
__device__ __forceinline__ void store_slice(const DecodeSplitParams& p, const RowPlace<C>& at,
                                            int col, const Slice& x) {
  const RowEnd<C> end(p, at, x.max, x.sum, col == 0);
  if (col < p.value_dim) {
    store_two<C>(end.out + col, end.pack(p, x.out.x, x.out.y), p.value_dim - col);
  }
}

// ---- Merging ----

// Slices of a block of rows: thread i handles slices i, i + threads, ... of a round, in which every
// warp hands over one of its tiles.
template <class C>
struct Merge {
  using Smem = DecodeSplitSmem<C>;
  static constexpr int kHalf = C::head_dim / 2;
  static constexpr int kSlot = RowBlock<C>::kRows * kHalf;  // slices of a slot of the workspace

  // Who works on a part: a block, or a warp alone.
  struct Team {
    bool alone;

    __device__ __forceinline__ int thread() const { return alone ? threadIdx.x % 32 : threadIdx.x; }
    __device__ __forceinline__ int threads() const { return alone ? 32 : C::threads; }
    __device__ __forceinline__ void meet() const {
      if (alone) {
        __syncwarp();
      } else {
        __syncthreads();
      }
    }
  };

  // Clusters: the slice that a thread adds up, and where it goes.
  struct Share {
    int index;
    RowPlace<C> at;

    // Before any key is there: the constants that this reads come cold, one line after the other.
    __device__ __forceinline__ Share(const DecodeSplitParams& p, const RowBlock<C>& rows) {
      static_assert(C::cluster == 1 || 8 * kHalf <= C::cluster * C::threads, "one a thread");
      if constexpr (C::cluster > 1) {
        index = threadIdx.x * C::cluster + ptx::cluster_ctarank();
        if (index < rows.count * kHalf) at = RowPlace<C>(p, rows, index / kHalf);
      }
    }
  };

  // A warp's tile, and the sums of its rows, to shared memory.
  static __device__ __forceinline__ void hand_over(Smem& smem, DecodeWarp<C>& warp, int tile,
                                                   int count, int base) {
    const int w = threadIdx.x / 32, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float sum[2] = {warp.row_sum[tile][0], warp.row_sum[tile][1]};
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
#pragma unroll
      for (int e = 0; e < 2; ++e) sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], distance);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = base + 2 * t + e;
      if (2 * t + e >= count) continue;
      if (r == 0) smem.max_sum[w][row] = make_float2(warp.row_max[tile][e], sum[e]);
#pragma unroll
      for (int i = 0; i < 2 * DecodeWarp<C>::kSteps; ++i) {
        float of[C::heads];
#pragma unroll
        for (int h = 0; h < C::heads; ++h) {
          of[h] = warp.out[tile * C::heads + h][i / 2][e + i % 2 * 2];
        }
        smem.out[w][row][i / 2 * 16 + DecodeWarp<C>::out_dim(r + i % 2 * 8)] =
            DecodeWarp<C>::of_own_head(of);
      }
    }
  }

  // The sum over the warps of a team.
  static __device__ __forceinline__ Slice over_warps(const Smem& smem, Team team, int row,
                                                     int col) {
    Slice x;
    if (team.alone) {
      const int w = threadIdx.x / 32;
      x.out = *reinterpret_cast<const float2*>(&smem.out[w][row][col]);
      x.max = smem.max_sum[w][row].x;
      x.sum = smem.max_sum[w][row].y;
      return x;
    }
#pragma unroll
    for (int w = 0; w < C::warps; ++w) x.max = fmaxf(x.max, smem.max_sum[w][row].x);
    const float used_max = finite_max(x.max);
#pragma unroll
    for (int w = 0; w < C::warps; ++w) {
      const float2 max_sum = smem.max_sum[w][row];
      const float2 out = *reinterpret_cast<const float2*>(&smem.out[w][row][col]);
      const float weight = ptx::ex2_approx(max_sum.x - used_max);
      x.out.x += weight * out.x;
      x.out.y += weight * out.y;
      x.sum += weight * max_sum.y;
    }
    return x;
  }

  // All parts of a segment, in order: loads of a batch are in flight together.
  static __device__ __forceinline__ Slice over_parts(const DecodeSplitParams& p, const Parts& parts,
                                                     int index) {
    constexpr int kBatch = 16;
    Slice x;
#pragma unroll 1
    for (int i = 0; i < parts.count; i += kBatch) {
      float4 y[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const long long slot = parts.slot(min(i + j, parts.count - 1));
        y[j] = __ldcg(p.workspace + slot * kSlot + index);
      }
      x.add(y, parts.count - i);
    }
    return x;
  }

  // Ends a part: by the whole team.
  static __device__ __forceinline__ void finish(const DecodeSplitParams& p, Smem& smem,
                                                DecodeWarp<C>& warp, const RowBlock<C>& rows,
                                                const Parts& parts, int parity, Team team,
                                                const Share& share) {
    // Up to 4 rows, as all parts have then: two of them fit, and take turns, where a register is
    // left for that. A cluster has one part.
    constexpr bool kTurns =
        C::heads == 1 && (KvTile<C>::kWide || Query<C>::kLate || (C::xmajor && C::head_dim == 128));
    const bool few =
        C::cluster > 1 || (kTurns && p.cu_seqlens_q == nullptr && p.q_len * p.group <= 4);
    const int base = C::cluster == 1 && few ? 4 * parity : 0;
#pragma unroll
    for (int tile = 0; tile < C::row_tiles; ++tile) {
      const int first = 8 * tile;
      if (tile > 0 && first >= rows.end()) break;
      hand_over(smem, warp, tile, rows.end() - first, base);
      team.meet();
      const int slices = min(8, rows.end() - first) * kHalf;
#pragma unroll 1  // short: where there is one part a block, this code comes cold
      for (int index = team.thread(); index < slices; index += team.threads()) {
        const int row = first + index / kHalf, col = index % kHalf * 2;
        if (C::heads > 1 && !rows.exists(row)) continue;
        const Slice x = over_warps(smem, team, base + index / kHalf, col);
        if constexpr (C::cluster > 1) {
          send(smem, index, x);
        } else if (parts.count == 1) {
          store_slice(p, RowPlace<C>(p, rows, row), col, x);
        } else {
          const long long slot = parts.slot(parts.number);
          p.workspace[slot * kSlot + row * kHalf + col / 2] =
              make_float4(x.out.x, x.out.y, x.max, x.sum);
        }
      }
      if (!few || team.alone) team.meet();  // the next tile, or part, goes to the same place
    }
    if constexpr (C::cluster > 1) {
      receive(p, smem, rows, share);
    } else if (parts.count > 1) {
      finish_segment(p, smem, rows, parts, team);
    }
  }

  // Clusters: slices are dealt out to the blocks, which add those of all in order of their rank.
  static __device__ __forceinline__ void send(Smem& smem, int index, const Slice& x) {
    const unsigned to =
        ptx::shared_address(&smem.peers[ptx::cluster_ctarank()][index / C::cluster]);
    const int rank = index % C::cluster;
    ptx::st_async(ptx::mapa(to, rank), make_float4(x.out.x, x.out.y, x.max, x.sum),
                  ptx::mapa(ptx::shared_address(&smem.arrived), rank));
  }
  static __device__ __forceinline__ void receive(const DecodeSplitParams& p, const Smem& smem,
                                                 const RowBlock<C>& rows, const Share& share) {
    const unsigned bar = ptx::shared_address(&smem.arrived);
    if (threadIdx.x == 0) {
      const int mine = ceil_div(rows.count * kHalf - share.index, C::cluster);
      ptx::mbarrier_arrive_expect_tx(bar, C::cluster * mine * sizeof(float4));
    }
    if (share.index >= rows.count * kHalf) return;
    while (!ptx::mbarrier_try_wait_cluster(bar, 0)) {
    }
    Slice x;
    float4 y[C::cluster];
#pragma unroll
    for (int from = 0; from < C::cluster; ++from) y[from] = smem.peers[from][threadIdx.x];
    x.add(y, C::cluster);
    store_slice(p, share.at, share.index % kHalf * 2, x);
  }

  // The last team to arrive adds the parts.
  static __device__ __forceinline__ void finish_segment(const DecodeSplitParams& p, Smem& smem,
                                                        const RowBlock<C>& rows, const Parts& parts,
                                                        Team team) {
    unsigned& arrived = smem.arrived_before[threadIdx.x / 32 * team.alone];
    team.meet();  // its slices are written
    if (team.thread() == 0) {
      auto* counter = reinterpret_cast<unsigned*>(p.tile_counter) + parts.first_slot;
      arrived = ptx::atom_inc_acq_rel(counter, parts.count - 1);
    }
    team.meet();
    if (arrived != parts.count - 1) return;
#pragma unroll 1
    for (int index = team.thread(); index < rows.end() * kHalf; index += team.threads()) {
      if (C::heads > 1 && !rows.exists(index / kHalf)) continue;
      store_slice(p, RowPlace<C>(p, rows, index / kHalf), index % kHalf * 2,
                  over_parts(p, parts, index));
    }
  }
};

// ---- The kernel ----

// While lengths are on their way the page ids that will be read next come to L2: each block sees to
// a row of the table, each thread to a line of it: a whole row comes in the time of one line.
template <class C>
__device__ __forceinline__ void prefetch_table(const DecodeSplitParams& p) {
  if constexpr (!C::tma) return;
  const long long column = threadIdx.x * (128 / sizeof(int));
  if (p.block_table == nullptr || blockIdx.x >= p.batch || column * p.page >= p.max_k) return;
  ptx::prefetch_l2(p.block_table + blockIdx.x * p.stride_table + column);
}

// What copies of a warp need: barriers and tensor maps.
template <class C>
__device__ __forceinline__ void prepare_copies(const DecodeSplitParams& p, DecodeSplitSmem<C>& smem,
                                               int warp_idx) {
  if constexpr (!C::tma) return;
  if (threadIdx.x % 32 == 0) {
    if (C::cluster > 1 && threadIdx.x == 0) {
      ptx::mbarrier_init(ptx::shared_address(&smem.arrived), 1);
    }
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
    for (int i = 0; i < C::stages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&smem.full[warp_idx][i]), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
}

template <class C>
__device__ __forceinline__ void decode_split(const DecodeSplitParams& p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<DecodeSplitSmem<C>*>(smem_bytes);

  // 1. What depends on nothing else: lengths, page ids of clusters. Then barriers, meanwhile.
  Sizes<C> sizes(p);
  // Uniform in the warp, which the compiler cannot know of threadIdx.
  const int warp_idx = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
  BlockPlace at(p, blockIdx.x / C::cluster);  // of a cluster: its line, and its sequence
  int turn = warp_idx, turns = C::warps * C::cluster;
  Walk<C> walk;
  DecodeWarp<C> warp;
  Loader<C> loader(ptx::shared_address(smem.ring[warp_idx]),
                   ptx::shared_address(smem.full[warp_idx]));
  if constexpr (C::cluster > 1) {
    turn += C::warps * ptx::cluster_ctarank();
    loader.read_ahead(p, at.row, turn, turns);
  } else {
    prefetch_table<C>(p);
  }
  prepare_copies<C>(p, smem, warp_idx);
  if constexpr (C::cluster > 1) ptx::barrier_cluster_arrive_relaxed();

  // 2. Who works together, where they begin, and this warp's loads.
  bool more;
  if constexpr (C::cluster > 1) {
    walk.enter_segment(p, at.row);
    loader.await_pages();
    warp.query.load(p, RowBlock<C>(p, at, walk));
    if (loader.copies_ahead(p)) loader.copy_ahead(p, at, turn);
    more = walk.begin_entered(p, loader.length);
  } else {
    sizes.add_up(p);
    if (C::workers > 1 && sizes.short_ones(p)) {
      at.split(warp_idx, C::warps);
      turn = 0, turns = 1;
    }
    more = walk.begin(p, at, sizes);
  }
  loader.begin(p, at, walk, more, turn, turns);

  // 3. The first copies, then all that can be done while they are on their way.
#pragma unroll 1
  for (int i = loader.copies_ahead(p); i < C::ahead; ++i) loader.issue(p, at, i, turn, turns);
  int stage = 0, parity = 0, buffer = 0;
  RowBlock<C> rows(p, at, walk);
  auto load_q = [&](const RowBlock<C>& of) {
    if constexpr (C::staged) {
      Query<C>::stage(p, of, &smem.q[buffer][0][0]);
    } else {
      warp.query.load(p, of);
    }
  };
  if (C::cluster == 1 && more) load_q(rows);
  if constexpr (C::staged) __syncthreads();
  write_empty<C>(p);
  if constexpr (C::cluster > 1) ptx::barrier_cluster_wait();  // all its blocks have started
  const typename Merge<C>::Share share(p, rows);

  // 4. Part by part.
  while (more) {
    warp.begin(p, rows);
    const int first = walk.first, last = walk.last;
    if constexpr (C::staged) smem.parked[threadIdx.x / 32] = walk;
    for (int unit = first + turn; unit < last; unit += turns) {
      loader.wait(stage, parity);
      // One stage is read while all others are filled, or both are until they have been read.
      if constexpr (C::ahead < C::stages) {
        loader.issue(p, at, stage == 0 ? C::ahead : stage - 1, turn, turns);
      }
      // Not before: q comes behind the first copies, which others should follow at once.
      if (Query<C>::kLate && unit == first + turn) warp.query.begin(p);
      const int first_key = unit * C::unit;
      if constexpr (C::tma) {
        if (first_key + C::unit > rows.k_len) {
          clear_values<C>(smem.ring[warp_idx][stage] + KvTile<C>::kBytes, rows.k_len - first_key,
                          threadIdx.x % 32);
        }
      }
      const unsigned keys = loader.ring + stage * KvTile<C>::kStageBytes;
      warp.attend(p, rows, keys, keys + KvTile<C>::kBytes, &smem.q[buffer][0][0], first_key);
      __syncwarp();  // the stage has been read
      if constexpr (C::ahead == C::stages) loader.issue(p, at, stage, turn, turns);
      if (++stage == C::stages) {
        stage = 0;
        parity ^= 1;
      }
    }
    if constexpr (C::staged) {
      __syncwarp();
      walk = smem.parked[threadIdx.x / 32];
      __syncwarp();
    }
    const Parts parts(p, at, walk);
    const RowBlock<C> done = rows;
    more = walk.next(p, at);
    buffer ^= 1;
    if (more) {
      rows = RowBlock<C>(p, at, walk);
      load_q(rows);  // in flight during the merge
    }
    Merge<C>::finish(p, smem, warp, done, parts, buffer, {at.alone}, share);
  }
  if constexpr (C::cluster > 1) loader.settle(p, turn, walk.last);
}
