"""Independent brute force: what each mask means, cell by cell, and dense attention in any dtype.

Written from the tables of docs/design.md, not from the library, and kept slow and obvious. Masks
are described by twins of the public classes (same names, same arguments) that return `Cells`, a
function of one sequence's `Frame` that gives a bool array broadcastable to [Hq, Lq, Lk].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass(frozen=True)
class Problem:
    """The index space of a call. `cu_q`, `cu_k` (lists) make it varlen with B sequences."""

    B: int = 1
    Hq: int = 1
    Hkv: int = 1
    Lq: int = 1
    Lk: int = 1
    q_offset: Any = None  # None, int or one int per sequence
    cu_q: Sequence[int] | None = None
    cu_k: Sequence[int] | None = None

    def frame(self, b: int) -> Frame:
        lq, lk, q0, k0 = self.Lq, self.Lk, 0, 0
        if self.cu_q is not None and self.cu_k is not None:
            q0, k0 = self.cu_q[b], self.cu_k[b]
            lq, lk = self.cu_q[b + 1] - q0, self.cu_k[b + 1] - k0
        offset = lk - lq if self.q_offset is None else _number(self.q_offset, b)
        return Frame(b, self.Hq, lq, lk, offset, q0, k0, self.cu_q is not None)

    def visible(self, cells: Cells) -> np.ndarray:
        """bool [B, Hq, Lq, Lk]; bounds apply outermost (cells of shorter sequences are False)."""
        out = np.zeros((self.B, self.Hq, self.Lq, self.Lk), dtype=bool)
        for b in range(self.B):
            f = self.frame(b)
            out[b, :, : f.Lq, : f.Lk] = np.broadcast_to(cells(f), (self.Hq, f.Lq, f.Lk))
        return out


@dataclasses.dataclass(frozen=True)
class Frame:
    """One sequence: index arrays h [Hq, 1, 1], i and p (position) [1, Lq, 1], j [1, 1, Lk]."""

    b: int
    Hq: int
    Lq: int
    Lk: int
    offset: int
    q_start: int = 0
    k_start: int = 0
    varlen: bool = False

    @property
    def h(self) -> np.ndarray:
        return np.arange(self.Hq).reshape(-1, 1, 1)

    @property
    def i(self) -> np.ndarray:
        return np.arange(self.Lq).reshape(1, -1, 1)

    @property
    def j(self) -> np.ndarray:
        return np.arange(self.Lk).reshape(1, 1, -1)

    @property
    def p(self) -> np.ndarray:
        return self.i + self.offset


class Cells:
    """A mask's meaning; composes like a mask."""

    def __init__(self, fn: Callable[[Frame], Any]):
        self.fn = fn

    def __call__(self, f: Frame) -> np.ndarray:
        return np.asarray(self.fn(f), dtype=bool)

    def __and__(self, other: Cells) -> Cells:
        return Cells(lambda f: self(f) & other(f))

    def __or__(self, other: Cells) -> Cells:
        return Cells(lambda f: self(f) | other(f))

    def __invert__(self) -> Cells:
        return Cells(lambda f: ~self(f))


def _number(x: Any, b: int) -> int:
    """An int, or entry b of one int per sequence."""
    a = np.asarray(x)
    return int(a) if a.ndim == 0 else int(a.reshape(-1)[b if a.size > 1 else 0])


def _rows_at(offset: Any, f: Frame) -> np.ndarray:
    return f.p if offset is None else f.i + _number(offset, f.b)


