// SPDX-License-Identifier: Apache-2.0
// Params of the kernel in relay.cu: all that a struct may hold.
#pragma once

#include "tensor_map.cuh"

struct RelayParams {
  const void* x;      // packed [rows, heads, columns], 16 bits an element
  void* out;          // as x
  const int* starts;  // [sequences + 1] first row of each sequence
  int sequences;
  int heads;
  int tiles;  // of the longest sequence; the struct ends with padding
};

struct RelaySm90Params : RelayParams {
  int first;          // lies behind that padding; 0
  int* tile_counter;  // [2] next item; blocks that have run dry. Zero before and after
  ptx::TensorMap from_map;

  // [items] the block that moved each of them
  int* movers;
  ptx::TensorMap to_map;
  float last;  // makes the struct end with padding too
};
