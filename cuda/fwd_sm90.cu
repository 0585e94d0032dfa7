// SPDX-License-Identifier: Apache-2.0
// Forward for Hopper: out = softmax(mask(scale q k^T)) v, and lse, for dense, padded and packed
// batches. Asynchronous copies (TMA) and warpgroup products (wgmma), by specialised warps. Sources:
// Shah et al. 2024, FlashAttention-3; what was measured is in docs/kernels/fwd_sm90.md.
//
// Grid: one block an SM, persistent; each takes query tiles of block_m rows of one head until there
//   are none (fwd_sm90_schedule.cuh).
// Warpgroups: `consumers`, of 64 query rows each, then one whose warps serve them: one decides
//   which query tile comes next, one brings Q and the tiles of K and V, from the last to the first,
//   into rings of shared memory, one stores what leaves. Registers move from them to the consumers
//   (setmaxnreg).
// A consumer's step, for key tile n: the tensor cores get q k(n)^T and p(n + 1) v(n + 1); the
//   softmax of n runs beside the latter, on the other units; then p(n) is packed to be its A
//   operand. Query tiles are joined: beside the last p v of one runs the first q k^T of the next.
// `pingpong`: consumers take turns at issuing products, so that one's softmax meets another's.
// `overlap`: of a thread's two rows, the exponentials of the first run beside p v, those of the
//   second beside the rescaling of out. The wait for the next key tile, a branch, keeps them there:
//   in one basic block ptxas hoists the wait for p v above them all.
// q_buffers = 2: `out` leaves through the buffer of its q, by TMA, while the next tile is computed;
//   1, where there is no room: straight from registers.
// `late_draw`: a query tile is drawn near the end of the one before, so that the last long ones go
//   to blocks that are done first; a consumer then waits for its description with nothing to do.
// `q_registers`: a consumer keeps q in registers; products then read keys alone from shared memory.
// `split`: query tiles of a last round, which would not fill the GPU, are cut over their keys:
//   fwd_sm90_parts.cuh.
// Numerics: as fwd_sm80. Keys and values behind a sequence's end may hold anything: K is masked by
//   overwriting, V is read as zeros (0 x NaN is NaN).
#include "fwd_sm90_parts.cuh"

// Query tiles that are told and not yet released by all. With more, and drawn earlier, blocks claim
// tiles long before they come to them: the walk is hardly dynamic then (see `schedule`).
constexpr int kTileSlots = 1;
// Key tiles of a query tile that are still to be copied when, with `late_draw`, the next one may be
// drawn: drawing and telling take the time of one or two.
constexpr int kDrawAhead = 4;

template <class C>
using TileOf = typename FwdSm90Work<C>::Tile;

template <class C>
struct FwdSm90Smem {
  using Warpgroup = FwdSm90Warpgroup<C>;
  static constexpr int kFillers = C::e4m3 ? 2 : 1;  // that arrive where a tile of K or V is full
  typename Warpgroup::Q q[C::q_buffers][C::consumers];  // also out, on its way
  typename Warpgroup::K k[C::stages];
  typename Warpgroup::V v[C::stages];
  RingBarriers<C::q_buffers> q_ring[C::consumers];  // empty: out has left, too
  Barrier staged[C::consumers][C::q_buffers];       // out is in the buffer of its q
  RingBarriers<C::stages> k_ring;
  RingBarriers<C::stages> v_ring;
  RingBarriers<kTileSlots> tile_ring;
  TileOf<C> tile[kTileSlots];

  // One thread. `readers` of those that copy release descriptions of tiles.
  __device__ __forceinline__ void init(int readers) {
    for (int w = 0; w < C::consumers; ++w) {
      q_ring[w].init(1, 1);
      for (Barrier& barrier : staged[w]) ptx::mbarrier_init(ptx::shared_address(&barrier), 4);
    }
    k_ring.init(kFillers, C::consumers);
    v_ring.init(kFillers, C::consumers);
    // and the warps of the consumers, and who stores
    tile_ring.init(1, 128 * C::consumers + readers + (C::q_buffers > 1));
  }
};

// Named barriers; 0 is __syncthreads.
enum NamedBarrier {
  kTurn = 1,  // consumer 0 may issue products; the others follow
  kGroup = 5  // all warps of consumer 0 are there; the others follow
};

// ---- The warps that serve ----

