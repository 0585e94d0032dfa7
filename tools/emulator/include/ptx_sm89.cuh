// SPDX-License-Identifier: Apache-2.0
// Twin of cuda/ptx_sm89.cuh for the emulator: the same names and signatures.
#pragma once
#include "ptx_sm80.cuh"

namespace ptx {

inline unsigned short cvt_e4m3x2(float lo, float hi) {
  return static_cast<unsigned short>(emu::to_e4m3(lo) | emu::to_e4m3(hi) << 8);
}
inline unsigned short cvt_e5m2x2(float lo, float hi) {
  return static_cast<unsigned short>(emu::to_e5m2(lo) | emu::to_e5m2(hi) << 8);
}
inline unsigned cvt_f16x2_e4m3x2_low(unsigned x) {
  return emu::to_f16(emu::from_e4m3(x & 0xff)) | emu::to_f16(emu::from_e4m3(x >> 8 & 0xff)) << 16;
}
inline unsigned cvt_f16x2_e4m3x2_high(unsigned x) { return cvt_f16x2_e4m3x2_low(x >> 16); }

}  // namespace ptx
