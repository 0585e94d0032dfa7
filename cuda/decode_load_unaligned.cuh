// SPDX-License-Identifier: Apache-2.0
// What decode_split reads and writes where no 16 bytes lie side by side on 16 bytes: rows of any size
// at any place, x-major pages that hold no whole piece of values. Elements go through registers, or
// four bytes at a time where rows allow; slower than copies, and the same tiles. Values of x-major
// caches are turned on the way: whatever the layout, tiles hold rows of tokens.
#pragma once

#include "decode_tile.cuh"
#include "piece.cuh"

// The address that another lane has.
template <class T>
__device__ __forceinline__ const T* of_lane(const T* address, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(address);
  return reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, bits, lane));
}

// The keys, or values, of a unit. Lane l knows where token l % unit lies, `from`: its element d is at
// d / count * chunk + d % count * step, with `count` elements a piece. What is not there becomes
// zeros. Neighbouring lanes have neighbouring pieces of a token.
template <class C>
__device__ __forceinline__ void copy_unaligned(unsigned to, const typename C::Cache* from,
                                               int valid, int columns, long long chunk,
                                               long long step, bool on_4_bytes) {
  using Tile = KvTile<C>;
  constexpr int kCount = Tile::kTokens;
  static_assert(C::unit * Tile::kPieces % 32 == 0, "lanes meet in the shuffles");
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < C::unit * Tile::kPieces; i += 32) {
    const int token = i / Tile::kPieces, piece = i % Tile::kPieces;
    const auto* at = of_lane(from, token) + piece * chunk;
    const int count = token < valid ? columns - piece * kCount : 0;
    Piece<typename C::Cache, kCount> x;
    if (on_4_bytes && step == 1) {
      x.load_words(at, count);
    } else {
      x.load_apart(at, step, count);
    }
    ptx::st_shared_16(to + Tile::row_offset(token, piece),
                      make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]));
  }
}

// Two columns of a row of q or out, 16 bits each, of which `left` exist.
__device__ __forceinline__ unsigned load_pair(const unsigned short* from, int left) {
  const unsigned first = left > 0 ? __ldg(from) : 0;
  return left > 1 ? first | static_cast<unsigned>(__ldg(from + 1)) << 16 : first;
}
__device__ __forceinline__ void store_pair(unsigned short* to, unsigned pair, int left) {
  to[0] = static_cast<unsigned short>(pair);
  if (left > 1) to[1] = static_cast<unsigned short>(pair >> 16);
}
