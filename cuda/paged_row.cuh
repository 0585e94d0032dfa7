// SPDX-License-Identifier: Apache-2.0
// Which row a block of paged_v1 or paged_v2 has, and which keys the row sees.
#pragma once

#include "pages.cuh"

// The row of a block, a (sequence, query, query head), and its up to `width` columns of out.
struct PagedRow {
  int batch, query, head, kv_head;
  int first_column, columns;
  int k_len;
  int diagonal;    // the key that is the query's own
  int begin, end;  // the keys that it may see, unless a pattern or a tree hides them
  bool exists;     // whether its sequence has so many queries
  const int* pages;

  template <class Params>
  __device__ __forceinline__ PagedRow(const Params& p, unsigned number, int column_block, int width)
      : head(number % static_cast<unsigned>(p.q_heads)),
        kv_head(head / p.group),
        first_column(column_block * width),
        columns(min(width, p.value_dim - first_column)) {
    const unsigned token = number / static_cast<unsigned>(p.q_heads);
    batch = token / static_cast<unsigned>(p.queries);
    query = token - batch * p.queries;
    const PagedSequence sequence(p, batch);
    k_len = sequence.k_len;
    pages = sequence.pages;
    exists = query < sequence.q_len;
    diagonal = k_len - sequence.q_len + query;
    begin = p.window_left < 0 ? 0 : max(0, diagonal - p.window_left);
    end = p.window_right < 0 || p.tree_mask != nullptr ? k_len
                                                       : min(k_len, diagonal + p.window_right + 1);
    token_of_all = query + (p.cu_seqlens_q != nullptr ? p.cu_seqlens_q[batch] : 0);
  }

  // Where it is in a tensor of rows; of packed ones stride_batch is 0.
  __device__ __forceinline__ long long offset(long long stride_batch, long long stride_row) const {
    return batch * stride_batch + token_of_all * stride_row;
  }

  // Whether a tree of draft tokens lets it see a key.
  __device__ __forceinline__ bool sees(const PagedParams& p, int key) const {
    if (p.tree_mask == nullptr) return true;
    const int draft = key - (k_len - PagedSequence(p, batch).q_len);
    return draft < 0 || p.tree_mask[offset(p.stride_tree_batch, p.stride_tree_row) + draft] != 0;
  }

 private:
  int token_of_all;  // packed: among the queries of all sequences; else in its own
};

// Block-sparse attention as PagedAttention has it: of the blocks of block_size keys a head sees the
// last local_blocks, and every vert_stride-th, from an offset that moves from head to head.
template <class Params>
struct BlockSparse {
  int offset;
  int first_local;

  __device__ __forceinline__ BlockSparse(const Params& p, const PagedRow& row) {
    const int step = p.head_sliding_step;
    const int heads = step < 0 ? p.kv_heads : p.q_heads;
    const int head = p.tp_rank * heads + (step < 0 ? row.kv_head : row.head);
    offset = head * (step < 0 ? -step : step) + 1;
    first_local = p.vert_stride > 1 ? (row.k_len - 1) / p.block_size - p.local_blocks + 1 : 0;
  }
  __device__ __forceinline__ bool sees(const Params& p, int key) const {
    if (p.vert_stride <= 1) return true;
    const int block = key / p.block_size;
    return block >= first_local || (block + offset) % p.vert_stride == 0;
  }
};
