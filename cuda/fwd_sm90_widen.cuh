// SPDX-License-Identifier: Apache-2.0
// Caches of e4m3 for fwd_sm90_paged: one more warpgroup widens the bytes that copies bring to
// halves, in the tiles that products read.
#pragma once

#include "fwd_sm90.cu"

// 8 elements as halves.
__device__ __forceinline__ uint4 widened(unsigned low, unsigned high) {
  return make_uint4(e4m3::widen<0, 1>(low), e4m3::widen<2, 3>(low), e4m3::widen<0, 1>(high),
                    e4m3::widen<2, 3>(high));
}

// ---- Bytes of a tile, as a page has them ----
// `load` brings a box, to the rows from `to` on; `widen` is for one of kShares warps, with the
// tokens of the tile that the sequence has. 16 elements at a time, so that 8 lanes meet all banks.

// NHD, HND: a token a row, zeros behind the end of the sequence.
template <int kRows, int kCols>
struct alignas(128) RowBytes {
  unsigned char data[kRows][kCols];

  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int row,
                                       int head, int batch, int to) const {
    ptx::tma_load_4d(ptx::shared_address(data[to]), &map, barrier, 0, row, head, batch);
  }
  __device__ __forceinline__ void load_ragged(const ptx::TensorMap& map, unsigned barrier, int row,
                                              int head, int first, int len, int to) const {
    ptx::tma_load_5d(ptx::shared_address(data[to]), &map, barrier, 0, kRagged - len + row, head,
                     kRagged, first + len);
  }
  // Of 128 columns, half of the lanes store their second 8 first.
  template <int kShares>
  __device__ __forceinline__ void widen(SwizzledTile<kRows, kCols>& to, int share, int) const {
    constexpr int kPieces = kCols / 16, kStep = 32 / kPieces;
    const int lane = threadIdx.x % 32, piece = lane % kPieces;
    const bool turned = kPieces == 8 && piece >= 4;
    const int col = 16 * piece + (turned ? 8 : 0);
#pragma unroll 4
    for (int row = lane / kPieces; row < kRows / kShares; row += kStep) {
      const int token = share * (kRows / kShares) + row;
      const uint4 x = *reinterpret_cast<const uint4*>(data[token] + 16 * piece);
      *to.unit(token, col) = widened(turned ? x.z : x.x, turned ? x.w : x.y);
      *to.unit(token, col ^ 8) = widened(turned ? x.x : x.z, turned ? x.y : x.w);
    }
  }
};

// x-major: boxes of 16 tokens, keys [kCols / 16][16 tokens][16 columns] ...
template <int kRows, int kCols>
struct alignas(128) XMajorKeyBytes {
  unsigned char data[kRows / kBoxTokens][kCols / 16][kBoxTokens][16];

  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int token,
                                       int head, int page, int to) const {
    load_key_box<16>(data[to / kBoxTokens], map, barrier, token, head, page);
  }
  template <int kShares>
  __device__ __forceinline__ void widen(SwizzledTile<kRows, kCols>& to, int share, int) const {
    constexpr int kBoxes = kRows / kBoxTokens / kShares;
    const int token = threadIdx.x % kBoxTokens;
#pragma unroll 4
    for (int i = threadIdx.x % 32 / kBoxTokens; i < kBoxes * kCols / 16; i += 32 / kBoxTokens) {
      const int box = share * kBoxes + i / (kCols / 16), piece = i % (kCols / 16);
      const uint4 x = *reinterpret_cast<const uint4*>(data[box][piece][token]);
      *to.unit(kBoxTokens * box + token, 16 * piece) = widened(x.x, x.y);
      *to.unit(kBoxTokens * box + token, 16 * piece + 8) = widened(x.z, x.w);
    }
  }
};

// ... and values [kCols][16 tokens]. Behind the end of the sequence there may be anything.
template <int kRows, int kCols>
struct alignas(128) XMajorValueBytes {
  unsigned char data[kRows / kBoxTokens][kCols][kBoxTokens];

  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int token,
                                       int head, int page, int to) const {
    load_value_box(data[to / kBoxTokens], map, barrier, token, head, page);
  }
  template <int kShares>
  __device__ __forceinline__ void widen(XMajorValues<kRows, kCols>& to, int share,
                                        int valid) const {
    constexpr int kBoxes = kRows / kBoxTokens / kShares;
    using To = XMajorValues<kRows, kCols>;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < kBoxes * kCols; i += 32) {
      const int box = share * kBoxes + i / kCols, col = i % kCols;
      const uint4 x = *reinterpret_cast<const uint4*>(data[box][col]);
      uint4 first = widened(x.x, x.y), second = widened(x.z, x.w);
      const int left = valid - kBoxTokens * box;
      if (left < kBoxTokens) {
        first = To::first_tokens(first, left);
        second = To::first_tokens(second, left - 8);
      }
      *to.place(box, col, 0) = first;
      *to.place(box, col, 1) = second;
    }
  }
};

