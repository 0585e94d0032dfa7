// SPDX-License-Identifier: Apache-2.0
// FlashAttention-2 forward: out = softmax(mask(scale q k^T)) v, and lse, for dense, padded and packed batches.
//
// Grid: one block a tile of block_m query rows of one head (schedule.cuh). The outer loop over query tiles is the grid;
// the loop inside runs over key tiles from the last to the first, so that masked tiles come at its two ends.
// Warps: each owns block_m / warps rows and all keys of a tile ("split-Q"), so a softmax row never leaves a quad of lanes.
// Registers: scores, probabilities and out stay in mma accumulators; probabilities become the A operand by renaming.
// Numerics: float32 accumulation; probabilities rounded to the storage type before P V; exponents in log2 units with the
// scale folded in; one division a row at the end. Rows without keys: out 0, lse -inf (softmax.cuh).
// Source: Dao 2023, FlashAttention-2.
#include "mask.cuh"
#include "params.cuh"
#include "schedule.cuh"
#include "seqlen.cuh"
#include "softmax.cuh"
#include "tile.cuh"
#include "types.cuh"

template <class C>
struct FwdSm80Smem {
  using Q = Tile<C::block_m, (C::head_dim > C::value_dim ? C::head_dim : C::value_dim)>;
  using K = Tile<C::block_n, C::head_dim>;
  using V = Tile<C::block_n, C::value_dim>;
  Q q;  // out at the end
  K k[C::stages];
  V v[C::stages];
};

// What a warp of fwd_sm80 holds in registers, and the steps that it repeats a key tile.
template <class C>
struct FwdSm80Warp {
  using Element = typename C::Element;
  using Smem = FwdSm80Smem<C>;
  static constexpr int kRows = C::block_m / C::warps;
  static constexpr int kMTiles = kRows / 16;
  static constexpr int kNTiles = C::block_n / 8;
  static constexpr int kOutTiles = C::value_dim / 8;
  static constexpr int kKSteps = C::head_dim / 16;
  static_assert(kRows % 16 == 0 && C::block_n % 16 == 0, "a warp's product is made of 16 x 16 blocks");
  static_assert(!C::q_in_registers || C::score_unroll >= kKSteps, "an array in registers needs constant indices");

  const FwdParams& p;
  const int lane;
  const int tile_row;  // first row of this warp in the block's tile
  const int warp_row;  // the same row, counted from the start of the sequence
  unsigned q[C::q_in_registers ? kKSteps : 1][kMTiles][4];
  float s[kMTiles][kNTiles][4];      // scores, then probabilities: rows x block_n
  float out[kMTiles][kOutTiles][4];  // rows x value_dim
  OnlineSoftmax<kMTiles> softmax;

  __device__ __forceinline__ FwdSm80Warp(const FwdParams& params, int first_row)
      : p(params), lane(threadIdx.x % 32), tile_row(threadIdx.x / 32 * kRows), warp_row(first_row + tile_row) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int ot = 0; ot < kOutTiles; ++ot) {
#pragma unroll
        for (int e = 0; e < 4; ++e) out[mt][ot][e] = 0.f;
      }
    }
  }

  __device__ __forceinline__ void load_q(const Smem& smem) {
    if constexpr (C::q_in_registers) {
#pragma unroll
      for (int step = 0; step < kKSteps; ++step) {
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          ptx::ldmatrix_x4(q[step][mt], smem.q.down_then_across(tile_row + 16 * mt, 16 * step, lane));
        }
      }
    }
  }

  // s = q k^T
  __device__ __forceinline__ void score(const Smem& smem, int stage) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[mt][nt][e] = 0.f;
      }
    }
#pragma unroll C::score_unroll
    for (int step = 0; step < kKSteps; ++step) {
      const int slot = C::q_in_registers ? step : 0;
      if constexpr (!C::q_in_registers) {
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          ptx::ldmatrix_x4(q[0][mt], smem.q.down_then_across(tile_row + 16 * mt, 16 * step, lane));
        }
      }
