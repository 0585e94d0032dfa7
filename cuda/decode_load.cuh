// SPDX-License-Identifier: Apache-2.0
// The loads of decode_split: units of keys and values to shared memory, by TMA or by cp.async.
#pragma once

#include "decode_load_unaligned.cuh"

// The loads of one warp, which has a ring of stages: each holds the keys and values of one unit.
// They run ahead of the arithmetic, across parts, so memory never waits for a merge. Page ids are
// read a *run* of units at a time, each lane another one, and a run ahead: no copy waits for them.
// A lane starts the copies from the page that it has read: ids that all lanes have ptxas moves to
// uniform registers at once, which waits for them, and 8-bit caches took 13 % longer (H200).
template <class C>
struct Loader {
  using Tile = KvTile<C>;
  static constexpr int kRun = C::tma ? 32 / Tile::kBoxes : 1;  // units

  struct Run {
    int unit, last;  // the next one of this warp, and where the run ends; unit >= last: none
    int kv_head;     // the first of the unit
    int k_len;
    int page;  // TMA: of box lane % kBoxes of unit lane / kBoxes; cp.async: of token lane % unit
  };

  Walk<C> walk;
  bool more;   // whether `unit` may be in this part or a later one
  int unit;    // the first one whose pages have not been read
  int copied;  // units of `now`
  Run now, next;
  unsigned ring;  // shared addresses
  unsigned full;  // barriers, TMA
  int length;     // clusters: what seqused_k holds of the sequence, where there is one

  __device__ __forceinline__ Loader(unsigned ring_, unsigned full_) : ring(ring_), full(full_) {}

  // Clusters, whose first run does not depend on lengths: reads its pages, and the length. Past the
  // end of the sequence they are whatever the table holds, and not used. No branch: what it does
  // with the length the compiler would move above it.
  __device__ __forceinline__ void read_ahead(const DecodeSplitParams& p, int batch, int turn,
                                             int turns) {
    const int token = min(token_of_lane(turn, turns), p.max_k - 1);
    const int* page = p.block_table + batch * p.stride_table + page_of(p, token);
    now.page = __ldg(p.block_table != nullptr ? page : p.kv_indptr);
    // Opaque: else it is read where it is used.
    length = ptx::opaque(__ldg((p.block_table != nullptr ? p.seqused_k : p.kv_indptr) + batch));
  }

  // Returns when the pages are there. ptxas counts loads under way, and would otherwise have the
  // copies wait for q too, which is read before they start.
  __device__ __forceinline__ void await_pages() {
    now.page = __shfl_sync(0xffffffffu, now.page, threadIdx.x % 32);
  }

  // Whether the first unit is copied before the length is known: zeros where the table holds no
  // page.
  static __device__ __forceinline__ bool copies_ahead(const DecodeSplitParams& p) {
    return C::cluster > 1 && p.block_table != nullptr;
  }

  // Then: starts its copies, to the first stage, as soon as its pages are there.
  __device__ __forceinline__ void copy_ahead(const DecodeSplitParams& p, const BlockPlace& at,
                                             int turn) {
    now.kv_head = at.kv_head(p, 0) * C::heads;
    copied = 0;
    const int box = threadIdx.x % 32;
    if (box < Tile::kBoxes) copy_box(p, 0, turn * C::unit + 16 * box, box, Tile::kBoxes);
  }

  // Before the block ends: they have come, also where the sequence has no such unit.
  __device__ __forceinline__ void settle(const DecodeSplitParams& p, int turn, int units) const {
    if (copies_ahead(p) && turn >= units) wait(0, 0);
  }

  // A warp's units are `turn`, turn + turns, ... of each part.
  __device__ __forceinline__ void begin(const DecodeSplitParams& p, const BlockPlace& at,
                                        const Walk<C>& from, bool any_part, int turn, int turns) {
    walk = from;
    more = any_part;
    unit = walk.first + turn;
    copied = 0;
    const bool ahead = copies_ahead(p);
    const int page = now.page;
    now = read_run(p, at, turn, turns, ahead);
    if (ahead) now.page = page;
    next = Run{};
    if (ahead && now.unit < now.last) advance(p, at, turn, turns);
  }

