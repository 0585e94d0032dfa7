// SPDX-License-Identifier: Apache-2.0
// Fibers, the adversarial scheduler, memory checks, and the entry that driver.py calls.
#include "runtime.hpp"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <algorithm>
#include <chrono>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <ucontext.h>

extern "C" void emu_entry(const void* params);  // at the end of every unit

namespace emu {

Machine machine;

// ---- Context switch: saves the callee-saved registers on the old stack, and takes the new one's ----
#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
static void* first_stack_pointer(u8* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + kStackBytes - 16);
  *--top = nullptr;                           // the return address of `entry`, which does not return
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  return top;
}
#elif defined(__aarch64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch, %function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch, .-emu_switch
)");
static void* first_stack_pointer(u8* stack, void (*entry)()) {
  void** frame = reinterpret_cast<void**>(stack + kStackBytes - 160);
  std::memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(entry);  // x30
  return frame;
}
#else  // any other machine: ucontext, slower
static void emu_switch(void** save, void* load) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}
static void* first_stack_pointer(u8* stack, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>(stack);
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t);
  context->uc_stack.ss_size = kStackBytes - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

static constexpr size_t kGuardBytes = 4096;
static u32 live_threads(const Block& block) {
  u32 n = 0;
  for (const Warp& warp : block.warps) n += __builtin_popcount(warp.live);
  return n;
}

// ---- Errors ----
static std::string frame_item(void* address) {  // " @offset" in the shared object; driver.py makes a source line of it
  Dl_info info;
  char item[32];
  if (dladdr(address, &info) == 0) return "";
  std::snprintf(item, sizeof item, " @%lx", u64(address) - u64(info.dli_fbase) - 1);
  return item;
}

static std::string frames(const Thread& thread) {  // of the functions that led to the thread's last call
  std::string text;
  auto* frame = static_cast<void**>(thread.frame);
  for (int depth = 0; depth < 12 && frame != nullptr; ++depth) {
    const auto* at = reinterpret_cast<const u8*>(frame);
    if (at < thread.stack || at + 16 > thread.stack + kStackBytes || frame[1] == nullptr) break;
    text += frame_item(frame[1]);
    frame = static_cast<void**>(frame[0]);
  }
  return text;
}

static std::string place(const Thread& t) {
  char text[160];
  const Dim& b = t.warp->block->index;
  std::snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u) [warp %u, lane %u]", b.x, b.y, b.z, t.index.x,
                t.index.y, t.index.z, t.warp->index, t.lane);
  return text;
}

[[noreturn]] static void stop(const std::string& text) {
  std::snprintf(machine.launch.error, machine.launch.error_bytes, "%s: %s", machine.launch.name, text.c_str());
  machine.failed = true;
  void* never;
  emu_switch(&never, machine.main_sp);
  __builtin_unreachable();
}

void fail(const Thread& thread, const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  stop(place(thread) + ": " + text + "\n " + frames(thread));
}

[[noreturn]] static void fail_deadlock(const char* why) {
  std::string text = why;
  for (const Warp* warp : machine.warps) {
    for (u32 left = warp->live; left != 0;) {  // lanes that wait for the same thing are told of once
      const Thread& first = warp->lane[__builtin_ctz(left)];
      u32 same = 0;
      for (u32 lane = 0; lane < 32; ++lane) {
        const Thread& other = warp->lane[lane];
        if ((left >> lane & 1) && other.state == first.state && other.waits_at == first.waits_at &&
            other.waits_for == first.waits_for) {
          same |= 1u << lane;
        }
      }
      char lanes[64];
      std::snprintf(lanes, sizeof lanes, " lanes %08x ", same);
      const Dim& b = warp->block->index;
      char head[96];
      std::snprintf(head, sizeof head, "\n block (%u, %u, %u) warp %u", b.x, b.y, b.z, warp->index);
      text += std::string(head) + lanes + (first.state == State::ready ? "runs" : std::string("wait in ") + first.waits_for);
      if (first.state == State::barrier || first.state == State::mbarrier) text += " " + std::to_string(first.waits_at);
      text += "\n " + frames(first);
      left &= ~same;
    }
  }
  stop(text);
}

static u32 static_end = kStaticBase;  // of the unit's static shared memory
static u32 dynamic_align = 16;        // as the unit declares it

// ---- Scheduler ----
static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static double deadline;

