// SPDX-License-Identifier: Apache-2.0
// mbarrier, bulk and tensor copies (TMA), distributed shared memory, and the fences between
// ordinary and asynchronous accesses: what sm_90 adds outside wgmma.
#include <algorithm>
#include <bit>

#include "runtime.hpp"

namespace emu {

// ---- mbarrier ----
// Its state is the 64-bit word in shared memory, as on the GPU, so that stray writes destroy it.
struct BarrierWord {
  u64 pending : 20, expected : 20;
  long long bytes : 21;
  u64 phase : 1, tag : 2;  // tag 1: initialised (poison has 3)
};
static_assert(sizeof(BarrierWord) == 8);

static BarrierWord load_word(const Thread& thread, u32 bar, const char* what) {
  const auto word =
      std::bit_cast<BarrierWord>(*reinterpret_cast<u64*>(shared(thread, bar, 8, 8, what)));
  if (word.tag != 1)
    fail(thread, "%s: no mbarrier at %s (never initialised, or overwritten)", what,
         shared_place(bar).c_str());
  return word;
}

// Stores the word, after completing the phase if nothing is missing.
static void store_word(const Thread& thread, u32 bar, BarrierWord word) {
  Block& block = block_of(thread, bar, "mbarrier");
  const u32 offset = bar & 0xffffff;
  if (word.pending == 0 && word.bytes == 0) {
    word.phase ^= 1;
    word.pending = word.expected;
    for (Warp& warp : block.warps) {
      for_lanes(warp.live, [&](u32 lane) {
        Thread& waiter = warp.lane[lane];
        if (waiter.state == State::mbarrier && waiter.waits_at == offset) wake(waiter);
      });
    }
  }
  *reinterpret_cast<u64*>(block.memory + offset) = std::bit_cast<u64>(word);
}

void mbarrier_init(u32 bar, int arrivals) {
  EMU_HERE();
  Thread& self = *machine.self;
  u8* word = shared(self, bar, 8, 8, "mbarrier.init");
  if (arrivals < 1 || arrivals >= 1 << 20) fail(self, "mbarrier.init: %d arrivals", arrivals);
  const u64 bits = std::bit_cast<u64>(BarrierWord{u64(arrivals), u64(arrivals), 0, 0, 1});
  std::memcpy(word, &bits, 8);
  note_write(self, *self.warp->block, bar, 8);
}

void mbarrier_arrive(u32 bar, int expect_bytes, bool arrives) {
  EMU_HERE();
  Thread& self = *machine.self;
  const char* what = arrives ? "mbarrier.arrive" : "mbarrier.expect_tx";
  BarrierWord word = load_word(self, bar, what);
  if (expect_bytes < 0 || word.bytes + expect_bytes >= 1 << 20)
    fail(self, "%s: %d bytes are too many", what, expect_bytes);
  if (arrives && word.pending == 0) {
    fail(self, "%s at %s: all %u arrivals of this phase have been made", what,
         shared_place(bar).c_str(), u32(word.expected));
  }
  word.bytes += expect_bytes;
  word.pending -= arrives;
  store_word(self, bar, word);
  schedule();
}

static void complete_bytes(const Thread& issuer, Block& block, u32 bar, u32 bytes) {
  const u32 address = (block.rank + 1) << 24 | bar;
  BarrierWord word = load_word(issuer, address, "completion of a bulk copy");
  if (word.bytes - int(bytes) <= -(1 << 20))
    fail(issuer, "mbarrier: more bytes complete than it can count");
  word.bytes -= bytes;
  store_word(issuer, address, word);
}

bool mbarrier_wait(u32 bar, int parity) {
  EMU_HERE();
  Thread& self = *machine.self;
  const char* what = "mbarrier.try_wait";
  if (parity != 0 && parity != 1) fail(self, "%s: parity %d", what, parity);
  if (load_word(self, bar, what).phase == u64(parity)) {
    wait(State::mbarrier, what, bar);
    return load_word(self, bar, what).phase != u64(parity);
  }
  schedule();
  return true;
}

// ---- Ordinary and asynchronous accesses: what one wrote, the other sees only across a fence ----
void proxy_fence() {
  EMU_HERE();
  machine.self->fence_time = ++machine.time;
}
void mbarrier_fence_init() {
  EMU_HERE();
  machine.self->mbarrier_fence_time = ++machine.time;
}

static const Thread& thread_numbered(const Cluster& cluster, u32 number) {
  const u32 i = (number - 1) & 1023;
  return cluster.blocks[(number - 1) >> 10].warps[i / 32].lane[i % 32];
}

void check_proxy(const Thread& issuer, Block& block, u32 offset, u32 bytes, const char* what) {
  for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
    const Write& write = block.writes[i];
    if (write.writer == 0 || issuer.fence_time > write.time) continue;
    const Thread& writer = thread_numbered(*block.cluster, write.writer);
    if (writer.fence_time > write.time) continue;
    fail(issuer, "%s reads %s, which thread %u wrote without fence.proxy.async since", what,
         shared_place(4 * i).c_str(), (write.writer - 1) & 1023);
  }
}

