// SPDX-License-Identifier: Apache-2.0
// wgmma: shared memory is read at some moment after the fourth warp's issue and before the wait
// returns; accumulators are NaN in between. A product is over for its four warps at once, as on the
// GPU: one of them may release what it read.
#include <algorithm>

#include "runtime.hpp"

namespace emu {

struct WgmmaCall {
  float* d;
  const u32* a;
  u64 a_descriptor, b_descriptor;
  u32 n;
  Format format;
  bool trans_a, trans_b, accumulate;
};

// ---- Matrix descriptors (PTX ISA: "Matrix Descriptor Format", "Strides") ----
struct Descriptor {
  u32 start, leading, stride,
      span;  // span: bytes of a row of the pattern: 16 (no swizzle), 32, 64, 128
};

static Descriptor decode(const Thread& thread, u64 bits) {
  static constexpr u32 kSpans[] = {16, 128, 64, 32};
  const Descriptor d{u32(bits & 0x3fff) << 4, u32(bits >> 16 & 0x3fff) << 4,
                     u32(bits >> 32 & 0x3fff) << 4, kSpans[bits >> 62]};
  if (bits & 0x3ff1c000c000c000)
    fail(thread, "wgmma descriptor %016llx: reserved bits are set",
         static_cast<unsigned long long>(bits));
  if (bits >> 49 & 7)
    fail(thread, "wgmma descriptor %016llx: a base offset is not supported",
         static_cast<unsigned long long>(bits));
  return d;
}

static u32 swizzled(u32 address, u32 span) {
  return address ^ (address >> 7 & (span / 16 - 1)) << 4;
}

// `rows` x 32 bytes of an operand, K innermost. K-major: a pattern row holds `span` bytes of K.
// MN-major: it holds span / 2 columns of one K.
static void gather(const Thread& thread, u64 bits, bool mn_major, u32 first_row, u32 rows,
                   u8 (*to)[32], const char* what) {
  const Descriptor d = decode(thread, bits);
  Block& block = *thread.warp->block;
  const auto chunk = [&](u32 offset) {
    const u32 address = swizzled(d.start + offset, d.span);
    const u8* p = shared(thread, address, 16, 16, what);
    check_proxy(thread, block, address, 16, what);
    return p;
  };
  if (!mn_major) {
    for (u32 r = first_row; r < first_row + rows; ++r) {
      for (u32 half = 0; half < 2; ++half) {
        const u32 across = d.span == 16 ? half * d.leading : half * 16;
        std::memcpy(to[r - first_row] + 16 * half,
                    chunk(r % 8 * d.span + r / 8 * d.stride + across), 16);
      }
    }
    return;
  }
  for (u32 k = 0; k < 16; ++k) {
    for (u32 r = first_row; r < first_row + rows; r += 8) {  // 8 columns of 2 bytes
      const u32 width = d.span / 2;
      const u32 offset =
          d.span == 16 ? r / 8 * d.stride + k % 8 * 16 + k / 8 * d.leading
                       : r % width * 2 + r / width * d.leading + k % 8 * d.span + k / 8 * d.stride;
      const u8* from = chunk(offset);
      for (u32 i = 0; i < 8; ++i) std::memcpy(to[r - first_row + i] + 2 * k, from + 2 * i, 2);
    }
  }
}

static void widen(const u8* from, Format format, float* to, u32& count) {
  count = format == Format::e4m3 ? 32 : 16;
  for (u32 i = 0; i < count; ++i) {
    const u32 bits = format == Format::e4m3 ? from[i] : from[2 * i] | from[2 * i + 1] << 8;
    to[i] = format == Format::e4m3   ? from_e4m3(bits)
            : format == Format::bf16 ? from_bf16(bits)
                                     : from_f16(bits);
  }
}

// Element i of a lane's accumulators is row lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane %
// 4) + i % 2.
static u32 element(u32 lane, u32 i, u32 n) {
  return (lane / 4 + 8 * (i / 2 % 2)) * n + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
}

static Warpgroup& group_of(Warp& warp) { return warp.block->warpgroups[warp.index / 4]; }

// The warp's results become visible in its registers, as far as it has waited for them.
static void retire(Warp& warp) {
  std::erase_if(warp.accumulators, [&](auto& entry) {
    const Accumulators& acc = entry.second;
    if (acc.last >= warp.products_awaited) return false;
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 i = 0; i < acc.n / 2; ++i) acc.d[lane][i] = acc.values[element(lane, i, acc.n)];
    }
    return true;
  });
}

