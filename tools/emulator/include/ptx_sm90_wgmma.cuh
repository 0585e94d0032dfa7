// SPDX-License-Identifier: Apache-2.0
// Twin of cuda/ptx_sm90_wgmma.cuh for the emulator.
#pragma once
#include "ptx_sm90.cuh"

namespace emu {

void wgmma_fence();
void wgmma_commit();
void wgmma_wait(int pending);
// a: a descriptor, or four registers where `registers` is given.
void wgmma(float* d, int n, Format format, std::uint64_t a, const unsigned* registers,
           std::uint64_t b, int trans_a, int trans_b, bool accumulate);

}  // namespace emu

namespace ptx {

inline void wgmma_fence() { emu::wgmma_fence(); }
inline void wgmma_commit_group() { emu::wgmma_commit(); }
template <int kPending>
inline void wgmma_wait_group() {
  emu::wgmma_wait(kPending);
}
template <int kN>
inline void wgmma_pin([[maybe_unused]] float (&d)[kN]) {}
inline float mul_unless_one(float x, float by) { return x * by; }

enum class Swizzle { none = 0, b128 = 1, b64 = 2, b32 = 3 };
inline unsigned long long wgmma_descriptor(unsigned address, int leading, int stride,
                                           Swizzle swizzle) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 |
         static_cast<unsigned long long>(swizzle) << 62;
}

enum class WgmmaType { bf16, f16, e4m3 };
template <int kN, WgmmaType kType>
struct Wgmma {
  static constexpr emu::Format kFormat = emu::Format(kType);
  template <int kTransA = 0, int kTransB = 0>
  static void ss(float (&d)[kN / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    emu::wgmma(d, kN, kFormat, a, nullptr, b, kTransA, kTransB, accumulate);
  }
  template <int kTransB = 0>
  static void rs(float (&d)[kN / 2], const unsigned (&a)[4], unsigned long long b,
                 bool accumulate) {
    emu::wgmma(d, kN, kFormat, 0, a, b, 0, kTransB, accumulate);
  }
};

}  // namespace ptx