#pragma unroll
      for (int nt = 0; nt < kNTiles; nt += 2) {
        unsigned b[4];
        ptx::ldmatrix_x4(b, smem.k[stage].across_then_down(8 * nt, 16 * step, lane));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          Element::mma(s[mt][nt], q[slot][mt], b[0], b[1]);
          Element::mma(s[mt][nt + 1], q[slot][mt], b[2], b[3]);
        }
      }
    }
  }

  // Scale, softcap, ALiBi: s becomes scores in log2 units.
  __device__ __forceinline__ void modify_scores(int k_minus_q, float slope_log2, int first_key) {
    const float scale_log2 = p.scale * kLog2e;
    const float cap_log2 = p.softcap * kLog2e;
    const float scale_over_cap = p.softcap > 0.f ? p.scale / p.softcap : 0.f;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int row = warp_row + 16 * mt + 8 * (e / 2) + lane / 4;
          const int key = first_key + 8 * nt + 2 * (lane % 4) + e % 2;
          float x = s[mt][nt][e];
          x = p.softcap > 0.f ? cap_log2 * tanhf(x * scale_over_cap) : x * scale_log2;
          s[mt][nt][e] = x - slope_log2 * fabsf(static_cast<float>(row + k_minus_q - key));
        }
      }
    }
  }

  // out += p v
  __device__ __forceinline__ void accumulate(const Smem& smem, int stage) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; nt += 2) {
      unsigned a[kMTiles][4];
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[mt][i] = Element::pack(s[mt][nt + i / 2][2 * (i % 2)], s[mt][nt + i / 2][2 * (i % 2) + 1]);
        }
      }
#pragma unroll
      for (int ot = 0; ot < kOutTiles; ot += 2) {
        unsigned b[4];
        ptx::ldmatrix_x4_trans(b, smem.v[stage].down_then_across(8 * nt, 8 * ot, lane));
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
          Element::mma(out[mt][ot], a[mt], b[0], b[1]);
          Element::mma(out[mt][ot + 1], a[mt], b[2], b[3]);
        }
      }
    }
  }

  // Divides by the sum, writes lse, and leaves out (storage type) in the warp's own rows of smem.q.
  __device__ __forceinline__ void finish(Smem& smem, float* lse, int q_len, float sink_log2) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = 16 * mt + 8 * half + lane / 4;
        float factor, row_lse;
        softmax.finish(mt, half, sink_log2, factor, row_lse);
        if (lse != nullptr && lane % 4 == 0 && warp_row + row < q_len) lse[warp_row + row] = row_lse;
#pragma unroll
        for (int ot = 0; ot < kOutTiles; ++ot) {
          *reinterpret_cast<unsigned*>(&smem.q.data[tile_row + row][8 * ot + 2 * (lane % 4)]) =
              Element::pack(out[mt][ot][2 * half] * factor, out[mt][ot][2 * half + 1] * factor);
        }
      }
    }
  }

  // Stores the warp's rows of smem.q, coalesced, clipped to q_len rows and value_dim columns.
  __device__ __forceinline__ void store_out(const Smem& smem, unsigned short* dst, int q_len) const {
    using Vector = typename Bytes<C::copy_bytes>::type;
    constexpr int kPerCopy = C::copy_bytes / 2;
    constexpr int kChunks = C::value_dim / kPerCopy;
#pragma unroll 4
    for (int i = lane; i < kRows * kChunks; i += 32) {
      const int row = i / kChunks;
      const int col = i % kChunks * kPerCopy;
      if (warp_row + row < q_len && col < p.value_dim) {
        *reinterpret_cast<Vector*>(dst + (warp_row + row) * p.stride_out_row + col) =
            *reinterpret_cast<const Vector*>(&smem.q.data[tile_row + row][col]);
      }
    }
  }
};

