// SPDX-License-Identifier: Apache-2.0
// Number formats of the tensor cores: exact widening to float32, and narrowing with the GPU's rounding.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace emu {

enum class Format : unsigned char { bf16, f16, e4m3, e5m2 };

inline float from_bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

// A half's bits, moved to float32's place, are 2^112 too small; the product also normalises subnormals.
inline float from_f16(unsigned bits) {
  const float magnitude = std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112f;
  const unsigned special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<unsigned>(magnitude) | special | (bits & 0x8000) << 16);
}
inline float from_e4m3(unsigned bits) {
  if ((bits & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fffffffu);
  const float magnitude = std::bit_cast<float>((bits & 0x7f) << 20) * 0x1p120f;
  return std::bit_cast<float>(std::bit_cast<unsigned>(magnitude) | (bits & 0x80) << 24);
}
inline float from_e5m2(unsigned bits) { return from_f16(bits << 8); }

// cvt.rn.bf16.f32: ties to even, overflow to infinity, one NaN.
inline unsigned to_bf16(float x) {
  const unsigned bits = std::bit_cast<unsigned>(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// |x| rounded to `mantissa` bits above 2^min_exponent (subnormals below it), ties to even. Exact: adding a power of two
// drops the bits below its own unit.
inline double round_to(double x, int mantissa, int min_exponent) {
  const int exponent = x == 0 ? min_exponent : std::max(std::ilogb(x), min_exponent);
  const double unit = std::ldexp(1.0, exponent - mantissa);
  return std::nearbyint(x / unit) * unit;
}

// cvt.rn.f16.f32: ties to even, overflow to infinity, one NaN.
inline unsigned to_f16(float x) {
  if (x != x) return 0x7fff;
  const unsigned sign = std::bit_cast<unsigned>(x) >> 16 & 0x8000;
  const unsigned magnitude = std::bit_cast<unsigned>(x) & 0x7fffffff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (magnitude < 0x38800000) {                       // below 2^-14: units of 2^-24
    return sign | unsigned(std::nearbyint(std::bit_cast<float>(magnitude) * 0x1p24f));
  }
  return sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
}

// cvt.rn.satfinite.e4m3x2.f32 and .e5m2x2: ties to even, overflow to the largest finite value, one NaN.
inline unsigned to_f8(float x, int mantissa, int bias, double largest) {
  if (x != x) return 0x7f;
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  const double y = std::fmin(round_to(std::fabs(double(x)), mantissa, 1 - bias), largest);
  if (y < std::ldexp(1.0, 1 - bias)) return sign | unsigned(std::ldexp(y, bias - 1 + mantissa));
  const int exponent = std::ilogb(y);
  return sign | unsigned(exponent + bias) << mantissa |
         (unsigned(std::ldexp(y, mantissa - exponent)) & ((1u << mantissa) - 1));
}
inline unsigned to_e4m3(float x) { return to_f8(x, 3, 7, 448); }
inline unsigned to_e5m2(float x) { return to_f8(x, 2, 15, 57344); }

// .ftz: subnormals become zeros of the same sign.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

}  // namespace emu
