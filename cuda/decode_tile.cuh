// SPDX-License-Identifier: Apache-2.0
// Units of keys and values in shared memory: how they lie, and how ldmatrix finds them.
//
// A *piece* is 16 bytes: of a token's row, or (x-major values) of a dimension's tokens.
//   NHD, HND, TMA        [part of 128 bytes][token][128 bytes], pieces XORed with token % 8: what
//                        the 128-byte swizzle of a tensor copy gives
//   NHD, HND, cp.async   rows of tokens, 16 bytes longer than their data
//   x-major              blocks of 16 tokens as they lie in memory: keys [piece][token][16 bytes],
//                        values [dimension][token]. cp.async too: copies that scatter the bytes
//                        of a 128-byte line over rows of shared memory were 1.7 times slower (H200)
// ldmatrix meets no bank twice, but for values of x-major, and 8-bit keys of it: twice.
#pragma once

#include "ptx_sm90_tma.cuh"
#include "splits.cuh"

template <class C>
struct KvTile {
  static constexpr int kItem = sizeof(typename C::Cache);
  static constexpr bool kWide =
      kItem == 2;  // 16-bit elements; else 8-bit ones, widened in registers
  static constexpr int kRow = C::head_dim * kItem;  // bytes of a token
  static constexpr int kTogether = kWide ? 1 : 2;   // steps that one ldmatrix feeds
  static constexpr int kPieces = kRow / 16;         // of a token
  static constexpr int kTokens = 16 / kItem;        // of a piece of x-major values
  static constexpr int kBoxes = C::unit / 16;       // blocks of 16 tokens
  static constexpr int kHead = 16 * kRow;           // bytes of 16 tokens of a KV head
  static constexpr int kBox = kHead * C::heads;     // of all
  static constexpr int kTokenRow = kRow + (C::tma || C::xmajor ? 0 : 16);  // NHD, HND, cp.async
  static constexpr int kDimRow = 16 * kItem;  // x-major values: bytes from dimension to dimension
  // Of the keys, or values, of a unit.
  static constexpr int kBytes = C::unit * kTokenRow * C::heads;
  static constexpr int kStageBytes = 2 * kBytes;
  static_assert(!C::tma || C::xmajor || kRow % 128 == 0, "swizzled rows are parts of 128 bytes");
  static_assert(!C::tma || C::xmajor || kRow == 128 || C::unit == 16,
                "several boxes of several parts would not be one tile");
  static_assert(C::heads == 1 || (C::tma && !C::xmajor && C::unit == 16),
                "a box holds the heads of its tokens one after the other");

  // Bytes from the start of a tile of keys (and of values, unless x-major) to a piece of a token.
  static __device__ __forceinline__ int row_offset(int token, int piece) {
    if constexpr (C::xmajor) {
      return token / 16 * kBox + piece * 256 + token % 16 * 16;
    } else if constexpr (C::tma) {
      return piece / 8 * (C::unit * 128) + token * 128 + ((piece ^ token) & 7) * 16;
    } else {
      return token * kTokenRow + piece * 16;
    }
  }

  // x-major values: bytes to the piece of a dimension that begins with `token`.
  static __device__ __forceinline__ int column_offset(int dim, int token) {
    return token / 16 * kBox + dim * kDimRow + token % 16 * kItem;
  }

  // ---- ldmatrix_x4: a lane's address of the first block, and of the others from it ----

  // Keys: 16 tokens x 32 bytes of dimensions, as the A operand of K Q^T. Row m of the product is
  // token_of(m).
  static __device__ __forceinline__ int key_lane(int lane) {
    return row_offset(token_of(lane % 16), lane / 16);
  }
  static __device__ __forceinline__ unsigned key_address(unsigned base, int head, int block,
                                                         int step) {
    return row_address(base + head * kHead, 16 * block, step);
  }

  // Which token of a block is row m of the scores. Two 8-bit x-major values of neighbouring tokens
  // are in one register, but four of them in one lane: scores are permuted to match.
  static __device__ __forceinline__ int token_of(int m) {
    return C::xmajor && !kWide ? m % 8 / 2 * 4 + m % 2 + m / 8 * 2 : m;
  }

