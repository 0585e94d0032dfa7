// SPDX-License-Identifier: Apache-2.0
// Attention over the union of disjoint key sets, from the out and lse over each: merge.
//
//   lse = log(sum of e^lse_i),   out = sum of out_i e^(lse_i - lse)
//
// State 0 has arrays of its own, as merge_attn_states passes them; the others follow one another in
// one array. A state whose lse is -inf, or +inf, which older kernels write, has no keys in that
// row, and its out is not used: it may be NaN. Where one state alone has keys, its bits are the
// result; where none has, out is 0 and lse -inf.
//
// Grid: blocks of rows, a row being a (token, head) pair. Rows go kStrip tokens at a time, head
// after head: lse of one head lie side by side, and neighbouring threads read them whole. A thread
// merges C::parts pieces of a row, 16 bytes of out each; the threads of a row lie side by side, and
// each weighs its states. States are taken a few at a time (two where there are two), all of them
// read before the first is used: the time is that of reading and writing them. Plain loads: ld.cs
// took 11 % longer at 400 MB (H200, 2026-11-30, tuning/cache-kernels.csv).
//
// Numerics: float32, weights relative to the largest lse so far, rescaled when a larger one comes.
// No approximate instruction.

#include "exp_log.cuh"
#include "params.cuh"
#include "piece.cuh"
#include "softmax.cuh"

constexpr unsigned kStrip = 8;  // tokens; plan.merge.STRIP

// One row of every state.
template <class C>
struct StatesOfRow {
  using Element = typename C::Element;
  const MergeParams& p;
  unsigned token;
  unsigned head;

  __device__ __forceinline__ int states() const { return C::pair ? 2 : p.states; }
  __device__ __forceinline__ bool has(int state) const {
    return state == 0 ? token < p.first_tokens : state < states();
  }

  // -inf where the state has no keys.
  __device__ __forceinline__ float lse(int state) const {
    if (!has(state)) return kEmptyMax;
    const float x =
        state == 0
            ? p.first_lse[token * p.stride_first_lse_token + head * p.stride_first_lse_head]
            : p.others_lse[(state - 1) * p.stride_others_lse_state +
                           token * p.stride_others_lse_token + head * p.stride_others_lse_head];
    return x == -kEmptyMax ? kEmptyMax : x;
  }

  __device__ __forceinline__ const Element* out(int state) const {
    return state == 0
               ? static_cast<const Element*>(p.first) + token * p.stride_first_token +
                     head * p.stride_first_head
               : static_cast<const Element*>(p.others) + (state - 1) * p.stride_others_state +
                     token * p.stride_others_token + head * p.stride_others_head;
  }
};

// What some states add up to: outs times weights e^(lse - top), and the weights.
template <int kParts, int kCount>
struct Union {
  float top;    // the largest lse, -inf: no state has keys
  float total;  // of the weights
  float sum[kParts][kCount];

  __device__ __forceinline__ Union() : top(kEmptyMax), total(0.f) {
    // Adding to -0 leaves every number as it is.
    each([](float) { return -0.f; });
  }

  template <class Change>
  __device__ __forceinline__ void each(const Change& change) {
#pragma unroll
    for (int i = 0; i < kParts * kCount; ++i) {
      sum[i / kCount][i % kCount] = change(sum[i / kCount][i % kCount]);
    }
  }

  __device__ __forceinline__ void raise_top(float new_top) {
    const float alpha = exact_exp(__fsub_rn(top, finite_max(new_top)));
    top = new_top;
    total = __fmul_rn(total, alpha);
    each([&](float x) { return __fmul_rn(x, alpha); });
  }

  // e^(lse - top) of states whose largest lse is `top`; of a pair one is e^0 = 1.
  template <int kStates>
  __device__ __forceinline__ void weigh(const float (&lses)[kStates],
                                        float (&weights)[kStates]) const {
    if constexpr (kStates == 2) {
      const bool first = lses[0] == top;
      const float other = exact_exp(__fsub_rn(first ? lses[1] : lses[0], top));
      weights[0] = first ? 1.f : other;
      weights[1] = first ? other : 1.f;
    } else {
#pragma unroll
      for (int k = 0; k < kStates; ++k) weights[k] = exact_exp(__fsub_rn(lses[k], top));
    }
  }

