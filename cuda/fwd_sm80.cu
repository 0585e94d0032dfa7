// SPDX-License-Identifier: Apache-2.0
// FlashAttention-2 forward: out = softmax(mask(scale q k^T)) v, and lse, for dense, padded and
// packed batches. Source: Dao 2023, FlashAttention-2.
//
// Grid: one block a tile of block_m query rows of one head (schedule.cuh): the outer loop over
//   query tiles is the grid. The loop inside walks the key tiles from the last to the first, so
//   masked tiles come at its two ends.
// Warps: each owns block_m / warps rows and all keys of a tile ("split-Q"), so a softmax row never
//   leaves a quad of lanes. Where heads are wide (column_warps = 2), a pair of warps shares twice
//   as many rows, each scoring half of the keys and accumulating half of the columns: with 16 rows
//   a warp, reading fragments would keep shared memory busier than the tensor cores (H200,
//   2026-11-30, head_dim 256: 1.06 times the speed).
// Registers: scores, probabilities and out stay in mma accumulators; probabilities become the A
//   operand by renaming. They are the scarce thing: what the loop can do without is kept in shared
//   memory or computed again.
// Copies: cp.async, issued between the products that they run under (H200, 2026-11-30: 4 to 10 %
//   faster than in one burst).
// Numerics: float32 accumulation; probabilities rounded to the storage type before P V; exponents
//   in log2 units with the scale folded in; one division a row at the end. A row without keys has
//   out 0, lse -inf (softmax.cuh).
#include "mask.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "seqlen.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "types.cuh"

// Where a warp works; in shared memory, since registers are short in the loop over key tiles.
struct WarpTile {
  QueryTile query;
  Sequence seq;
  int first_keys;  // first key tile
};

// What the two warps that share rows tell each other; nothing where a warp has its rows for itself.
template <class C, int kColumnWarps>
struct PairSmem {
  // Of each half of the keys: the largest score of a row, at the end the sum.
  float row[kColumnWarps][C::block_m];
  Tile<C::block_m, C::block_n> p;  // probabilities
};
template <class C>
struct PairSmem<C, 1> {};

template <class C>
struct FwdSm80Smem {
  using Q = Tile<C::block_m, (C::head_dim > C::value_dim ? C::head_dim : C::value_dim)>;
  using K = Tile<C::block_n, C::head_dim>;
  using V = Tile<C::block_n, C::value_dim>;
  Q q;  // out at the end
  K k[C::stages];
  V v[C::stages];
  PairSmem<C, C::column_warps> pair;
  WarpTile warp[C::warps];
};

// What a warp of fwd_sm80 holds in registers, and the steps that it repeats a key tile.
template <class C>
struct FwdSm80Warp {
  using Element = typename C::Element;
  using Smem = FwdSm80Smem<C>;
  static constexpr int kParts = C::column_warps;
  static constexpr int kRows = C::block_m / (C::warps / kParts);
  static constexpr int kKeys = C::block_n / kParts;    // keys of a tile that this warp scores
  static constexpr int kCols = C::value_dim / kParts;  // columns of out that it accumulates
  static constexpr int kMTiles = kRows / 16;
  static constexpr int kNTiles = kKeys / 8;
  static constexpr int kOutTiles = kCols / 8;
  static constexpr int kKSteps = C::head_dim / 16;
  static constexpr int kRing = C::fragments_ahead + 1;
  // Steps of q in registers: the one in use, and those that fragments are read ahead of.
  static constexpr int kQSlots =
      C::q_in_registers ? kKSteps : 1 + ceil_div(C::fragments_ahead, kNTiles / 2);
  static_assert(kRows % 16 == 0 && kKeys % 16 == 0 && kCols % 16 == 0,
                "a warp's product is made of 16 x 16 blocks");

