// SPDX-License-Identifier: Apache-2.0
// Forward for Hopper over a paged cache (vLLM's PagedAttention), where sequences have so many
// queries that products take the time: fwd_sm90.cu with other copies of keys and values.
//
// Grid, warps, numerics: as fwd_sm90.cu, but that one warp brings Q and K, and another one V.
// Copies: a tile of block_n keys is boxes of 16 tokens, which cross no page. Each lane has one of
//   them, reads its page id while the tile before is copied, and starts its copy. Behind the end
//   of a sequence there are zeros, whatever its page holds, and page ids are not read.
// `xmajor`: keys and values come in the order of vLLM's cache, which wgmma reads as it is
//   (tile_xmajor_sm90.cuh).
// `e4m3`: copies bring bytes to places of their own, and one more warpgroup widens them to halves,
//   in the tiles that products read (fwd_sm90_widen.cuh); q becomes halves too.
#include "fwd_sm90_widen.cuh"
#include "pages.cuh"

// A sequence over pages. CSR: k_first is its first entry of kv_indices.
__device__ __forceinline__ StoredSequence stored_sequence(const FwdSm90PagedParams& p, int batch) {
  StoredSequence found = stored_sequence(static_cast<const FwdSm90Params&>(p), batch);
  if (p.kv_indptr != nullptr) {
    found.k_first = __ldg(p.kv_indptr + batch);
    const int count = __ldg(p.kv_indptr + batch + 1) - found.k_first;
    const int last = __ldg(p.kv_last_page_len + batch);
    found.k_len = PagedSequence::csr_keys(p, count, last, p.k_len);
  }
  return found;
}

template <class C>
using FwdSm90PagedSmem = typename FwdSm90Widen<C>::Smem;

// The lanes of a warp.
template <class C>
struct FwdSm90PagedCopies {
  using Params = FwdSm90PagedParams;
  // A copy of 16 tokens takes a warp 50 cycles: with one warp for all, calls took a third to a half
  // longer than over rows, whose tiles are one copy each (H200, 2026-11-30, tuning/prompts.csv).
  static constexpr int kWarps = 2;
  using Widen = FwdSm90Widen<C>;
  using Smem = FwdSm90PagedSmem<C>;
  static constexpr int kReaders = 64 + Widen::kReaders;
  static constexpr int kBox = kBoxTokens;
  static constexpr int kBoxes = C::block_n / kBox;
  static_assert(C::block_n % kBox == 0 && kBoxes <= 32, "a lane for each box");
  // The lane's part of a key tile.
  struct Box {
    int page;   // -1: none
    int token;  // of the page
    int valid;  // tokens, of 16, that the sequence has
  };
  const Params& p;
  Smem& smem;
  Ring<Widen::kSlots> ring;  // of K, or of V
  Ring<C::q_buffers> q;

