// SPDX-License-Identifier: Apache-2.0
// What a warp of decode_split computes: the scores of 16 tokens, their probabilities, and their sum
// of values, for its rows. Operands are swapped, so that the few rows sit in the N = 8 of
// mma.m16n8k16: S^T (tokens x rows) = K Q^T and O^T (dimensions x rows) = V^T P^T. K and V^T are
// the A operand straight from ldmatrix; P^T is the B operand after a transpose of 8 x 8 blocks.
//
// Lane (r = lane / 4, t = lane % 4) holds of S^T the tokens r and r + 8 of a block, of O^T the
// dimensions r and r + 8 of a step, both for rows 2t and 2t + 1 of a tile of 8 rows. 8-bit caches
// are widened to halves in registers; dimensions are permuted so that no byte has to move.
#pragma once

#include "decode_mask.cuh"
#include "decode_rows.cuh"
#include "scores.cuh"
#include "softmax.cuh"

template <class C>
struct DecodeWarp {
  using Element = typename C::Element;
  using Tile = KvTile<C>;
  using Scores = DecodeScores<C>;
  static constexpr int kTiles = C::row_tiles;
  static constexpr int kBlocks = C::unit / 16;
  static constexpr int kSteps = C::head_dim / 16;
  static constexpr int kTogether = Tile::kTogether;

  float out[kTiles * C::heads][kSteps][4];  // unnormalised; of a head, what is in its rows counts
  float row_max[kTiles][2];                 // log2 units, of the rows 2t and 2t + 1
  float row_sum[kTiles][2];                 // of this lane's tokens
  Query<C> query;
  int active;              // tiles that hold rows of the part
  int seen_from, seen_to;  // keys of this interval are seen by every row

  // The dimension of a step that is row m of O^T.
  static __device__ __forceinline__ int out_dim(int m) {
    return Tile::kWide || C::xmajor ? m : m % 8 * 2 + m / 8;
  }
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // ---- A part begins ----

  __device__ __forceinline__ void begin(const DecodeSplitParams& p, const RowBlock<C>& rows) {
#pragma unroll
    for (int i = 0; i < 4 * kSteps * kTiles * C::heads; ++i) {
      out[i / (4 * kSteps)][i / 4 % kSteps][i % 4] = 0.f;
    }
    for (auto& max : row_max) max[0] = max[1] = kEmptyMax;
    for (auto& sum : row_sum) sum[0] = sum[1] = 0.f;
    active = ceil_div(rows.end(), 8);
    if constexpr (!Query<C>::kLate) query.begin(p);
    rows.interval(p, seen_from, seen_to);
  }

  // ---- A unit ----

  // Attends to the tokens of one unit: shared addresses of its keys and values, and staged q.
  __device__ __forceinline__ void attend(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                         unsigned keys, unsigned values,
                                         const unsigned short* staged, int first_key) {
    constexpr int kTwo = kTiles < 2 ? 1 : 2;
    if (kTiles > 2 && active > 2) {
      attend_tiles<kTiles>(p, rows, keys, values, staged, first_key);
    } else if (kTiles > 1 && active > 1) {
      attend_tiles<kTwo>(p, rows, keys, values, staged, first_key);
    } else {
      attend_tiles<1>(p, rows, keys, values, staged, first_key);
    }
  }

  // What concerns the head whose rows 2t and 2t + 1 are.
  static __device__ __forceinline__ float of_own_head(const float (&x)[C::heads]) {
    return C::heads > 1 && lane() % 4 >= 2 ? x[C::heads - 1] : x[0];
  }

 private:
  // For the first kActive tiles: a constant, since branches would keep loads and products apart.
  template <int kActive>
  __device__ __forceinline__ void attend_tiles(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                               unsigned keys, unsigned values,
                                               const unsigned short* staged, int first_key) {
    float s[kActive][kBlocks][4];
    score(s, keys + Tile::key_lane(lane()), ptx::shared_address(staged));
    if constexpr (C::features) {
      modify(p, rows, s, staged, first_key);
    } else {
      scale_scores(s, staged);
    }
    if (first_key < seen_from || first_key + C::unit > seen_to) Scores::mask(p, rows, s, first_key);
    raise_max(s);
    unsigned pt[kActive][kBlocks][2];
    exponentiate(s, pt);
    accumulate(pt, values + Tile::value_lane(lane()));
  }