  const FwdParams& p;
  WarpTile& at;
  unsigned q[kQSlots][kMTiles][4];
  float s[kMTiles][kNTiles][4];      // scores, then probabilities: kRows x kKeys
  float out[kMTiles][kOutTiles][4];  // kRows x kCols
  OnlineSoftmax<kMTiles> softmax;

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int part() {
    return kParts == 1 ? 0 : threadIdx.x / 32 % kParts;
  }
  // Where this warp's block starts: row, key and column in the tiles; row in the sequence.
  static __device__ __forceinline__ int tile_row() { return threadIdx.x / (32 * kParts) * kRows; }
  static __device__ __forceinline__ int first_key() { return part() * kKeys; }
  static __device__ __forceinline__ int first_col() { return part() * kCols; }
  __device__ __forceinline__ int warp_row() const {
    return at.query.m_block * C::block_m + tile_row();
  }
  // The first key of the tile before which `left` more are left.
  __device__ __forceinline__ int tile_key(int left) const {
    return (at.first_keys + left) * C::block_n;
  }

  __device__ __forceinline__ FwdSm80Warp(const FwdParams& params, WarpTile& warp_tile)
      : p(params), at(warp_tile) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int ot = 0; ot < kOutTiles; ++ot) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[mt][ot][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void load_q(const Smem& smem, int step) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
      ptx::ldmatrix_x4(q[step % kQSlots][mt],
                       smem.q.down_then_across(tile_row() + 16 * mt, 16 * step, lane()));
    }
  }

  // s = q k^T. `beside(i)` is called with block i of kScoreBlocks, for copies to run under the
  // products.
  static constexpr int kScoreBlocks = kKSteps * kNTiles / 2;
  template <class Beside>
  __device__ __forceinline__ void score(const Smem& smem, int stage, const Beside& beside) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[mt][nt][e] = 0.f;
      }
    }
    constexpr int kPairs = kNTiles / 2;
    unsigned b[kRing][4];  // blocks of 16 keys x 16 columns
    auto load = [&](int i) {
      if (!C::q_in_registers && i % kPairs == 0) load_q(smem, i / kPairs);
      ptx::ldmatrix_x4(b[i % kRing], smem.k[stage].across_then_down(first_key() + i % kPairs * 16,
                                                                    i / kPairs * 16, lane()));
    };
#pragma unroll
    for (int i = 0; i < C::fragments_ahead; ++i) load(i);
