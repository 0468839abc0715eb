"""BlockSparseMask.from_scores against its definition, block by block."""

from __future__ import annotations

import math
import random

import jali
import pytest
import torch
from jali import BlockSparseMask


def expected_blocks(q, k, block, top_k, top_p, threshold, causal, offset):
    (m, n), (B, Hq, Lq, D), (_, Hkv, Lk, _) = block, q.shape, k.shape
    rows, columns = -(-Lq // m), -(-Lk // n)
    out = torch.zeros(B, Hq, rows, columns, dtype=torch.bool)
    for b in range(B):
        for h in range(Hq):
            for y in range(rows):
                mean_q = q[b, h, y * m : y * m + m].double().mean(0)
                first, last = y * m + offset, min(y * m + m, Lq) - 1 + offset
                allowed = [x for x in range(columns) if not causal or x * n <= last]
                if not allowed:
                    continue
                logits = [
                    float(mean_q @ k[b, h * Hkv // Hq, x * n : x * n + n].double().mean(0))
                    / math.sqrt(D)
                    for x in allowed
                ]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                share = {x: w / sum(weights) for x, w in zip(allowed, weights)}
                diagonal = [x for x in allowed if causal and x * n + n > first]
                order = diagonal + sorted(
                    (x for x in allowed if x not in diagonal), key=lambda x: -share[x]
                )
                if top_k is not None:
                    chosen = order[:top_k]
                elif top_p is not None:
                    chosen, mass = [], 0.0
                    for x in order:
                        if mass < top_p:
                            chosen.append(x)
                        mass += share[x]
                else:
                    chosen = [x for x in order if share[x] >= threshold]
                for x in {order[0], *chosen, *diagonal}:
                    out[b, h, y, x] = True
    return out


@pytest.mark.parametrize("seed", range(30))
def test_blocks_follow_the_definition(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    Hkv, group, D = rng.choice([1, 2]), rng.choice([1, 3]), 8
    Lq, Lk = rng.choice([1, 16, 37]), rng.choice([1, 32, 45])
    q = torch.randn(2, Hkv * group, Lq, D) * 4
    k = torch.randn(2, Hkv, Lk, D)
    block = rng.choice([(8, 8), (16, 4), (5, 7), (64, 64)])
    choice = {"top_k": None, "top_p": None, "threshold": None}
    choice.update(
        rng.choice([{"top_k": 1}, {"top_k": 3}, {"top_p": 0.6}, {"top_p": 0}, {"threshold": 0.2}])
    )
    causal = rng.random() < 0.6
    offset = rng.choice([None, 0, 3])
    mask = BlockSparseMask.from_scores(q, k, block, causal=causal, offset=offset, **choice)
    expected = expected_blocks(
        q, k, block, causal=causal, offset=Lk - Lq if offset is None else offset, **choice
    )
    assert torch.equal(mask.blocks, expected)
    assert mask.block == block


def test_it_finds_the_blocks_that_hold_the_attention():
    """Keys of two far blocks answer the rows; the estimate must choose these two."""
    torch.manual_seed(0)
    D, block = 16, 32
    direction = torch.randn(D)
    q = direction.expand(1, 1, 256, D) + 0.1 * torch.randn(1, 1, 256, D)
    k = torch.randn(1, 1, 256, D) * 0.3
    for at in (64, 160):
        k[:, :, at : at + block] += 2 * direction
    mask = BlockSparseMask.from_scores(q, k, (block, block), top_p=0.9)
    assert mask.blocks[0, 0].nonzero()[:, 1].unique().tolist() == [2, 5]
    out = jali.attention(q, k, k, mask)
    torch.testing.assert_close(out, jali.attention(q, k, k), atol=5e-2, rtol=0)


def test_no_gradient_and_half_precision():
    q, k = (torch.randn(1, 2, 40, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    mask = BlockSparseMask.from_scores(q, k, (16, 16), top_k=2)
    same = BlockSparseMask.from_scores(q.float(), k.float(), (16, 16), top_k=2)
    assert mask == same and not mask.blocks.requires_grad


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "exactly one of top_k, top_p and threshold"),
        ({"top_k": 1, "top_p": 0.5}, "exactly one"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 1.5}, "top_p must be within 0 and 1"),
    ],
)
def test_errors(options, text):
    x = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match=text):
        BlockSparseMask.from_scores(x, x, (2, 2), **options)
    with pytest.raises(ValueError, match="q and k must be"):
        BlockSparseMask.from_scores(x[0], x, (2, 2), top_k=1)
    with pytest.raises(ValueError, match="must agree"):
        BlockSparseMask.from_scores(x, torch.zeros(1, 1, 4, 5), (2, 2), top_k=1)
