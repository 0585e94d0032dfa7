// SPDX-License-Identifier: Apache-2.0
// PagedAttention v1: each query by itself, over an x-major cache, in one pass. Strides say where
// elements lie, so caches of other layouts are taken too; their values are read one by one.
//
//   K [blocks, kv_heads, head_dim / x, page, x], x = 16 bytes of elements: 16 bytes of one key,
//     then the same of the next key of the page.
//   V [blocks, kv_heads, value_dim, page]: one dimension of all values of the page.
//
// Grid: one block a (sequence, query, query head), heads fastest, so that the heads of a group find
// what one of them has read in L2; several where a row of out is longer than a tile. Its warps take
// the tiles of 32 keys in turn (paged_attend.cuh) and put their parts together at the end.
//
// The readable rung of decode. decode_split does the same work for all heads of a group at once, on
// tensor cores, and shares long sequences among blocks.
//
// Numerics: products, sums and weights in float32.

#include "paged_attend.cuh"

template <class C>
using PagedV1Smem = PagedSmem<C>;

template <class C>
__device__ __forceinline__ void paged_v1(const PagedV1Params& p) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  PagedSmem<C>& smem = *reinterpret_cast<PagedSmem<C>*>(smem_bytes);
  const unsigned column_blocks = p.column_blocks, number = blockIdx.x / column_blocks;
  const PagedRow row(p, number, blockIdx.x - number * column_blocks, C::head_dim);
  if (!row.exists) return;
  attend(smem, p, row, row.begin, row.end);
  write_row(smem, p, row);
}