  // S^T = K Q^T: of each KV head with all rows, of which those of other heads are dropped.
  template <int kActive>
  __device__ __forceinline__ void score(float (&s)[kActive][kBlocks][4], unsigned keys,
                                        unsigned q_shared) const {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      if constexpr (Query<C>::kRegisters) {
        float acc[kActive * C::heads][2][4] = {};  // two chains: half the latency
#pragma unroll
        for (int j = 0; j < kSteps / kTogether * C::heads; ++j) {
          const int step = j / C::heads * kTogether, head = j % C::heads;
          unsigned a[kTogether][4];
          Tile::load_keys(a, Tile::key_address(keys, head, n, step / kTogether));
#pragma unroll
          for (int i = 0; i < kTogether * kActive; ++i) {
            const int nt = i / kTogether, at = step + i % kTogether;
            const unsigned (&q)[2] = query.q[nt][at];
            Element::mma(acc[nt * C::heads + head][at % 2], a[i % kTogether], q[0], q[1]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4 * kActive; ++i) {
          float of[C::heads];
#pragma unroll
          for (int h = 0; h < C::heads; ++h) {
            of[h] = acc[i / 4 * C::heads + h][0][i % 4] + acc[i / 4 * C::heads + h][1][i % 4];
          }
          s[i / 4][n][i % 4] = of_own_head(of);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4 * kActive; ++i) s[i / 4][n][i % 4] = 0.f;
        // Of all steps at once ptxas would hoist the loads, and spill.
        constexpr int kUnroll = Tile::kWide || kActive > 2 ? 1 : kSteps / 2;
#pragma unroll kUnroll
        for (int step = 0; step < kSteps; step += 2) {
          unsigned a[2 / kTogether][kTogether][4];
#pragma unroll
          for (int i = 0; i < 2 / kTogether; ++i) {
            Tile::load_keys(a[i], Tile::key_address(keys, 0, n, step / kTogether + i));
          }
#pragma unroll
          for (int nt = 0; nt < kActive; ++nt) {
            unsigned b[4];  // two steps of rows 8 * nt to + 8
            ptx::ldmatrix_x4(b, q_shared + (8 * nt * Query<C>::kStride + 16 * step) * 2 + q_lane());
            Element::mma(s[nt][n], a[0][0], b[0], b[1]);
            Element::mma(s[nt][n], a[1 / kTogether][1 % kTogether], b[2], b[3]);
          }
        }
      }
    }
  }
  static __device__ __forceinline__ int q_lane() {
    return (lane() % 8 * Query<C>::kStride + lane() / 8 * 8) * 2;
  }

  template <int kActive>
  __device__ __forceinline__ void scale_scores(float (&s)[kActive][kBlocks][4],
                                               const unsigned short* staged) const {
#pragma unroll
    for (int nt = 0; nt < kActive; ++nt) {
      const float scale[2] = {query.scale_of(staged, nt, 0), query.scale_of(staged, nt, 1)};
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) s[nt][i / 4][i % 4] *= scale[i % 2];
    }
  }

  // Scale, softcap, ALiBi.
  template <int kActive>
  __device__ __forceinline__ void modify(const DecodeSplitParams& p, const RowBlock<C>& rows,
                                         float (&s)[kActive][kBlocks][4],
                                         const unsigned short* staged, int first_key) const {
    scale_scores(s, staged);
    if (p.softcap_log2 > 0.f) {
      const SoftCap capped(p.softcap_log2, 1.f);
#pragma unroll
      for (int i = 0; i < 4 * kActive * kBlocks; ++i) {
        float& x = s[i / (4 * kBlocks)][i / 4 % kBlocks][i % 4];
        x = capped(x);
      }
    }
    if (p.alibi_slopes != nullptr) {
#pragma unroll
      for (int i = 0; i < 2 * kActive; ++i) {
        const int nt = i / 2, row = Scores::row_of(nt, i % 2), of_query = rows.query(p, row);
        if (!rows.exists(row)) continue;
        const float slope = rows.slope(p, row, of_query);
#pragma unroll
        for (int j = 0; j < 2 * kBlocks; ++j) {
          const int e = 2 * (j % 2) + i % 2;
          const int distance = of_query + rows.shift - Scores::key_of(first_key, j / 2, e);
          float& x = s[nt][j / 2][e];
          x = fmaf(-slope, fabsf(static_cast<float>(distance)), x);
        }
      }
    }
  }

