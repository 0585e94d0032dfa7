# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/decode_split.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rawattn.decode_configs import DecodeSm90
from rawattn.device import SMEM_KB, Device
from rawattn.paged_problem import ITEMSIZES, PagedProblem
from rawattn.plan import decode_sm90, paged_v2
from rawattn.plan.base import EIGHT_BIT, ELEMENTS, Launch, refuses_device
from rawattn.plan.decode_maps import maps
from rawattn.plan.decode_sm90 import in_boxes
from rawattn.problem import MAX_LENGTH, CacheLayout, Rows
from rawattn.registry import DecodeSplit

HEAD_DIMS = (64, 128, 256)  # of tiles
UNALIGNED_DIMS = HEAD_DIMS[1:]  # of those whose elements are moved one by one: few configs
WIDE_TILES = {64: 4, 128: 4, 256: 2}  # of 8 rows, for many: as many as registers hold
# Bytes in flight an SM that we aim at. More were 1 to 2 % slower at size and no faster at batch 1
# (H200, 2026-11-30).
IN_FLIGHT = 128 * 1024
SPLIT_STEP = 64  # a fixed split is a multiple of this, as this is of any Config.unit
# Blocks of a cluster that shares a segment, where all segments are on the GPU at a time: 1 to 3 us
# less (H200, 2026-11-30). A cluster needs SMs of one GPC, and 16 of 8 blocks, or 32 of 4, did not
# fit at once: large ones for at most CLUSTER_SHARE of the SMs. Nothing balances them: where one
# sequence is long and all others are not, few blocks have it alone (8 k keys, 7 of 8 empty: 30 %
# longer), and few clusters do not fill the memory. So there is a limit of keys a block, and a lower
# one where clusters are on less than CLUSTER_FILLS of the SMs. Compiled for one head size.
CLUSTERS = (8, 4, 2)
CLUSTER_SHARE = 0.75
CLUSTER_FILLS = 0.4
CLUSTER_KEYS = 4096
CLUSTER_KEYS_ALONE = 8192  # one sequence: nothing to balance
CLUSTER_KEYS_FEW = 1024
CLUSTER_HEAD_DIM = 128
CLUSTER_CACHE = "e4m3"  # beside those of 16 bits
TILED_CACHE = "e4m3"  # of those of 8 bits, the one that has several tiles of rows: by TMA
# 9 to 16 rows, 128 x 1 k keys and 4 queries: 136 us, and 150 by decode_sm90; 32 x 4 k: 128.6 and
# 131.5 (H200, 2026-11-30).
PAIR_HEAD_DIM = 128
PAIR_SEGMENTS = 256  # with fewer of them, 1 to 2 % longer: there are more parts to merge
# KV heads that a unit holds where a token's row of one has ROW_OF_ONE bytes: twice as many together
# are read in 1 to 3 % less time (NHD, H200; other layouts have the rows of a head together).
# Segments are half as many, so there have to be many, and long ones. Where sequences may be very
# long, few of them often are: 63 of 128 keys beside one of 128 k took 18 % longer.
HEADS = 2
ROW_OF_ONE = 128
HEADS_BATCH = 32
HEADS_TOKENS = 2**17  # of the batch
HEADS_KEYS = 2**14  # of a sequence, at most
# What it is worth that a block walks one KV head only, in step with its neighbours: 128 blocks that
# did took 1 to 4 % less time than 132 that did not (H200, 2026-11-30).
LOCKSTEP = 1.05


def _row_bytes(head_dim: int, element: str, cache: str) -> int:
    """Of a token's keys, or values, of one KV head."""
    return head_dim * (2 if cache == element else 1)


