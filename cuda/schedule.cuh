// SPDX-License-Identifier: Apache-2.0
// Which block computes which query tile.
#pragma once

#include "params.cuh"

struct QueryTile {
  int m_block;  // block_m query rows, counted from the start of the sequence
  int q_head;
  int batch;
};

// Sweeps `head_group` (batch, head) pairs at a time, so that their keys and values stay in L2, over all query blocks
// with the pair fastest; the last query block comes first, since under a causal mask it is the longest.
__device__ __forceinline__ QueryTile longest_first(int index, const FwdParams& p) {
  const int first_pair = index / (p.m_blocks * p.head_group) * p.head_group;
  const int width = min(p.head_group, p.batch * p.q_heads - first_pair);  // the last sweep may be narrower
  const int rest = index - first_pair * p.m_blocks;
  const int pair = first_pair + rest % width;
  return {p.m_blocks - 1 - rest / width, pair % p.q_heads, pair / p.q_heads};
}
