"""The conformance list on a GPU: output, LSE and all gradients by the accuracy rule.

A case compiles a kernel per structure of its mask; its dtype and head dims are drawn by its name,
so that all its shapes share them.
"""

from __future__ import annotations

import zlib

import pytest
import torch

from tests.conformance.cases import CASES, Case, t
from tests.conformance.test_masks import made
from tests.python.accuracy import check_attention

pytestmark = pytest.mark.gpu

DIMS = [
    (64, 64), (128, 128), (40, 40), (80, 96), (192, 128), (256, 256), (64, 256), (96, 96),
    (256, 192), (144, 256),
]  # fmt: skip
# (B, Hq, Hkv, Lq, Lk)
SHAPES = [
    (2, 4, 2, 1, 1), (2, 4, 1, 1, 129), (2, 2, 2, 129, 1), (2, 4, 2, 127, 127),
    (2, 4, 2, 129, 129), (2, 2, 1, 127, 128), (1, 2, 1, 300, 300), (2, 2, 1, 67, 440),
    (1, 2, 2, 440, 130), (1, 2, 1, 777, 777),
]  # fmt: skip
# More than 32 tiles in a line of a tile map, both ways.
LONG = (1, 1, 1, 4500, 4700)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_attention(case: Case, record_property) -> None:
    draw = zlib.crc32(case.name.encode())
    D, Dv = DIMS[draw % len(DIMS)]
    dtype = (torch.bfloat16, torch.float16)[draw // 8 % 2]
    ran = 0
    for dims in SHAPES:
        if case.square and dims[3] != dims[4]:
            continue
        mask, visible, s = made(case, dims)
        check_attention(
            mask, t(visible), Hkv=s.Hkv, D=D, Dv=Dv, dtype=dtype, seed=s.seed % 1000, device="cuda"
        )
        ran += 1
    record_property("cases", ran)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if not (c.square or c.heavy)],
    ids=lambda c: c.name,
)
def test_long(case: Case, record_property) -> None:
    mask, visible, s = made(case, LONG)
    check_attention(
        mask, t(visible), Hkv=1, D=64, dtype=torch.bfloat16, seed=s.seed % 1000, device="cuda"
    )
    record_property("cases", 1)