static void multiply(Warp& warp, const Product& p, const Product::Part& part,
                     const float (&b)[32][256], u32 depth) {
  u8 a_bytes[16][32];
  if (p.a_in_registers) {
    for (u32 lane = 0; lane < 32; ++lane) {
      for (u32 i = 0; i < 4; ++i)
        std::memcpy(&a_bytes[lane / 4 + 8 * (i % 2)][4 * (lane % 4) + 16 * (i / 2)],
                    &part.a[lane][i], 4);
    }
  } else {
    gather(warp.lane[0], p.a, p.trans_a, warp.index % 4 * 16, 16, a_bytes, "wgmma (a)");
  }
  float* d = warp.accumulators.at(part.d).values.data();
  for (u32 m = 0; m < 16; ++m, d += p.n) {
    float a[32], sum[256] = {};
    widen(a_bytes[m], p.format, a, depth);
    for (u32 k = 0; k < depth; ++k) {
      for (u32 n = 0; n < p.n; ++n) sum[n] += a[k] * b[k][n];
    }
    for (u32 n = 0; n < p.n; ++n) d[n] = p.accumulate ? d[n] + sum[n] : sum[n];
  }
}

// The oldest product of a warpgroup, which all four warps have issued.
void execute_product(Warp& first) {
  Warpgroup& group = group_of(first);
  const Product p = group.products.front();
  group.products.pop_front();
  ++group.executed;
  u8 b_bytes[256][32];
  float b[32][256];
  u32 depth = 0;
  gather(first.lane[0], p.b, p.trans_b, 0, p.n, b_bytes, "wgmma (b)");
  for (u32 n = 0; n < p.n; ++n) {
    float row[32];
    widen(b_bytes[n], p.format, row, depth);
    for (u32 k = 0; k < depth; ++k) b[k][n] = row[k];
  }
  for (u32 i = 0; i < 4; ++i) {
    Warp& warp = (&first)[i];
    multiply(warp, p, p.part[i], b, depth);
    if (warp.lane[0].state != State::product || group.executed < warp.products_awaited) continue;
    retire(warp);
    for_lanes(warp.live, [&](u32 lane) { wake(warp.lane[lane]); });
  }
}

static void drop_permission(const Warp& first) {
  auto& all = machine.operations;
  const auto o = std::find_if(all.begin(), all.end(),
                              [&](const Operation* o) { return o->products == &first; });
  delete *o;
  all.erase(o);
}

void wgmma_fence() {
  EMU_HERE();
  collective({"wgmma.fence", ~0u, 0, nullptr}, [](Warp& warp, u32) {
    warp.fenced = true;
    return State::ready;
  });
}

static Accumulators& accumulators(Warp& warp, float* d0, u32 n) {
  auto [entry, fresh] = warp.accumulators.try_emplace(d0);
  Accumulators& acc = entry->second;
  if (!fresh) return acc;
  acc.n = n;
  acc.values.resize(16 * n);
  for (u32 lane = 0; lane < 32; ++lane) {
    acc.d[lane] = operands<WgmmaCall>(warp, lane).d;
    for (u32 i = 0; i < n / 2; ++i) acc.values[element(lane, i, n)] = acc.d[lane][i];
    std::memset(acc.d[lane], kPoison, n / 2 * sizeof(float));
  }
  return acc;
}