// Tells all others what query tile comes next; at the end, that there is none. A tile is drawn when
// all have released the one before: with `late_draw`, near its end. What is drawn at its start is
// not left for blocks that are done sooner.
template <class C, class Params>
__device__ __forceinline__ void schedule(const Params& p, FwdSm90Smem<C>& smem) {
  typename FwdSm90Work<C>::template Walk<Params> walk(p);
  Ring<kTileSlots> ring;
  const bool speaker = threadIdx.x % 32 == 0;
  while (true) {
    const TileOf<C> t = walk.tile();
    if (speaker) {
      smem.tile[ring.slot] = t;
      arrive(smem.tile_ring.full[ring.slot]);
    }
    if (t.first >= t.last) break;
    ring.advance();
    if (speaker) wait(smem.tile_ring.empty[ring.slot], ring.parity ^ 1);
    __syncwarp();
    walk.draw();
  }
  walk.end();
}

// The next query tile, for one thread.
template <class C>
__device__ __forceinline__ TileOf<C> next_tile(const FwdSm90Smem<C>& smem,
                                               const Ring<kTileSlots>& ring) {
  wait(smem.tile_ring.full[ring.slot], ring.parity);
  return smem.tile[ring.slot];
}
// Lets the one after it be drawn.
template <class C>
__device__ __forceinline__ void release_tile(const FwdSm90Smem<C>& smem, Ring<kTileSlots>& ring) {
  arrive(smem.tile_ring.empty[ring.slot]);
  ring.advance();
}

// Whether other blocks have keys of a query tile, too.
__device__ __forceinline__ bool is_part(const FwdSm90Tile&) { return false; }
__device__ __forceinline__ bool is_part(const FwdSm90Part& t) { return t.parts > 1; }

// Stores out from where consumers have staged it; not that of parts, which stay in registers. One
// thread.
template <class C>
__device__ __forceinline__ void store(const FwdSm90Params& p, FwdSm90Smem<C>& smem) {
  Ring<C::q_buffers> q;
  Ring<kTileSlots> tiles;
  const auto take = [&] {
    const TileOf<C> t = next_tile(smem, tiles);
    release_tile(smem, tiles);  // at once: all wait for who has not
    return t;
  };
  TileOf<C> t = take();
  while (t.first < t.last) {
    const TileOf<C> next = take();
    for (int w = 0; w < C::consumers; ++w) {
      wait(smem.staged[w][q.slot], q.parity);
      if (C::split && is_part(t)) continue;
      const auto& out = smem.q[q.slot][w];
      if (p.cu_seqlens_q != nullptr) {
        out.store_ragged(p.out_map, t.row + 64 * w, t.q_head, t.q_first, t.q_len);
      } else {
        out.store(p.out_map, t.row + 64 * w, t.q_head, t.batch);
      }
      ptx::bulk_commit_group();
    }
    ptx::bulk_wait_group_read<0>();
    for (int w = 0; w < C::consumers; ++w) arrive(smem.q_ring[w].empty[q.slot]);
    q.advance();
    t = next;
  }
}

// Tiles that are read as copies bring them.
struct FwdSm90NoWiden {
  static constexpr bool kWidens = false;
  static constexpr int kReaders = 0;
};

// Brings Q, K and V. One thread.
template <class C>
struct FwdSm90Copies {
  using Params = FwdSm90Params;
  static constexpr int kWarps = 1;    // that copy
  static constexpr int kReaders = 1;  // threads that release descriptions of tiles
  using Smem = FwdSm90Smem<C>;
  using Widen = FwdSm90NoWiden;
  const FwdSm90Params& p;
  Smem& smem;
  Ring<C::stages> k, v;
  Ring<C::q_buffers> q;

  __device__ __forceinline__ FwdSm90Copies(const FwdSm90Params& params, Smem& shared)
      : p(params), smem(shared) {}

  // V is one key tile behind K, also from one query tile to the next.
  __device__ __forceinline__ void run(int) {
    if (threadIdx.x % 32 != 0) return;
    FwdSm90Tile behind = {};
    Ring<kTileSlots> tiles;
    for (FwdSm90Tile t = next_tile(smem, tiles); t.first < t.last; t = next_tile(smem, tiles)) {
      const int draw_at = C::late_draw ? min(t.first + kDrawAhead, t.last - 1) : t.last - 1;
      if (draw_at == t.last - 1) release_tile(smem, tiles);
      load_k(t, t.last - 1);
      if (behind.first < behind.last) load_v(behind, behind.first);
      load_q(t);
      for (int n = t.last - 2; n >= t.first; --n) {
        if (n == draw_at) release_tile(smem, tiles);
        load_k(t, n);
        load_v(t, n + 1);
      }
      behind = t;
    }
    if (behind.first < behind.last) load_v(behind, behind.first);
  }

