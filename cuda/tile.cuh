// SPDX-License-Identifier: Apache-2.0
// Tiles of 16-bit elements: global -> shared by cp.async, shared -> mma fragments by ldmatrix, registers -> global.
#pragma once

#include "types.cuh"

// Rows are 16 bytes longer than their data: 8 rows of any 16-byte column then lie in 8 different bank groups, so
// neither ldmatrix nor the copies meet a conflict, and every address is a constant away from a lane's base.
template <int kRows_, int kCols_>
struct alignas(16) Tile {
  static constexpr int kRows = kRows_;
  static constexpr int kCols = kCols_;
  static constexpr int kStride = kCols + 8;
  static_assert(kCols % 16 == 0, "mma.sync consumes 16 columns at a time, and rows must stay an odd number of 16-byte units");
  unsigned short data[kRows][kStride];

  // Where lane `lane` of ldmatrix_x4 points for a 16 x 16 block at (row, col), by the order of its four 8 x 8 matrices:
  // down-then-across is the A operand (and, transposed, B from [k][n]); across-then-down is B from [n][k].
  __device__ __forceinline__ unsigned down_then_across(int row, int col, int lane) const {
    return ptx::shared_address(&data[row + lane % 16][col + lane / 16 * 8]);
  }
  __device__ __forceinline__ unsigned across_then_down(int row, int col, int lane) const {
    return ptx::shared_address(&data[row + lane % 8 + lane / 16 * 8][col + lane / 8 % 2 * 8]);
  }
};

// Copies tiles of a row-major matrix to shared memory, one after the other, walking towards its first row. Zero-fills
// what the matrix lacks: columns from `cols` on, and rows from `rows` on unless the caller knows that there are none
// (kAllRows). The 16-byte form keeps one column a thread and needs cols % 8 == 0; the narrow forms take a row a warp.
// Asynchronous (commit and wait outside), but for 2-byte copies, which are plain stores.
template <int kCopyBytes, int kThreads, class T>
struct TileCopy {
  static constexpr int kPerCopy = kCopyBytes / 2;
  static constexpr bool kColumnAThread = kCopyBytes == 16;
  static constexpr int kChunks = kColumnAThread ? T::kCols / kPerCopy : 32;
  static constexpr int kRowStep = kThreads / kChunks;
  static constexpr bool kEven = kRowStep * kChunks == kThreads && T::kRows % kRowStep == 0;

  const unsigned short* src;  // where this thread starts in the tile that is copied next
  long long stride;
  int cols;

  __device__ __forceinline__ TileCopy(const unsigned short* matrix, int first_row, long long stride_, int cols_)
      : src(matrix + (first_row + row()) * stride_ + col()), stride(stride_), cols(cols_) {}

  __device__ __forceinline__ void step_back() { src -= T::kRows * stride; }

  template <bool kAllRows>
  __device__ __forceinline__ void copy(T& tile, int rows) const {
    const unsigned short* from = src;
    const long long step = static_cast<long long>(ptx::opaque(kRowStep)) * stride;
    if constexpr (kColumnAThread) {
      const unsigned dst = ptx::shared_address(&tile.data[row()][col()]);
      const int bytes = col() < cols ? 16 : 0;
#pragma unroll
      for (int r = 0; r < T::kRows; r += kRowStep, from += step) {
        if (kEven || (row() < kRowStep && r + row() < T::kRows)) {
          ptx::cp_async_16(dst + r * T::kStride * 2, from, kAllRows || r + row() < rows ? bytes : 0);
        }
      }
    } else {
      for (int r = row(); r < T::kRows; r += kRowStep, from += step) {
        for (int c = 0; c + col() < T::kCols; c += 32 * kPerCopy) {
          copy_narrow(tile.data[r][c + col()], from + c, r < rows && c + col() < cols);
        }
      }
    }
  }

 private:
  static __device__ __forceinline__ int row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int col() { return threadIdx.x % kChunks * kPerCopy; }

  static __device__ __forceinline__ void copy_narrow(unsigned short& dst, const unsigned short* from, bool there) {
    if constexpr (kCopyBytes == 4) {
      ptx::cp_async_4(ptx::shared_address(&dst), from, there ? 4 : 0);
    } else {
      dst = there ? *from : 0;
    }
  }
};
