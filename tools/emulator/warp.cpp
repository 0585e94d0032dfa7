// SPDX-License-Identifier: Apache-2.0
// Warp-collective instructions, and cp.async: what sm_80 has.
#include "runtime.hpp"

namespace emu {

// ---- Shuffles, votes, reductions ----
void sync_warp(u32 mask) {
  EMU_HERE();
  collective({"__syncwarp", mask, 0, nullptr}, [](Warp&, u32) { return State::ready; });
}

struct ShuffleCall {
  u64 value;
  u32 source;
  u64 result;
};
u64 shuffle(u32 mask, u64 value, u32 source) {
  EMU_HERE();
  ShuffleCall call{value, source, 0};
  collective({"shuffle", mask, 0, &call}, [](Warp& warp, u32 mask) {
    for_lanes(mask, [&](u32 lane) {
      auto& call = operands<ShuffleCall>(warp, lane);
      // A lane outside the mask has no defined value: poison.
      call.result =
          mask >> call.source & 1 ? operands<ShuffleCall>(warp, call.source).value : ~u64(0);
    });
    return State::ready;
  });
  return call.result;
}

u32 ballot(u32 mask, bool predicate) {
  EMU_HERE();
  u32 data = predicate;
  collective({"vote", mask, 0, &data}, [](Warp& warp, u32 mask) {
    u32 votes = 0;
    for_lanes(mask, [&](u32 lane) { votes |= operands<u32>(warp, lane) << lane; });
    for_lanes(mask, [&](u32 lane) { operands<u32>(warp, lane) = votes; });
    return State::ready;
  });
  return data;
}

u32 match_any(u32 mask, u64 value) {
  EMU_HERE();
  ShuffleCall call{value, 0, 0};
  collective({"match_any", mask, 0, &call}, [](Warp& warp, u32 mask) {
    for_lanes(mask, [&](u32 lane) {
      for_lanes(mask, [&](u32 other) {
        auto& mine = operands<ShuffleCall>(warp, lane);
        mine.result |= u64(mine.value == operands<ShuffleCall>(warp, other).value) << other;
      });
    });
    return State::ready;
  });
  return u32(call.result);
}

static u32 combine(u32 a, u32 b, Reduce kind) {
  switch (kind) {
    case Reduce::add:
      return a + b;
    case Reduce::min:
      return int(a) < int(b) ? a : b;
    case Reduce::max:
      return int(a) > int(b) ? a : b;
    case Reduce::umin:
      return a < b ? a : b;
    case Reduce::umax:
      return a > b ? a : b;
    case Reduce::bit_and:
      return a & b;
    case Reduce::bit_or:
      return a | b;
    case Reduce::bit_xor:
      return a ^ b;
  }
  __builtin_unreachable();
}
u32 reduce(u32 mask, u32 value, Reduce kind) {
  EMU_HERE();
  collective({"reduce", mask, u64(kind), &value}, [](Warp& warp, u32 mask) {
    const u32 first = __builtin_ctz(mask);
    u32 result = operands<u32>(warp, first);
    for_lanes(mask & (mask - 1), [&](u32 lane) {
      result = combine(result, operands<u32>(warp, lane), Reduce(warp.lane[first].call.key));
    });
    for_lanes(mask, [&](u32 lane) { operands<u32>(warp, lane) = result; });
    return State::ready;
  });
  return value;
}

// ---- cp.async ----
// The destination is NaN from issue to landing, and nobody may touch it meanwhile.

static void land(Thread& thread, const Copy& copy) {
  Block& block = *thread.warp->block;
  u8* dst = block.memory + copy.dst;
  std::memcpy(dst, copy.src, copy.bytes);
  std::memset(dst + copy.bytes, 0, copy.width - copy.bytes);
  for (u32 i = 0; i < copy.width; i += 4) block.in_flight[(copy.dst + i) / 4] = 0;
  note_write(thread, block, copy.dst, copy.width);
}

void land_copies(Thread& thread) {
  if (machine.policy.landing != Landing::any_time || !machine.random.one_in(4)) return;
  const u32 i = machine.random.below(u32(thread.copies.size()));
  land(thread, thread.copies[i]);
  thread.copies.erase(thread.copies.begin() + i);
}

void copy_async(u32 dst, const void* src, int bytes, int width) {
  EMU_HERE();
  Thread& self = *machine.self;
  Block& block = *self.warp->block;
  if (bytes < 0 || bytes > width) fail(self, "cp.async: %d bytes of %d", bytes, width);
  u8* to = shared(self, dst, width, width, "cp.async destination");
  if (bytes > 0) global(self, src, bytes, 1, false, "cp.async source");
  if (u64(src) % width != 0) fail(self, "cp.async: source %p is not a multiple of %d", src, width);
  const Copy copy{dst, self.copy_group, u8(bytes), u8(width), static_cast<const u8*>(src)};
  if (machine.policy.landing == Landing::at_once) return land(self, copy);
  std::memset(to, kPoison, width);
  for (int i = 0; i < width; i += 4)
    block.in_flight[(dst + i) / 4] = 1 + self.warp->index * 32 + self.lane;
  self.copies.push_back(copy);
}

void copy_async_commit() { ++machine.self->copy_group; }

void copy_async_wait(int pending) {
  EMU_HERE();
  Thread& self = *machine.self;
  std::erase_if(self.copies, [&](const Copy& copy) {
    const bool due = int(copy.group) + pending < int(self.copy_group);
    if (due) land(self, copy);
    return due;
  });
}

void store_shared(u32 dst, const u32* x) {
  EMU_HERE();
  Thread& self = *machine.self;
  std::memcpy(shared(self, dst, 16, 16, "st.shared"), x, 16);
  note_write(self, *self.warp->block, dst, 16);
}

// ---- ldmatrix ----
struct MatrixCall {
  u32* r;
  u32 address;
};
void load_matrix(u32* r, u32 src, int count, bool transposed) {
  EMU_HERE();
  MatrixCall call{r, src};
  collective({transposed ? "ldmatrix.trans" : "ldmatrix", ~0u, u64(count), &call}, [](Warp& warp,
                                                                                      u32) {
    const Call& first = warp.lane[0].call;
    const bool transposed = first.name[8] != 0;
    for (u32 m = 0; m < first.key; ++m) {
      const u16* rows[8];
      for (u32 i = 0; i < 8; ++i) {
        const Thread& thread = warp.lane[8 * m + i];
        rows[i] = reinterpret_cast<u16*>(
            shared(thread, operands<MatrixCall>(warp, 8 * m + i).address, 16, 16, first.name));
      }
      for (u32 lane = 0; lane < 32; ++lane) {
        const u32 a = lane / 4, b = 2 * (lane % 4);
        operands<MatrixCall>(warp, lane).r[m] = transposed ? rows[b][a] | u32(rows[b + 1][a]) << 16
                                                           : rows[a][b] | u32(rows[a][b + 1]) << 16;
      }
    }
    return State::ready;
  });
}

void store_matrix(u32 dst, const u32* r, bool transposed) {
  EMU_HERE();
  MatrixCall call{const_cast<u32*>(r), dst};
  collective({transposed ? "stmatrix.trans" : "stmatrix", ~0u, 4, &call}, [](Warp& warp, u32) {
    const Call& first = warp.lane[0].call;
    const bool transposed = first.name[8] != 0;
    for (u32 m = 0; m < first.key; ++m) {
      u16* rows[8];
      for (u32 i = 0; i < 8; ++i) {
        const Thread& thread = warp.lane[8 * m + i];
        const u32 address = operands<MatrixCall>(warp, 8 * m + i).address;
        rows[i] = reinterpret_cast<u16*>(shared(thread, address, 16, 16, first.name));
        note_write(thread, *warp.block, address, 16);
      }
      for (u32 lane = 0; lane < 32; ++lane) {
        const u32 a = lane / 4, b = 2 * (lane % 4), pair = operands<MatrixCall>(warp, lane).r[m];
        (transposed ? rows[b][a] : rows[a][b]) = u16(pair);
        (transposed ? rows[b + 1][a] : rows[a][b + 1]) = u16(pair >> 16);
      }
    }
    return State::ready;
  });
}

// ---- mma.sync ----
struct MmaCall {
  float* d;
  const u32* a;
  u32 b0, b1;
};
template <class Widen>
static void mma_warp(Warp& warp, Widen widen) {  // fragments as PTX ISA "mma.m16n8k16" draws them
  float a[16][16], b[16][8], d[16][8] = {};
  for (u32 lane = 0; lane < 32; ++lane) {
    const auto& call = operands<MmaCall>(warp, lane);
    const u32 row = lane / 4, col = 2 * (lane % 4);
    for (u32 i = 0; i < 4; ++i) {
      float* const to = &a[row + 8 * (i % 2)][col + 8 * (i / 2)];
      to[0] = widen(call.a[i] & 0xffff);
      to[1] = widen(call.a[i] >> 16);
    }
    b[col][row] = widen(call.b0 & 0xffff);
    b[col + 1][row] = widen(call.b0 >> 16);
    b[col + 8][row] = widen(call.b1 & 0xffff);
    b[col + 9][row] = widen(call.b1 >> 16);
  }
  for (u32 m = 0; m < 16; ++m) {
    for (u32 k = 0; k < 16; ++k) {
      for (u32 n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
    }
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    float* const to = operands<MmaCall>(warp, lane).d;
    const u32 row = lane / 4, col = 2 * (lane % 4);
    for (u32 i = 0; i < 4; ++i) to[i] += d[row + 8 * (i / 2)][col + i % 2];
  }
}
void mma_16x8x16(float* d, const u32* a, u32 b0, u32 b1, Format format) {
  EMU_HERE();
  MmaCall call{d, a, b0, b1};
  collective({"mma.m16n8k16", ~0u, u64(format), &call}, [](Warp& warp, u32) {
    if (Format(warp.lane[0].call.key) == Format::bf16)
      mma_warp(warp, from_bf16);
    else
      mma_warp(warp, from_f16);
    return State::ready;
  });
}

}  // namespace emu