static void refuel() { machine.fuel = 1 + machine.random.below(2 * machine.policy.preempt); }

static Thread* choose() {
  Machine& m = machine;
  if ((++m.decisions & 0xffff) == 0 && now() > deadline) fail_deadlock("no end within the time limit: a livelock, or too large a problem.");
  Warp* best = m.current;
  if (m.random.one_in(m.policy.shuffle_warps)) {
    m.warps[m.random.below(m.warps.size())]->priority = m.random.next() | 1u << 31;
    best = nullptr;
  }
  if (best == nullptr || best->ready == 0) {
    best = nullptr;
    for (Warp* warp : m.warps) {
      if (warp->ready != 0 && (best == nullptr || warp->priority > best->priority)) best = warp;
    }
    if (best == nullptr) return nullptr;
    m.current = best;
  }
  const u32 turn = m.random.next() & 31;
  const u32 turned = best->ready >> turn | best->ready << (-turn & 31);
  return &best->lane[(__builtin_ctz(turned) + turn) & 31];
}

static void run(Thread* next) {
  if (next == machine.self) return;
  Thread* old = machine.self;
  machine.self = next;
  emu_switch(&old->sp, next->sp);
}


void schedule() {
  if (!machine.self->copies.empty()) land_copies(*machine.self);
  Thread* next = choose();
  if (next == nullptr) fail_deadlock("deadlock: every thread waits.");
  run(next);
}

void block(Thread& thread, State state, const char* what, u32 at) {
  thread.state = state;
  thread.waits_for = what;
  thread.waits_at = at;
  thread.warp->ready &= ~(1u << thread.lane);
}

void wait(State state, const char* what, u32 at) {
  block(*machine.self, state, what, at);
  schedule();
}

void wake(Thread& thread) {
  thread.state = State::ready;
  thread.warp->ready |= 1u << thread.lane;
}

static void preempt() {
  refuel();
  machine.self->warp->priority = machine.random.next();
  machine.current = nullptr;
  schedule();
}

void yield() {
  EMU_HERE();
  machine.self->warp->priority = machine.lowest_priority > 0 ? --machine.lowest_priority : 0;
  machine.current = nullptr;
  schedule();
}

// ---- Warp-collective calls ----
static void check_partners(const Thread& self, u32 mask) {
  for (u32 left = mask & ~(1u << self.lane); left != 0; left &= left - 1) {
    const Thread& other = self.warp->lane[__builtin_ctz(left)];
    if (other.state == State::done) {
      fail(self, "%s with mask %08x, but lane %u has returned", self.call.name, mask, other.lane);
    }
    if (other.state != State::collective || !(other.call.mask >> self.lane & 1)) continue;
    if (other.call.name != self.call.name || other.call.mask != mask || other.call.key != self.call.key) {
      fail(self, "divergence: this lane calls %s (mask %08x, operands %llx), lane %u calls %s (mask %08x, operands %llx) at%s",
           self.call.name, mask, static_cast<unsigned long long>(self.call.key), other.lane, other.call.name, other.call.mask,
           static_cast<unsigned long long>(other.call.key), frames(other).c_str());
    }
  }
}

void collective(const Call& call, State (*execute)(Warp&, u32)) {
  Thread& self = *machine.self;
  Warp& warp = *self.warp;
  self.call = call;
  if (!(call.mask >> self.lane & 1)) fail(self, "%s: mask %08x lacks the calling lane", call.name, call.mask);
  check_partners(self, call.mask);
  warp.waiting |= 1u << self.lane;
  bool all = (warp.waiting & call.mask) == call.mask;
  for (u32 left = all ? call.mask : 0; left != 0; left &= left - 1) {
    const Call& other = warp.lane[__builtin_ctz(left)].call;
    all &= other.name == call.name && other.mask == call.mask && other.key == call.key;
  }
  if (!all) return wait(State::collective, call.name, 0);
  const State next = execute(warp, call.mask);
  warp.waiting &= ~call.mask;
  for (u32 left = call.mask; left != 0; left &= left - 1) {
    Thread& thread = warp.lane[__builtin_ctz(left)];
    if (next == State::ready) wake(thread);
    else block(thread, next, call.name, u32(call.key));
  }
  schedule();
}

