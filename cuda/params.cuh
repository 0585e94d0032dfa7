// SPDX-License-Identifier: Apache-2.0
// Every by-value parameter struct, but for those in params_cache.cuh. rawattn/registry.py reads
// both files: they are the only definition of their layout. One field a line, `type name;`, shape
// or unit beside it. Strides count elements. A null pointer is an absent tensor. A struct may
// inherit another one.
#pragma once

#include "tensor_map.cuh"

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
  // Softcap of a product x, where it can be folded into the softmax (scores.cuh): in log2 units
  // fold_x x + fold_x3 x^3 + fold_x5 x^5 while |x| < fold_near, which is 0 where it cannot;
  // e^(2s/c) is 2^(fold_power x).
  float fold_near;
  float fold_x;
  float fold_x3;
  float fold_x5;
  float fold_power;
};

// fwd_sm90(_self). Maps: (stored column, row, head, batch; one if packed). Copies add zero columns.
struct FwdSm90Params : FwdParams {
  int* tile_counter;  // [2] next query tile; blocks that have run dry. Zero before and after.
                      // Config::split: and [slots, warps] parts that have arrived
  int schedule;       // TileOrder of schedule.cuh: how blocks share the query tiles
  int last_sweep;     // sequence from which on sweeps cover up to 32; batch: none does
  int new_k;          // keys of every sequence that seqused_k does not count
  // Config::split, fwd_sm90_parts.cuh.
  float4* workspace;       // [slots, warps, value_dim / 8 + 1, 32]
  int whole;               // query tiles in front of those that are cut
  int places;              // of each that is cut, on the axis: its key tiles, or shares of them
  int axis;                // of all of them
  int span;                // of a piece
  ptx::TensorMap q_map;    // box: columns of a chunk x 64 rows
  ptx::TensorMap k_map;    // box: columns of a chunk x block_n rows
  ptx::TensorMap v_map;    // the same; ragged (rawattn/plan/base.py) where keys have tables
  ptx::TensorMap out_map;  // box: columns of a chunk x 64 rows; ragged where packed
};

// fwd_sm90_paged: k and v are a cache of pages, which stand where sequences did in shapes, strides
// and maps; boxes of k_map and v_map are 16 tokens. x-major: stride_v_row is 1, columns of v are
// `page` apart, and maps are those of decode_sm90, of e4m3 of decode_split.
struct FwdSm90PagedParams : FwdSm90Params {
  const int* page_ids;          // block_table [batch, max_blocks]; CSR: kv_indices
  const int* kv_indptr;         // CSR, as in PagedParams; null: block_table
  const int* kv_last_page_len;  // CSR
  long long stride_table;       // CSR: 0
  int page;                     // tokens, a multiple of 16, or all that a sequence may have
  int page_rows;                // rows of v_map from a page to the next; x-major: not used
  // Of e4m3, as in PagedParams; and numbers that multiply all.
  const float* k_scale;
  const float* v_scale;
  int stride_k_scale_batch;
  int stride_k_scale_head;
  int stride_v_scale_batch;
  int stride_v_scale_head;
  float k_scale_number;
  float v_scale_number;
  int q_bf16;
};

// Attention of queries, the last tokens of their sequences, over a paged cache. Whatever the
// layout, element (block, token of the page, head, d) of keys lies at block * stride_k_block +
// token * stride_k_token + head * stride_k_head + d / x * stride_k_chunk + d % x, with x = 16 bytes
// of elements (NHD, HND: stride_k_chunk is x; x-major: page * x, and stride_k_token is x). Of
// values at block * stride_v_block + token * stride_v_token + head * stride_v_head + d *
// stride_v_dim (1; x-major: page, and stride_v_token is 1). Pages of a sequence: block_table and
// seqused_k, or CSR.
struct PagedParams {
  // What is read first stands last, and together: constants arrive a 64-byte line at a time.
  const float* alibi_slopes;       // [q_heads] or [batch, q_heads]; may be null
  const float* sink;               // [q_heads] natural units, as a score after scaling; may be null
  const unsigned char* tree_mask;  // nonzero: query i of a sequence sees its key k_len - q_len + j,
                                   // at (its row of q) * stride_tree_row + j; null: `causal` says
  const float* k_scale;            // multiplies keys: at batch * stride_k_scale_batch + kv_head *
                                   // stride_k_scale_head; null: 1
  const float* v_scale;            // multiplies values, likewise
  void* out;                       // [batch, q_len, q_heads, value_dim], or packed
  float* lse;  // [batch, q_heads, q_len], or packed [q_heads, total_q]; natural log; may be null
  int stride_alibi_batch;  // 0 where the slopes are shared by the batch
  int stride_k_scale_batch;
  int stride_k_scale_head;
  int stride_v_scale_batch;
  int stride_v_scale_head;
  long long stride_tree_batch;  // dense queries; packed ones have theirs at row cu_seqlens_q[b] + i
  long long stride_tree_row;
  long long stride_out_batch;
  long long stride_out_row;
  long long stride_out_head;
  long long stride_lse_batch;
  long long stride_lse_head;
  int q_heads;
  int copy_bytes;      // 16, 8, 4, 2 or 1: what rows of q, out and the caches start on
  float softcap_log2;  // c log2(e) of c * tanh(s / c); 0: none
  float out_scale;     // multiplies out: v_scale where it is a number, else 1
  int q_bf16;          // 8-bit caches: 1 where q and out are bf16, 0 where they are fp16
  int value_dim;       // as stored
  long long stride_k_block;
  long long stride_k_token;
  long long stride_k_head;
  long long stride_k_chunk;
  long long stride_v_block;
  long long stride_v_token;
  long long stride_v_head;
  long long stride_v_dim;
  const void* k_cache;  // pages, of the type of q or 8 bits
  const void* v_cache;
  const void* q;  // [batch, q_len, q_heads, head_dim], or packed [total_q, q_heads, head_dim]
  long long stride_q_batch;
  long long stride_q_row;
  long long stride_q_head;
  int head_dim;                 // as stored
  float scale_log2;             // softmax scale times log2(e) (and k_scale, where it is a number)
  int window_right;             // keys after it, -1 unbounded; 0 is causal
  const int* kv_indptr;         // [batch + 1] first entry of kv_indices of each sequence
  const int* kv_indices;        // page ids
  const int* kv_last_page_len;  // [batch] keys in the last page of a sequence that has pages
  const int* cu_seqlens_q;      // [batch + 1] first row of each sequence; null: all have q_len rows
  const int* block_table;       // [batch, max_blocks] page ids; null: CSR
  const int* seqused_k;         // [batch] keys; null: CSR
  long long stride_table;       // elements from a sequence's row of block_table to the next
  int batch;
  int kv_heads;
  int group;        // query heads a KV head
  int q_len;        // queries of every sequence where cu_seqlens_q is null
  int max_k;        // a longer seqused_k counts as this: max_blocks * page
  int new_k;        // what to add to each seqused_k: tokens just appended, or minus a prefix
  int page;         // tokens a page
  int window_left;  // keys before the diagonal of a query, which is its own; -1 unbounded
};

