// SPDX-License-Identifier: Apache-2.0
// Number formats of the tensor cores: exact widening to float32, and narrowing with the GPU's
// rounding.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace emu {

enum class Format : unsigned char { bf16, f16, e4m3 };

inline float from_bf16(unsigned bits) { return std::bit_cast<float>(bits << 16); }

// A half's bits, moved to float32's place, are 2^112 too small; the product also normalises
// subnormals.
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

// cvt.rn.bf16.f32: ties to even, overflow to infinity, one NaN.
inline unsigned to_bf16(float x) {
  const unsigned bits = std::bit_cast<unsigned>(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
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

// cvt.rn.satfinite.e4m3x2.f32: ties to even, overflow to the largest finite value, one NaN.
inline unsigned to_e4m3(float x) {
  if (x != x) return 0x7f;
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 448.f) return sign | 0x7e;
  const unsigned bits = std::bit_cast<unsigned>(magnitude);
  if (magnitude < 0x1p-6f) return sign | unsigned(std::nearbyint(magnitude * 0x1p9f));  // subnormal
  return sign | (bits - (120u << 23) + 0x7ffff + (bits >> 20 & 1)) >> 20;
}

// cvt.rn.satfinite.e5m2x2.f32. e5m2 is the upper byte of a half.
inline unsigned to_e5m2(float x) {
  if (x != x) return 0x7f;
  const unsigned sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::fabs(x);
  if (magnitude >= 57344.f) return sign | 0x7b;
  const unsigned bits = std::bit_cast<unsigned>(magnitude);
  if (magnitude < 0x1p-14f) return sign | unsigned(std::nearbyint(magnitude * 0x1p16f));
  return sign | (bits - (112u << 23) + 0xfffff + (bits >> 21 & 1)) >> 21;
}

// .ftz: subnormals become zeros of the same sign.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }

}  // namespace emu