def _config(
    arch: str,
    head_dim: int,
    *,
    element: str,
    cache: str,
    tma: bool = False,
    xmajor: bool = False,
    features: bool = True,
    wide: bool = False,
    cluster: int = 1,
    unaligned: bool = False,
    heads: int = 1,
) -> DecodeSplit:
    """The Config of these properties; a wide one has tiles for many rows. As many warps and stages
    as reach IN_FLIGHT (by TMA: and one more, which is read), or as shared memory holds.
    """
    row = _row_bytes(head_dim, element, cache) * heads
    config = DecodeSplit(
        element=element,
        cache=cache,
        head_dim=head_dim,
        row_tiles=WIDE_TILES[head_dim] if wide else 1,
        warps=8 if row <= 256 else 4,
        # Bytes are widened in registers, of which many rows leave few.
        unit=32 if row <= 128 and not (wide and cache != element) else 16,
        stages=0,
        tma=tma,
        xmajor=xmajor,
        features=features,
        cluster=cluster,
        blocks_per_sm=1,
        unaligned=unaligned,
        heads=heads,
    )
    while True:
        wanted = IN_FLIGHT // (config.warps * 2 * config.unit * row)
        for stages in range(max(2, wanted) + tma, 1, -1):
            found = replace(config, stages=stages)
            if found.smem_bytes <= SMEM_KB[arch] * 1024:
                return found
        config = replace(config, warps=config.warps - 1)


def _with_heads(head_dim: int, *, element: str, cache: str) -> DecodeSplit | None:
    """The Config for Hopper whose units hold HEADS KV heads; None where the row of one is not
    ROW_OF_ONE.
    """
    if _row_bytes(head_dim, element, cache) != ROW_OF_ONE:
        return None
    return _config(
        "sm_90a",
        head_dim,
        element=element,
        cache=cache,
        tma=True,
        features=False,
        heads=HEADS,
    )


# (tma, features, wide) that are compiled of each element, layout and tile; and of 16-bit caches in
# NHD or HND beside.
VARIANTS = ((True, False, False), (False, True, False))
TILED = (True, True, True)
WIDE_VARIANTS = ((True, True, False), TILED, (False, True, True))


def _variants(arch: str, head_dim: int, cache: str, xmajor: bool) -> list[tuple[bool, bool, bool]]:
    """Those of them that there are on `arch`."""
    quantized = cache in EIGHT_BIT.values()
    # Few configs: of 8-bit caches only those of the most common head size come by TMA.
    tma = arch == "sm_90a" and (head_dim == 128 or not quantized)
    variants = [*VARIANTS]
    if not xmajor:
        variants += [TILED] if cache == TILED_CACHE else [] if quantized else WIDE_VARIANTS
    # Wide ones of 16 bits by TMA are for head sizes that decode_sm90 does not take.
    return [
        (copies, features, wide)
        for copies, features, wide in variants
        if not copies or (tma and (quantized or not (wide and head_dim in decode_sm90.UNITS)))
    ]


def configs(arch: str) -> Iterator[DecodeSplit]:
    """Every Config that `launches` can choose on `arch`."""
    if arch == "sm_90a":
        for element in ELEMENTS.values():
            for xmajor in (False, True):
                for cluster in CLUSTERS:
                    yield _clustered(arch, element, element, xmajor, cluster)
                    if element == "fp16":
                        yield _clustered(arch, element, CLUSTER_CACHE, xmajor, cluster)
            yield _paired(arch, element)
    for cache in (*ELEMENTS.values(), *EIGHT_BIT.values()):
        element = "fp16" if cache in EIGHT_BIT.values() else cache
        for head_dim in HEAD_DIMS:
            shared = _with_heads(head_dim, element=element, cache=cache)
            if shared is not None and arch == "sm_90a":
                yield shared
            for xmajor in (False, True):
                for tma, features, wide in _variants(arch, head_dim, cache, xmajor):
                    yield _config(
                        arch,
                        head_dim,
                        element=element,
                        cache=cache,
                        tma=tma,
                        xmajor=xmajor,
                        features=features,
                        wide=wide,
                    )
        for head_dim in UNALIGNED_DIMS:
            yield _config(arch, head_dim, element=element, cache=cache, unaligned=True)


def _turned(p: PagedProblem) -> bool:
    """Whether values of an x-major cache lie in no whole pieces, and come element by element."""
    tokens = 16 // ITEMSIZES[p.cache_dtype]
    return p.layout is CacheLayout.X_MAJOR and p.page % tokens != 0


def _unaligned(p: PagedProblem) -> bool:
    """Whether there are rows, or pieces of x-major values, that are no 16 bytes on 16 bytes."""
    return p.copy_bytes < 16 or _turned(p)


def _clustered(arch: str, element: str, cache: str, xmajor: bool, cluster: int) -> DecodeSplit:
    """The Config for few segments."""
    return _config(
        arch,
        CLUSTER_HEAD_DIM,
        element=element,
        cache=cache,
        tma=True,
        xmajor=xmajor,
        features=False,
        cluster=cluster,
    )