  // Values: 16 tokens x 32 bytes of dimensions, transposed, as the A operand of V^T P^T; x-major:
  // 16 (8-bit: 32) dimensions x 16 tokens.
  static __device__ __forceinline__ int value_lane(int lane) {
    if constexpr (!C::xmajor) {
      return row_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
    } else {
      return kWide ? column_offset(lane % 16, lane / 16 * 8) : column_offset(lane, 0);
    }
  }
  static __device__ __forceinline__ unsigned value_address(unsigned base, int head, int block,
                                                           int step) {
    if constexpr (!C::xmajor) {
      return row_address(base + head * kHead, 16 * block, step);
    } else {
      return base + block * kBox + step * (kWide ? 16 : 32) * kDimRow;
    }
  }

  // ---- Fragments: the A operand of kTogether steps of 16 dimensions ----

  static __device__ __forceinline__ void load_keys(unsigned (&a)[kTogether][4], unsigned address) {
    if constexpr (kWide) {
      ptx::ldmatrix_x4(a[0], address);
    } else {
      unsigned raw[4];  // tokens r, r + 8: four dimensions of a step; the same of the next step
      ptx::ldmatrix_x4(raw, address);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i / 2][i % 2] = C::Cache::template widen<0, 1>(raw[i]);
        a[i / 2][i % 2 + 2] = C::Cache::template widen<2, 3>(raw[i]);
      }
    }
  }

  static __device__ __forceinline__ void load_values(unsigned (&a)[kTogether][4],
                                                     unsigned address) {
    if constexpr (kWide) {
      if constexpr (C::xmajor) {
        ptx::ldmatrix_x4(a[0], address);
      } else {
        ptx::ldmatrix_x4_trans(a[0], address);
      }
    } else if constexpr (C::xmajor) {
      unsigned raw[4];  // dimensions r, r + 8, r + 16, r + 24: tokens 4t to 4t + 3
      ptx::ldmatrix_x4(raw, address);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i / 2][i % 2] = C::Cache::template widen<0, 1>(raw[i]);
        a[i / 2][i % 2 + 2] = C::Cache::template widen<2, 3>(raw[i]);
      }
    } else {
      unsigned raw[4];  // tokens 2t, 2t + 1 of a step and the next, tokens 2t + 8, 2t + 9 likewise:
                        // dimensions 2r and 2r + 1 of the first token, then of the second
      ptx::ldmatrix_x4_trans(raw, address);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i % 2][i / 2 * 2] = C::Cache::template widen<0, 2>(raw[i]);
        a[i % 2][i / 2 * 2 + 1] = C::Cache::template widen<1, 3>(raw[i]);
      }
    }
  }

 private:
  // `step` counts pairs of pieces.
  static __device__ __forceinline__ unsigned row_address(unsigned base, int token, int step) {
    if constexpr (C::xmajor) {
      return base + token / 16 * kBox + step * 512;
    } else if constexpr (C::tma) {
      return (base ^ (step % 4 * 32)) + step / 4 * (C::unit * 128) + token * 128;
    } else {
      return base + token * kTokenRow + step * 32;
    }
  }
};

// Zeros instead of the values of tokens from `valid` on, which may be NaN: times a probability of 0
// that would be NaN. The fence orders the zeros before the next copy to the same place.
template <class C>
__device__ __forceinline__ void clear_values(unsigned char* values, int valid, int lane) {
  using Tile = KvTile<C>;
  if constexpr (!C::xmajor) {
#pragma unroll 1
    for (int i = lane; i < (C::unit - valid) * Tile::kPieces; i += 32) {
      const int offset = Tile::row_offset(valid + i / Tile::kPieces, i % Tile::kPieces);
      for (int h = 0; h < C::heads; ++h) {
        *reinterpret_cast<uint4*>(values + h * Tile::kHead + offset) = make_uint4(0, 0, 0, 0);
      }
    }
  } else {
#pragma unroll 1
    for (int i = lane; i < (C::unit - valid) * C::head_dim; i += 32) {
      const int offset = Tile::column_offset(i % C::head_dim, valid + i / C::head_dim);
      reinterpret_cast<typename C::Cache*>(values + offset)->bits = 0;
    }
  }
  ptx::fence_proxy_async();
  __syncwarp();
}
