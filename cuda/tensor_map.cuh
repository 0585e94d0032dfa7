// SPDX-License-Identifier: Apache-2.0
// The type of a tensor map, which Params hold and ptx_sm90_tma.cuh uses.
#pragma once

namespace ptx {

// CUtensorMap, opaque; passed by value in a __grid_constant__ parameter. Its address may only be
// taken there. What one describes is in rawattn/tensor_map.py.
struct alignas(64) TensorMap {
  unsigned long long opaque[16];
};

}  // namespace ptx
