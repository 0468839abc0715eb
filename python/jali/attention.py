"""Attention through a mask: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _check, _ops
from ._call import Plan, as_mask, check_tensor, heads_first, in_autocast, prepare, unplanned
from ._convert import int_param, int_table
from ._library import raise_as_python
from ._mask import CallContext

#: What `mask=` takes: a Mask, a Plan, a tensor as for scaled_dot_product_attention, a mask_mod.
MaskLike = Any

_any_autocast = torch._C._is_any_autocast_enabled  # PERF: 0.1 us, of one device type 0.4


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike = None,
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
    layout: Literal["bhld", "blhd"] = "bhld",
    return_lse: bool = False,
    return_probs: bool = False,
    deterministic: bool = False,
) -> Any:
    """softmax(scale * q @ k.T + biases, over the keys that the mask shows) @ v.

    Scores: scale * q . k, then softcap * tanh(score / softcap), then + bias + key_bias + ALiBi,
    then the mask, the softmax over visible keys and sinks, dropout, and the product with v. A row
    that sees no key (and has no sink) gives zeros, lse -inf and zero gradients.

    Inside torch.autocast q, k and v are taken in its dtype, as by scaled_dot_product_attention.

    Args:
        q: [B, Hq, Lq, D]; float64, float32, bfloat16 or float16; last dim contiguous.
        k: [B, Hkv, Lk, D], Hkv divides Hq: query head h uses key head h // (Hq / Hkv).
        v: [B, Hkv, Lk, Dv].
        mask: Which (row, key) cells are used: a `jali.Mask`, a `jali.Plan`, a bool tensor (True:
            visible) or a float tensor (a bias with gradient) as scaled_dot_product_attention
            takes, a FlexAttention mask_mod or BlockMask. None: all cells.
        scale: Factor of the scores; None: 1 / sqrt(D).
        bias: Added to the scores: [B|1, Hq|Hkv|1, Lq|1, Lk|1], leading dims may be missing; q's
            dtype or float32. Differentiable.
        key_bias: The same for all rows: [B|1, Hq|Hkv|1, Lk]. Differentiable.
        alibi_slopes: [Hq]; -slope * |p - j| is added, p the row's position.
        softcap: Bounds the scores to +-softcap; None or 0: off.
        sinks: [Hq], logits that take part in the softmax without a value. Differentiable.
        dropout_p: Probability that a weight is dropped, to 1/32768.
        seed: Of the dropout: an int or an int64 tensor of one element; None: drawn by
            torch.randint. The same seed drops the same cells on every device.
        q_offset: Position of row 0: an int or an int tensor [B]. None: Lk - Lq, so that the last
            row stands at the last key; 0: the first row stands at the first key.
        layout: "bhld" as above, or "blhd": q, k, v and out are [B, L, heads, D].
        return_lse: Also return the log of the softmax' denominator, [B, Hq, Lq], float32 (float64
            for float64 inputs), natural log, differentiable.
        return_probs: Also return the probabilities before dropout, [B, Hq, Lq, Lk], computed
            densely and without gradient: for inspection.
        deterministic: Bitwise equal gradients on repetition (always so on the CPU).

    Returns:
        out [B, Hq, Lq, Dv] (or [B, Lq, Hq, Dv]) in q's dtype and stride order; with return_lse or
        return_probs a tuple (out, lse), (out, probs) or (out, lse, probs).

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices, strides or values that do not fit.
        NotImplementedError: for what no kernel of the tensors' device serves, second derivatives
            and vmap.

    Example:
        >>> q = k = v = torch.randn(1, 4, 1000, 64)
        >>> out = jali.attention(q, k, v, jali.CausalMask() & jali.WindowMask.last(128))
    """
    q, k, v = heads_first(layout, q, k, v)
    if _any_autocast():
        q, k, v, mask, bias, key_bias = in_autocast(q, k, v, mask, bias, key_bias)
    given = prepare(
        q,
        k,
        mask,
        scale,
        bias,
        key_bias,
        alibi_slopes,
        softcap,
        sinks,
        dropout_p,
        seed,
        q_offset,
        deterministic,
    )
    out, lse = run(q, k, v, given)
    if layout == "blhd":
        out = out.transpose(1, 2)
    if not return_lse and not return_probs:
        return out
    results = (out, lse) if return_lse else (out,)
    if not return_probs:
        return results
    probs = _probs(
        q,
        k,
        v,
        mask,
        scale=scale,
        bias=bias,
        key_bias=key_bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        q_offset=q_offset,
    )
    return (*results, probs)


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    mask: MaskLike = None,
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
    return_lse: bool = False,
    return_probs: bool = False,
    deterministic: bool = False,
) -> Any:
    """`attention` over N sequences of different lengths, packed behind each other.

    Sequence n has the rows cu_seqlens_q[n] .. cu_seqlens_q[n + 1] and the keys cu_seqlens_k[n] ..
    cu_seqlens_k[n + 1]. In masks, b is the sequence, and i and j count from 0 in it. Tokens behind
    the last sequence get zeros.

    Args:
        q: [Tq, Hq, D]; k: [Tk, Hkv, D]; v: [Tk, Hkv, Dv].
        cu_seqlens_q, cu_seqlens_k: int [N + 1], not decreasing, from 0.
        mask: As for `attention`; a table per token may be packed ([Tq], [Tk]) or padded
            ([N, longest]).
        bias: [N|1, Hq|Hkv|1, longest q|1, longest k|1].
        key_bias: [1|Hkv|Hq, Tk].
        q_offset: Position of row 0 of each sequence, an int or an int tensor [N]; None: Lk - Lq of
            the sequence.
        scale, alibi_slopes, softcap, sinks, dropout_p, seed, deterministic: As for `attention`.
        return_lse: Also return lse [Hq, Tq].
        return_probs: Also return the probabilities, [N, Hq, longest q, longest k].

    Returns:
        out [Tq, Hq, Dv], or a tuple as for `attention`.
    """
    cu_q = int_table(cu_seqlens_q, "attention_varlen", "cu_seqlens_q", 1)
    cu_k = int_table(cu_seqlens_k, "attention_varlen", "cu_seqlens_k", 1)
    if _any_autocast():
        q, k, v, mask, bias, key_bias = in_autocast(q, k, v, mask, bias, key_bias)
    given = prepare(
        q,
        k,
        mask,
        scale,
        bias,
        key_bias,
        alibi_slopes,
        softcap,
        sinks,
        dropout_p,
        seed,
        q_offset,
        deterministic,
        cu_q,
        cu_k,
    )
    out, lse = run(q, k, v, given)
    if not return_lse and not return_probs:
        return out
    results = (out, lse) if return_lse else (out,)
    if not return_probs:
        return results
    probs = _probs(
        q,
        k,
        v,
        mask,
        scale=scale,
        bias=bias,
        key_bias=key_bias,
        alibi_slopes=alibi_slopes,
        softcap=softcap,
        sinks=sinks,
        q_offset=q_offset,
        cu_seqlens=(cu_q, cu_k),
    )
    return (*results, probs)


def run(q: Tensor, k: Tensor, v: Tensor, given: _ops.Given) -> tuple[Tensor, Tensor]:
    """Calls the operator; its errors become Python's."""
    check_tensor("v", v)
    if forward_ad._current_level >= 0:
        _no_tangents(q, k, v, *(given.get(n) for n in ("bias", "key_bias", "sinks")))
    checked = _check.LEVEL and q.is_cuda and not torch.compiler.is_compiling()
    if checked:
        _check.check_values(q, k, given)
    try:
        out, lse = _ops.attention(q, k, v, given)
    except RuntimeError as error:
        raise_as_python(error)
    if checked and _check.LEVEL == "cpu":
        _check.check_results(q, k, v, given, out, lse)
    return out, lse


