// SPDX-License-Identifier: Apache-2.0
// wgmma, the warpgroup matrix product of sm_90a: one instruction a function, no logic.
#pragma once

#include "ptx_sm90.cuh"

namespace ptx {

// ---- Warpgroup matrix products: wgmma.mma_async, 64 x N x 32 bytes, float32 accumulators ----
// The instructions only start the work. fence: before the first one, and again whenever registers
// were touched since; commit_group closes a group; after wait_group<n> all but the last n are done,
// and their registers may be used.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// No instruction: accumulators are neither moved nor used across this point by the compiler.
template <int kN>
__device__ __forceinline__ void wgmma_pin(float (&d)[kN]) {
#pragma unroll
  for (int i = 0; i < kN; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// mul, predicated: x where `by` is 1. What is skipped takes its issue slot, but no power.
__device__ __forceinline__ float mul_unless_one(float x, float by) {
  asm("{\n.reg .pred p;\nsetp.neu.f32 p, %1, 0f3f800000;\n@p mul.f32 %0, %0, %1;\n}"
      : "+f"(x)
      : "f"(by));
  return x;
}

// Matrix descriptor (PTX ISA: "Matrix Descriptor Format"): address, leading and stride byte offset,
// swizzle. A step along the tile is added as (bytes >> 4). K-major: rows of `kSwizzle` bytes,
// `stride` from 8 rows to the next 8, `leading` unused (without swizzle: from 16 bytes of K to the
// next). MN-major: 8 rows of K of `kSwizzle` bytes each, `stride` to the next 8, `leading` to the
// next kSwizzle / 2 columns.
enum class Swizzle { none = 0, b128 = 1, b64 = 2, b32 = 3 };
__device__ __forceinline__ unsigned long long wgmma_descriptor(unsigned address, int leading,
                                                               int stride, Swizzle swizzle) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 |
         static_cast<unsigned long long>(swizzle) << 62;
}

// Wgmma<N, type>::ss: d = a b (+ d where `accumulate`), a and b from shared memory. ::rs: a from
// registers, the layout of mma.m16n8k16 for each warp's 16 rows. kTransA, kTransB: 1 for an
// MN-major operand (16-bit types only).
enum class WgmmaType { bf16, f16, e4m3 };
template <int kN, WgmmaType kType>
struct Wgmma;

// Operand numbers 0 ... N / 2 - 1 are the accumulators; then a (one or four), b, accumulate, and
// immediates.

#define RAWATTN_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define RAWATTN_R1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define RAWATTN_R2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define RAWATTN_R3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define RAWATTN_R4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define RAWATTN_R5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define RAWATTN_R6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define RAWATTN_R7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define RAWATTN_R8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define RAWATTN_R9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define RAWATTN_R10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define RAWATTN_R11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define RAWATTN_R12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define RAWATTN_R13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define RAWATTN_R14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define RAWATTN_R15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define RAWATTN_D8(i)                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define RAWATTN_REGISTERS_16 RAWATTN_R0
#define RAWATTN_OPERANDS_16 RAWATTN_D8(0)
#define RAWATTN_REGISTERS_32 RAWATTN_R0 ", " RAWATTN_R1
#define RAWATTN_OPERANDS_32 RAWATTN_D8(0), RAWATTN_D8(8)
#define RAWATTN_REGISTERS_64 RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3
#define RAWATTN_OPERANDS_64 RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24)
#define RAWATTN_REGISTERS_80 \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4
#define RAWATTN_OPERANDS_80 \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32)
#define RAWATTN_REGISTERS_96 \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5
#define RAWATTN_OPERANDS_96 \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40)
#define RAWATTN_REGISTERS_112                                                                \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5 \
             ", " RAWATTN_R6
#define RAWATTN_OPERANDS_112                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48)
#define RAWATTN_REGISTERS_128                                                                \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5 \
             ", " RAWATTN_R6 ", " RAWATTN_R7
#define RAWATTN_OPERANDS_128                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48), RAWATTN_D8(56)
#define RAWATTN_REGISTERS_144                                                                \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5 \
             ", " RAWATTN_R6 ", " RAWATTN_R7 ", " RAWATTN_R8
#define RAWATTN_OPERANDS_144                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48), RAWATTN_D8(56), RAWATTN_D8(64)
#define RAWATTN_REGISTERS_160                                                                \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5 \
             ", " RAWATTN_R6 ", " RAWATTN_R7 ", " RAWATTN_R8 ", " RAWATTN_R9
#define RAWATTN_OPERANDS_160                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48), RAWATTN_D8(56), RAWATTN_D8(64), RAWATTN_D8(72)
#define RAWATTN_REGISTERS_176                                                                \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5 \
             ", " RAWATTN_R6 ", " RAWATTN_R7 ", " RAWATTN_R8 ", " RAWATTN_R9 ", " RAWATTN_R10
#define RAWATTN_OPERANDS_176                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48), RAWATTN_D8(56), RAWATTN_D8(64), RAWATTN_D8(72), RAWATTN_D8(80)
#define RAWATTN_REGISTERS_192                                                                 \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5  \
             ", " RAWATTN_R6 ", " RAWATTN_R7 ", " RAWATTN_R8 ", " RAWATTN_R9 ", " RAWATTN_R10 \
             ", " RAWATTN_R11
#define RAWATTN_OPERANDS_192                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48), RAWATTN_D8(56), RAWATTN_D8(64), RAWATTN_D8(72), RAWATTN_D8(80),           \
      RAWATTN_D8(88)
#define RAWATTN_REGISTERS_256                                                                 \
  RAWATTN_R0 ", " RAWATTN_R1 ", " RAWATTN_R2 ", " RAWATTN_R3 ", " RAWATTN_R4 ", " RAWATTN_R5  \
             ", " RAWATTN_R6 ", " RAWATTN_R7 ", " RAWATTN_R8 ", " RAWATTN_R9 ", " RAWATTN_R10 \
             ", " RAWATTN_R11 ", " RAWATTN_R12 ", " RAWATTN_R13 ", " RAWATTN_R14 ", " RAWATTN_R15
#define RAWATTN_OPERANDS_256                                                                    \
  RAWATTN_D8(0), RAWATTN_D8(8), RAWATTN_D8(16), RAWATTN_D8(24), RAWATTN_D8(32), RAWATTN_D8(40), \
      RAWATTN_D8(48), RAWATTN_D8(56), RAWATTN_D8(64), RAWATTN_D8(72), RAWATTN_D8(80),           \
      RAWATTN_D8(88), RAWATTN_D8(96), RAWATTN_D8(104), RAWATTN_D8(112), RAWATTN_D8(120)

// %a ... are the operand numbers from N / 2 on, as strings.
#define RAWATTN_WGMMA_16BIT(n, type, name, o0, o1, o2, o3, o4, o5, o6)                         \
  template <>                                                                                  \
  struct Wgmma<n, WgmmaType::type> {                                                           \
    template <int kTransA, int kTransB>                                                        \
    static __device__ __forceinline__ void ss(float (&d)[n / 2], unsigned long long a,         \
                                              unsigned long long b, bool accumulate) {         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2                                      \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name                \
                   " {" RAWATTN_REGISTERS_##n "}, " o0 ", " o1 ", p, 1, 1, " o3 ", " o4 ";\n}" \
                   : RAWATTN_OPERANDS_##n                                                      \
                   : "l"(a), "l"(b), "r"(int(accumulate)), "n"(kTransA), "n"(kTransB));        \
    }                                                                                          \
    template <int kTransB>                                                                     \
    static __device__ __forceinline__ void rs(float (&d)[n / 2], const unsigned (&a)[4],       \
                                              unsigned long long b, bool accumulate) {         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5                                      \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." name                \
                   " {" RAWATTN_REGISTERS_##n "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4       \
                                              ", p, 1, 1, " o6 ";\n}"                          \
                   : RAWATTN_OPERANDS_##n                                                      \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), \
                     "n"(kTransB));                                                            \
    }                                                                                          \
  };
#define RAWATTN_WGMMA_8BIT(n, type, name, o0, o1, o2, o3, o4, o5)                               \
  template <>                                                                                   \
  struct Wgmma<n, WgmmaType::type> {                                                            \
    static __device__ __forceinline__ void ss(float (&d)[n / 2], unsigned long long a,          \
                                              unsigned long long b, bool accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2                                       \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32." name                 \
                   " {" RAWATTN_REGISTERS_##n "}, " o0 ", " o1 ", p, 1, 1;\n}"                  \
                   : RAWATTN_OPERANDS_##n                                                       \
                   : "l"(a), "l"(b), "r"(int(accumulate)));                                     \
    }                                                                                           \
    static __device__ __forceinline__ void rs(float (&d)[n / 2], const unsigned (&a)[4],        \
                                              unsigned long long b, bool accumulate) {          \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5                                       \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32.f32." name                 \
                   " {" RAWATTN_REGISTERS_##n "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4        \
                                              ", p, 1, 1;\n}"                                   \
                   : RAWATTN_OPERANDS_##n                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate))); \
    }                                                                                           \
  };
