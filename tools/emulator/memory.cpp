// SPDX-License-Identifier: Apache-2.0
// Which memory a kernel may touch: every plain access is reported by g++'s instrumentation, every
// other one is checked by the instruction that makes it.
#include <link.h>

#include <algorithm>

#include "runtime.hpp"

namespace emu {

// ---- Memory checks ----
static u32 static_end = kStaticBase;  // of the unit's static shared memory
static u32 dynamic_align = 16;        // as the unit declares it

u32 reserve_static(u32 bytes, u32 align) {
  const u32 offset = (static_end + align - 1) / align * align;
  static_end = offset + bytes;
  return offset;
}
u32 declare_dynamic(u32 align) { return dynamic_align = std::max(dynamic_align, align); }
u32 place_dynamic_memory(bool barely_aligned) {
  const u32 coarse = std::max(dynamic_align, 1024u);
  return (static_end + coarse - 1) / coarse * coarse +
         (barely_aligned ? dynamic_align % coarse : 0);
}

Block& block_of(const Thread& thread, u32 address, const char* what) {
  Block& own = *thread.warp->block;
  const u32 rank = address >> 24;  // 0: this block; mapa adds 1 + rank
  if (rank == 0) return own;
  if (rank > own.cluster->blocks.size())
    fail(thread, "%s: shared address %08x: the cluster is smaller", what, address);
  Block& block = own.cluster->blocks[rank - 1];
  if (block.live_warps == 0) fail(thread, "%s: block %u of the cluster has ended", what, rank - 1);
  return block;
}

u8* shared(const Thread& thread, u32 address, u32 bytes, u32 align, const char* what) {
  Block& block = block_of(thread, address, what);
  const u32 offset = address & 0xffffff, begin = machine.dynamic_base;
  const bool in_static = offset >= kStaticBase && offset + bytes <= static_end;
  if (!in_static && (offset < begin || offset + bytes > begin + machine.launch.dynamic_bytes)) {
    fail(thread, "%s of %u bytes at %s: outside the block's %u bytes", what, bytes,
         shared_place(address).c_str(), machine.launch.dynamic_bytes);
  }
  if (offset % align != 0) {
    fail(thread, "%s at %s, shared address 0x%x: not a multiple of %u", what,
         shared_place(address).c_str(), offset, align);
  }
  for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
    const u32 flight = block.in_flight[i];
    if (flight == 0) continue;
    const std::string who = flight & kOperation
                                ? "a bulk copy of " + operation_place(flight & ~kOperation)
                                : "a cp.async of thread " + std::to_string(flight - 1);
    fail(thread, "%s at %s, where %s is still under way: it has not been waited for", what,
         shared_place(4 * i).c_str(), who.c_str());
  }
  return block.memory + offset;
}

void note_write(const Thread& thread, Block& block, u32 offset, u32 bytes) {
  for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; ++i)
    block.writes[i] = {machine.time, thread.number()};
}

u8* global(const Thread& thread, const void* address, u32 bytes, u32 align, bool write,
           const char* what) {
  const u8* p = static_cast<const u8*>(address);
  if (u64(p) % align != 0)
    fail(thread, "%s: address %p is not a multiple of %u", what, address, align);
  const auto& arrays = machine.arrays;
  if (machine.last_array >= arrays.size() || p < arrays[machine.last_array].begin ||
      p >= arrays[machine.last_array].end) {
    auto next = std::upper_bound(arrays.begin(), arrays.end(), p,
                                 [](const u8* x, const Array& a) { return x < a.begin; });
    machine.last_array = next == arrays.begin() ? 0 : u32(next - arrays.begin() - 1);
  }
  if (arrays.empty()) fail(thread, "%s: address %p: no array was passed", what, address);
  const Array& a = arrays[machine.last_array];
  if (p < a.begin || p + bytes > a.end) {
    const Array* near = &a;
    for (const Array& b : arrays) {
      const auto away = [&](const Array& x) { return p < x.begin ? x.begin - p : p - x.end; };
      if (away(b) < away(*near)) near = &b;
    }
    fail(thread, "%s of %u bytes at %p: outside every array; byte %lld of array %u, which has %lld",
         what, bytes, address, static_cast<long long>(p - near->begin), near->number,
         static_cast<long long>(near->end - near->begin));
  }
  if (write && !a.writable)
    fail(thread, "%s of %u bytes into array %u, which is read-only", what, bytes, a.number);
  return const_cast<u8*>(p);
}

struct Segment {
  const u8 *begin, *end;
};
static std::vector<Segment> own_segments;  // code and data of this shared object: constants, tables

static bool in_own_object(const u8* p) {
  if (own_segments.empty()) {
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* self) {
          for (int i = 0; i < info->dlpi_phnum; ++i) {
            const auto& h = info->dlpi_phdr[i];
            const u8* begin = reinterpret_cast<const u8*>(info->dlpi_addr + h.p_vaddr);
            if (h.p_type == PT_LOAD) own_segments.push_back({begin, begin + h.p_memsz});
          }
          const bool mine =
              std::any_of(own_segments.begin(), own_segments.end(),
                          [&](const Segment& s) { return s.begin <= self && self < s.end; });
          if (!mine) own_segments.clear();
          return int(mine);
        },
        const_cast<void*>(static_cast<const void*>(&machine)));
  }
  return std::any_of(own_segments.begin(), own_segments.end(),
                     [&](const Segment& s) { return s.begin <= p && p < s.end; });
}