def _no_tangents(*inputs: Tensor | None) -> None:
    """Forward-mode differentiation would give zeros without a word."""
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        _ops.no_jvp()


@torch.no_grad()
def _probs(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, **options: Any) -> Tensor:
    """The probabilities by dense PyTorch."""
    from . import reference

    cu_q, cu_k = options.pop("cu_seqlens", (None, None))
    if cu_q is None:
        return reference.attention(q, k, v, mask, return_probs=True, **options)[-1]
    return reference.attention_varlen(q, k, v, cu_q, cu_k, mask, return_probs=True, **options)[-1]


def merge_lse(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of disjoint sets of keys, from the results over each set.

    Args:
        outs: Results of `attention`, all [B, H, L, Dv] (or all [T, H, Dv] of `attention_varlen`).
        lses: Their lse, [B, H, L] (or [H, T]). Sinks must have been given to one of the calls only.

    Returns:
        (out, lse) as one call over all keys gives them; differentiable.
    """
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            f"merge_lse needs as many lses as outs, and at least one; got {len(outs)} outs and "
            f"{len(lses)} lses"
        )
    varlen = outs[0].dim() == 3
    for out, lse in zip(outs, lses, strict=True):
        rows = (out.shape[1], out.shape[0]) if varlen else out.shape[:-1]
        if out.shape != outs[0].shape or lse.shape != rows:
            raise ValueError(
                "merge_lse needs outs of one shape [B, H, L, Dv] and lses [B, H, L] (varlen: "
                f"[T, H, Dv] and [H, T]), got out {tuple(out.shape)} with lse {tuple(lse.shape)}"
            )
    stacked = torch.stack(tuple(lses))
    top = stacked.detach().amax(0)
    top = torch.where(top == -torch.inf, 0, top)
    weights = torch.exp(stacked - top)
    total = weights.sum(0)
    empty = total == 0
    total = torch.where(empty, 1, total)
    merged = torch.where(empty, -torch.inf, top + torch.log(total))
    shares = weights / total
    shares = (shares.transpose(1, 2) if varlen else shares)[..., None]
    result = sum(share * out.to(share.dtype) for share, out in zip(shares, outs, strict=True))
    return result.to(outs[0].dtype), merged


def plan(
    mask: MaskLike,
    B: int,
    Hq: int,
    Hkv: int,
    Lq: int,
    Lk: int,
    *,
    q_offset: int | Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Plan:
    """Prepares a mask for many calls of one shape, e.g. all layers of a model.

    What depends on the shape alone is done once: derived masks (`DynamicMask`, `TokenIndexMask`)
    are turned into the leaves that stand for them.

    Args:
        mask: As for `attention`, but no float tensor.
        B, Hq, Hkv, Lq, Lk: Sequences, query heads, key heads, rows and keys of the calls.
        q_offset: As for `attention`; the calls may leave it out, but not give another one.
        device: Where the calls run.

    Returns:
        A `Plan`, to be passed as `mask=`.
    """
    mask, q_offset = unplanned(mask, q_offset)
    q_offset = int_param(q_offset, "plan", "q_offset")
    ctx = CallContext(B, Hq, Hkv, Lq, Lk, q_offset, None, None, torch.device(device))
    made = as_mask(mask, ctx)
    return Plan(made, B, Hq, Hkv, Lq, Lk, q_offset, made.flatten(ctx))
