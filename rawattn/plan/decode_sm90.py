# SPDX-License-Identifier: Apache-2.0
"""Where ``cuda/decode_sm90.cu`` takes the place of decode_split: for more than 8 rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from rawattn.decode_configs import DecodeSm90
from rawattn.device import Device
from rawattn.paged_problem import ITEMSIZES, PagedProblem
from rawattn.plan.base import ELEMENTS
from rawattn.problem import CacheLayout

BOX = 16  # tokens of a tensor copy; they do not cross pages
UNITS = {64: 64, 128: 64}  # keys; for 256 columns there are no registers
STAGES = {64: 8, 128: 4}  # 128 KB in flight
# Blocks of a cluster that shares a segment. Compiled for one head size.
CLUSTER = 8
CLUSTER_HEAD_DIM = 128
# Up to how many keys, by the share of the SMs that clusters are on. Nothing is handed over through
# memory, but each segment has 8 SMs, be it long or short: few do not fill the memory, and of 16
# clusters not all fit on the GPU at a time. 16 queries, clusters and balanced (H200, 2026-11-30):
# 2 segments of 8 k and 32 k keys 21 and 29, 47 and 43 us; 8 of 32 k and 128 k 49 and 56, 154 and
# 144; 16 of 2 k, 8 k and 32 k 23 and 24, 40 and 40, 107 and 83. Of 8 k keys and 16 in 7 of 8
# sequences, no clusters took 5 us more.
CLUSTER_KEYS = ((0.4, 16 * 1024), (0.75, 32 * 1024), (1.0, 4 * 1024))


def config(element: str, head_dim: int, xmajor: bool, cluster: int = 1) -> DecodeSm90:
    return DecodeSm90(
        element=element,
        head_dim=head_dim,
        unit=UNITS[head_dim],
        stages=STAGES[head_dim],
        cluster=cluster,
        xmajor=xmajor,
    )


def configs(arch: str) -> Iterator[DecodeSm90]:
    """Every Config that a plan can choose."""
    for element, xmajor in itertools.product(ELEMENTS.values(), (False, True)):
        yield config(element, CLUSTER_HEAD_DIM, xmajor, CLUSTER)
        for head_dim in UNITS:
            yield config(element, head_dim, xmajor)


def chosen(p: PagedProblem, device: Device) -> DecodeSm90 | None:
    """The Config for a problem that decode_split does not refuse; None: it is for that kernel."""
    if not _takes(p, device):
        return None
    balanced = config(ELEMENTS[p.dtype], p.head_dim, p.layout is CacheLayout.X_MAJOR)
    segments = p.batch * p.kv_heads * -(-p.rows // balanced.rows)
    share = segments * CLUSTER / device.sms
    keys = next((keys for most, keys in CLUSTER_KEYS if share <= most), 0)
    if p.max_k <= keys and not p.split and p.head_dim == CLUSTER_HEAD_DIM:
        return replace(balanced, cluster=CLUSTER)
    return balanced


def in_boxes(p: PagedProblem) -> bool:
    """Whether tensor copies of BOX tokens cross no page, and 32 bits count the elements of an
    x-major page that are 16 bytes of each token.
    """
    x = 16 // ITEMSIZES[p.cache_dtype]
    return p.page % BOX == 0 and (p.layout is not CacheLayout.X_MAJOR or p.page * x < 2**31)


def _takes(p: PagedProblem, device: Device) -> bool:
    """A fixed split is taken with any number of rows: its bits do not depend on the longest query
    of the batch.
    """
    return (
        device.arch == "sm_90a"
        and p.cache_dtype == p.dtype
        and p.head_dim == p.value_dim
        and p.head_dim in UNITS
        and in_boxes(p)
        and p.copy_bytes >= 16
        and not p.leftpad
        and (p.rows > 8 or p.split > 0)
    )
