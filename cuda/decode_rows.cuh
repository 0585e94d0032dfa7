// SPDX-License-Identifier: Apache-2.0
// The rows of a part of decode_split: which queries and heads they are, what keys they see, and q.
#pragma once

#include "decode_load.cuh"
#include "softmax.cuh"

// The rows of a part, (query, head of the group) = query * group + head, in blocks of kRows, in
// which each KV head of a unit has kOfHead.
template <class C>
struct RowBlock {
  static constexpr int kRows = 8 * C::row_tiles, kOfHead = kRows / C::heads;
  int batch;
  int kv_head;  // the first
  int k_len;
  int first;  // row of the block among those of a KV head
  int count;  // rows of the block that exist, of each KV head
  int shift;  // the diagonal of query i is key i + shift

  __device__ __forceinline__ RowBlock(const DecodeSplitParams& p, const BlockPlace& at,
                                      const Walk<C>& walk)
      : batch(walk.batch),
        kv_head(at.kv_head(p, walk.line) * C::heads),
        k_len(walk.k_len),
        first(at.row_block(p, walk.line) * kOfHead),
        count(max(0, min(kOfHead, walk.q_len * p.group - first))),
        shift(walk.k_len - walk.q_len) {}

  // The KV head of a row, and its place among the rows of that.
  __device__ __forceinline__ int head_of(int row) const { return kv_head + row / kOfHead; }
  static __device__ __forceinline__ int place_of(int row) { return row % kOfHead; }
  __device__ __forceinline__ bool exists(int row) const { return place_of(row) < count; }
  // The row itself, else the last one of its KV head.
  __device__ __forceinline__ int existing(int row) const {
    return row - max(0, place_of(row) - (count - 1));
  }
  // Behind the last row that exists.
  __device__ __forceinline__ int end() const { return kRows - kOfHead + count; }

  __device__ __forceinline__ int query(const DecodeSplitParams& p, int row) const {
    return divide(first + place_of(row), p.group_magic, p.group_shift);
  }
  __device__ __forceinline__ int q_head(const DecodeSplitParams& p, int row, int query) const {
    return head_of(row) * p.group + first + place_of(row) - query * p.group;
  }

  // q of the sequence, which q_row() takes: looked up once, since rows are read one after the other
  // where the offset of each comes from memory.
  __device__ __forceinline__ const unsigned short* q_rows(const DecodeSplitParams& p) const {
    return static_cast<const unsigned short*>(p.q) +
           sequence_offset(p.cu_seqlens_q, batch, p.stride_q_batch, p.stride_q_row);
  }
  __device__ __forceinline__ const unsigned short* q_row(const unsigned short* q_rows,
                                                         const DecodeSplitParams& p,
                                                         int row) const {
    const int query = this->query(p, row);
    return q_rows + query * p.stride_q_row + q_head(p, row, query) * p.stride_q_head;
  }

  // ALiBi, log2 units.
  __device__ __forceinline__ float slope(const DecodeSplitParams& p, int row, int query) const {
    return to_log2(__ldg(p.alibi_slopes + batch * p.stride_alibi_batch + q_head(p, row, query)));
  }

  // A row sees keys from `from` up to `to`, but those that a tree hides.
  __device__ __forceinline__ void seen(const DecodeSplitParams& p, int query, int& from,
                                       int& to) const {
    from = 0;
    to = k_len;
    if constexpr (C::features) {
      if (p.window_left >= 0) from = query + shift - p.window_left;
      if (p.tree_mask == nullptr && p.window_right >= 0) {
        to = min(k_len, query + shift + p.window_right + 1);
      }
    }
  }

  // The mask of a query: which keys from `shift` on it sees.
  __device__ __forceinline__ const unsigned char* tree_row(const DecodeSplitParams& p,
                                                           int query) const {
    return p.tree_mask +
           sequence_offset(p.cu_seqlens_q, batch, p.stride_tree_batch, p.stride_tree_row) +
           query * p.stride_tree_row;
  }

