// SPDX-License-Identifier: Apache-2.0
// Twin of cuda/ptx_sm90_tma.cuh for the emulator.
#pragma once
#include "ptx_sm90.cuh"
#include "tensor_map.cuh"

namespace emu {

void tensor_copy(Bulk kind, unsigned address, const void* map, unsigned bar, unsigned blocks,
                 int rank, const int* at);
void check_tensor_map(const void* map);

}  // namespace emu

namespace ptx {

inline void prefetch_l2(const void* address) {}
inline void prefetch_tensormap(const TensorMap* map) { emu::check_tensor_map(map); }
inline void tma_load_2d(unsigned dst, const TensorMap* map, unsigned bar, int c0, int c1) {
  const int at[] = {c0, c1};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 0, 2, at);
}
inline void tma_load_multicast_2d(unsigned dst, const TensorMap* map, unsigned bar,
                                  unsigned short blocks, int c0, int c1) {
  const int at[] = {c0, c1};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 1u << 16 | blocks, 2, at);
}
inline void tma_store_2d(const TensorMap* map, unsigned src, int c0, int c1) {
  const int at[] = {c0, c1};
  emu::tensor_copy(emu::Bulk::store, src, map, 0, 0, 2, at);
}
inline void tma_reduce_add_2d(const TensorMap* map, unsigned src, int c0, int c1) {
  const int at[] = {c0, c1};
  emu::tensor_copy(emu::Bulk::reduce_add, src, map, 0, 0, 2, at);
}
inline void tma_load_3d(unsigned dst, const TensorMap* map, unsigned bar, int c0, int c1, int c2) {
  const int at[] = {c0, c1, c2};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 0, 3, at);
}
inline void tma_load_multicast_3d(unsigned dst, const TensorMap* map, unsigned bar,
                                  unsigned short blocks, int c0, int c1, int c2) {
  const int at[] = {c0, c1, c2};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 1u << 16 | blocks, 3, at);
}
inline void tma_store_3d(const TensorMap* map, unsigned src, int c0, int c1, int c2) {
  const int at[] = {c0, c1, c2};
  emu::tensor_copy(emu::Bulk::store, src, map, 0, 0, 3, at);
}
inline void tma_reduce_add_3d(const TensorMap* map, unsigned src, int c0, int c1, int c2) {
  const int at[] = {c0, c1, c2};
  emu::tensor_copy(emu::Bulk::reduce_add, src, map, 0, 0, 3, at);
}
inline void tma_load_4d(unsigned dst, const TensorMap* map, unsigned bar, int c0, int c1, int c2,
                        int c3) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 0, 4, at);
}
inline void tma_load_multicast_4d(unsigned dst, const TensorMap* map, unsigned bar,
                                  unsigned short blocks, int c0, int c1, int c2, int c3) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 1u << 16 | blocks, 4, at);
}
inline void tma_store_4d(const TensorMap* map, unsigned src, int c0, int c1, int c2, int c3) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_copy(emu::Bulk::store, src, map, 0, 0, 4, at);
}
inline void tma_reduce_add_4d(const TensorMap* map, unsigned src, int c0, int c1, int c2, int c3) {
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_copy(emu::Bulk::reduce_add, src, map, 0, 0, 4, at);
}
inline unsigned long long createpolicy_evict_first() { return 0; }
inline void tma_load_hint_4d(unsigned dst, const TensorMap* map, unsigned bar, int c0, int c1,
                             int c2, int c3, unsigned long long policy) {
  static_cast<void>(policy);
  const int at[] = {c0, c1, c2, c3};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 0, 4, at);
}
inline void tma_load_hint_5d(unsigned dst, const TensorMap* map, unsigned bar, int c0, int c1,
                             int c2, int c3, int c4, unsigned long long policy) {
  static_cast<void>(policy);
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 0, 5, at);
}
inline void tma_load_5d(unsigned dst, const TensorMap* map, unsigned bar, int c0, int c1, int c2,
                        int c3, int c4) {
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 0, 5, at);
}
inline void tma_load_multicast_5d(unsigned dst, const TensorMap* map, unsigned bar,
                                  unsigned short blocks, int c0, int c1, int c2, int c3, int c4) {
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_copy(emu::Bulk::load, dst, map, bar, 1u << 16 | blocks, 5, at);
}
inline void tma_store_5d(const TensorMap* map, unsigned src, int c0, int c1, int c2, int c3,
                         int c4) {
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_copy(emu::Bulk::store, src, map, 0, 0, 5, at);
}
inline void tma_reduce_add_5d(const TensorMap* map, unsigned src, int c0, int c1, int c2, int c3,
                              int c4) {
  const int at[] = {c0, c1, c2, c3, c4};
  emu::tensor_copy(emu::Bulk::reduce_add, src, map, 0, 0, 5, at);
}

}  // namespace ptx
