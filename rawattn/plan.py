# SPDX-License-Identifier: Apache-2.0
"""Problem x Device -> Plan: which backend, which Config, which grid, and why. Pure Python; no GPU, no CuPy.

A backend is a name and a function that says why it refuses a problem (None: it takes it). The first of `BACKENDS`
that does not refuse wins; `backend=` or ``RAWATTN_BACKEND`` forces one. Tile sizes live here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rawattn.device import Device
from rawattn.problem import Problem, Unsupported
from rawattn.registry import KERNELS, Config, FwdSm80

ELEMENTS = {"float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch. `scalars` are the Params fields that the plan decides."""

    kernel: str
    config: Config
    grid: int
    scalars: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `why` names the backends passed over, and the reasons for what was chosen."""

    problem: Problem
    device: Device
    backend: str
    launches: tuple[Launch, ...] = ()
    workspace_bytes: int = 0
    why: tuple[str, ...] = ()


# ---- fwd_sm80 --------------------------------------------------------------------------------------------------------


# (Batch, head) pairs that a sweep over the query blocks covers. With one, causal tails leave SMs idle; with all, the
# keys and values in flight outgrow L2. Between 8 and 128 the H200 differs by 2 %.
HEAD_GROUP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Tile shape of fwd_sm80 for one bucket of head dimensions; fields as in `FwdSm80`."""

    block_m: int
    block_n: int
    warps: int
    column_warps: int
    stages: int
    q_in_registers: bool
    fragments_ahead: int
    copy_spread: int
    vote_rescale: bool
    blocks_per_sm: int


FWD_SM80_BUCKETS = (
    (32, 32),
    (64, 64),
    (96, 96),
    (128, 128),
    (160, 160),
    (192, 128),
    (192, 192),
    (256, 256),
)


def _tile(m: int, n: int, *, warps: int, stages: int, blocks: int, columns: int = 1, q_regs: bool = False, ahead: int = 2, spread: int = 4, vote: bool = False) -> Tile:
    return Tile(
        block_m=m,
        block_n=n,
        warps=warps,
        column_warps=columns,
        stages=stages,
        q_in_registers=q_regs,
        fragments_ahead=ahead,
        copy_spread=spread,
        vote_rescale=vote,
        blocks_per_sm=blocks,
    )


# A100, H100, B100 and their kin: 163 KB of shared memory a block and more. Measured on an H200 (tools/tune.py).
FWD_SM80_TILES = {
    (32, 32): _tile(128, 64, warps=4, stages=2, blocks=2, q_regs=True),
    (64, 64): _tile(128, 64, warps=4, stages=2, blocks=2, q_regs=True),
    (96, 96): _tile(128, 64, warps=4, stages=1, blocks=2, vote=True),
    (128, 128): _tile(128, 64, warps=4, stages=1, blocks=2, vote=True),
    (160, 160): _tile(64, 64, warps=4, stages=1, blocks=2, columns=2),
    (192, 128): _tile(64, 64, warps=4, stages=1, blocks=2, columns=2),
    (192, 192): _tile(64, 64, warps=4, stages=1, blocks=2, columns=2),
    (256, 256): _tile(64, 64, warps=4, stages=1, blocks=2, columns=2, spread=2),
}
# Consumer GPUs: 99 KB of shared memory a block, 100 KB an SM.
FWD_SM80_TILES_SMALL = {
    **FWD_SM80_TILES,
    (256, 256): _tile(64, 32, warps=4, stages=1, blocks=1, columns=2),
}


def _tiles(arch: str) -> dict[tuple[int, int], Tile]:
    return FWD_SM80_TILES_SMALL if arch in ("sm_86", "sm_89", "sm_120") else FWD_SM80_TILES


def _bucket(head_dim: int, value_dim: int) -> tuple[int, int] | None:
    return next((b for b in FWD_SM80_BUCKETS if head_dim <= b[0] and value_dim <= b[1]), None)


