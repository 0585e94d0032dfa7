// SPDX-License-Identifier: Apache-2.0
// Who works on what in decode_split. Every warp derives it alone from the lengths, so nothing is
// planned on the host, and a captured launch follows lengths that change.
//
// A *segment* is the keys of one sequence and KV head, for one block of rows; it is cut in *units*
// of C::unit keys. (KV head, block of rows) is a *line*, of which there are kv_heads * row_blocks;
// equal shares of them go to the `columns` of the grid: block i of it works in column i % columns,
// as its row i / columns. All segments of a column, sequence by sequence and in it line by line,
// lie end to end on an axis that the rows cut into equal ranges. So a block owns a few whole
// segments and at most two *parts* of split ones. Where each line has its column, neighbouring
// blocks read the heads of a page at about the same time, and nothing is divided.
//
// Balanced: a segment takes kOverhead positions of the axis, what starting and merging it costs,
// and one for each unit. Fixed split: each position is a part of `span` units, whatever else is in
// the batch; a block may own many.
//
// Who owns a range is a *worker*: a block, whose warps share each part, or, where all segments are
// short, each warp of it alone: then nobody waits for other warps where a segment ends.
#pragma once

#include "pages.cuh"
#include "types.cuh"

// 8: skewed batches took 8 % longer, 4: 30 % (H200, 2026-11-30)
template <class C>
constexpr int kOverhead = C::unit < 64 ? 12 : 2;
constexpr int kOverheadAlone = 2;
// Warps work alone where no segment is longer than their range, nor than this many units. Then
// meeting takes longer than the parts: 1000 x 64 keys 92 us, and 190 by blocks. Where there are
// more units, warps that end at different times cost as much as meeting, and 16 rows are more to
// merge (H200, 2026-11-30).
template <class C>
constexpr int kShort = C::row_tiles == 1 ? 16 : 64;
// Positions of a block: fewer cost more to merge than they save. In decode_sm90 a part of 64 rows
// is as much to write and read again as a unit, and who comes last reads all of a segment one after
// the other: quota + longest / quota is to be least. 16 queries over 1 x 32 k of one KV head took
// 42 us, and 80 with ranges of 4. Half of `longest` took 10 % less to 13 % more, twice of it up to
// 29 % more (H200, 2026-11-30). No segment is longer than its line (`on_line`), nor than max_k.
template <class C>
__device__ __forceinline__ int least_quota(const DecodeSplitParams& p, int on_line) {
  if constexpr (C::unit < 64) return 8;
  const int longest = min(on_line, ceil_div(p.max_k, C::unit));
  return max(4, static_cast<int>(sqrtf(static_cast<float>(longest))));
}

// n / divisor, for n < 2^31.
__device__ __forceinline__ int divide(int n, unsigned magic, int shift) {
  return static_cast<unsigned long long>(static_cast<unsigned>(n)) * magic >> shift;
}

// The units of a sequence that some query sees.
template <class C>
struct Units {
  int first, count;

  __device__ __forceinline__ Units(const PagedParams& p, int q_len, int k_len)
      : first(C::features ? window_begin(p, q_len, k_len) / C::unit : 0),
        count(q_len > 0 ? max(0, ceil_div(k_len, C::unit) - first) : 0) {}

  // Parts of a fixed split: count / span, rounded up.
  static __device__ __forceinline__ int parts(const DecodeSplitParams& p, int count) {
    return divide(count + p.span - 1, p.span_magic, p.span_shift);
  }

  // Positions of a segment, of which each that has units takes `overhead`.
  __device__ __forceinline__ int size(const DecodeSplitParams& p, int overhead) const {
    if (p.span > 0) return parts(p, count);
    return count > 0 ? count + overhead : 0;
  }
};

// Where this block, or warp that works alone, is in the grid.
struct BlockPlace {
  int column, row;
  bool alone = false;

  __device__ __forceinline__ explicit BlockPlace(const DecodeSplitParams& p, int block = blockIdx.x)
      : row(divide(block, p.columns_magic, p.columns_shift)) {
    column = block - row * p.columns;
  }

  // Makes it the place of one of the block's warps, each of which is a row then.
  __device__ __forceinline__ void split(int warp, int warps) {
    row = row * warps + warp;
    alone = true;
  }

