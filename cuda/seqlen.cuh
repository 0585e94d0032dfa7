// SPDX-License-Identifier: Apache-2.0
// One sequence of a batch: its lengths, and where its rows start in dense, padded and packed
// tensors.
#pragma once

#include "params.cuh"

struct Sequence {
  int q_len;
  int k_len;
};

// Elements from the start of a tensor to row 0, head 0 of a sequence.
__device__ __forceinline__ long long sequence_offset(const int* cu_seqlens, int batch,
                                                     long long stride_batch, long long stride_row) {
  return cu_seqlens != nullptr ? cu_seqlens[batch] * stride_row : batch * stride_batch;
}

__device__ __forceinline__ int sequence_length(const int* cu_seqlens, int batch, int dense_length) {
  return cu_seqlens != nullptr ? cu_seqlens[batch + 1] - cu_seqlens[batch] : dense_length;
}

__device__ __forceinline__ Sequence sequence(const FwdParams& p, int batch) {
  Sequence s{sequence_length(p.cu_seqlens_q, batch, p.q_len),
             sequence_length(p.cu_seqlens_k, batch, p.k_len)};
  // A length outside its storage would read a neighbour: cap it.
  if (p.seqused_k != nullptr) s.k_len = max(0, min(s.k_len, p.seqused_k[batch]));
  return s;
}
