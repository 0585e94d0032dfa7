// SPDX-License-Identifier: Apache-2.0
// New keys and values into the slots of a paged cache, and what else moves rows and blocks about:
// kv_write, rotary, sequences, copy_blocks.
//
// kv_write. Where a token goes is its slot, block * page + offset: given in slot_mapping, or, where
// sequences grow, behind the seqused_k tokens that each has, in the pages of its row of
// block_table. Where an element of a slot lies is said by strides, so that no layout has code of
// its own: 16 bytes of a key, a chunk, lie side by side in all of them, and so do those of a value
// unless stride_v_cache_dim says otherwise (x-major: the page).
//
// Grid: (blocks of tokens) x (blocks of shares), shares fastest. A share is a chunk of a head's
// keys or values: a thread has one, and takes it from every token_lanes-th token of its block. The
// slots of the tokens are looked up first, a thread each. Neighbouring threads have neighbouring
// chunks of a row, or, for an x-major cache, neighbouring tokens, which lie side by side there.
// Tokens without a slot, and slots that the cache lacks, are skipped.
//
// Numerics: elements of the cache's own type are copied. Others are rounded to nearest, ties to
// even, of element / scale. Pairs are turned in float32, each product and sum rounded, and rounded
// to the type of k: the bits of a rotation before the call. No approximate instruction.
#include "params_cache.cuh"
#include "piece.cuh"

// ---- Tokens ----

// A token of k, v or x, and where it comes from.
struct NewToken {
  int sequence;   // -1: it belongs to none
  int index;      // among the new tokens of its sequence
  long long row;  // of its sequence, which a batch stride leads to; packed: among all tokens
};

// The last sequence that starts at or before a token.
__device__ __forceinline__ int sequence_of(const int* cu_seqlens, int batch, long long token) {
  int low = 0, high = batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (cu_seqlens[middle] <= token ? low : high) = middle;
  }
  return low;
}

template <class Params>
__device__ __forceinline__ NewToken new_token(const Params& p, long long token) {
  if (p.cu_seqlens_new == nullptr) {
    const int sequence = static_cast<int>(token / p.new_len);
    const int index = static_cast<int>(token - sequence * static_cast<long long>(p.new_len));
    return {sequence, index, index};
  }
  const int sequence = sequence_of(p.cu_seqlens_new, p.batch, token);
  const bool inside = p.cu_seqlens_new[sequence] <= token && token < p.cu_seqlens_new[sequence + 1];
  return {inside ? sequence : -1, static_cast<int>(token - p.cu_seqlens_new[sequence]), token};
}

// ---- Rotation ----

// Column d, which holds x, of a row whose first rotary_dim columns are turned in pairs by the
// angles of a position.
template <class Element, class Params>
__device__ __forceinline__ float turned(const Params& p, const Element* row, int position, int d,
                                        float x) {
  if (d >= p.rotary_dim) return x;
  const int half = p.rotary_dim / 2;
  const bool second = p.interleaved ? d % 2 : d >= half;
  const int angle = p.interleaved ? d / 2 : d - second * half;
  const int other = p.interleaved ? d ^ 1 : second ? d - half : d + half;
  // A position outside the table would read what lies behind it: cap it.
  const long long at = min(position, p.positions - 1) * p.stride_cos_row + angle;
  auto entry = [&](const void* table) {
    return p.float_angles ? static_cast<const float*>(table)[at]
                          : to_float(static_cast<const Element*>(table)[at]);
  };
  const float cos = entry(p.cos), sin = entry(p.sin);
  const float y = to_float(row[other]);
  return second ? __fadd_rn(__fmul_rn(y, sin), __fmul_rn(x, cos))
                : __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
}

// Turns a piece of a row, from column `first`, rounded to its type.
template <class Element, int kCount, class Params>
__device__ __forceinline__ void turn(Piece<Element, kCount>& piece, const Params& p,
                                     const Element* row, int position, int first, int count) {
  float x[kCount];
  piece.to_floats(x);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < count) x[i] = turned(p, row, position, first + i, x[i]);
  }
  piece.from_floats(x);
}

// ---- kv_write ----

// Where a token goes, and where it comes from.
struct Slot {
  long long block;  // -1: the token is not stored
  int offset;       // in the block
  int position;     // in its sequence, where tokens are appended
  long long row;    // of k and v, as NewToken::row
  int batch;        // its sequence; 0 where slots are given
};

template <class C>
struct KvWriteSmem {
  Slot slots[C::max_tokens];
};

__device__ __forceinline__ Slot find_slot(const KvWriteParams& p, long long token) {
  Slot slot{-1, 0, 0, token, 0};
  if (token >= p.tokens) return slot;
  if (p.slot_mapping != nullptr) {
    const long long at = p.slot_mapping[token];
    if (at < 0) return slot;
    slot.block = at / p.page;
    slot.offset = static_cast<int>(at - slot.block * p.page);
  } else {
    const NewToken from = new_token(p, token);
    if (from.sequence < 0) return slot;
    const int used = p.seqused_k != nullptr ? max(0, p.seqused_k[from.sequence]) : 0;
    slot.row = from.row;
    slot.batch = from.sequence;
    const long long position = static_cast<long long>(used) + from.index;
    const long long column = position / p.page;
    if (column >= p.max_blocks) return slot;
    slot.position = static_cast<int>(position);
    slot.offset = static_cast<int>(position - column * p.page);
    slot.block = p.block_table != nullptr
                     ? p.block_table[from.sequence * p.stride_table_batch + column]
                     : from.sequence;
  }
  if (slot.block < 0 || slot.block >= p.blocks) slot.block = -1;
  return slot;
}