  __device__ __forceinline__ void load_q(const FwdSm90Tile& t) {
    const int batch = p.cu_seqlens_q != nullptr ? 0 : t.batch;
    for (int w = 0; w < C::consumers; ++w) {
      const auto& to = smem.q[q.slot][w];
      wait(smem.q_ring[w].empty[q.slot], q.parity ^ 1);
      const unsigned full = ptx::shared_address(&smem.q_ring[w].full[q.slot]);
      ptx::mbarrier_arrive_expect_tx(full, sizeof(to));
      to.load(p.q_map, full, t.q_first + t.row + 64 * w, t.q_head, batch);
    }
    q.advance();
  }

  __device__ __forceinline__ void load_k(const FwdSm90Tile& t, int n) {
    load(smem.k, smem.k_ring, k, p.k_map, false, t, n);
  }
  __device__ __forceinline__ void load_v(const FwdSm90Tile& t, int n) {
    load(smem.v, smem.v_ring, v, p.v_map, ragged_keys(p), t, n);
  }

  template <class Tile>
  __device__ __forceinline__ void load(Tile (&slots)[C::stages], RingBarriers<C::stages>& barriers,
                                       Ring<C::stages>& ring, const ptx::TensorMap& map,
                                       bool ragged, const FwdSm90Tile& t, int n) {
    wait(barriers.empty[ring.slot], ring.parity ^ 1);
    const int batch = p.cu_seqlens_k != nullptr ? 0 : t.batch;
    const int row = n * C::block_n;
    const unsigned full = ptx::shared_address(&barriers.full[ring.slot]);
    const Tile& slot = slots[ring.slot];
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Tile));
    if (ragged) {
      slot.load_ragged(map, full, row, t.kv_head, t.v_first, t.k_len);
    } else {
      slot.load(map, full, t.k_first + row, t.kv_head, batch);
    }
    ring.advance();
  }
};

// ---- A consumer: one warpgroup ----

template <class C>
struct FwdSm90Consumer {
  using Smem = FwdSm90Smem<C>;
  using Warpgroup = FwdSm90Warpgroup<C>;
  const FwdSm90Params& p;
  Smem& smem;
  const int index;  // of the consumers
  Warpgroup group;
  Ring<C::stages> k, v;
  Ring<C::q_buffers> q;
  Ring<kTileSlots> tiles;  // the next to be taken
  // The tile at work, at first none, without the `unseen` last key tiles that the warpgroup passes
  // over. Key tiles in [full_first, full_last) are visible to all rows of the warpgroup.
  TileOf<C> t = {};
  int full_first = 0;
  int full_last = 0;
  int unseen = 0;
  float slope_log2;

  __device__ __forceinline__ FwdSm90Consumer(const FwdSm90Params& params, Smem& shared, int wg)
      : p(params), smem(shared), index(wg), group(params) {}

  __device__ __forceinline__ void run() {
    if (C::pingpong && index == C::consumers - 1) pass_turn();  // consumer 0 begins
    TileOf<C> next;
    do {
      if (!C::late_draw) next = take();
      pass_values();
      if (C::overlap && t.last - t.first > 1) wait(smem.k_ring.full[k.slot], k.parity);
      steps();
      if (C::late_draw) next = take();
      join(next);
    } while (next.first < next.last);
    if (C::pingpong && index == 0) take_turn();  // the one that is left over
  }

  // The next query tile. What the walk over key tiles depends on is uniform(): 1 to 10 % (H200,
  // 2026-11-30), 370 R2UR instead of 70. So it is where one lane alone reads or arrives.
  __device__ __forceinline__ TileOf<C> take() {
    wait(smem.tile_ring.full[tiles.slot], tiles.parity);
    TileOf<C> found = smem.tile[tiles.slot];
    found.row = uniform(found.row);
    found.first = uniform(found.first);
    found.last = uniform(found.last);
    found.q_len = uniform(found.q_len);
    found.k_len = uniform(found.k_len);
    if constexpr (C::split) found.parts = uniform(found.parts);
    arrive(smem.tile_ring.empty[tiles.slot]);
    tiles.advance();
    return found;
  }

