// SPDX-License-Identifier: Apache-2.0
// What a kernel sees of the emulator: the CUDA built-ins, in front of every unit (g++ -include). No
// state lives here: everything that touches the machine is a call into runtime.cpp, which is
// compiled apart, without instrumentation.
#pragma once
#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <bit>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)

// ---- Vector types ----
#define EMU_VECTOR(name, type, align2, align4)                                \
  struct name##1 { type x; };                                                 \
  struct alignas(align2) name##2 { type x, y; };                              \
  struct name##3 { type x, y, z; };                                           \
  struct alignas(align4) name##4 { type x, y, z, w; };                        \
  inline name##1 make_##name##1(type x) { return {x}; }                       \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTOR(char, signed char, 2, 4)
EMU_VECTOR(uchar, unsigned char, 2, 4)
EMU_VECTOR(short, short, 4, 8)
EMU_VECTOR(ushort, unsigned short, 4, 8)
EMU_VECTOR(int, int, 8, 16)
EMU_VECTOR(uint, unsigned, 8, 16)
EMU_VECTOR(longlong, long long, 16, 16)
EMU_VECTOR(ulonglong, unsigned long long, 16, 16)
EMU_VECTOR(float, float, 8, 16)
EMU_VECTOR(double, double, 16, 16)
#undef EMU_VECTOR
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// ---- The machine ----
namespace emu {

// Fixed for the life of a thread, so that g++ may call them once (a fiber never changes its
// thread).
[[gnu::const]] uint3 thread_index();
[[gnu::const]] uint3 block_index();
[[gnu::const]] uint3 block_size();
[[gnu::const]] uint3 grid_size();
[[gnu::const]] unsigned lane_index();

unsigned reserve_static(unsigned bytes, unsigned align);
unsigned declare_dynamic(unsigned align);
[[gnu::const]] unsigned char* static_memory(unsigned offset);
[[gnu::const]] unsigned char* dynamic_memory();

enum class Reduce : unsigned char { add, min, max, umin, umax, bit_and, bit_or, bit_xor };
enum class Sync : unsigned char { plain, vote_and, vote_or, count };

int sync_block(Sync kind, int predicate);  // every thread of the block
void sync_warp(unsigned mask);
std::uint64_t shuffle(unsigned mask, std::uint64_t value, unsigned source);
unsigned ballot(unsigned mask, bool predicate);
unsigned match_any(unsigned mask, std::uint64_t value);
unsigned reduce(unsigned mask, unsigned value, Reduce kind);
void* atomic(const void* address, unsigned bytes);  // checks; other threads may run first
void yield();                                       // a thread that polls lets others run
void fence();
long long clock();
[[noreturn]] void trap(const char* what);

// `__shared__ T x;` and `extern __shared__ T x[];`: driver.py turns the two declarations into
// these.
template <unsigned kKey, class T, unsigned kAlign>
inline const unsigned static_offset =
    reserve_static(sizeof(T), kAlign > alignof(T) ? kAlign : alignof(T));
template <unsigned kAlign>
inline const unsigned dynamic_align = declare_dynamic(kAlign);
template <unsigned kKey, class T, unsigned kAlign = 1>
inline T& static_shared() {
  return *reinterpret_cast<T*>(static_memory(static_offset<kKey, T, kAlign>));
}
template <class T, unsigned kAlign = 16>
inline T* dynamic_shared() {
  return reinterpret_cast<T*>(dynamic_memory() + 0 * dynamic_align<kAlign>);
}

template <class P>
inline void call(void (*kernel)(P), const void* params) {
  kernel(*static_cast<const std::remove_cvref_t<P>*>(params));
}

}  // namespace emu

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::block_size())
#define gridDim (emu::grid_size())
constexpr int warpSize = 32;

// ---- Barriers, shuffles, votes ----
inline void __syncthreads() { emu::sync_block(emu::Sync::plain, 0); }
inline int __syncthreads_and(int p) { return emu::sync_block(emu::Sync::vote_and, p); }
inline int __syncthreads_or(int p) { return emu::sync_block(emu::Sync::vote_or, p); }
inline int __syncthreads_count(int p) { return emu::sync_block(emu::Sync::count, p); }
inline void __syncwarp(unsigned mask = ~0u) { emu::sync_warp(mask); }
inline void __threadfence() { emu::fence(); }
inline void __threadfence_block() { emu::fence(); }
inline void __threadfence_system() { emu::fence(); }

