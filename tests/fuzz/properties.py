"""The properties of every random mask. Each takes a JSON case and raises if it does not hold."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch

from tests.fuzz.cases import build, problem, table
from tests.python import accuracy, oracle

Json = Any


def reproducer(name: str, case: Json) -> str:
    """One line that runs this case again."""
    return f"python -m tests.fuzz.replay {name} '{json.dumps(case)}'"


def cells(case: Json) -> None:
    """dense() is the brute force; tiles() has its exact classes, whatever the tile."""
    mask, meaning = build(case["tree"])
    p = problem(_plain(case))
    visible = p.visible(meaning)
    where: dict[str, Any] = {"num_kv_heads": p.Hkv, "q_offset": _torch(case["q_offset"])}
    if p.cu_q is not None:
        where |= {"cu_seqlens_q": torch.tensor(p.cu_q), "cu_seqlens_k": torch.tensor(p.cu_k)}
    got = mask.dense(p.B, p.Hq, p.Lq, p.Lk, **where).numpy()
    assert np.array_equal(got, visible), f"cells differ, first at {_first(got, visible)}"
    inside = p.visible(oracle.Cells(lambda f: f.i == f.i))
    truth = oracle.classes(visible, tuple(case["tile"]), inside)
    tiles = mask.tiles(p.B, p.Hq, p.Lq, p.Lk, tile=tuple(case["tile"]), **where)
    classes = tiles.classes.expand(truth.shape).numpy()
    assert np.array_equal(classes, truth), f"classes differ, first at {_first(classes, truth)}"


def attention(case: Json) -> None:
    """Output, LSE and every gradient obey the accuracy rule."""
    mask, meaning = build(case["tree"])
    p = problem(_plain(case))
    options = _options(case, p)
    if case["q_offset"] is not None:
        options["q_offset"] = _torch(case["q_offset"])
    accuracy.check_attention(
        mask, torch.from_numpy(p.visible(meaning)), Hkv=p.Hkv, D=case["D"], Dv=case["Dv"],
        dtype=getattr(torch, case["dtype"]), seed=case["seed"], options=options,
    )  # fmt: skip


def varlen(case: Json) -> None:
    """attention_varlen equals the dense oracle, sequence by sequence."""
    mask, meaning = build(case["tree"])
    p = problem(case)
    accuracy.check_varlen(
        mask, p, meaning, D=case["D"], Dv=case["Dv"], dtype=getattr(torch, case["dtype"]),
        seed=case["seed"], options=_options(case, p),
    )  # fmt: skip


PROPERTIES = {"cells": cells, "attention": attention, "varlen": varlen}


def _plain(case: Json) -> Json:
    """The case with its q_offset table as a list."""
    offset = case["q_offset"]
    return case | {"q_offset": table(offset).tolist()} if isinstance(offset, dict) else case


def _torch(offset: Json) -> Any:
    return torch.from_numpy(table(offset)) if isinstance(offset, dict) else offset


def _first(a: np.ndarray, b: np.ndarray) -> tuple[int, ...]:
    return tuple(int(x) for x in np.argwhere(a != b)[0])


def _options(case: Json, p: oracle.Problem) -> dict[str, Any]:
    g = torch.Generator().manual_seed(case["seed"] + 1)
    pick = np.random.default_rng(case["seed"] + 1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def one_of(*sizes: int) -> int:
        return int(pick.choice(sizes))

    heads = (1, p.Hkv, p.Hq)
    packed = p.cu_q is not None
    made = {
        "scale": lambda: 0.3,
        "softcap": lambda: 1.5,
        "bias": lambda: draw(one_of(1, p.B), one_of(*heads), one_of(1, p.Lq), one_of(1, p.Lk)),
        "key_bias": lambda: draw(one_of(*heads), case["Tk"]) if packed else draw(
            one_of(1, p.B), one_of(*heads), p.Lk),
        "alibi_slopes": lambda: draw(p.Hq).abs() / 8,
        "sinks": lambda: draw(p.Hq),
        "dropout_p": lambda: 0.25,
    }  # fmt: skip
    options = {name: made[name]() for name in case["options"]}
    return options | ({"seed": case["seed"] + 2**35} if "dropout_p" in options else {})
