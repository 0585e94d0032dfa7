# SPDX-License-Identifier: Apache-2.0
"""The laws of paged attention find what they are made to find."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rawattn.testing.paged_cases import PagedCase
from rawattn.testing.paged_laws import (
    PagedLaw,
    PagedOp,
    law_appending_is_storing_before,
    law_layouts_are_equal,
    law_neighbours_are_invisible,
    law_paged_matches_reference,
    law_paged_reruns_are_equal,
    law_pages_are_invisible,
    law_splits_are_invisible,
    with_kvcache,
)

CASE = PagedCase(
    q_lens=(2, 2),
    k_lens=(40, 17),
    dtype="float16",
    q_heads=4,
    kv_heads=2,
    causal=True,
    sink=True,
    split=16,
    new=1,
    table="block_table",
)
calls = itertools.count()


def right(a: dict[str, Any]) -> None:
    with_kvcache(None, a)


def one_slot_more(a: dict[str, Any]) -> None:
    with_kvcache(None, a | {"cache_seqlens": a["cache_seqlens"] + np.int32(a["k"].shape[1] == 0)})
    a["out"][a["out"] == a["out"].max()] *= 1.02


def no_sink(a: dict[str, Any]) -> None:
    with_kvcache(None, a | {"sink": None})


def writes_elsewhere(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["v_cache"].reshape(-1)[7:8] = 0


def writes_to_q(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["q"][...] = 0


def counts_the_new_tokens(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["cache_seqlens"] += np.int32(1)


def writes_around(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    np.lib.stride_tricks.as_strided(a["out"].reshape(-1), (a["out"].size + 1,))[-1:] = 0


def forgets_new_tokens(a: dict[str, Any]) -> None:
    old = a["cache_seqlens"] - np.int32(0 if "k" in a else 1)
    with_kvcache(None, {**a, "k": None, "v": None, "cache_seqlens": old})


def counts_calls(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["out"][0, 0, 0, 0] += np.float16(next(calls) % 2)


def reads_slots_of_nobody(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["lse"][0, 0, 0] += np.float32(np.isnan(a["v_cache"].astype(np.float32)).any())


def knows_layouts(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["lse"][...] += np.float32(1e-6 * ord(a["layout"][0]))


def knows_the_batch(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    a["lse"][...] += np.float32(1e-5 * len(a["q"]))


def cannot_split(a: dict[str, Any]) -> None:
    with_kvcache(None, a)
    if a["split_tokens"] == 64:
        a["out"][...] = 0


@pytest.mark.parametrize(
    ("law", "call", "message"),
    [
        (law_paged_matches_reference, one_slot_more, "out["),
        (law_paged_matches_reference, no_sink, "want"),
        (law_paged_matches_reference, writes_elsewhere, "v_cache: "),
        (law_paged_matches_reference, writes_to_q, "q: an input was written"),
        (law_paged_matches_reference, counts_the_new_tokens, "cache_seqlens: an input was written"),
        (law_paged_matches_reference, writes_around, "outside its rows were written"),
        (law_appending_is_storing_before, forgets_new_tokens, "k_cache: "),
        (law_paged_reruns_are_equal, counts_calls, "want the bits of"),
        (law_pages_are_invisible, reads_slots_of_nobody, "lse["),
        (law_layouts_are_equal, knows_layouts, "lse["),
        (law_neighbours_are_invisible, knows_the_batch, "lse["),
        (law_splits_are_invisible, cannot_split, "out["),
    ],
    ids=lambda x: getattr(x, "name", getattr(x, "__name__", "")),
)
def test_a_wrong_op_is_caught(
    law: PagedLaw, call: Callable[[dict[str, Any]], None], message: str
) -> None:
    law(PagedOp(name="right", call=lambda **a: right(a)), CASE)
    op = PagedOp(name="wrong", imports="import mine", call=lambda **a: call(a))
    with pytest.raises(AssertionError) as caught:
        law(op, CASE)
    assert message in str(caught.value)
    assert f'python -c "import mine; {law.name}(wrong, PagedCase(' in str(caught.value)
