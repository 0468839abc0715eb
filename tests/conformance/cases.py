"""The conformance list: every mask pattern that the project promises to express.

A case is a function of a `Setting` (the call's shape and a random generator) that returns the mask,
built with the public API, and what it means as a formula over one sequence's `oracle.Frame`
(f.i row, f.p its position, f.j key, f.h head, f.b sequence), written by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from jali import (
    BlockSparseMask,
    CausalMask,
    DenseMask,
    DilatedMask,
    DocumentMask,
    DynamicMask,
    KeyIntervalMask,
    KeyPaddingMask,
    NeighborhoodMask,
    PackedDocumentMask,
    PredicateMask,
    PrefixMask,
    RowIntervalMask,
    TokenIndexMask,
    WindowMask,
)  # fmt: skip

from tests.python import oracle
from tests.python.oracle import Frame

Formula = Callable[[Frame], Any]


@dataclasses.dataclass(frozen=True)
class Setting(oracle.Problem):
    seed: int = 0

    @property
    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def documents(self, length: int | None = None, mean: int = 40) -> np.ndarray:
        """int32 [B, length]: sorted ids, a few tokens belong to no document (-1)."""
        rng, n = self.rng, self.Lk if length is None else length
        ids = np.cumsum(rng.random((self.B, n)) < 1 / mean, axis=1)
        return np.where(rng.random((self.B, n)) < 0.02, -1, ids).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[[Setting], tuple[Any, Formula]]
    square: bool = False  # only where Lq == Lk
    heavy: bool = False  # brute force too slow for the longest shapes

    @property
    def name(self) -> str:
        return self.build.__name__


CASES: list[Case] = []


def case(**flags: bool) -> Callable:
    def register(build: Callable) -> Callable:
        CASES.append(Case(build, **flags))
        return build

    return register


def t(a: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


def causal(f: Frame) -> np.ndarray:
    return f.j <= f.p


def at_rows(a: np.ndarray, f: Frame) -> np.ndarray:
    """a [B, Lq] at (b, i) as [1, Lq, 1]."""
    return a[f.b][None, :, None]


def at_keys(a: np.ndarray, f: Frame) -> np.ndarray:
    return a[f.b][None, None, :]


def at_positions(a: np.ndarray, f: Frame, outside: int = -1) -> np.ndarray:
    """a [B, Lk] at (b, p) as [1, Lq, 1]."""
    inside = (f.p >= 0) & (f.p < f.Lk)
    return np.where(inside, a[f.b][np.clip(f.p, 0, f.Lk - 1)], outside)


def same_document(a: np.ndarray, f: Frame) -> np.ndarray:
    rows = at_positions(a, f)
    return (rows == at_keys(a, f)) & (rows >= 0)


@case()
def full(s: Setting):
    return WindowMask(None, None), lambda f: f.i == f.i


@case()
def empty(s: Setting):
    return PrefixMask(0), lambda f: f.i < 0


@case()
def causal_top_left(s: Setting):
    return CausalMask(offset=0), lambda f: f.j <= f.i


@case()
def causal_bottom_right(s: Setting):
    return CausalMask(), lambda f: f.j <= f.i + s.Lk - s.Lq


@case()
def inverse_causal(s: Setting):
    return WindowMask(0, None, offset=0), lambda f: f.i <= f.j


@case()
def bi_causal_slice(s: Setting):
    a, b = -(s.Lk // 4), s.Lk // 3
    mask = CausalMask(offset=b) & WindowMask(0, None, offset=a)
    return mask, lambda f: (f.i + a <= f.j) & (f.j <= f.i + b)


@case()
def window(s: Setting):
    return WindowMask(5, 70), lambda f: (f.p - 5 <= f.j) & (f.j <= f.p + 70)


@case()
def window_per_head(s: Setting):
    left, right = np.arange(s.Hq, dtype=np.int32) * 9, np.arange(s.Hkv, dtype=np.int32)[::-1].copy()
    return WindowMask(
        t(left), t(right)
    ), lambda f: (f.p - left[f.h] <= f.j) & (f.j <= f.p + right[f.h // (s.Hq // s.Hkv)])


@case()
def causal_window_of_n_keys(s: Setting):
    return WindowMask.last(33), lambda f: (f.p - 33 < f.j) & (f.j <= f.p)


@case()
def window_and_sinks(s: Setting):
    mask = CausalMask() & (WindowMask.last(40) | PrefixMask(4))
    return mask, lambda f: causal(f) & ((f.p - f.j < 40) | (f.j < 4))


@case()
def prefix_lm(s: Setting):
    n = s.Lk // 3
    return PrefixMask(n) | CausalMask(), lambda f: (f.j < n) | causal(f)


@case()
def prefix_lm_per_batch(s: Setting):
    n = s.rng.integers(0, s.Lk + 1, s.B).astype(np.int32)
    rows = np.arange(s.Lq)[None, :] <= n[:, None]
    end = np.where(rows, n[:, None] + 1, 0).astype(np.int32)[:, None]
    mask = RowIntervalMask(t(np.zeros_like(end)), t(end)) | CausalMask()
    return mask, lambda f: ((f.i <= n[f.b]) & (f.j <= n[f.b])) | causal(f)


@case()
def key_lengths(s: Setting):
    n = s.rng.integers(0, s.Lk + 1, s.B).astype(np.int32)
    return PrefixMask(t(n)), lambda f: f.j < n[f.b]


@case()
def documents(s: Setting):
    d = s.documents()
    return DocumentMask(t(d)), lambda f: same_document(d, f)


@case()
def documents_two_tables(s: Setting):
    q = s.rng.integers(-1, 4, (s.B, s.Lq)).astype(np.int32)
    k = np.sort(s.rng.integers(-1, 4, (s.B, s.Lk)), axis=1).astype(np.int32)
    return DocumentMask(
        t(q), t(k)
    ), lambda f: (at_rows(q, f) == at_keys(k, f)) & (at_rows(q, f) >= 0)


@case()
def causal_documents(s: Setting):
    d = s.documents()
    return CausalMask() & DocumentMask(t(d)), lambda f: causal(f) & same_document(d, f)


@case()
def documents_from_lengths(s: Setting):
    n = [s.Lk // 2, s.Lk - s.Lk // 2 - s.Lk // 5, s.Lk // 5]
    ids = np.repeat(np.arange(3), n)[None].repeat(s.B, axis=0)
    return DocumentMask.from_lengths(n) & CausalMask(), lambda f: same_document(ids, f) & causal(f)


def packed(s: Setting) -> tuple[PackedDocumentMask, np.ndarray]:
    """Five documents, one of them empty, and some tokens behind them; and their ids [B, Lk]."""
    cuts = np.sort(s.rng.integers(0, s.Lk + 1, (s.B, 6)), axis=1).astype(np.int32)
    cuts[:, 0], cuts[:, 3] = 0, cuts[:, 2]
    tokens = np.arange(s.Lk)
    ids = [np.where(tokens < c[-1], np.searchsorted(c, tokens, "right") - 1, -1) for c in cuts]
    return PackedDocumentMask(t(cuts)), np.stack(ids)


@case()
def packed_documents(s: Setting):
    mask, ids = packed(s)
    return mask, lambda f: same_document(ids, f)


@case()
def packed_documents_causal(s: Setting):
    mask, ids = packed(s)
    return CausalMask() & mask, lambda f: same_document(ids, f) & causal(f)


@case()
def packed_documents_in_a_window_or_sinks(s: Setting):
    mask, ids = packed(s)
    return (mask & WindowMask.last(50)) | PrefixMask(
        4
    ), lambda f: (same_document(ids, f) & (f.p - 50 < f.j) & (f.j <= f.p)) | (f.j < 4)


@case()
def across_packed_documents(s: Setting):
    mask, ids = packed(s)
    return ~mask & CausalMask(), lambda f: ~same_document(ids, f) & causal(f)


@case()
def documents_with_windows(s: Setting):
    d = s.documents(mean=90)
    return DocumentMask(t(d)) & WindowMask(
        20, 10
    ), lambda f: same_document(d, f) & (f.p - 20 <= f.j) & (f.j <= f.p + 10)


@case()
def prefix_lm_inside_documents(s: Setting):
    d = np.maximum(s.documents(mean=60), 0)
    start = np.stack([np.searchsorted(row, row) for row in d])  # first key of the key's document
    prefix = np.arange(s.Lk)[None] - start < 15
    mask = DocumentMask(t(d)) & (KeyPaddingMask(t(prefix)) | CausalMask())
    return mask, lambda f: same_document(d, f) & (at_keys(prefix, f) | causal(f))


@case()
def longformer(s: Setting):
    gq, gk = s.rng.random((s.B, s.Lq)) < 0.03, s.rng.random((s.B, s.Lk)) < 0.03
    end = np.where(gq, s.Lk, 0).astype(np.int32)[:, None]
    mask = WindowMask(24, 24) | RowIntervalMask(t(0 * end), t(end)) | KeyPaddingMask(t(gk))
    return mask, lambda f: (abs(f.p - f.j) <= 24) | at_rows(gq, f) | at_keys(gk, f)


def blocks_of(s: Setting, m: int, n: int, heads: int, density: float = 0.3) -> np.ndarray:
    return s.rng.random((s.B, heads, -(-s.Lq // m), -(-s.Lk // n))) < density


@case()
def big_bird(s: Setting):
    gq, gk = s.rng.random((s.B, s.Lq)) < 0.02, s.rng.random((s.B, s.Lk)) < 0.02
    end, blocks = np.where(gq, s.Lk, 0).astype(np.int32)[:, None], blocks_of(s, 32, 32, 1, 0.15)
    mask = WindowMask(16, 16) | RowIntervalMask(t(0 * end), t(end)) | KeyPaddingMask(t(gk))
    mask = mask | BlockSparseMask(t(blocks), block=(32, 32))
    return mask, lambda f: (
        (abs(f.p - f.j) <= 16) | at_rows(gq, f) | at_keys(gk, f)
        | blocks[f.b, 0][f.i // 32, f.j // 32]
    )  # fmt: skip


@case()
def block_diagonal(s: Setting):
    ids_q, ids_k = (np.arange(n, dtype=np.int32)[None] // 48 for n in (s.Lq, s.Lk))
    return DocumentMask(t(ids_q), t(ids_k)), lambda f: f.i // 48 == f.j // 48


@case()
def sawtooth(s: Setting):
    return PredicateMask(lambda b, h, i, j: i % 128 >= j % 128), lambda f: f.i % 128 >= f.j % 128


@case()
def chunked_causal(s: Setting):
    mask = PredicateMask(lambda b, h, i, j: i // 50 == j // 50, offset=None) & CausalMask()
    return mask, lambda f: (f.p // 50 == f.j // 50) & causal(f)


@case()
def streaming_chunks(s: Setting):
    def fn(b, h, i, j):
        return (i // 32 - 2 <= j // 32) & (j // 32 <= i // 32)

    return PredicateMask(fn), lambda f: fn(None, None, f.i, f.j)


@case()
def dilated(s: Setting):
    return WindowMask(60, 60) & DilatedMask(
        5
    ), lambda f: (abs(f.p - f.j) <= 60) & ((f.p - f.j) % 5 == 0)


@case()
def strided(s: Setting):
    mask = CausalMask() & (WindowMask.last(16) | DilatedMask(16))
    return mask, lambda f: causal(f) & ((f.p - f.j < 16) | ((f.p - f.j) % 16 == 0))


@case()
def even_keys(s: Setting):
    return PredicateMask(lambda b, h, i, j: j % 2 == 0), lambda f: f.j % 2 == 0


def padding(s: Setting, keep: np.ndarray):
    return KeyPaddingMask(t(keep)), lambda f: at_keys(keep, f)


@case()
def padding_right(s: Setting):
    n = s.rng.integers(0, s.Lk + 1, (s.B, 1))
    return padding(s, np.arange(s.Lk)[None] < n)


@case()
def padding_left(s: Setting):
    n = s.rng.integers(0, s.Lk + 1, (s.B, 1))
    keep = np.arange(s.Lk)[None] >= n
    return KeyPaddingMask(t(keep)) & CausalMask(), lambda f: at_keys(keep, f) & causal(f)


@case()
def padding_with_holes(s: Setting):
    return padding(s, s.rng.random((s.B, s.Lk)) < 0.7)


@case()
def offset_per_batch(s: Setting):
    """Chunked prefill, and with Lq = 1 decoding."""
    offset = s.rng.integers(-3, s.Lk + 3, s.B).astype(np.int32)
    return CausalMask(offset=t(offset)), lambda f: f.j <= f.i + offset[f.b]


@case()
def paged(s: Setting):
    pages = -(-s.Lk // 16)
    logical = np.stack([s.rng.permutation(pages) for _ in range(s.B)]).astype(np.int32)
    table = t(logical)

    def fn(b, h, i, j):
        return table[b, j // 16] * 16 + j % 16 <= i

    return PredicateMask(
        fn, offset=s.Lk - s.Lq
    ), lambda f: logical[f.b][f.j // 16] * 16 + f.j % 16 <= f.p


@case()
def image_spans(s: Setting):
    spans = np.where(s.documents(mean=30) % 2 == 1, s.documents(mean=30), -1).astype(np.int32)
    return CausalMask() | DocumentMask(t(spans)), lambda f: causal(f) | same_document(spans, f)


def neighborhood(s: Setting, dims: list[tuple], causal_dims=False):
    """dims: (size, kernel, dilation) per dim, for the largest grid of such rows in Lq tokens."""
    shape, kernel, dilation = zip(*dims, strict=True)
    mask = NeighborhoodMask(shape, kernel, dilation=dilation, causal=causal_dims)
    meaning = oracle.NeighborhoodMask(shape, kernel, dilation, causal_dims)
    return mask, meaning


@case(square=True)
def neighborhood_1d(s: Setting):
    n = s.Lq
    return neighborhood(s, [(n, min(n, 7), 1 + (n >= 28) * 3)])


def rectangle(n: int) -> tuple[int, int]:
    a = next(a for a in range(int(n**0.5), 0, -1) if n % a == 0)
    return a, n // a


@case(square=True)
def neighborhood_2d(s: Setting):
    (a, b) = rectangle(s.Lq)
    return neighborhood(s, [(a, min(a, 3), 1), (b, min(b, 4), 1 + (b >= 8))])


@case(square=True)
def neighborhood_3d_causal(s: Setting):
    (a, b), (c, d) = rectangle(s.Lq), (1, 1)
    b, c = rectangle(b) if b % 3 else (b // 3, 3)
    dims = [(a, min(a, 3), 1), (b, min(b, 3), 1), (c, min(c, 2), d)]
    return neighborhood(s, dims, (True, False, False))


@case()
def random_eviction(s: Setting):
    born = np.arange(s.Lk)
    end = (born + s.rng.integers(1, 60, (s.B, s.Hkv, s.Lk))).astype(np.int32)
    mask = CausalMask() & KeyIntervalMask(None, t(end), offset=s.Lk - s.Lq)
    group = s.Hq // s.Hkv
    return mask, lambda f: causal(f) & (f.p < end[f.b][np.arange(s.Hq) // group][:, None, :])


@case()
def key_interval(s: Setting):
    start = s.rng.integers(0, s.Lq + 1, (s.B, 1, s.Lk)).astype(np.int32)
    end = (start + s.rng.integers(0, s.Lq + 1, (s.B, 1, s.Lk))).astype(np.int32)
    return KeyIntervalMask(t(start), t(end)), lambda f: (start[f.b] <= f.i) & (f.i < end[f.b])


@case()
def row_interval_per_head(s: Setting):
    start = s.rng.integers(0, s.Lk + 1, (s.B, s.Hq, s.Lq)).astype(np.int32)
    end = (start + s.rng.integers(0, 50, (s.B, s.Hq, s.Lq))).astype(np.int32)
    return RowIntervalMask(
        t(start), t(end)
    ), lambda f: (start[f.b][:, :, None] <= f.j) & (f.j < end[f.b][:, :, None])


@case(heavy=True)
def dynamic_top_w(s: Setting):
    scores = s.rng.integers(0, 40, (s.B, s.Hkv, s.Lk)).astype(np.float32)  # many ties
    return DynamicMask(t(scores), keep=20), oracle.DynamicMask(scores, keep=20)


@case(heavy=True)
def dynamic_within_documents(s: Setting):
    scores, d = s.rng.standard_normal((s.B, 1, s.Lk)).astype(np.float32), s.documents()
    mask = DynamicMask(t(scores), keep=9, within=DocumentMask(t(d)), threshold=-1.0)
    within = oracle.DocumentMask(d)
    return mask, oracle.DynamicMask(scores, keep=9, within=within, threshold=-1.0)


@case(heavy=True)
def dynamic_window_filter(s: Setting):
    scores = s.rng.standard_normal((s.B, s.Hkv, s.Lk)).astype(np.float32)
    meaning = oracle.DynamicMask(scores, keep=50) & oracle.WindowMask(80, 0)
    return DynamicMask(t(scores), keep=50) & WindowMask(80, 0), meaning


@case(heavy=True)
def dynamic_fixed_set(s: Setting):
    scores = s.rng.standard_normal((s.B, s.Hkv, s.Lk)).astype(np.float32)
    scores[..., :: max(s.Lk // 5, 1)] = -np.inf
    meaning = oracle.DynamicMask(scores, keep=11, causal=False)
    return DynamicMask(t(scores), keep=11, causal=False), meaning


@case()
def block_bitset_per_head(s: Setting):
    blocks = blocks_of(s, 128, 64, s.Hq)
    mask = BlockSparseMask(t(blocks), block=(128, 64))
    return mask, lambda f: blocks[f.b][f.h, f.i // 128, f.j // 64]


@case()
def block_csr(s: Setting):
    blocks = blocks_of(s, 64, 64, s.Hkv)
    row_ptr = np.zeros((*blocks.shape[:2], blocks.shape[2] + 1), dtype=np.int32)
    row_ptr[..., 1:] = np.cumsum(blocks.sum(-1), axis=-1)
    nnz = max(int(row_ptr[..., -1].max()), 1)
    col_idx = np.zeros((*blocks.shape[:2], nnz), dtype=np.int32)
    for index in np.ndindex(*blocks.shape[:2]):
        columns = np.nonzero(blocks[index])[1]
        col_idx[index][: len(columns)] = columns
    mask = BlockSparseMask.from_csr(t(row_ptr), t(col_idx), block=(64, 64))
    group = s.Hq // s.Hkv
    return mask, lambda f: blocks[f.b][f.h // group, f.i // 64, f.j // 64]


@case(heavy=True)
def token_lists(s: Setting):
    indices = s.rng.integers(-1, s.Lk, (s.B, s.Hkv, -(-s.Lq // 4), 9)).astype(np.int32)
    return TokenIndexMask(t(indices), block=4), oracle.TokenIndexMask(indices, 4)


def dense_case(b: bool, h: bool, q: bool, k: bool) -> None:
    def dense(s: Setting):
        shape = (s.B if b else 1, s.Hq if h else 1, s.Lq if q else 1, s.Lk if k else 1)
        a = s.rng.random(shape) < 0.6
        return DenseMask(t(a)), lambda f: a[f.b if b else 0]

    dense.__name__ = "dense_" + "".join(c for c, on in zip("bhqk", (b, h, q, k)) if on)
    case()(dense)


for bits in range(16):
    dense_case(bool(bits & 8), bool(bits & 4), bool(bits & 2), bool(bits & 1))


@case()
def random_bits(s: Setting):
    def fn(b, h, i, j):
        return ((i * 40503 + j * 30011 + h * 77 + b * 13) >> 3) % 7 < 2

    return PredicateMask(fn), lambda f: fn(f.b, f.h, f.i, f.j)


@case()
def batch_switch(s: Setting):
    mask = PredicateMask(lambda b, h, i, j: (b % 2 == 1) | (j <= i), offset=s.Lk - s.Lq)
    return mask, lambda f: causal(f) if f.b % 2 == 0 else f.i == f.i


@case()
def tautology(s: Setting):
    return CausalMask() | ~CausalMask(), lambda f: f.i == f.i


@case()
def contradiction(s: Setting):
    return CausalMask() & ~CausalMask(), lambda f: f.i < 0