  // Keys from `from` up to `to` are seen by every row.
  __device__ __forceinline__ void interval(const DecodeSplitParams& p, int& from, int& to) const {
    from = 0;
    to = k_len;
    if constexpr (C::features) {
      if (p.window_left >= 0) from = k_len - 1 - p.window_left;
      if (p.tree_mask != nullptr) {
        to = max(0, shift);
      } else if (p.window_right >= 0) {
        to = min(k_len, shift + p.window_right + 1);
      }
    }
  }
};

// q of a block of rows, as the B operand of K Q^T: in registers of each warp, or in shared memory.
template <class C>
struct Query {
  using Tile = KvTile<C>;
  static constexpr int kSteps = C::head_dim / 16;
  static constexpr bool kRegisters = !C::staged;
  static constexpr int kTiles = kRegisters ? C::row_tiles : 1;
  static constexpr int kStride = C::head_dim + 8;  // elements of a row in shared memory
  static constexpr int kPieces = C::head_dim / 8;  // of a row, 16 bytes each
  // Whether q is made ready before the first unit of a part, not when the part begins. Wide q need
  // not be; and where bytes are widened without instructions for it, no registers are left.
  static constexpr bool kLate = !Tile::kWide && kFp8Instructions && kRegisters;
  static_assert(kTiles == 1 || Tile::kWide, "8-bit caches: several tiles are in shared memory");

  unsigned q[kTiles][kRegisters ? kSteps : 1][2];
  // Of the scores of rows 2t and 2t + 1, log2 units; of several tiles and 8-bit caches each row has
  // its own behind it in shared memory.
  float scale[2];