  // First row of the warpgroup, in the sequence.
  __device__ __forceinline__ int row() const { return t.row + 64 * index; }

  __device__ __forceinline__ void start(const TileOf<C>& next) {
    t = next;
    t.last -= unseen;
    const TileRange visible(group.seen(t), row(), row() + 63, C::block_n);
    full_first = visible.full_first;
    full_last = visible.full_last;
    slope_log2 = group.slope_log2(t);
    group.clear();
  }

  __device__ __forceinline__ void take_turn() const {
    if constexpr (C::pingpong) ptx::bar_sync(kTurn + index, 256);
  }
  __device__ __forceinline__ void pass_turn() const {
    if constexpr (C::pingpong) {
      ptx::bar_arrive(kTurn + (C::consumers == 2 ? 1 - index : (index + 1) % C::consumers), 256);
    }
  }

  // Under a causal mask the first warpgroup may see nothing of the last key tile, unless that is as
  // wide as the query tile. It passes over its K in front of the first product of `next` and over
  // its V in front of the second, and releases the slots when all its warps have seen them full:
  // one that falls behind by two rounds of a ring waits for ever. So does who keeps the turn until
  // a slot is full that others have to empty first, hence one slot is left.
  static constexpr bool kPasses = C::block_n % C::block_m != 0;
  __device__ __forceinline__ void pass_keys(const FwdSm90Tile& next) {
    if constexpr (kPasses) {
      const int first_row = next.row + 64 * index;
      const int seen = TileRange(group.seen(next), first_row, first_row + 63, C::block_n).last;
      unseen = min(next.last - max(next.first + 1, min(next.last, seen)), C::stages - 1);
      for (int i = 0; i < unseen; ++i) {
        wait(smem.k_ring.full[k.slot], k.parity);
        ptx::bar_sync(kGroup + index, 128);
        release_k();
      }
    }
  }
  __device__ __forceinline__ void pass_values() {
    if constexpr (kPasses) {
      for (int i = 0; i < unseen; ++i) {
        wait(smem.v_ring.full[v.slot], v.parity);
        ptx::bar_sync(kGroup + index, 128);
        release_v();
        take_turn();
        pass_turn();
      }
    }
  }

  // Says that this warpgroup is done with a slot.
  static __device__ __forceinline__ void release(const Barrier& empty) {
    if (Warpgroup::leader()) arrive(empty);
  }
  __device__ __forceinline__ void release_k() {
    release(smem.k_ring.empty[k.slot]);
    k.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(smem.v_ring.empty[v.slot]);
    v.advance();
  }
  // After the last product that reads q from its buffer; where out takes that, that says when it
  // has left.
  __device__ __forceinline__ void release_q(int n) {
    const int last_reader = C::q_registers ? t.last - 1 : t.first;
    if (C::q_buffers == 1 && n == last_reader && Warpgroup::leader()) {
      arrive(smem.q_ring[index].empty[q.slot]);
    }
  }
  __device__ __forceinline__ void take_query(const FwdSm90Tile& of) {
    wait(smem.q_ring[index].full[q.slot], q.parity);
    if constexpr (C::e4m3) {
      const int row = Warpgroup::warp_row() + Warpgroup::lane() / 4;
      group.halves.halve(group.pages(), smem.q[q.slot][index], row, of);
      ptx::bar_sync(kGroup + index, 128);
    }
    group.take_query(smem.q[q.slot][index]);
  }

  __device__ __forceinline__ void start_scores(typename Warpgroup::Scores& s) const {
    group.start_scores(s, smem.q[q.slot][index], smem.k[k.slot]);
  }
  __device__ __forceinline__ void start_out() {
    wait(smem.v_ring.full[v.slot], v.parity);
    group.start_out(smem.v[v.slot]);
  }
  __device__ __forceinline__ void score(typename Warpgroup::Scores& s, int n, bool masked) {
    group.score(s, t, row(), n * C::block_n, masked, slope_log2);
  }
  // The key tiles but the last: masked ones at the end of the keys, those that all rows see, masked
  // ones at the start of a window. A mask that most steps jump over costs them 6 to 13 % (H200,
  // 2026-11-30, head_dim 128): ptxas does not schedule across it.
  __device__ __forceinline__ void steps() {
    int n = t.last - 2;
    if constexpr (!Warpgroup::kOneStep) {
      for (; n >= max(full_last, t.first); --n) step<true>(n);
      for (; n >= max(full_first, t.first); --n) step<false>(n);
    }
    if constexpr (C::window || Warpgroup::kOneStep) {
      for (; n >= t.first; --n) step<true>(n);
    }
  }

