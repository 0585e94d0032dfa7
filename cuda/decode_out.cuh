// SPDX-License-Identifier: Apache-2.0
// How decoding ends: rows normalised and stored, and those of sequences without keys.
#pragma once

#include "decode_rows.cuh"

// Two columns of a row, in the type of out.
template <class C>
__device__ __forceinline__ unsigned pack_out(const DecodeSplitParams& p, float a, float b) {
  if constexpr (sizeof(typename C::Cache) == 2) {
    return C::Element::pack(a, b);
  } else {
    return p.q_bf16 != 0 ? bf16::pack(a, b) : fp16::pack(a, b);
  }
}

// Two columns of a row, of which `left` are left.
template <class C>
__device__ __forceinline__ void store_two(unsigned short* to, unsigned pair, int left) {
  if constexpr (C::unaligned) {
    store_pair(to, pair, left);
  } else {
    *reinterpret_cast<unsigned*>(to) = pair;
  }
}

// What is known of row `row` of the block before its sums are: where it goes, its sink, its scale.
template <class C>
struct RowPlace {
  unsigned short* out;
  float* lse;  // nullptr: not wanted
  float sink_log2, v_scale;

  RowPlace() = default;
  __device__ __forceinline__ RowPlace(const DecodeSplitParams& p, const RowBlock<C>& rows, int row)
      : lse(p.lse), sink_log2(kEmptyMax), v_scale(1.f) {
    const int query = rows.query(p, row);
    const int head = rows.q_head(p, row, query);
    if (p.sink != nullptr) sink_log2 = to_log2(p.sink[head]);
    if (p.v_scale != nullptr) {
      v_scale = __ldg(p.v_scale + rows.batch * p.stride_v_scale_batch +
                      rows.head_of(row) * p.stride_v_scale_head);
    }
    out = static_cast<unsigned short*>(p.out) +
          sequence_offset(p.cu_seqlens_q, rows.batch, p.stride_out_batch, p.stride_out_row) +
          query * p.stride_out_row + head * p.stride_out_head;
    if (lse != nullptr) {
      lse += sequence_offset(p.cu_seqlens_q, rows.batch, p.stride_lse_batch, 1) +
             head * p.stride_lse_head + query;
    }
  }
};

// Where a row goes, and what its sums are multiplied by.
template <class C>
struct RowEnd {
  unsigned short* out;
  float factor;
  bool empty;  // a NaN that a row met in v must not reach rows that see no key: 0 * NaN

  // `with_lse`: whether this thread stores lse.
  __device__ __forceinline__ RowEnd(const DecodeSplitParams& p, const RowPlace<C>& at, float max,
                                    float sum, bool with_lse)
      : out(at.out), empty(sum == 0.f) {
    const FinishedRow row(max, sum, at.sink_log2);
    const float lse = row.lse();
    factor = row.factor();
    if (factor != 0.f) factor *= at.v_scale;
    factor *= p.out_scale;
    if (with_lse && at.lse != nullptr) *at.lse = lse;
  }
  __device__ __forceinline__ RowEnd(const DecodeSplitParams& p, const RowBlock<C>& rows, int row,
                                    float max, float sum, bool with_lse)
      : RowEnd(p, RowPlace<C>(p, rows, row), max, sum, with_lse) {}

  // Two columns.
  __device__ __forceinline__ unsigned pack(const DecodeSplitParams& p, float a, float b) const {
    return empty ? 0u : pack_out<C>(p, a * factor, b * factor);
  }
};

// Sequences of which no key is seen have no unit: their rows are written here.
template <class C>
__device__ __forceinline__ void write_empty(const DecodeSplitParams& p) {
  for (int b = blockIdx.x; b < p.batch; b += gridDim.x) {
    const PagedSequence s(p, b);
    if (Units<C>(p, s.q_len, s.k_len).count > 0) continue;
    auto* out = static_cast<unsigned short*>(p.out) +
                sequence_offset(p.cu_seqlens_q, b, p.stride_out_batch, p.stride_out_row);
    float* lse = p.lse == nullptr
                     ? nullptr
                     : p.lse + sequence_offset(p.cu_seqlens_q, b, p.stride_lse_batch, 1);
    for (int row = threadIdx.x / 32; row < s.q_len * p.q_heads; row += C::warps) {
      const int query = row / p.q_heads, head = row % p.q_heads;
      const int lane = threadIdx.x % 32;
      for (int col = 2 * lane; col < p.value_dim; col += 64) {
        store_two<C>(out + query * p.stride_out_row + head * p.stride_out_head + col, 0u,
                     p.value_dim - col);
      }
      if (lane == 0 && lse != nullptr) {
        const float sink_log2 = p.sink != nullptr ? to_log2(p.sink[head]) : kEmptyMax;
        lse[head * p.stride_lse_head + query] = FinishedRow(kEmptyMax, 0.f, sink_log2).lse();
      }
    }
  }
}