// Where a thread's chunk of a head comes from and goes to: of keys, or of values. In k and v that
// is [.., token, head, column], in a cache whatever its strides say.
template <class C>
struct Share {
  using Element = typename C::Element;
  using Cache = typename C::Cache;
  static constexpr int kCount = 16 / sizeof(Cache);

  const KvWriteParams& p;
  bool key;
  int first, count;                                 // columns
  const Element* rows;                              // of this head; column 0
  Cache* cache;                                     // of this head, at the chunk
  long long stride_batch, stride_token;             // of rows
  long long stride_block, stride_slot, stride_dim;  // of the cache
  float scale;                                      // of an 8-bit cache

  __device__ __forceinline__ Share(const KvWriteParams& params, int head, int chunk)
      : p(params), key(chunk < ceil_div(params.head_dim, kCount)) {
    first = (key ? chunk : chunk - ceil_div(p.head_dim, kCount)) * kCount;
    count = min(kCount, (key ? p.head_dim : p.value_dim) - first);
    rows = static_cast<const Element*>(key ? p.k : p.v) +
           head * (key ? p.stride_k_head : p.stride_v_head);
    stride_batch = key ? p.stride_k_batch : p.stride_v_batch;
    stride_token = key ? p.stride_k_token : p.stride_v_token;
    cache = static_cast<Cache*>(key ? p.k_cache : p.v_cache) +
            head * (key ? p.stride_k_cache_head : p.stride_v_cache_head) +
            (key ? chunk * p.stride_k_cache_chunk : first * p.stride_v_cache_dim);
    stride_block = key ? p.stride_k_cache_block : p.stride_v_cache_block;
    stride_slot = key ? p.stride_k_cache_slot : p.stride_v_cache_slot;
    stride_dim = key ? 1 : p.stride_v_cache_dim;
    if constexpr (C::quantized) {
      const float* scales = key ? p.k_scale : p.v_scale;
      scale = key ? p.k_scale_number : p.v_scale_number;
      if (scales != nullptr) scale = scales[head * (key ? p.stride_k_scale : p.stride_v_scale)];
    }
  }

  __device__ __forceinline__ const Element* row(const Slot& slot) const {
    return rows + slot.batch * stride_batch + slot.row * stride_token;
  }
  __device__ __forceinline__ void load(Piece<Element, kCount>& piece, const Slot& slot) const {
    piece.load(row(slot) + first, count, p.aligned);
  }

  __device__ __forceinline__ void store(Piece<Element, kCount>& piece, const Slot& slot) const {
    if constexpr (C::rotary) {
      if (key) turn(piece, p, row(slot), slot.position, first, count);
    }
    const Piece<Cache, kCount> held = as_held(piece);
    Cache* to = cache + slot.block * stride_block + slot.offset * stride_slot;
    if (stride_dim == 1) {
      held.store(to, count, p.aligned);
    } else {
      held.store_apart(to, stride_dim, count);
    }
  }

  __device__ __forceinline__ Piece<Cache, kCount> as_held(
      const Piece<Element, kCount>& piece) const {
    if constexpr (C::quantized) {
      float x[kCount];
      piece.to_floats(x);
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = __fdiv_rn(x[i], scale);
      Piece<Cache, kCount> held;
      held.from_floats(x);
      return held;
    } else {
      return piece;
    }
  }
};

template <class C>
__device__ __forceinline__ void kv_write(const KvWriteParams& p) {
  extern __shared__ __align__(16) unsigned char smem_bytes[];
  KvWriteSmem<C>& smem = *reinterpret_cast<KvWriteSmem<C>*>(smem_bytes);
  const unsigned block = blockIdx.x / static_cast<unsigned>(p.share_blocks);
  const int share_block = blockIdx.x % static_cast<unsigned>(p.share_blocks);
  if (threadIdx.x < p.block_tokens) {
    smem.slots[threadIdx.x] =
        find_slot(p, static_cast<long long>(block) * p.block_tokens + threadIdx.x);
  }
  __syncthreads();

  constexpr int kCount = Share<C>::kCount;
  const int thread = threadIdx.x;
  const int share_lanes = C::threads / p.token_lanes;
  const int first_token = p.tokens_first ? thread % p.token_lanes : thread / share_lanes;
  const int lane = p.tokens_first ? thread / p.token_lanes : thread % share_lanes;
  const int number = share_block * share_lanes + lane;
  const int chunks = ceil_div(p.head_dim, kCount) + ceil_div(p.value_dim, kCount);
  if (first_token >= p.token_lanes || lane >= share_lanes || number >= p.kv_heads * chunks) return;

  const Share<C> share(p, number / chunks, number % chunks);
  // Tokens whose rows are under way at once: more hide more of the wait, but take registers.
  constexpr int kAhead = C::rotary ? 1 : C::quantized ? 2 : 4;
  for (int token = first_token; token < p.block_tokens; token += kAhead * p.token_lanes) {
    Piece<typename C::Element, kCount> pieces[kAhead];
    auto each = [&](auto step) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = token + i * p.token_lanes;
        if (at < p.block_tokens && smem.slots[at].block >= 0) step(pieces[i], smem.slots[at]);
      }
    };
    each([&](auto& piece, const Slot& slot) { share.load(piece, slot); });
    each([&](auto& piece, const Slot& slot) { share.store(piece, slot); });
  }
}

