// SPDX-License-Identifier: Apache-2.0
// Caches of e4m3 for fwd_sm90_paged: one more warpgroup widens the bytes that copies bring to
// halves, in the tiles that products read.
#pragma once

#include "fwd_sm90.cu"

// Bytes as they lie in a page, a token a row.
template <int kRows_, int kCols_>
struct alignas(128) ByteTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  unsigned char data[kRows][kCols];

  // As those of SwizzledTile.
  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int row,
                                       int head, int batch, int to) const {
    ptx::tma_load_4d(ptx::shared_address(data[to]), &map, barrier, 0, row, head, batch);
  }
  __device__ __forceinline__ void load_ragged(const ptx::TensorMap& map, unsigned barrier, int row,
                                              int head, int first, int len, int to) const {
    ptx::tma_load_5d(ptx::shared_address(data[to]), &map, barrier, 0, kRagged - len + row, head,
                     kRagged, first + len);
  }
};

template <class C>
struct FwdSm90WidenSmem : FwdSm90Smem<C> {
  static constexpr int kPlaces = 2;
  ByteTile<C::block_n, C::head_dim> k_bytes[kPlaces];
  ByteTile<C::block_n, C::value_dim> v_bytes[kPlaces];
  RingBarriers<kPlaces> k_bytes_ring;
  RingBarriers<kPlaces> v_bytes_ring;

  __device__ __forceinline__ void init(int readers) {
    FwdSm90Smem<C>::init(readers);
    k_bytes_ring.init(1, FwdSm90Smem<C>::kFillers);
    v_bytes_ring.init(1, FwdSm90Smem<C>::kFillers);
  }
};

// A warpgroup: two warps have keys, two have values, half of the tokens of each tile.
template <class C>
struct FwdSm90Widen {
  using Smem = FwdSm90WidenSmem<C>;
  static constexpr bool kWidens = true;
  static constexpr int kReaders = 128;  // threads that release descriptions of tiles
  static constexpr int kWarps = FwdSm90Smem<C>::kFillers;  // that share a tile

  static __device__ __forceinline__ void run(Smem& smem, int warp) {
    const int share = warp % kWarps;
    if (warp < kWarps) {
      run(smem, smem.k_bytes, smem.k_bytes_ring, smem.k, smem.k_ring, share);
    } else {
      run(smem, smem.v_bytes, smem.v_bytes_ring, smem.v, smem.v_ring, share);
    }
  }

 private:
  template <class Bytes, class Tile>
  static __device__ __forceinline__ void run(Smem& smem, const Bytes (&from)[Smem::kPlaces],
                                             RingBarriers<Smem::kPlaces>& from_ring,
                                             Tile (&to)[C::stages],
                                             RingBarriers<C::stages>& to_ring, int share) {
    Ring<kTileSlots> tiles;
    Ring<Smem::kPlaces> narrow;
    Ring<C::stages> wide;
    for (FwdSm90Tile t = next_tile(smem, tiles); t.first < t.last; t = next_tile(smem, tiles)) {
      release_tile(smem, tiles);
      for (int n = t.last - 1; n >= t.first; --n) {
        wait(from_ring.full[narrow.slot], narrow.parity);
        wait(to_ring.empty[wide.slot], wide.parity ^ 1);
        widen(from[narrow.slot], to[wide.slot], share);
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

  // 16 elements at a time; in 128 columns, half of the lanes store their second 8 first, so that 8
  // lanes meet all banks.
  template <class Bytes, class Tile>
  static __device__ __forceinline__ void widen(const Bytes& from, Tile& to, int share) {
    constexpr int kPieces = Bytes::kCols / 16;  // of a token
    constexpr int kRows = Bytes::kRows / kWarps;
    const int lane = threadIdx.x % 32, piece = lane % kPieces;
    const bool turned = kPieces == 8 && piece >= 4;
    const int col = 16 * piece + (turned ? 8 : 0);
#pragma unroll 4
    for (int row = lane / kPieces; row < kRows; row += 32 / kPieces) {
      const int token = share * kRows + row;
      const uint4 x = *reinterpret_cast<const uint4*>(from.data[token] + 16 * piece);
      *to.unit(token, col) = widened(turned ? x.z : x.x, turned ? x.w : x.y);
      *to.unit(token, col ^ 8) = widened(turned ? x.x : x.z, turned ? x.y : x.w);
    }
  }
  static __device__ __forceinline__ uint4 widened(unsigned low, unsigned high) {
    return make_uint4(e4m3::widen<0, 1>(low), e4m3::widen<2, 3>(low), e4m3::widen<0, 1>(high),
                      e4m3::widen<2, 3>(high));
  }
};
