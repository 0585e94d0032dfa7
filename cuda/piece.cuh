// SPDX-License-Identifier: Apache-2.0
// A piece of a row: a few neighbouring elements, packed in registers as they lie in memory.
#pragma once

#include "types.cuh"

__device__ __forceinline__ unsigned bits_of(float x) { return __float_as_uint(x); }
template <class T>
__device__ __forceinline__ unsigned bits_of(T x) {
  return x.bits;
}

template <class T, int kCount>
struct Piece {
  static constexpr int kPerWord = 4 / sizeof(T);
  static constexpr int kWords = kCount / kPerWord;
  static_assert(kWords % 4 == 0, "a piece is a multiple of 16 bytes");
  unsigned words[kWords];

  // Elements from `count` on become zeros. Aligned: `from` lies on 16 bytes, and all are there.
  __device__ __forceinline__ void load(const T* from, int count, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + w * kPerWord);
        words[w] = x.x, words[w + 1] = x.y, words[w + 2] = x.z, words[w + 3] = x.w;
      }
    } else {
      load_apart(from, 1, count);
    }
  }

  // Element i from from[i * stride].
  __device__ __forceinline__ void load_apart(const T* from, long long stride, int count) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) words[i / kPerWord] |= bits_of(from[i * stride]) << shift(i);
    }
  }

  __device__ __forceinline__ void store(T* to, int count, bool aligned) const {
    if (aligned) {
#pragma unroll
      for (int w = 0; w < kWords; w += 4) {
        *reinterpret_cast<uint4*>(to + w * kPerWord) =
            make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
      }
    } else {
      store_apart(to, 1, count);
    }
  }

  // Element i to to[i * stride].
  __device__ __forceinline__ void store_apart(T* to, long long stride, int count) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < count) to[i * stride] = element(i);
    }
  }

  __device__ __forceinline__ T element(int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else {
      return T{static_cast<decltype(T::bits)>(words[i / kPerWord] >> shift(i))};
    }
  }

  __device__ __forceinline__ void to_floats(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (sizeof(T) == 1) {
        const unsigned four = words[i / 4];
        const unsigned pair =
            i % 4 < 2 ? T::template widen<0, 1>(four) : T::template widen<2, 3>(four);
        x[i] = ptx::cvt_f32_f16(static_cast<unsigned short>(i % 2 ? pair >> 16 : pair));
      } else {
        x[i] = to_float(element(i));
      }
    }
  }

  // Rounds to nearest, ties to even.
  __device__ __forceinline__ void from_floats(const float (&x)[kCount]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const float* from = x + w * kPerWord;
      if constexpr (sizeof(T) == 4) {
        words[w] = __float_as_uint(from[0]);
      } else if constexpr (sizeof(T) == 2) {
        words[w] = T::pack(from[0], from[1]);
      } else {
        words[w] = T::narrow(from[0], from[1]) | T::narrow(from[2], from[3]) << 16;
      }
    }
  }

 private:
  static __device__ __forceinline__ int shift(int i) { return i % kPerWord * 8 * sizeof(T); }
};
