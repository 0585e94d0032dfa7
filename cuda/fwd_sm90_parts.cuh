// SPDX-License-Identifier: Apache-2.0
// Query tiles whose keys are cut into parts, each of another block, and how they become one.
//
// Blocks take query tiles in rounds, and the last is not always full. The tiles of that one (where
// there are fewer tiles than blocks, all) stand on an axis, end to end, with as many places each:
// one for a key tile, or, where sequences differ, for an equal share of those of its sequence.
// Pieces of `span` places are dealt out as tiles are. What a piece has of a tile is a part: a piece
// may be the end of one tile and the beginning of the next. The sums of a part go to a slot
// of the workspace, and which warp leaves the last part of its 16 rows adds all of them, in order:
// nobody waits, and equal calls give equal bits.
#pragma once

#include "fwd_sm90_schedule.cuh"

// A query tile, or what a piece has of one.
struct FwdSm90Part : FwdSm90Tile {
  int parts;       // of the tile; 1: [first, last) are all key tiles that it sees
  int first_slot;  // of the tile's parts, which follow one another
  int slot;        // of this one
};

// What TileWalk is for whole tiles, without windows: tiles in front of p.whole, where sequences are
// dense, then pieces, part by part.
template <int kRows, int kBlockN, class Params>
class PartWalk : public TileNumbers {
 public:
  using TileNumbers::TileNumbers;

  // The tile, or part of one, that was drawn last; what sees no key is passed over.
  __device__ __forceinline__ FwdSm90Part tile() {
    while (true) {
      const int index = number(), piece = index - p.whole;
      FwdSm90Part t = {};
      if (piece < 0) {
        static_cast<FwdSm90Tile&>(t) = whole_tile(index);
        t.parts = 1;
        return t;
      }
      const int piece_end = min((piece + 1) * p.span, p.axis);
      const int begin = rest_ > 0 ? piece_end - rest_ : piece * p.span;
      if (begin >= piece_end) return t;
      const unsigned places = p.places, span = p.span;
      const unsigned cut = static_cast<unsigned>(begin) / places;  // which of the tiles
      const unsigned start = cut * places, first_piece = start / span;
      const int end = min(piece_end, static_cast<int>(start + places));
      rest_ = piece_end - end;

      static_cast<FwdSm90Tile&>(t) = whole_tile(p.whole + cut);
      const int k_tiles = ceil_div(t.k_len, kBlockN);
      const int share = max(1, ceil_div(k_tiles, p.places));  // key tiles of a place
      // Of a tile behind the last row, none; under a causal mask, fewer than its sequence has.
      const int seen = t.row < t.q_len ? t.last : 0;
      t.first = (begin - start) * share;
      t.last = min(seen, (end - static_cast<int>(start)) * share);
      if (t.first < t.last) {
        t.parts = (start + ceil_div(seen, share) - 1) / span - first_piece + 1;
        t.first_slot = cut + first_piece;
        t.slot = cut + piece;
        return t;
      }
      draw();
    }
  }

  __device__ __forceinline__ void draw() {
    if (rest_ == 0) TileNumbers::draw();
  }

 private:
  __device__ __forceinline__ FwdSm90Tile whole_tile(unsigned index) const {
    const QueryTile at = longest_first(index, p);
    const StoredSequence sequence = stored_sequence(static_cast<const Params&>(p), at.batch);
    return fwd_sm90_tile(p, at, sequence, kRows, kBlockN);
  }

  int rest_ = 0;  // of the piece
};

// What the blocks of a Config take.
template <class C, bool kSplit = C::split>
struct FwdSm90Work {
  using Tile = FwdSm90Tile;
  template <class Params>
  using Walk = TileWalk<C::block_m, C::block_n, Params>;
};
template <class C>
struct FwdSm90Work<C, true> {
  static_assert(!C::window, "parts are counted from the first key");
  using Tile = FwdSm90Part;
  template <class Params>
  using Walk = PartWalk<C::block_m, C::block_n, Params>;
};

