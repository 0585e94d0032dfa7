// SPDX-License-Identifier: Apache-2.0
// One sequence of a batch over a paged cache: its lengths, its rows of q, its pages. Lengths and
// page ids are read from device memory, and nowhere else.
#pragma once

#include "params.cuh"
#include "seqlen.cuh"

// Keys before this one are outside the windows of all queries of a sequence.
__device__ __forceinline__ int window_begin(const PagedParams& p, int q_len, int k_len) {
  return p.window_left < 0 ? 0 : max(0, k_len - q_len - p.window_left);
}

struct PagedSequence {
  int q_len;         // queries: the last tokens of the sequence
  int k_len;         // keys, those of the queries included
  const int* pages;  // ids; entries from ceil(k_len / page) on are never read

  __device__ __forceinline__ PagedSequence(const PagedParams& p, int batch)
      : q_len(sequence_length(p.cu_seqlens_q, batch, p.q_len)), pages(page_ids(p, batch)) {
    if (p.block_table != nullptr) {
      k_len = dense_keys(p, batch);
    } else {
      const int first = __ldg(p.kv_indptr + batch);
      const int count = __ldg(p.kv_indptr + batch + 1) - first;
      k_len = csr_keys(p, count, __ldg(p.kv_last_page_len + batch), p.max_k);
    }
  }

  // Keys of `count` pages, of which the last has `last`.
  template <class Params>
  static __device__ __forceinline__ int csr_keys(const Params& p, int count, int last, int max_k) {
    return count > 0 ? max(0, min(max_k, (count - 1) * p.page + min(p.page, last))) : 0;
  }

  // Keys of a sequence of block_table.
  static __device__ __forceinline__ int dense_keys(const PagedParams& p, int batch) {
    return capped(p, __ldg(p.seqused_k + batch));
  }
  // A length outside its table would read a neighbour's pages.
  static __device__ __forceinline__ int capped(const PagedParams& p, int length) {
    return max(0, min(p.max_k, length + p.new_k));
  }

  static __device__ __forceinline__ const int* page_ids(const PagedParams& p, int batch) {
    return p.block_table != nullptr ? p.block_table + batch * p.stride_table
                                    : p.kv_indices + __ldg(p.kv_indptr + batch);
  }
};
