"""The operators' side of PyTorch: shapes for tracing, gradients, and what is refused.

`torch.ops.jali.attention_forward` and the others are defined in C++ (binding/torch). All are
functional. A mask travels as `program` (structure), `scalars` and `tables`, so that new lengths,
offsets and widths recompile nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import _library  # noqa: F401  (loads the operators)

_ops = torch.ops.jali
forward = _ops.attention_forward.default
backward = _ops.attention_backward.default
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


class Options(NamedTuple):
    """What the operators take behind q, k and v, in the order of their schema."""

    bias: Tensor | None
    key_bias: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    q_offsets: Tensor | None
    q_offset: int | None
    seed: Tensor | None
    # Of the mask; None where empty: autograd would take an empty list of numbers for one of
    # tensors, and even an empty list costs 1.5 us to hand over.
    tables: list[Tensor] | None
    scalars: list[int] | None
    program: list[int] | None
    scale: float | None
    softcap: float
    dropout_p: float
    deterministic: bool


def _empty_in_order(shape: Sequence[int], like: Tensor) -> Tensor:
    """As empty_in_order in binding/torch/convert.cpp: dims lie in memory as `like`'s do."""
    given = like.stride()
    last = len(shape) - 1
    order = [*sorted(range(last), key=lambda d: -given[d]), last]
    strides = [1] * len(shape)
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * max(shape[d], 1)
    return like.new_empty_strided(shape, strides)


def _check(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """What tracing must know to name the outputs' shapes; the operator checks everything."""
    varlen = options.cu_seqlens_q is not None
    for name, x in (("k", k), ("v", v), *zip(Options._fields[:4], options[:4])):
        if x is not None and x.device != q.device:
            raise TypeError(
                f"{name} is on device {x.device} but q on {q.device}; move them to one device"
            )
    rank, heads, layout = (3, 1, "[tokens, heads, D]") if varlen else (4, 1, "[B, heads, L, D]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            raise ValueError(f"{name} has {x.dim()} dims; expected {layout}")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} has dtype {x.dtype} but q has {q.dtype}; convert them to one dtype"
            )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError("q and k have different head dims; they must be equal")
    if q.shape[heads] % k.shape[heads] != 0 or k.shape[heads] != v.shape[heads]:
        raise ValueError("k and v must have the same number of heads, a divisor of q's")


@torch.library.register_fake("jali::attention_forward")
def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    options = Options(*args)
    _check(q, k, v, options)
    varlen = options.cu_seqlens_q is not None
    out = _empty_in_order((*q.shape[:-1], v.shape[-1]), q)
    rows = (q.shape[1], q.shape[0]) if varlen else q.shape[:-1]
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(rows, dtype=dtype)


@torch.library.register_fake("jali::attention_backward")
def _backward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    *args: Any,
) -> tuple[Tensor, ...]:
    *rest, need_bias, need_key_bias, need_sinks = args
    options = Options(*rest)
    grads = [_empty_in_order(x.shape, x) for x in (q, k, v)]
    for x, needed in (
        (options.bias, need_bias),
        (options.key_bias, need_key_bias),
        (options.sinks, need_sinks),
    ):
        given = x is not None and needed
        grads.append(
            x.new_empty(x.shape) if given else q.new_empty(0, dtype=torch.float32)  # type: ignore[union-attr]
        )
    return tuple(grads)


@torch.library.register_fake("jali::attention_truth")
def _truth_fake(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, *args: Any
) -> tuple[Tensor, ...]:
    options = Options(*args)
    rows = (q.shape[1], q.shape[0]) if options.cu_seqlens_q is not None else q.shape[:-1]
    shapes: list[Any] = [(*q.shape[:-1], v.shape[-1]), rows]
    for x in (q, k, v, options.bias, options.key_bias, options.sinks):
        shapes.append(0 if dout is None or x is None else x.shape)
    return tuple(q.new_empty(shape, dtype=torch.float64) for shape in shapes)


@torch.library.register_fake("jali::mask_dense")
def _mask_dense_fake(
    tables: list[Tensor],
    scalars: list[int],
    program: list[int],
    B: int,
    Hq: int,
    Hkv: int,
    Lq: int,
    Lk: int,
    *rest: Any,
) -> Tensor:
    return torch.empty((B, Hq, Lq, Lk), dtype=torch.bool, device="cpu")