// paged_v1.
struct PagedV1Params : PagedParams {
  int local_blocks;       // block-sparse: the last blocks, which all heads see
  int vert_stride;        // every so many blocks is seen besides; 0 or 1: all keys are seen
  int block_size;         // keys
  int head_sliding_step;  // blocks from a head's offset to the next head's; negative: a KV head's
  int tp_rank;            // times as many heads come before these
  int column_blocks;      // blocks that share the columns of a row of out, Config::head_dim each
  int queries;            // of a sequence, at most
};

struct PagedV2Params : PagedParams {
  // [batch, queries, q_heads, partitions, 2 + value_dim] max, sum, undivided out
  float* workspace;
  int local_blocks;  // as in PagedV1Params
  int vert_stride;
  int block_size;
  int head_sliding_step;
  int tp_rank;
  int column_blocks;
  int queries;
  int partitions;  // of the longest sequence
};

struct MergeParams {
  const void* first;        // [tokens, heads, head_dim], out of state 0
  const void* others;       // [states - 1, tokens, heads, head_dim], out of the other states
  const float* first_lse;   // [tokens, heads], any strides; -inf or +inf: the state has no keys
  const float* others_lse;  // [states - 1, tokens, heads]
  const float* out_scale;   // [1] what 8-bit out is divided by; null: out_scale_number
  void* out;                // [tokens, heads, head_dim]
  float* lse;               // [tokens, heads]; may be null
  long long first_tokens;   // tokens from here on have no state 0
  long long stride_first_token;
  long long stride_first_head;
  long long stride_others_state;
  long long stride_others_token;
  long long stride_others_head;
  long long stride_first_lse_token;
  long long stride_first_lse_head;
  long long stride_others_lse_state;
  long long stride_others_lse_token;
  long long stride_others_lse_head;
  long long stride_out_token;
  long long stride_out_head;
  long long stride_lse_token;
  long long stride_lse_head;
  int states;  // from 1
  int heads;
  int head_dim;
  int aligned;  // 1: every row starts on 16 bytes and is a multiple; 0: one element at a time
  int tokens;
  int row_magic;  // n / (threads a row) is n * row_magic >> 16, for n <= threads a block
  float out_scale_number;
};

// decode_split, decode_sm90.
struct DecodeSplitParams : PagedParams {
  // `n / x` is n * x_magic >> x_shift, for n < 2^31: a division takes longer than a read from L2.
  int columns;  // block i works in column i % columns of the grid, in row i / columns: splits.cuh
  int rows;
  int lines;       // of a column
  int row_blocks;  // blocks of rows, (query, head of the group), that a KV head has
  int span;        // units of a part where that is fixed; 0: whatever balances the blocks
  int page_shift;
  int span_shift;
  int columns_shift;
  int rows_shift;
  int group_shift;
  unsigned page_magic;
  unsigned span_magic;
  unsigned columns_magic;
  unsigned rows_magic;
  unsigned group_magic;
  int* tile_counter;  // [slots] parts that have arrived, decode_sm90: [slots, warps]; zero before
                      // and after a launch
  // Unmerged parts: [slots, rows of a block * columns of its V tile / 2]; decode_sm90: [slots,
  // rows, columns / 4 + 1].
  float4* workspace;
  int column_slots;  // fixed split: slots of a column
  // TMA. NHD, HND: (128 bytes of a row, token, parts of 128 bytes, head, block), boxes of 16 tokens
  // of a head (decode_sm90: and of one part), swizzled. x-major, boxes likewise: keys (x of each
  // token, D / x, head, block, 1), not swizzled; values (token, D, head, block), of decode_sm90
  // swizzled, else, where a page has 16 tokens, (token of x dimensions, D / x, head, block).
  ptx::TensorMap k_map;
  ptx::TensorMap v_map;
};