#pragma unroll
    for (int step = 0; step < kKSteps; ++step) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int i = step * kPairs + pair;
        if (i + C::fragments_ahead < kScoreBlocks) load(i + C::fragments_ahead);
        beside(i);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          Element::mma(s[mt][2 * pair], q[step % kQSlots][mt], b[i % kRing][0], b[i % kRing][1]);
          Element::mma(s[mt][2 * pair + 1], q[step % kQSlots][mt], b[i % kRing][2],
                       b[i % kRing][3]);
        }
      }
    }
  }

  // The largest score of each row, over the pair of warps that share it.
  __device__ __forceinline__ void share_max(Smem& smem, float (&row_max)[kMTiles][2]) {
    if constexpr (kParts == 2)
      exchange(smem, row_max, [](float a, float b) { return fmaxf(a, b); });
  }

  // x = combine(x of this warp, x of the other one), a number a row.
  template <class Combine>
  __device__ __forceinline__ void exchange(Smem& smem, float (&x)[kMTiles][2], Combine combine) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      if (lane() % 4 == 0) smem.pair.row[part()][tile_row() + 8 * i + lane() / 4] = x[i / 2][i % 2];
    }
    sync_pair();
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      x[i / 2][i % 2] =
          combine(x[i / 2][i % 2], smem.pair.row[1 - part()][tile_row() + 8 * i + lane() / 4]);
    }
  }

  static __device__ __forceinline__ void sync_pair() { ptx::bar_sync(1 + threadIdx.x / 64, 64); }

  // The A operand of rows mt and 16 keys of this warp: its probabilities, in accumulator layout,
  // are only renamed.
  __device__ __forceinline__ void pack_p(unsigned (&a)[4], int mt, int step) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = &s[mt][2 * step + i / 2][2 * (i % 2)];
      a[i] = Element::pack(pair[0], pair[1]);
    }
  }

  // out += p v. The probabilities of the other warp of a pair come through shared memory, under the
  // products of the own.
  template <class Beside>
  __device__ __forceinline__ void accumulate(Smem& smem, int stage, const Beside& beside) {
    if constexpr (kParts == 2) store_p(smem);
    multiply(
        smem, stage, first_key(), [&](unsigned (&a)[4], int mt, int step) { pack_p(a, mt, step); },
        beside);
    if constexpr (kParts == 2) {
      sync_pair();
      const int key = kKeys - first_key();
      auto load_a = [&](unsigned (&a)[4], int mt, int step) {
        ptx::ldmatrix_x4(
            a, smem.pair.p.down_then_across(tile_row() + 16 * mt, key + 16 * step, lane()));
      };
      multiply(smem, stage, key, load_a, [](int) {});
    }
  }

  __device__ __forceinline__ void store_p(Smem& smem) const {
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        unsigned a[4];
        pack_p(a, mt, step);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = tile_row() + 16 * mt + 8 * (i % 2) + lane() / 4;
          const int col = first_key() + 16 * step + 8 * (i / 2) + 2 * (lane() % 4);
          *reinterpret_cast<unsigned*>(&smem.pair.p.data[row][col]) = a[i];
        }
      }
    }
  }

  // out += p v over the kKeys keys from `key`; load_a(a, mt, step) gives p for 16 of them. `beside`
  // as in score().
  static constexpr int kValueBlocks = kKeys / 16 * kOutTiles / 2;
  template <class LoadA, class Beside>
  __device__ __forceinline__ void multiply(const Smem& smem, int stage, int key,
                                           const LoadA& load_a, const Beside& beside) {
    constexpr int kPairs = kOutTiles / 2;
    constexpr int kSteps = kKeys / 16;
    unsigned b[kRing][4];  // blocks of 16 keys x 16 columns
    auto load = [&](int i) {
      ptx::ldmatrix_x4_trans(b[i % kRing],
                             smem.v[stage].down_then_across(key + i / kPairs * 16,
                                                            first_col() + i % kPairs * 16, lane()));
    };
#pragma unroll
    for (int i = 0; i < C::fragments_ahead; ++i) load(i);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      unsigned a[kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) load_a(a[mt], mt, step);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int i = step * kPairs + pair;
        if (i + C::fragments_ahead < kValueBlocks) load(i + C::fragments_ahead);
        beside(i);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          Element::mma(out[mt][2 * pair], a[mt], b[i % kRing][0], b[i % kRing][1]);
          Element::mma(out[mt][2 * pair + 1], a[mt], b[i % kRing][2], b[i % kRing][3]);
        }
      }
    }
  }

  // Divides by the sum, writes lse, and leaves out (storage type) in smem.q, each warp its own
  // block of it.
  __device__ __forceinline__ void finish(Smem& smem, float* lse, int q_len, float sink_log2) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i)
      softmax.sum[i / 2][i % 2] = quad_sum(softmax.sum[i / 2][i % 2]);
    if constexpr (kParts == 2) exchange(smem, softmax.sum, [](float a, float b) { return a + b; });
    float lane_lse = 0.f;  // of row lane % 4 among those of its quad
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * mt + 8 * half + lane() / 4;
        const FinishedRow end = softmax.finish(mt, half, sink_log2);
        const float factor = end.factor(), row_lse = end.lse();
        if (lane() % 4 == 2 * mt + half) lane_lse = row_lse;
#pragma unroll
        for (int ot = 0; ot < kOutTiles; ++ot) {
          const float* pair = &out[mt][ot][2 * half];
          // Not pair * 0: a NaN in v, of keys that other rows see, may have reached these sums too.
          *reinterpret_cast<unsigned*>(
              &smem.q.data[tile_row() + row][first_col() + 8 * ot + 2 * (lane() % 4)]) =
              factor == 0.f ? 0u : Element::pack(pair[0] * factor, pair[1] * factor);
        }
      }
    }
    static_assert(kMTiles <= 2, "a lane stores lse of one row");
    const int row = warp_row() + lane() % 4 * 8 + lane() / 4;
    if (lse != nullptr && part() == 0 && lane() % 4 < 2 * kMTiles && row < q_len)
      lse[row] = lane_lse;
  }

  // Stores the warp's block of smem.q, coalesced, clipped to q_len rows and value_dim columns.
  __device__ __forceinline__ void store_out(const Smem& smem, unsigned short* dst,
                                            int q_len) const {
    if constexpr (!C::narrow) {
      store_as<uint4>(smem, dst, q_len);
    } else if (p.copy_bytes == 4) {
      store_as<unsigned>(smem, dst, q_len);
    } else {
      store_as<unsigned short>(smem, dst, q_len);
    }
  }

  template <class Vector>
  __device__ __forceinline__ void store_as(const Smem& smem, unsigned short* dst, int q_len) const {
    constexpr int kPerCopy = sizeof(Vector) / 2;
    constexpr int kLanes = kCols / kPerCopy < 32 ? kCols / kPerCopy : 32;  // of a row
    constexpr int kRowStep = 32 / kLanes;
    const int row = lane() / kLanes;
    if (32 % kLanes != 0 && row >= kRowStep) return;
    const int rows = min(kRows, q_len - warp_row()) - row;
    const int last_col = min(first_col() + kCols, p.value_dim);
    for (int col = first_col() + lane() % kLanes * kPerCopy; col < last_col;
         col += kLanes * kPerCopy) {
      unsigned short* to = dst + (warp_row() + row) * p.stride_out_row + col;
#pragma unroll 4
      for (int r = 0; r < kRows; r += kRowStep, to += kRowStep * p.stride_out_row) {
        if (r < rows) {
          *reinterpret_cast<Vector*>(to) =
              *reinterpret_cast<const Vector*>(&smem.q.data[tile_row() + row + r][col]);
        }
      }
    }
  }
};