def _paired(arch: str, element: str) -> DecodeSplit:
    """The Config for 9 to 16 rows: two tiles whose q is in registers."""
    config = _config(arch, PAIR_HEAD_DIM, element=element, cache=element, tma=True)
    return replace(config, row_tiles=2)


def _cluster(p: PagedProblem, device: Device) -> int:
    """Blocks of a cluster that shares a segment; 1: segments are balanced over the grid instead."""
    for blocks in CLUSTERS:
        share = p.batch * p.kv_heads * blocks / device.sms
        if share <= (CLUSTER_SHARE if blocks > 2 else 1):
            keys = CLUSTER_KEYS_FEW
            if share >= CLUSTER_FILLS:
                keys = CLUSTER_KEYS if p.batch > 1 else CLUSTER_KEYS_ALONE
            return blocks if 0 < p.max_k <= keys * blocks else 1
    return 1


def _shares_units(p: PagedProblem) -> bool:
    """Whether units of several KV heads take less time."""
    fits = p.layout is CacheLayout.NHD and p.kv_heads % HEADS == 0 and p.rows * HEADS <= 8
    many = p.batch >= HEADS_BATCH and p.batch * p.max_k >= HEADS_TOKENS
    return fits and many and p.max_k <= HEADS_KEYS


def _chosen(p: PagedProblem, device: Device) -> DecodeSplit:
    """The one of decode_split."""
    arch = device.arch
    xmajor = p.layout is CacheLayout.X_MAJOR
    head_dim = next(d for d in HEAD_DIMS if d >= max(p.head_dim, p.value_dim))
    cache = EIGHT_BIT.get(p.cache_dtype) or ELEMENTS[p.cache_dtype]
    element = "fp16" if p.quantized else cache
    if _unaligned(p):
        head_dim = max(head_dim, UNALIGNED_DIMS[0])
        return _config(arch, head_dim, element=element, cache=cache, unaligned=True)
    variants = _variants(arch, head_dim, cache, xmajor)
    whole = p.head_dim == p.value_dim == head_dim
    tma = whole and in_boxes(p) and not p.leftpad
    masked = p.mask.left >= 0 or (p.mask.right >= 0 and p.max_q > 1) or p.tree
    features = masked or p.scores.softcap or p.scores.alibi
    # A fixed split promises bits that do not depend on the longest query of the batch either.
    wide = p.rows > 8 or p.split > 0
    if p.quantized:  # whose 8 rows with features come by TMA only so
        wide = not p.split and (p.rows > 8 or (features and p.max_q > 1))
    wanted = (
        (copies, flags, tiles)
        for tiles in ((True, False) if wide else (False,))
        for copies, flags in ((tma, features), (tma, True), (False, True))
    )
    chosen = next(v for v in wanted if v in variants)
    plain = chosen == (True, False, False) and not p.split and p.rows <= 8
    if plain and arch == "sm_90a":
        clusters = head_dim == CLUSTER_HEAD_DIM and cache in (element, CLUSTER_CACHE)
        blocks = _cluster(p, device) if clusters else 1
        if blocks > 1:
            return _clustered(arch, element, cache, xmajor, blocks)
        found = _with_heads(head_dim, element=element, cache=cache)
        if found is not None and _shares_units(p):
            return found
    return _config(
        arch,
        head_dim,
        element=element,
        cache=cache,
        tma=chosen[0],
        xmajor=xmajor,
        features=chosen[1],
        wide=chosen[2],
    )


