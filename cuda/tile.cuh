// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements: global -> shared by cp.async, shared -> mma fragments by ldmatrix,
// registers -> global.
#pragma once

#include "types.cuh"

// Rows are 16 bytes longer than their data: 8 rows of any 16-byte column then lie in 8 different
// bank groups, so neither ldmatrix nor the copies meet a conflict, and every address is a constant
// away from a lane's base.
template <int kRows_, int kCols_>
struct alignas(16) Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kStride = kCols + 8;
  static_assert(
      kCols % 16 == 0,
      "mma.sync consumes 16 columns at a time, and rows must stay an odd number of 16-byte units");
  unsigned short data[kRows][kStride];

  // Where lane `lane` of ldmatrix_x4 points for a 16 x 16 block at (row, col), by the order of its
  // four 8 x 8 matrices: down-then-across is the A operand (and, transposed, B from [k][n]);
  // across-then-down is B from [n][k].
  __device__ __forceinline__ unsigned down_then_across(int row, int col, int lane) const {
    return ptx::shared_address(&data[row + lane % 16][col + lane / 16 * 8]);
  }
  __device__ __forceinline__ unsigned across_then_down(int row, int col, int lane) const {
    return ptx::shared_address(&data[row + lane % 8 + lane / 16 * 8][col + lane / 8 % 2 * 8]);
  }
};

// Copies tiles of a row-major matrix to shared memory, one after the other, walking towards its
// first row, each in kParts parts that a caller can place between other instructions: a burst of
// copies would hold up the tensor cores. Zero-fills what the matrix lacks: columns from `cols` on,
// and rows from `rows` on unless the caller knows that there are none (kAllRows). Asynchronous;
// commit and wait outside. Wide copies keep one 16-byte column a thread. Narrow ones, for rows that
// allow only 4 or 2 bytes, take a row a warp, all in one part; 2 bytes go through registers.
template <bool kNarrow, int kThreads, class T>
struct TileCopy {
  static constexpr int kChunks = kNarrow ? 32 : T::kCols / 8;  // threads a row
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr int kParts = kNarrow ? 1 : ceil_div(T::kRows, kRowStep);
  static constexpr bool kEven = kRowStep * kChunks == kThreads && T::kRows % kRowStep == 0;

  const unsigned short* src;  // where this thread is in the tile
  long long stride;
  int cols;
  int copy_bytes;

  __device__ __forceinline__ TileCopy(const unsigned short* matrix, int first_row,
                                      long long stride_, int cols_, int copy_bytes_)
      : src(matrix + (first_row + row()) * stride_ + (kNarrow ? 0 : col())),
        stride(stride_),
        cols(cols_),
        copy_bytes(copy_bytes_) {}

  template <bool kAllRows>
  __device__ __forceinline__ void copy(T& tile, int rows) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) copy_part<kAllRows>(tile, rows, part);
  }

  // Parts 0 to kParts - 1 in order; after the last one, the next tile is that before this one.
  template <bool kAllRows>
  __device__ __forceinline__ void copy_part(T& tile, int rows, int part) {
    constexpr int kBack = T::kRows + (kParts - 1) * kRowStep;
    if constexpr (kNarrow) {
      copy_narrow(tile, rows);
    } else {
      const int r = row() + part * kRowStep;
      if (kEven || (row() < kRowStep && r < T::kRows)) {
        const int bytes = (kAllRows || r < rows) && col() < cols ? 16 : 0;
        ptx::cp_async_16(ptx::shared_address(&tile.data[r][col()]), src, bytes);
      }
    }
    src = ptx::opaque(src + (part + 1 < kParts ? kRowStep : -kBack) * ptx::opaque(stride));
  }

 private:
  static __device__ __forceinline__ int row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int col() { return threadIdx.x % kChunks * 8; }

  __device__ __forceinline__ void copy_narrow(T& tile, int rows) const {
    const int width = copy_bytes / 2;
    const unsigned short* from = src;
#pragma unroll 1
    for (int r = row(); r < T::kRows; r += kRowStep, from += kRowStep * stride) {
#pragma unroll 1
      for (int c = threadIdx.x % 32 * width; c < T::kCols; c += 32 * width) {
        const bool there = r < rows && c < cols;
        if (width == 2) {
          ptx::cp_async_4(ptx::shared_address(&tile.data[r][c]), from + c, there ? 4 : 0);
        } else {
          tile.data[r][c] = there ? from[c] : 0;
        }
      }
    }
  }
};

// Calls part(j) for the j in [0, kParts) that fall on step `i` of kSteps, all of them in the first
// 1 / kSpread of the steps: what is copied has the others to arrive.
template <int kParts, int kSteps, int kSpread, class Part>
__device__ __forceinline__ void spread(int i, const Part& part) {
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    if (j >= kSpread * i * kParts / kSteps && j < kSpread * (i + 1) * kParts / kSteps) part(j);
  }
}
