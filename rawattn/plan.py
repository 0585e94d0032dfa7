# SPDX-License-Identifier: Apache-2.0
"""Problem x Device -> Plan: which backend, which Config, which grid, and why. Pure Python; no GPU,
no CuPy.

A backend is a name and a function that says why it refuses a problem (None: it takes it). The first
of `BACKENDS` that does not refuse wins; `backend=` or ``RAWATTN_BACKEND`` forces one. Tile sizes
live here and nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rawattn.device import Device
from rawattn.problem import MAX_LENGTH, Problem, Unsupported
from rawattn.registry import KERNELS, Config, FwdSm80

ELEMENTS = {"float16": "fp16", "bfloat16": "bf16"}
MAX_GRID = 2**31 - 1  # blocks that CUDA launches


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


# ---- fwd_sm80 ------------------------------------------------------------------------------------


# (Batch, head) pairs that a sweep over the query blocks covers. Under a causal mask many pairs
# balance long and short blocks (32 instead of one: up to 10 % on an H200); else few keep keys and
# values in L2.
HEAD_GROUP = 16
HEAD_GROUP_CAUSAL = 64


def _fwd_sm80(
    head_dim: int,
    value_dim: int,
    block_m: int,
    block_n: int,
    *,
    column_warps: int = 1,
    stages: int = 1,
    q_in_registers: bool = False,
    fragments_ahead: int = 2,
    copy_spread: int = 4,
    vote_rescale: bool = False,
) -> FwdSm80:
    return FwdSm80(
        element="bf16",
        head_dim=head_dim,
        value_dim=value_dim,
        block_m=block_m,
        block_n=block_n,
        warps=4,
        column_warps=column_warps,
        stages=stages,
        q_in_registers=q_in_registers,
        fragments_ahead=fragments_ahead,
        copy_spread=copy_spread,
        vote_rescale=vote_rescale,
        scores=False,
        narrow=False,
        blocks_per_sm=2,
    )


# Head sizes are rounded up to the first tile that holds both. 163 KB of shared memory a block and
# more: A100, H100, B100 and their kin. Measured on an H200 (tools/tune.py).
FWD_SM80_TILES = (
    _fwd_sm80(32, 32, 128, 64, stages=2, q_in_registers=True),
    _fwd_sm80(64, 64, 128, 64, stages=2, q_in_registers=True),
    _fwd_sm80(96, 96, 128, 64, vote_rescale=True),
    _fwd_sm80(128, 128, 128, 64, vote_rescale=True, fragments_ahead=1),
    _fwd_sm80(160, 160, 64, 64, column_warps=2),
    _fwd_sm80(192, 128, 64, 64, column_warps=2),
    _fwd_sm80(192, 192, 64, 32, column_warps=2),
    _fwd_sm80(256, 256, 64, 64, column_warps=2, copy_spread=3),
)
# What changes where score steps are compiled in, which take registers; by value_dim.
FWD_SM80_SCORES = {128: {"block_n": 32}, 256: {"copy_spread": 4}}
# What changes on GPUs other than Hopper, where ptxas would spill, and where consumer cards have
# 99 KB of shared memory a block. Not measured: we have none.
FWD_SM80_ELSEWHERE = {96: {"block_n": 32}, 128: {"block_n": 32}, 256: {"block_n": 32}}


def _fwd_sm80_config(
    tile: FwdSm80, arch: str, *, element: str, scores: bool, narrow: bool
) -> FwdSm80:
    changes: dict[str, int] = {}
    if scores:
        changes |= FWD_SM80_SCORES.get(tile.value_dim, {})
    if arch != "sm_90a":
        changes |= FWD_SM80_ELSEWHERE.get(tile.value_dim, {})
    config = replace(tile, element=element, scores=scores, narrow=narrow)
    return replace(config, **changes)  # type: ignore[arg-type]


def _fwd_sm80_tile(p: Problem) -> FwdSm80 | None:
    fits = (t for t in FWD_SM80_TILES if p.head_dim <= t.head_dim and p.value_dim <= t.value_dim)
    return next(fits, None)


def configs(kernel: str, arch: str) -> Iterator[Config]:
    """Every Config of a kernel that `plan` can choose on `arch`."""
    if kernel == "fwd_sm80":
        for element in ELEMENTS.values():
            for tile in FWD_SM80_TILES:
                for scores, narrow in ((False, False), (True, False), (True, True)):
                    yield _fwd_sm80_config(
                        tile, arch, element=element, scores=scores, narrow=narrow
                    )


def _refuse_fwd_sm80(p: Problem, device: Device) -> str | None:
    if device.arch == "host":
        return "needs CUDA arrays, found NumPy arrays"
    if device.arch not in KERNELS["fwd_sm80"].architectures:
        return f"needs one of {', '.join(KERNELS['fwd_sm80'].architectures)}, found {device.arch}"
    if p.dtype not in ELEMENTS:
        return f"dtype {p.dtype}: takes {' and '.join(ELEMENTS)}"
    if _fwd_sm80_tile(p) is None:
        return f"head_dim={p.head_dim}, value_dim={p.value_dim}: takes up to 256"
    if max(p.max_q, p.max_k) > MAX_LENGTH:
        return f"sequences of {p.max_q} queries and {p.max_k} keys: takes up to {MAX_LENGTH}"
    (launch,) = _plan_fwd_sm80(p, device)
    if launch.grid > MAX_GRID:
        return (
            f"a grid of {launch.grid} blocks: takes up to {MAX_GRID}; a smaller batch or "
            "max_seqlen_q= may help"
        )
    return None


def _plan_fwd_sm80(p: Problem, device: Device) -> tuple[Launch, ...]:
    tile = _fwd_sm80_tile(p)
    assert tile is not None
    config = _fwd_sm80_config(
        tile,
        device.arch,
        element=ELEMENTS[p.dtype],
        # Narrow copies are slow anyhow: one form of them serves all scores.
        scores=p.scores.softcap or p.scores.alibi or p.scores.reversed or p.copy_bytes < 16,
        narrow=p.copy_bytes < 16,
    )
    m_blocks = -(-p.max_q // config.block_m)
    pairs = p.batch * p.q_heads
    return (
        Launch(
            kernel="fwd_sm80",
            config=config,
            grid=m_blocks * pairs,
            scalars=(
                ("m_blocks", m_blocks),
                ("head_group", min(HEAD_GROUP_CAUSAL if p.mask.causal else HEAD_GROUP, pairs)),
            ),
        ),
    )


# ---- the ordered list ----------------------------------------------------------------------------


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

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown
    backend name.
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