static void check_barrier_fence(const Thread& issuer, u32 bar) {
  const Block& block = block_of(issuer, bar, "mbarrier");
  const Write& write = block.writes[(bar & 0xffffff) / 4];
  if (write.writer == 0) return;
  const Thread& writer = thread_numbered(*block.cluster, write.writer);
  const u32 fence = std::max({issuer.fence_time, issuer.mbarrier_fence_time, writer.fence_time,
                              writer.mbarrier_fence_time});
  if (fence <= write.time)
    fail(issuer, "bulk copy: no fence.mbarrier_init since its mbarrier was initialised");
}

// ---- Operations ----
std::string operation_place(u32 id) {
  for (const Operation* o : machine.operations) {
    if (o->id == id) return o->place;
  }
  return "an ended block";
}

static void land(Operation& o) {
  for (Block* block : o.targets) {
    for (const Chunk& c : o.chunks) {
      u8* to = block->memory + c.offset;
      std::memset(to, 0, 16);
      if (c.global != nullptr) std::memcpy(to + c.from, c.global + c.from, c.to - c.from);
      for (u32 i = c.offset / 4; i < c.offset / 4 + 4; ++i)
        block->in_flight[i] = 0, block->writes[i] = {0, 0};
    }
    complete_bytes(*o.issuer, *block, o.bar, o.bytes);
  }
}

static void read(Operation& o) {
  o.has_read = true;
  Block& block = *o.issuer->warp->block;
  for (const Chunk& c : o.chunks) {
    const u8* from = shared(*o.issuer, c.offset, 16, 16, "bulk store");
    check_proxy(*o.issuer, block, c.offset, 16, "bulk store");
    o.staged.insert(o.staged.end(), from, from + 16);
  }
}

enum Element : u8 {
  u8_type,
  u16_type,
  u32_type,
  i32_type,
  u64_type,
  i64_type,
  f16_type,
  f32_type,
  f64_type,
  bf16_type
};

static void add(u8 element, u8* to, const u8* from, u32 bytes) {
  const auto each = [&]<class T>(T, auto sum) {
    for (u32 i = 0; i < bytes; i += sizeof(T)) {
      T a, b;
      std::memcpy(&a, to + i, sizeof(T));
      std::memcpy(&b, from + i, sizeof(T));
      a = sum(a, b);
      std::memcpy(to + i, &a, sizeof(T));
    }
  };
  switch (element) {
    case f32_type:
      return each(float{}, [](float a, float b) { return a + b; });
    case f16_type:
      return each(u16{}, [](u16 a, u16 b) { return u16(to_f16(from_f16(a) + from_f16(b))); });
    case bf16_type:
      return each(u16{}, [](u16 a, u16 b) { return u16(to_bf16(from_bf16(a) + from_bf16(b))); });
    default:
      return each(u32{}, [](u32 a, u32 b) { return a + b; });
  }
}

static void write(Operation& o) {
  const u8* from = o.staged.data();
  for (const Chunk& c : o.chunks) {
    if (c.global != nullptr && o.kind == Bulk::store)
      std::memcpy(c.global + c.from, from + c.from, c.to - c.from);
    if (c.global != nullptr && o.kind == Bulk::reduce_add)
      add(o.element, c.global + c.from, from + c.from, c.to - c.from);
    from += 16;
  }
}

static bool step(Operation& o) {  // true: it is over
  if (o.products != nullptr) return execute_product(*o.products), true;
  if (o.kind == Bulk::load) return land(o), true;
  if (!o.has_read) return read(o), false;
  return write(o), true;
}

static void finish(Operation* o) {
  std::erase(machine.operations, o);
  while (!step(*o)) continue;
  delete o;
}

bool advance_operation() {
  auto& all = machine.operations;
  if (all.empty()) return false;
  const u32 i = machine.random.below(u32(all.size()));
  Operation* o = all[i];
  if (step(*o)) {
    std::swap(all[i], all.back());
    all.pop_back();
    delete o;
  }
  return true;
}

