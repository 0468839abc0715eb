"""The forward guesses that full key tiles bring no new maxima (raise_maxima of fwd_sm90.cuh):
results are right whatever scores do from one key tile to the next."""

from __future__ import annotations

import math
from typing import Any

import jali
import pytest
import torch

from tests.gpu.sizes import sizes, tiles

pytestmark = pytest.mark.gpu

ROWS, KEYS, TILE = 300, 1100, 128
ERRORS = {torch.bfloat16: 3e-2, torch.float16: 4e-3}  # of weights and outputs that are rounded


def levels(kind: str, step: float) -> torch.Tensor:
    """What scores rise by, for each key. Tiles are visited from the last one on."""
    tile = torch.arange(KEYS - 1, -1, -1) // TILE
    if kind == "spikes":
        return step * (torch.arange(KEYS) % 97 == 0)
    alike = torch.ones(KEYS)
    return {"rise": tile, "fall": -tile, "turn": (tile % 3 - 1) * 2, "alike": alike}[kind] * step


def inputs(kind: str, step: float, D: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v of two heads: what rises for some rows falls for others."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, n, D, generator=g) for n in (ROWS, KEYS, KEYS))
    q, k = q / D**0.25, k / D**0.25
    q[..., 0] = torch.cos(torch.arange(ROWS) * 0.7)
    k[..., 0] = levels(kind, step)
    return [x.to(dtype) for x in (q, k, v)]


def check(
    tensors: list[torch.Tensor], mask: Any = None, tolerance: float = 0, **options: Any
) -> None:
    numbers = {n: x for n, x in options.items() if isinstance(x, torch.Tensor)}
    exact = {**options, **{n: x.double() for n, x in numbers.items()}}
    wide = [x.double() for x in tensors]
    truth, lse = jali.reference.attention(*wide, mask, scale=1.0, return_lse=True, **exact)
    on_gpu = {**options, **{n: x.to("cuda") for n, x in numbers.items()}}
    on_gpu["mask"] = None if mask is None else mask.to("cuda")
    q, k, v = (x.to("cuda") for x in tensors)
    for size in sizes(q.shape[-1]):
        with tiles(size):
            out, got = jali.attention(q, k, v, scale=1.0, return_lse=True, **on_gpu)
        error = (out.cpu().double() - truth).abs().max().item()
        most = tolerance or ERRORS[tensors[0].dtype]
        assert error <= most, f"out is off by {error:.3g}, {size} tiles"
        torch.testing.assert_close(
            got.cpu().double(), lse, rtol=1e-5, atol=tolerance or 1e-3, equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("kind", ["rise", "fall", "turn", "spikes"])
def test_scores_that_rise_and_fall(kind: str, D: int, dtype: torch.dtype) -> None:
    """By a little, by more than weights are guessed to have room for, by more than half precision
    has, and by more than single precision has."""
    ids = (torch.arange(KEYS) // 500).int()[None]
    rows = torch.arange(ROWS) + KEYS - ROWS
    masks = (None, jali.CausalMask(), jali.WindowMask.last(700),
             jali.DocumentMask(ids[:, rows], ids))  # fmt: skip
    for step in (0.5, 4.0, 9.0, 32.0, 250.0):
        tensors = inputs(kind, step, D, dtype)
        for mask in masks:
            check(tensors, mask)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("step", [4.0, 9.0, 250.0])
@pytest.mark.parametrize("p", [0.3, 0.7])
def test_what_is_dropped_stays_so(p: float, step: float, D: int) -> None:
    """Also where weights are made smaller, or again."""
    for kind in ("rise", "turn"):
        tensors = inputs(kind, step, D, torch.bfloat16)
        for mask in (None, jali.CausalMask()):
            check(tensors, mask, tolerance=0.03 / (1 - p), dropout_p=p, seed=7)


@pytest.mark.parametrize("D", [64, 96, 128])
@pytest.mark.parametrize("step", [4.0, 40.0])
def test_with_what_keys_add(step: float, D: int) -> None:
    tensors = inputs("turn", step, D, torch.bfloat16)
    bias = levels("rise", step)[None, None].bfloat16()
    slopes = torch.tensor([0.02, 1.0])
    for mask in (None, jali.CausalMask()):
        check(tensors, mask, key_bias=bias)
        check(tensors, mask, alibi_slopes=slopes)
        check(tensors, mask, key_bias=bias, alibi_slopes=-slopes, sinks=torch.tensor([3.0, 90.0]))
    # The tanh of the GPU is off by 2^-11.
    check(tensors, softcap=60.0, tolerance=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize("cap", [2.0, 30.0, 56.0, 57.0, 300.0])
def test_scores_at_both_ends_of_a_softcap(cap: float, D: int, dtype: torch.dtype) -> None:
    """Rows of scores near -cap, near cap, or both: in bf16, caps up to 56 need no maxima, and
    scores well below the cap go by a polynomial; others are noticed by sums of weights."""
    for kind in ("alike", "turn", "spikes"):
        for step in (0.1, 0.25, 0.5, 0.7, 5.0):
            tensors = inputs(kind, step * cap, D, dtype)
            for mask in (None, jali.CausalMask()):
                # The tanh of the GPU is off by 2^-11.
                check(tensors, mask, softcap=cap, tolerance=cap * 2e-3 + 0.03)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("q_offset", [-2000, 0, 100, 500, 5000])
def test_alibi_from_wherever_its_diagonal_is(q_offset: int, D: int) -> None:
    """The key tiles at the diagonal come first, then those before it, then those behind it; by a
    map those behind it, then those before it, with or without some at the diagonal."""
    tensors = inputs("turn", 4.0, D, torch.bfloat16)
    slopes = torch.tensor([0.02, 1.0])
    ids = (torch.arange(KEYS) // 300 % 2).int()[None]  # of keys on both sides of a row
    mapped = jali.DocumentMask(ids[:, 200 : 200 + ROWS], ids)
    masks = (None, jali.WindowMask(600, 400), mapped) if 0 <= q_offset < KEYS else (None, mapped)
    for mask in masks:
        check(tensors, mask, alibi_slopes=slopes, q_offset=q_offset)
        check(tensors, mask, alibi_slopes=-slopes, q_offset=q_offset)


@pytest.mark.parametrize("D", [40, 128])
@pytest.mark.parametrize("kind", ["rise", "turn"])
def test_scores_of_other_layouts(kind: str, D: int) -> None:
    """S is made again from q and k as they lie: shared heads, any strides, packed sequences."""
    q, k, v = inputs(kind, 32.0, D, torch.float16)
    q = torch.cat([q, -q, 0.5 * q], 1).cuda()  # six heads for two
    k, v = k.cuda(), v.cuda()
    plain = jali.attention(q, k, v, scale=1.0)
    truth = jali.reference.attention(*(x.cpu().double() for x in (q, k, v)), scale=1.0)
    assert (plain.cpu() - truth).abs().max() <= ERRORS[torch.float16]
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    assert torch.equal(jali.attention(*turned, scale=1.0, layout="blhd").transpose(1, 2), plain)
    twice = [torch.cat([x, x.flip(2)], 2)[0].transpose(0, 1) for x in (q, k, v)]  # tokens, heads
    ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device="cuda") for n in (ROWS, KEYS)]
    packed = jali.attention_varlen(*twice, *ends, scale=1.0).transpose(0, 1)
    assert torch.equal(packed[:, :ROWS], plain[0])
    flipped = jali.attention(*(x.flip(2).contiguous() for x in (q, k, v)), scale=1.0)
    assert torch.equal(packed[:, ROWS:], flipped[0])


@pytest.mark.parametrize("D", [64, 128])
def test_keys_that_nobody_may_see_come_first(D: int) -> None:
    """Rows have seen nothing for several full tiles; some never see anything."""
    tensors = inputs("rise", 20.0, D, torch.bfloat16)
    bias = torch.zeros(1, 1, KEYS, dtype=torch.bfloat16)
    bias[..., 400:] = -math.inf
    check(tensors, key_bias=bias)
    check(tensors, key_bias=bias.fill_(-math.inf))


def test_a_nan_stays_in_its_head() -> None:
    q, k, v = (x.to("cuda") for x in inputs("turn", 4.0, 128, torch.bfloat16))
    clean = jali.attention(q, k, v)
    k[0, 0, 500, 3] = math.nan
    out = jali.attention(q, k, v)
    assert out[0, 0].isnan().all()
    assert torch.equal(out[0, 1], clean[0, 1])
