// SPDX-License-Identifier: Apache-2.0
// The emulated machine: threads are fibers, one runs at a time, and a seed decides which.
#pragma once
#include <cstdint>
#include <cstring>
#include <deque>
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

constexpr u32 kWindow = 256 << 10;  // shared memory of a block, with room around it
constexpr u32 kLargestBlock = 227 << 10;
constexpr u32 kStaticBase = 1024;  // as on the GPU, the first KB belongs to the system
constexpr u32 kStackBytes = 256 << 10;
constexpr u8 kPoison = 0xff;  // NaN in every format

struct Block;
struct Cluster;
struct Warp;

// ---- Threads, warps, blocks, clusters ----
struct Call {  // what the lanes of `mask` must call together
  const char* name = nullptr;
  u32 mask = 0;
  u64 key = 0;           // immediate operands, which must agree
  void* data = nullptr;  // this lane's operands and results
};

enum class State : u8 { ready, collective, barrier, mbarrier, cluster_barrier, product, done };

struct Copy {  // a cp.async between issue and landing
  u32 dst, group;
  u8 bytes, width;
  const u8* src;
};

struct Thread {
  void* sp = nullptr;  // saved stack pointer
  u8* stack = nullptr;
  void* frame = nullptr;  // of the last call into the runtime: where this thread is
  Dim index{};
  u32 lane = 0;
  State state = State::done;
  Warp* warp = nullptr;
  Call call;
  const char* waits_for = "";
  u32 waits_at = 0;  // barrier number, or shared address of an mbarrier
  std::vector<Copy> copies;
  u32 copy_group = 0, bulk_group = 0;
  u32 fence_time = 0,
      mbarrier_fence_time = 0;  // of the last fence.proxy.async, fence.mbarrier_init
  u32 number() const;           // in the cluster, from 1
};

struct Product {  // a wgmma between its first warp's issue and its execution
  u64 a, b;       // descriptors
  u32 n;
  Format format;
  bool a_in_registers, trans_a, trans_b, accumulate;
  u32 joined = 0;  // warps
  struct Part {
    float* d;      // lane 0's accumulators, which name the warp's
    u32 a[32][4];  // a in registers
  } part[4];
};

struct Warpgroup {
  std::deque<Product> products;
  u32 executed = 0;  // products that were at the front before
};

struct Accumulators {         // of one warp, while products work on them
  std::vector<float> values;  // [16][n]
  float* d[32];
  u32 n, last;  // last: number of the last product
};

struct Warp {
  Block* block = nullptr;
  u32 index = 0;
  u32 lanes = 0;                         // those that exist; the following are subsets
  u32 ready = 0, live = 0, waiting = 0;  // waiting: in a collective call
  u32 priority = 0;
  std::unordered_map<float*, Accumulators> accumulators;
  u32 products_issued = 0, products_awaited = 0;
  std::vector<u32> product_groups;  // products issued when each group was committed
  bool fenced = false;              // wgmma.fence since registers were last free to use
  bool cluster_arrived = false;     // at barrier.cluster, which is not complete
  bool cluster_waits = false;       // has arrived and must wait
  Thread lane[32];
};

struct Barrier {
  u32 threads = 0, arrived = 0;  // threads 0: every live one of the block
  int votes = 0;                 // of __syncthreads_and and friends
  std::vector<Warp*> waiting;
};

struct Write {  // the last ordinary store to 4 bytes of shared memory
  u32 time;
  u32 writer;  // 0: none, or an asynchronous one
};

struct Block {
  Cluster* cluster = nullptr;
  Dim index{};
  u32 rank = 0, live_warps = 0;
  u8* memory = nullptr;
  // For each 4 bytes of shared memory.
  std::vector<u32> in_flight;  // what is under way to them: a thread's cp.async, a bulk copy, or 0
  std::vector<Write> writes;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  Barrier barriers[16];
};

struct Cluster {
  std::vector<Block> blocks;  // by rank
  u32 live_blocks = 0;
  u32 arrived_warps = 0;  // at barrier.cluster
};

// ---- Asynchronous work that no thread executes ----
enum class Bulk : u8 { load, store, reduce_add };

struct Chunk {  // up to 16 bytes of a bulk copy
  u32 offset;   // in shared memory
  u8* global;   // null: out of bounds
  u8 from, to;  // the bytes of the chunk that lie inside the tensor
};