// The loop over key tiles: leaves the warp's softmax state and unnormalised out.
template <class C>
__device__ __forceinline__ void attend(const FwdParams& p, const QueryTile& tile, const Sequence& seq,
                                       FwdSm80Smem<C>& smem, FwdSm80Warp<C>& warp) {
  using Smem = FwdSm80Smem<C>;
  const KeyInterval keys(p, seq);
  const int first_row = tile.m_block * C::block_m;
  const TileRange tiles(keys, first_row, min(first_row + C::block_m, seq.q_len) - 1, C::block_n);
  if (tiles.first >= tiles.last) return;

  const int kv_head = tile.q_head / p.group;
  const auto* q = static_cast<const unsigned short*>(p.q) + tile.q_head * p.stride_q_head +
                  sequence_offset(p.cu_seqlens_q, tile.batch, p.stride_q_batch, p.stride_q_row);
  const auto* k = static_cast<const unsigned short*>(p.k) + kv_head * p.stride_k_head +
                  sequence_offset(p.cu_seqlens_k, tile.batch, p.stride_k_batch, p.stride_k_row);
  const auto* v = static_cast<const unsigned short*>(p.v) + kv_head * p.stride_v_head +
                  sequence_offset(p.cu_seqlens_k, tile.batch, p.stride_v_batch, p.stride_v_row);
  TileCopy<C::copy_bytes, C::threads, typename Smem::Q> q_copy(q, first_row, p.stride_q_row, p.head_dim);
  TileCopy<C::copy_bytes, C::threads, typename Smem::K> k_copy(k, (tiles.last - 1) * C::block_n, p.stride_k_row,
                                                               p.head_dim);
  TileCopy<C::copy_bytes, C::threads, typename Smem::V> v_copy(v, (tiles.last - 1) * C::block_n, p.stride_v_row,
                                                               p.value_dim);
  const float scale_log2 = C::scores ? 1.f : p.scale * kLog2e;
  const float slope_log2 = C::scores && p.alibi_slopes != nullptr
                               ? p.alibi_slopes[tile.batch * p.stride_alibi_batch + tile.q_head] * kLog2e
                               : 0.f;

  // One key tile. With one stage, V(n) loads during the scores of tile n, and K(n - 1) during its softmax and P V; with
  // two, both load a whole tile ahead. Only the tile that is loaded first, which is masked, can lack rows.
  auto step = [&](auto masked, int n) {
    constexpr bool kMasked = decltype(masked)::value;
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // tile n has landed, and no warp reads the buffers that are filled next
    if constexpr (C::stages == 1) {
      v_copy.template copy<!kMasked>(smem.v[0], seq.k_len - n * C::block_n);
      v_copy.step_back();
      ptx::cp_async_commit_group();
    } else if (n > tiles.first) {
      k_copy.template copy<true>(smem.k[(n - 1) % C::stages], C::block_n);
      v_copy.template copy<true>(smem.v[(n - 1) % C::stages], C::block_n);
      k_copy.step_back();
      v_copy.step_back();
      ptx::cp_async_commit_group();
    }
    warp.score(smem, n % C::stages);
    if constexpr (C::stages == 1) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();
      if (n > tiles.first) k_copy.template copy<true>(smem.k[0], C::block_n);
      k_copy.step_back();
      ptx::cp_async_commit_group();
    }
    if constexpr (C::scores) warp.modify_scores(seq.k_len - seq.q_len, slope_log2, n * C::block_n);
    if constexpr (kMasked) mask_scores(warp.s, keys, warp.warp_row, n * C::block_n, warp.lane);
    warp.softmax.update(warp.s, warp.out, scale_log2);
    warp.accumulate(smem, n % C::stages);
  };

  const int last_rows = seq.k_len - (tiles.last - 1) * C::block_n;
  q_copy.template copy<false>(smem.q, seq.q_len - first_row);
  k_copy.template copy<false>(smem.k[(tiles.last - 1) % C::stages], last_rows);
  k_copy.step_back();
  if constexpr (C::stages == 2) {
    v_copy.template copy<false>(smem.v[(tiles.last - 1) % C::stages], last_rows);
    v_copy.step_back();
  }
  ptx::cp_async_commit_group();
  if constexpr (C::q_in_registers) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();
    warp.load_q(smem);
  }
  for (int n = tiles.last - 1; n >= tiles.first;) {
    if (tiles.full(n)) {
      const int end = max(tiles.first, tiles.full_first);
      for (; n >= end; --n) step(False{}, n);
    } else {
      step(True{}, n--);
    }
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
  FwdSm80Warp<C> warp(p, first_row);
  attend<C>(p, tile, seq, smem, warp);

  // Decoded anew: the offsets of out and lse would otherwise take registers through the loop, and spill.
  const QueryTile again = longest_first(ptx::opaque(blockIdx.x), p);
  const int q_len = sequence_length(p.cu_seqlens_q, again.batch, p.q_len);
  float* lse = p.lse == nullptr ? nullptr
                                : p.lse + again.q_head * p.stride_lse_head +
                                      sequence_offset(p.cu_seqlens_q, again.batch, p.stride_lse_batch, 1);
  warp.finish(smem, lse, q_len, p.sink != nullptr ? p.sink[again.q_head] * kLog2e : kEmptyMax);
  __syncwarp();
  auto* out = static_cast<unsigned short*>(p.out) + again.q_head * p.stride_out_head +
              sequence_offset(p.cu_seqlens_q, again.batch, p.stride_out_batch, p.stride_out_row);
  warp.store_out(smem, out, q_len);
}