  // A state that has keys.
  template <class Element>
  __device__ __forceinline__ void add(const Piece<Element, kCount> (&out)[kParts], float weight) {
    total = __fadd_rn(total, weight);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      float x[kCount];
      out[part].to_floats(x);
#pragma unroll
      for (int j = 0; j < kCount; ++j) sum[part][j] = fmaf(x[j], weight, sum[part][j]);
    }
  }

  // Divides by the weights.
  __device__ __forceinline__ void finish() {
    const float factor = total == 0.f ? 0.f : __frcp_rn(total);
    each([&](float x) { return total == 0.f ? 0.f : __fmul_rn(x, factor); });
  }
  __device__ __forceinline__ float lse() const {
    if (total == 0.f) return kEmptyMax;
    return total < kLargest ? __fadd_rn(top, exact_log(total)) : total;  // NaN stays NaN
  }
};

// The pieces of one row that start `step` columns apart, from column `first` on.
template <class C, bool kAligned>
__device__ __forceinline__ void merge_pieces(const StatesOfRow<C>& row, int first, int step) {
  using Out = typename C::Out;
  constexpr int kCount = 16 / sizeof(Out);
  constexpr int kParts = C::parts;
  constexpr int kAhead = C::pair ? 2 : 4;
  const MergeParams& p = row.p;
  Union<kParts, kCount> all;
  for (int i = 0; i < row.states(); i += kAhead) {
    float lses[kAhead];
    Piece<typename C::Element, kCount> outs[kAhead][kParts];
    float top = all.top;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      lses[k] = row.lse(i + k);
      top = fmaxf(top, lses[k]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const int column = first + part * step;
        if (row.has(i + k) && column < p.head_dim) {
          outs[k][part].load(row.out(i + k) + column, p.head_dim - column, kAligned);
        }
      }
    }
    if (i == 0) {
      all.top = top;
    } else {
      all.raise_top(top);
    }
    float weights[kAhead];
    all.weigh(lses, weights);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (lses[k] != kEmptyMax) all.add(outs[k], weights[k]);
    }
  }
  all.finish();
  if constexpr (sizeof(Out) == 1) {
    const float scale = p.out_scale != nullptr ? p.out_scale[0] : p.out_scale_number;
    all.each([&](float x) { return __fdiv_rn(x, scale); });
  }
  auto* out =
      static_cast<Out*>(p.out) + row.token * p.stride_out_token + row.head * p.stride_out_head;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int column = first + part * step;
    Piece<Out, kCount> piece;
    piece.from_floats(all.sum[part]);
    if (column < p.head_dim) piece.store(out + column, p.head_dim - column, kAligned);
  }
  if (p.lse != nullptr && first == 0) {
    p.lse[row.token * p.stride_lse_token + row.head * p.stride_lse_head] = all.lse();
  }
}

template <class C>
__device__ __forceinline__ void merge(const MergeParams& p) {
  constexpr int kCount = 16 / sizeof(typename C::Out);
  const int thread = static_cast<int>(threadIdx.x);
  const int row_threads = max(1, ceil_div(p.head_dim, C::parts * kCount));
  const int rows_of_block = C::threads * p.row_magic >> 16;
  const int row_of_block = thread * p.row_magic >> 16;
  const unsigned number = blockIdx.x * rows_of_block + row_of_block;
  const unsigned strip_rows = kStrip * p.heads;
  const unsigned token = number / strip_rows * kStrip + number % kStrip;
  if (token >= p.tokens || row_of_block >= rows_of_block) return;
  const int first = (thread - row_of_block * row_threads) * kCount;
  const StatesOfRow<C> row{p, token, number % strip_rows / kStrip};
  if (p.aligned) {
    merge_pieces<C, true>(row, first, row_threads * kCount);
  } else {
    merge_pieces<C, false>(row, first, row_threads * kCount);
  }
}