  // Starts the copies of this warp's next unit into `stage`, which nobody reads any more.
  __device__ __forceinline__ void issue(const DecodeSplitParams& p, const BlockPlace& at, int stage,
                                        int turn, int turns) {
    if (now.unit >= now.last) {  // not when `next` is read: a move waits for the load
      now = next;
      copied = 0;
    }
    if (now.unit < now.last) {
      copy(p, stage);
      advance(p, at, turn, turns);
    }
    if constexpr (!C::tma) ptx::cp_async_commit_group();  // also an empty one: waits count them
  }

  // Returns when `stage` has been filled.
  __device__ __forceinline__ void wait(int stage, int parity) const {
    if constexpr (C::tma) {
      while (!ptx::mbarrier_try_wait(full + stage * 8, parity)) {
      }
    } else {
      ptx::cp_async_wait_group<C::ahead - 1>();
      __syncwarp();  // the pieces that the other lanes copied
    }
  }

 private:
  // The present unit is on its way: goes on to the next one.
  __device__ __forceinline__ void advance(const DecodeSplitParams& p, const BlockPlace& at,
                                          int turn, int turns) {
    now.unit += turns;
    ++copied;
    // Not before the first copies, which nothing may hold up.
    if (copied == C::ahead || (now.unit >= now.last && copied < C::ahead)) {
      next = read_run(p, at, turn, turns, false);
    }
  }

  // The warp's next units of one part, and, unless `known`, their pages.
  __device__ __forceinline__ Run read_run(const DecodeSplitParams& p, const BlockPlace& at,
                                          int turn, int turns, bool known) {
    while (more && unit >= walk.last) {
      more = walk.next(p, at);
      unit = walk.first + turn;
    }
    if (!more) return Run{};
    Run run{unit, min(walk.last, unit + kRun * turns), at.kv_head(p, walk.line) * C::heads,
            walk.k_len, 0};
    if (!known) run.page = read_page(p, walk.batch, unit, turns, walk.k_len);
    unit += kRun * turns;
    return run;
  }

  // Whose page this lane reads, of the run that begins with `first`.
  static __device__ __forceinline__ int token_of_lane(int first, int turns) {
    const int lane = threadIdx.x % 32;
    return C::tma ? (first + lane / Tile::kBoxes * turns) * C::unit + lane % Tile::kBoxes * 16
                  : first * C::unit + lane % C::unit;
  }

  static __device__ __forceinline__ int read_page(const DecodeSplitParams& p, int batch, int first,
                                                  int turns, int k_len) {
    const int token = token_of_lane(first, turns);
    return token < k_len ? __ldg(PagedSequence::page_ids(p, batch) + page_of(p, token)) : 0;
  }

  static __device__ __forceinline__ int page_of(const DecodeSplitParams& p, int token) {
    return divide(token, p.page_magic, p.page_shift);
  }

  // Starts the copies of the present unit.
  __device__ __forceinline__ void copy(const DecodeSplitParams& p, int stage) const {
    const int token = now.unit * C::unit;
    const int valid = min(C::unit, now.k_len - token);
    if constexpr (!C::tma) {
      copy_pieces(p, stage, token, valid);
    } else {
      const int box = threadIdx.x % 32 - copied * Tile::kBoxes, boxes = (valid + 15u) / 16;
      if (box >= 0 && box < boxes) copy_box(p, stage, token + 16 * box, box, boxes);
    }
  }

  // Boxes of 16 tokens, which do not cross pages: each by the lane that knows its page.
  __device__ __forceinline__ void copy_box(const DecodeSplitParams& p, int stage, int token,
                                           int box, int boxes) const {
    const unsigned to_keys = ring + stage * Tile::kStageBytes + box * Tile::kBox;
    const unsigned to_values = to_keys + Tile::kBytes;
    const unsigned bar = full + stage * 8;
    if (box == 0) ptx::mbarrier_arrive_expect_tx(bar, boxes * 2 * Tile::kBox);
    const int in_page = token - page_of(p, token) * p.page;
    const auto policy = ptx::createpolicy_evict_first();  // 0.5 to 0.8 % faster at size (H200)
    if constexpr (!C::xmajor) {
      ptx::tma_load_hint_5d(to_keys, &p.k_map, bar, 0, in_page, 0, now.kv_head, now.page, policy);
      ptx::tma_load_hint_5d(to_values, &p.v_map, bar, 0, in_page, 0, now.kv_head, now.page, policy);
    } else {
      ptx::tma_load_hint_5d(to_keys, &p.k_map, bar, in_page * Tile::kTokens, 0, now.kv_head,
                            now.page, 0, policy);
      ptx::tma_load_hint_4d(to_values, &p.v_map, bar, in_page, 0, now.kv_head, now.page, policy);
    }
  }

