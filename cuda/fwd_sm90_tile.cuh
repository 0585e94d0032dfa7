// SPDX-License-Identifier: Apache-2.0
// A query tile of the Hopper forward kernels.
#pragma once

// One query tile of a block: `rows` of a sequence, and the key tiles that they see.
struct FwdSm90Tile {
  int row;    // first query row, counted from the start of its sequence
  int first;  // key tiles [first, last), walked from the last; none: there is no query tile
  int last;
  int q_len;
  int k_len;
  int q_head;
  int kv_head;
  int batch;
  int q_first;  // row of q and out at which the sequence starts, 0 unless packed
  int k_first;  // the same of k and v
  int v_first;  // and where v_map is ragged, in which a batch is a number of rows
};