namespace emu {
template <class T>
inline T shuffle_as(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = shuffle(mask, bits, source);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
}  // namespace emu
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emu::shuffle_as(mask, value, (emu::lane_index() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emu::lane_index();
  return emu::shuffle_as(mask, value, (lane & (width - 1)) >= delta ? lane - delta : lane);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const unsigned lane = emu::lane_index();
  return emu::shuffle_as(mask, value,
                         (lane & (width - 1)) + delta < unsigned(width) ? lane + delta : lane);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  const unsigned lane = emu::lane_index(), source = lane ^ bits;
  return emu::shuffle_as(mask, value, source <= (lane | (width - 1)) ? source : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) { return emu::ballot(mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return emu::ballot(mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return emu::ballot(mask, p == 0) == 0; }
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return emu::match_any(mask, bits);
}
inline int __reduce_add_sync(unsigned m, int v) { return emu::reduce(m, v, emu::Reduce::add); }
inline unsigned __reduce_add_sync(unsigned m, unsigned v) {
  return emu::reduce(m, v, emu::Reduce::add);
}
inline int __reduce_min_sync(unsigned m, int v) { return emu::reduce(m, v, emu::Reduce::min); }
inline unsigned __reduce_min_sync(unsigned m, unsigned v) {
  return emu::reduce(m, v, emu::Reduce::umin);
}
inline int __reduce_max_sync(unsigned m, int v) { return emu::reduce(m, v, emu::Reduce::max); }
inline unsigned __reduce_max_sync(unsigned m, unsigned v) {
  return emu::reduce(m, v, emu::Reduce::umax);
}
inline unsigned __reduce_and_sync(unsigned m, unsigned v) {
  return emu::reduce(m, v, emu::Reduce::bit_and);
}
inline unsigned __reduce_or_sync(unsigned m, unsigned v) {
  return emu::reduce(m, v, emu::Reduce::bit_or);
}
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) {
  return emu::reduce(m, v, emu::Reduce::bit_xor);
}

// ---- Atomics ----
// One thread runs at a time, so checking the address and giving others a turn is all it takes.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))
#define EMU_ATOMIC(name, expression)                                       \
  template <class T>                                                       \
  EMU_UNCHECKED inline T name(T* address, std::type_identity_t<T> value) { \
    T* const p = static_cast<T*>(emu::atomic(address, sizeof(T)));         \
    const T old = *p;                                                      \
    *p = expression;                                                       \
    return old;                                                            \
  }
EMU_ATOMIC(atomicAdd, old + value)
EMU_ATOMIC(atomicSub, old - value)
EMU_ATOMIC(atomicExch, value)
EMU_ATOMIC(atomicMin, old < value ? old : value)
EMU_ATOMIC(atomicMax, old > value ? old : value)
EMU_ATOMIC(atomicAnd, old& value)
EMU_ATOMIC(atomicOr, old | value)
EMU_ATOMIC(atomicXor, old ^ value)
EMU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
EMU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef EMU_ATOMIC
template <class T>
EMU_UNCHECKED inline T atomicCAS(T* address, std::type_identity_t<T> expected,
                                 std::type_identity_t<T> value) {
  T* const p = static_cast<T*>(emu::atomic(address, sizeof(T)));
  const T old = *p;
  if (old == expected) *p = value;
  return old;
}

// ---- Loads with cache hints ----
template <class T>
inline T __ldg(const T* p) {
  return *p;
}
template <class T>
inline T __ldcg(const T* p) {
  return *p;
}
template <class T>
inline T __ldca(const T* p) {
  return *p;
}
template <class T>
inline T __ldcs(const T* p) {
  return *p;
}
template <class T>
inline void __stcg(T* p, T v) {
  *p = v;
}
template <class T>
inline void __stcs(T* p, T v) {
  *p = v;
}

// ---- Arithmetic ----
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) {
  volatile float r = a * b;
  return r;
}  // never contracted
inline float __fadd_rn(float a, float b) {
  volatile float r = a + b;
  return r;
}
inline float __fsub_rn(float a, float b) {
  volatile float r = a - b;
  return r;
}
inline float rsqrtf(float a) { return 1.f / std::sqrt(a); }
inline float __expf(float a) { return std::exp(a); }
inline float __exp2f(float a) { return std::exp2(a); }
inline float __logf(float a) { return std::log(a); }
inline float __log2f(float a) { return std::log2(a); }
inline float __powf(float a, float b) { return std::pow(a, b); }
inline float __sinf(float a) { return std::sin(a); }
inline float __cosf(float a) { return std::cos(a); }
inline float __saturatef(float a) { return a > 0.f ? (a < 1.f ? a : 1.f) : 0.f; }
inline int __float2int_rn(float a) { return int(std::nearbyint(a)); }
inline int __float2int_rz(float a) { return int(a); }
inline float __int2float_rn(int a) { return float(a); }
inline int __popc(unsigned a) { return std::popcount(a); }
inline int __popcll(unsigned long long a) { return std::popcount(a); }
inline int __clz(int a) { return std::countl_zero(unsigned(a)); }
inline int __ffs(int a) { return a == 0 ? 0 : std::countr_zero(unsigned(a)) + 1; }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned((unsigned long long)a * b >> 32);
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return unsigned((((unsigned long long)hi << 32 | lo) << (n & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return unsigned(((unsigned long long)hi << 32 | lo) >> (n & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i) & 15, byte = unsigned(both >> (8 * (s & 7))) & 255;
    r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return r;
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) inline auto min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return T(std::fmin(T(a), T(b)));
  else
    return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) inline auto max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>)
    return T(std::fmax(T(a), T(b)));
  else
    return T(a) < T(b) ? T(b) : T(a);
}

// ---- The rest ----
inline void __trap() { emu::trap("__trap()"); }
inline void __nanosleep(unsigned) { emu::yield(); }
inline long long clock64() { return emu::clock(); }
inline int clock() { return int(emu::clock()); }
#define __builtin_assume(condition) ((void)0)
#define __assume(condition) ((void)0)