// Warp by warp: slots are [warp of the consumers][float4 of a thread][lane], so that a warp stores
// and reads 512 bytes in a row. Each has a counter a warp, of which those of a tile's first count.
template <class C>
struct FwdSm90Parts {
  using Warpgroup = FwdSm90Warpgroup<C>;
  static constexpr int kWarps = 4 * C::consumers;
  static constexpr int kOut = C::value_dim / 8;  // float4 of a thread; one more holds max and sum
  // Of them, loads in flight when parts are added. Threads of three consumers have 160 registers,
  // and would spill with more.
  static constexpr int kAtOnce = C::consumers == 3 ? 2 : kOut;

  static __device__ __forceinline__ float4* place(const FwdSm90Params& p, int slot) {
    const long long warp = slot * kWarps + threadIdx.x / 32;
    return p.workspace + warp * (kOut + 1) * 32 + Warpgroup::lane();
  }

  // Leaves out, max and sum of a part. Whether this was the last part of the warp's rows: then they
  // hold what all parts together have.
  static __device__ __forceinline__ bool add(const FwdSm90Params& p, const FwdSm90Part& t,
                                             Warpgroup& group) {
    leave(place(p, t.slot), group);
    __syncwarp();  // the warp's sums are written
    unsigned arrived = 0;
    if (Warpgroup::lane() == 0) {
      auto* counters = reinterpret_cast<unsigned*>(p.tile_counter) + 2 + t.first_slot * kWarps;
      arrived = ptx::atom_inc_acq_rel(counters + threadIdx.x / 32, t.parts - 1);
    }
    __syncwarp();  // and those of the others come before what follows
    if (uniform(arrived) != t.parts - 1) return false;
    gather(p, t, group);
    return true;
  }

 private:
  static __device__ __forceinline__ void leave(float4* to, Warpgroup& group) {
    const float (&out)[4 * kOut] = flat(group.out);
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      to[32 * i] = make_float4(out[4 * i], out[4 * i + 1], out[4 * i + 2], out[4 * i + 3]);
    }
    const float (&max)[2] = group.softmax.max[0];
    const float (&sum)[2] = group.softmax.sum[0];
    to[32 * kOut] = make_float4(max[0], max[1], sum[0], sum[1]);
  }

  static __device__ __forceinline__ void gather(const FwdSm90Params& p, const FwdSm90Part& t,
                                                Warpgroup& group) {
    group.clear();
    float (&out)[4 * kOut] = flat(group.out);
    float (&max)[2] = group.softmax.max[0];
    float (&sum)[2] = group.softmax.sum[0];
#pragma unroll 1
    for (int i = 0; i < t.parts; i += 4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {  // loads in flight together; the last may come again
        const int slot = t.first_slot + min(i + j, t.parts - 1);
        const float4 stats = __ldcg(place(p, slot) + 32 * kOut);
        max[0] = fmaxf(max[0], stats.x);
        max[1] = fmaxf(max[1], stats.y);
      }
    }
#pragma unroll 1
    for (int i = 0; i < t.parts; ++i) {
      const float4* from = place(p, t.first_slot + i);
      const float4 stats = __ldcg(from + 32 * kOut);
      const float weight[2] = {ptx::ex2_approx(stats.x - finite_max(max[0])),
                               ptx::ex2_approx(stats.y - finite_max(max[1]))};
      sum[0] = fmaf(stats.z, weight[0], sum[0]);
      sum[1] = fmaf(stats.w, weight[1], sum[1]);
#pragma unroll
      for (int j = 0; j < kOut; ++j) {
        const float4 x = __ldcg(from + 32 * j);
        out[4 * j] = fmaf(x.x, weight[0], out[4 * j]);
        out[4 * j + 1] = fmaf(x.y, weight[0], out[4 * j + 1]);
        out[4 * j + 2] = fmaf(x.z, weight[1], out[4 * j + 2]);
        out[4 * j + 3] = fmaf(x.w, weight[1], out[4 * j + 3]);
        if (j % kAtOnce == kAtOnce - 1) __syncwarp();
      }
    }
  }
};
