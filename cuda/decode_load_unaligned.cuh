// SPDX-License-Identifier: Apache-2.0
// What decode_split reads and writes where not all lies on 16 bytes: rows of any size at any place,
// x-major pages that hold no whole piece of values. Copies of 4 bytes, or, where there are none,
// elements that go through registers. Values of x-major caches are turned on the way: whatever the
// layout, tiles hold rows of tokens.
#pragma once

#include "decode_tile.cuh"
#include "piece.cuh"

// The address that another lane has.
template <class T>
__device__ __forceinline__ const T* of_lane(const T* address, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(address);
  return reinterpret_cast<const T*>(__shfl_sync(0xffffffffu, bits, lane));
}

// The keys, or values, of a unit, to a tile of rows of tokens; what is not there becomes zeros.
// Lane l knows where token l % unit lies, `from`: its element d is at
// d / kCount * chunk + d % kCount * step.
template <class C>
struct UnalignedCopy {
  using Tile = KvTile<C>;
  using Cache = typename C::Cache;
  static constexpr int kCount = Tile::kTokens;                // elements of a piece
  static constexpr int kEach = C::unit * Tile::kPieces / 32;  // pieces of a lane
  // Pieces whose elements are under way: as many as registers hold.
  static constexpr int kAhead = (C::head_dim > 128 ? 16 : 32) / kCount;
  static constexpr int kWord = kCount / 4;  // elements of 4 bytes
  static_assert(C::unit * Tile::kPieces % 32 == 0, "lanes meet in the shuffles");
  static_assert(kEach % kAhead == 0, "pieces come in whole batches");

  unsigned to;
  const Cache* from;
  int valid;    // tokens
  int columns;  // of a token
  long long chunk, step;

  __device__ __forceinline__ void run(int copy_bytes) const {
    if (step != 1 || copy_bytes < 4) {
      copy_elements();
    } else if (copy_bytes < 16) {
      copy_words();
    } else {
      copy_pieces();
    }
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ void copy_pieces() const {
#pragma unroll 4
    for (int i = lane(); i < C::unit * Tile::kPieces; i += 32) {
      const int token = i / Tile::kPieces, piece = i % Tile::kPieces;
      const bool there = token < valid && piece * kCount < columns;
      ptx::cp_async_16(to + Tile::row_offset(token, piece), of_lane(from, token) + piece * chunk,
                       there ? 16 : 0);
    }
  }

  __device__ __forceinline__ void copy_words() const {
#pragma unroll 4
    for (int i = lane(); i < C::unit * Tile::kPieces * 4; i += 32) {
      const int token = i / (Tile::kPieces * 4), piece = i / 4 % Tile::kPieces, word = i % 4;
      const bool there = token < valid && piece * kCount + word * kWord < columns;
      ptx::cp_async_4(to + Tile::row_offset(token, piece) + 4 * word,
                      of_lane(from, token) + piece * chunk + word * kWord, there ? 4 : 0);
    }
  }

  // Neighbouring lanes have neighbouring tokens: their elements lie together in an x-major page.
  __device__ __forceinline__ void copy_elements() const {
    constexpr int kLanes = 32 / C::unit;  // of a token
    const int token = lane() % C::unit;
#pragma unroll 1
    for (int first = 0; first < kEach; first += kAhead) {
      Piece<Cache, kCount> pieces[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = (first + i) * kLanes + lane() / C::unit;
        pieces[i].load_apart(from + piece * chunk, step,
                             token < valid ? columns - piece * kCount : 0);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int piece = (first + i) * kLanes + lane() / C::unit;
        const unsigned (&x)[4] = pieces[i].words;
        ptx::st_shared_16(to + Tile::row_offset(token, piece), make_uint4(x[0], x[1], x[2], x[3]));
      }
    }
  }
};

// Two columns of a row of q or out, 16 bits each, of which `left` exist.
__device__ __forceinline__ unsigned load_pair(const unsigned short* from, int left) {
  const unsigned first = left > 0 ? __ldg(from) : 0;
  return left > 1 ? first | static_cast<unsigned>(__ldg(from + 1)) << 16 : first;
}
__device__ __forceinline__ void store_pair(unsigned short* to, unsigned pair, int left) {
  to[0] = static_cast<unsigned short>(pair);
  if (left > 1) to[1] = static_cast<unsigned short>(pair >> 16);
}