// ---- Who widens ----

template <bool kXMajor, int kRows, int kCols>
struct CacheBytes {
  using Keys = RowBytes<kRows, kCols>;
  using Values = Keys;
};
template <int kRows, int kCols>
struct CacheBytes<true, kRows, kCols> {
  using Keys = XMajorKeyBytes<kRows, kCols>;
  using Values = XMajorValueBytes<kRows, kCols>;
};

template <class C>
struct FwdSm90Bytes {
  static constexpr int kSlots = 2;
  typename CacheBytes<C::xmajor, C::block_n, C::head_dim>::Keys k[kSlots];
  typename CacheBytes<C::xmajor, C::block_n, C::value_dim>::Values v[kSlots];
  RingBarriers<kSlots> k_ring;
  RingBarriers<kSlots> v_ring;
};

template <class C>
struct FwdSm90WidenSmem : FwdSm90Smem<C> {
  alignas(1024) FwdSm90Bytes<C> bytes;  // else they might begin in the padding of what is above

  __device__ __forceinline__ void init(int readers) {
    FwdSm90Smem<C>::init(readers);
    bytes.k_ring.init(1, FwdSm90Smem<C>::kFillers);
    bytes.v_ring.init(1, FwdSm90Smem<C>::kFillers);
  }
};

// 16 bits: nobody. Copies fill the tiles that products read.
template <class C, bool kE4m3 = C::e4m3>
struct FwdSm90Widen : FwdSm90NoWiden {
  using Smem = FwdSm90Smem<C>;
  static constexpr int kSlots = C::stages;

  // What copies fill: k, v, k_ring and v_ring.
  static __device__ __forceinline__ auto& filled(Smem& smem) { return smem; }
};

// e4m3: a warpgroup. Two warps have keys, two have values, half of the tokens of each tile.
template <class C>
struct FwdSm90Widen<C, true> {
  using Smem = FwdSm90WidenSmem<C>;
  static constexpr int kSlots = FwdSm90Bytes<C>::kSlots;
  static constexpr bool kWidens = true;
  static constexpr int kReaders = 128;  // threads that release descriptions of tiles
  static constexpr int kShares = FwdSm90Smem<C>::kFillers;

  static __device__ __forceinline__ auto& filled(Smem& smem) { return smem.bytes; }

  static __device__ __forceinline__ void run(Smem& smem, int warp) {
    const int share = warp % kShares;
    if (warp < kShares) {
      run(smem, smem.bytes.k, smem.bytes.k_ring, smem.k, smem.k_ring, share);
    } else {
      run(smem, smem.bytes.v, smem.bytes.v_ring, smem.v, smem.v_ring, share);
    }
  }

 private:
  template <class Bytes, class Tile>
  static __device__ __forceinline__ void run(Smem& smem, const Bytes (&from)[kSlots],
                                             RingBarriers<kSlots>& from_ring, Tile (&to)[C::stages],
                                             RingBarriers<C::stages>& to_ring, int share) {
    Ring<kTileSlots> tiles;
    Ring<kSlots> narrow;
    Ring<C::stages> wide;
    for (FwdSm90Tile t = next_tile(smem, tiles); t.first < t.last; t = next_tile(smem, tiles)) {
      release_tile(smem, tiles);
      for (int n = t.last - 1; n >= t.first; --n) {
        wait(from_ring.full[narrow.slot], narrow.parity);
        wait(to_ring.empty[wide.slot], wide.parity ^ 1);
        from[narrow.slot].template widen<kShares>(to[wide.slot], share, t.k_len - n * C::block_n);
        ptx::fence_proxy_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
          arrive(to_ring.full[wide.slot]);
          arrive(from_ring.empty[narrow.slot]);
        }
        narrow.advance();
        wide.advance();
      }
    }
  }
};
