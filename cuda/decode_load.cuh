// SPDX-License-Identifier: Apache-2.0
// The loads of decode_split: units of keys and values to shared memory, by TMA or by cp.async.
#pragma once

#include "decode_load_unaligned.cuh"

// The loads of one warp, which has a ring of stages: each holds the keys and the values of one unit.
// They run ahead of the arithmetic, across parts, so memory never waits for a merge. The page of the
// next unit is read when the present one is issued: that load is off the critical path.
template <class C>
struct Loader {
  using Tile = KvTile<C>;
  static constexpr int kPages = C::tma ? Tile::kBoxes : 1;

  Walk<C> walk;
  bool any;    // whether `unit` exists
  bool ready;  // whether its pages have been read: not before the first turn
  bool ahead;  // whether they were before its length was
  int unit;
  int kv_head;
  int page[kPages];  // TMA: of each box; cp.async: of token lane % unit
  unsigned ring;     // shared addresses
  unsigned full;     // barriers, TMA

  // A warp's units are `turn`, turn + turns, ... of each part.
  __device__ __forceinline__ void begin(const DecodeSplitParams& p, const Walk<C>& from,
                                        bool any_part, int turn, int turns, unsigned ring_,
                                        unsigned full_) {
    walk = from;
    any = any_part;
    ready = false;
    ahead = C::cluster > 1 && p.block_table != nullptr && from.first == 0;
    unit = walk.first + turn - turns;
    ring = ring_;
    full = full_;
  }

  // Clusters, whose first unit does not depend on lengths: reads its pages while the length is on
  // its way. Past the end of the sequence they are whatever the table holds, and not used.
  __device__ __forceinline__ void read_ahead(const DecodeSplitParams& p, int batch, int turn) {
    unit = turn;
    if (p.block_table != nullptr) read_pages(p, batch, p.max_k);
  }

  // Starts the copies of this warp's next unit into `stage`, which nobody reads any more, and reads
  // the pages of the one after it. The first turn only reads pages.
  __device__ __forceinline__ void issue(const DecodeSplitParams& p, const BlockPlace& at, int stage,
                                        int turn, int turns) {
    if (any) {
      // Pages first: copied first, units were 1 % slower (H200, 2026-11-30).
      const Loader now = *this;
      advance(p, at, turn, turns);
      if (now.ready) now.copy(p, stage);
    }
    if constexpr (!C::tma) ptx::cp_async_commit_group();  // also an empty one: waits count them
  }

  // Returns when `stage` has been filled.
  __device__ __forceinline__ void wait(int stage, int parity) const {
    if constexpr (C::tma) {
      while (!ptx::mbarrier_try_wait(full + stage * 8, parity)) {
      }
    } else {
      ptx::cp_async_wait_group<C::stages - 1>();
      __syncwarp();  // the pieces that the other lanes copied
    }
  }

 private:
  // Moves to the warp's next unit, maybe of a later part, and reads its pages.
  __device__ __forceinline__ void advance(const DecodeSplitParams& p, const BlockPlace& at,
                                          int turn, int turns) {
    unit += turns;
    while (any && unit >= walk.last) {
      any = walk.next(p, at);
      unit = walk.first + turn;
    }
    if (!any) return;
    kv_head = at.kv_head(p, walk.line);
    if (C::cluster == 1 || !ahead) read_pages(p, walk.batch, walk.k_len);
    ready = true;
    ahead = false;
  }

  __device__ __forceinline__ void read_pages(const DecodeSplitParams& p, int batch, int k_len) {
    const int* pages = PagedSequence::page_ids(p, batch);
#pragma unroll
    for (int i = 0; i < kPages; ++i) {
      const int token = unit * C::unit + (C::tma ? 16 * i : threadIdx.x % C::unit);
      page[i] = token < k_len ? __ldg(pages + page_of(p, token)) : 0;
    }
  }

  static __device__ __forceinline__ int page_of(const DecodeSplitParams& p, int token) {
    return divide(token, p.page_magic, p.page_shift);
  }

  // Starts the copies of the present unit.
  __device__ __forceinline__ void copy(const DecodeSplitParams& p, int stage) const {
    const int token = unit * C::unit;
    const int valid = min(C::unit, walk.k_len - token);
    if constexpr (!C::tma) {
      copy_pieces(p, stage, token, valid);
    } else if (threadIdx.x % 32 == 0) {
      copy_boxes(p, stage, token, valid);
    }
  }

  // Boxes of 16 tokens, which do not cross pages.
  __device__ __forceinline__ void copy_boxes(const DecodeSplitParams& p, int stage, int token,
                                             int valid) const {
    const unsigned keys = ring + stage * Tile::kStageBytes;
    const unsigned values = keys + Tile::kBytes;
    const unsigned bar = full + stage * 8;
    const int boxes = ceil_div(valid, 16);
    ptx::mbarrier_arrive_expect_tx(bar, boxes * 2 * Tile::kBox);
#pragma unroll
    for (int i = 0; i < Tile::kBoxes; ++i) {
      if (i >= boxes) break;
      const int in_page = token + 16 * i - page_of(p, token + 16 * i) * p.page;
      const unsigned to_keys = keys + i * Tile::kBox, to_values = values + i * Tile::kBox;
      if constexpr (!C::xmajor) {
        ptx::tma_load_5d(to_keys, &p.k_map, bar, 0, in_page, 0, kv_head, page[i]);
        ptx::tma_load_5d(to_values, &p.v_map, bar, 0, in_page, 0, kv_head, page[i]);
      } else if (p.page > 16) {
        ptx::tma_load_5d(to_keys, &p.k_map, bar, in_page * Tile::kTokens, 0, kv_head, page[i], 0);
        ptx::tma_load_4d(to_values, &p.v_map, bar, in_page, 0, kv_head, page[i]);
      } else {  // a page is a box: contiguous, 3 % faster
        const auto* k = static_cast<const typename C::Cache*>(p.k_cache);
        const auto* v = static_cast<const typename C::Cache*>(p.v_cache);
        ptx::bulk_load(to_keys, k + page[i] * p.stride_k_block + kv_head * p.stride_k_head,
                       Tile::kBox, bar);
        ptx::bulk_load(to_values, v + page[i] * p.stride_v_block + kv_head * p.stride_v_head,
                       Tile::kBox, bar);
      }
    }
  }

  // Pieces of any pages: lane l knows where token l % unit lies. What is not there becomes zeros.
  __device__ __forceinline__ void copy_pieces(const DecodeSplitParams& p, int stage, int first,
                                              int valid) const {
    const int token = first + threadIdx.x % C::unit;
    const int in_page = token - page_of(p, token) * p.page;
    const auto* k = static_cast<const typename C::Cache*>(p.k_cache) + page[0] * p.stride_k_block +
                    kv_head * p.stride_k_head + in_page * p.stride_k_token;
    const auto* v = static_cast<const typename C::Cache*>(p.v_cache) + page[0] * p.stride_v_block +
                    kv_head * p.stride_v_head + in_page * p.stride_v_token;
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
