# SPDX-License-Identifier: Apache-2.0
"""cuda/decode_split.cu by its plans, on the emulator, held to the reference.

What no key has is poisoned: slots, pages, and table entries past the last page of a sequence. The
GPU of the plans has few SMs, so that sequences are split.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass, field

import numpy as np

from rawattn import registry
from rawattn.arrays import DTYPES
from rawattn.device import Device
from rawattn.paged_problem import ITEMSIZES, PagedProblem, PageTable, Scale, cache_shapes
from rawattn.plan import Launch, decode
from rawattn.problem import CacheLayout, Mask, Rows, Scores
from rawattn.reference_paged import gather_cache, slots, tree_seen
from rawattn.softcap import LOG2_E
from rawattn.testing import Case as PackedCase
from rawattn.testing import Record, Tensors, expected
from rawattn.testing.closeness import Expected, assert_within, bounds
from rawattn.testing.paged_inputs import NOWHERE
from tools.emulator.plans import run_launch

H200 = Device.named("H200")
NHD, HND, X_MAJOR = CacheLayout.NHD, CacheLayout.HND, CacheLayout.X_MAJOR
SPARE_PAGES = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    k_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    cache_dtype: str = ""  # as dtype
    layout: CacheLayout = NHD
    page: int = 16
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    value_dim: int = 0  # as head_dim
    q_lens: tuple[int, ...] = ()  # all 1
    packed: bool = False
    csr: bool = False
    tail: int = NOWHERE[1]  # what block_table holds past the last page of a sequence
    mask: Mask = field(default_factory=lambda: Mask(right=0))
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    tree: bool = False
    scale: Scale = Scale.NONE  # of keys and values
    times: float = 1.0  # scores, beside 1 / sqrt(head_dim)
    split: int = 0
    arch: str = "sm_90a"
    sms: int = 5
    tma: bool = True  # expected of the plan
    seed: int = 0

    @property
    def queries(self) -> tuple[int, ...]:
        return self.q_lens or (1,) * len(self.k_lens)

    @property
    def device(self) -> Device:
        return dataclasses.replace(H200, arch=self.arch, sms=self.sms)

    @property
    def problem(self) -> PagedProblem:
        return PagedProblem(
            dtype=self.dtype,
            cache_dtype=self.cache_dtype or self.dtype,
            batch=len(self.k_lens),
            q_heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.values,
            max_q=max(self.queries),
            max_k=self.max_blocks * self.page,
            page=self.page,
            layout=self.layout,
            table=PageTable.CSR if self.csr else PageTable.DENSE,
            q_rows=Rows.PACKED if self.packed else Rows.DENSE,
            mask=self.mask,
            scores=Scores(softcap=self.softcap > 0, alibi=self.alibi, sink=self.sink),
            tree=self.tree,
            k_scale=self.scale,
            v_scale=self.scale,
            split=self.split,
            copy_bytes=self.copy_bytes,
        )

    @property
    def values(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def softmax_scale(self) -> float:
        return self.times * self.head_dim**-0.5

    @property
    def copy_bytes(self) -> int:
        """Of arrays without gaps."""
        tokens = self.page if self.layout is X_MAJOR else 1
        item = ITEMSIZES[self.cache_dtype or self.dtype] * tokens
        return math.gcd(16, *(n * size for n in (self.head_dim, self.values) for size in (2, item)))

    @property
    def pages(self) -> list[int]:
        return [-(-k // self.page) for k in self.k_lens]

    @property
    def max_blocks(self) -> int:
        return max(1, *self.pages) + 1


class Call:
    """The arrays of a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.random = random = np.random.default_rng(case.seed)
        p = case.problem
        shapes = cache_shapes(
            p.layout,
            p.cache_dtype,
            blocks=sum(case.pages) + SPARE_PAGES,
            page=p.page,
            kv_heads=p.kv_heads,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
        )
        self.k_cache, self.v_cache = map(self._cache, shapes)
        ids = random.permutation(sum(case.pages) + SPARE_PAGES).astype(np.int32)
        ends = np.cumsum([0, *case.pages])
        of_sequence = [ids[a:b] for a, b in itertools.pairwise(ends)]
        self._poison(of_sequence, ids[ends[-1] :])
        lengths = np.array(case.k_lens, np.int32)
        if case.csr:
            last = np.where(lengths > 0, (lengths - 1) % case.page + 1, 0).astype(np.int32)
            self.table = {
                "kv_indptr": ends.astype(np.int32),
                "kv_indices": np.append(ids[: ends[-1]], np.int32(NOWHERE[1])),
                "kv_last_page_len": last,
            }
        else:
            table = np.full((p.batch, case.max_blocks), case.tail, np.int32)
            for b, pages in enumerate(of_sequence):
                table[b, : len(pages)] = pages
            self.table = {"block_table": table, "seqused_k": lengths}
        self.cu_q = np.cumsum([0, *case.queries], dtype=np.int32) if case.packed else None
        rows = (sum(case.queries),) if case.packed else (p.batch, p.max_q)
        self.q = random.standard_normal((*rows, p.q_heads, p.head_dim)).astype(DTYPES[p.dtype])
        self.sink = random.standard_normal(p.q_heads).astype(np.float32) if case.sink else None
        self.slopes = (
            (2.0 ** -random.integers(1, 8, p.q_heads)).astype(np.float32) if case.alibi else None
        )
        self.tree = None
        if case.tree:
            self.tree = random.random((*rows, p.max_q)) < 0.5
            diagonal = np.arange(p.max_q)
            if not case.packed:
                self.tree[:, diagonal, diagonal] = True
        count = {Scale.NONE: 0, Scale.TENSOR: 1, Scale.HEAD: p.kv_heads}[case.scale]
        self.k_scale, self.v_scale = (
            random.uniform(0.25, 2, count).astype(np.float32) if count else None for _ in "kv"
        )

    def _cache(self, shape: tuple[int, ...]) -> np.ndarray:
        numbers, dtype = self.random.standard_normal(shape), self.case.problem.cache_dtype
        if dtype == "int8":
            return np.clip(np.rint(numbers * 40), -127, 127).astype(np.int8)
        return numbers.astype(DTYPES[dtype])

    def _poison(self, pages: list[np.ndarray], spare: np.ndarray) -> None:
        poison = 127 if self.case.problem.cache_dtype == "int8" else np.nan
        for cache in (self.k_cache, self.v_cache):
            of_token = slots(cache, self.case.layout)
            of_token[spare] = poison
            for ids, length in zip(pages, self.case.k_lens, strict=True):
                if length % self.case.page:
                    of_token[ids[-1], length % self.case.page :] = poison

    # ---- what it should give ----

    def expected(self) -> Expected:
        case, p = self.case, self.case.problem
        none = np.ones(1, np.float32)
        k, v, cu_k = gather_cache(
            self.k_cache,
            self.v_cache,
            layout=p.layout,
            k_scale=none if self.k_scale is None else self.k_scale,
            v_scale=none if self.v_scale is None else self.v_scale,
            **self.table,
        )
        packed = PackedCase(
            q_lens=case.queries,
            k_lens=case.k_lens,
            dtype=p.dtype,
            q_heads=p.q_heads,
            kv_heads=p.kv_heads,
            head_dim=p.head_dim,
            value_dim=p.value_dim,
            layout="packed",
            window=(case.mask.left, -1 if case.tree else case.mask.right),
            scale=case.softmax_scale,
            softcap=case.softcap,
            seed=case.seed,
        )
        return expected(
            Tensors(
                case=packed,
                q=self.q.reshape(-1, p.q_heads, p.head_dim),
                k=k,
                v=v,
                cu_seqlens_q=np.cumsum([0, *case.queries], dtype=np.int32),
                cu_seqlens_k=cu_k,
                alibi_slopes=self.slopes,
                sink=self.sink,
                seen=self._seen() if case.tree else None,
                max_seqlen_q=p.max_q,
                max_seqlen_k=p.max_k,
            )
        )

    def _seen(self) -> list[np.ndarray]:
        assert self.tree is not None
        rows = self.tree.reshape(-1, self.tree.shape[-1])
        first = np.cumsum([0, *self.case.queries])
        lens = zip(first[:-1], self.case.queries, self.case.k_lens, strict=True)
        return [tree_seen(rows[row:], q_len, k_len) for row, q_len, k_len in lens]

    # ---- the kernel ----

    def launch(self) -> Launch:
        problem, device = self.case.problem, self.case.device
        assert decode.refuses(problem, device) is None
        (launch,) = decode.launches(problem, device)
        assert getattr(launch.config, "tma", True) == self.case.tma
        return launch

    def run(self, launch: Launch, seed: int) -> tuple[np.ndarray, np.ndarray]:
        p = self.case.problem
        out = np.full((*self.q.shape[:-1], p.value_dim), np.nan, self.q.dtype)
        lse = np.full((*self.q.shape[:-3], p.q_heads, self.q.shape[-3]), np.nan, np.float32)
        given = {
            "q": self.q,
            "k_cache": self.k_cache,
            "v_cache": self.v_cache,
            "out": out,
            "lse": lse,
            "cu_seqlens_q": self.cu_q,
            "alibi_slopes": self.slopes,
            "sink": self.sink,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "tree_mask": None if self.tree is None else self.tree.view(np.uint8),
            **self.table,
            "workspace": np.full(launch.workspace_bytes, 0xFF, np.uint8),
        }
        pointers = [
            name
            for name, kind in registry.params_struct("DecodeSplitParams")._fields_
            if kind.__name__ == "c_void_p" and name != "tile_counter"
        ]
        run_launch(launch, {n: given.get(n) for n in pointers}, self._scalars(out, lse), seed)
        flat_lse = np.moveaxis(lse, -2, 0).reshape(p.q_heads, -1)
        return out.reshape(-1, *out.shape[-2:]), flat_lse

    def _scalars(self, out: np.ndarray, lse: np.ndarray) -> dict[str, float]:
        p = self.case.problem
        k, v = (self._strides(x) for x in (self.k_cache, self.v_cache))
        found: dict[str, float] = {}
        for name, x in (("q", self.q), ("out", out)):
            *batch, row, head, _ = (s // x.itemsize for s in x.strides)
            found |= {
                f"stride_{name}_batch": batch[0] if batch else 0,
                f"stride_{name}_row": row,
                f"stride_{name}_head": head,
            }
        table = self.table.get("block_table")
        by_head = int(self.case.scale is Scale.HEAD)
        return found | {
            "stride_lse_batch": 0 if self.case.packed else lse.strides[0] // 4,
            "stride_lse_head": lse.strides[-2] // 4,
            "stride_k_block": k[0],
            "stride_k_token": k[1],
            "stride_k_head": k[2],
            "stride_k_chunk": k[3] if p.layout is X_MAJOR else 16 // ITEMSIZES[p.cache_dtype],
            "stride_v_block": v[0],
            "stride_v_token": v[1],
            "stride_v_head": v[2],
            "stride_v_dim": v[3],
            "stride_tree_batch": self.tree.strides[0] if self.tree is not None else 0,
            "stride_tree_row": self.tree.strides[-2] if self.tree is not None else 0,
            "stride_table": table.shape[1] if table is not None else 0,
            "stride_alibi_batch": 0,
            "stride_k_scale_batch": 0,
            "stride_k_scale_head": by_head,
            "stride_v_scale_batch": 0,
            "stride_v_scale_head": by_head,
            "batch": p.batch,
            "q_heads": p.q_heads,
            "kv_heads": p.kv_heads,
            "group": p.group,
            "head_dim": p.head_dim,
            "value_dim": p.value_dim,
            "q_len": p.max_q,
            "max_k": p.max_k,
            "new_k": 0,
            "page": p.page,
            "window_left": p.mask.left,
            "window_right": p.mask.right,
            "copy_bytes": p.copy_bytes,
            "q_bf16": int(p.dtype == "bfloat16"),
            "scale_log2": self.case.softmax_scale * LOG2_E,
            "softcap_log2": self.case.softcap * LOG2_E,
            "out_scale": 1.0,
        }

    def _strides(self, cache: np.ndarray) -> list[int]:
        """Of block, token, head, and dimension or chunk, in elements."""
        view = slots(cache, self.case.layout)
        return [stride // cache.itemsize for stride in view.strides[:4]]


def check(case: Case, seeds: int = 2) -> None:
    """Holds the kernel to the reference, and its bits to one another under several schedules."""
    call = Call(case)
    launch = call.launch()
    want = call.expected()
    limits = bounds(want, case.dtype)
    results = [call.run(launch, case.seed + seed) for seed in range(seeds)]
    exact = want.out[..., : case.problem.value_dim], want.lse
    out, lse = (x.astype(np.float64) for x in results[0])
    assert_within((out, lse), exact, limits, case, Record())
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes(), case
