// SPDX-License-Identifier: Apache-2.0
// The PTX instructions that sm_90 adds: one instruction a function, named after it, no logic.
// Shared addresses are 32 bits (ptx::shared_address); "cluster" addresses come from mapa.
// tools/emulator/include/ptx_sm90.cuh is the twin.
#pragma once

#include "ptx_sm89.cuh"

namespace ptx {

// ---- mbarrier (PTX ISA: Parallel Synchronization, mbarrier) ----
// mbarrier.init: `arrivals` complete a phase; the phases are numbered 0, 1, 0, ... ("parity").
__device__ __forceinline__ void mbarrier_init(unsigned bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
// fence.mbarrier_init: initialised barriers become visible to the cluster and to asynchronous
// copies.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// mbarrier.arrive
__device__ __forceinline__ void mbarrier_arrive(unsigned bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// mbarrier.arrive on a barrier of another block of the cluster. Relaxed data: nothing written here
// is handed over.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned cluster_bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(cluster_bar) : "memory");
}
// mbarrier.arrive.expect_tx: this phase also waits for `bytes` of asynchronous copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// mbarrier.expect_tx: the same, without arriving.
__device__ __forceinline__ void mbarrier_expect_tx(unsigned bar, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// mbarrier.try_wait.parity: whether the phase of that parity has completed; may sleep for a while
// first.
__device__ __forceinline__ bool mbarrier_try_wait(unsigned bar, int parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, "
      "p;\n}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}
// The same, where the bytes that it counts come from other blocks.
__device__ __forceinline__ bool mbarrier_try_wait_cluster(unsigned bar, int parity) {
  unsigned done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- Named barriers of the block, 0 to 15 (PTX ISA: bar, barrier) ----
// `threads` counts whole warps.
__device__ __forceinline__ void bar_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- Clusters (PTX ISA: barrier.cluster, mapa, %cluster_ctarank, ld and st .shared::cluster) ----
__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ unsigned mapa(unsigned address, unsigned rank) {
  unsigned mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Orders no memory: for a block that only says that it is still there.
__device__ __forceinline__ void barrier_cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void barrier_cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void st_shared_cluster(unsigned cluster_address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(cluster_address), "f"(x.x),
               "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}
// Also counts its 16 bytes at a barrier of the block that `cluster_address` is in.
__device__ __forceinline__ void st_async(unsigned cluster_address, float4 x, unsigned cluster_bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(cluster_address),
      "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(cluster_bar)
      : "memory");
}
__device__ __forceinline__ float4 ld_shared_cluster(unsigned cluster_address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(cluster_address)
               : "memory");
  return x;
}

// ---- Ordinary and asynchronous accesses (PTX ISA: fence.proxy) ----
// Whoever wrote shared memory with ordinary stores orders them before a copy or wgmma that reads it
// with this fence.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Contiguous copies (PTX ISA: cp.async.bulk); addresses and `bytes` are multiples of 16 ----
__device__ __forceinline__ void bulk_store(void* dst, unsigned src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_reduce_add_f32(float* dst, unsigned src, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
      "r"(src), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// All but the last kPending groups of this thread have read their sources, which may be
// overwritten.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// All but the last kPending groups of this thread are complete: their writes are visible to it.
template <int kPending>
__device__ __forceinline__ void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrix fragments, registers to shared (PTX ISA: stmatrix) ----
__device__ __forceinline__ void stmatrix_x4(unsigned dst, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
__device__ __forceinline__ void stmatrix_x4_trans(unsigned dst, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- Roles of warps (PTX ISA: setmaxnreg, elect.sync) ----
// Registers a thread, a multiple of 8; every warp of a warpgroup. Asking for more than the block
// was given waits for ever.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// True in one lane of the warp, always the same one.
__device__ __forceinline__ bool elect_sync() {
  unsigned elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected)::"memory");
  return elected != 0;
}

// ---- Dependent launches (PTX ISA: griddepcontrol) ----
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace ptx
