# SPDX-License-Identifier: Apache-2.0
"""What a GPU gave for a fixed set of small problems, tests/gpu_outputs.npz: the emulator is held to
it.

`python -m tools.gpu_tests --outputs` records. The file holds the cases themselves, a checksum of
the inputs that each makes, and a part of out and lse: of a large array every n-th element, where n
leaves out no column. Of kernels without approximate instructions it holds digests (`gpu_bits`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rawattn import registry
from rawattn.plan import configs
from rawattn.registry import FwdSm80
from rawattn.testing import Case, Limits, Op, Record, Tensors, assert_close, expected, run, tensors
from rawattn.testing.closeness import assert_within, bounds
from rawattn.testing.inputs import Array, Results
from rawattn.testing.strategies import problems
from tools.gpu_bits import Bits
from tools.gpu_tests import ROOT, sources_digest

FILE = ROOT / "tests" / "gpu_outputs.npz"
# Results depend on these and on the kernels. How plans are launched does not count: the file would
# be out of date more often.
CODE = ("plan", "registry", "cache_configs")
# The kernels that results are of: none on wgmma.
WGMMA = ("fwd_sm90", "fwd_sm90_self", "fwd_sm90_paged", "decode_sm90")
KERNELS = tuple(kernel for kernel in registry.KERNELS if kernel not in WGMMA)
OUT_ELEMENTS, LSE_ELEMENTS = 1024, 256  # of a problem, at most: the file stays below a megabyte

# ---- the problems --------------------------------------------------------------------------------

EACH = 9  # problems for a Config
MAX_WORK = 1 << 24  # products of padded tiles: 0.1 s on the emulator
LIMITS = Limits(dtypes=("float16", "bfloat16"), max_len=150, max_heads=4, max_batch=3)
DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def chosen_configs() -> Iterator[FwdSm80]:
    """Each tile without, with score steps, and with narrow copies, but few of them with both
    elements: g++ takes seconds for a Config. The emulator's other tests use most of these.
    """
    for config in configs("fwd_sm80", "sm_90a"):
        assert isinstance(config, FwdSm80)
        if config.element == ("fp16" if config.narrow else "bf16") or config.head_dim == 64:
            yield config


def _dims(config: FwdSm80) -> st.SearchStrategy[tuple[int, int]]:
    """Head dimensions that this tile is the first to hold: its own, and any."""
    own = config.head_dim, config.value_dim
    tiles = dict.fromkeys((c.head_dim, c.value_dim) for c in chosen_configs())
    step = 1 if config.narrow else 8
    pairs = [
        (d, dv)
        for d, dv in itertools.product(*(range(step, n + 1, step) for n in own))
        if next(t for t in tiles if d <= t[0] and dv <= t[1]) == own
    ]
    return st.just(own) | st.sampled_from(pairs)


def _needs(config: FwdSm80, case: Case) -> bool:
    """Whether a case has rows, is cheap, and is of the form (scores, narrow) of a Config."""
    blocks = sum(-(-q // 64) * -(-k // 64) for q, k in zip(case.q_lens, case.k_lens, strict=True))
    work = blocks * 64 * 64 * case.q_heads * (config.head_dim + config.value_dim)
    narrow = bool(case.memory == "unaligned" or case.head_dim % 8 or case.value_dim % 8)
    reversed_ = case.scale is not None and case.scale <= 0
    scores = narrow or bool(case.softcap or case.alibi != "none" or reversed_)
    form = config.narrow, config.scores
    return sum(case.q_lens) > 0 and work <= MAX_WORK and (narrow, scores) == form


def draw_cases() -> list[Case]:
    """The problems: `EACH` for each of the `chosen_configs`. Another release of Hypothesis may draw
    others, which is why the file holds them.
    """
    found: list[Case] = []
    for number, config in enumerate(chosen_configs()):
        plain = dataclasses.replace(LIMITS, softcap=False, alibi=("none",), scales=(None, 0.3, 1.0))
        limits = LIMITS if config.scores else plain

        @seed(number)
        @settings(
            max_examples=EACH + 1,
            database=None,
            phases=[Phase.generate],
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.builds(
                lambda case, dims, dtype=DTYPES[config.element]: dataclasses.replace(
                    case, dtype=dtype, head_dim=dims[0], value_dim=dims[1]
                ),
                problems(limits),
                _dims(config),
            ).filter(lambda case, config=config: _needs(config, case))
        )
        def add(case: Case) -> None:
            found.append(case)

        first = len(found)
        add()
        del found[first]  # the simplest that there is
    return found


# ---- outputs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a GPU gave for a case: `sample`s of out, as bits, and of lse."""

    case: Case
    inputs: int  # a checksum
    out: Array
    lse: Array

    def within(self, results: Results) -> Results:
        """`results` with the recorded elements in their places."""
        values = self.out.view(self.case.dtype), self.lse
        replaced = [x.copy() for x in results]
        for x, index, value in zip(replaced, samples(results), values, strict=True):
            x.reshape(-1)[index] = value
        return replaced[0], replaced[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs of one GPU; `sources` is the digest of what ran. `bits` are those of kernels
    without approximate instructions.
    """

    gpu: str
    sources: str
    outputs: tuple[Output, ...]
    bits: tuple[Bits, ...] = ()


def checksum(t: Tensors) -> int:
    """Of the inputs: NumPy may draw other random numbers some day."""
    value = 0
    for x in (t.q, t.k, t.v, t.alibi_slopes, t.sink):
        value = value if x is None else zlib.crc32(x.tobytes(), value)
    return value


def sample(shape: tuple[int, ...], limit: int) -> Array:
    """Flat indices of at most `limit` elements. Their distance has no divisor in common with the
    number of columns, so that they come from every one.
    """
    size = math.prod(shape)
    distance = next(
        n for n in itertools.count(-(-size // limit) or 1) if math.gcd(n, shape[-1]) < 2
    )
    return np.arange(0, size, distance)


def samples(results: Results) -> tuple[Array, Array]:
    """The flat indices of what is recorded of out and lse."""
    return sample(results[0].shape, OUT_ELEMENTS), sample(results[1].shape, LSE_ELEMENTS)


def record(op: Op, cases: Iterable[Case], gpu: str) -> Outputs:
    """What `op` gives for `cases`. Raises AssertionError where that is not what the reference
    gives.
    """
    outputs = []
    for case in cases:
        t = tensors(case)
        results = run(op, t)
        assert_close(results, expected(t), case, op.record)
        out, lse = (x.reshape(-1)[i] for x, i in zip(results, samples(results), strict=True))
        bits = out.astype(case.dtype).view(np.uint16)
        outputs.append(Output(case=case, inputs=checksum(t), out=bits, lse=lse.astype(np.float32)))
    return Outputs(gpu=gpu, sources=sources_digest(CODE, KERNELS), outputs=tuple(outputs))


def hold(op: Op, output: Output, record: Record) -> None:
    """Runs an op on the case of an output. Both must be what the reference gives, within its bound,
    and no farther than that from each other; `record` sees this last comparison.
    """
    __tracebackhide__ = True
    case = output.case
    t = tensors(case)
    if checksum(t) != output.inputs:
        raise AssertionError(f"the GPU had other inputs, since NumPy draws others: {case!r}")
    mine = run(op, t)
    theirs = output.within(mine)
    want = expected(t)
    exact = want.out[..., : case.value_dim], want.lse
    limits = bounds(want, case.dtype)
    for what, got, wanted, seen in (
        (op.name, mine, exact, op.record),
        ("GPU", theirs, exact, Record()),
        (f"{op.name} beside GPU", mine, theirs, record),
    ):
        try:
            assert_within(got, wanted, limits, case, seen)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
    record.examples += 1


# ---- the file ------------------------------------------------------------------------------------


def save(outputs: Outputs, path: Path = FILE) -> None:
    rows = [
        {**dataclasses.asdict(o.case), "inputs": o.inputs, "sizes": (len(o.out), len(o.lse))}
        for o in outputs.outputs
    ]
    bits = [dataclasses.astuple(b) for b in outputs.bits]
    about = json.dumps(
        {"gpu": outputs.gpu, "sources": outputs.sources, "cases": rows, "bits": bits}
    )
    np.savez_compressed(
        path,
        about=np.frombuffer(about.encode(), np.uint8),
        out=np.concatenate([o.out for o in outputs.outputs]),
        lse=np.concatenate([o.lse for o in outputs.outputs]),
    )


def load(path: Path = FILE) -> Outputs:
    with np.load(path) as file:
        about, out, lse = json.loads(file["about"].tobytes()), file["out"], file["lse"]
    outputs, first = [], (0, 0)
    for row in about["cases"]:
        inputs, sizes = row.pop("inputs"), row.pop("sizes")
        last = first[0] + sizes[0], first[1] + sizes[1]
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
        outputs.append(
            Output(
                case=Case(**fields),
                inputs=inputs,
                out=out[first[0] : last[0]],
                lse=lse[first[1] : last[1]],
            )
        )
        first = last
    bits = tuple(
        Bits(name=name, seed=seed, inputs=inputs, outputs=tuple(digests))
        for name, seed, inputs, digests in about["bits"]
    )
    return Outputs(gpu=about["gpu"], sources=about["sources"], outputs=tuple(outputs), bits=bits)


def why_not(path: Path = FILE) -> str | None:
    """Why nothing can be held to the file; None where something can."""
    how = "`python -m tools.gpu_tests --outputs` on a machine with a GPU writes it"
    if not path.is_file():
        return f"there is no tests/{path.name}: {how}"
    sources, current = load(path).sources, sources_digest(CODE, KERNELS)
    if sources != current:
        return f"tests/{path.name} is of other sources ({sources}, not {current}): {how}"
    return None