  // The maximum moves only when a score exceeds it by 2^kSlack: probabilities of up to that are as
  // exact as those up to 1, and mostly a vote is all that this costs.
  static constexpr float kSlack = 8.f;
  template <int kActive>
  __device__ __forceinline__ void raise_max(const float (&s)[kActive][kBlocks][4]) {
    float high[kActive][2];
    bool higher = false;
#pragma unroll
    for (int i = 0; i < 2 * kActive; ++i) {
      float& x = high[i / 2][i % 2];
      x = fmaxf(s[i / 2][0][i % 2], s[i / 2][0][i % 2 + 2]);
#pragma unroll
      for (int n = 1; n < kBlocks; ++n) {
        x = fmaxf(x, fmaxf(s[i / 2][n][i % 2], s[i / 2][n][i % 2 + 2]));
      }
      higher |= x > row_max[i / 2][i % 2] + kSlack;
    }
    if (!__any_sync(0xffffffffu, higher)) return;
#pragma unroll
    for (int nt = 0; nt < kActive; ++nt) {
      float alpha[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float old_max = row_max[nt][e];
        row_max[nt][e] = fmaxf(old_max, over_tokens(high[nt][e]));
        alpha[e] = ptx::ex2_approx(old_max - finite_max(row_max[nt][e]));
        row_sum[nt][e] *= alpha[e];
      }
#pragma unroll
      for (int i = 0; i < 4 * kSteps * C::heads; ++i) {
        out[nt * C::heads + i / (4 * kSteps)][i / 4 % kSteps][i % 4] *= alpha[i % 2];
      }
    }
  }
  // The largest over the 8 lanes that hold tokens of the same rows.
  static __device__ __forceinline__ float over_tokens(float x) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
    }
    return x;
  }

  // Probabilities, which join the sum, as the B operand of V^T P^T.
  template <int kActive>
  __device__ __forceinline__ void exponentiate(const float (&s)[kActive][kBlocks][4],
                                               unsigned (&pt)[kActive][kBlocks][2]) {
#pragma unroll
    for (int nt = 0; nt < kActive; ++nt) {
      const float used[2] = {finite_max(row_max[nt][0]), finite_max(row_max[nt][1])};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float a = ptx::ex2_approx(s[nt][n][2 * half] - used[0]);
          const float b = ptx::ex2_approx(s[nt][n][2 * half + 1] - used[1]);
          row_sum[nt][0] += a;
          row_sum[nt][1] += b;
          pt[nt][n][half] = ptx::movmatrix_trans(Element::pack(a, b));
        }
      }
    }
  }

  // O^T += V^T P^T.
  template <int kActive>
  __device__ __forceinline__ void accumulate(const unsigned (&pt)[kActive][kBlocks][2],
                                             unsigned values) {
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
      for (int step = 0; step < kSteps; step += kTogether) {
        // Never so: an end of a basic block, over which ptxas does not hoist loads until it spills.
        if (!Query<C>::kRegisters && step % kApart == 0 && active == 0) return;
#pragma unroll
        for (int head = 0; head < C::heads; ++head) {
          unsigned a[kTogether][4];
          Tile::load_values(a, Tile::value_address(values, head, n, step / kTogether));
#pragma unroll
          for (int i = 0; i < kTogether * kActive; ++i) {
            const int nt = i % kActive, at = step + i / kActive;
            Element::mma(out[nt * C::heads + head][at], a[i / kActive], pt[nt][n][0], pt[nt][n][1]);
          }
        }
      }
    }
  }
  static constexpr int kApart = 4;
};
