// SPDX-License-Identifier: Apache-2.0
// Every by-value parameter struct. rawattn/registry.py reads this file: it is the only definition
// of their layout. One field a line, `type name;`, shape or unit beside it. Strides count elements.
// A null pointer is an absent tensor.
#pragma once

struct FwdParams {
  const void* q;  // [batch, q_len, q_heads, head_dim], or packed [total_q, q_heads, head_dim]
  const void* k;  // [batch, k_len, kv_heads, head_dim], or packed
  const void* v;  // [batch, k_len, kv_heads, value_dim], or packed
  void* out;      // [batch, q_len, q_heads, value_dim], or packed
  float* lse;     // [batch, q_heads, q_len], or packed [q_heads, total_q]; natural log; may be null
  const int* cu_seqlens_q;    // [batch + 1] first row of each sequence; null: all have q_len rows
  const int* cu_seqlens_k;    // [batch + 1]; null: sequence b starts at b * stride_k_batch
  const int* seqused_k;       // [batch] keys that count; null: all
  const float* alibi_slopes;  // [q_heads] or [batch, q_heads]; may be null
  const float* sink;          // [q_heads] natural units, as a score after scaling; may be null
  long long stride_q_batch;
  long long stride_q_row;
  long long stride_q_head;
  long long stride_k_batch;
  long long stride_k_row;
  long long stride_k_head;
  long long stride_v_batch;
  long long stride_v_row;
  long long stride_v_head;
  long long stride_out_batch;
  long long stride_out_row;
  long long stride_out_head;
  long long stride_lse_batch;
  long long stride_lse_head;
  int stride_alibi_batch;  // 0 where the slopes are shared by the batch
  int batch;
  int q_heads;
  int group;     // query heads a KV head
  int head_dim;  // as stored; the tile is padded with zeros to Config::head_dim
  int value_dim;
  int q_len;           // rows of every sequence where cu_seqlens_q is null
  int k_len;           // rows of every sequence where cu_seqlens_k is null
  int m_blocks;        // ceil(longest query / block_m)
  int head_group;      // (batch, head) pairs that one sweep over the query blocks covers, for L2
  int window_left;     // keys before the diagonal, -1 unbounded
  int window_right;    // keys after the diagonal, -1 unbounded; 0 is causal
  int copy_bytes;      // 16, 4 or 2: what rows of q, k, v and out start on and are a multiple of
  int top_left;        // 1: the diagonal of row i is key i; 0: key i + k_len - q_len
  float scale_log2;    // softmax scale times log2(e): scores are in log2 units
  float softcap_log2;  // c log2(e) of c * tanh(s / c); 0: none
};
