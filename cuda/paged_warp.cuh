// SPDX-License-Identifier: Apache-2.0
// One query over some keys of an x-major cache, by one warp.
//
// A warp takes 32 keys at a time, a tile, and keeps a softmax of its own. For scores a lane is a
// key: neighbouring lanes read neighbouring 16 bytes, chunk by chunk of the head. For values a lane
// is a dimension and a few of the tile's keys, which lie side by side.
#pragma once

#include "paged_row.cuh"
#include "piece.cuh"
#include "scores.cuh"
#include "softmax.cuh"

constexpr int kTileKeys = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// What a warp has of a row: out = sum of 2^(score - max) v, not divided by `sum` yet.
template <class C>
struct PagedSmem {
  float q[C::head_dim];
  float weights[C::warps][kTileKeys];
  float out[C::warps][C::head_dim];
  float max[C::warps];
  float sum[C::warps];
};

// ---- The query, as much of it as a tile holds in shared memory ----

// 8-bit caches leave the type of q and out to a flag; others have it themselves.
template <class C>
__device__ __forceinline__ float read_element(const PagedParams& p, const void* x, long long i) {
  if constexpr (sizeof(typename C::Cache) > 1) {
    return to_float(static_cast<const typename C::Cache*>(x)[i]);
  } else {
    return p.q_bf16 ? to_float(static_cast<const bf16*>(x)[i])
                    : to_float(static_cast<const fp16*>(x)[i]);
  }
}

template <class C>
__device__ __forceinline__ float read_q(const PagedParams& p, const PagedRow& row, int d) {
  const long long first = row.offset(p.stride_q_batch, p.stride_q_row);
  return read_element<C>(p, p.q, first + row.head * p.stride_q_head + d);
}

template <class C>
__device__ __forceinline__ void load_q(PagedSmem<C>& smem, const PagedParams& p,
                                       const PagedRow& row) {
  for (int d = threadIdx.x; d < C::head_dim; d += C::threads) {
    smem.q[d] = d < p.head_dim ? read_q<C>(p, row, d) : 0.f;
  }
  __syncthreads();
}

// ---- A warp ----

template <class C, class Params>
struct PagedWarp {
  using Cache = typename C::Cache;
  static constexpr int kChunk = 16 / sizeof(Cache);            // elements of 16 bytes
  static constexpr int kKeysAtOnce = kChunk < 8 ? 8 : kChunk;  // whose values a lane reads
  static constexpr int kKeyLanes = kTileKeys / kKeysAtOnce;    // lanes of a dimension
  static constexpr int kDimsAtOnce = 32 / kKeyLanes;
  static constexpr int kSteps = C::head_dim / kDimsAtOnce;
  static constexpr int kAhead = 8;  // loads of 16 bytes under way a lane
  static constexpr int kValuesAhead = kAhead * kChunk / kKeysAtOnce;

  const Params& p;
  const PagedRow& row;
  PagedSmem<C>& smem;
  float max = kEmptyMax;
  float sum = 0.f;         // of the weights of this lane's keys
  float out[kSteps] = {};  // of columns kDimsAtOnce * step + lane / kKeyLanes

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int number() { return threadIdx.x / 32; }

  // q . k of one key.
  __device__ __forceinline__ float product(int key) const {
    const int column = static_cast<unsigned>(key) / static_cast<unsigned>(p.page);
    const auto* k = static_cast<const Cache*>(p.k_cache) + row.pages[column] * p.stride_k_block +
                    row.kv_head * p.stride_k_head + (key - column * p.page) * p.stride_k_token;
    const int head_dim = min(p.head_dim, C::head_dim);
    float dot = beyond(k);
    if (on_16_bytes(k) && p.head_dim % kChunk == 0) {
      for (int first = 0; first < head_dim; first += kAhead * kChunk) {
        Piece<Cache, kChunk> chunks[kAhead];
#pragma unroll
        for (int c = 0; c < kAhead; ++c, k += p.stride_k_chunk) {
          if (first + c * kChunk < head_dim) chunks[c].load(k, kChunk, true);
        }
#pragma unroll
        for (int c = 0; c < kAhead; ++c) {
          const int d = first + c * kChunk;
          if (d < head_dim) dot = add_products(dot, &smem.q[d], chunks[c]);
        }
      }
    } else {
#pragma unroll 1
      for (int d = 0; d < head_dim; ++d) dot = fmaf(smem.q[d], to_float(k[at(d)]), dot);
    }
    return dot;
  }

  // The part of it that the query does not have in shared memory.
  __device__ __forceinline__ float beyond(const Cache* k) const {
    float dot = 0.f;
#pragma unroll 1
    for (int d = C::head_dim; d < p.head_dim; ++d) {
      dot = fmaf(read_q<C>(p, row, d), to_float(k[at(d)]), dot);
    }
    return dot;
  }