def refuses(p: PagedProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("decode_split", device):
        return reason
    if p.dtype not in ELEMENTS:
        return f"dtype {p.dtype}: takes {' and '.join(ELEMENTS)}"
    if p.cache_dtype not in (p.dtype, *EIGHT_BIT):
        return f"a cache of {p.cache_dtype}: takes {p.dtype}, {', '.join(EIGHT_BIT)}"
    if max(p.head_dim, p.value_dim) > HEAD_DIMS[-1]:
        return f"head_dim={p.head_dim}, value_dim={p.value_dim}: takes up to {HEAD_DIMS[-1]}"
    if p.block_sparse:
        return "block-sparse attention: paged_v2 and paged_v1 take it"
    if p.q_rows not in (Rows.DENSE, Rows.PACKED):
        return f"{p.q_rows.value} queries: takes dense and packed ones"
    if p.mask.top_left and not p.mask.trivial:
        return "a mask aligned to the top left: takes the bottom right"
    if max(p.max_q, p.max_k) > MAX_LENGTH:
        return f"sequences of {p.max_q} queries and {p.max_k} keys: takes up to {MAX_LENGTH}"
    if p.split < 0 or p.split > MAX_LENGTH:
        return f"split={p.split}: takes 0 to {MAX_LENGTH}"
    if p.rows == 1 and p.page > 1 and _turned(p) and paged_v2.refuses(p, device) is None:
        # 407 and 230 us, pages of 4; alike with two rows; 403 and 763 us with four (H200,
        # 2026-11-30)
        return f"x-major pages of {p.page} tokens for one row a KV head: paged_v2 takes less time"
    return None


def config_of(p: PagedProblem, device: Device) -> DecodeSplit | DecodeSm90:
    """The Config for a problem that `refuses` does not refuse."""
    config = decode_sm90.chosen(p, device)
    if config is None:
        return _chosen(p, device)
    return _paired(device.arch, config.element) if _pairs(p, config) else config


def launches(p: PagedProblem, device: Device) -> tuple[Launch, ...]:
    """One launch, with as many blocks as fit on the GPU at a time."""
    config = config_of(p, device)
    row_blocks = -(-p.rows // (config.rows // config.heads))
    lines = p.kv_heads // config.heads * row_blocks
    resident = max(1, min(2, device.smem_per_sm // (config.smem_bytes + 1024)))
    columns = _columns(lines, device.sms * resident)
    # As many blocks as if each KV head had a column: sequences are split alike then.
    share = columns * config.heads
    grid = share * max(1, device.sms * resident // share)
    if config.cluster > 1:
        columns, grid = lines, p.batch * lines * config.cluster
    span = -(-p.split // SPLIT_STEP) * SPLIT_STEP // config.unit
    column_slots = 0
    if span:
        column_slots = p.batch * max(1, -(-p.max_k // (span * config.unit))) * (lines // columns)
    workers = grid * (config.workers if isinstance(config, DecodeSplit) else config.cluster == 1)
    slots = columns * column_slots if span else 2 * workers
    divisors = {
        "page": p.page,
        "span": max(1, span),
        "columns": columns,
        "rows": grid // columns,
        "group": p.group,
    }
    return (
        Launch(
            kernel="decode_split" if isinstance(config, DecodeSplit) else "decode_sm90",
            config=config,
            grid=grid,
            scalars=(
                ("columns", columns),
                ("rows", grid // columns),
                ("lines", lines // columns),
                ("row_blocks", row_blocks),
                ("span", span),
                ("column_slots", column_slots),
                *(pair for name, divisor in divisors.items() for pair in _magic(name, divisor)),
            ),
            maps=maps(p, config) if isinstance(config, DecodeSm90) or config.tma else (),
            cluster=config.cluster,
            counters=slots * config.counters,
            workspace_bytes=slots * config.slot_bytes,
        ),
    )


def _pairs(p: PagedProblem, instead: DecodeSm90) -> bool:
    """Whether two tiles of rows take less time than decode_sm90, whose are clusters and splits."""
    fits = 8 < p.rows <= 16 and instead.head_dim == PAIR_HEAD_DIM
    alike = instead.cluster == 1 and not instead.xmajor
    return fits and alike and not p.split and p.batch * p.kv_heads >= PAIR_SEGMENTS


def _magic(name: str, divisor: int) -> tuple[tuple[str, int], ...]:
    """Fields with ``n // divisor == n * magic >> shift`` for n below 2^31; magic is below 2^32."""
    shift = 31 + (divisor - 1).bit_length()
    return (f"{name}_magic", -(-(1 << shift) // divisor)), (f"{name}_shift", shift)


def _columns(lines: int, blocks: int) -> int:
    """Into how many columns to deal out the lines: a divisor that leaves few blocks idle."""
    divisors = [c for c in range(1, min(lines, blocks) + 1) if lines % c == 0]

    def worth(columns: int) -> float:
        return columns * (blocks // columns) * (LOCKSTEP if columns == lines else 1)

    return max(divisors, key=lambda c: (worth(c), c))
