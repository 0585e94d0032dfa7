# SPDX-License-Identifier: Apache-2.0
"""Prototypes of the Configs of ``cuda/fwd_sm90.cu`` and ``cuda/fwd_sm90_self.cu``: tiles, which
`plan/fwd_sm90.py` chooses among and gives the form of a problem.

Figures are TFLOP/s of an H200, of two candidates of one run in tuning/fwd-sm90.csv, under
bench/results/nvidia-h200; the run is joins3 where none is named.
"""

from __future__ import annotations

from dataclasses import replace

from rawattn.registry import FwdSm90, FwdSm90Self


def _prototype(
    head_dim: int,
    value_dim: int,
    block_n: int,
    *,
    consumers: int = 2,
    stages: int = 2,
    q_buffers: int = 2,
    q_registers: bool = False,
    pingpong: bool = True,
    overlap: bool = False,
    late_draw: bool = False,
) -> FwdSm90:
    return FwdSm90(
        element="bf16",
        head_dim=head_dim,
        value_dim=value_dim,
        block_n=block_n,
        consumers=consumers,
        stages=stages,
        q_buffers=q_buffers,
        q_registers=q_registers,
        pingpong=pingpong,
        overlap=overlap,
        late_draw=late_draw,
        window=False,
        softcap=False,
        scores=False,
    )


D64 = _prototype(64, 64, 128, consumers=3, stages=4, overlap=True)
# Packed full 4k takes 1.014 times as long as dense, with early draws 1.022; dense rows take 0.995
# to 1.006 with late ones (run 2 of tuning/packed-late-draw.csv).
D64_PACKED = replace(D64, late_draw=True)
# Full 2k 595, without q in registers 586; causal 1k 455 and 448 (turns).
D96 = _prototype(96, 96, 128, q_registers=True, overlap=True)
D96_LONG = _prototype(96, 96, 112, consumers=3)  # full 4k 607, 128 x 128 582; more keys spill
# Without the first row's exponentials beside P V: full 16k 651 instead of 683.
D128 = _prototype(128, 128, 128, q_registers=True, overlap=True)
# Not shorter: consumers wait for the next tile with their turn, which took 1k 2 % longer (H200,
# 2026-11-30).
D128_LONG = replace(D128, late_draw=True)
# Full 1k 688, LONG 680; 4k 733 and 744.
D192_128 = _prototype(192, 128, 128, q_buffers=1)
D192_128_LONG = replace(D192_128, pingpong=False, overlap=True)
D192 = _prototype(192, 192, 112, q_buffers=1)
# 64 keys pad and mask less: causal 512 337, 80 keys 316; 2k equal. Full 1k 697 and 707, 2k 725 and
# 726, 4k, where 80 pad more, 763 and 740, 8k 780 and 772, 16k 781 and 786 (keys1).
D256 = _prototype(256, 256, 64, q_buffers=1, late_draw=True)
D256_WIDE = replace(D256, block_n=80)
TILES = (
    D64,
    D64_PACKED,
    D96,
    D96_LONG,
    D128,
    D128_LONG,
    D192_128,
    D192_128_LONG,
    D192,
    D256,
    D256_WIDE,
)
# What may cut query tiles over their keys in place of the tile of a problem.
SPLIT = {tile: replace(tile, split=True) for tile in (D64, D96_LONG, D128, D192_128_LONG, D256)}
SPLIT |= {D64_PACKED: SPLIT[D64], D128_LONG: SPLIT[D128], D256_WIDE: SPLIT[D256]}
SPLIT_TILES = tuple(dict.fromkeys(SPLIT.values()))
SELF = FwdSm90Self(
    element="bf16",
    head_dim=64,
    value_dim=64,
    block_n=128,
    stages=2,
    overlap=True,
    window=False,
    softcap=False,
    scores=False,
    blocks_per_sm=3,
)
# Under a causal mask, tiles of 64 keys waste less of the diagonal, and leave registers for a fourth
# block: 1k 359 instead of 337 (tiles1).
SELF_SHORT = replace(SELF, block_n=64, blocks_per_sm=4)
# What takes the place of a tile where the softmax takes in a softcap, which holds more registers:
# narrower, or without those that hold q. Both rows' exponentials are beside P V with `overlap` too;
# without it 128 takes 1 to 2 % less (tuning/scores.csv, runs 7 and 8), and pages at 64 would spill.
CAPPED: dict[FwdSm90 | FwdSm90Self, FwdSm90 | FwdSm90Self] = {
    D64: replace(D64, block_n=112),
    D64_PACKED: replace(D64_PACKED, block_n=112),
    D96: replace(D96, block_n=112, q_registers=False, overlap=False),
    D128: replace(D128, q_registers=False, overlap=False),
    D128_LONG: replace(D128_LONG, q_registers=False, overlap=False),
    D192_128_LONG: D192_128,
    D256: D256_WIDE,
    SELF: replace(SELF_SHORT, blocks_per_sm=3, overlap=False),
    SELF_SHORT: replace(SELF_SHORT, blocks_per_sm=3, overlap=False),
}
