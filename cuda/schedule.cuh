// SPDX-License-Identifier: Apache-2.0
// Which block computes which query tile.
#pragma once

#include "params.cuh"

struct QueryTile {
  int m_block;  // block_m query rows, counted from the start of the sequence
  int q_head;
  int batch;
};

// Sweeps `head_group` (batch, head) pairs at a time, so that their keys and values stay in L2, over
// all query blocks with the pair fastest; the last query block comes first, since under a causal
// mask it is the longest.
__device__ __forceinline__ QueryTile longest_first(unsigned index, const FwdParams& p) {
  const unsigned pairs = p.batch * p.q_heads;
  const unsigned first_pair =
      index / (p.m_blocks * p.head_group) * p.head_group;  // unsigned: half the instructions
  const unsigned width =
      min(static_cast<unsigned>(p.head_group), pairs - first_pair);  // the last may be narrower
  const unsigned rest = index - first_pair * p.m_blocks;
  const unsigned row = rest / width;
  const unsigned pair = first_pair + rest - row * width;
  const unsigned batch = pair / static_cast<unsigned>(p.q_heads);
  return {p.m_blocks - 1 - static_cast<int>(row), static_cast<int>(pair - batch * p.q_heads),
          static_cast<int>(batch)};
}
