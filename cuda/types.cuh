// SPDX-License-Identifier: Apache-2.0
// Storage types of tensors. Arithmetic is float32; tensor cores take 16-bit pairs packed in 32-bit
// registers. Caches may hold 8 bits an element, value = element * scale.
#pragma once

#include "ptx_sm89.cuh"

struct alignas(2) bf16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    return ptx::cvt_bf16x2(lo, hi);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_bf16(d, a, b0, b1);
  }
};

struct alignas(2) fp16 {
  unsigned short bits;

  static __device__ __forceinline__ unsigned pack(float lo, float hi) {
    return ptx::cvt_f16x2(lo, hi);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0,
                                             unsigned b1) {
    ptx::mma_m16n8k16_f16(d, a, b0, b1);
  }
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr bool kFp8Instructions = false;
#else
constexpr bool kFp8Instructions = true;
#endif

// To an 8-bit float of kMantissa bits whose exponents begin at 2^kSmallest: ties to even, beyond
// `largest` (its bits) the largest, one NaN. What the instructions of sm_89 do, for older GPUs.
template <int kMantissa, int kSmallest, int kLargestBits>
__device__ __forceinline__ unsigned narrow_fp8(float x) {
  const unsigned bits = __float_as_uint(x);
  const unsigned magnitude = bits & 0x7fffffffu;
  constexpr int kDropped = 23 - kMantissa;
  constexpr unsigned kBias = static_cast<unsigned>(126 + kSmallest) << 23;
  unsigned narrow;
  if (magnitude < kBias + (1u << 23)) {  // subnormal: units of 2^(kSmallest - kMantissa)
    constexpr float kUnits =
        __builtin_bit_cast(float, static_cast<unsigned>(127 + kMantissa - kSmallest) << 23);
    narrow = __float2int_rn(__uint_as_float(magnitude) * kUnits);
  } else {
    const unsigned half = (1u << (kDropped - 1)) - 1;
    narrow = (magnitude - kBias + half + (magnitude >> kDropped & 1)) >> kDropped;
  }
  narrow = narrow < kLargestBits ? narrow : kLargestBits;
  return magnitude > 0x7f800000u ? 0x7fu : (bits >> 24 & 0x80u) | narrow;
}

// Two of four bytes, as the upper bytes of a pair of halves.
template <int kLow, int kHigh>
__device__ __forceinline__ unsigned upper_bytes(unsigned four) {
  return __byte_perm(four, 0, 0x0404 | kLow << 4 | kHigh << 12);
}

// Elements of a cache, 8 bits each. `narrow` rounds two floats, the first to bits 0-7; `widen`
// makes two of four elements a pair of halves, exactly: neighbours, or both even or odd ones.
struct e4m3 {
  unsigned char bits;

  static __device__ __forceinline__ unsigned short narrow(float lo, float hi) {
    if constexpr (kFp8Instructions) {
      return ptx::cvt_e4m3x2(lo, hi);
    } else {
      return narrow_fp8<3, -6, 0x7e>(lo) | narrow_fp8<3, -6, 0x7e>(hi) << 8;
    }
  }
  template <int kLow, int kHigh>
  static __device__ __forceinline__ unsigned widen(unsigned four) {
    if constexpr (kFp8Instructions && kHigh == kLow + 1) {
      return kLow == 0 ? ptx::cvt_f16x2_e4m3x2_low(four) : ptx::cvt_f16x2_e4m3x2_high(four);
    } else if constexpr (kFp8Instructions) {
      return widen<2 * kLow, 2 * kLow + 1>(__byte_perm(four, 0, 0x3120));  // once for both pairs
    } else {
      // Moved to a half's place the exponent is 8 too small. 0x7f, in which adding one carries, is
      // NaN.
      const unsigned x = upper_bytes<kLow, kHigh>(four);
      const unsigned magnitude = x & 0x7f007f00u;
      const unsigned nan = (magnitude + 0x01000100u) & 0x80008000u;
      return ptx::mul_f16x2(magnitude >> 1, 0x5c005c00u) | (nan - (nan >> 15)) | (x & 0x80008000u);
    }
  }
};

struct e5m2 {
  unsigned char bits;

  static __device__ __forceinline__ unsigned short narrow(float lo, float hi) {
    if constexpr (kFp8Instructions) {
      return ptx::cvt_e5m2x2(lo, hi);
    } else {
      return narrow_fp8<2, -14, 0x7b>(lo) | narrow_fp8<2, -14, 0x7b>(hi) << 8;
    }
  }
  template <int kLow, int kHigh>
  static __device__ __forceinline__ unsigned widen(unsigned four) {
    return upper_bytes<kLow, kHigh>(four);
  }
};

// Two's complement, -128 to 127, to which what is beyond is rounded; NaN becomes -128.
struct int8 {
  unsigned char bits;

  static __device__ __forceinline__ unsigned short narrow(float lo, float hi) {
    auto one = [](float x) {
      return __float2int_rn(x >= -128.f ? (x <= 127.f ? x : 127.f) : -128.f) & 0xff;
    };
    return one(lo) | one(hi) << 8;
  }
  template <int kLow, int kHigh>
  static __device__ __forceinline__ unsigned widen(unsigned four) {
    // 1024 + (element + 128) has the element in its low bits.
    constexpr int kBytes = 0x4040 | kLow | kHigh << 8;
    return ptx::sub_f16x2(__byte_perm(four ^ 0x80808080u, 0x64646464u, kBytes), 0x64806480u);
  }
};

// ---- One element <-> float ----
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(x.bits << 16); }
__device__ __forceinline__ float to_float(fp16 x) { return ptx::cvt_f32_f16(x.bits); }
template <class T>
__device__ __forceinline__ float to_float(T x) {
  return ptx::cvt_f32_f16(T::template widen<0, 1>(x.bits) & 0xffff);
}

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (sizeof(T) == 2) {
    return {static_cast<unsigned short>(T::pack(x, 0.f))};
  } else {
    return {static_cast<unsigned char>(T::narrow(x, 0.f))};
  }
}

// A row of q on its way to halves, the type of products with an 8-bit cache: the largest element
// gets the exponent 14, since the range of bf16 is not that of halves.
struct Raise {
  float factor, inverse;

  __device__ __forceinline__ explicit Raise(float largest) {
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    const int raise = min(max(14 - exponent, -120), 120);
    factor = __uint_as_float(static_cast<unsigned>(127 + raise) << 23);
    inverse = __uint_as_float(static_cast<unsigned>(127 - raise) << 23);
  }
};
// Two elements of q, bf16 or halves.
__device__ __forceinline__ float2 pair_of(unsigned two, bool q_bf16) {
  const auto low = static_cast<unsigned short>(two), high = static_cast<unsigned short>(two >> 16);
  return q_bf16 ? make_float2(to_float(bf16{low}), to_float(bf16{high}))
                : make_float2(to_float(fp16{low}), to_float(fp16{high}));
}
__device__ __forceinline__ float larger(float largest, float2 pair) {
  return fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
}
__device__ __forceinline__ unsigned raised(float2 pair, float factor) {
  return fp16::pack(pair.x * factor, pair.y * factor);
}

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLargest = 3.402823466e38f;
constexpr float kLn2 = 0.6931471805599453f;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Compile-time flags as arguments: `step(True{}, n)`.
struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};