static void issue(Operation* o) {
  o->issuer = machine.self;
  o->place = place(*o->issuer) + frames(*o->issuer);
  o->id = ++machine.operations_issued;
  for (Block* block : o->targets) {
    for (const Chunk& c : o->chunks) {
      std::memset(
          shared(*o->issuer, (block->rank + 1) << 24 | c.offset, 16, 16, "bulk load destination"),
          kPoison, 16);
      for (u32 i = c.offset / 4; i < c.offset / 4 + 4; ++i)
        block->in_flight[i] = kOperation | o->id;
    }
  }
  machine.operations.push_back(o);
  if (machine.policy.landing == Landing::at_once) finish(o);
  schedule();
}

void bulk_commit() { ++machine.self->bulk_group; }

void bulk_wait(int pending, bool read_only) {
  EMU_HERE();
  Thread& self = *machine.self;
  std::vector<Operation*> due;
  for (Operation* o : machine.operations) {
    if (o->issuer == &self && o->products == nullptr && o->kind != Bulk::load &&
        int(o->group) + pending < int(self.bulk_group)) {
      due.push_back(o);
    }
  }
  for (Operation* o : due) {
    if (!read_only)
      finish(o);
    else if (!o->has_read)
      read(*o);
  }
  schedule();
}

void end_of_thread(Thread& thread) {
  for (const Operation* o : machine.operations) {
    if (o->issuer == &thread && o->products == nullptr && o->kind != Bulk::load && !o->has_read) {
      fail(thread,
           "returns while its bulk store has not read shared memory: no "
           "cp.async.bulk.wait_group.read. Issued by %s",
           o->place.c_str());
    }
  }
}

void end_of_block(Block& block) {
  for (const Operation* o : machine.operations) {
    if (std::count(o->targets.begin(), o->targets.end(), &block) != 0) {
      fail(*o->issuer,
           "block %u of the cluster ends while a bulk load into it is under way. Issued by %s",
           block.rank, o->place.c_str());
    }
  }
}

// ---- Tensor maps: encoded by driver.tensor_map, with the meaning of cuTensorMapEncodeTiled ----
struct TensorMap {
  u64 magic;
  u8* base;
  u32 dim[5], box[5];
  u64 stride[5];  // bytes; [0] is the element
  u8 rank, element, element_bytes, swizzle;
};
static_assert(sizeof(TensorMap) <= 128);
constexpr u64 kMagic = 0x70616d20756d6520;  // " emu map"

static TensorMap tensor_map(const void* map) {
  EMU_HERE();
  const u8 *p = static_cast<const u8*>(map),
           *params = static_cast<const u8*>(machine.launch.params);
  if (p < params || p + 128 > params + machine.launch.params_bytes) {
    fail(*machine.self, "tensor map at %p: must lie in the kernel's __grid_constant__ parameter",
         map);
  }
  if (u64(p) % 64 != 0) fail(*machine.self, "tensor map at %p: not a multiple of 64", map);
  TensorMap m;
  std::memcpy(&m, p, sizeof m);
  if (m.magic != kMagic) fail(*machine.self, "tensor map at %p: not made by tensor_map()", map);
  return m;
}

void check_tensor_map(const void* map) {
  EMU_HERE();
  tensor_map(map);
}

// 16-byte chunks of a shared address, permuted within a pattern of 8 rows: address bits 4-6 ^= bits
// 7-9, or fewer.
static u32 swizzled(u32 address, u32 mode) {
  const u32 bits = mode == 0 ? 0 : (2u << (mode - 1)) - 1;  // 32, 64, 128 bytes: 1, 3, 7
  return address ^ (address >> 7 & bits) << 4;
}

