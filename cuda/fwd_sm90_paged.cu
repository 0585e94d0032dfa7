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
// `e4m3`: keys and values are widened to the type of q by the warps that brought them.
#include "fwd_sm90.cu"

// The lanes of a warp.
template <class C>
struct FwdSm90PagedCopies {
  using Params = FwdSm90PagedParams;
  // A copy of 16 tokens takes a warp 50 cycles: with one warp for all, calls took a third to a half
  // longer than over rows, whose tiles are one copy each (H200, 2026-11-30, tuning/prompts.csv).
  static constexpr int kWarps = 2;
  static constexpr int kReaders = 64;
  using Smem = FwdSm90Smem<C>;
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
  Ring<C::stages> ring;  // of K, or of V
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
        if constexpr (kValues && C::xmajor) {
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
    const int* table = p.block_table + t.batch * p.stride_table;
    return {valid > 0 ? __ldg(table + page) : -1, token - page * p.page, valid};
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
    const auto& slot = smem.k[ring.slot];
    const unsigned full = expect(smem.k_ring, ring, sizeof(slot));
    if (lane() < kBoxes) {  // no page: zeros
      slot.load(p.k_map, full, box.token, t.kv_head, box.page, kBox * lane());
    }
    ring.advance();
  }
  __device__ __forceinline__ void load_v(const FwdSm90Tile& t, const Box& box) {
    const auto& slot = smem.v[ring.slot];
    const unsigned full = expect(smem.v_ring, ring, sizeof(slot));
    if (lane() < kBoxes) {
      const int first = max(box.page, 0) * p.page_rows + box.token;
      slot.load_ragged(p.v_map, full, 0, t.kv_head, first, box.valid, kBox * lane());
    }
    ring.advance();
  }
  // x-major. Only the box in which the sequence ends is cut.
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

// ---- e4m3 ----

// Bytes come to places of their own, from which they are widened to the tiles that products read.
template <class C>
struct FwdSm90WidenSmem : FwdSm90Smem<C> {
  static constexpr int kPlaces = 2;
  alignas(128) unsigned char k_bytes[kPlaces][C::block_n * C::head_dim];
  alignas(128) unsigned char v_bytes[kPlaces][C::block_n * C::value_dim];
  Barrier k_arrived[kPlaces], v_arrived[kPlaces];

  __device__ __forceinline__ void init(int readers) {
    FwdSm90Smem<C>::init(readers);
    for (int i = 0; i < kPlaces; ++i) {
      ptx::mbarrier_init(ptx::shared_address(&k_arrived[i]), 1);
      ptx::mbarrier_init(ptx::shared_address(&v_arrived[i]), 1);
    }
  }
};

template <class C>
struct FwdSm90WidenCopies : FwdSm90PagedCopies<C> {
  using Base = FwdSm90PagedCopies<C>;
  using Smem = FwdSm90WidenSmem<C>;
  using Base::kBox;
  using Base::kBoxes;
  using Base::lane;
  using Base::p;
  using typename Base::Box;
  using typename Base::Params;
  Smem& places;
  Ring<Smem::kPlaces> coming;    // the place that is filled next
  Ring<Smem::kPlaces> arriving;  // that is widened next

  __device__ __forceinline__ FwdSm90WidenCopies(const Params& params, Smem& shared)
      : Base(params, shared), places(shared) {}

  __device__ __forceinline__ void run(int warp) {
    if (warp == 0) {
      run<false>();
    } else {
      run<true>();
    }
  }

  // A tile is on its way while the one before is widened, also from one query tile to the next.
  template <bool kValues>
  __device__ __forceinline__ void run() {
    Ring<kTileSlots> tiles;
    bool waiting = false;
    for (FwdSm90Tile t = next_tile(places, tiles); t.first < t.last; t = next_tile(places, tiles)) {
      release_tile(places, tiles);
      Box next = this->box(t, t.last - 1);
      for (int n = t.last - 1; n >= t.first; --n) {
        const Box now = next;
        if (n > t.first) next = this->box(t, n - 1);
        bring<kValues>(t, now);
        if (waiting) widen<kValues>();
        waiting = true;
        if (!kValues && n == t.last - 1) this->load_q(t);
      }
    }
    if (waiting) widen<kValues>();
  }

