// SPDX-License-Identifier: Apache-2.0
// Twin of cuda/ptx_sm80.cuh for the emulator: the same names and signatures, as calls into
// runtime.cpp.
#pragma once
#include "convert.hpp"

namespace emu {

unsigned shared_address(const void* pointer);
void barrier_sync(unsigned id, unsigned threads);
void copy_async(unsigned dst, const void* src, int bytes, int width);
void copy_async_commit();
void copy_async_wait(int pending);
void store_shared(unsigned dst, const unsigned* x);  // four words
void load_matrix(unsigned* r, unsigned src, int count, bool transposed);
void mma_16x8x16(float* d, const unsigned* a, unsigned b0, unsigned b1, Format format);

}  // namespace emu

namespace ptx {

inline unsigned shared_address(const void* pointer) { return emu::shared_address(pointer); }

inline int divergent(int x) { return x; }
inline int opaque(int x) { return x; }
inline long long opaque(long long x) { return x; }
template <class T>
inline T* opaque(T* x) {
  return x;
}

inline void bar_sync(int barrier, int threads) { emu::barrier_sync(barrier, threads); }

inline unsigned atom_inc_acq_rel(unsigned* address, unsigned last) {
  __threadfence();
  const unsigned old = atomicInc(address, last);
  __threadfence();
  return old;
}

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

inline void st_shared_16(unsigned dst, uint4 x) { emu::store_shared(dst, &x.x); }

inline void ldmatrix_x4(unsigned (&r)[4], unsigned src) { emu::load_matrix(r, src, 4, false); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned src) { emu::load_matrix(r, src, 4, true); }

// Lane l holds two neighbours of row l / 4; those of its column after it are in two other lanes.
inline unsigned movmatrix_trans(unsigned x) {
  const unsigned lane = threadIdx.x % 32, from = lane % 4 * 8 + lane / 8, shift = lane / 4 % 2 * 16;
  const unsigned a = __shfl_sync(~0u, x, from), b = __shfl_sync(~0u, x, from + 4);
  return (a >> shift & 0xffff) | (b >> shift & 0xffff) << 16;
}
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emu::mma_16x8x16(d, a, b0, b1, emu::Format::bf16);
}
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emu::mma_16x8x16(d, a, b0, b1, emu::Format::f16);
}

inline unsigned cvt_bf16x2(float lo, float hi) { return emu::to_bf16(lo) | emu::to_bf16(hi) << 16; }
inline unsigned cvt_f16x2(float lo, float hi) { return emu::to_f16(lo) | emu::to_f16(hi) << 16; }
inline unsigned mul_f16x2(unsigned a, unsigned b) {
  return cvt_f16x2(emu::from_f16(a & 0xffff) * emu::from_f16(b & 0xffff),
                   emu::from_f16(a >> 16) * emu::from_f16(b >> 16));
}
inline unsigned sub_f16x2(unsigned a, unsigned b) {
  return cvt_f16x2(emu::from_f16(a & 0xffff) - emu::from_f16(b & 0xffff),
                   emu::from_f16(a >> 16) - emu::from_f16(b >> 16));
}
inline float cvt_f32_f16(unsigned short x) { return emu::from_f16(x); }
inline float ex2_approx(float x) { return emu::flush(std::exp2(emu::flush(x))); }
inline float lg2_approx(float x) { return std::log2(emu::flush(x)); }
inline float rcp_approx(float x) { return emu::flush(1.f / emu::flush(x)); }

}  // namespace ptx