  // Pieces of any pages: lane l knows where token l % unit lies. What is not there becomes zeros.
  __device__ __forceinline__ void copy_pieces(const DecodeSplitParams& p, int stage, int first,
                                              int valid) const {
    const int token = first + threadIdx.x % C::unit;
    const int in_page = token - page_of(p, token) * p.page;
    const auto* k = static_cast<const typename C::Cache*>(p.k_cache) + now.page * p.stride_k_block +
                    now.kv_head * p.stride_k_head + in_page * p.stride_k_token;
    const auto* v = static_cast<const typename C::Cache*>(p.v_cache) + now.page * p.stride_v_block +
                    now.kv_head * p.stride_v_head + in_page * p.stride_v_token;
    const unsigned keys = ring + stage * Tile::kStageBytes;
    const unsigned values = keys + Tile::kBytes;
    if constexpr (C::unaligned) {
      const long long dim = p.stride_v_dim;
      UnalignedCopy<C>{keys, k, valid, p.head_dim, p.stride_k_chunk, 1}.run(p.copy_bytes);
      UnalignedCopy<C>{values, v, valid, p.value_dim, Tile::kTokens * dim, dim}.run(p.copy_bytes);
    } else if constexpr (C::xmajor) {
      copy_key_columns(p, keys, k, valid);
      copy_value_columns(p, values, v, valid);
    } else {
      copy_rows(keys, k, valid, p.head_dim);
      copy_rows(values, v, valid, p.value_dim);
    }
  }

  // NHD, HND: neighbouring lanes copy the pieces of a token, which `from` of its lane points to.
  static __device__ __forceinline__ void copy_rows(unsigned to, const typename C::Cache* from,
                                                   int valid, int columns) {
    constexpr int kRows = 32 / Tile::kPieces;  // at a time
    static_assert(kRows > 0, "a lane copies a piece of a token");
    const int thread = threadIdx.x % 32;
    const int piece = thread % Tile::kPieces;
    const bool inside = piece * Tile::kTokens < columns;
#pragma unroll 4
    for (int i = 0; i < C::unit / kRows; ++i) {
      const int row = i * kRows + thread / Tile::kPieces;
      ptx::cp_async_16(to + Tile::row_offset(row, piece),
                       of_lane(from, row) + piece * Tile::kTokens, inside && row < valid ? 16 : 0);
    }
  }

  // x-major keys: neighbouring lanes copy the same piece of neighbouring tokens, each its own.
  static __device__ __forceinline__ void copy_key_columns(const DecodeSplitParams& p, unsigned to,
                                                          const typename C::Cache* from,
                                                          int valid) {
    constexpr int kAtATime = 32 / C::unit;  // pieces of a token
    const int row = threadIdx.x % C::unit;
    int piece = threadIdx.x % 32 / C::unit;
    from += piece * p.stride_k_chunk;
#pragma unroll
    for (int i = 0; i < Tile::kPieces / kAtATime; ++i) {
      const bool there = row < valid && piece * Tile::kTokens < p.head_dim;
      ptx::cp_async_16(to + Tile::row_offset(row, piece), from, there ? 16 : 0);
      piece += kAtATime;
      from += kAtATime * p.stride_k_chunk;
    }
  }

  // x-major values: neighbouring lanes copy the pieces of a dimension, then the next dimension.
  static __device__ __forceinline__ void copy_value_columns(const DecodeSplitParams& p, unsigned to,
                                                            const typename C::Cache* from,
                                                            int valid) {
    constexpr int kParts = C::unit / Tile::kTokens;  // pieces of a dimension
    constexpr int kAtATime = 32 / kParts;            // dimensions
    const int row = threadIdx.x % kParts * Tile::kTokens;
    int dim = threadIdx.x % 32 / kParts;
    const int bytes = max(0, min(Tile::kTokens, valid - row)) * Tile::kItem;
    from = of_lane(from, row) + dim * p.stride_v_dim;
#pragma unroll
    for (int i = 0; i < C::head_dim / kAtATime; ++i) {
      ptx::cp_async_16(to + Tile::column_offset(dim, row), from, dim < p.value_dim ? bytes : 0);
      dim += kAtATime;
      from += kAtATime * p.stride_v_dim;
    }
  }
};
