// SPDX-License-Identifier: Apache-2.0
// Forward for Hopper with narrow heads and short sequences: what fwd_sm90.cu computes, by blocks of
// one warpgroup that loads for itself.
//
// Grid: one block a tile of 64 query rows of one head (schedule.cuh), several an SM: the softmax of
//   one runs beside the products of another, with no barrier between them.
// Copies: thread 0 fills a slot of K or V right after the step that read it last; one __syncthreads
//   a step. Query tiles of 64 rows waste little under a causal mask and at the end of a sequence.
// `overlap`, numerics: as fwd_sm90.cu.
#include "fwd_sm90_schedule.cuh"

template <class C>
struct FwdSm90SelfSmem {
  using Warpgroup = FwdSm90Warpgroup<C>;
  typename Warpgroup::Q q;  // out at the end
  typename Warpgroup::K k[C::stages];
  typename Warpgroup::V v[C::stages];
  Barrier q_full;
  Barrier k_full[C::stages];
  Barrier v_full[C::stages];
};

template <class C>
struct FwdSm90Self {
  using Smem = FwdSm90SelfSmem<C>;
  using Warpgroup = FwdSm90Warpgroup<C>;
  const FwdSm90Params& p;
  Smem& smem;
  const FwdSm90Tile t;
  Warpgroup group;
  const TileRange visible;
  const float slope_log2;
  Ring<C::stages> k, v;

  __device__ __forceinline__ FwdSm90Self(const FwdSm90Params& params, Smem& shared,
                                         const FwdSm90Tile& tile)
      : p(params),
        smem(shared),
        t(tile),
        group(params),
        visible(group.seen(t), t.row, t.row + 63, C::block_n),
        slope_log2(group.slope_log2(t)) {}

  __device__ __forceinline__ void run() {
    if (threadIdx.x == 0) begin();
    __syncthreads();
    group.clear();
    typename Warpgroup::Scores s;
    open(s);
    if (C::overlap && t.last - t.first > 1) wait(smem.k_full[k.slot], k.parity);
    int n = t.last - 2;
    if constexpr (!Warpgroup::kOneStep) {
      for (; n >= max(visible.full_last, t.first); --n) step<true>(s, n);
      for (; n >= max(visible.full_first, t.first); --n) step<false>(s, n);
    }
    if constexpr (C::window || Warpgroup::kOneStep) {
      for (; n >= t.first; --n) step<true>(s, n);
    }
    start_out();
    group.template finish_out<0>();
    close();
  }

  // Barriers, and the first copies. One thread, as all that copies.
  __device__ __forceinline__ void begin() {
    ptx::mbarrier_init(ptx::shared_address(&smem.q_full), 1);
    for (int i = 0; i < C::stages; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&smem.k_full[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&smem.v_full[i]), 1);
    }
    ptx::fence_mbarrier_init();
    const unsigned full = ptx::shared_address(&smem.q_full);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(smem.q));
    smem.q.load(p.q_map, full, t.q_first + t.row, t.q_head, q_batch());
    for (int i = 0; i < C::stages; ++i) {
      load_k(i, t.last - 1 - i);
      load_v(i, t.last - 1 - i);
    }
  }
  __device__ __forceinline__ int q_batch() const { return p.cu_seqlens_q != nullptr ? 0 : t.batch; }
  __device__ __forceinline__ void load_k(int slot, int n) {
    load(smem.k[slot], smem.k_full[slot], p.k_map, false, n);
  }
  __device__ __forceinline__ void load_v(int slot, int n) {
    load(smem.v[slot], smem.v_full[slot], p.v_map, ragged_keys(p), n);
  }
  // Nothing where key tile n is not one of t's.
  template <class Tile>
  __device__ __forceinline__ void load(const Tile& slot, const Barrier& barrier,
                                       const ptx::TensorMap& map, bool ragged, int n) {
    if (n < t.first) return;
    const int batch = p.cu_seqlens_k != nullptr ? 0 : t.batch;
    const unsigned full = ptx::shared_address(&barrier);
    ptx::mbarrier_arrive_expect_tx(full, sizeof(Tile));
    if (ragged) {
      slot.load_ragged(map, full, n * C::block_n, t.kv_head, t.v_first, t.k_len);
    } else {
      slot.load(map, full, t.k_first + n * C::block_n, t.kv_head, batch);
    }
  }

  __device__ __forceinline__ void start_scores(typename Warpgroup::Scores& s) const {
    group.start_scores(s, smem.q, smem.k[k.slot]);
  }
  __device__ __forceinline__ void start_out() {
    wait(smem.v_full[v.slot], v.parity);
    group.start_out(smem.v[v.slot]);
  }
  __device__ __forceinline__ void score(typename Warpgroup::Scores& s, int n, bool masked) {
    group.score(s, t, t.row, n * C::block_n, masked, slope_log2);
  }

  // The first key tile.
  __device__ __forceinline__ void open(typename Warpgroup::Scores& s) {
    const int n = t.last - 1;
    wait(smem.q_full, 0);
    wait(smem.k_full[k.slot], k.parity);
    start_scores(s);
    group.template finish_scores<0>(s);
    __syncthreads();  // every warp is done with the slot
    if (threadIdx.x == 0) load_k(k.slot, n - C::stages);
    k.advance();
    score(s, n, n < visible.full_first || n >= visible.full_last);
    group.score_rest(s);
    group.pack(s);
  }

  // The products of key tile n beside those of the values of n + 1.
  template <bool kMasked>
  __device__ __forceinline__ void step(typename Warpgroup::Scores& s, int n) {
    if (!C::overlap) wait(smem.k_full[k.slot], k.parity);
    start_scores(s);
    start_out();
    group.template finish_scores<1>(s);
    const int k_slot = k.slot;
    const int v_slot = v.slot;
    k.advance();
    v.advance();
    score(s, n, kMasked);
    if (C::overlap && n > t.first) wait(smem.k_full[k.slot], k.parity);
    group.template finish_out<0>();
    __syncthreads();  // every warp is done with both slots
    if (threadIdx.x == 0) {
      load_k(k_slot, n - C::stages);
      load_v(v_slot, n + 1 - C::stages);
    }
    group.score_rest(s);
    group.rescale();
    group.pack(s);
  }

  __device__ __forceinline__ void close() {
    float factor[2];
    group.finish(factor, t, t.row);
    group.stage_out(factor, smem.q);
    __syncthreads();
    if (threadIdx.x == 0) {
      if (p.cu_seqlens_q != nullptr) {
        smem.q.store_ragged(p.out_map, t.row, t.q_head, t.q_first, t.q_len);
      } else {
        smem.q.store(p.out_map, t.row, t.q_head, t.batch);
      }
      ptx::bulk_commit_group();
      ptx::bulk_wait_group_read<0>();
    }
  }
};

template <class C>
__device__ __forceinline__ void fwd_sm90_self(const FwdSm90Params& p) {
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const QueryTile at = longest_first(blockIdx.x, p);
  const FwdSm90Tile t = fwd_sm90_tile(p, at, stored_sequence(p, at.batch), 64, C::block_n);
  if (t.row >= t.q_len) return;
  FwdSm90Self<C>(p, *reinterpret_cast<FwdSm90SelfSmem<C>*>(smem_bytes), t).run();
}