// A plain load or store of the kernel, reported by g++'s instrumentation (-fsanitize=thread) just
// before it happens.
static void access(const void* address, u32 bytes, u32 align, bool write, void* frame) {
  Machine& m = machine;
  Thread* self = m.self;
  const u8* p = static_cast<const u8*>(address);
  if (self == nullptr || u64(p - self->stack) < kStackBytes) return;
  self->frame = frame;
  if (--m.fuel == 0) preempt();
  Block& block = *self->warp->block;
  if (u64(p - block.memory) < kWindow) {
    const u32 offset = u32(p - block.memory);
    shared(*self, offset, bytes, align, write ? "shared store" : "shared load");
    if (write) note_write(*self, block, offset, bytes);
    return;
  }
  if (m.last_array < m.arrays.size()) {
    const Array& a = m.arrays[m.last_array];
    if (a.begin <= p && p + bytes <= a.end && (a.writable || !write) && u64(p) % align == 0) return;
  }
  if (in_own_object(p)) return;
  const u8* params = static_cast<const u8*>(m.launch.params);
  if (params <= p && p + bytes <= params + m.launch.params_bytes && !write) return;
  global(*self, address, bytes, align, write, write ? "global store" : "global load");
}

// ---- Entries that kernels call ----
u8* static_memory(u32 offset) { return machine.self->warp->block->memory + offset; }
u8* dynamic_memory() { return machine.self->warp->block->memory + machine.dynamic_base; }

Dim thread_index() { return machine.self->index; }
Dim block_index() { return machine.self->warp->block->index; }
Dim block_size() { return machine.launch.block; }
Dim grid_size() { return machine.launch.grid; }
u32 lane_index() { return machine.self->lane; }
long long clock() { return static_cast<long long>(++machine.decisions); }
void fence() {
  EMU_HERE();
  schedule();
}
void trap(const char* what) {
  EMU_HERE();
  fail(*machine.self, "%s", what);
}

void* atomic(const void* address, u32 bytes) {
  EMU_HERE();
  if (machine.random.one_in(4)) yield();
  access(address, bytes, bytes, true, __builtin_frame_address(0));
  return const_cast<void*>(address);
}

u32 shared_address(const void* pointer) {
  EMU_HERE();
  const Block& block = *machine.self->warp->block;
  const u64 offset = static_cast<const u8*>(pointer) - block.memory;
  if (offset >= kWindow)
    fail(*machine.self, "shared_address(%p): not a pointer into this block's shared memory",
         pointer);
  return u32(offset);
}

}  // namespace emu

using namespace emu;

// ---- What g++ calls before every access (-fsanitize=thread) ----
#define EMU_ACCESS(bytes)                                                                          \
  void __tsan_read##bytes(void* p) { access(p, bytes, bytes, false, __builtin_frame_address(0)); } \
  void __tsan_write##bytes(void* p) { access(p, bytes, bytes, true, __builtin_frame_address(0)); } \
  void __tsan_volatile_read##bytes(void* p) {                                                      \
    access(p, bytes, bytes, false, __builtin_frame_address(0));                                    \
  }                                                                                                \
  void __tsan_volatile_write##bytes(void* p) {                                                     \
    access(p, bytes, bytes, true, __builtin_frame_address(0));                                     \
  }                                                                                                \
  void __tsan_unaligned_read##bytes(void* p) {                                                     \
    access(p, bytes, 1, false, __builtin_frame_address(0));                                        \
  }                                                                                                \
  void __tsan_unaligned_write##bytes(void* p) {                                                    \
    access(p, bytes, 1, true, __builtin_frame_address(0));                                         \
  }
extern "C" {
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void* p, u64 bytes) {
  access(p, u32(bytes), 1, false, __builtin_frame_address(0));
}
void __tsan_write_range(void* p, u64 bytes) {
  access(p, u32(bytes), 1, true, __builtin_frame_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_init() {}

// ---- And where -fsanitize=alignment,bounds finds something wrong ----
struct SourceLocation {
  const char* file;
  u32 line, column;
};
struct TypeDescriptor {
  u16 kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation where;
  const TypeDescriptor* type;
  u8 log_align, access;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch* data, u64 address) {
  EMU_HERE();
  fail(*machine.self, "access to %s at address 0x%llx, which is not a multiple of %u",
       data->type->name, static_cast<unsigned long long>(address), 1u << data->log_align);
}
struct OutOfBounds {
  SourceLocation where;
  const TypeDescriptor *array, *index;
};
void __ubsan_handle_out_of_bounds(OutOfBounds* data, u64 index) {
  EMU_HERE();
  fail(*machine.self, "index %lld is outside %s", static_cast<long long>(index), data->array->name);
}
}
