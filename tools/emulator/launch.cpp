// SPDX-License-Identifier: Apache-2.0
// The grid: fibers, clusters one after another or side by side, and the entry that driver.py calls.
#include <sys/mman.h>

#include <algorithm>
#include <csignal>

#include "switch.hpp"

extern "C" void emu_entry(const void* params);  // at the end of every unit

namespace emu {

// ---- Launch ----
constexpr size_t kGuardBytes = 4096;
constexpr size_t kPoisonedStack = 16 << 10;  // where a thread's registers and locals will lie

void to_main() {
  void* never;
  emu_switch(&never, machine.main_sp);
}

void switch_to(Thread& next) {
  Thread* old = machine.self;
  machine.self = &next;
  emu_switch(&old->sp, next.sp);
}

static void leave() {  // the end of a thread
  Thread& self = *machine.self;
  Warp& warp = *self.warp;
  Block& block = *warp.block;
  const u32 bit = 1u << self.lane;
  copy_async_wait(-1);  // what was never waited for lands at the end
  end_of_thread(self);
  self.frame = nullptr;
  for_lanes(warp.waiting, [&](u32 lane) {
    const Thread& other = warp.lane[lane];
    if (other.call.mask & bit)
      fail(other, "%s with mask %08x, but lane %u returns", other.call.name, other.call.mask,
           self.lane);
  });
  self.state = State::done;
  warp.ready &= ~bit;
  warp.live &= ~bit;
  if (warp.live == 0) {
    --block.live_warps;
    end_of_warp(block);
    if (block.live_warps == 0) {
      end_of_block(block);
      --block.cluster->live_blocks;
    }
    if (block.cluster->live_blocks == 0) to_main();  // which starts the next cluster
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
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  mappings.emplace_back(p, bytes);
  return static_cast<u8*>(p);
}

static void create(Cluster& cluster, u32 blocks) {
  const Dim& size = machine.launch.block;
  const u32 threads = size.x * size.y * size.z;
  cluster.blocks.resize(blocks);
  for (u32 rank = 0; rank < blocks; ++rank) {
    Block& block = cluster.blocks[rank];
    block.cluster = &cluster;
    block.rank = rank;
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
  cluster.arrived_warps = 0;
  for (u32 rank = 0; rank < cluster.blocks.size(); ++rank) {
    Block& block = cluster.blocks[rank];
    block.index = {first.x + rank % size.x, first.y + rank / size.x % size.y,
                   first.z + rank / size.x / size.y};
    block.live_warps = u32(block.warps.size());
    std::memset(block.memory, kPoison, kWindow);
    block.in_flight.assign(kWindow / 4, 0);
    block.writes.assign(kWindow / 4, {0, 0});
    block.warpgroups.assign((block.warps.size() + 3) / 4, {});
    for (Barrier& b : block.barriers) b = {};
    for (Warp& warp : block.warps) {
      warp.live = warp.ready = warp.lanes;
      warp.waiting = warp.products_issued = warp.products_awaited = 0;
      warp.product_groups.clear();
      warp.fenced = warp.cluster_arrived = warp.cluster_waits = false;
      warp.priority = machine.random.next() | 1u << 31;
      machine.warps.push_back(&warp);
      for_lanes(warp.lanes, [&](u32 lane) {
        Thread& thread = warp.lane[lane];
        thread.state = State::ready;
        thread.frame = nullptr;
        thread.copy_group = thread.bulk_group = thread.fence_time = thread.mbarrier_fence_time = 0;
        std::memset(thread.stack + kStackBytes - kPoisonedStack, kPoison, kPoisonedStack);
        thread.sp = first_stack_pointer(thread.stack, thread_main);
      });
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
  for (Cluster& c : clusters) start(c, order[next++]);
  while (left > 0) {
    m.current = nullptr;
    Thread* first = choose();
    if (first == nullptr) break;  // only when nothing was started
    m.self = first;
    emu_switch(&m.main_sp, first->sp);
    m.self = nullptr;
    if (m.failed) return;
    while (advance_operation()) continue;  // stores that blocks left behind
    for (Cluster& c : clusters) {
      if (c.live_blocks != 0 || c.blocks.empty()) continue;
      stop_warps_of(c);
      --left;
      if (next < order.size())
        start(c, order[next++]);
      else
        c.blocks.clear();
    }
  }
}

static void on_signal(int signal, siginfo_t* info, void* context) {
  if (machine.self == nullptr) {  // not ours: the default action ends the process
    std::signal(signal, SIG_DFL);
    return;
  }
  char text[200];
  const char* what =
      signal == SIGFPE ? "integer division by zero or overflow" : "invalid memory access";
  std::snprintf(text, sizeof text,
                "%s at address %p (an access that g++ does not instrument, or a stack overflow)",
                what, info->si_addr);
#if defined(__x86_64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  void* frame[2] = {reinterpret_cast<void*>(registers[REG_RBP]),
                    reinterpret_cast<void*>(registers[REG_RIP] + 1)};
#elif defined(__aarch64__)
  const auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext;
  void* frame[2] = {reinterpret_cast<void*>(registers.regs[29]),
                    reinterpret_cast<void*>(registers.pc + 1)};
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
  static constexpr Landing kLandings[] = {Landing::at_wait, Landing::at_wait, Landing::any_time,
                                          Landing::any_time, Landing::at_once};
  machine.policy = {kShuffles[random.below(5)], kPreempts[random.below(3)],
                    kLandings[random.below(5)]};
}

}  // namespace emu

using namespace emu;

// Why hardware would refuse the launch, or nothing.
static std::string refusal(const Launch& l) {
  const u64 threads = u64(l.block.x) * l.block.y * l.block.z;
  if (threads == 0 || threads > 1024)
    return "a block of " + std::to_string(threads) + " threads: accepted are 1 to 1024";
  if (l.grid.x % l.cluster.x != 0 || l.grid.y % l.cluster.y != 0 || l.grid.z % l.cluster.z != 0)
    return "the grid is no whole number of clusters";
  if (u64(l.cluster.x) * l.cluster.y * l.cluster.z > 16) return "a cluster has up to 16 blocks";
  const u32 bytes = machine.dynamic_base - kStaticBase + l.dynamic_bytes;
  if (l.dynamic_bytes > kLargestBlock || bytes > kLargestBlock + 1024)
    return std::to_string(l.dynamic_bytes) + " bytes of dynamic shared memory: a block has up to " +
           std::to_string(kLargestBlock);
  return "";
}

// 0: done. 1: `launch.error` holds what went wrong; memory is as far as the kernel got.
extern "C" __attribute__((visibility("default"))) int emu_launch(const Launch* launch) {
  for (Operation* operation : machine.operations) delete operation;
  machine = {};
  machine.launch = *launch;
  machine.random.state = launch->seed;
  machine.arrays.assign(launch->arrays, launch->arrays + launch->array_count);
  std::sort(machine.arrays.begin(), machine.arrays.end(),
            [](const Array& a, const Array& b) { return a.begin < b.begin; });
  machine.lowest_priority = 1u << 31;
  draw_policy();
  refuel();
  set_deadline(launch->seconds);
  machine.dynamic_base = place_dynamic_memory(machine.random.one_in(2));
  if (const std::string why = refusal(*launch); !why.empty()) {
    std::snprintf(launch->error, launch->error_bytes, "%s: %s", launch->name, why.c_str());
    return 1;
  }

  alignas(16) static u8 signal_stack[64 << 10];
  const stack_t ours = {signal_stack, 0, sizeof signal_stack};
  stack_t theirs;
  sigaltstack(&ours, &theirs);
  struct sigaction action{}, before[3];
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
