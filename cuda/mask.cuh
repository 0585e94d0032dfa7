// SPDX-License-Identifier: Apache-2.0
// Which keys a query row sees: causal masks, windows and sequence ends are all one interval [begin,
// end) a row.
#pragma once

#include "seqlen.cuh"
#include "softmax.cuh"
#include "types.cuh"

struct KeyInterval {
  int k_len;
  int shift;  // the diagonal of row i is key i + shift
  int left;   // keys before the diagonal, -1 unbounded
  int right;  // keys after it, likewise

  __device__ __forceinline__ KeyInterval(const FwdParams& p, const Sequence& s)
      : k_len(s.k_len),
        shift(p.top_left ? 0 : s.k_len - s.q_len),
        left(p.window_left),
        right(p.window_right) {}

  __device__ __forceinline__ int begin(int row) const {
    return left < 0 ? 0 : max(0, row + shift - left);
  }
  __device__ __forceinline__ int end(int row) const {
    return right < 0 ? k_len : min(k_len, row + shift + right + 1);
  }
};

// The key tiles of a query tile, walked from last - 1 down to first. Tiles in [full_first,
// full_last) are visible to every row; the others need a mask. Both ends of the interval grow with
// the row.
struct TileRange {
  int first, last, full_first, full_last;

  __device__ __forceinline__ TileRange(const KeyInterval& keys, int first_row, int last_row,
                                       int block_n)
      : first(keys.begin(first_row) / block_n),
        last(max(0, ceil_div(keys.end(last_row), block_n))),
        full_first(ceil_div(keys.begin(last_row), block_n)),
        full_last(max(0, keys.end(first_row)) / block_n) {}
};

// The first key of one of kTiles tiles of 8, which come from kParts products: product i has every
// kParts-th 8 keys from the i-th on.
template <int kParts, int kTiles>
__device__ __forceinline__ constexpr int first_key_of(int tile) {
  constexpr int kOfPart = kTiles / kParts;
  return 8 * (tile % kOfPart * kParts + tile / kOfPart);
}

// Scores (rows of a warp) x (block_n keys) in mma accumulator layout: of 16 rows and 8 keys, lane l
// holds rows l / 4 and l / 4 + 8, keys 2 (l % 4) and the next. Keys outside a row's interval become
// -inf, whatever they held. With kBothEnds one comparison does for both ends of the interval;
// without, one each: faster where there is no window to the left, but registers are held longer.
template <bool kBothEnds, int kParts = 1, int kMTiles, int kNTiles>
__device__ __forceinline__ void mask_scores(float (&s)[kMTiles][kNTiles][4],
                                            const KeyInterval& keys, int warp_row, int first_key,
                                            int lane) {
  const int col = first_key + 2 * (lane % 4);
  const auto key = [](int i) { return first_key_of<kParts, kNTiles>(i / 2) + i % 2; };
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * mt + 8 * half + lane / 4;
      const int begin = keys.begin(row) - col;
      const int end = keys.end(row) - col;
      if constexpr (kBothEnds) {
        const unsigned length = max(0, end - begin);
#pragma unroll
        for (int i = 0; i < 2 * kNTiles; ++i) {
          // A key before the interval is a huge unsigned number.
          if (static_cast<unsigned>(key(i) - begin) >= length)
            s[mt][i / 2][2 * half + i % 2] = kEmptyMax;
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2 * kNTiles; ++i) {
          if (key(i) >= end) s[mt][i / 2][2 * half + i % 2] = kEmptyMax;
        }
        if (keys.left < 0) continue;
#pragma unroll
        for (int i = 0; i < 2 * kNTiles; ++i) {
          if (key(i) < begin) s[mt][i / 2][2 * half + i % 2] = kEmptyMax;
        }
      }
    }
  }
}
