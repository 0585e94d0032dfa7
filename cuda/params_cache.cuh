// SPDX-License-Identifier: Apache-2.0
// The by-value parameter structs of kv_write.cu, by the rules of params.cuh.
#pragma once

struct KvWriteParams {
  const void* k;  // [tokens, kv_heads, head_dim], or dense [batch, new_len, kv_heads, head_dim]
  const void* v;  // [tokens, kv_heads, value_dim], or dense
  void* k_cache;  // [blocks, page, kv_heads, head_dim], in any layout
  void* v_cache;  // [blocks, page, kv_heads, value_dim], in any layout
  const long long* slot_mapping;  // [tokens] block * page + offset, or negative; null: appended
  const int* block_table;         // [batch, max_blocks]; null: sequence b has block b alone
  const int* seqused_k;           // [batch] tokens before the new ones; null: none
  const int* cu_seqlens_new;      // [batch + 1] first token of each sequence; null: new_len each
  const float* k_scale;           // [1] or [kv_heads], of 8-bit caches; null: k_scale_number
  const float* v_scale;
  const void* cos;  // [positions, rotary_dim / 2], as k or float; where Config::rotary
  const void* sin;
  long long tokens;
  long long blocks;          // of the cache: nothing is written elsewhere
  long long stride_k_batch;  // 0 unless dense
  long long stride_k_token;
  long long stride_k_head;
  long long stride_v_batch;  // 0 unless dense
  long long stride_v_token;
  long long stride_v_head;
  long long stride_k_cache_block;
  long long stride_k_cache_head;
  long long stride_k_cache_slot;
  long long stride_k_cache_chunk;  // 16 bytes of elements are a chunk, and lie side by side
  long long stride_v_cache_block;
  long long stride_v_cache_head;
  long long stride_v_cache_slot;
  long long stride_v_cache_dim;  // 1, or the page where the cache is x-major
  long long stride_table_batch;
  long long stride_cos_row;  // of sin too
  int batch;                 // sequences, where tokens are appended
  int new_len;               // tokens of every sequence where cu_seqlens_new is null
  int max_blocks;            // columns of block_table; 1 where there is none
  int page;                  // tokens a block
  int kv_heads;
  int head_dim;
  int value_dim;
  int stride_k_scale;  // 1: one a KV head, 0: one for all
  int stride_v_scale;
  int rotary_dim;    // columns of k that are turned
  int interleaved;   // 1: a pair is columns 2 r and 2 r + 1, 0: r and rotary_dim / 2 + r
  int float_angles;  // 1: cos and sin hold float
  int positions;     // rows of cos and sin: a position past them is taken for the last one
  int aligned;       // 1: every row and piece starts on 16 bytes; 0: one element at a time
  int block_tokens;  // tokens a thread block
  int share_blocks;  // thread blocks that all shares (head, chunk of keys or values) take
  int token_lanes;   // tokens that a block has under way side by side
  int tokens_first;  // 1: neighbouring threads have neighbouring tokens; 0: neighbouring shares
  float k_scale_number;
  float v_scale_number;
};

struct RotaryParams {
  const void* x;         // [tokens, heads, head_dim], or dense [batch, new_len, heads, head_dim]
  void* y;               // as x; may be x
  const int* seqused_k;  // [batch] tokens before the new ones; null: none
  const int* cu_seqlens_new;  // [batch + 1] first token of each sequence; null: new_len each
  const void* cos;            // [positions, rotary_dim / 2], as x or float
  const void* sin;
  long long tokens;
  long long stride_x_batch;  // 0 unless dense
  long long stride_x_token;
  long long stride_x_head;
  long long stride_y_batch;  // 0 unless dense
  long long stride_y_token;
  long long stride_y_head;
  long long stride_cos_row;  // of sin too
  int batch;
  int new_len;
  int heads;
  int head_dim;
  int rotary_dim;
  int interleaved;
  int float_angles;
  int positions;
  int aligned;
  int same_position;  // 1: every token of a sequence is at the position of its first one
  int block_tokens;   // tokens a thread block
};

struct SequencesParams {
  const int* seqused_k;        // [batch] tokens of its pages, or row, before the new ones
  const int* cu_seqlens_new;   // [batch + 1] first new token of each sequence; null: new_k each
  const int* leftpad;          // [batch] tokens in front of a sequence, in its row; null: none
  const int* cache_batch_idx;  // [batch] row of the cache; null: its own
  int* lengths;                // [batch] keys that queries may see
  int* first_tokens;           // [batch] first one, counted from that of row 0; null: not asked for
  int batch;
  int new_k;
  int max_k;       // a longer sequence counts as this
  int row_tokens;  // from a row of the cache to the next
};

struct CopyBlocksParams {
  const long long* caches;  // [num_caches] addresses of arrays of blocks: of a layer's keys, values
  const long long* pairs;   // [pairs, 2] source and destination, block numbers
  long long block_bytes;    // which lie side by side
  long long stride_block_bytes;
  long long blocks;  // of each cache: a pair with another number is skipped
  int num_caches;
  int chunks;  // thread blocks that share one block
};