  // Where dimension d of a key lies.
  __device__ __forceinline__ long long at(int d) const {
    return d / kChunk * p.stride_k_chunk + d % kChunk;
  }

  static __device__ __forceinline__ float add_products(float dot, const float* q,
                                                       const Piece<Cache, kChunk>& chunk) {
    float x[kChunk];
    chunk.to_floats(x);
#pragma unroll
    for (int i = 0; i < kChunk; ++i) dot = fmaf(q[i], x[i], dot);
    return dot;
  }

  // The score of one key in units of the softmax: log2.
  __device__ __forceinline__ float score(int key, float k_scale, float slope_log2) const {
    const float scaled = product(key) * (p.scale_log2 * k_scale);
    const float capped = p.softcap_log2 > 0.f ? SoftCap(p.softcap_log2, 1.f)(scaled) : scaled;
    return capped - slope_log2 * fabsf(static_cast<float>(row.diagonal - key));
  }

  // The scores of a tile, one a lane, become weights in shared memory; what there is so far is
  // rescaled to the new max.
  __device__ __forceinline__ void weigh(float score) {
    float top = fmaxf(max, score);
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, distance));
    }
    const float alpha = ptx::ex2_approx(max - finite_max(top));
    if (alpha != 1.f) {
      sum *= alpha;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) out[step] *= alpha;
    }
    max = top;
    const float weight = ptx::ex2_approx(score - finite_max(top));
    sum += weight;
    __syncwarp();  // the weights of the last tile have been read
    smem.weights[number()][lane()] = weight;
    __syncwarp();
  }

  // out += weights times values. A value of weight 0 may lie in a slot that holds nothing: unless
  // all keys of the tile are seen, it is not multiplied.
  __device__ __forceinline__ void accumulate(int tile, bool all_seen) {
    const int first = lane() % kKeyLanes * kKeysAtOnce;  // of this lane's keys
    const float* weights = &smem.weights[number()][first];
    float w[kKeysAtOnce];
    bool any = false;
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      w[i] = weights[i];
      any |= w[i] != 0.f;
    }
    if (!any) return;
    const Cache* v = value(tile + first);
    if (p.stride_v_token == 1 && p.page % kKeysAtOnce == 0 && on_16_bytes(v)) {
#pragma unroll
      for (int first = 0; first < kSteps; first += kValuesAhead) {
        Piece<Cache, kKeysAtOnce> pieces[kValuesAhead];
#pragma unroll
        for (int i = 0; i < kValuesAhead; ++i) {
          const int d = dim(first + i);
          if (d < row.columns) pieces[i].load(v + d * p.stride_v_dim, kKeysAtOnce, true);
        }
#pragma unroll
        for (int i = 0; i < kValuesAhead; ++i) {
          if (dim(first + i) < row.columns) add_values(out[first + i], w, pieces[i], all_seen);
        }
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < kKeysAtOnce; ++i) {
        if (weights[i] != 0.f) add_one(value(tile + first + i), weights[i]);
      }
    }
  }

  static __device__ __forceinline__ void add_values(float& sum, const float (&w)[kKeysAtOnce],
                                                    const Piece<Cache, kKeysAtOnce>& piece,
                                                    bool all_seen) {
    float x[kKeysAtOnce];
    piece.to_floats(x);
#pragma unroll
    for (int i = 0; i < kKeysAtOnce; ++i) {
      sum = fmaf(w[i], all_seen || w[i] != 0.f ? x[i] : 0.f, sum);
    }
  }

  __device__ __forceinline__ void add_one(const Cache* v, float weight) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (dim(step) < row.columns) {
        out[step] = fmaf(weight, to_float(v[dim(step) * p.stride_v_dim]), out[step]);
      }
    }
  }

  // Where the value of a key lies, of the first column.
  __device__ __forceinline__ const Cache* value(int key) const {
    const int column = static_cast<unsigned>(key) / static_cast<unsigned>(p.page);
    return static_cast<const Cache*>(p.v_cache) + row.pages[column] * p.stride_v_block +
           row.kv_head * p.stride_v_head + (key - column * p.page) * p.stride_v_token +
           row.first_column * p.stride_v_dim;
  }

  // The column that out[step] is of.
  static __device__ __forceinline__ int dim(int step) {
    return step * kDimsAtOnce + lane() / kKeyLanes;
  }
  // Rows of 16 bytes that follow it do then as well.
  static __device__ __forceinline__ bool on_16_bytes(const void* at) {
    return reinterpret_cast<unsigned long long>(at) % 16 == 0;
  }

  // Leaves the warp's part of the row in shared memory.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int distance = 1; distance < kKeyLanes; distance *= 2) {
        out[step] += __shfl_xor_sync(kAllLanes, out[step], distance);
      }
      if (lane() % kKeyLanes == 0) smem.out[number()][dim(step)] = out[step];
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    if (lane() == 0) {
      smem.max[number()] = max;
      smem.sum[number()] = sum;
    }
  }
};