// The loop over key tiles: leaves the warp's softmax state and unnormalised out.
template <class C>
__device__ __forceinline__ void attend(const FwdParams& p, const QueryTile& tile,
                                       const Sequence& seq, FwdSm80Smem<C>& smem,
                                       FwdSm80Warp<C>& warp) {
  using Smem = FwdSm80Smem<C>;
  using Warp = FwdSm80Warp<C>;
  using QCopy = TileCopy<C::narrow, C::threads, typename Smem::Q>;
  using KCopy = TileCopy<C::narrow, C::threads, typename Smem::K>;
  using VCopy = TileCopy<C::narrow, C::threads, typename Smem::V>;
  const KeyInterval keys(p, seq);
  const int first_row = tile.m_block * C::block_m;
  const TileRange tiles(keys, first_row, min(first_row + C::block_m, seq.q_len) - 1, C::block_n);
  if (tiles.first >= tiles.last) return;

  const int kv_head = static_cast<unsigned>(tile.q_head) / static_cast<unsigned>(p.group);
  const auto* q = static_cast<const unsigned short*>(p.q) + tile.q_head * p.stride_q_head +
                  sequence_offset(p.cu_seqlens_q, tile.batch, p.stride_q_batch, p.stride_q_row);
  const auto* k = static_cast<const unsigned short*>(p.k) + kv_head * p.stride_k_head +
                  sequence_offset(p.cu_seqlens_k, tile.batch, p.stride_k_batch, p.stride_k_row);
  const auto* v = static_cast<const unsigned short*>(p.v) + kv_head * p.stride_v_head +
                  sequence_offset(p.cu_seqlens_k, tile.batch, p.stride_v_batch, p.stride_v_row);
  QCopy q_copy(q, first_row, p.stride_q_row, p.head_dim, p.copy_bytes);
  const int last_key = (tiles.last - 1) * C::block_n;
  KCopy k_copy(k, last_key, p.stride_k_row, p.head_dim, p.copy_bytes);
  VCopy v_copy(v, last_key, p.stride_v_row, p.value_dim, p.copy_bytes);
  const float slope_log2 =
      C::scores && p.alibi_slopes != nullptr
          ? to_log2(p.alibi_slopes[tile.batch * p.stride_alibi_batch + tile.q_head])
          : 0.f;

  // One key tile, n, before which `left` more are left. With one stage, V(n) loads under the scores
  // of tile n and K(n - 1) under its P V; with two, K(n - 1) and V(n - 1) do. Only the tile that is
  // loaded first, which is masked, can lack rows.
  auto step = [&](auto masked, int left) {
    constexpr bool kMasked = decltype(masked)::value;
    const int stage = left % C::stages;
    const bool more = left > 0;
    const int rows = kMasked ? warp.at.seq.k_len - warp.tile_key(left) : C::block_n;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // the copies have landed, and no warp reads the buffers that are filled next
    warp.score(smem, stage, [&](int i) {
      if constexpr (C::stages == 1) {
        spread<VCopy::kParts, Warp::kScoreBlocks, C::copy_spread>(
            i, [&](int part) { v_copy.template copy_part<!kMasked>(smem.v[0], rows, part); });
      } else if (more) {
        spread<KCopy::kParts, Warp::kScoreBlocks, C::copy_spread>(i, [&](int part) {
          k_copy.template copy_part<true>(smem.k[1 - stage], C::block_n, part);
        });
      }
    });
    if constexpr (C::scores) {
      const Sequence seq = warp.at.seq;
      modify_scores(warp.s, p, slope_log2, seq.k_len - seq.q_len, warp.warp_row(),
                    warp.tile_key(left) + warp.first_key(), warp.lane());
    }
    if constexpr (kMasked) {
      mask_scores<true>(warp.s, KeyInterval(p, warp.at.seq), warp.warp_row(),
                        warp.tile_key(left) + warp.first_key(), warp.lane());
    }
    warp.softmax.template update<C::vote_rescale>(
        warp.s, warp.out, Scaled{C::scores ? 1.f : p.scale_log2},
        [&](auto& row_max) { warp.share_max(smem, row_max); });
    if constexpr (C::stages == 1) {
      ptx::cp_async_commit_group();
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // V(n) has landed, and every warp is done with K(n)
    }
    warp.accumulate(smem, stage, [&](int i) {
      if (more) {
        if constexpr (C::stages == 1) {
          spread<KCopy::kParts, Warp::kValueBlocks, C::copy_spread>(
              i, [&](int part) { k_copy.template copy_part<true>(smem.k[0], C::block_n, part); });
        } else {
          spread<VCopy::kParts, Warp::kValueBlocks, C::copy_spread>(i, [&](int part) {
            v_copy.template copy_part<true>(smem.v[1 - stage], C::block_n, part);
          });
        }
      }
    });
    ptx::cp_async_commit_group();
  };

  int left = tiles.last - 1 - tiles.first;
  const int last_rows = seq.k_len - (tiles.last - 1) * C::block_n;
  q_copy.template copy<false>(smem.q, seq.q_len - first_row);
  k_copy.template copy<false>(smem.k[left % C::stages], last_rows);
  if constexpr (C::stages == 2) v_copy.template copy<false>(smem.v[left % C::stages], last_rows);
  ptx::cp_async_commit_group();
  if (threadIdx.x % 32 == 0) warp.at.first_keys = tiles.first;
  __syncwarp();
  if constexpr (C::q_in_registers) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < Warp::kKSteps; ++step) warp.load_q(smem, step);
  }
  // Masked tiles at the end of the keys, tiles that every row sees, masked tiles at the start.
  for (int stop = max(0, tiles.full_last - tiles.first);; stop = 0) {
    for (; left >= stop; --left) step(True{}, left);
    if (left < 0) break;
    for (const int end = max(0, tiles.full_first - tiles.first); left >= end; --left)
      step(False{}, left);
  }
}