  // B operand of K Q^T: row r of each tile, two pairs of dimensions a step. Nothing waits for what
  // is read until a part begins.
  __device__ __forceinline__ void load(const DecodeSplitParams& p, const RowBlock<C>& rows) {
    static_assert(kRegisters, "q is in shared memory");
    // Without rows products are nobody's: no q is read. Where registers are short, not by a branch.
    constexpr bool kBranch = kLate || Tile::kWide || !C::unaligned;
    if (kBranch && rows.count == 0) return;
    const int t = threadIdx.x % 4;
    const unsigned short* q_rows = rows.q_rows(p);
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      // Instead of rows that do not exist, the last one of their KV head: no branch.
      const int row = rows.existing(8 * nt + threadIdx.x % 32 / 4);
      const int first = Tile::kWide ? 2 * t : 4 * t;
      // Opaque: of which the others are constants away. Else 16 addresses are computed.
      const unsigned short* from = ptx::opaque(rows.q_row(q_rows, p, row) + first);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        const int dim = 16 * (i / 2) + (Tile::kWide ? 8 : 2) * (i % 2);
        unsigned& x = q[nt][i / 2][i % 2];
        if constexpr (C::unaligned) {
          const int dims = kBranch || rows.count > 0 ? p.head_dim : 0;
          x = load_pair(from + dim, dims - first - dim);
        } else {
          // By TMA all of head_dim are stored.
          const bool inside = C::tma || first + dim < p.head_dim;
          x = inside ? __ldg(reinterpret_cast<const unsigned*>(from + dim)) : 0;
        }
      }
    }
    if constexpr (!Tile::kWide) scale[0] = key_scale(p, rows, threadIdx.x % 32 / 4);
  }

  // What has been loaded is made ready.
  __device__ __forceinline__ void begin(const DecodeSplitParams& p) {
    if constexpr (Tile::kWide) {
      scale[0] = scale[1] = p.scale_log2;
    } else if constexpr (kRegisters) {
      halve(p);
    }
  }

  // Several tiles: rows of q to shared memory, [kRows][kStride], by all threads of the block.
  static __device__ __forceinline__ void stage(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                               unsigned short* to) {
    const unsigned short* q_rows = rows.q_rows(p);
#pragma unroll 2
    for (int i = ptx::opaque(static_cast<int>(threadIdx.x)); i < RowBlock<C>::kRows * kPieces;
         i += C::threads) {
      const int row = i / kPieces, dim = i % kPieces * 8;
      uint4 x = make_uint4(0, 0, 0, 0);
      if (row < rows.count && dim < p.head_dim) {
        if constexpr (C::unaligned) {
          const unsigned short* from = rows.q_row(q_rows, p, row) + dim;
          const int left = p.head_dim - dim;
          x = make_uint4(load_pair(from, left), load_pair(from + 2, left - 2),
                         load_pair(from + 4, left - 4), load_pair(from + 6, left - 6));
        } else {
          x = __ldg(reinterpret_cast<const uint4*>(rows.q_row(q_rows, p, row) + dim));
        }
      }
      if constexpr (Tile::kWide) {
        *reinterpret_cast<uint4*>(to + row * kStride + dim) = x;
      } else {
        stage_halves(p, x, p.scale_log2 * key_scale(p, rows, row), to + row * kStride, dim);
      }
    }
  }

  // Then: the scale of scores of row 2t + e of a tile.
  __device__ __forceinline__ float scale_of(const unsigned short* staged, int tile, int e) const {
    if constexpr (kRegisters || Tile::kWide) {
      return scale[e];
    } else {
      const int row = 8 * tile + 2 * (threadIdx.x % 4) + e;
      return *reinterpret_cast<const float*>(staged + row * kStride + C::head_dim);
    }
  }

 private:
  static __device__ __forceinline__ float key_scale(const DecodeSplitParams& p,
                                                    const RowBlock<C>& rows, int row) {
    if (p.k_scale == nullptr) return 1.f;
    return __ldg(p.k_scale + rows.batch * p.stride_k_scale_batch +
                 rows.head_of(row) * p.stride_k_scale_head);
  }

  // q becomes halves, and scale takes in what Raise divides by.
  __device__ __forceinline__ void halve(const DecodeSplitParams& p) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      largest = larger(largest, element_pair(p, q[0][i / 2][i % 2]));
    }
    const Raise raise(quad_max(largest));
    const float inverse = raise.inverse * p.scale_log2 * scale[0];
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      unsigned& two = q[0][i / 2][i % 2];
      two = raised(element_pair(p, two), raise.factor);
    }
    // Lane (r, t) has row r; scores are of rows 2t and 2t + 1.
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      scale[e] = __shfl_sync(0xffffffffu, inverse, 4 * (2 * (threadIdx.x % 4) + e));
    }
  }
  // The same of a piece of a row, by the lanes that have its other pieces. Of each 16 dimensions
  // ldmatrix should give a lane four that are side by side, as it gives those of the keys.
  static __device__ __forceinline__ void stage_halves(const DecodeSplitParams& p, uint4 piece,
                                                      float scale, unsigned short* row, int dim) {
    unsigned x[4] = {piece.x, piece.y, piece.z, piece.w};
    float largest = 0.f;
#pragma unroll
    for (const unsigned two : x) largest = larger(largest, element_pair(p, two));
#pragma unroll
    for (int distance = 1; distance < kPieces; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    }
    const Raise raise(largest);
#pragma unroll
    for (unsigned& two : x) two = raised(element_pair(p, two), raise.factor);
    unsigned short* to = row + dim / 16 * 16 + dim % 16 / 2;
    *reinterpret_cast<uint2*>(to) = make_uint2(x[0], x[2]);
    *reinterpret_cast<uint2*>(to + 8) = make_uint2(x[1], x[3]);
    if (dim == 0) *reinterpret_cast<float*>(row + C::head_dim) = raise.inverse * scale;
  }

  static __device__ __forceinline__ float2 element_pair(const DecodeSplitParams& p, unsigned two) {
    return pair_of(two, p.q_bf16 != 0);
  }
};