#define RAWATTN_WGMMA(n, ...)                            \
  RAWATTN_WGMMA_16BIT(n, bf16, "bf16.bf16", __VA_ARGS__) \
  RAWATTN_WGMMA_16BIT(n, f16, "f16.f16", __VA_ARGS__)    \
  RAWATTN_WGMMA_FIRST_SIX(RAWATTN_WGMMA_8BIT, n, __VA_ARGS__)
#define RAWATTN_WGMMA_FIRST_SIX(f, n, o0, o1, o2, o3, o4, o5, o6) \
  f(n, e4m3, "e4m3.e4m3", o0, o1, o2, o3, o4, o5)

RAWATTN_WGMMA(16, "%8", "%9", "%10", "%11", "%12", "%13", "%14")
RAWATTN_WGMMA(32, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
RAWATTN_WGMMA(64, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
RAWATTN_WGMMA(80, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
RAWATTN_WGMMA(96, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
RAWATTN_WGMMA(112, "%56", "%57", "%58", "%59", "%60", "%61", "%62")
RAWATTN_WGMMA(128, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
RAWATTN_WGMMA(144, "%72", "%73", "%74", "%75", "%76", "%77", "%78")
RAWATTN_WGMMA(160, "%80", "%81", "%82", "%83", "%84", "%85", "%86")
RAWATTN_WGMMA(176, "%88", "%89", "%90", "%91", "%92", "%93", "%94")
RAWATTN_WGMMA(192, "%96", "%97", "%98", "%99", "%100", "%101", "%102")
RAWATTN_WGMMA(256, "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef RAWATTN_WGMMA
#undef RAWATTN_WGMMA_FIRST_SIX
#undef RAWATTN_WGMMA_16BIT
#undef RAWATTN_WGMMA_8BIT

}  // namespace ptx