// ---- Memory checks ----
u8* shared(const Thread& thread, u32 address, u32 bytes, u32 align, const char* what) {
  Block* block = thread.warp->block;
  const u32 rank = address >> 24, offset = address & 0xffffff;  // rank 0: this block; mapa adds 1 + rank
  if (rank > block->cluster->blocks.size()) fail(thread, "%s: shared address %08x: the cluster is smaller", what, address);
  if (rank != 0) block = &block->cluster->blocks[rank - 1];
  if (rank != 0 && block->live_warps == 0) fail(thread, "%s: block %u of the cluster has ended", what, rank - 1);
  const u32 end = machine.dynamic_base + machine.launch.dynamic_bytes;
  const bool in_static = offset >= kStaticBase && offset + bytes <= static_end;
  const bool in_dynamic = offset >= machine.dynamic_base && offset + bytes <= end;
  if (!in_static && !in_dynamic) {
    fail(thread, "%s of %u bytes at shared address 0x%x: outside the block's allocation, 0x%x to 0x%x", what, bytes, offset,
         machine.dynamic_base, end);
  }
  if (offset % align != 0) fail(thread, "%s: shared address 0x%x is not a multiple of %u", what, offset, align);
  for (u32 i = offset / 4; i <= (offset + bytes - 1) / 4; ++i) {
    if (block->in_flight[i] != 0) fail_in_flight(thread, block->in_flight[i], i * 4, what);
  }
  return block->memory + offset;
}

const u8* global(const Thread& thread, const void* address, u32 bytes, u32 align, bool write, const char* what) {
  const u8* p = static_cast<const u8*>(address);
  if (u64(p) % align != 0) fail(thread, "%s: address %p is not a multiple of %u", what, address, align);
  const auto& arrays = machine.arrays;
  if (machine.last_array >= arrays.size() || p < arrays[machine.last_array].begin || p >= arrays[machine.last_array].end) {
    auto next = std::upper_bound(arrays.begin(), arrays.end(), p, [](const u8* x, const Array& a) { return x < a.begin; });
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
    fail(thread, "%s of %u bytes at %p: outside every array; byte %lld of array %u, which has %lld", what, bytes, address,
         static_cast<long long>(p - near->begin), near->number, static_cast<long long>(near->end - near->begin));
  }
  if (write && !a.writable) fail(thread, "%s of %u bytes into array %u, which is read-only", what, bytes, a.number);
  return p;
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
          const bool mine = std::any_of(own_segments.begin(), own_segments.end(),
                                        [&](const Segment& s) { return s.begin <= self && self < s.end; });
          if (!mine) own_segments.clear();
          return int(mine);
        },
        const_cast<void*>(static_cast<const void*>(&machine)));
  }
  return std::any_of(own_segments.begin(), own_segments.end(), [&](const Segment& s) { return s.begin <= p && p < s.end; });
}

