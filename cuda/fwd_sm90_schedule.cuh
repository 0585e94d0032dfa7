// SPDX-License-Identifier: Apache-2.0
// Which query tiles a persistent block of fwd_sm90 computes, and which keys they see.
#pragma once

#include "fwd_sm90_warpgroup.cuh"
#include "schedule.cuh"

// Whether sequences may end before what is stored of their keys does: then v_map is ragged.
__device__ __forceinline__ bool ragged_keys(const FwdParams& p) {
  return p.cu_seqlens_k != nullptr || p.seqused_k != nullptr;
}

// The key tiles of a query tile. One that sees no key gets one key tile all the same, fully masked:
// a special case would cost the others more (H200, 2026-11-30: a loop that skips tiles made ptxas
// lose the uniformity of everything behind it, 10 %).
__device__ __forceinline__ FwdSm90Tile fwd_sm90_tile(const FwdParams& p, const QueryTile& at,
                                                     int rows, int block_n) {
  const Sequence seq = sequence(p, at.batch);
  const int row = at.m_block * rows;
  const TileRange tiles(KeyInterval(p, seq), row, min(row + rows, seq.q_len) - 1, block_n);
  const bool none = tiles.first >= tiles.last;
  const int q_first = p.cu_seqlens_q != nullptr ? p.cu_seqlens_q[at.batch] : 0;
  const int k_first = p.cu_seqlens_k != nullptr ? p.cu_seqlens_k[at.batch] : 0;
  int v_first = k_first;
  if (p.cu_seqlens_k == nullptr && p.seqused_k != nullptr) {
    const int rows_apart = p.stride_v_row == 0 ? 1 : p.stride_v_batch / p.stride_v_row;
    v_first = at.batch * rows_apart;
  }
  return {row,
          none ? 0 : tiles.first,
          none ? 1 : tiles.last,
          seq.q_len,
          seq.k_len,
          at.q_head,
          static_cast<int>(static_cast<unsigned>(at.q_head) / static_cast<unsigned>(p.group)),
          at.batch,
          q_first,
          k_first,
          v_first};
}

// The tiles of sequences that have m_blocks query blocks each: longest_first(), but for a wide last
// sweep. It ends with the short tiles of many heads, which even out what long ones left uneven;
// sweeps as wide from the start would not find their keys in L2.
__device__ __forceinline__ QueryTile even_end(unsigned index, const FwdSm90Params& p) {
  const unsigned pairs = p.batch * p.q_heads;
  const unsigned first_of_last = p.last_sweep * p.m_blocks;
  if (index < first_of_last) return longest_first(index, p);
  const unsigned left = pairs - p.last_sweep;
  const Sweep at(index - first_of_last, p.m_blocks, left, left);
  return query_tile(at.m_block, p.last_sweep + at.pair, p);
}

// The tiles of a block, for one warp, whose lanes call together. Where queries are packed, the
// tiles of each sequence follow those of the one before: what lies behind its end is no tile.
template <int kRows, int kBlockN>
class TileWalk {
 public:
  __device__ __forceinline__ explicit TileWalk(const FwdSm90Params& params)
      : p(params), index_(blockIdx.x) {
    if (p.cu_seqlens_q != nullptr) count();
  }

  // The tile drawn last; first == last: there are no more.
  __device__ __forceinline__ FwdSm90Tile tile() {
    const int index = __shfl_sync(0xffffffffu, index_, 0);
    QueryTile at;
    if (p.cu_seqlens_q != nullptr) {
      if (!find(index, at)) return {};
    } else {
      if (index >= p.m_blocks * p.batch * p.q_heads) return {};
      at = even_end(index, p);
    }
    return fwd_sm90_tile(p, at, kRows, kBlockN);
  }

  // Draws the next one. Only lane 0 holds the number, so that nobody waits for it here.
  __device__ __forceinline__ void draw() {
    if (p.schedule == kStatic) {
      index_ += gridDim.x;
    } else if (threadIdx.x % 32 == 0) {
      index_ = gridDim.x + atomicAdd(p.tile_counter, 1);
    }
  }

  // After the last tile: the last block to come here leaves the counters as it found them.
  __device__ __forceinline__ void end() const {
    if (p.schedule == kDynamic && threadIdx.x % 32 == 0 &&
        atomicAdd(p.tile_counter + 1, 1) == static_cast<int>(gridDim.x) - 1) {
      p.tile_counter[0] = 0;
      p.tile_counter[1] = 0;
    }
  }

 private:
  // Each lane looks at one of 32 sequences from first_batch_: its tiles, and theirs up to it.
  __device__ __forceinline__ void count() {
    const int batch = first_batch_ + threadIdx.x % 32;
    tiles_ = batch < p.batch ? ceil_div(sequence(p, batch).q_len, kRows) * p.q_heads : 0;
    end_ = tiles_;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, end_, step);
      if (threadIdx.x % 32 >= step) end_ += before;
    }
    end_ += first_index_;
  }

  __device__ __forceinline__ bool find(int index, QueryTile& at) {
    unsigned behind = __ballot_sync(0xffffffffu, index < end_);
    while (behind == 0) {
      first_batch_ += 32;
      if (first_batch_ >= p.batch) return false;
      first_index_ = __shfl_sync(0xffffffffu, end_, 31);
      count();
      behind = __ballot_sync(0xffffffffu, index < end_);
    }
    const int lane = __ffs(behind) - 1;
    const int tiles = __shfl_sync(0xffffffffu, tiles_, lane);
    const int first = __shfl_sync(0xffffffffu, end_, lane) - tiles;
    const Sweep sweep(index - first, tiles / p.q_heads, p.q_heads, min(p.head_group, p.q_heads));
    at = {static_cast<int>(sweep.m_block), static_cast<int>(sweep.pair), first_batch_ + lane};
    return true;
  }

  const FwdSm90Params& p;
  int index_;
  int first_batch_ = 0;
  int first_index_ = 0;  // tiles of the sequences before first_batch_
  int tiles_ = 0;
  int end_ = 0;
};
