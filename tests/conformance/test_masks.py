"""Every mask pattern of the conformance list: cells and tile classes against the formula, attention
forward and all gradients against the fp64 oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import jali
import numpy as np
import pytest
import torch

from tests.conformance.cases import CASES, Case, Setting, t
from tests.python import oracle
from tests.python.accuracy import check_attention

TILES = [(128, 128), (64, 32), (48, 80)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# (B, Hq, Hkv, Lq, Lk): lengths 1, 127, 128, 129, 1023, 4096, Lq != Lk both ways, GQA and MQA.
SMALL = [
    (2, 4, 2, 1, 1), (2, 4, 1, 1, 129), (2, 2, 2, 129, 1), (2, 4, 2, 127, 127),
    (2, 4, 2, 128, 128), (2, 4, 2, 129, 129), (2, 2, 1, 127, 128), (2, 2, 1, 129, 127),
]  # fmt: skip
MEDIUM = [(1, 2, 1, 1023, 1023), (1, 2, 1, 127, 1023), (1, 2, 1, 1023, 129)]
LONG = [(1, 1, 1, 4096, 4096), (1, 1, 1, 1, 4096)]


def made(case: Case, dims: tuple) -> tuple[jali.Mask, np.ndarray, Setting]:
    s = Setting(*dims, seed=zlib.crc32(repr((case.name, dims)).encode()))
    mask, formula = case.build(s)
    return mask, s.visible(oracle.Cells(formula)), s


def over(shapes: list[tuple]) -> Callable:
    """One test per case and shape that the case admits."""
    params = [
        pytest.param(case, dims, id=f"{case.name}-{'x'.join(map(str, dims))}")
        for case in CASES
        for dims in shapes
        if not (case.square and dims[3] != dims[4])
        and not (case.heavy and dims[3] * dims[4] > 2**21)
    ]
    return pytest.mark.parametrize(("case", "dims"), params)


@over(SMALL + MEDIUM + LONG)
def test_cells_and_classes(case: Case, dims: tuple) -> None:
    mask, visible, s = made(case, dims)
    cells = mask.dense(s.B, s.Hq, s.Lq, s.Lk, num_kv_heads=s.Hkv)
    assert cells.dtype == torch.bool
    assert np.array_equal(cells.numpy(), visible)
    for tile in TILES[: 1 if s.Lq * s.Lk > 2**21 else None]:
        truth = oracle.classes(visible, tile)
        got = mask.tiles(s.B, s.Hq, s.Lq, s.Lk, tile=tile, num_kv_heads=s.Hkv)
        classes = got.classes.expand(truth.shape).numpy()
        assert np.array_equal(classes, truth), f"tile {tile}: {diff(classes, truth)}"
        count = [int((got.classes == c).sum()) for c in range(3)]
        assert [got.num_empty, got.num_partial, got.num_full] == count
        assert got.density == pytest.approx((truth > 0).mean())


def diff(got: np.ndarray, truth: np.ndarray) -> str:
    at = tuple(int(x) for x in np.argwhere(got != truth)[0])
    return f"class {got[at]} instead of {truth[at]} at (b, h, row, column) = {at}"


@over(SMALL)
def test_attention(case: Case, dims: tuple) -> None:
    mask, visible, s = made(case, dims)
    dtype = DTYPES[s.seed % 4]  # every case meets every dtype below
    check_attention(mask, t(visible), Hkv=s.Hkv, D=16, Dv=8, dtype=dtype, seed=s.seed % 1000)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).split(".")[1])
@over([(1, 4, 2, 129, 129), (2, 2, 1, 67, 140)])
def test_attention_dtypes(case: Case, dims: tuple, dtype: torch.dtype) -> None:
    mask, visible, s = made(case, dims)
    check_attention(mask, t(visible), Hkv=s.Hkv, D=40, dtype=dtype, seed=s.seed % 1000)


@over(MEDIUM)
def test_attention_medium(case: Case, dims: tuple) -> None:
    mask, visible, s = made(case, dims)
    dtype = [torch.float32, torch.float64][s.seed % 2]
    check_attention(mask, t(visible), Hkv=s.Hkv, D=24, dtype=dtype, seed=s.seed % 1000)