// A plain load or store of the kernel, reported by g++'s instrumentation (-fsanitize=thread) just before it happens.
static void access(const void* address, u32 bytes, u32 align, bool write, void* frame) {
  Machine& m = machine;
  Thread* self = m.self;
  const u8* p = static_cast<const u8*>(address);
  if (self == nullptr || u64(p - self->stack) < kStackBytes) return;
  self->frame = frame;
  if (--m.fuel == 0) preempt();
  const Block& block = *self->warp->block;
  if (u64(p - block.memory) < kWindow) {
    shared(*self, u32(p - block.memory), bytes, align, write ? "shared store" : "shared load");
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
u32 reserve_static(u32 bytes, u32 align) {
  const u32 offset = (static_end + align - 1) / align * align;
  static_end = offset + bytes;
  return offset;
}
u32 declare_dynamic(u32 align) { return dynamic_align = std::max(dynamic_align, align); }
u8* static_memory(u32 offset) { return machine.self->warp->block->memory + offset; }
u8* dynamic_memory() { return machine.self->warp->block->memory + machine.dynamic_base; }

Dim thread_index() { return machine.self->index; }
Dim block_index() { return machine.self->warp->block->index; }
Dim block_size() { return machine.launch.block; }
Dim grid_size() { return machine.launch.grid; }
u32 lane_index() { return machine.self->lane; }
long long clock() { return static_cast<long long>(++machine.decisions); }
void fence() { EMU_HERE(); }
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
  if (offset >= kWindow) fail(*machine.self, "shared_address(%p): not a pointer into this block's shared memory", pointer);
  return u32(offset);
}

// ---- Block barriers: a warp arrives as a whole ----
struct BarrierCall {
  u32 threads;  // 0: all of the block
  bool waits;
  Sync kind;
  int predicate, result;
};

static void complete(Barrier& barrier) {
  const u32 threads = barrier.arrived;
  for (Warp* warp : barrier.waiting) {
    for (u32 left = warp->live; left != 0; left &= left - 1) {
      Thread& thread = warp->lane[__builtin_ctz(left)];
      auto& call = *static_cast<BarrierCall*>(thread.call.data);
      const bool all = barrier.votes == int(threads);
      call.result = call.kind == Sync::count ? barrier.votes : call.kind == Sync::vote_or ? barrier.votes > 0 : all;
      wake(thread);
    }
  }
  barrier.waiting.clear();
  barrier.threads = barrier.arrived = barrier.votes = 0;
}

static State arrive(Warp& warp, u32 mask) {
  const Thread& first = warp.lane[__builtin_ctz(mask)];
  const auto& call = *static_cast<BarrierCall*>(first.call.data);
  const u32 id = u32(first.call.key);
  Barrier& barrier = warp.block->barriers[id];
  if (barrier.arrived != 0 && barrier.threads != call.threads) {
    fail(first, "barrier %u: %u threads expected here, %u by those that arrived before", id, call.threads, barrier.threads);
  }
  barrier.threads = call.threads;
  barrier.arrived += call.threads == 0 ? __builtin_popcount(mask) : 32;
  for (u32 left = mask; left != 0; left &= left - 1) {
    barrier.votes += static_cast<BarrierCall*>(warp.lane[__builtin_ctz(left)].call.data)->predicate != 0;
  }
  if (call.waits) barrier.waiting.push_back(&warp);
  const u32 expected = call.threads == 0 ? live_threads(*warp.block) : call.threads;
  if (barrier.arrived > expected) fail(first, "barrier %u: %u threads arrived, %u expected", id, barrier.arrived, expected);
  if (barrier.arrived < expected) return call.waits ? State::barrier : State::ready;
  complete(barrier);
  return State::ready;
}

static int barrier(const char* name, u32 id, BarrierCall call) {
  Thread& self = *machine.self;
  if (id > 15) fail(self, "%s: barrier %u: there are 16", name, id);
  if (call.threads % 32 != 0) fail(self, "%s: %u threads: not a multiple of the warp", name, call.threads);
  collective({name, self.warp->lanes, u64(call.threads) << 32 | id, &call}, arrive);
  return call.result;
}

int sync_block(Sync kind, int predicate) {
  EMU_HERE();
  static const char* const names[] = {"__syncthreads", "__syncthreads_and", "__syncthreads_or", "__syncthreads_count"};
  return barrier(names[int(kind)], 0, {0, true, kind, predicate, 0});
}
void barrier_sync(u32 id, u32 threads) {
  EMU_HERE();
  barrier("bar.sync", id, {threads, true, Sync::plain, 0, 0});
}
void barrier_arrive(u32 id, u32 threads) {
  EMU_HERE();
  barrier("bar.arrive", id, {threads, false, Sync::plain, 0, 0});
}

// ---- Launch ----
static void leave() {  // the end of a thread
  Thread& self = *machine.self;
  Warp& warp = *self.warp;
  Block& block = *warp.block;
  const u32 bit = 1u << self.lane;
  self.frame = nullptr;
  copy_async_wait(-1);  // what was never waited for lands at the end
  for (u32 left = warp.waiting; left != 0; left &= left - 1) {
    const Thread& other = warp.lane[__builtin_ctz(left)];
    if (other.call.mask & bit) fail(other, "%s with mask %08x, but lane %u returns", other.call.name, other.call.mask, self.lane);
  }
  self.state = State::done;
  warp.ready &= ~bit;
  warp.live &= ~bit;
  if (warp.live == 0) {
    --block.live_warps;
    for (Barrier& b : block.barriers) {
      if (b.arrived != 0 && b.threads == 0 && b.arrived >= live_threads(block)) complete(b);
    }
    if (block.live_warps == 0) --block.cluster->live_blocks;
    if (block.cluster->live_blocks == 0) {  // the main stack starts the next cluster
      void* never;
      emu_switch(&never, machine.main_sp);
    }
  }
  schedule();
  __builtin_unreachable();
}

static void thread_main() {
  emu_entry(machine.launch.params);
  leave();
}

static std::vector<std::pair<void*, size_t>> mappings;

static u8* map(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  mappings.emplace_back(p, bytes);
  return static_cast<u8*>(p);
}

static void create(Cluster& cluster, u32 blocks) {
  const Dim& size = machine.launch.block;
  const u32 threads = size.x * size.y * size.z;
  cluster.blocks.resize(blocks);
  for (Block& block : cluster.blocks) {
    block.cluster = &cluster;
    block.memory = map(kWindow);
    block.warps.resize((threads + 31) / 32);
    u8* stacks = map(size_t(threads) * (kStackBytes + kGuardBytes));
    for (u32 i = 0; i < threads; ++i) {
      Warp& warp = block.warps[i / 32];
      Thread& thread = warp.lane[i % 32];
      warp.block = &block;
      warp.index = i / 32;
      warp.lanes |= 1u << i % 32;
      thread.warp = &warp;
      thread.lane = i % 32;
      thread.index = {i % size.x, i / size.x % size.y, i / size.x / size.y};
      u8* guard = stacks + size_t(i) * (kStackBytes + kGuardBytes);
      mprotect(guard, kGuardBytes, PROT_NONE);
      thread.stack = guard + kGuardBytes;
    }
  }
}

static void start(Cluster& cluster, u32 number) {  // the cluster with this number in the grid
  const Dim &grid = machine.launch.grid, &size = machine.launch.cluster;
  const Dim clusters = {grid.x / size.x, grid.y / size.y, grid.z / size.z};
  const Dim first = {number % clusters.x * size.x, number / clusters.x % clusters.y * size.y,
                     number / clusters.x / clusters.y * size.z};
  cluster.live_blocks = u32(cluster.blocks.size());
  for (u32 rank = 0; rank < cluster.blocks.size(); ++rank) {
    Block& block = cluster.blocks[rank];
    block.index = {first.x + rank % size.x, first.y + rank / size.x % size.y, first.z + rank / size.x / size.y};
    block.live_warps = u32(block.warps.size());
    std::memset(block.memory, kPoison, kWindow);
    block.in_flight.assign(kWindow / 4, 0);
    for (Barrier& b : block.barriers) b = {};
    for (Warp& warp : block.warps) {
      warp.live = warp.ready = warp.lanes;
      warp.waiting = 0;
      warp.priority = machine.random.next() | 1u << 31;
      machine.warps.push_back(&warp);
      for (u32 left = warp.lanes; left != 0; left &= left - 1) {
        Thread& thread = warp.lane[__builtin_ctz(left)];
        thread.state = State::ready;
        thread.frame = nullptr;
        thread.copy_group = 0;
        thread.sp = first_stack_pointer(thread.stack, thread_main);
      }
    }
  }
}

static void stop_warps_of(const Cluster& cluster) {
  std::erase_if(machine.warps, [&](const Warp* w) { return w->block->cluster == &cluster; });
}

static void run_grid(u32 resident) {
  Machine& m = machine;
  const Dim &grid = m.launch.grid, &size = m.launch.cluster;
  const u32 per_cluster = size.x * size.y * size.z;
  std::vector<u32> order(grid.x * grid.y * grid.z / per_cluster);
  for (u32 i = 0; i < order.size(); ++i) order[i] = i;
  if (!m.launch.in_order) {
    for (u32 i = u32(order.size()); i > 1; --i) std::swap(order[i - 1], order[m.random.below(i)]);
  }
  std::vector<Cluster> clusters(std::min<size_t>(resident, order.size()));
  for (Cluster& c : clusters) create(c, per_cluster);
  size_t next = 0, left = order.size();
  Thread main;
  for (Cluster& c : clusters) start(c, order[next++]);
  while (left > 0) {
    m.current = nullptr;
    Thread* first = choose();
    if (first == nullptr) break;  // only when nothing was started
    m.self = first;
    emu_switch(&m.main_sp, first->sp);
    m.self = nullptr;
    if (m.failed) return;
    for (Cluster& c : clusters) {
      if (c.live_blocks != 0 || c.blocks.empty()) continue;
      stop_warps_of(c);
      --left;
      if (next < order.size()) start(c, order[next++]);
      else c.blocks.clear();
    }
  }
}

static void on_signal(int signal, siginfo_t* info, void* context) {
  if (machine.self == nullptr) {  // not ours: the default action ends the process
    std::signal(signal, SIG_DFL);
    return;
  }
  char text[200];
  const char* what = signal == SIGFPE ? "integer division by zero or overflow" : "invalid memory access";
  std::snprintf(text, sizeof text, "%s at address %p (an access that g++ does not instrument, or a stack overflow)", what,
                info->si_addr);
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  void* frame[2] = {reinterpret_cast<void*>(registers[REG_RBP]), reinterpret_cast<void*>(registers[REG_RIP] + 1)};
#elif defined(__aarch64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  void* frame[2] = {reinterpret_cast<void*>(registers.regs[29]), reinterpret_cast<void*>(registers.pc + 1)};
#else
  void* frame[2] = {nullptr, nullptr};
#endif
  std::string where = frame_item(frame[1]);
  machine.self->frame = frame[0];
  stop(place(*machine.self) + ": " + text + "\n " + where + frames(*machine.self));
}

static void draw_policy() {
  Random& random = machine.random;
  static constexpr u32 kShuffles[] = {0, 1, 16, 256, 4096}, kPreempts[] = {50, 1000, 100000};
  static constexpr Landing kLandings[] = {Landing::at_wait, Landing::at_wait, Landing::any_time, Landing::any_time, Landing::at_once};
  machine.policy = {kShuffles[random.below(5)], kPreempts[random.below(3)], kLandings[random.below(5)]};
}

}  // namespace emu

