// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements in shared memory as tensor copies (TMA) leave them and wgmma reads them.
#pragma once

#include "ptx_sm90_tma.cuh"
#include "ptx_sm90_wgmma.cuh"
#include "types.cuh"

constexpr int kRagged = 1 << 30;  // RAGGED of rawattn/plan/base.py

// wgmma's name for a storage type.
template <class Element>
constexpr ptx::WgmmaType kWgmmaType = ptx::WgmmaType::bf16;
template <>
constexpr ptx::WgmmaType kWgmmaType<fp16> = ptx::WgmmaType::f16;

// Accumulators as wgmma names them; of 64 rows, warp w of the warpgroup holds 16 w to 16 w + 15,
// laid out as mma.m16n8k16 has them.
template <int kTiles>
__device__ __forceinline__ float (&flat(float (&x)[1][kTiles][4]))[4 * kTiles] {
  return reinterpret_cast<float (&)[4 * kTiles]>(x);
}
// Those of one of kParts products.
template <int kParts, int kTiles>
__device__ __forceinline__ float (&flat_part(float (&x)[1][kTiles][4],
                                             int part))[4 * kTiles / kParts] {
  return reinterpret_cast<float (&)[4 * kTiles / kParts]>(x[0][part * kTiles / kParts]);
}

// Which of kTiles tiles of 8 keys has the i-th 8: first_key_of of mask.cuh turned round.
template <int kParts, int kTiles>
__device__ __forceinline__ constexpr int tile_of(int i) {
  return i % kParts * (kTiles / kParts) + i / kParts;
}

// Chunks of 64 columns, or 32 where 64 do not divide the tile, one after the other; in a chunk,
// rows of 128 (64) bytes, whose 16-byte units are swizzled. Offsets of products are in units of 16
// bytes, to be added to a descriptor.
template <int kRows_, int kCols_>
struct alignas(1024) SwizzledTile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kChunk = kCols % 64 == 0 ? 64 : 32;
  static constexpr int kChunks = kCols / kChunk;
  static constexpr int kRowBytes = 2 * kChunk;
  static constexpr int kChunkBytes = kRows * kRowBytes;
  static constexpr int kParts = 1;       // products with all rows
  static constexpr int kTransposed = 1;  // as_values()
  static constexpr ptx::Swizzle kSwizzle = kChunk == 64 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
  static_assert(kCols % kChunk == 0, "a tile is made of whole chunks");
  static_assert(kChunkBytes % 1024 == 0, "chunks start where the swizzle pattern does");
  unsigned char data[kChunks][kChunkBytes];

  // As operand with K along columns (Q, K): the first 16 columns, and those of step i of 16.
  __device__ __forceinline__ unsigned long long k_major() const {
    return ptx::wgmma_descriptor(ptx::shared_address(data), 16, 8 * kRowBytes, kSwizzle);
  }
  static __device__ __forceinline__ constexpr int k_major_offset(int i, int = 0) {
    return (i * 16 / kChunk * kChunkBytes + i * 16 % kChunk * 2) >> 4;
  }

  // As operand with K along rows (V): the first 16 rows, and those of step i of 16.
  __device__ __forceinline__ unsigned long long as_values() const {
    return ptx::wgmma_descriptor(ptx::shared_address(data), kChunkBytes, 8 * kRowBytes, kSwizzle);
  }
  static __device__ __forceinline__ constexpr int as_values_offset(int i) {
    return (i * 16 * kRowBytes) >> 4;
  }

  // The 16-byte unit that begins with (row, col), of chunks of 64 columns.
  __device__ __forceinline__ uint4* unit(int row, int col) {
    static_assert(kChunk == 64, "8 units a row");
    const int offset = row * kRowBytes + (col / 8 % 8 ^ row % 8) * 16;
    return reinterpret_cast<uint4*>(data[col / kChunk] + offset);
  }
  // Where it lies.
  __device__ __forceinline__ unsigned unit_address(int row, int col) const {
    const int offset = row * kRowBytes + col % kChunk * 2;
    constexpr int kMask = kRowBytes / 16 - 1;
    return ptx::shared_address(data[col / kChunk]) + (offset ^ (offset >> 7 & kMask) << 4);
  }

  // Where a row of a chunk begins; 8 rows make a pattern.
  __device__ __forceinline__ unsigned row_address(int chunk, int row) const {
    return ptx::shared_address(data[chunk]) + row * kRowBytes;
  }

  // Rows from `row` on of (head, batch), as many as a box of the map has, to the tile's rows from
  // `to` on. One thread; `barrier` expects their bytes.
  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int row,
                                       int head, int batch, int to = 0) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_load_4d(row_address(c, to), &map, barrier, c * kChunk, row, head, batch);
    }
  }
  // The same from a ragged map: rows from `row` on of a sequence of `len` rows that starts at
  // `first`.
  __device__ __forceinline__ void load_ragged(const ptx::TensorMap& map, unsigned barrier, int row,
                                              int head, int first, int len, int to = 0) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_load_5d(row_address(c, to), &map, barrier, c * kChunk, kRagged - len + row, head,
                       kRagged, first + len);
    }
  }
  // Zeros in the rows from `valid` on, by `threads` threads.
  __device__ __forceinline__ void clear_rows(int valid, int thread, int threads) {
    constexpr int kUnits = kCols / 8;  // of 16 bytes
#pragma unroll 1
    for (int i = thread; i < (kRows - valid) * kUnits; i += threads) {
      *unit(valid + i / kUnits, i % kUnits * 8) = make_uint4(0, 0, 0, 0);
    }
  }
  // One thread; part of a bulk group. Clipped to the map.
  __device__ __forceinline__ void store(const ptx::TensorMap& map, int row, int head,
                                        int batch) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_store_4d(&map, ptx::shared_address(data[c]), c * kChunk, row, head, batch);
    }
  }
  __device__ __forceinline__ void store_ragged(const ptx::TensorMap& map, int row, int head,
                                               int first, int len) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      ptx::tma_store_5d(&map, ptx::shared_address(data[c]), c * kChunk, kRagged - len + row, head,
                        kRagged, first + len);
    }
  }
};