  // The products of key tile n beside those of the values of n + 1.
  template <bool kMasked>
  __device__ __forceinline__ void step(int n) {
    typename Warpgroup::Scores s;
    if (!C::overlap) wait(smem.k_ring.full[k.slot], k.parity);
    take_turn();
    start_scores(s);
    start_out();
    pass_turn();
    group.template finish_scores<1>(s);
    release_k();
    release_q(n);
    score(s, n, kMasked);
    if (C::overlap && n > t.first) wait(smem.k_ring.full[k.slot], k.parity);
    group.template finish_out<0>();
    release_v();
    group.score_rest(s);
    group.rescale();
    group.pack(s);
  }

  // Where query tiles meet: the last values of t, then the last key tile of `next`; out leaves
  // beside the latter, and a single q has the time of the former to arrive. Either may be none: all
  // of a block's tiles begin and end in this one piece of code, because a launch has to fetch all
  // the instructions that it runs (H200, 2026-11-30: 2 to 5 % at 512).
  __device__ __forceinline__ void join(const TileOf<C>& next) {
    typename Warpgroup::Scores s;
    const bool ends = t.first < t.last;
    const bool begins = next.first < next.last;
    const int old_slot = q.slot;
    take_turn();
    if (ends) {
      start_out();
      q.advance();
    }
    if (begins) {
      pass_keys(next);
      take_query(next);
      wait(smem.k_ring.full[k.slot], k.parity);
    }
    start_scores(s);  // of anything, where none begins: finish_out() counts on them
    pass_turn();
    group.template finish_out<1>();
    if (ends) {
      release_v();
      close(old_slot);
    }
    start(next);
    group.template finish_scores<0>(s);
    if (!begins) return;
    release_k();
    release_q(t.last - 1);
    score(s, t.last - 1, t.last - 1 < full_first || t.last - 1 >= full_last);
    group.score_rest(s);
    group.pack(s);
  }

  // `out` of t leaves registers: complete, or where other blocks have keys of it, as a part.
  __device__ __forceinline__ void close(int slot) {
    bool complete = true;
    if constexpr (C::split) complete = !is_part(t) || FwdSm90Parts<C>::add(p, t, group);
    if (complete) {
      float factor[2];
      group.finish(factor, t, row());
      if (C::q_buffers == 1 || (C::split && is_part(t))) {
        group.store_out(factor, t, row());
      } else {
        group.stage_out(factor, smem.q[slot][index]);
      }
    }
    if constexpr (C::q_buffers > 1) {
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(smem.staged[index][slot]);
    }
  }
};

// ---- The kernel ----

template <class C, class Copies = FwdSm90Copies<C>>
__device__ __forceinline__ void fwd_sm90(const typename Copies::Params& p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<typename Copies::Smem*>(smem_bytes);
  constexpr int kServers = C::threads / 128 - C::consumers;  // warpgroups
  static_assert(
      kServers * C::producer_registers + C::consumers * C::consumer_registers <=
          C::threads / 128 * (65536 / C::threads / 8 * 8),
      "setmaxnreg deals out what the block was launched with; for more it waits for ever");
  if (threadIdx.x == 0) {
    smem.init(Copies::kReaders);
    ptx::fence_mbarrier_init();
    ptx::prefetch_tensormap(&p.q_map);
    ptx::prefetch_tensormap(&p.k_map);
    ptx::prefetch_tensormap(&p.v_map);
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (warpgroup == C::consumers) {
    ptx::setmaxnreg_dec<C::producer_registers>();
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
    if (warp == 0 || (Copies::kWarps > 1 && warp == 3)) {
      Copies(p, smem).run(warp);
    } else if (warp == 1) {
      schedule(p, smem);
    } else if (C::q_buffers > 1 && warp == 2) {
      if (threadIdx.x % 32 == 0) store(p, smem);
    }
  } else if (Copies::Widen::kWidens && warpgroup > C::consumers) {
    ptx::setmaxnreg_dec<C::producer_registers>();
    if constexpr (Copies::Widen::kWidens) {
      Copies::Widen::run(smem, __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0));
    }
  } else {
    ptx::setmaxnreg_inc<C::consumer_registers>();
    FwdSm90Consumer<C>(p, smem, warpgroup).run();
  }
}
