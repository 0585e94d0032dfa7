// SPDX-License-Identifier: Apache-2.0
// Twin of cuda/ptx_sm80.cuh for the emulator: the same names and signatures, as calls into runtime.cpp.
#pragma once
#include "convert.hpp"

namespace emu {

unsigned shared_address(const void* pointer);
void barrier_sync(unsigned id, unsigned threads);
void copy_async(unsigned dst, const void* src, int bytes, int width);
void copy_async_commit();
void copy_async_wait(int pending);
void load_matrix(unsigned* r, unsigned src, int count, bool transposed);
void mma_16x8x16(float* d, const unsigned* a, unsigned b0, unsigned b1, Format format);

}  // namespace emu

namespace ptx {

inline unsigned shared_address(const void* pointer) { return emu::shared_address(pointer); }

inline int opaque(int x) { return x; }
inline long long opaque(long long x) { return x; }
template <class T>
inline T* opaque(T* x) {
  return x;
}

inline void bar_sync(int barrier, int threads) { emu::barrier_sync(barrier, threads); }

inline void cp_async_16(unsigned dst, const void* src, int bytes) {
  emu::copy_async(dst, src, bytes, 16);
}
inline void cp_async_4(unsigned dst, const void* src, int bytes) {
  emu::copy_async(dst, src, bytes, 4);
}
inline void cp_async_commit_group() { emu::copy_async_commit(); }
template <int kPending>
inline void cp_async_wait_group() {
  emu::copy_async_wait(kPending);
}

inline void ldmatrix_x4(unsigned (&r)[4], unsigned src) { emu::load_matrix(r, src, 4, false); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned src) { emu::load_matrix(r, src, 4, true); }

inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emu::mma_16x8x16(d, a, b0, b1, emu::Format::bf16);
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emu::mma_16x8x16(d, a, b0, b1, emu::Format::f16);
}

inline unsigned cvt_bf16x2(float lo, float hi) { return emu::to_bf16(lo) | emu::to_bf16(hi) << 16; }
inline unsigned cvt_f16x2(float lo, float hi) { return emu::to_f16(lo) | emu::to_f16(hi) << 16; }
inline float ex2_approx(float x) { return emu::flush(std::exp2(emu::flush(x))); }
inline float lg2_approx(float x) { return std::log2(emu::flush(x)); }
inline float rcp_approx(float x) { return emu::flush(1.f / emu::flush(x)); }

}  // namespace ptx