  // Starts the copies of a tile.
  template <bool kValues>
  __device__ __forceinline__ void bring(const FwdSm90Tile& t, const Box& box) {
    constexpr int kRow = kValues ? C::value_dim : C::head_dim;
    unsigned char* place = (kValues ? places.v_bytes : places.k_bytes)[coming.slot];
    const unsigned arrived =
        ptx::shared_address(&(kValues ? places.v_arrived : places.k_arrived)[coming.slot]);
    if (lane() == 0) ptx::mbarrier_arrive_expect_tx(arrived, C::block_n * kRow);
    __syncwarp();
    if (lane() < kBoxes) {
      const unsigned to = ptx::shared_address(place) + lane() * kBox * kRow;
      if constexpr (kValues) {
        const int first = max(box.page, 0) * p.page_rows + box.token;
        ptx::tma_load_5d(to, &p.v_map, arrived, 0, kRagged - box.valid, t.kv_head, kRagged,
                         first + box.valid);
      } else {
        ptx::tma_load_4d(to, &p.k_map, arrived, 0, box.token, t.kv_head, box.page);
      }
    }
    coming.advance();
  }

  // A tile that has come, to where products read it.
  template <bool kValues>
  __device__ __forceinline__ void widen() {
    auto& barriers = kValues ? places.v_ring : places.k_ring;
    const Ring<C::stages> at = this->ring;
    wait((kValues ? places.v_arrived : places.k_arrived)[arriving.slot], arriving.parity);
    wait(barriers.empty[at.slot], at.parity ^ 1);
    if constexpr (kValues) {
      widen(places.v_bytes[arriving.slot], places.v[at.slot]);
    } else {
      widen(places.k_bytes[arriving.slot], places.k[at.slot]);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane() == 0) arrive(barriers.full[at.slot]);
    arriving.advance();
    this->ring.advance();
  }

  // 16 elements at a time; in 128 columns, half of the lanes store their second 8 first, so that 8
  // lanes meet all banks.
  template <class Tile>
  static __device__ __forceinline__ void widen(const unsigned char* bytes, Tile& to) {
    constexpr int kPieces = Tile::kCols / 16;  // of a token
    const int piece = lane() % kPieces;
    const bool turned = kPieces == 8 && piece >= 4;
    const int col = 16 * piece + (turned ? 8 : 0);
#pragma unroll 2
    for (int token = lane() / kPieces; token < Tile::kRows; token += 32 / kPieces) {
      const auto* from = reinterpret_cast<const uint4*>(bytes + token * Tile::kCols + 16 * piece);
      const uint4 x = *from;
      *to.unit(token, col) = widened(turned ? x.z : x.x, turned ? x.w : x.y);
      *to.unit(token, col ^ 8) = widened(turned ? x.x : x.z, turned ? x.y : x.w);
    }
  }
  static __device__ __forceinline__ uint4 widened(unsigned low, unsigned high) {
    using Element = typename C::Element;
    return make_uint4(
        Element::of_halves(e4m3::widen<0, 1>(low)), Element::of_halves(e4m3::widen<2, 3>(low)),
        Element::of_halves(e4m3::widen<0, 1>(high)), Element::of_halves(e4m3::widen<2, 3>(high)));
  }
};

// ---- The kernel ----

template <class C, bool kWiden = C::e4m3>
struct FwdSm90PagedParts {
  using Copies = FwdSm90PagedCopies<C>;
};
template <class C>
struct FwdSm90PagedParts<C, true> {
  using Copies = FwdSm90WidenCopies<C>;
};
template <class C>
using FwdSm90PagedSmem = typename FwdSm90PagedParts<C>::Copies::Smem;

template <class C>
__device__ __forceinline__ void fwd_sm90_paged(const FwdSm90PagedParams& p) {
  fwd_sm90<C, typename FwdSm90PagedParts<C>::Copies>(p);
}
