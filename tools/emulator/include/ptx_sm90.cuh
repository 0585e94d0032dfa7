// SPDX-License-Identifier: Apache-2.0
// Twin of cuda/ptx_sm90.cuh for the emulator: the same names and signatures, as calls into the
// runtime.
#pragma once
#include "ptx_sm89.cuh"

namespace emu {

enum class Bulk : unsigned char { load, store, reduce_add };

void mbarrier_init(unsigned bar, int arrivals);
void mbarrier_fence_init();
void mbarrier_arrive(unsigned bar, int expect_bytes, bool arrives);
bool mbarrier_wait(unsigned bar, int parity);
void barrier_arrive(unsigned id, unsigned threads);
void cluster_arrive();
void cluster_wait();
[[gnu::const]] unsigned cluster_rank();
unsigned map_rank(unsigned address, unsigned rank);
void cluster_access(unsigned address, float* x, bool write);  // four floats
void store_async(unsigned address, float* x, unsigned bar);
void proxy_fence();
void bulk_copy(Bulk kind, unsigned address, const void* global, int bytes, unsigned bar);
void bulk_commit();
void bulk_wait(int pending, bool read_only);
void store_matrix(unsigned dst, const unsigned* r, bool transposed);
void set_registers(int count, bool more);
bool elect();
}  // namespace emu

namespace ptx {

inline void mbarrier_init(unsigned bar, int arrivals) { emu::mbarrier_init(bar, arrivals); }
inline void fence_mbarrier_init() { emu::mbarrier_fence_init(); }
inline void mbarrier_arrive(unsigned bar) { emu::mbarrier_arrive(bar, 0, true); }
inline void mbarrier_arrive_cluster(unsigned cluster_bar) {
  emu::mbarrier_arrive(cluster_bar, 0, true);
}
inline void mbarrier_arrive_expect_tx(unsigned bar, int bytes) {
  emu::mbarrier_arrive(bar, bytes, true);
}
inline void mbarrier_expect_tx(unsigned bar, int bytes) { emu::mbarrier_arrive(bar, bytes, false); }
inline bool mbarrier_try_wait(unsigned bar, int parity) { return emu::mbarrier_wait(bar, parity); }
inline bool mbarrier_try_wait_cluster(unsigned bar, int parity) {
  return emu::mbarrier_wait(bar, parity);
}

inline void bar_arrive(int barrier, int threads) { emu::barrier_arrive(barrier, threads); }

inline unsigned cluster_ctarank() { return emu::cluster_rank(); }
inline unsigned mapa(unsigned address, unsigned rank) { return emu::map_rank(address, rank); }
inline void barrier_cluster_arrive() { emu::cluster_arrive(); }
inline void barrier_cluster_arrive_relaxed() { emu::cluster_arrive(); }
inline void barrier_cluster_wait() { emu::cluster_wait(); }
inline void st_shared_cluster(unsigned cluster_address, float4 x) {
  emu::cluster_access(cluster_address, &x.x, true);
}
inline void st_async(unsigned cluster_address, float4 x, unsigned cluster_bar) {
  emu::store_async(cluster_address, &x.x, cluster_bar);
}
inline float4 ld_shared_cluster(unsigned cluster_address) {
  float4 x;
  emu::cluster_access(cluster_address, &x.x, false);
  return x;
}

inline void fence_proxy_async() { emu::proxy_fence(); }
inline void bulk_store(void* dst, unsigned src, int bytes) {
  emu::bulk_copy(emu::Bulk::store, src, dst, bytes, 0);
}
inline void bulk_reduce_add_f32(float* dst, unsigned src, int bytes) {
  emu::bulk_copy(emu::Bulk::reduce_add, src, dst, bytes, 0);
}
inline void bulk_commit_group() { emu::bulk_commit(); }
template <int kPending>
inline void bulk_wait_group_read() {
  emu::bulk_wait(kPending, true);
}
template <int kPending>
inline void bulk_wait_group() {
  emu::bulk_wait(kPending, false);
}

inline void stmatrix_x4(unsigned dst, const unsigned (&r)[4]) { emu::store_matrix(dst, r, false); }
inline void stmatrix_x4_trans(unsigned dst, const unsigned (&r)[4]) {
  emu::store_matrix(dst, r, true);
}

template <int kRegisters>
inline void setmaxnreg_inc() {
  emu::set_registers(kRegisters, true);
}
template <int kRegisters>
inline void setmaxnreg_dec() {
  emu::set_registers(kRegisters, false);
}
inline bool elect_sync() { return emu::elect(); }

inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}

}  // namespace ptx