@torch.library.register_fake("jali::mask_tiles")
def _mask_tiles_fake(
    tables: list[Tensor],
    scalars: list[int],
    program: list[int],
    B: int,
    Hq: int,
    Hkv: int,
    Lq: int,
    Lk: int,
    q_offsets: Tensor | None,
    q_offset: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    Tq: int,
    Tk: int,
    tile_rows: int,
    tile_keys: int,
    batches: int,
    heads: int,
) -> tuple[Tensor, Tensor]:
    rows, keys = (Lq + tile_rows - 1) // tile_rows, (Lk + tile_keys - 1) // tile_keys
    classes = torch.empty((batches, heads, rows, keys), dtype=torch.int8, device="cpu")
    return classes, torch.empty(3, dtype=torch.int64, device="cpu")


# Tensors go through save_for_backward, everything else stays in the options.
_SAVED = (
    "bias",
    "key_bias",
    "alibi_slopes",
    "sinks",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "q_offsets",
    "seed",
)
_DIFFERENTIABLE = ("bias", "key_bias", "sinks")
_FIRST = 3  # inputs before the options: q, k, v


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    options = Options(*inputs[_FIRST:])
    ctx.set_materialize_grads(False)
    saved = [getattr(options, name) for name in _SAVED]
    ctx.save_for_backward(*inputs[:_FIRST], *output, *saved, *(options.tables or ()))
    rest: Any = {**dict.fromkeys(_SAVED), "tables": None}
    ctx.options = options._replace(**rest)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> list[Any]:
    """One entry per input of the operator."""
    q, k, v, out, lse, *saved = ctx.saved_tensors
    tables = saved[len(_SAVED) :] or None
    options = ctx.options._replace(**dict(zip(_SAVED, saved)), tables=tables)
    if dout is None:
        dout = torch.zeros_like(out)
    places = [_FIRST + Options._fields.index(name) for name in _DIFFERENTIABLE]
    needed = [ctx.needs_input_grad[place] for place in places]
    given = backward(q, k, v, out, lse, dout, dlse, *options, *needed)
    grads: list[Any] = [None] * (_FIRST + len(options))
    grads[:_FIRST] = given[:3]
    for place, grad, wanted in zip(places, given[3:], needed, strict=True):
        grads[place] = grad if wanted else None
    return grads


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    grads = _gradients(ctx, dout, dlse)
    tables = len(ctx.saved_tensors) - _FIRST - 2 - len(_SAVED)
    grads[_FIRST + Options._fields.index("tables")] = [None] * tables if tables else None
    return tuple(grads)


class _Attention(torch.autograd.Function):
    """The operator and its gradient in eager mode.

    PERF: what register_autograd makes costs 170 us a forward and backward, this 40.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with _BelowAutograd():
            output = forward(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph: the operator refuses a second derivative
            return tuple(_gradients(ctx, dout, dlse))
        with _BelowAutograd():
            return tuple(_gradients(ctx, dout, dlse))


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), at the least cost of PyTorch's wrappers: none where no gradient is needed."""
    if torch.compiler.is_compiling():
        return forward(q, k, v, *options)
    if torch.is_grad_enabled() and _needs_gradient(q, k, v, options):
        return _Attention.apply(q, k, v, *options)
    with _BelowAutograd():
        return forward(q, k, v, *options)


def _needs_gradient(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    bias, key_bias, _, sinks = options[:4]
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (bias is not None and bias.requires_grad)
        or (key_bias is not None and key_bias.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    )


def _no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "jali.attention has no second derivative; use jali.reference.attention where you need one"
    )


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
    raise NotImplementedError(
        "jali.attention cannot be vmapped; it has a batch and a head dim of its own: "
        "reshape the mapped dim into them"
    )


torch.library.register_autograd("jali::attention_forward", _backward, setup_context=_setup)
torch.library.register_autograd("jali::attention_backward", _no_second_derivative)
torch.library.register_vmap("jali::attention_forward", _no_vmap)
torch.library.register_vmap("jali::attention_backward", _no_vmap)