def _fwd_sm80_config(bucket: tuple[int, int], arch: str, element: str, scores: bool, copy_bytes: int) -> FwdSm80:
    tile = _tiles(arch)[bucket]
    return FwdSm80(
        element=element,
        head_dim=bucket[0],
        value_dim=bucket[1],
        block_m=tile.block_m,
        block_n=tile.block_n,
        warps=tile.warps,
        column_warps=tile.column_warps,
        stages=tile.stages,
        q_in_registers=tile.q_in_registers,
        fragments_ahead=tile.fragments_ahead,
        copy_spread=tile.copy_spread,
        vote_rescale=tile.vote_rescale,
        scores=scores,
        copy_bytes=copy_bytes,
        blocks_per_sm=tile.blocks_per_sm,
    )


def configs(kernel: str, arch: str) -> Iterator[Config]:
    """Every Config of a kernel that `plan` can choose on `arch`."""
    if kernel == "fwd_sm80":
        for element in ELEMENTS.values():
            for bucket in FWD_SM80_BUCKETS:
                for scores, copy_bytes in ((False, 16), (True, 16), (True, 4), (True, 2)):
                    yield _fwd_sm80_config(bucket, arch, element, scores, copy_bytes)


def _refuse_fwd_sm80(p: Problem, device: Device) -> str | None:
    if device.arch == "host":
        return "needs CUDA arrays, found NumPy arrays"
    if device.arch not in KERNELS["fwd_sm80"].architectures:
        return f"needs one of {', '.join(KERNELS['fwd_sm80'].architectures)}, found {device.arch}"
    if p.dtype not in ELEMENTS:
        return f"dtype {p.dtype}: takes {' and '.join(ELEMENTS)}"
    if _bucket(p.head_dim, p.value_dim) is None:
        return f"head_dim={p.head_dim}, value_dim={p.value_dim}: takes up to 256"
    return None


def _plan_fwd_sm80(p: Problem, device: Device) -> tuple[Launch, ...]:
    bucket = _bucket(p.head_dim, p.value_dim)
    assert bucket is not None
    s = p.scores
    scores = s.softcap or s.alibi or s.reversed or p.copy_bytes < 16
    config = _fwd_sm80_config(bucket, device.arch, ELEMENTS[p.dtype], scores, p.copy_bytes)
    m_blocks = -(-p.max_q // config.block_m)
    pairs = p.batch * p.q_heads
    return (
        Launch(
            kernel="fwd_sm80",
            config=config,
            grid=m_blocks * pairs,
            scalars=(("m_blocks", m_blocks), ("head_group", min(HEAD_GROUP, pairs))),
        ),
    )


# ---- the ordered list ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    name: str
    refuses: Callable[[Problem, Device], str | None]
    launches: Callable[[Problem, Device], tuple[Launch, ...]]


def _refuse_reference(p: Problem, device: Device) -> str | None:
    return None if device.arch == "host" else f"takes NumPy arrays, found arrays on {device.name}"


BACKENDS = (
    Backend(name="fwd_sm80", refuses=_refuse_fwd_sm80, launches=_plan_fwd_sm80),
    Backend(name="reference", refuses=_refuse_reference, launches=lambda p, device: ()),
)


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device, backend: str | None = None) -> Plan:
    """The plan for a problem on a device; `backend` forces one by name.

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown backend name.
    """
    names = [b.name for b in BACKENDS]
    if backend is not None and backend not in names:
        raise ValueError(f"backend={backend!r}: accepted are {', '.join(names)}")
    passed_over: list[str] = []
    for candidate in BACKENDS:
        if backend is not None and candidate.name != backend:
            continue
        reason = candidate.refuses(problem, device)
        if reason is None:
            launches = () if problem.empty else candidate.launches(problem, device)
            return Plan(
                problem=problem,
                device=device,
                backend=candidate.name,
                launches=launches,
                why=tuple(passed_over),
            )
        passed_over.append(f"{candidate.name}: {reason}")
    raise Unsupported(f"no backend for {problem}: " + "; ".join(passed_over))
