"""Attention in dense PyTorch: the specification.

The same signatures as `jali.attention` and `jali.attention_varlen`, on any device, differentiable
(twice, too) by autograd, in O(Lq Lk) memory. Besides masks it takes their cells as a bool tensor,
and then nothing here comes from Jali's library.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ._call import as_mask, context, make_seed, unplanned
from .tiles import dense


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    q_offset: int | Tensor | None = None,
    layout: str = "bhld",
    return_lse: bool = False,
    return_probs: bool = False,
    deterministic: bool = False,
    first_sequence: int = 0,
) -> Any:
    """As `jali.attention`. `first_sequence`: the number of the first one in dropout's counting."""
    if layout == "blhd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    (B, Hq, Lq, D), (Hkv, Lk) = q.shape, k.shape[1:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def per_head(x: Tensor, dim: int = 1) -> Tensor:
        """Head dim 1, Hkv or Hq -> Hq (or 1)."""
        return x if x.shape[dim] == 1 else x.repeat_interleave(Hq // x.shape[dim], dim)

    visible = torch.ones((), dtype=torch.bool, device=q.device)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        bias = mask if bias is None else mask + bias
    elif isinstance(mask, Tensor):
        visible = per_head(mask[(None,) * (4 - mask.dim())])
    elif mask is not None:
        mask, q_offset = unplanned(mask, q_offset)
        mask = as_mask(mask, context(q, k, q_offset, None, None))
        visible = mask.dense(B, Hq, Lq, Lk, q_offset=q_offset, num_kv_heads=Hkv)

    keys, values = per_head(k.to(dtype)), per_head(v.to(dtype))
    scores = (q.to(dtype) @ keys.mT) * (D**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + per_head(bias[(None,) * (4 - bias.dim())].to(dtype))
    if key_bias is not None:
        scores = scores + per_head(key_bias[(None,) * (3 - key_bias.dim())].to(dtype))[:, :, None]
    if alibi_slopes is not None:
        offset = torch.as_tensor(Lk - Lq if q_offset is None else q_offset, device=q.device)
        p = torch.arange(Lq, device=q.device)[:, None] + offset.reshape(-1, 1, 1, 1)
        distance = (p - torch.arange(Lk, device=q.device)).abs()
        scores = scores - alibi_slopes.to(dtype)[:, None, None] * distance
    scores = scores.masked_fill(~visible, -torch.inf)

    # The softmax by hand: a row without any key has no maximum, and gives zeros.
    extra = scores.new_full((Hq,), -torch.inf) if sinks is None else sinks.to(dtype)
    extra = extra[:, None].expand(B, Hq, Lq)
    top = extra if Lk == 0 else torch.maximum(scores.amax(-1), extra)
    top = torch.where(top == -torch.inf, 0, top).detach()
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1) + torch.exp(extra - top)
    empty = total == 0
    lse = torch.where(empty, -torch.inf, top + torch.log(torch.where(empty, 1, total)))
    probs = weights / torch.where(empty, 1, total)[..., None]

    kept = probs
    if dropout_p:
        dropped = round(dropout_p * 32768)  # of 32768; the rarer cells have the small numbers
        numbers = dropout_numbers(
            make_seed(seed, q.device), first_sequence, B, Hq, Lq, Lk, q.device
        )
        rest = 32768 - dropped
        keeps = numbers >= dropped if dropped <= rest else numbers < rest
        kept = torch.where(keeps, probs * (32768 / max(rest, 1)), 0)
    out = (kept @ values).to(q.dtype)
    if layout == "blhd":
        out = out.transpose(1, 2)
    results = (out, *([lse] if return_lse else []), *([probs] if return_probs else []))
    return results if len(results) > 1 else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: Any = None,
    *,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    q_offset: int | Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    return_probs: bool = False,
    **options: Any,
) -> Any:
    """As `jali.attention_varlen`: `attention`, sequence by sequence."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    N, Hq, Hkv = len(starts_q) - 1, q.shape[1], k.shape[1]
    longest_q = max((b - a for a, b in pairwise(starts_q)), default=0)
    longest_k = max((b - a for a, b in pairwise(starts_k)), default=0)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        bias, mask = mask if bias is None else mask + bias, None
    if mask is not None:
        mask, q_offset = unplanned(mask, q_offset)
        ctx = context(q, k, q_offset, cu_seqlens_q, cu_seqlens_k)
        mask = dense(
            as_mask(mask, ctx),
            N,
            Hq,
            longest_q,
            longest_k,
            q_offset=q_offset,
            num_kv_heads=Hkv,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            tokens=(q.shape[0], k.shape[0]),
        )
    if dropout_p:
        seed = make_seed(seed, q.device)

    def sequence(x: Tensor | None, n: int, *lengths: int) -> Tensor | None:
        """Sequence n of a padded tensor, whose dims may be 1."""
        if x is None:
            return None
        x = x[(None,) * (4 - x.dim())]
        x = x if x.shape[0] == 1 else x[n : n + 1]
        for dim, length in zip((2, 3), lengths, strict=True):
            x = x if x.shape[dim] == 1 else x.narrow(dim, 0, length)
        return x

    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((Hq, q.shape[0]), -torch.inf, dtype=dtype)
    probs = q.new_zeros(N, Hq, longest_q, longest_k, dtype=dtype)
    for n in range(N):
        rows, keys = slice(*starts_q[n : n + 2]), slice(*starts_k[n : n + 2])
        lengths = rows.stop - rows.start, keys.stop - keys.start
        offset = q_offset
        if isinstance(offset, Tensor) and offset.numel() > 1:
            offset = offset.reshape(-1)[n : n + 1]
        o, s, p = attention(
            q[rows].transpose(0, 1)[None],
            k[keys].transpose(0, 1)[None],
            v[keys].transpose(0, 1)[None],
            sequence(mask, n, *lengths),
            bias=sequence(bias, n, *lengths),
            key_bias=None if key_bias is None else key_bias[..., keys],
            q_offset=offset,
            dropout_p=dropout_p,
            seed=seed,
            return_lse=True,
            return_probs=True,
            first_sequence=n,
            **options,
        )
        out[rows] = o[0].transpose(0, 1)
        lse[:, rows] = s[0]
        probs[n, :, : lengths[0], : lengths[1]] = p[0]
    results = (out, *([lse] if return_lse else []), *([probs] if return_probs else []))
    return results if len(results) > 1 else out


def _mix(n: Tensor) -> Tensor:
    """Mixes small numbers, by words of the fraction of pi."""
    x = (n + 1) * 0x9216D5D9 & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x8979FB1B & 0xFFFFFFFF
    return x ^ x >> 16


def dropout_numbers(
    seed: Tensor, first_sequence: int, B: int, H: int, Lq: int, Lk: int, device: torch.device
) -> Tensor:
    """The 15-bit number of every cell, int64 [B, H, Lq, Lk]; the dropped cells have the smallest
    ones, or if more than half are dropped the kept cells.

    Philox4x32 with 7 rounds: key = seed, counter = (4 (j // 8192) + j % 8 // 2, 4 (i // 1024) + i %
    8 // 2, h, b), gives words x. Cell (i, j) has x[0] e f + x[1] e + x[2] f + x[3] modulo 2^32,
    with e the factor number j % 128 // 8 plus the shift number j // 128 % 64, f the factor number
    i % 64 // 8 * 2 + i % 2 plus the shift number i // 64 % 16; to which each of these factors is
    added times its shift // 1024; and of that the low half for even j, the high half for odd j,
    without its top bit. A factor's last four bits are its number, a shift's last ten bits 16 times
    that; their others are mixed from it.
    """
    low = 0xFFFFFFFF
    sizes = (first_sequence, B), (0, H), (0, Lq), (0, Lk)
    b, h, i, j = (
        torch.arange(start, start + n, device=device).view(
            [-1 if d == dim else 1 for d in range(4)]
        )
        for dim, (start, n) in enumerate(sizes)
    )
    x = torch.broadcast_tensors(j // 8192 * 4 + j % 8 // 2, i // 1024 * 4 + i % 8 // 2, h, b)
    keys = (seed & low, (seed >> 32) & low)
    for _ in range(7):
        # int64 products wrap, but their bits are right; shifts keep the sign, which the & removes.
        first, second = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = (
            ((second >> 32) & low) ^ x[1] ^ keys[0],
            second & low,
            ((first >> 32) & low) ^ x[3] ^ keys[1],
            first & low,
        )
        keys = (keys[0] + 0x9E3779B9) & low, (keys[1] + 0xBB67AE85) & low
    numbers = torch.arange(64, device=device)
    factors = _mix(numbers) & ~0xF | numbers
    shifts = _mix(16 + numbers) & ~0x3FF | 16 * numbers
    key, keys = factors[j % 128 // 8], shifts[j // 128 % 64]
    row, rows = factors[i % 64 // 8 * 2 + i % 2], shifts[i // 64 % 16]
    e, f = key + keys & low, row + rows & low
    word = ((x[0] * f + x[1]) & low) * e + x[2] * f + x[3]
    word = word + key * (keys >> 10) + row * (rows >> 10)
    return word >> j % 2 * 16 & 0x7FFF