using namespace emu;

// 0: done. 1: `launch.error` holds what went wrong; memory is as far as the kernel got.
extern "C" __attribute__((visibility("default"))) int emu_launch(const Launch* launch) {
  machine = {};
  machine.launch = *launch;
  machine.random.state = launch->seed;
  machine.arrays.assign(launch->arrays, launch->arrays + launch->array_count);
  std::sort(machine.arrays.begin(), machine.arrays.end(), [](const Array& a, const Array& b) { return a.begin < b.begin; });
  machine.lowest_priority = 1u << 31;
  draw_policy();
  refuel();
  deadline = now() + launch->seconds;
  // Aligned as declared and, where the seed says so, no better.
  const u32 align = std::max(dynamic_align, 16u), coarse = std::max(align, 1024u);
  machine.dynamic_base = (static_end + coarse - 1) / coarse * coarse + (machine.random.one_in(2) ? align % coarse : 0);

  alignas(16) static u8 signal_stack[64 << 10];
  const stack_t ours = {signal_stack, 0, sizeof signal_stack};
  stack_t theirs;
  sigaltstack(&ours, &theirs);
  struct sigaction action {}, before[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  const int signals[] = {SIGSEGV, SIGBUS, SIGFPE};
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &before[i]);
  run_grid(launch->resident != 0 ? launch->resident : 1 + machine.random.below(3));
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &before[i], nullptr);
  sigaltstack(&theirs, nullptr);
  for (auto [p, bytes] : mappings) munmap(p, bytes);
  mappings.clear();
  return machine.failed;
}

