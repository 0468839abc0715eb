"""Selection by score on a GPU: what the operator behind `DynamicMask` does for CUDA tensors.

As on the CPU (src/mask/dynamic.cpp) key j is kept until the `keep`-th smallest position among the
keys that rank above it has come. Here keys are sorted by segment and rank, so that those above a
key are a stretch of a permutation, and the `keep`-th smallest numbers of all these stretches are
found together in a wavelet matrix (Claude, Navarro, Ordonez: The wavelet matrix, 2015), by digits
of some bits. O(L log L) time, O(L) memory, all of it PyTorch's own operators, and nothing is read
back by the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_FAR = 2**31 - 1  # no end: kFar of the C++ core
# Numbers of values by digit and place that are counted together; digits of one bit may take more.
# PERF: 16 heads of 8K 1.3 ms, with four times as many 1.7, by single bits 4.9.
_MOST_COUNTS = 1 << 22
_MOST_DIGIT_BITS = 7


def dynamic_ends(
    scores: Tensor,
    documents: Sequence[Tensor],
    keep_keys: Sequence[Tensor],
    cu_seqlens_k: Tensor | None,
    keep: int,
    causal: bool,
) -> Tensor:
    """Where each key ends to be visible, as a position of its sequence; 0: it never is.

    Args:
        scores: fp32 [B|1, H, Lk], leading dims may be missing. Varlen: packed [H, Tk].
        documents: int32 [B|1, Lk] each: keys of one segment agree in all of them; below 0: of none.
        keep_keys: bool [B|1, Lk] each: which keys are candidates. Varlen: tables are packed
            [Tk], or padded [N, Lk].
        cu_seqlens_k: [N + 1], or None.
        keep: Keys per row; below 0: all.
        causal: False: rows share one set, the best of each segment.

    Returns:
        int32 [B, H, Lk]; varlen [1, H, Tk].
    """
    scores = scores[(None,) * (3 - scores.dim())]
    length = scores.shape[-1]
    place = torch.arange(length, device=scores.device)
    begin = torch.zeros_like(place)  # of the key's sequence
    segments: list[Tensor] = []
    dead = ~(scores > -math.inf)
    sequence, count = None, 0
    if cu_seqlens_k is not None:
        count = cu_seqlens_k.shape[0] - 1
        if scores.shape[0] != 1:
            raise ValueError(
                f"DynamicMask: scores have shape {list(scores.shape)}; expected packed "
                f"[H, {length}]"
            )
        cu = cu_seqlens_k.to(torch.int64)
        sequence = torch.searchsorted(cu[1:], place, right=True)
        begin = cu[sequence.clamp(max=cu.shape[0] - 1)]
        dead = dead | (place >= cu[-1])
        segments.append(sequence[None])
    else:
        batches = {x.shape[0] for x in (scores, *documents, *keep_keys) if x.dim() > 1} - {1}
        if len(batches) > 1:
            raise ValueError(
                f"DynamicMask: the batch dims of scores and tables are {sorted(batches)}; expected "
                "1 or the same number of sequences"
            )
    within = place - begin
    for table in documents:
        ids = _of_keys(table, length, sequence, count, within, "a document table")
        dead = dead | (ids < 0)[:, None]
        segments.append(ids)
    for table in keep_keys:
        kept = _of_keys(table, length, sequence, count, within, "a keep_keys table")
        dead = dead | ~kept[:, None]
    # The dead rank last: no key has one of them above it. -0 + 0 is +0.
    scores = torch.where(dead, -math.inf, scores + 0.0)
    if keep <= 0 or length == 0:
        return torch.where(dead, 0, _FAR if keep < 0 else 0).to(torch.int32)

    # Keys by rank: of equal scores the newer one comes first.
    order = length - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    first = torch.zeros_like(order)  # of each place the first one of its segment
    for ids in segments:
        order = order.gather(-1, _in(order, ids).sort(dim=-1, stable=True).indices)
    if segments:
        opens = torch.zeros_like(dead)
        for ids in segments:
            sorted_ids = _in(order, ids)
            opens[..., 1:] |= sorted_ids[..., 1:] != sorted_ids[..., :-1]
        first = torch.where(opens, place, 0).cummax(-1).values
    rank = place - first
    if causal:
        last = _smallest(order, first, place.expand_as(order), keep - 1)
        end = torch.where(last > order, last - begin[order], 0)
        end = torch.where(rank >= keep, end, _FAR)
    else:
        end = torch.where(rank < keep, _FAR, 0)
    ends = torch.empty_like(order).scatter(-1, order, end)
    return torch.where(dead, 0, ends).to(torch.int32)


def _of_keys(
    table: Tensor, length: int, sequence: Tensor | None, count: int, within: Tensor, name: str
) -> Tensor:
    """[B|1, Lk] of a table of keys; varlen [1, Tk]. count: of sequences; within: the keys' places
    in them."""
    rows = table[None] if table.dim() == 1 else table
    if rows.dim() != 2 or (sequence is None and rows.shape[-1] != length):
        raise ValueError(
            f"DynamicMask: {name} has shape {list(table.shape)}; expected [B|1, {length}]"
        )
    if sequence is None or rows.shape == (1, length):
        return rows
    if rows.shape[0] == 1 and count > 1:
        raise ValueError(
            f"DynamicMask: {name} has one row of {rows.shape[-1]} entries, but there are {length} "
            "keys; expected an entry for each, those behind the last sequence too (a GPU call does "
            f"not wait to read how many these are), or a row per sequence, [{count}, longest]"
        )
    if rows.shape[-1] == 0:
        return rows.new_zeros(1, length)
    row = sequence.clamp(max=rows.shape[0] - 1)
    return rows[row, within.clamp(0, rows.shape[-1] - 1)][None]


def _in(order: Tensor, ids: Tensor) -> Tensor:
    """ids [B|1, Lk] of the keys `order` [B, H, Lk]."""
    return ids[:, None].expand_as(order).gather(-1, order)


def _smallest(values: Tensor, begin: Tensor, end: Tensor, n: int) -> Tensor:
    """Number n, from 0, of the sorted values[..., begin:end], for all pairs of `begin` and `end`.

    values: [..., L], of numbers below L. What is returned where there are fewer means nothing.
    """
    length = values.shape[-1]
    bits = (length - 1).bit_length()
    # PERF: each digit takes some 25 kernels, however wide it is, and memory for all its values.
    width = (_MOST_COUNTS // max(values.numel(), 1)).bit_length() - 1
    width = min(max(width, 1), _MOST_DIGIT_BITS)
    left = torch.full_like(begin, n)
    result = torch.zeros_like(begin)
    # From the highest digit down: values go by it, those of one digit in their order.
    while bits > 0:
        width = min(width, bits)
        bits -= width
        digit = values >> bits & (1 << width) - 1
        digits = torch.arange(1 << width, device=values.device)[:, None]
        counts = (digit[..., None, :] == digits).cumsum(-1, dtype=torch.int32)
        counts = F.pad(counts, (1, 0))  # [..., digit, place]: how many there are before the place
        low, high = (  # [..., digit, L]
            counts.gather(-1, x[..., None, :].expand_as(counts[..., :-1])) for x in (begin, end)
        )
        among = (high - low).cumsum(-2)  # of this digit and smaller ones
        found = (among <= left[..., None, :]).sum(-2).clamp(max=len(digits) - 1)
        result = result + (found << bits)
        if bits == 0:
            break
        low, high = _of_digit(low, found), _of_digit(high, found)
        left = left - (_of_digit(among, found) - (high - low))
        totals = counts[..., -1]
        starts = totals.cumsum(-1) - totals  # where those of a digit go
        begin, end = (starts.gather(-1, found) + x for x in (low, high))
        to = starts.gather(-1, digit) + _of_digit(counts[..., :-1], digit)
        values = torch.empty_like(values).scatter(-1, to, values)
    return result


def _of_digit(counts: Tensor, digit: Tensor) -> Tensor:
    """counts [..., digit, L] of the digits [..., L]."""
    return counts.gather(-2, digit[..., None, :]).squeeze(-2)
