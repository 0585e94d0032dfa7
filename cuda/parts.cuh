// SPDX-License-Identifier: Apache-2.0
// The parts that splits.cuh cuts a segment into, and where their sums wait for each other.
#pragma once

#include "splits.cuh"

// The parts of a segment, and the slots of the workspace that hold them: a worker has one for the
// part that its range begins with, and one for that which it ends with; a fixed split, one a part.
struct Parts {
  int count;
  int number;  // of the part in hand
  int first_slot;
  int second_slot;
  int step;  // from the second on

  template <class C>
  __device__ __forceinline__ Parts(const DecodeSplitParams& p, const BlockPlace& at,
                                   const Walk<C>& walk) {
    count = 1;
    number = first_slot = second_slot = step = 0;
    if (walk.last - walk.first == walk.units) return;
    if (p.span > 0) {
      count = Units<C>::parts(p, walk.units);
      number = walk.number;
      first_slot = at.column * p.column_slots + walk.start;
      second_slot = first_slot + 1;
      step = 1;
    } else {
      const int first_row = walk.start / walk.quota;
      count = (walk.start + walk.units - 1) / walk.quota - first_row + 1;
      number = at.row - first_row;
      first_slot = 2 * (first_row * p.columns + at.column) + 1;
      second_slot = first_slot + 2 * p.columns - 1;
      step = 2 * p.columns;
    }
  }

  __device__ __forceinline__ int slot(int i) const {
    return i == 0 ? first_slot : second_slot + (i - 1) * step;
  }
};