// ---- What g++ calls before every access (-fsanitize=thread) ----
#define EMU_ACCESS(bytes)                                                                                          \
  void __tsan_read##bytes(void* p) { access(p, bytes, bytes, false, __builtin_frame_address(0)); }                 \
  void __tsan_write##bytes(void* p) { access(p, bytes, bytes, true, __builtin_frame_address(0)); }                 \
  void __tsan_volatile_read##bytes(void* p) { access(p, bytes, bytes, false, __builtin_frame_address(0)); }        \
  void __tsan_volatile_write##bytes(void* p) { access(p, bytes, bytes, true, __builtin_frame_address(0)); }        \
  void __tsan_unaligned_read##bytes(void* p) { access(p, bytes, 1, false, __builtin_frame_address(0)); }           \
  void __tsan_unaligned_write##bytes(void* p) { access(p, bytes, 1, true, __builtin_frame_address(0)); }
extern "C" {
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
void __tsan_read_range(void* p, u64 bytes) { access(p, u32(bytes), 1, false, __builtin_frame_address(0)); }
void __tsan_write_range(void* p, u64 bytes) { access(p, u32(bytes), 1, true, __builtin_frame_address(0)); }
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
  fail(*machine.self, "access to %s at address 0x%llx, which is not a multiple of %u", data->type->name,
       static_cast<unsigned long long>(address), 1u << data->log_align);
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
