"""Property tests over random masks. Every failure prints a line that replays it.

The same cases every time, unless asked otherwise: JALI_FUZZ_SEED=<number or "random"> draws others,
JALI_FUZZ_SCALE=<factor> draws more.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from tests.fuzz import cases
from tests.fuzz.properties import PROPERTIES, reproducer

SCALE = float(os.environ.get("JALI_FUZZ_SCALE", "1"))
SEED = os.environ.get("JALI_FUZZ_SEED", "0")
FIRST_SEED = random.randrange(2**31) if SEED == "random" else int(SEED)
SHARDS = range(4)  # so that several workers can share a property


def run(name: str, strategy: st.SearchStrategy, shard: int, count: int, record: Callable) -> None:
    ran = 0

    @seed(FIRST_SEED + shard)
    @settings(
        max_examples=max(1, int(count * SCALE / len(SHARDS))), deadline=None, database=None,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def holds(case: cases.Json) -> None:
        nonlocal ran
        ran += 1
        note(reproducer(name, case))
        PROPERTIES[name](case)

    try:
        holds()
    finally:
        record("cases", ran)


@pytest.mark.parametrize("shard", SHARDS)
def test_cells(shard: int, record_property: Callable) -> None:
    run("cells", cases.cases(), shard, 2400, record_property)


@pytest.mark.parametrize("shard", SHARDS)
def test_cells_varlen(shard: int, record_property: Callable) -> None:
    run("cells", cases.varlen_cases(), shard, 800, record_property)


@pytest.mark.parametrize("shard", SHARDS)
def test_attention(shard: int, record_property: Callable) -> None:
    run("attention", cases.attention_cases(), shard, 2000, record_property)


@pytest.mark.parametrize("shard", SHARDS)
def test_varlen(shard: int, record_property: Callable) -> None:
    run("varlen", cases.varlen_cases(), shard, 1000, record_property)