  __device__ __forceinline__ FwdSm90PagedCopies(const Params& params, Smem& shared)
      : p(params), smem(shared) {}

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) {
      run<false>();
    } else {
      run<true>();
    }
  }

  template <bool kValues>
  __device__ __forceinline__ void run() {
    Ring<kTileSlots> tiles;
    for (FwdSm90Tile t = next_tile(smem, tiles); t.first < t.last; t = next_tile(smem, tiles)) {
      const int draw_at =
          C::late_draw && !kValues ? min(t.first + kDrawAhead, t.last - 1) : t.last - 1;
      Box next = box(t, t.last - 1);
      for (int n = t.last - 1; n >= t.first; --n) {
        if (n == draw_at) release_tile(smem, tiles);
        const Box now = next;
        if (n > t.first) next = box(t, n - 1);
        if constexpr (kValues && C::xmajor && !C::e4m3) {
          load_xmajor_v(t, now);
        } else if constexpr (kValues) {
          load_v(t, now);
        } else {
          load_k(t, now);
          if (n == t.last - 1) load_q(t);
        }
      }
    }
  }

  __device__ __forceinline__ Box box(const FwdSm90Tile& t, int n) const {
    const int token = n * C::block_n + kBox * lane();
    const int valid = lane() < kBoxes ? min(max(t.k_len - token, 0), kBox) : 0;
    const int page = static_cast<unsigned>(token) / static_cast<unsigned>(p.page);
    const int* ids = p.page_ids + t.batch * p.stride_table + t.k_first;  // one of them is 0
    return {valid > 0 ? __ldg(ids + page) : -1, token - page * p.page, valid};
  }

  // As in fwd_sm90.cu, but by all lanes: by one alone, 64 spills.
  __device__ __forceinline__ void load_q(const FwdSm90Tile& t) {
    const int batch = p.cu_seqlens_q != nullptr ? 0 : t.batch;
    for (int w = 0; w < C::consumers; ++w) {
      const auto& to = smem.q[q.slot][w];
      const unsigned full = expect(smem.q_ring[w], q, sizeof(to));
      if (lane() == 0) to.load(p.q_map, full, t.q_first + t.row + 64 * w, t.q_head, batch);
    }
    q.advance();
  }
  __device__ __forceinline__ void load_k(const FwdSm90Tile& t, const Box& box) {
    auto& to = Widen::filled(smem);
    const auto& slot = to.k[ring.slot];
    const unsigned full = expect(to.k_ring, ring, sizeof(slot));
    if (lane() < kBoxes) {  // no page: zeros
      slot.load(p.k_map, full, box.token, t.kv_head, box.page, kBox * lane());
    }
    ring.advance();
  }
  __device__ __forceinline__ void load_v(const FwdSm90Tile& t, const Box& box) {
    auto& to = Widen::filled(smem);
    const auto& slot = to.v[ring.slot];
    const unsigned full = expect(to.v_ring, ring, sizeof(slot));
    if constexpr (C::xmajor) {  // who widens it, cuts it
      if (lane() < kBoxes) {
        slot.load(p.v_map, full, box.token, t.kv_head, box.page, kBox * lane());
      }
    } else if (lane() < kBoxes) {
      const int first = max(box.page, 0) * p.page_rows + box.token;
      slot.load_ragged(p.v_map, full, 0, t.kv_head, first, box.valid, kBox * lane());
    }
    ring.advance();
  }
  // x-major, 16 bits. Only the box in which the sequence ends is cut.
  __device__ __forceinline__ void load_xmajor_v(const FwdSm90Tile& t, const Box& box) {
    auto& slot = smem.v[ring.slot];
    const bool cut = box.valid % kBox != 0;
    int bytes = sizeof(slot);
    if (const unsigned lanes = __ballot_sync(0xffffffffu, cut)) {
      const int owner = __ffs(lanes) - 1;
      const Box last = {__shfl_sync(0xffffffffu, box.page, owner),
                        __shfl_sync(0xffffffffu, box.token, owner),
                        __shfl_sync(0xffffffffu, box.valid, owner)};
      wait(smem.v_ring.empty[ring.slot], ring.parity ^ 1);
      const auto* values = static_cast<const unsigned short*>(p.v) + last.token +
                           last.page * p.stride_v_batch + t.kv_head * p.stride_v_head;
      slot.store(values, p.page, p.value_dim, last.valid, owner);
      __syncwarp();
      bytes -= slot.kBoxBytes;
    }
    const unsigned full = expect(smem.v_ring, ring, bytes);
    if (lane() < kBoxes && !cut) {
      slot.load(p.v_map, full, box.token, t.kv_head, box.page, kBox * lane());
    }
    ring.advance();
  }

  // Waits for a free slot, and says how many bytes come; the barrier at which they arrive.
  template <int kSlots>
  static __device__ __forceinline__ unsigned expect(RingBarriers<kSlots>& barriers,
                                                    const Ring<kSlots>& at, int bytes) {
    wait(barriers.empty[at.slot], at.parity ^ 1);
    const unsigned full = ptx::shared_address(&barriers.full[at.slot]);
    if (lane() == 0) ptx::mbarrier_arrive_expect_tx(full, bytes);
    __syncwarp();
    return full;
  }
};

// ---- The kernel ----

template <class C>
__device__ __forceinline__ void fwd_sm90_paged(const FwdSm90PagedParams& p) {
  fwd_sm90<C, FwdSm90PagedCopies<C>>(p);
}
