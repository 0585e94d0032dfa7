# SPDX-License-Identifier: Apache-2.0
"""What memory gives in the very run: a kernel that only reads bytes, a plain copy, and a sum of two
arrays, which reads two bytes for each that it writes.

They are timed beside the kernels that must move as many bytes, and checked like them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.measure import Candidate

BLOCKS_PER_SM, THREADS = 4, 512

# Each thread has eight 16-byte words in flight; a sum keeps the compiler from dropping them.
READ = r"""
extern "C" __global__ void __launch_bounds__(512) read(
    const uint4* first, const uint4* second, long long words, unsigned* sums) {
  __shared__ unsigned total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  const long long stride = (long long)gridDim.x * blockDim.x;
  const long long start = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned sum = 0;
  for (int part = 0; part < 2; ++part) {
    const uint4* from = part == 0 ? first : second;
    long long i = start;
    for (; i + 7 * stride < words; i += 8 * stride) {
      uint4 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = __ldg(from + i + j * stride);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
    }
    for (; i < words; i += stride) {
      const uint4 v = __ldg(from + i);
      sum += v.x + v.y + v.z + v.w;
    }
  }
  atomicAdd(&total, sum);
  __syncthreads();
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}
"""

# Each thread adds PIECES 16-byte words of each array, a block's width apart, all read at once.
ADD = r"""
extern "C" __global__ void __launch_bounds__(THREADS) add(
    const uint4* __restrict__ first, const uint4* __restrict__ second, uint4* __restrict__ sum,
    long long words) {
  const long long start = (long long)blockIdx.x * THREADS * PIECES + threadIdx.x;
  uint4 a[PIECES], b[PIECES];
#pragma unroll
  for (int j = 0; j < PIECES; ++j) {
    const long long i = start + j * THREADS;
    if (i < words) a[j] = first[i], b[j] = second[i];
  }
#pragma unroll
  for (int j = 0; j < PIECES; ++j) {
    const long long i = start + j * THREADS;
    const uint4 v = {a[j].x + b[j].x, a[j].y + b[j].y, a[j].z + b[j].z, a[j].w + b[j].w};
    if (i < words) sum[i] = v;
  }
}
"""
# Pieces of a thread, threads of a block. Of 13 shapes none took 1 % less for 512, 4096 or 16384
# tokens of 32 x 128; a grid of as many blocks as fit, which go on to further words, 1 to 5 % more
# (rows: results/nvidia-h200/tuning/merge-floor.csv).
ADD_SHAPE = (2, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactly:
    """The only right output, to the bit: of a sum, a copy, or stored tokens."""

    bits: Any  # unsigned integers
    reduce: Callable[[Any], Any] = lambda out: out  # from an output to what is compared

    def error_ratio(self, out: Any, xp: Any = np) -> float:
        """0 where all bits are right, else infinity."""
        return 0.0 if bool(xp.array_equal(self.reduce(out), self.bits)) else float("inf")


def sum_words(arrays: Sequence[Any], xp: Any) -> Any:
    """The sum of the 32-bit words of arrays, modulo 2^32."""
    total = sum(int(x.reshape(-1).view(np.uint32).sum(dtype=np.uint64)) for x in arrays)
    return xp.asarray(total % 2**32, np.uint32)


@functools.cache
def _read_kernel() -> Any:
    import cupy

    return cupy.RawKernel(READ, "read")


def read_candidate(first: Any, second: Any) -> Candidate:
    """Reads two contiguous arrays of equal size, multiples of 16 bytes, once."""
    import cupy

    sms = cupy.cuda.Device().attributes["MultiProcessorCount"]
    grid = BLOCKS_PER_SM * sms
    sums = cupy.zeros(grid, np.uint32)
    words = cupy.int64(first.nbytes // 16)
    kernel = _read_kernel()

    def run() -> Any:
        kernel((grid,), (THREADS,), (first, second, words, sums))
        return sums

    expected = Exactly(
        bits=sum_words((first, second), cupy),
        reduce=lambda out: out.sum(dtype=np.uint32),
    )
    return Candidate(backend="read", run=run, peer_version="plain reads", expected=expected)


def copy_candidate(source: Any) -> Candidate:
    """Copies the bytes of a contiguous array: as many are read as are written."""
    import cupy

    target = cupy.empty_like(source)
    stream = cupy.cuda.get_current_stream()

    def run() -> Any:
        target.data.copy_from_device_async(source.data, source.nbytes, stream)
        return target

    expected = Exactly(bits=source)
    return Candidate(backend="copy", run=run, peer_version="cudaMemcpyAsync", expected=expected)


def add_candidate(first: Any, second: Any) -> Candidate:
    """Adds the 32-bit words of two contiguous arrays of equal size, a multiple of 16 bytes: two
    bytes are read for each that is written, as where two states are merged.
    """
    import cupy

    pieces, threads = ADD_SHAPE
    options = (f"-DPIECES={pieces}", f"-DTHREADS={threads}")
    kernel = cupy.RawKernel(ADD, "add", options=options)
    words = first.nbytes // 16
    grid = -(-words // (pieces * threads))
    total = cupy.empty_like(first)

    def run() -> Any:
        kernel((grid,), (threads,), (first, second, total, cupy.int64(words)))
        return total

    expected = Exactly(bits=first.view(np.uint32) + second.view(np.uint32))
    return Candidate(backend="add", run=run, peer_version="sum of two arrays", expected=expected)