template <class C>
__device__ __forceinline__ void fwd_sm80(const FwdParams& p) {
  extern __shared__ __align__(128) unsigned char smem_bytes[];
  FwdSm80Smem<C>& smem = *reinterpret_cast<FwdSm80Smem<C>*>(smem_bytes);

  const QueryTile tile = longest_first(blockIdx.x, p);
  const Sequence seq = sequence(p, tile.batch);
  const int first_row = tile.m_block * C::block_m;
  if (first_row >= seq.q_len) return;
  WarpTile& at = smem.warp[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) at = {tile, seq};
  __syncwarp();

  FwdSm80Warp<C> warp(p, at);
  attend<C>(p, tile, seq, smem, warp);

  const int batch = at.query.batch;
  const int q_head = at.query.q_head;
  const int q_len = at.seq.q_len;
  float* lse = p.lse == nullptr ? nullptr
                                : p.lse + q_head * p.stride_lse_head +
                                      sequence_offset(p.cu_seqlens_q, batch, p.stride_lse_batch, 1);
  warp.finish(smem, lse, q_len, p.sink != nullptr ? to_log2(p.sink[q_head]) : kEmptyMax);
  __syncwarp();
  auto* out = static_cast<unsigned short*>(p.out) + q_head * p.stride_out_head +
              sequence_offset(p.cu_seqlens_q, batch, p.stride_out_batch, p.stride_out_row);
  warp.store_out(smem, out, q_len);
}
