// SPDX-License-Identifier: Apache-2.0
// Which block computes which query tile.
#pragma once

#include "params.cuh"

struct QueryTile {
  int m_block;  // block_m query rows, counted from the start of the sequence
  int q_head;
  int batch;
};

// Sweeps `head_group` of `pairs` (batch, head) pairs at a time, so that their keys and values stay
// in L2, over all query blocks with the pair fastest; the last query block comes first, since under
// a causal mask it is the longest.
struct Sweep {
  unsigned m_block;
  unsigned pair;

  __device__ __forceinline__ Sweep(unsigned index, unsigned m_blocks, unsigned pairs,
                                   unsigned head_group) {  // unsigned: half the instructions
    const unsigned first_pair = index / (m_blocks * head_group) * head_group;
    const unsigned width = min(head_group, pairs - first_pair);  // the last may be narrower
    const unsigned rest = index - first_pair * m_blocks;
    const unsigned row = rest / width;
    m_block = m_blocks - 1 - row;
    pair = first_pair + rest - row * width;
  }
};

// The tiles of sequences that have m_blocks query blocks each.
__device__ __forceinline__ QueryTile longest_first(unsigned index, const FwdParams& p) {
  const Sweep at(index, p.m_blocks, p.batch * p.q_heads, p.head_group);
  const unsigned batch = at.pair / static_cast<unsigned>(p.q_heads);
  return {static_cast<int>(at.m_block), static_cast<int>(at.pair - batch * p.q_heads),
          static_cast<int>(batch)};
}

// How persistent blocks share the tiles of a launch (Params::schedule).
enum TileOrder {
  kStatic = 0,  // block b takes tiles b, b + blocks, b + 2 blocks, ...
  kDynamic = 1  // whoever is done takes the next one
};
