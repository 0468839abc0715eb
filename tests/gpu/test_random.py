"""Random expressions of masks on a GPU: output, LSE and all gradients by the accuracy rule.

Every structure is compiled once and met with several tables, inputs and options. A failure prints
the JSON of its case. JALI_FUZZ_SCALE=<factor> draws more structures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from tests.fuzz import cases, properties
from tests.gpu.sizes import tiles
from tests.python import accuracy

pytestmark = pytest.mark.gpu

SCALE = float(os.environ.get("JALI_FUZZ_SCALE", "1"))
SHARDS = range(32)
STRUCTURES = 8  # of a shard
REPEATS = 12  # of a structure
DIMS = [
    (64, 64), (128, 128), (40, 40), (80, 80), (96, 96), (192, 192), (256, 256), (128, 64),
    (256, 192), (144, 256), (32, 32), (72, 72), (160, 160), (192, 128),
    (112, 112), (176, 128), (16, 24),
]  # fmt: skip


@st.composite
def attention_cases(draw: st.DrawFn) -> Any:
    s = draw(cases.shapes(longest=300))
    depth = draw(st.sampled_from([2, 3, 4, 1, 0]))
    return s | {"tree": draw(cases.trees(s, depth, cases.ALL))} | draw(kinds())


@st.composite
def varlen_cases(draw: st.DrawFn) -> Any:
    case = draw(cases.varlen_cases())
    shape = {k: v for k, v in case.items() if k not in ("tree", "tile")}
    return shape | {"tree": draw(cases.trees(shape, 2, cases.VARLEN))} | draw(kinds())


@st.composite
def kinds(draw: st.DrawFn) -> Any:
    D, Dv = draw(st.sampled_from(DIMS))
    names = ["softcap", "bias", "key_bias", "alibi_slopes", "sinks", "dropout_p"]
    chosen = draw(st.sets(st.sampled_from(names), max_size=2))
    options = sorted(chosen) if draw(st.integers(0, 3)) == 0 else []
    return {
        "D": D, "Dv": Dv, "dtype": draw(st.sampled_from(["bfloat16", "float16"])),
        "seed": draw(st.integers(0, 999)), "options": options,
    }  # fmt: skip


def reseeded(node: Any, by: int) -> Any:
    """The same structure with other contents of its tables."""
    if isinstance(node, dict):
        return {
            k: (v + by if k == "seed" and isinstance(v, int) else reseeded(v, by))
            for k, v in node.items()
        }
    return [reseeded(x, by) for x in node] if isinstance(node, list) else node


def run(
    strategy: st.SearchStrategy, check: Callable, shard: int, count: int, record: Callable
) -> None:
    ran = 0

    @seed(shard)
    @settings(
        max_examples=max(1, int(count * SCALE)), deadline=None, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(strategy)
    def holds(case: Any) -> None:
        nonlocal ran
        for n in range(REPEATS):
            again = reseeded(case, 1000 * n)
            note(json.dumps(again))
            check(again)
            ran += 1

    holds()
    record("cases", ran)
    record("structures", ran // REPEATS)


def size(case: Any) -> str:
    """Of a forward's tiles: the same for all cases of a structure, which is compiled for once."""
    return "large" if case["seed"] % 2 else "small"


def attention(case: Any, **more: Any) -> None:
    mask, meaning = cases.build(case["tree"])
    p = cases.problem(properties._plain(case))
    options = properties._options(case, p)
    if case["q_offset"] is not None:
        options["q_offset"] = properties._torch(case["q_offset"])
    with tiles(size(case)):
        accuracy.check_attention(
            mask, properties.torch.from_numpy(p.visible(meaning)), Hkv=p.Hkv, D=case["D"],
            Dv=case["Dv"], dtype=getattr(properties.torch, case["dtype"]), seed=case["seed"],
            options=options, device="cuda", **more,
        )  # fmt: skip


def in_order(case: Any) -> None:
    """Deterministic, but for the gradient of a bias that sequences or KV heads may share."""
    options = [name for name in case["options"] if name != "bias"]
    attention(case | {"options": options}, deterministic=True)


def varlen(case: Any) -> None:
    mask, meaning = cases.build(case["tree"])
    p = cases.problem(case)
    with tiles(size(case)):
        accuracy.check_varlen(
            mask, p, meaning, D=case["D"], Dv=case["Dv"],
            dtype=getattr(properties.torch, case["dtype"]), seed=case["seed"],
            options=properties._options(case, p), device="cuda",
        )  # fmt: skip


@pytest.mark.parametrize("shard", SHARDS)
def test_attention(shard: int, record_property: Callable) -> None:
    run(attention_cases(), attention, shard, STRUCTURES, record_property)


@pytest.mark.parametrize("shard", range(100, 116))
def test_deterministic(shard: int, record_property: Callable) -> None:
    run(attention_cases(), in_order, shard, 3, record_property)


@pytest.mark.parametrize("shard", SHARDS)
def test_varlen(shard: int, record_property: Callable) -> None:
    run(varlen_cases(), varlen, shard, 2, record_property)