  // Of a line of this column.
  __device__ __forceinline__ int kv_head(const DecodeSplitParams& p, int line) const {
    const unsigned of_all = column * p.lines + line;
    return p.row_blocks == 1 ? of_all : of_all / static_cast<unsigned>(p.row_blocks);
  }
  __device__ __forceinline__ int row_block(const DecodeSplitParams& p, int line) const {
    return p.row_blocks == 1 ? 0 : (column * p.lines + line) % static_cast<unsigned>(p.row_blocks);
  }
};

// What the lanes of a warp find of all sequences: `chunk` of them each, one after the other.
template <class C>
struct Sizes {
  static constexpr int kAtOnce = 4;
  int chunk, first, stop;
  int lengths[kAtOnce];         // of some of this lane's sequences, as read: on their way
  int q_len, k_len = 0;         // of the first one
  int units = 0, segments = 0;  // of a line, of this lane's sequences
  int longest = 0;              // segment of all, in units

  // Begins to read. Warp-wide, as all of it.
  __device__ __forceinline__ explicit Sizes(const DecodeSplitParams& p)
      : chunk((p.batch + 31u) / 32),
        first(threadIdx.x % 32 * chunk),
        stop(min(p.batch, first + chunk)),
        q_len(p.q_len) {
    if (C::cluster == 1 && p.block_table != nullptr) read(p, first);
  }

  // Then, when that is there. Short: all of it comes cold, at 4 to 6 clocks an instruction.
  __device__ __forceinline__ void add_up(const DecodeSplitParams& p) {
    if (p.block_table != nullptr && p.cu_seqlens_q == nullptr && p.span == 0) {
      k_len = PagedSequence::capped(p, lengths[0]);
#pragma unroll 1
      for (int b = first;;) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int count = Units<C>(p, q_len, PagedSequence::capped(p, lengths[i])).count;
          add(count, count);
        }
        if ((b += kAtOnce) >= stop) break;
        read(p, b);
      }
    } else {
#pragma unroll 1
      for (int b = stop - 1; b >= first; --b) {
        const PagedSequence s(p, b);
        const int count = Units<C>(p, s.q_len, s.k_len).count;
        add(count, p.span > 0 ? Units<C>::parts(p, count) : count);
        q_len = s.q_len, k_len = s.k_len;
      }
    }
    longest = __reduce_max_sync(0xffffffffu, longest);
  }

  // Positions that this lane's sequences take of a line; a fixed split counts parts as units.
  __device__ __forceinline__ int positions(const DecodeSplitParams& p, int overhead) const {
    return p.span > 0 ? units : units + segments * overhead;
  }

  // Whether all segments are short beside the range of a warp.
  __device__ __forceinline__ bool short_ones(const DecodeSplitParams& p) const {
    if (p.span > 0 || longest > kShort<C>) return false;
    const int all = __reduce_add_sync(0xffffffffu, positions(p, kOverheadAlone)) * p.lines;
    return longest * C::warps <= divide(all + p.rows - 1, p.rows_magic, p.rows_shift);
  }

 private:
  // Several in flight together. Opaque: else they are read where they are used.
  __device__ __forceinline__ void read(const DecodeSplitParams& p, int b) {
    const int* from = ptx::opaque(p.seqused_k + b);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      lengths[i] = ptx::opaque(i < stop - b ? __ldg(from + i) : -(1 << 30));  // no keys
    }
  }
  __device__ __forceinline__ void add(int count, int positions) {
    units += positions;
    segments += count > 0;
    longest = max(longest, count);
  }
};

// One after the other, the parts of a worker.
template <class C>
struct Walk {
  int quota;  // positions of a worker
  int end;    // of the worker's range
  int batch, line, q_len, k_len;
  int first_unit, units;  // of the segment
  int start;              // position of its first unit (fixed split: part)
  int number;             // fixed split: which part of it this is
  int first, last;        // units of the part: [first, last)