// A bulk copy, or, with `products`, permission for a warpgroup to execute its oldest wgmma.
struct Operation {
  Thread* issuer = nullptr;
  Warp* products = nullptr;  // the first of the warpgroup
  Bulk kind = Bulk::load;
  std::string place;  // who issued it, for messages
  std::vector<Chunk> chunks;
  std::vector<u8> staged;       // store: what was read
  std::vector<Block*> targets;  // load: the blocks that receive it
  u32 bar = 0, id = 0, group = 0, bytes = 0;
  bool has_read = false;
  u8 element = 0;  // reduce_add
};

// ---- The launch, laid out as driver.py has it ----
struct Array {
  const u8* begin;
  const u8* end;
  u32 writable;
  u32 number;
};

struct Launch {
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
  std::vector<Operation*> operations;
  std::vector<Array> arrays;  // by address
  u32 last_array = 0;
  u32 dynamic_base = 0, fuel = 0, lowest_priority = 0;
  u32 time = 1;  // advances with every proxy fence
  u32 operations_issued = 0;
  u64 decisions = 0;
  double deadline = 0;
  bool failed = false;
};
extern Machine machine;

// Shared with emulator.hpp.
enum class Reduce : u8 { add, min, max, umin, umax, bit_and, bit_or, bit_xor };
enum class Sync : u8 { plain, vote_and, vote_or, count };

// ---- runtime.cpp: errors, scheduler, collective calls, barriers ----
// Ends the launch. The text names kernel, block, thread, and the source lines that led to
// `thread`'s last call.
[[noreturn]] void fail(const Thread& thread, const char* format, ...)
    __attribute__((format(printf, 2, 3)));
[[noreturn]] void stop(const std::string& text);
std::string place(const Thread& thread);
std::string shared_place(u32 address);  // a shared address in words: dynamic + 128
// " @offset" of a code address in the shared object, and of the calls that led to a thread's last
// one; driver.py makes source lines of them.
std::string frame_item(void* address);
std::string frames(const Thread& thread);

Thread* choose();  // who runs next; null: there is nobody
void schedule();   // another thread runs; returns when this one is chosen again
void preempt();
void yield();
void refuel();
void set_deadline(double seconds);
void wait(State state, const char* what, u32 at);
void wake(Thread& thread);
void block(Thread& thread, State state, const char* what, u32 at);
void to_main();  // the launch's own stack goes on
void switch_to(Thread& next);

// `execute` says what becomes of the lanes: State::ready, or what they wait for (at `call.key`).
void collective(const Call& call, State (*execute)(Warp&, u32 mask));
template <class T>
T& operands(Warp& warp, u32 lane) {
  return *static_cast<T*>(warp.lane[lane].call.data);
}
template <class F>
void for_lanes(u32 mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) f(u32(__builtin_ctz(mask)));
}
void end_of_warp(Block& block);  // its absence may complete barriers

// ---- memory.cpp ----
u8* shared(const Thread& thread, u32 address, u32 bytes, u32 align, const char* what);
u8* global(const Thread& thread, const void* address, u32 bytes, u32 align, bool write,
           const char* what);
Block& block_of(const Thread& thread, u32 address, const char* what);  // of a cluster address
void note_write(const Thread& thread, Block& block, u32 offset, u32 bytes);
u32 place_dynamic_memory(bool barely_aligned);  // its first byte, aligned as the unit declares

// ---- warp.cpp ----
void land_copies(Thread& thread);  // some of the pending cp.async, as the seed says
void copy_async_wait(int pending);

// ---- bulk.cpp ----
bool advance_operation();  // one step of one operation, as the seed says; false: none is left
std::string operation_place(u32 id);
void check_proxy(const Thread& issuer, Block& block, u32 offset, u32 bytes, const char* what);
void end_of_thread(Thread& thread);
void end_of_block(Block& block);

// ---- wgmma.cpp ----
void execute_product(Warp& first);

constexpr u32 kOperation = 1u << 31;  // in Block::in_flight: an operation, not a cp.async

// Where the caller of the runtime stands. A macro: it must expand in the function that the kernel
// called.
#define EMU_HERE() (machine.self->frame = __builtin_frame_address(0))

}  // namespace emu
