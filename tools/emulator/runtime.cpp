// SPDX-License-Identifier: Apache-2.0
// Errors, the adversarial scheduler, calls that a warp makes together, barriers of the block and
// the cluster.
#include "runtime.hpp"

#include <dlfcn.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>

namespace emu {

Machine machine;

static u32 live_threads(const Block& block) {
  u32 n = 0;
  for (const Warp& warp : block.warps) n += __builtin_popcount(warp.live);
  return n;
}

u32 Thread::number() const { return 1 + (warp->block->rank << 10) + warp->index * 32 + lane; }

// ---- Errors ----
std::string frame_item(void* address) {
  Dl_info info;
  char item[32];
  if (dladdr(address, &info) == 0) return "";
  std::snprintf(item, sizeof item, " @%lx", u64(address) - u64(info.dli_fbase) - 1);
  return item;
}

std::string frames(const Thread& thread) {
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

std::string shared_place(u32 address) {
  const int offset = int(address & 0xffffff), dynamic = int(machine.dynamic_base);
  return offset < dynamic ? "static + " + std::to_string(offset - int(kStaticBase))
                          : "dynamic + " + std::to_string(offset - dynamic);
}

std::string place(const Thread& t) {
  char text[160];
  const Dim& b = t.warp->block->index;
  std::snprintf(text, sizeof text, "block (%u, %u, %u) thread (%u, %u, %u) [warp %u, lane %u]", b.x,
                b.y, b.z, t.index.x, t.index.y, t.index.z, t.warp->index, t.lane);
  return text;
}

void stop(const std::string& text) {
  std::snprintf(machine.launch.error, machine.launch.error_bytes, "%s: %s", machine.launch.name,
                text.c_str());
  machine.failed = true;
  to_main();
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

// What the lanes of `warp` in `lanes` do that do the same as the first of them; those leave
// `lanes`.
static std::string waiting(const Warp& warp, u32& lanes) {
  const Thread& first = warp.lane[__builtin_ctz(lanes)];
  u32 same = 0;
  for_lanes(lanes, [&](u32 lane) {
    const Thread& other = warp.lane[lane];
    same |= u32(other.state == first.state && other.waits_at == first.waits_at &&
                other.waits_for == first.waits_for)
            << lane;
  });
  lanes &= ~same;
  const Dim& b = warp.block->index;
  char text[256];
  std::snprintf(text, sizeof text, "\n block (%u, %u, %u) warp %u lanes %08x ", b.x, b.y, b.z,
                warp.index, same);
  std::string what =
      first.state == State::ready ? "run" : std::string("wait in ") + first.waits_for;
  if (first.state == State::barrier) what += " " + std::to_string(first.waits_at);
  if (first.state == State::mbarrier) what += " at " + shared_place(first.waits_at);
  return text + what + "\n " + frames(first);
}

[[noreturn]] static void fail_deadlock(const char* why) {
  std::string text = why;
  for (const Warp* warp : machine.warps) {
    for (u32 lanes = warp->live; lanes != 0;) text += waiting(*warp, lanes);
  }
  stop(text);
}

// ---- Scheduler ----
static double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void set_deadline(double seconds) { machine.deadline = now() + seconds; }
static void check_deadline() {
  if (now() > machine.deadline) {
    fail_deadlock("no end within the time limit: a livelock, or too large a problem.");
  }
}

void refuel() { machine.fuel = 1 + machine.random.below(2 * machine.policy.preempt); }

Thread* choose() {
  Machine& m = machine;
  if ((++m.decisions & 0xffff) == 0) check_deadline();
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

void schedule() {
  Machine& m = machine;
  if (!m.self->copies.empty()) land_copies(*m.self);
  if (m.policy.landing == Landing::any_time && !m.operations.empty() && m.random.one_in(8))
    advance_operation();
  Thread* next = choose();
  while (next == nullptr && advance_operation()) next = choose();
  if (next == nullptr) fail_deadlock("deadlock: every thread waits.");
  if (next != m.self) switch_to(*next);
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

void preempt() {
  refuel();
  check_deadline();
  machine.self->warp->priority = machine.random.next();
  machine.current = nullptr;
  schedule();
}

void yield() {
  EMU_HERE();
  if (machine.random.one_in(4)) advance_operation();  // it may be what the poll is for
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
    if (other.call.name != self.call.name || other.call.mask != mask ||
        other.call.key != self.call.key) {
      fail(self,
           "divergence: this lane calls %s (mask %08x, operands %llx), lane %u calls %s (mask "
           "%08x, operands %llx)%s",
           self.call.name, mask, static_cast<unsigned long long>(self.call.key), other.lane,
           other.call.name, other.call.mask, static_cast<unsigned long long>(other.call.key),
           frames(other).c_str());
    }
  }
}

void collective(const Call& call, State (*execute)(Warp&, u32)) {
  Thread& self = *machine.self;
  Warp& warp = *self.warp;
  self.call = call;
  if (!(call.mask >> self.lane & 1))
    fail(self, "%s: mask %08x lacks the calling lane", call.name, call.mask);
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
    if (next == State::ready)
      wake(thread);
    else
      block(thread, next, call.name, u32(call.key));
  }
  schedule();
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
      call.result = call.kind == Sync::count     ? barrier.votes
                    : call.kind == Sync::vote_or ? barrier.votes > 0
                                                 : all;
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
    fail(first, "barrier %u: %u threads expected here, %u by those that arrived before", id,
         call.threads, barrier.threads);
  }
  barrier.threads = call.threads;
  barrier.arrived += call.threads == 0 ? __builtin_popcount(mask) : 32;
  for (u32 left = mask; left != 0; left &= left - 1) {
    barrier.votes +=
        static_cast<BarrierCall*>(warp.lane[__builtin_ctz(left)].call.data)->predicate != 0;
  }
  if (call.waits) barrier.waiting.push_back(&warp);
  const u32 expected = call.threads == 0 ? live_threads(*warp.block) : call.threads;
  if (barrier.arrived > expected)
    fail(first, "barrier %u: %u threads arrived, %u expected", id, barrier.arrived, expected);
  if (barrier.arrived < expected) return call.waits ? State::barrier : State::ready;
  complete(barrier);
  return State::ready;
}

static int barrier(const char* name, u32 id, BarrierCall call) {
  Thread& self = *machine.self;
  if (id > 15) fail(self, "%s: barrier %u: there are 16", name, id);
  if (call.threads % 32 != 0)
    fail(self, "%s: %u threads: not a multiple of the warp", name, call.threads);
  collective({name, self.warp->lanes, u64(call.threads) << 32 | id, &call}, arrive);
  return call.result;
}

int sync_block(Sync kind, int predicate) {
  EMU_HERE();
  static const char* const names[] = {"__syncthreads", "__syncthreads_and", "__syncthreads_or",
                                      "__syncthreads_count"};
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

// ---- barrier.cluster ----
static void complete_cluster(Cluster& cluster) {
  cluster.arrived_warps = 0;
  for (Block& block : cluster.blocks) {
    for (Warp& warp : block.warps) {
      warp.cluster_arrived = false;
      for_lanes(warp.live, [&](u32 lane) {
        if (warp.lane[lane].state == State::cluster_barrier) wake(warp.lane[lane]);
      });
    }
  }
}

static bool cluster_complete(const Cluster& cluster) {
  u32 live = 0;
  for (const Block& block : cluster.blocks) live += block.live_warps;
  return cluster.arrived_warps == live;
}

void cluster_arrive() {
  EMU_HERE();
  collective({"barrier.cluster.arrive", machine.self->warp->lanes, 0, nullptr},
             [](Warp& warp, u32) {
               if (warp.cluster_arrived)
                 fail(warp.lane[0], "barrier.cluster.arrive twice without a wait");
               warp.cluster_arrived = true;
               Cluster& cluster = *warp.block->cluster;
               ++cluster.arrived_warps;
               warp.cluster_waits = true;
               if (cluster_complete(cluster)) complete_cluster(cluster);
               return State::ready;
             });
}

void cluster_wait() {
  EMU_HERE();
  collective({"barrier.cluster.wait", machine.self->warp->lanes, 0, nullptr}, [](Warp& warp, u32) {
    if (!warp.cluster_waits) fail(warp.lane[0], "barrier.cluster.wait without an arrive before it");
    warp.cluster_waits = false;
    return warp.cluster_arrived ? State::cluster_barrier : State::ready;
  });
}

void end_of_warp(Block& block) {
  for (Barrier& b : block.barriers) {
    if (b.arrived != 0 && b.threads == 0 && b.arrived >= live_threads(block)) complete(b);
  }
  Cluster& cluster = *block.cluster;
  if (cluster.arrived_warps != 0 && cluster_complete(cluster)) complete_cluster(cluster);
}

}  // namespace emu
