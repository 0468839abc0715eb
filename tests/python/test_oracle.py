"""The oracle itself against torch: what all other tests lean on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.python import oracle


def inputs(*shape: int, Hkv: int, Lk: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    B, Hq, Lq, D = shape
    sizes = [(B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, D)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in sizes]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_against_sdpa(scale: float | None) -> None:
    q, k, v = inputs(2, 4, 9, 5, Hkv=2, Lk=12)
    visible = torch.rand(2, 4, 9, 12) < 0.5
    visible[..., 0] = True
    ours, _ = oracle.attention(q, k, v, visible, scale=scale)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=True
    )
    dout = torch.randn_like(ours)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, (q, k, v), dout), torch.autograd.grad(theirs, (q, k, v), dout),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_against_flex_attention() -> None:
    q, k, v = (x.detach() for x in inputs(2, 4, 9, 5, Hkv=2, Lk=12))  # flex: no CPU backward
    bias, slopes = torch.randn(9, 12).double(), torch.rand(4).double()

    def score_mod(s, b, h, i, j):
        s = 1.5 * torch.tanh(s / 1.5) + bias[i, j] - slopes[h] * (i + 3 - j).abs()
        return torch.where(j <= i + 3, s, -torch.inf)

    visible = (torch.arange(12) <= torch.arange(9)[:, None] + 3).expand(2, 4, 9, 12)
    ours, lse = oracle.attention(
        q, k, v, visible, softcap=1.5, bias=bias[None, None], alibi_slopes=slopes
    )
    theirs, their_lse = flex_attention(
        q, k, v, score_mod=score_mod, enable_gqa=True, return_lse=True
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(lse, their_lse)


def test_rows_without_keys_and_sinks() -> None:
    q, k, v = inputs(1, 2, 3, 4, Hkv=1, Lk=5)
    nothing = torch.zeros(1, 2, 3, 5, dtype=torch.bool)
    out, lse = oracle.attention(q, k, v, nothing)
    assert (out == 0).all() and (lse == -torch.inf).all()
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64)
    out, lse = oracle.attention(q, k, v, nothing, sinks=sinks)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sinks[None, :, None].expand(1, 2, 3))


def test_philox_known_answers() -> None:
    """From the generator's published test vectors."""
    zero, ones = np.zeros(4, dtype=np.uint64), np.full(4, 0xFFFFFFFF, dtype=np.uint64)

    def hexes(words):
        return [f"{int(w):08x}" for w in words]

    assert hexes(oracle.philox(zero, (0, 0), rounds=10)) == [
        "6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8",
    ]  # fmt: skip
    assert hexes(oracle.philox(ones, (0xFFFFFFFF, 0xFFFFFFFF), rounds=10)) == [
        "408f276d", "41c83b0e", "a20bc7c6", "6d5451fd",
    ]  # fmt: skip
    assert hexes(oracle.philox(zero, (0, 0))) == ["5f6fb709", "0d893f64", "4f121f81", "4f730a48"]


def test_dropout_numbers_are_uniform() -> None:
    numbers = oracle.dropout_numbers(3, 1, 2, 200, 203)
    assert numbers.min() >= 0 and numbers.max() < 32768
    assert abs(numbers.mean() / 32767 - 0.5) < 0.01
    assert np.array_equal(oracle.dropout_numbers(3, 1, 2, 10, 20), numbers[:, :, :10, :20])


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.83, 0.99])
def test_dropout_of_one_cell_says_little_of_another(p: float) -> None:
    """Numbers of 16 cells share bits, so the correlations of all pairs of these are looked at."""
    blocks = 256
    kept = oracle.dropout_keeps(oracle.dropout_numbers(5, 1, 1, 16 * blocks, 16 * blocks), p)[0, 0]
    # [one call of each block, its 16 cells]
    cells = kept.reshape(blocks, 2, 4, 2, blocks, 2, 4, 2)  # block, + 8, pair, parity
    calls = cells.transpose(0, 2, 4, 6, 1, 3, 5, 7).reshape(-1, 16)
    assert abs(kept.mean() - (1 - round(p * 32768) / 32768)) < 4 * (p * (1 - p) / kept.size) ** 0.5
    pairs = np.corrcoef(calls.T) - np.eye(16)
    assert np.abs(pairs).max() < 0.01
    others = np.corrcoef(np.concatenate([calls, np.roll(calls, 1, 0)], 1).T)[:16, 16:]
    assert np.abs(others).max() < 6 / len(calls) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_of_what_shares_calls(p: float) -> None:
    """A call is for 1024 x 8192 cells: what is kept of their rows and keys, weighted in any way,
    has the variance that it would have with numbers of its own for each cell, and no row or key is
    far off; nor are four cells dropped together more often than chance has it."""
    L = 2048
    rate = 1 - round(p * 32768) / 32768
    kept = oracle.dropout_keeps(oracle.dropout_numbers(7, 1, 1, L, L), p)[0, 0]
    cells = (kept - rate) / (rate * (1 - rate)) ** 0.5
    for weights in np.ones(L), np.random.default_rng(0).random(L) ** 4:
        norm = (weights**2).sum() ** 0.5
        for sums in cells @ weights, weights @ cells:
            assert abs((sums / norm).var() - 1) < 0.15
            assert abs(sums / norm).max() < 6
    for apart in 1, 2, 7, 8, 16, 64, 128, 512:
        assert abs((cells[:-apart] * cells[apart:]).sum()) < 6 * L
        assert abs((cells[:, :-apart] * cells[:, apart:]).sum()) < 6 * L
    rare = ~kept if rate > 0.5 else kept
    for matrix in rare, rare.T:
        for apart in 8, 16, 64, 128, 256:
            four = np.logical_and.reduce(
                [matrix[:, n * apart : L - (3 - n) * apart] for n in range(4)]
            )
            expected = four.size * min(rate, 1 - rate) ** 4
            assert abs(four.sum() - expected) < 6 * expected**0.5 * (1 if p < 0.5 else 4)


def test_classes() -> None:
    visible = np.zeros((5, 7), dtype=bool)
    visible[:2, :3] = True
    visible[4, 6] = True
    assert oracle.classes(visible, (2, 3)).tolist() == [[2, 0, 0], [0, 0, 0], [0, 0, 2]]
    assert oracle.classes(visible, (4, 4)).tolist() == [[1, 0], [0, 1]]
