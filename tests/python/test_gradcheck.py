"""fp64 gradcheck: every leaf, every operator, every option, all pairs of options."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jali
import numpy as np
import pytest
import torch
from torch import Tensor

B, HQ, HKV, LQ, LK, D, DV = 2, 2, 1, 5, 7, 3, 2
RNG = np.random.default_rng(0)


def t(a: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


def ints(low: int, high: int, *shape: int) -> Tensor:
    return t(RNG.integers(low, high, shape).astype(np.int32))


def bools(*shape: int) -> Tensor:
    return t(RNG.random(shape) < 0.6)


def block_csr() -> jali.Mask:
    row_ptr = torch.tensor([[[0, 2, 3, 5]]], dtype=torch.int32)
    col_idx = torch.tensor([[[0, 2, 1, 0, 3]]], dtype=torch.int32)
    return jali.BlockSparseMask.from_csr(row_ptr, col_idx, block=(2, 2))


# A mask for every leaf of the core, by the leaf's name.
LEAVES: dict[str, Callable[[], jali.Mask]] = {
    "causal": lambda: jali.CausalMask(),
    "window": lambda: jali.WindowMask(t(np.array([2, 0], dtype=np.int32)), 1),
    "prefix": lambda: jali.PrefixMask(ints(0, LK, B)),
    "key_padding": lambda: jali.KeyPaddingMask(bools(B, LK)),
    "document": lambda: jali.DocumentMask(ints(-1, 2, B, LK)),
    "packed_document": lambda: jali.PackedDocumentMask(t(np.array([[0, 2, 5], [0, 1, 9]]))),
    "key_interval": lambda: jali.KeyIntervalMask(ints(0, 3, B, HKV, LK), ints(2, 6, B, HQ, LK)),
    "row_interval": lambda: jali.RowIntervalMask(ints(0, 3, B, HQ, LQ), ints(2, 8, B, HKV, LQ)),
    "dilated": lambda: jali.DilatedMask(2),
    "neighborhood": lambda: jali.NeighborhoodMask((2, 3), (1, 3)),
    "block_bitset": lambda: jali.BlockSparseMask(bools(B, HQ, 3, 4), block=(2, 2)),
    "block_csr": block_csr,
    "dense": lambda: jali.DenseMask(bools(B, HQ, LQ, LK)),
}
# Masks that are more than one leaf of the list.
DERIVED: dict[str, Callable[[], jali.Mask]] = {
    "predicate": lambda: jali.PredicateMask(lambda b, h, i, j: (i * 3 + j + b) % 4 != h),
    "dynamic": lambda: jali.DynamicMask(torch.randn(B, HKV, LK), keep=3),
    "token_index": lambda: jali.TokenIndexMask(ints(-1, LK, B, HQ, LQ, 3)),
    "and": lambda: jali.CausalMask() & jali.WindowMask(2, 0),
    "or": lambda: jali.WindowMask.last(2) | jali.PrefixMask(2),
    "not": lambda: ~jali.WindowMask(1, 1),
    "tree": lambda: (jali.CausalMask() & ~jali.DilatedMask(3)) | jali.PrefixMask(1),
}
MASKS = LEAVES | DERIVED


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def gradcheck(options: dict[str, Any], mask: Any = None, varlen: bool = False) -> None:
    """Analytic against numeric gradients of (out, lse) in every input that has one."""
    torch.manual_seed(0)
    if varlen:  # 3 sequences, one of them without rows
        cu = (torch.tensor([0, 3, 3, 7]), torch.tensor([0, 2, 4, 8]))
        cu = tuple(x.to(torch.int32) for x in cu)
        shapes = ((7, HQ, D), (8, HKV, D), (8, HKV, DV))
    else:
        shapes = ((B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV))
    names = [n for n, x in options.items() if isinstance(x, Tensor) and x.requires_grad]
    rest = {n: x for n, x in options.items() if n not in names}

    def run(q: Tensor, k: Tensor, v: Tensor, *learnt: Tensor) -> tuple[Tensor, Tensor]:
        more = dict(zip(names, learnt, strict=True)) | rest
        if varlen:
            out, lse = jali.attention_varlen(q, k, v, *cu, mask, return_lse=True, **more)
        else:
            out, lse = jali.attention(q, k, v, mask, return_lse=True, **more)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    inputs = [*map(lambda s: random(*s), shapes), *(options[n] for n in names)]
    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_mask(name: str) -> None:
    gradcheck({}, MASKS[name]())


def test_every_leaf_has_a_case() -> None:
    lines = bytes(torch.ops.jali.describe_leaves()).decode().splitlines()
    leaves = {name for kind, name, *_ in map(str.split, filter(None, lines)) if kind == "leaf"}
    assert leaves == set(LEAVES), "add the new leaf's case to LEAVES above"


# Each option on its own and in all pairs. Values are made anew for each test.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "scale": lambda: {"scale": 0.7},
    "softcap": lambda: {"softcap": 0.8},
    "bias": lambda: {"bias": random(B, HQ, LQ, LK)},
    "bias_broadcast": lambda: {"bias": random(1, HKV, 1, LK)},
    "key_bias": lambda: {"key_bias": random(B, HKV, LK)},
    "alibi_slopes": lambda: {"alibi_slopes": torch.tensor([0.3, 0.1])},
    "sinks": lambda: {"sinks": random(HQ)},
    "dropout": lambda: {"dropout_p": 0.4, "seed": 7},
    "q_offset": lambda: {"q_offset": torch.tensor([1, -2], dtype=torch.int32)},
    "deterministic": lambda: {"deterministic": True},
}
PAIRS = [
    pair
    for pair in itertools.combinations_with_replacement(OPTIONS, 2)
    if set(pair) != {"bias", "bias_broadcast"}  # the same argument
]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_options(pair: tuple[str, str]) -> None:
    gradcheck(OPTIONS[pair[0]]() | OPTIONS[pair[1]](), jali.CausalMask())


@pytest.mark.parametrize("name", sorted(MASKS))
def test_mask_with_all_options(name: str) -> None:
    options: dict[str, Any] = {}
    for make in OPTIONS.values():
        options |= make()
    gradcheck(options, MASKS[name]())


VARLEN: dict[str, Callable[[], dict[str, Any]]] = OPTIONS | {
    "bias": lambda: {"bias": random(3, HQ, 4, 4)},
    "bias_broadcast": lambda: {"bias": random(1, 1, 4, 4)},
    "key_bias": lambda: {"key_bias": random(HKV, 8)},
    "q_offset": lambda: {"q_offset": torch.tensor([1, 0, -1], dtype=torch.int32)},
}


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_varlen_options(pair: tuple[str, str]) -> None:
    gradcheck(VARLEN[pair[0]]() | VARLEN[pair[1]](), jali.WindowMask(2, 1), varlen=True)


def test_layout() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(q, k, v, jali.CausalMask(), layout="blhd")

    torch.manual_seed(0)
    inputs = (random(B, LQ, HQ, D), random(B, LK, HKV, D), random(B, LK, HKV, DV))
    assert torch.autograd.gradcheck(run, inputs)


def test_double_backward_is_refused() -> None:
    q, k, v = random(1, 1, 4, 3), random(1, 1, 4, 3), random(1, 1, 4, 3)
    out = jali.attention(q, k, v)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"(?i)second|twice|double"):
        torch.autograd.grad(grad.sum(), k)