def _per_head(x: Any, f: Frame) -> np.ndarray:
    a = np.asarray(x).reshape(-1)
    return a[np.arange(f.Hq) // (f.Hq // a.size)].reshape(-1, 1, 1)


def _at_batch(table: np.ndarray, f: Frame) -> np.ndarray:
    return table[f.b if table.shape[0] > 1 else 0]


def _tokens(table: Any, f: Frame, rank: int, start: int, length: int) -> np.ndarray:
    """The sequence's part of a per-token table ([B, L] or [B, H, L]) as [Hq or 1, length]."""
    a = np.asarray(table)
    packed = f.varlen and (a.ndim < rank or a.shape[0] == 1)
    a = a.reshape((1,) * (rank - a.ndim) + a.shape)
    a = _at_batch(a, f)
    a = a[..., start : start + length] if packed else a[..., :length]
    if rank == 2:
        return a[None]
    return a[np.arange(f.Hq) // (f.Hq // a.shape[0])]


def _grid(table: Any, f: Frame) -> np.ndarray:
    """Broadcasts [B, H, R, C] (leading dims may be missing) to [Hq, R, C]."""
    a = np.asarray(table)
    a = _at_batch(a.reshape((1,) * (4 - a.ndim) + a.shape), f)
    return a[np.arange(f.Hq) // (f.Hq // a.shape[0])]


# ---- the twins, in the order of the design's table ----


def CausalMask(offset: Any = None) -> Cells:
    return Cells(lambda f: f.j <= _rows_at(offset, f))


def WindowMask(left: Any, right: Any, offset: Any = None) -> Cells:
    def cells(f: Frame) -> np.ndarray:
        p = _rows_at(offset, f)
        ok = np.ones((f.Hq, f.Lq, f.Lk), dtype=bool)
        if left is not None:
            ok &= f.j >= p - _per_head(left, f)
        if right is not None:
            ok &= f.j <= p + _per_head(right, f)
        return ok

    return Cells(cells)


def PrefixMask(length: Any) -> Cells:
    return Cells(lambda f: f.j < _number(length, f.b))


def KeyPaddingMask(keep: Any) -> Cells:
    return Cells(lambda f: _tokens(keep, f, 2, f.k_start, f.Lk)[:, None, :])


def DocumentMask(q_ids: Any, k_ids: Any = None) -> Cells:
    def cells(f: Frame) -> np.ndarray:
        if k_ids is not None:
            rows = _tokens(q_ids, f, 2, f.q_start, f.Lq)[0]
            keys = _tokens(k_ids, f, 2, f.k_start, f.Lk)[0]
        else:
            keys = _tokens(q_ids, f, 2, f.k_start, f.Lk)[0]
            p = np.arange(f.Lq) + f.offset
            inside = (p >= 0) & (p < f.Lk)
            rows = np.where(inside, keys[np.clip(p, 0, f.Lk - 1)], -1) if f.Lk else 0 * p - 1
        return (rows[None, :, None] == keys[None, None, :]) & (rows >= 0)[None, :, None]

    return Cells(cells)


def PackedDocumentMask(cu_seqlens: Any) -> Cells:
    def cells(f: Frame) -> np.ndarray:
        cuts = _at_batch(np.atleast_2d(np.asarray(cu_seqlens)), f)
        rows, keys = f.p[0, :, 0], np.arange(f.Lk)
        shared = np.zeros((f.Lq, f.Lk), dtype=bool)
        for a, z in zip(cuts, cuts[1:]):  # noqa: RUF007
            shared |= ((a <= rows) & (rows < z))[:, None] & ((a <= keys) & (keys < z))
        return shared[None]

    return Cells(cells)


def KeyIntervalMask(start: Any, end: Any, offset: Any = 0) -> Cells:
    def cells(f: Frame) -> np.ndarray:
        p = _rows_at(offset, f)
        ok = np.ones((f.Hq, f.Lq, f.Lk), dtype=bool)
        if start is not None:
            ok &= p >= _tokens(start, f, 3, f.k_start, f.Lk)[:, None, :]
        if end is not None:
            ok &= p < _tokens(end, f, 3, f.k_start, f.Lk)[:, None, :]
        return ok

    return Cells(cells)


def RowIntervalMask(start: Any, end: Any) -> Cells:
    return Cells(
        lambda f: (
            (f.j >= _tokens(start, f, 3, f.q_start, f.Lq)[:, :, None])
            & (f.j < _tokens(end, f, 3, f.q_start, f.Lq)[:, :, None])
        )
    )


def DilatedMask(step: int, offset: Any = None) -> Cells:
    return Cells(lambda f: (_rows_at(offset, f) - f.j) % step == 0)


def _tuple(x: Any, n: int) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,) * n


def NeighborhoodMask(shape: Any, kernel: Any, dilation: Any = 1, causal: Any = False) -> Cells:
    dims = _tuple(shape, 1)
    n = len(dims)
    per_dim = list(
        zip(dims, _tuple(kernel, n), _tuple(dilation, n), _tuple(causal, n), strict=True)
    )

    def neighbours(x: int, size: int, kernel: int, dilation: int, causal: bool) -> set[int]:
        group = list(range(x % dilation, size, dilation))  # dilation splits a dim into such groups
        at = group.index(x)
        if causal:
            return set(group[max(0, at - kernel + 1) : at + 1])
        first = min(max(at - kernel // 2, 0), max(len(group) - kernel, 0))
        return set(group[first : first + kernel])

    def cells(f: Frame) -> np.ndarray:
        total = math.prod(dims)
        ok = np.ones((total,) * 2, dtype=bool)
        at = np.stack(np.unravel_index(np.arange(total), dims))  # [n, total]
        for d, (size, *rest) in enumerate(per_dim):
            near = np.zeros((size, size), dtype=bool)
            for x in range(size):
                near[x, sorted(neighbours(x, size, *rest))] = True
            ok &= near[at[d][:, None], at[d][None, :]]
        cells = np.zeros((1, f.Lq, f.Lk), dtype=bool)  # rows and keys beyond the grid: none
        cells[0, :total, :total] = ok[: f.Lq, : f.Lk]
        return cells

    return Cells(cells)


def BlockSparseMask(blocks: Any, block: Any = (128, 128)) -> Cells:
    def cells(f: Frame) -> np.ndarray:
        grid = _grid(blocks, f)
        return grid[:, np.arange(f.Lq) // block[0]][:, :, np.arange(f.Lk) // block[1]]

    return Cells(cells)


def TokenIndexMask(indices: Any, block: int = 1) -> Cells:
    def cells(f: Frame) -> np.ndarray:
        lists = _grid(indices, f)  # [Hq, blocks, n]
        ok = np.zeros((f.Hq, f.Lq, f.Lk), dtype=bool)
        for h, i in itertools.product(range(f.Hq), range(f.Lq)):
            listed = lists[h, i // block]
            ok[h, i, listed[(listed >= 0) & (listed < f.Lk)]] = True
        return ok

    return Cells(cells)


def DenseMask(tensor: Any) -> Cells:
    return Cells(lambda f: _grid(tensor, f)[:, : max(f.Lq, 1), : max(f.Lk, 1)])


def PredicateMask(fn: Callable, offset: Any = 0) -> Cells:
    """fn gets NumPy integers arrays; what it captures must be arrays too."""

    def cells(f: Frame) -> np.ndarray:
        i, j, h = np.broadcast_arrays(_rows_at(offset, f), f.j, f.h)
        return fn(np.full_like(i, f.b), h, i, j)

    return Cells(cells)


def DynamicMask(
    scores: Any, keep: int | None = None, *, threshold: float | None = None,
    within: Cells | None = None, causal: bool = True, offset: Any = None,
) -> Cells:  # fmt: skip
    def cells(f: Frame) -> np.ndarray:
        allowed = np.ones((f.Hq, f.Lq, f.Lk), dtype=bool)
        if causal:
            allowed &= f.j <= _rows_at(offset, f)
        if within is not None:
            allowed &= within(f)
        s = _tokens(np.asarray(scores, dtype=np.float32), f, 3, f.k_start, f.Lk)
        good = ~np.isnan(s) & (s != -np.inf)
        if threshold is not None:
            good &= s >= np.float32(threshold)
        ok = np.zeros_like(allowed)
        for h, i in itertools.product(range(f.Hq), range(f.Lq)):
            hs = h if s.shape[0] > 1 else 0
            keys = np.flatnonzero(allowed[h, i] & good[hs])
            best = sorted(keys, key=lambda j: (s[hs, j] + 0.0, j), reverse=True)
            ok[h, i, best[:keep]] = True
        return ok

    return Cells(cells)


# ---- tile classes ----


def classes(
    visible: np.ndarray, tile: tuple[int, int], inside: np.ndarray | None = None
) -> np.ndarray:
    """int8 [B, H, rows, cols]: 0 empty, 1 partial, 2 full over the cells in bounds (`inside`, for
    sequences of unequal lengths; None: all)."""
    m, n = tile
    *lead, lq, lk = visible.shape
    rows, cols = -(-lq // m), -(-lk // n)

    def count(cells: np.ndarray) -> np.ndarray:
        padded = np.zeros((*lead, rows * m, cols * n), dtype=bool)
        padded[..., :lq, :lk] = cells
        return padded.reshape(*lead, rows, m, cols, n).sum(axis=(-3, -1), dtype=np.int64)

    seen, size = count(visible), count(np.bool_(True) if inside is None else inside)
    return np.where(seen == 0, 0, np.where(seen == size, 2, 1)).astype(np.int8)


# ---- dropout: Philox4x32-7, sixteen calls for 1024 x 128 cells of a head ----


def philox(counter: np.ndarray, key: tuple[int, int], rounds: int = 7) -> np.ndarray:
    """counter uint64 [..., 4] of 32-bit words → the same shape."""
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (counter[..., n].astype(np.uint64) for n in range(4))
    k0, k1 = key
    for _ in range(rounds):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), b & low,
            (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1), a & low,
        )  # fmt: skip
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1)


def dropout_numbers(seed: int, B: int, H: int, Lq: int, Lk: int, first_b: int = 0) -> np.ndarray:
    """int64 [B, H, Lq, Lk] of 15-bit numbers."""
    # 4 x 4 calls for each 1024 rows and 8192 keys
    calls = 4 * -(-Lq // 1024), 4 * -(-Lk // 8192)
    b, h, i, j = np.meshgrid(*map(np.arange, (B, H, *calls)), indexing="ij")
    counter = np.stack([j, i, h, b + first_b], axis=-1)
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)).astype(np.uint32)
    i, j = np.arange(Lq), np.arange(Lk)
    x = words[:, :, (i // 1024 * 4 + i % 8 // 2)[:, None], j // 8192 * 4 + j % 8 // 2]
    # 16 constants within 64 rows or 128 keys, and one more for each of these
    row, key = i // 8 % 8 * 2 + i % 2, j // 8 % 16
    rows, keys = i // 64 % 16, j // 128 % 64
    row, key = low_bits(mixed(row), 16, row)[:, None], low_bits(mixed(key), 16, key)
    rows = low_bits(mixed(16 + rows), 1024, rows * 16)[:, None]
    keys = low_bits(mixed(16 + keys), 1024, keys * 16)
    cells = (x[..., 0] * (row + rows) + x[..., 1]) * (key + keys) + x[..., 2] * (row + rows)
    cells += x[..., 3] + row * (rows // np.uint32(1024)) + key * (keys // np.uint32(1024))
    return (cells >> (j % 2 * 16).astype(np.uint32) & np.uint32(0x7FFF)).astype(np.int64)


def mixed(n: np.ndarray) -> np.ndarray:
    x = (n + 1).astype(np.uint32) * np.uint32(0x9216D5D9)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x8979FB1B)
    return x ^ x >> np.uint32(16)


def low_bits(x: np.ndarray, size: int, low: np.ndarray) -> np.ndarray:
    """x, with its digits below `size` replaced by `low`."""
    return x // np.uint32(size) * np.uint32(size) + low.astype(np.uint32)


def dropout_keeps(numbers: np.ndarray, p: float) -> np.ndarray:
    """Which cells are kept: the rarer ones have the small numbers."""
    dropped = round(p * 32768)
    return numbers >= dropped if dropped <= 16384 else numbers < 32768 - dropped


# ---- attention ----


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, *,
    scale: float | None = None, softcap: float | None = None, bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None, alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None, dropout_p: float = 0.0, seed: int = 0, q_offset: Any = None,
    first_b: int = 0, lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Dense attention in q's dtype: S and P are rounded to it, so it is also the 16-bit reference.

    q [B, Hq, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], visible bool [B, Hq, Lq, Lk] → out
    [B, Hq, Lq, Dv] in q's dtype, lse [B, Hq, Lq] in fp32 (fp64 for fp64). Dropout takes the first
    sequence for number `first_b`. With the LSE of an earlier forward given, P = exp(S - lse) as in
    a backward, and the result's second part is P's sums: to S they have the gradient that LSE has.
    """
    B, Hq, Lq, D = q.shape
    Lk = k.shape[2]

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.to(q.dtype).repeat_interleave(Hq // x.shape[1], dim=1)

    s = q @ heads(k).transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + heads(bias.reshape((1,) * (4 - bias.dim()) + bias.shape))
    if key_bias is not None:
        s = s + heads(key_bias.reshape((1,) * (3 - key_bias.dim()) + key_bias.shape))[:, :, None]
    if alibi_slopes is not None:
        offsets = [
            Lk - Lq if q_offset is None else _number(q_offset, first_b + b) for b in range(B)
        ]
        p = torch.tensor(offsets).reshape(-1, 1, 1, 1) + torch.arange(Lq).reshape(-1, 1)
        far = (p - torch.arange(Lk)).abs()
        s = s - (alibi_slopes.reshape(1, -1, 1, 1).to(q.dtype) * far.to(q.dtype))
    s = s.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(q.dtype).reshape(1, -1, 1, 1).expand(B, -1, Lq, 1)], dim=-1)
    dead = (s == -torch.inf).all(dim=-1, keepdim=True)  # true of a row without cells too
    if s.shape[-1] == 0:
        zero = q.sum() * 0 + k.sum() * 0 + v.sum() * 0
        lse = torch.full((B, Hq, Lq), -torch.inf, dtype=_accumulate(q.dtype))
        return torch.zeros(B, Hq, Lq, v.shape[-1], dtype=q.dtype) + zero, lse
    s = s.masked_fill(dead, 0)
    if lse is None:
        lse = torch.logsumexp(s.to(_accumulate(q.dtype)), dim=-1)
        lse = lse.masked_fill(dead[..., 0], -torch.inf)
        prob = torch.softmax(s, dim=-1)
    else:
        prob = torch.exp(s - lse.masked_fill(dead[..., 0], 0)[..., None])
        lse = prob.sum(dim=-1)
    prob = prob.masked_fill(dead, 0)[..., :Lk]
    if dropout_p:
        numbers = dropout_numbers(seed, B, Hq, Lq, Lk, first_b)
        kept = torch.from_numpy(dropout_keeps(numbers, dropout_p))
        rate = 1 - round(dropout_p * 32768) / 32768
        prob = prob * kept * (1 / rate if rate else 0.0)
    return prob.to(v.dtype) @ heads(v), lse


def attention_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, cells: Cells,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """One sequence after the other: q [Tq, Hq, D], k and v [Tk, Hkv, *] → out [Tq, Hq, Dv], lse
    [Hq, Tq]. key_bias is packed [H, Tk], bias padded [N|1, H, Lq|1, Lk|1]."""
    outs, lses = [q[:0, :, :1].expand(-1, -1, v.shape[-1])], []
    bias, key_bias = options.pop("bias", None), options.pop("key_bias", None)
    given = options.pop("lse", None)
    for n in range(problem.B):
        f, one = problem.frame(n), dict(options)
        rows, keys = (slice(a, a + m) for a, m in ((f.q_start, f.Lq), (f.k_start, f.Lk)))
        if bias is not None:
            mine = bias[n if bias.shape[0] > 1 else 0][None]
            one["bias"] = mine[:, :, : max(f.Lq, 1), : max(f.Lk, 1)]
            if f.Lk == 0:
                one["bias"] = one["bias"][..., :0]
        if key_bias is not None:
            one["key_bias"] = key_bias[None, :, keys]
        if given is not None:
            one["lse"] = given[None, :, rows]
        visible = torch.from_numpy(np.array(np.broadcast_to(cells(f), (f.Hq, f.Lq, f.Lk))))[None]
        out, lse = attention(
            *(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), visible,
            first_b=n, **one,
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def _accumulate(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
