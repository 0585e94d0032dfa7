// SPDX-License-Identifier: Apache-2.0
// The emulated machine: threads are fibers, one runs at a time, and a seed decides which.
#pragma once
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "convert.hpp"

namespace emu {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
struct Dim {
  u32 x, y, z;
};

struct Block;
struct Cluster;
struct Warp;

// A group of calls that warps must make together: `execute` runs once, when every lane of the mask has arrived.
struct Call {
  const char* name = nullptr;
  u32 mask = 0;
  u64 key = 0;           // immediate operands, which must agree
  void* data = nullptr;  // this lane's operands and results
};

enum class State : u8 { ready, collective, barrier, mbarrier, cluster_barrier, done };

struct Copy {  // a cp.async between issue and landing
  u32 dst, group, id;
  u8 bytes, width;
  const u8* src;
};

struct Thread {
  void* sp = nullptr;  // saved stack pointer
  u8* stack = nullptr;
  void* frame = nullptr;  // frame of the last call into the runtime: where this thread is
  Dim index{};
  u32 lane = 0;
  State state = State::done;
  Warp* warp = nullptr;
  Call call;
  const char* waits_for = "";
  u32 waits_at = 0;  // barrier number, or shared address of an mbarrier
  std::vector<Copy> copies;
  u32 copy_group = 0;
};

struct Warp {
  Block* block = nullptr;
  u32 index = 0;
  u32 lanes = 0;                         // those that exist; the following are subsets
  u32 ready = 0, live = 0, waiting = 0;  // waiting: in a collective call
  u32 priority = 0;
  Thread lane[32];
};

struct Barrier {
  u32 threads = 0, arrived = 0;  // threads 0: every live one of the block
  int votes = 0;                 // of __syncthreads_and and friends
  std::vector<Warp*> waiting;
};

struct Block {
  Cluster* cluster = nullptr;
  Dim index{};
  u32 live_warps = 0;
  u8* memory = nullptr;
  std::vector<u32> in_flight;  // for each 4 bytes of shared memory: the copy that is under way to them, or 0
  std::vector<Warp> warps;
  Barrier barriers[16];
};

struct Cluster {
  std::vector<Block> blocks;  // by rank
  u32 live_blocks = 0;
};

struct Array {
  const u8* begin;
  const u8* end;
  u32 writable;
  u32 number;
};

struct Launch {  // laid out as driver.py has it
  const char* name;
  const void* params;
  u64 params_bytes;
  Dim grid, block, cluster;
  u32 dynamic_bytes;
  u32 resident;  // clusters that run side by side; 0: the seed decides
  u32 in_order;  // 1: they start in the order of their index
  const Array* arrays;
  u64 array_count;
  u64 seed;
  double seconds;
  char* error;
  u64 error_bytes;
};

constexpr u32 kWindow = 256 << 10;     // shared memory of a block, with room around it
constexpr u32 kStaticBase = 1024;      // as on the GPU, the first KB belongs to the system
constexpr u32 kStackBytes = 256 << 10;
constexpr u8 kPoison = 0xff;           // NaN in every format

struct Random {
  u64 state;
  u32 next() {  // splitmix64
    u64 z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return u32(z >> 32);
  }
  u32 below(u32 n) { return u32(u64(next()) * n >> 32); }
  bool one_in(u32 n) { return n != 0 && below(n) == 0; }
};

// Shared with emulator.hpp.
enum class Reduce : u8 { add, min, max, umin, umax, bit_and, bit_or, bit_xor };
enum class Sync : u8 { plain, vote_and, vote_or, count };

enum class Landing : u8 { at_wait, any_time, at_once };

struct Policy {
  u32 shuffle_warps;  // a warp's priority changes once in this many choices; 0: never
  u32 preempt;        // mean number of memory accesses between two preemptions
  Landing landing;
};

struct Machine {
  Launch launch{};
  Random random{0};
  Policy policy{};
  Thread* self = nullptr;
  Warp* current = nullptr;
  void* main_sp = nullptr;
  std::vector<Warp*> warps;  // of resident blocks
  std::vector<Array> arrays;   // by address
  u32 last_array = 0;
  u32 dynamic_base = 0, fuel = 0, lowest_priority = 0;
  u64 decisions = 0;
  bool failed = false;
};
extern Machine machine;

// Ends the launch. The text names kernel, block, thread, and the source lines that led to `thread`'s last call.
[[noreturn]] void fail(const Thread& thread, const char* format, ...) __attribute__((format(printf, 2, 3)));

void schedule();                 // another thread runs; returns when this one is chosen again
void wait(State state, const char* what, u32 at);
void wake(Thread& thread);
void block(Thread& thread, State state, const char* what, u32 at);
// `execute` says what becomes of the lanes: State::ready, or what they wait for (at `call.key`).
void collective(const Call& call, State (*execute)(Warp&, u32 mask));
u8* shared(const Thread& thread, u32 address, u32 bytes, u32 align, const char* what);
const u8* global(const Thread& thread, const void* address, u32 bytes, u32 align, bool write, const char* what);
[[noreturn]] void fail_in_flight(const Thread& thread, u32 copy, u32 address, const char* what);
void land_copies(Thread& thread);  // some of the pending ones, as the seed says
void copy_async_wait(int pending);

// Where the caller of the runtime stands. A macro: it must expand in the function that the kernel called.
#define EMU_HERE() (machine.self->frame = __builtin_frame_address(0))

}  // namespace emu