static State issue(Warp& warp, u32) {
  const Thread& thread = warp.lane[0];
  const auto& call = operands<WgmmaCall>(warp, 0);
  if (!warp.fenced) fail(thread, "wgmma without wgmma.fence since registers were last free to use");
  for (u32 lane = 1; lane < 32; ++lane) {
    const auto& other = operands<WgmmaCall>(warp, lane);
    if (other.a_descriptor != call.a_descriptor || other.b_descriptor != call.b_descriptor ||
        other.accumulate != call.accumulate) {
      fail(warp.lane[lane], "wgmma: descriptors or accumulate differ from lane 0's");
    }
  }
  Warpgroup& group = group_of(warp);
  const u32 number = warp.products_issued++;
  if (number == group.executed + group.products.size()) {
    group.products.push_back({call.a_descriptor,
                              call.b_descriptor,
                              call.n,
                              call.format,
                              call.a != nullptr,
                              call.trans_a,
                              call.trans_b,
                              call.accumulate,
                              0,
                              {}});
  }
  Product& p = group.products[number - group.executed];
  if (p.a != call.a_descriptor || p.b != call.b_descriptor || p.n != call.n ||
      p.format != call.format || p.a_in_registers != (call.a != nullptr) ||
      p.trans_a != call.trans_a || p.trans_b != call.trans_b || p.accumulate != call.accumulate) {
    fail(thread, "wgmma: operands differ from those of another warp of the warpgroup");
  }
  Product::Part& part = p.part[warp.index % 4];
  part.d = call.d;
  for (u32 lane = 0; lane < 32 && call.a != nullptr; ++lane)
    std::memcpy(part.a[lane], operands<WgmmaCall>(warp, lane).a, 16);
  accumulators(warp, call.d, call.n).last = number;
  if (++p.joined < 4) return State::ready;
  auto* o = new Operation;
  o->issuer = &warp.lane[0];
  o->products = &warp.block->warps[warp.index / 4 * 4];
  machine.operations.push_back(o);
  return State::ready;
}

void wgmma(float* d, int n, Format format, u64 a, const u32* registers, u64 b, int trans_a,
           int trans_b, bool accumulate) {
  EMU_HERE();
  Thread& self = *machine.self;
  if (n % 8 != 0 || n < 8 || n > 256) fail(self, "wgmma: n = %d", n);
  if (format == Format::e4m3 && (trans_a || trans_b))
    fail(self, "wgmma: 8-bit operands must be K-major");
  if (self.warp->index / 4 * 4 + 4 > self.warp->block->warps.size())
    fail(self, "wgmma: the warpgroup has fewer than 4 warps");
  WgmmaCall call{d, registers, a, b, u32(n), format, trans_a != 0, trans_b != 0, accumulate};
  const u64 key = u64(n) | u64(format) << 16 | u64(trans_a) << 24 | u64(trans_b) << 25 |
                  u64(registers != nullptr) << 26;
  collective({"wgmma.mma_async", ~0u, key, &call}, issue);
}

void wgmma_commit() {
  EMU_HERE();
  collective({"wgmma.commit_group", ~0u, 0, nullptr}, [](Warp& warp, u32) {
    warp.product_groups.push_back(warp.products_issued);
    return State::ready;
  });
}

void wgmma_wait(int pending) {
  EMU_HERE();
  collective({"wgmma.wait_group", ~0u, u64(pending), nullptr}, [](Warp& warp, u32) {
    const u32 groups = u32(warp.product_groups.size()), kept = u32(warp.lane[0].call.key);
    if (groups > kept) warp.products_awaited = warp.product_groups[groups - 1 - kept];
    warp.fenced = false;
    Warpgroup& group = group_of(warp);
    Warp& first = warp.block->warps[warp.index / 4 * 4];
    while (group.executed < warp.products_awaited && group.products.front().joined == 4) {
      drop_permission(first);
      execute_product(first);
    }
    if (group.executed < warp.products_awaited)
      return State::product;  // another warp has not issued it yet
    retire(warp);
    return State::ready;
  });
}

// ---- Roles of warps ----
void set_registers(int count, bool more) {
  EMU_HERE();
  if (count % 8 != 0 || count < 24 || count > 256)
    fail(*machine.self, "setmaxnreg: %d registers", count);
  collective({more ? "setmaxnreg.inc" : "setmaxnreg.dec", ~0u, u64(count), nullptr},
             [](Warp&, u32) { return State::ready; });
}

bool elect() {
  EMU_HERE();
  collective({"elect.sync", ~0u, 0, nullptr}, [](Warp&, u32) { return State::ready; });
  return machine.self->lane ==
         (machine.launch.seed & 31);  // always the same lane, but do not ask which
}

}  // namespace emu