  // Goes to the worker's first part; false where it has none. Warp-wide.
  __device__ __forceinline__ bool begin(const DecodeSplitParams& p, const BlockPlace& at,
                                        const Sizes<C>& sizes) {
    const int mine = sizes.positions(p, overhead(at));
    const int all_of_line = __reduce_add_sync(0xffffffffu, mine), total = all_of_line * p.lines;
    int inclusive = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, inclusive, distance);
      if (threadIdx.x % 32 >= distance) inclusive += before;
    }
    quota = divide(total + p.rows - 1, p.rows_magic, p.rows_shift);
    if (at.alone) quota = ceil_div(quota, C::warps);
    if (p.span == 0) quota = max(quota, least_quota<C>(p, all_of_line));
    const int position = at.row * quota;
    end = min(position + quota, total);

    const unsigned beyond = __ballot_sync(0xffffffffu, inclusive * p.lines > position);
    const int owner = beyond != 0 ? __ffs(beyond) - 1 : 31;
    const int base = __shfl_sync(0xffffffffu, inclusive - mine, owner);  // positions of a line
    batch = owner * sizes.chunk;
    take(p, __shfl_sync(0xffffffffu, sizes.q_len, owner),
         __shfl_sync(0xffffffffu, sizes.k_len, owner));
    return position < end && seek(p, at, position, base);
  }

  // A cluster of blocks a segment, instead: goes to the only part, which all its blocks share.
  __device__ __forceinline__ bool begin_segment(const DecodeSplitParams& p, int batch_) {
    enter_segment(p, batch_);
    measure(p, 0);
    return whole_segment(p);
  }
  // Or in two steps: what is known without its keys, then the rest. `length`: of seqused_k, if any.
  __device__ __forceinline__ void enter_segment(const DecodeSplitParams& p, int batch_) {
    batch = batch_;
    line = 0;
    q_len = sequence_length(p.cu_seqlens_q, batch, p.q_len);
    k_len = 0;
  }
  __device__ __forceinline__ bool begin_entered(const DecodeSplitParams& p, int length) {
    if (p.block_table != nullptr) {
      take(p, q_len, PagedSequence::capped(p, length));
    } else {
      measure(p, 0);
    }
    return whole_segment(p);
  }

  // Goes on to the next part; false where there is none.
  __device__ __forceinline__ bool next(const DecodeSplitParams& p, const BlockPlace& at) {
    if constexpr (C::cluster > 1) return false;                 // a segment is one part
    const bool same = p.span > 0 && last < first_unit + units;  // segment
    const int position = p.span > 0 ? start + number + 1 : start + units;
    if (position >= end) return false;
    if (same) {
      ++number;
      return clip(p, position);
    }
    if (++line == p.lines) {
      line = 0;
      do {
        ++batch;
      } while (measure(p, overhead(at)) == 0);
    }
    start = p.span > 0 ? position : position + overhead(at);
    number = 0;
    return clip(p, position);
  }

 private:
  static __device__ __forceinline__ int overhead(const BlockPlace& at) {
    return at.alone ? kOverheadAlone : kOverhead<C>;
  }

  // Reads the lengths of `batch`; the positions of a segment.
  __device__ __forceinline__ int measure(const DecodeSplitParams& p, int overhead) {
    const PagedSequence s(p, batch);
    return take(p, s.q_len, s.k_len).size(p, overhead);
  }
  __device__ __forceinline__ Units<C> take(const DecodeSplitParams& p, int q_len_, int k_len_) {
    const Units<C> found(p, q_len_, k_len_);
    q_len = q_len_;
    k_len = k_len_;
    first_unit = found.first;
    units = found.count;
    return found;
  }
  __device__ __forceinline__ bool whole_segment(const DecodeSplitParams& p) {
    quota = end = units;
    start = number = 0;
    return clip(p, 0);
  }

  // Finds `position`, which `batch` or a later sequence holds; those before it take `base` a line.
  __device__ __forceinline__ bool seek(const DecodeSplitParams& p, const BlockPlace& at,
                                       int position, int base) {
    int size = Units<C>(p, q_len, k_len).size(p, overhead(at));
    while (position >= (base + size) * p.lines) {
      base += size;
      ++batch;
      size = measure(p, overhead(at));
    }
    start = base * p.lines;
    for (line = 0; position >= start + size; ++line) start += size;
    number = position - start;
    if (p.span == 0) start += overhead(at);
    return clip(p, position);
  }

  // Sets the units of the part at `position`; false where the block's range ends in the overhead
  // before them.
  __device__ __forceinline__ bool clip(const DecodeSplitParams& p, int position) {
    const int skip = p.span > 0 ? number * p.span : max(0, position - start);
    const int count = p.span > 0 ? p.span : end - start - skip;
    first = first_unit + skip;
    last = min(first + count, first_unit + units);
    return last > first;
  }
};
