"""From the user's arguments to the operators': masks of every kind, offsets, seeds, biases."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._convert import in_64_bits, int_param, readable
from ._mask import CallContext, Flat, Mask
from ._ops import Given
from ._table_masks import BlockSparseMask, DenseMask

_DENSE_LIMIT = 2**28  # cells of a foreign mask that are still evaluated


@dataclass(frozen=True)
class Plan:
    """A mask prepared for calls of one shape; made by `jali.plan`, accepted as `mask=`."""

    mask: Mask
    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    q_offset: int | Tensor | None
    flat: Flat

    def __repr__(self) -> str:
        return (
            f"Plan({self.mask!r}, B={self.B}, Hq={self.Hq}, Hkv={self.Hkv}, "
            f"Lq={self.Lq}, Lk={self.Lk})"
        )


def prepare(
    q: Tensor,
    k: Tensor,
    mask: Any,
    scale: float | None,
    bias: Tensor | None,
    key_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout_p: float,
    seed: int | Tensor | None,
    q_offset: int | Tensor | None,
    deterministic: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Given:
    """The operators' options. q and k are in the layout of the operators."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)):
        raise TypeError(
            f"q and k must be tensors, got {type(q).__name__} and {type(k).__name__}; "
            "convert them with torch.as_tensor"
        )
    if isinstance(mask, Plan):
        q_offset = _planned_offset(mask, q_offset)
    if q_offset is not None and type(q_offset) is not int:
        q_offset = int_param(q_offset, "attention", "q_offset")
    given: Given = {}
    if mask is not None:
        if isinstance(mask, Tensor) and mask.is_floating_point():
            # What scaled_dot_product_attention takes: a bias. Neither of the two is dropped.
            bias = mask if bias is None else mask + bias
        else:
            if isinstance(mask, Mask) and not mask._needs_call:
                # Numbers of a mask that is made while a graph is traced belong to that graph.
                flat = mask.flatten() if torch.compiler.is_compiling() else mask._flat
            else:
                flat = flatten(mask, context(q, k, q_offset, cu_seqlens_q, cu_seqlens_k))
            program, tables, scalars = flat
            if program:
                given["program"] = program
            if tables:
                given["tables"] = tables
            if scalars:
                given["scalars"] = scalars
    if bias is not None:
        check_tensor("bias", bias)
        given["bias"] = bias[(None,) * (4 - bias.dim())] if bias.dim() < 4 else bias
    if key_bias is not None:
        check_tensor("key_bias", key_bias)
        rank = 3 if cu_seqlens_q is None else 2
        if key_bias.dim() < rank:
            key_bias = key_bias[(None,) * (rank - key_bias.dim())]
        given["key_bias"] = key_bias
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes)
        _no_gradient("alibi_slopes", alibi_slopes)
        given["alibi_slopes"] = alibi_slopes.to(torch.float32).contiguous()
    if sinks is not None:
        check_tensor("sinks", sinks)
        given["sinks"] = sinks.to(torch.float32).contiguous() if q.is_cuda else sinks
    if cu_seqlens_q is not None:
        given["cu_seqlens_q"] = cu_seqlens_q
    if cu_seqlens_k is not None:
        given["cu_seqlens_k"] = cu_seqlens_k
    if q_offset is not None:
        given["q_offsets" if isinstance(q_offset, Tensor) else "q_offset"] = q_offset
    if dropout_p:
        given["dropout_p"] = dropout_p
        given["seed"] = make_seed(seed, q.device)
    if scale is not None:
        _no_gradient("scale", scale)
        given["scale"] = scale
    if softcap:
        _no_gradient("softcap", softcap)
        given["softcap"] = softcap
    if deterministic or _asks_for_determinism():
        given["deterministic"] = True
    return given


def check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}; use torch.as_tensor")


def _no_gradient(name: str, value: Any) -> None:
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{name} requires a gradient, which attention does not compute: pass {name}.detach(), "
            "or say it by what has one (multiply q by a learned scale, add slopes as a bias)"
        )


def _asks_for_determinism() -> bool:
    return (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )


def heads_first(layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k, v in the layout of the operators, [B, heads, L, D]."""
    if layout not in ("bhld", "blhd"):
        raise ValueError(f'layout must be "bhld" or "blhd", got {layout!r}')
    if layout == "bhld":
        return tensors
    for name, x in zip("qkv", tensors):
        check_tensor(name, x)
        if x.dim() < 3:
            raise ValueError(f"{name} has {x.dim()} dims; expected [B, L, heads, D]")
    return tuple(x.transpose(-2, -3) for x in tensors)


def in_autocast(q: Tensor, k: Tensor, v: Tensor, *biases: Any) -> tuple[Any, ...]:
    """Inside torch.autocast: q, k and v in its dtype, as scaled_dot_product_attention takes them.

    float64 stays; of the biases only those in 16 bits are converted: float32 goes with any dtype.
    """
    if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
        return (q, k, v, *biases)
    dtype = torch.get_autocast_dtype(q.device.type)
    halves = (torch.bfloat16, torch.float16)

    def converted(x: Any, given: tuple[torch.dtype, ...]) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype in given else x

    inputs = (converted(x, (*halves, torch.float32)) for x in (q, k, v))
    return (*inputs, *(converted(x, halves) for x in biases))


def context(
    q: Tensor,
    k: Tensor,
    q_offset: int | Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> CallContext:
    """What a derived mask is told of the call."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        if q.dim() != 4 or k.dim() != 4:
            raise ValueError(
                f"q and k must be [B, heads, L, D], got {q.dim()} and {k.dim()} dims; "
                "packed sequences go to attention_varlen"
            )
        B, Hq, Lq, _ = q.shape
        _, Hkv, Lk, _ = k.shape
    else:
        if q.dim() != 3 or k.dim() != 3:
            raise ValueError(
                f"q and k must be [tokens, heads, D] in attention_varlen, got {q.dim()} and "
                f"{k.dim()} dims"
            )
        B = cu_seqlens_q.shape[0] - 1
        Lq, Hq, _ = q.shape
        Lk, Hkv, _ = k.shape
    return CallContext(B, Hq, Hkv, Lq, Lk, q_offset, cu_seqlens_q, cu_seqlens_k, q.device)


def make_seed(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """The dropout's seed as an int64 tensor of one element; None draws one."""
    if seed is None:
        # torch's own generator: torch.manual_seed, checkpointing and graphs all work as usual.
        return torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed must be an int or an int64 tensor of one element, got {seed.dtype} with "
                f"{seed.numel()} elements"
            )
        if seed.device != device and seed.device.type != "cpu":
            raise TypeError(f"seed is on device {seed.device} but q on {device}; move it there")
        return seed.reshape(())
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        raise TypeError(f"seed must be an int or an int64 tensor, got {type(seed).__name__}")
    if isinstance(seed, int):
        in_64_bits(seed, "attention", "seed")
    return torch.full((), seed, dtype=torch.int64, device=device)


def flatten(mask: Any, ctx: CallContext) -> Flat:
    """Any accepted kind of mask but a float tensor as (program, tables, scalars)."""
    if isinstance(mask, Plan):
        _check_plan(mask, ctx)
        return mask.flat
    return as_mask(mask, ctx).flatten(ctx)


def as_mask(mask: Any, ctx: CallContext) -> Mask:
    """A Mask from a bool tensor, a FlexAttention BlockMask or mask_mod, or anything evaluable.

    A plan is to be unplanned() before: it has an offset, too.
    """
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"a mask tensor must be bool (True: visible) or floating point (a bias), got "
                f"{mask.dtype}; write mask != 0"
            )
        return DenseMask(mask)
    if hasattr(mask, "kv_indices"):
        return _of_blocks(mask, ctx)
    function = getattr(mask, "mask_mod", mask)
    if callable(function):
        return _from_function(function, ctx)
    if callable(getattr(mask, "dense", None)):
        _check_cells(mask, ctx)
        return DenseMask(mask.dense(ctx.B, ctx.Hq, ctx.Lq, ctx.Lk))
    raise TypeError(
        "mask must be a jali Mask, a bool or float tensor, a FlexAttention BlockMask or a "
        f"function of (b, h, q, k), got {type(mask).__name__}"
    )


def _of_blocks(mask: Any, ctx: CallContext) -> Mask:
    """A BlockMask: the cells that mask_mod shows in the blocks listed as partial, and all cells of
    those listed as full. Lists by create_block_mask say nothing that mask_mod does not, but others
    do, and only a look at the device could tell them apart."""
    partial = _listed_blocks(mask, mask.kv_num_blocks, mask.kv_indices, ctx)
    full = None
    if mask.full_kv_indices is not None:
        full = _listed_blocks(mask, mask.full_kv_num_blocks, mask.full_kv_indices, ctx)
    if getattr(mask.mask_mod, "__name__", "") == "noop_mask":  # as from_kv_blocks makes it
        return BlockSparseMask(partial if full is None else partial | full, mask.BLOCK_SIZE)
    shown = BlockSparseMask(partial, mask.BLOCK_SIZE) & _from_function(mask.mask_mod, ctx)
    return shown if full is None else shown | BlockSparseMask(full, mask.BLOCK_SIZE)


