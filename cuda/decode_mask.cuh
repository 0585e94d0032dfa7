// SPDX-License-Identifier: Apache-2.0
// Which rows and keys the scores of a warp of decode_split are of, and which of them are not seen.
#pragma once

#include "decode_rows.cuh"

// S^T of a unit: of each tile of 8 rows, blocks of 16 tokens, laid out as decode_warp.cuh says.
template <class C>
struct DecodeScores {
  static constexpr int kBlocks = C::unit / 16;

  // The row of the block that scores of an even or odd place have.
  static __device__ __forceinline__ int row_of(int tile, int e) {
    return 8 * tile + 2 * (threadIdx.x % 4) + e % 2;
  }

  // The key of score e of a block.
  static __device__ __forceinline__ int key_of(int first_key, int block, int e) {
    return first_key + 16 * block + KvTile<C>::token_of(threadIdx.x % 32 / 4 + e / 2 * 8);
  }

  // Keys that a row does not see become -inf, whatever they held.
  template <int kActive>
  static __device__ __forceinline__ void mask(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                              float (&s)[kActive][kBlocks][4], int first_key) {
#pragma unroll
    for (int i = 0; i < 2 * kActive; ++i) {
      const int nt = i / 2, row = row_of(nt, i % 2);
      const int of_query = C::features ? rows.query(p, row) : 0;
      int from, to;
      rows.seen(p, of_query, from, to);
#pragma unroll
      for (int j = 0; j < 2 * kBlocks; ++j) {
        const int e = 2 * (j % 2) + i % 2;
        const int key = key_of(first_key, j / 2, e);
        if ((C::features && key < from) || key >= to) s[nt][j / 2][e] = kEmptyMax;
      }
    }
    if (C::features && p.tree_mask != nullptr) mask_tree(p, rows, s, first_key);
  }

  // And those that the tree hides.
  template <int kActive>
  static __device__ __forceinline__ void mask_tree(const DecodeSplitParams& p,
                                                   const RowBlock<C>& rows,
                                                   float (&s)[kActive][kBlocks][4], int first_key) {
#pragma unroll
    for (int i = 0; i < 2 * kActive; ++i) {
      const int nt = i / 2, row = row_of(nt, i % 2);
      unsigned char shown[2 * kBlocks] = {};  // nothing to a row that the mask does not have
      if (rows.exists(row)) {
        const unsigned char* tree = rows.tree_row(p, rows.query(p, row)) - rows.shift;
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; ++j) {  // without a branch each, which takes longer
          const int key = key_of(first_key, j / 2, 2 * (j % 2) + i % 2);
          shown[j] = tree[min(max(key, rows.shift), rows.k_len - 1)];
        }
      }
#pragma unroll
      for (int j = 0; j < 2 * kBlocks; ++j) {
        const int e = 2 * (j % 2) + i % 2;
        const int key = key_of(first_key, j / 2, e);
        if (key >= rows.shift && shown[j] == 0) s[nt][j / 2][e] = kEmptyMax;
      }
    }
  }
};