void tensor_copy(Bulk kind, u32 address, const void* map, u32 bar, u32 blocks, int rank,
                 const int* at) {
  EMU_HERE();
  Thread& self = *machine.self;
  const char* what = kind == Bulk::load    ? "TMA load"
                     : kind == Bulk::store ? "TMA store"
                                           : "TMA reduction";
  const TensorMap m = tensor_map(map);
  EMU_HERE();
  if (rank != m.rank) fail(self, "%s of %d dimensions from a tensor map of %d", what, rank, m.rank);
  if (address % 128 != 0)
    fail(self, "%s: shared address 0x%x is not a multiple of 128", what, address);
  auto* o = new Operation;
  o->kind = kind;
  o->bar = bar;
  o->group = self.bulk_group;
  o->element = m.element;
  const u32 row_bytes = m.box[0] * m.element_bytes;
  u32 rows = 1;
  for (int i = 1; i < rank; ++i) rows *= m.box[i];
  o->bytes = rows * row_bytes;
  shared(self, address, o->bytes, 16, what);
  for (u32 row = 0; row < rows; ++row) {
    u64 line = u64(m.base);  // wraps around, as of ragged maps
    bool inside = true;
    for (u32 i = 1, left = row; i < m.rank; left /= m.box[i], ++i) {
      const long long c = at[i] + static_cast<long long>(left % m.box[i]);
      inside &= c >= 0 && c < m.dim[i];
      line += u64(c) * m.stride[i];
    }
    const long long low = -static_cast<long long>(at[0]) *
                          m.element_bytes;  // the tensor's row, in bytes of the box's row
    const long long high = low + static_cast<long long>(m.dim[0]) * m.element_bytes;
    for (u32 byte = 0; byte < row_bytes; byte += 16) {
      Chunk c{swizzled(address + row * row_bytes + byte, m.swizzle), nullptr, 0, 0};
      const long long from = std::clamp(low - byte, 0ll, 16ll),
                      to = std::clamp(high - byte, 0ll, 16ll);
      if (inside && from < to) {
        c = {c.offset, reinterpret_cast<u8*>(line - low + byte), u8(from), u8(to)};
        global(self, c.global + from, u32(to - from), 1, kind != Bulk::load, what);
      }
      o->chunks.push_back(c);
    }
  }
  if (kind == Bulk::load) {
    check_barrier_fence(self, bar);
    load_word(self, bar, what);
    auto& peers = self.warp->block->cluster->blocks;
    if (blocks == 0) o->targets.push_back(self.warp->block);
    for (u32 i = 0; i < 16; ++i) {
      if (!(blocks >> i & 1) || !(blocks >> 16)) continue;
      if (i >= peers.size())
        fail(self, "%s: multicast to block %u of a cluster of %zu", what, i, peers.size());
      o->targets.push_back(&peers[i]);
    }
  }
  issue(o);
}

void bulk_copy(Bulk kind, u32 address, const void* at, int bytes, u32 bar) {
  EMU_HERE();
  Thread& self = *machine.self;
  const char* what = kind == Bulk::load    ? "bulk load"
                     : kind == Bulk::store ? "bulk store"
                                           : "bulk reduction";
  if (bytes <= 0 || bytes % 16 != 0)
    fail(self, "%s: %d bytes, not a positive multiple of 16", what, bytes);
  shared(self, address, u32(bytes), 16, what);
  u8* p = global(self, at, u32(bytes), 16, kind != Bulk::load, what);
  auto* o = new Operation;
  o->kind = kind;
  o->bar = bar;
  o->group = self.bulk_group;
  o->bytes = u32(bytes);
  o->element = f32_type;
  for (u32 i = 0; i < o->bytes; i += 16) o->chunks.push_back({address + i, p + i, 0, 16});
  if (kind == Bulk::load) {
    check_barrier_fence(self, bar);
    load_word(self, bar, what);
    o->targets.push_back(self.warp->block);
  }
  issue(o);
}

// ---- Distributed shared memory ----
u32 cluster_rank() { return machine.self->warp->block->rank; }
u32 map_rank(u32 address, u32 rank) {
  EMU_HERE();
  if (rank >= machine.self->warp->block->cluster->blocks.size())
    fail(*machine.self, "mapa: no block %u in the cluster", rank);
  return (address & 0xffffff) | (rank + 1) << 24;
}
void cluster_access(u32 address, float* x, bool write) {
  EMU_HERE();
  Thread& self = *machine.self;
  if (machine.random.one_in(4)) preempt();
  const char* what = write ? "st.shared::cluster" : "ld.shared::cluster";
  u8* p = shared(self, address, 16, 16, what);
  std::memcpy(write ? static_cast<void*>(p) : x, write ? static_cast<const void*>(x) : p, 16);
  if (write) note_write(self, block_of(self, address, what), address & 0xffffff, 16);
}

void store_async(u32 address, float* x, u32 bar) {
  Thread& self = *machine.self;
  Block& block = block_of(self, address, "st.async");
  if (&block != &block_of(self, bar, "st.async")) fail(self, "st.async: its mbarrier is elsewhere");
  cluster_access(address, x, true);
  complete_bytes(self, block, bar & 0xffffff, 16);
}

}  // namespace emu
