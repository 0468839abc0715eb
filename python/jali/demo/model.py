"""A small byte-level language model whose attention is Jali's, with the mask left to the caller.

Three ways to choose keys, the last two with the same number of keys per row:

- `dense`: every earlier byte of the document;
- `window`: the newest bytes, and the first four of the document (sinks);
- `dynamic`: the best by a learned score, chosen anew for every row. The score of a key comes from
  the values of all heads, `exp(A · softplus(V · dt_projᵀ))`; it is also added to the logits
  (`key_bias`), and through that it learns. As A starts at 0, all scores start equal; of equal keys
  the newer ranks higher, so the model starts as a plain sliding window.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

import jali

KINDS = ("dense", "window", "dynamic")
NUM_SINKS = 4


def shared_mask(kind: str, ids: Tensor, places: Tensor, keep: int) -> jali.Mask | None:
    """The mask that all layers share; None for `dynamic`, where each layer makes its own.

    Args:
        kind: one of KINDS.
        ids, places: int32 [B, L]: document of each byte and place in it (see `text.Packed`).
        keep: keys per row.
    """
    if kind == "dynamic":
        return None
    mask = jali.CausalMask() & jali.DocumentMask(ids)
    if kind == "window":
        sinks = jali.KeyPaddingMask(places < NUM_SINKS)
        mask = mask & (jali.WindowMask.last(keep - NUM_SINKS) | sinks)
    return mask


class Shared(NamedTuple):
    """What all layers of one forward share."""

    ids: Tensor  # int32 [B, L], document of each byte
    mask: jali.Mask | None  # None: each layer makes its own
    cos: Tensor  # [L, 1, D // 2], rotary position embedding
    sin: Tensor


def rotary(length: int, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, 1, dim // 2] of the rotary position embedding."""
    rates = 10000.0 ** (-torch.arange(dim // 2) / (dim // 2))
    angles = torch.arange(length)[:, None, None] * rates
    return angles.cos(), angles.sin()


def rotate(x: Tensor, shared: Shared) -> Tensor:
    """x [B, L, H, D] turned by its positions."""
    a, b = x.chunk(2, -1)
    cos, sin = shared.cos, shared.sin
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    """Self-attention with num_heads heads of width // num_heads."""

    def __init__(self, width: int, num_heads: int, kind: str, keep: int) -> None:
        super().__init__()
        self.num_heads, self.kind, self.keep = num_heads, kind, keep
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        if kind == "dynamic":
            self.dt_proj = nn.Linear(width, num_heads, bias=False)
            self.A = nn.Parameter(torch.zeros(num_heads))

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)  # [B, L, H, D]
        mask, scores = shared.mask, None
        if self.kind == "dynamic":
            scores = jali.dynamic_scores(v, self.dt_proj.weight, self.A, layout="blhd")
            within = jali.DocumentMask(shared.ids)
            mask = jali.DynamicMask(scores, keep=self.keep, within=within)
        q, k = rotate(q, shared), rotate(k, shared)
        out = jali.attention(q, k, v, mask, key_bias=scores, layout="blhd")
        return self.out(out.flatten(2))


class Block(nn.Module):
    """Attention, then an MLP, both behind a norm and added to the stream."""

    def __init__(self, width: int, num_heads: int, kind: str, keep: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, kind, keep)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        x = x + self.attention(self.norm1(x), shared)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Logits of the next byte.

    Args:
        kind: how keys are chosen, one of KINDS.
        width, depth, num_heads: size of the model.
        keep: keys per row of `window` and `dynamic`.
    """

    def __init__(
        self, kind: str, width: int = 128, depth: int = 3, num_heads: int = 4, keep: int = 128
    ) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind is '{kind}'; it is one of {', '.join(KINDS)}")
        self.kind, self.keep, self.num_heads = kind, keep, num_heads
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, kind, keep) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("out.weight", "mlp.2.weight"))
                std = 0.02 / (2 * depth) ** 0.5 if deep else 0.02
                # By name, so that what the kinds have in common starts the same.
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                nn.init.normal_(p, std=std, generator=generator)

    def forward(self, tokens: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        """Logits [B, L, 256] of tokens [B, L]; ids and places as in `text.Packed`."""
        mask = shared_mask(self.kind, ids, places, self.keep)
        dim = self.embed.embedding_dim // self.num_heads
        shared = Shared(ids, mask, *rotary(tokens.shape[1], dim))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, shared)
        return self.head(self.norm(x))
