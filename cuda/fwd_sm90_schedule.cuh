// SPDX-License-Identifier: Apache-2.0
// Which query tiles a persistent block of fwd_sm90 computes, and which keys they see.
#pragma once

#include "fwd_sm90_warpgroup.cuh"
#include "schedule.cuh"

// Whether sequences may end before what is stored of their keys does: then v_map is ragged.
__device__ __forceinline__ bool ragged_keys(const FwdParams& p) {
  return p.cu_seqlens_k != nullptr || p.seqused_k != nullptr;
}

// A sequence, and the rows of q and out, and of k, at which it starts: 0 unless packed.
struct StoredSequence : Sequence {
  int q_first;
  int k_first;
};

// sequence(), but that all is read before any of it is waited for.
__device__ __forceinline__ StoredSequence stored_sequence(const FwdSm90Params& p, int batch) {
  int q_first = 0, q_end = p.q_len, k_first = 0, k_end = p.k_len, k_used = 0x7fffffff;
  if (p.cu_seqlens_q != nullptr) {
    q_first = p.cu_seqlens_q[batch];
    q_end = p.cu_seqlens_q[batch + 1];
  }
  if (p.cu_seqlens_k != nullptr) {
    k_first = p.cu_seqlens_k[batch];
    k_end = p.cu_seqlens_k[batch + 1];
  }
  if (p.seqused_k != nullptr) k_used = p.seqused_k[batch] + p.new_k;
  return {{q_end - q_first, max(0, min(k_end - k_first, k_used))}, q_first, k_first};
}

// The key tiles of a query tile. One that sees no key gets one key tile all the same, fully masked:
// a special case would cost the others more (H200, 2026-11-30: a loop that skips tiles made ptxas
// lose the uniformity of everything behind it, 10 %).
__device__ __forceinline__ FwdSm90Tile fwd_sm90_tile(const FwdParams& p, const QueryTile& at,
                                                     const StoredSequence& seq, int rows,
                                                     int block_n) {
  const int row = at.m_block * rows;
  const TileRange tiles(KeyInterval(p, seq), row, min(row + rows, seq.q_len) - 1, block_n);
  const bool none = tiles.first >= tiles.last;
  int v_first = seq.k_first;
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
          seq.q_first,
          seq.k_first,
          v_first};
}

// The numbers of a block's tiles, for one warp, whose lanes call together.
class TileNumbers {
 public:
  __device__ __forceinline__ explicit TileNumbers(const FwdSm90Params& params)
      : p(params), index_(blockIdx.x) {}

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

 protected:
  // The one drawn last.
  __device__ __forceinline__ int number() const { return __shfl_sync(0xffffffffu, index_, 0); }

  const FwdSm90Params& p;

 private:
  int index_;
};

// The tiles of a block, for one warp, whose lanes call together. A sweep covers the query tiles of
// some heads of one sequence, or of all heads of up to 32, the longest sequence first, and of all
// the last rows first: under a causal mask they have the longest tiles. What lies behind the end of
// a sequence is no tile.
template <int kRows, int kBlockN, class Params>
class TileWalk : public TileNumbers {
 public:
  using TileNumbers::TileNumbers;

  // The tile drawn last; first == last: there are no more.
  __device__ __forceinline__ FwdSm90Tile tile() {
    const int index = number();
    if (!find_sequences(index)) return {};
    const QueryTile at = find_tile(index - first_index_);
    return fwd_sm90_tile(p, at, sequence_of(at.batch - first_batch_), kRows, kBlockN);
  }

 private:
  // Of the sweep that begins with first_batch_. A wide last one ends with the short tiles of many
  // heads, which even out what long ones left uneven; sweeps as wide from the start would not find
  // their keys in L2.
  __device__ __forceinline__ int sequences() const {
    return first_batch_ >= p.last_sweep ? 32 : max(1, min(32, p.head_group / p.q_heads));
  }

  // Each lane looks at one sequence from first_batch_ on.
  __device__ __forceinline__ void count() {
    const int batch = first_batch_ + threadIdx.x % 32;
    end_batch_ = first_batch_ + sequences();
    const bool mine = batch < min(end_batch_, p.batch);
    if (mine) sequence_ = stored_sequence(static_cast<const Params&>(p), batch);
    blocks_ = mine ? ceil_div(sequence_.q_len, kRows) : 0;
    all_blocks_ = __reduce_add_sync(0xffffffffu, blocks_);
  }

  // Goes on to the sequences that have tile `index`; whether there are any.
  __device__ __forceinline__ bool find_sequences(int index) {
    while (index - first_index_ >= static_cast<int>(all_blocks_ * p.q_heads)) {
      first_index_ += all_blocks_ * p.q_heads;
      first_batch_ = end_batch_;
      if (first_batch_ >= p.batch) return false;
      count();
    }
    return true;
  }

  // A tile of them, counted from their first.
  __device__ __forceinline__ QueryTile find_tile(unsigned index) const {
    const unsigned group = min(p.head_group, p.q_heads);
    const unsigned first_head = index / (all_blocks_ * group) * group;
    const unsigned heads = min(group, p.q_heads - first_head);
    index -= first_head * all_blocks_;
    unsigned high = __reduce_max_sync(0xffffffffu, blocks_);
    while (true) {  // from the longest sequences on: block high - 1 is the last of the next
      const unsigned members = __ballot_sync(0xffffffffu, blocks_ >= high);
      const unsigned low = __reduce_max_sync(0xffffffffu, blocks_ < high ? blocks_ : 0);
      const unsigned width = __popc(members) * heads;
      if (index < (high - low) * width) {
        const unsigned row = index / width;
        const unsigned pair = index - row * width;
        const unsigned member = pair / heads;
        return {static_cast<int>(high - 1 - row),
                static_cast<int>(first_head + pair - member * heads),
                first_batch_ + nth_lane(members, member)};
      }
      index -= (high - low) * width;
      high = low;
    }
  }

  // What a lane has read of its sequence: memory would answer later.
  __device__ __forceinline__ StoredSequence sequence_of(int lane) const {
    const auto from = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
    return {{from(sequence_.q_len), from(sequence_.k_len)},
            from(sequence_.q_first),
            from(sequence_.k_first)};
  }

  // The lane whose bit is the n-th that is set, from 0.
  static __device__ __forceinline__ int nth_lane(unsigned bits, unsigned n) {
    const unsigned lane = threadIdx.x % 32;
    const bool found = (bits >> lane & 1) != 0 && __popc(bits & ((1u << lane) - 1)) == n;
    return __ffs(__ballot_sync(0xffffffffu, found)) - 1;
  }

  int first_batch_ = 0;  // sequences [first_batch_, end_batch_) are in sight, at first none
  int end_batch_ = 0;
  int first_index_ = 0;           // tiles of the sequences before first_batch_
  StoredSequence sequence_ = {};  // the lane's
  unsigned blocks_ = 0;           // of its query rows
  unsigned all_blocks_ = 0;       // of all lanes
};