def _listed_blocks(mask: Any, count: Tensor, index: Tensor, ctx: CallContext) -> Tensor:
    """bool [B, H, rows of blocks, columns of blocks]."""
    columns = -(-ctx.Lk // mask.BLOCK_SIZE[1])
    # Behind their count, indices may be anything.
    listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
    place = index.long().clamp(0, max(columns - 1, 0))
    found = torch.zeros(*index.shape[:-1], columns, dtype=torch.int32, device=index.device)
    return found.scatter_add(-1, place, listed.int()) > 0


def _from_function(function: Callable[..., Any], ctx: CallContext) -> Mask:
    from .predicate import PredicateMask

    try:
        return PredicateMask(function)
    except (TypeError, NotImplementedError) as error:
        reason = str(error).split("\n")[0]
    _check_cells(function, ctx, reason)
    index = [torch.arange(n, device=ctx.device) for n in (ctx.B, ctx.Hq, ctx.Lq, ctx.Lk)]
    b, h, i, j = (x.view([-1 if d == n else 1 for d in range(4)]) for n, x in enumerate(index))
    return DenseMask(torch.as_tensor(function(b, h, i, j)).to(torch.bool))


_warned: set[type] = set()


def _check_cells(mask: Any, ctx: CallContext, reason: str = "") -> None:
    """Says once per kind of object that its cells are evaluated; refuses where they are many."""
    kind = type(mask)
    because = f" ({reason})" if reason else ""
    if ctx.cu_seqlens_q is not None:
        raise TypeError(
            f"a mask of type {kind.__name__} cannot be used in attention_varlen{because}; "
            "write it with jali's masks"
        )
    cells = ctx.B * ctx.Hq * ctx.Lq * ctx.Lk
    if cells > _DENSE_LIMIT:
        raise ValueError(
            f"a mask of type {kind.__name__} would have to be evaluated in {cells} cells, more "
            f"than the limit of 2^28{because}; write it with jali's masks"
        )
    if kind not in _warned:
        _warned.add(kind)
        warnings.warn(
            f"a mask of type {kind.__name__} is evaluated in every cell{because}: slow, and O(L^2) "
            "memory; write it with jali's masks, e.g. jali.CausalMask() & jali.WindowMask.last(n)",
            stacklevel=5,
        )


def _planned_offset(plan: Plan, q_offset: int | Tensor | None) -> int | Tensor | None:
    """The plan's offset; raises if the call has another one."""
    planned = plan.q_offset
    if q_offset is None or q_offset is planned:
        return planned
    given = int_param(q_offset, "attention", "q_offset")
    if not isinstance(given, Tensor) and not isinstance(planned, Tensor):
        same = given == planned
    elif planned is None:
        same = False
    else:
        a, b = (x if isinstance(x, Tensor) else torch.tensor([x]) for x in (given, planned))
        if not (readable(a) and readable(b)):
            raise ValueError(
                "the plan holds its q_offset, and another tensor cannot be compared with it here: "
                "leave q_offset out or pass the plan's own"
            )
        same = (len(a) == len(b) or 1 in (len(a), len(b))) and bool((a == b).all())
    if not same:
        raise ValueError(
            f"the plan was made for q_offset = {_shown(planned)}, but the call has "
            f"{_shown(given)}; make one plan per offset or pass the mask itself"
        )
    return planned


def _shown(offset: int | Tensor | None) -> object:
    return offset.tolist() if isinstance(offset, Tensor) else offset


def unplanned(mask: Any, q_offset: int | Tensor | None) -> tuple[Any, int | Tensor | None]:
    """What a plan was made from, and its offset; anything else as it is."""
    if not isinstance(mask, Plan):
        return mask, q_offset
    return mask.mask, _planned_offset(mask, q_offset)


def _check_plan(plan: Plan, ctx: CallContext) -> None:
    if ctx.cu_seqlens_q is not None and plan.mask._needs_call:
        raise ValueError(
            "a plan of a mask that depends on the call (DynamicMask, TokenIndexMask, ...) knows no "
            "packed sequences; pass the mask itself to attention_varlen"
        )
    planned = (plan.B, plan.Hq, plan.Hkv, plan.Lq, plan.Lk)
    if planned != ctx[:5]:
        raise ValueError(
            f"the plan was made for (B, Hq, Hkv, Lq, Lk) = {planned}, but the call has {ctx[:5]}; "
            "make one plan per shape or pass the mask itself"
        )