// ---- rotary ----

// y = x with the first columns of each row turned by its position: for queries, whose keys
// kv_write turns. Grid: blocks of tokens. A thread takes pieces of rows.
template <class C>
__device__ __forceinline__ void rotary(const RotaryParams& p) {
  using Element = typename C::Element;
  constexpr int kCount = 16 / sizeof(Element);
  const int pieces = ceil_div(p.head_dim, kCount);
  const long long first_token = static_cast<long long>(blockIdx.x) * p.block_tokens;
  for (int i = threadIdx.x; i < p.block_tokens * p.heads * pieces; i += C::threads) {
    const int first = i % pieces * kCount;
    const int head = i / pieces % p.heads;
    const long long token = first_token + i / pieces / p.heads;
    if (token >= p.tokens) break;
    const NewToken from = new_token(p, token);
    if (from.sequence < 0) continue;
    const int used = p.seqused_k != nullptr ? max(0, p.seqused_k[from.sequence]) : 0;
    const int position = min(used, p.positions) + (p.same_position ? 0 : from.index);
    const int count = min(kCount, p.head_dim - first);
    const auto* row = static_cast<const Element*>(p.x) + from.sequence * p.stride_x_batch +
                      from.row * p.stride_x_token + head * p.stride_x_head;
    auto* to = static_cast<Element*>(p.y) + from.sequence * p.stride_y_batch +
               from.row * p.stride_y_token + head * p.stride_y_head;
    Piece<Element, kCount> piece;
    piece.load(row + first, count, p.aligned);
    turn(piece, p, row, position, first, count);
    piece.store(to + first, count, p.aligned);
  }
}

// ---- sequences ----

// The keys of sequences that have new tokens of their own number, or begin behind padding: how
// many, and, in a contiguous cache that is taken for one of pages that begin at every token, where.
// Grid: a thread a sequence.
template <class C>
__device__ __forceinline__ void sequences(const SequencesParams& p) {
  const int b = blockIdx.x * C::threads + threadIdx.x;
  if (b >= p.batch) return;
  const int used = max(0, min(p.max_k, p.seqused_k[b]));
  const int added =
      p.cu_seqlens_new == nullptr ? p.new_k : max(0, p.cu_seqlens_new[b + 1] - p.cu_seqlens_new[b]);
  const int end = used + min(added, p.max_k - used);
  const int first = p.leftpad == nullptr ? 0 : max(0, min(end, p.leftpad[b]));
  p.lengths[b] = end - first;
  if (p.first_tokens == nullptr) return;
  const int row = p.cache_batch_idx == nullptr ? b : p.cache_batch_idx[b];
  p.first_tokens[b] = row * p.row_tokens + first;
}

// ---- copy_blocks ----

// Copies whole blocks to other blocks of the same cache, in each of several caches. Grid: (pairs) x
// (caches) x (chunks of a block), chunks fastest. No destination may be another pair's source or
// destination.
template <class C>
__device__ __forceinline__ void copy_blocks(const CopyBlocksParams& p) {
  using Unit = typename C::Unit;
  const int chunk = static_cast<int>(blockIdx.x % p.chunks);
  const int cache = static_cast<int>(blockIdx.x / p.chunks % p.num_caches);
  const int pair = static_cast<int>(blockIdx.x / p.chunks / p.num_caches);
  const long long from = p.pairs[2 * pair], to = p.pairs[2 * pair + 1];
  if (min(from, to) < 0 || max(from, to) >= p.blocks) return;
  auto* blocks = reinterpret_cast<unsigned char*>(p.caches[cache]);
  const auto* src = reinterpret_cast<const Unit*>(blocks + from * p.stride_block_bytes);
  auto* dst = reinterpret_cast<Unit*>(blocks + to * p.stride_block_bytes);

  constexpr int kAhead = 4;  // loads in flight a thread
  const long long units = p.block_bytes / static_cast<long long>(sizeof(Unit));
  const long long step = static_cast<long long>(C::threads) * p.chunks;
  for (long long i = static_cast<long long>(chunk) * C::threads + threadIdx.x; i < units;
       i += kAhead * step) {
    Unit x[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j * step < units) x[j] = src[i + j * step];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j * step < units) dst[i + j * step] = x[j];
    }
  }
}
