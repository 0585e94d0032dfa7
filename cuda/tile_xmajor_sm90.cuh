// SPDX-License-Identifier: Apache-2.0
// Tiles of an x-major cache (vLLM's PagedAttention), of 16 bits, in shared memory, as tensor copies
// (TMA) leave them and wgmma reads them: boxes of 16 tokens of a head, one behind the other, each
// in the order of its page.
#pragma once

#include "tile_sm90.cuh"

constexpr int kBoxTokens = 16;

// Keys of a box, kX columns of which are 16 bytes, from `token` of a page on; zeros where there is
// no such page. One thread; `barrier` expects the bytes.
template <int kX>
__device__ __forceinline__ void load_key_box(const void* to, const ptx::TensorMap& map,
                                             unsigned barrier, int token, int head, int page) {
  ptx::tma_load_5d(ptx::shared_address(to), &map, barrier, kX * token, 0, head, page, 0);
}
// The same of values.
__device__ __forceinline__ void load_value_box(const void* to, const ptx::TensorMap& map,
                                               unsigned barrier, int token, int head, int page) {
  ptx::tma_load_4d(ptx::shared_address(to), &map, barrier, token, 0, head, page);
}

// A box is [kCols / 8][16 tokens][8 columns], without swizzle. wgmma wants each 8 tokens as far
// from the next 8 throughout, but the first and the last of a box are not as far apart as boxes
// are: so one product has the first 8 tokens of all boxes, another one the last 8.
template <int kRows_, int kCols_>
struct alignas(1024) XMajorKeys {
  static constexpr int kRows = kRows_;
  static constexpr int kParts = 2;                          // products
  static constexpr int kColumnsBytes = kBoxTokens * 8 * 2;  // of 8 columns of a box
  static constexpr int kBoxBytes = kCols_ / 8 * kColumnsBytes;
  static_assert(kRows % kBoxTokens == 0 && kCols_ % 16 == 0, "whole boxes, whole steps");
  unsigned char data[kRows / kBoxTokens][kBoxBytes];

  // As operand with K along columns: the first 16 columns, and those of step i of 16, of a product.
  __device__ __forceinline__ unsigned long long k_major() const {
    return ptx::wgmma_descriptor(ptx::shared_address(data), kColumnsBytes, kBoxBytes,
                                 ptx::Swizzle::none);
  }
  static __device__ __forceinline__ constexpr int k_major_offset(int i, int part) {
    return (i * 2 * kColumnsBytes + part * 128) >> 4;
  }

  // To the tile's rows from `to` on.
  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int token,
                                       int head, int page, int to) const {
    load_key_box<8>(data[to / kBoxTokens], map, barrier, token, head, page);
  }
};

// A box is [kCols][16 tokens]: rows of 32 bytes, whose halves are swizzled.
template <int kRows_, int kCols_>
struct alignas(1024) XMajorValues {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kTransposed = 0;
  static constexpr int kColumnBytes = kBoxTokens * 2;
  static constexpr int kBoxBytes = kCols * kColumnBytes;
  static_assert(kRows % kBoxTokens == 0 && kCols % 16 == 0, "whole boxes, whole patterns");
  unsigned char data[kRows / kBoxTokens][kBoxBytes];

  // As operand with K along tokens: the first box, and that of step i of 16 tokens.
  __device__ __forceinline__ unsigned long long as_values() const {
    return ptx::wgmma_descriptor(ptx::shared_address(data), 16, 8 * kColumnBytes,
                                 ptx::Swizzle::b32);
  }
  static __device__ __forceinline__ constexpr int as_values_offset(int i) {
    return (i * kBoxBytes) >> 4;
  }

  __device__ __forceinline__ void load(const ptx::TensorMap& map, unsigned barrier, int token,
                                       int head, int page, int to) const {
    load_value_box(data[to / kBoxTokens], map, barrier, token, head, page);
  }

  // The place of 8 tokens in a column: the first or the last of a box.
  __device__ __forceinline__ uint4* place(int box, int col, int half) {
    return reinterpret_cast<uint4*>(data[box] + col * kColumnBytes + (half ^ col / 4 % 2) * 16);
  }
  // Of 8 tokens the first `count`, zeros for the others.
  static __device__ __forceinline__ uint4 first_tokens(uint4 x, int count) {
    const auto pair = [](unsigned two, int n) {
      return n >= 2 ? two : n == 1 ? two & 0xffffu : 0u;
    };
    return make_uint4(pair(x.x, count), pair(x.y, count - 2), pair(x.z, count - 4),
                      pair(x.w, count - 6));
  }

  // Zeros for the tokens from `valid` on, by `threads` threads.
  __device__ __forceinline__ void clear_rows(int valid, int thread, int threads) {
    const int first = valid / kBoxTokens;
#pragma unroll 1
    for (int i = thread; i < (kRows / kBoxTokens - first) * 2 * kCols; i += threads) {
      const int box = first + i / (2 * kCols), half = i % 2;
      uint4* at = place(box, i / 2 % kCols, half);
      *at = first_tokens(*at, valid - box * kBoxTokens - 8 * half);
    }
  }

  // The box in which a sequence ends: `valid` tokens, then zeros, for which a tensor copy has no
  // bounds: tokens are its innermost dimension. `from` is the first token in column 0, `cols` are
  // stored, `stride` elements apart. A warp, which then orders it before what reads it.
  __device__ __forceinline__ void store(const unsigned short* from, int stride, int cols, int valid,
                                        int box) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < 2 * kCols; i += 32) {
      const int col = i / 2, half = i % 2, tokens = valid - 8 * half;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (col < cols && tokens > 0) {
        x = __ldg(
            reinterpret_cast<const uint4*>(from + static_cast<long long>(col) * stride + 8 * half));
      }
      *place(box, col, half) = first_tokens(x, tokens);
    }
    ptx::fence_proxy_async();
  }
};

// What a kernel holds of a cache.
template <bool kXMajor, int kRows, int kCols>
struct CacheTiles {
  using Keys = SwizzledTile<kRows, kCols>;
  using Values = Keys;
};
template <int kRows, int kCols>
struct CacheTiles<true, kRows, kCols> {
  using Keys = XMajorKeys<kRows, kCols>;
  using Values = XMajorValues<kRows, kCols>;
};
