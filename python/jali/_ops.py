"""The operators' side of PyTorch: shapes for tracing, gradients, and what is refused.

`torch.ops.jali.attention_forward` and the others are defined in C++ (binding/torch). All are
functional. A mask travels as `program` (structure), `scalars` and `tables`, so that new lengths,
offsets and widths recompile nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ._library import raise_as_python

_ops = torch.ops.jali
forward = _ops.attention_forward.default
backward = _ops.attention_backward.default
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_transformed = torch._C._are_functorch_transforms_active  # inside torch.func.grad, vmap, ...
_num_dispatch_modes = torch._C._len_torch_dispatch_stack


def _direct(operator: Any) -> Any:
    """PERF: what OpOverload.__call__ calls; without that frame a call is 0.4 us shorter."""
    return getattr(operator, "_op", operator)


_forward, _backward = _direct(forward), _direct(backward)
_masked_forward = _direct(_ops.masked_forward.default)
_masked_backward = _direct(_ops.masked_backward.default)


def _marked(name: str, operator: Any) -> Any:
    """The operator inside an NVTX range, which profilers show over its kernels."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.nvtx.range(name):
            return operator(*args, **kwargs)

    return call


if os.environ.get("JALI_NVTX", "0") not in ("", "0") and torch.cuda.is_available():
    _forward = _marked("jali forward", _forward)
    _backward = _marked("jali backward", _backward)
    _masked_forward = _marked("jali forward", _masked_forward)
    _masked_backward = _marked("jali backward", _masked_backward)


class Options(NamedTuple):
    """What the operators take behind q, k and v, in the order and with the defaults of the schema.

    A call hands over what it was given by name (`Given`): each argument more costs 0.1 us.
    """

    bias: Tensor | None = None
    key_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    q_offsets: Tensor | None = None
    q_offset: int | None = None
    seed: Tensor | None = None
    # Of the mask; None where empty: autograd would take an empty list of numbers for one of
    # tensors, and even an empty list costs 1.5 us to hand over.
    tables: list[Tensor] | None = None
    scalars: list[int] | None = None
    program: list[int] | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False


#: Options by name; those that are missing have their defaults.
Given = dict[str, Any]

_DIFFERENTIABLE = ("bias", "key_bias", "sinks")
_DIFFERENTIABLE_NAMES = frozenset(_DIFFERENTIABLE)
_TENSORS = frozenset(
    (*_DIFFERENTIABLE, "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "q_offsets", "seed")
)


def _empty_in_order(shape: Sequence[int], like: Tensor) -> Tensor:
    """As empty_in_order in binding/torch/convert.cpp: dims lie in memory as `like`'s do."""
    given = like.stride()
    last = len(shape) - 1
    order = [*sorted(range(last), key=lambda d: -given[d]), last]
    strides = [1] * len(shape)
    stride = 1
    for d in reversed(order):
        strides[d] = stride
        stride = stride * torch.sym_max(shape[d], 1)  # lengths may not be known in a graph
    return like.new_empty_strided(shape, strides)


def _check(q: Tensor, k: Tensor, v: Tensor, options: Options) -> None:
    """What tracing must know to name the outputs' shapes; the operator checks everything."""
    varlen = options.cu_seqlens_q is not None
    tensors = zip(Options._fields[:4], options[:4])
    for name, x in (("k", k), ("v", v), *tensors, ("q_offset", options.q_offsets)):
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
    options = Options(*args[: len(Options._fields)])  # defaults at the end are left out
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
) -> tuple[Any, ...]:
    options = Options(*args[: len(Options._fields)])
    needs = (*args[len(Options._fields) :], False, False, False)
    inputs = [getattr(options, name) for name, needed in zip(_DIFFERENTIABLE, needs) if needed]
    others = [x.new_empty(x.shape) for x in inputs if x is not None]
    return (*(_empty_in_order(x.shape, x) for x in (q, k, v)), others)


@torch.library.register_fake("jali::masked_forward")
def _masked_forward_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _forward_fake(q, k, v)


@torch.library.register_fake("jali::masked_backward")
def _masked_backward_fake(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(_empty_in_order(x.shape, x) for x in (q, k, v))


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


# Gradients. The inputs of an autograd function are (numbers, names, q, k, v, *tensors): all tensors
# on their own, first the named ones, then the mask's tables, and all else as it is.


def _split(q: Tensor, k: Tensor, v: Tensor, given: Given) -> tuple[Any, ...]:
    numbers, names, tensors = {}, [], [q, k, v]
    for name, value in given.items():
        if name not in _TENSORS:
            numbers[name] = value
        elif value is not None:
            names.append(name)
            tensors.append(value)
    tensors += numbers.pop("tables", None) or ()
    return (numbers, names, *tensors)


def _join(numbers: Given, names: Sequence[str], tensors: Sequence[Tensor]) -> Given:
    if not tensors:
        return numbers
    if not names:  # PERF: of most masks with tables
        return {**numbers, "tables": tensors}
    given = {**numbers, **dict(zip(names, tensors))}
    if len(tensors) > len(names):
        given["tables"] = tensors[len(names) :]
    return given


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.numbers, ctx.names, *tensors = inputs
    ctx.num_tables = len(tensors) - 3 - len(ctx.names)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *tensors)


def _gradients(
    ctx: Any,
    needed: Sequence[str],
    dout: Tensor | None,
    dlse: Tensor | None,
    backward: Any = _backward,
) -> tuple[Tensor, Tensor, Tensor, Given]:
    """Of q, k and v, and by name those of the others that are needed."""
    out, lse, q, k, v, *tensors = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    given = _join(ctx.numbers, ctx.names, tensors)
    if needed:
        given = {**given, **{f"need_{name}": True for name in needed}}
    try:
        dq, dk, dv, others = backward(q, k, v, out, lse, dout, dlse, **given)
    except RuntimeError as error:
        raise_as_python(error)
    if not needed:
        return dq, dk, dv, {}
    named = zip(sorted(needed, key=_DIFFERENTIABLE.index), others, strict=True)
    return dq, dk, dv, dict(named)


class _Attention(torch.autograd.Function):
    """The operator and its gradient in eager mode.

    PERF: what register_autograd makes costs 170 us a forward and backward, this 50.
    """

    @staticmethod
    def forward(ctx: Any, numbers: Given, names: list[str], *tensors: Tensor) -> Any:
        q, k, v, *others = tensors
        with _BelowAutograd():
            output = _forward(q, k, v, **_join(numbers, names, others), expect_backward=True)
        _save(ctx, (numbers, names, *tensors), output)
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph: the operator refuses a second derivative
            return _eager_backward(ctx, dout, dlse, _backward)
        # Small gradients share a storage, which outputs of an operator in a graph must not.
        together = functools.partial(_backward, gradients_together=True)
        with _BelowAutograd():
            return _eager_backward(ctx, dout, dlse, together)


def _eager_backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, backward: Any
) -> tuple[Any, ...]:
    """One entry per input of the autograd function."""
    names, tables = ctx.names, (None,) * ctx.num_tables
    if not names:
        dq, dk, dv, _ = _gradients(ctx, (), dout, dlse, backward)
        return (None, None, dq, dk, dv, *tables)
    flags = ctx.needs_input_grad[5:]
    needed = [n for n, need in zip(names, flags) if need and n in _DIFFERENTIABLE]
    dq, dk, dv, others = _gradients(ctx, needed, dout, dlse, backward)
    return (None, None, dq, dk, dv, *map(others.get, names), *tables)


def attention(q: Tensor, k: Tensor, v: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    """(out, lse), at the least cost of PyTorch's wrappers: none where no gradient is needed."""
    if torch.compiler.is_compiling():
        return forward(q, k, v, **given)
    if _MASKED.issuperset(given) and type(q) is type(k) is type(v) is Tensor and not _looked_on():
        return _masked_attention(q, k, v, given)
    if torch.is_grad_enabled():
        if _transformed():
            return _Transformed.apply(*_split(q, k, v, given))
        if _needs_gradient(q, k, v, given):
            return _Attention.apply(*_split(q, k, v, given))
    with _BelowAutograd():
        return _forward(q, k, v, **given)


# PERF: calls with a mask and a scale alone have operators of their own, with few arguments and no
# lists of numbers: 5 of 22 us less. In graphs, and where something looks on, the operators are
# those above.

_MASKED = frozenset(("program", "scalars", "tables", "scale"))
_not_by_autograd = torch.library.Library("jali", "FRAGMENT")
for _name in ("masked_forward", "masked_backward"):
    _not_by_autograd.impl(_name, torch.library.fallthrough_kernel, "Autograd")


def _looked_on() -> bool:
    """Whether a dispatch mode or torch.func sees what operators are called."""
    return _num_dispatch_modes() > 0 or _transformed()


@functools.lru_cache(maxsize=1024)
def _mask_numbers(program: tuple[int, ...], scalars: tuple[int, ...]) -> Tensor:
    return torch.tensor([len(program), *program, *scalars], dtype=torch.int64, device="cpu")


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    mask = None
    if "program" in given:
        mask = _mask_numbers(tuple(given["program"]), tuple(given.get("scalars", ())))
    tables = given.get("tables")
    if torch.is_grad_enabled() and _needs_gradient(q, k, v, given):
        return _MaskedAttention.apply(given, mask, q, k, v, *(tables or ()))
    return _masked_forward(q, k, v, mask, tables, given.get("scale"), False)


class _MaskedAttention(torch.autograd.Function):
    """PERF: by _Attention, which could choose the operators, too, a pass takes 3 us more."""

    @staticmethod
    def forward(ctx: Any, given: Given, mask: Tensor | None, *tensors: Tensor) -> Any:
        q, k, v, *tables = tensors
        output = _masked_forward(q, k, v, mask, tables or None, given.get("scale"), True)
        numbers = {name: value for name, value in given.items() if name != "tables"}
        _save(ctx, (numbers, (), *tensors), output)
        ctx.mask = mask
        return output

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled() or type(dout) is not Tensor or _looked_on():
            return _Attention.backward(ctx, dout, dlse)
        out, lse, q, k, v, *tables = ctx.saved_tensors
        scale = ctx.numbers.get("scale")
        try:
            grads = _masked_backward(q, k, v, out, lse, dout, dlse, ctx.mask, tables or None, scale)
        except RuntimeError as error:
            raise_as_python(error)
        return (None, None, *grads, *(None,) * len(tables))


def _needs_gradient(q: Tensor, k: Tensor, v: Tensor, given: Given) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    # PERF: most calls have none of them, and any() takes longer than the look.
    if _DIFFERENTIABLE_NAMES.isdisjoint(given):
        return False
    return any(given[name].requires_grad for name in _DIFFERENTIABLE if name in given)


# The same for torch.func, which takes autograd functions of another form alone; they cost some
# 10 us more.


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(numbers: Given, names: list[str], *tensors: Tensor) -> Any:
        q, k, v, *others = tensors
        return _forward(q, k, v, **_join(numbers, names, others))

    setup_context = staticmethod(_save)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return _eager_backward(ctx, dout, dlse, _transformed_backward)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> NoReturn:
        _no_vmap(info, in_dims)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        no_jvp()


class _TransformedBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        dout: Tensor, dlse: Tensor | None, numbers: Given, names: list[str], *tensors: Tensor
    ) -> Any:
        q, k, v, out, lse, *others = tensors
        given = _join(numbers, names, others)
        dq, dk, dv, rest = _backward(q, k, v, out, lse, dout, dlse, **given)
        return (dq, dk, dv, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass  # nothing to save: there is no second derivative

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _no_second_derivative(ctx)

    vmap = staticmethod(_Transformed.vmap)
    jvp = staticmethod(_Transformed.jvp)


def _transformed_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    **given: Any,
) -> Any:
    numbers, names, *tensors = _split(q, k, v, given)
    tensors[3:3] = [out, lse]
    dq, dk, dv, *rest = _TransformedBackward.apply(dout, dlse, numbers, names, *tensors)
    return dq, dk, dv, rest


# The same for graphs: what torch.compile and torch.export see.


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    given = Options(*options[: len(Options._fields)])._asdict()
    _save(ctx, _split(q, k, v, given), output)


def _graph_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    # The dispatcher leaves out defaults at the end: there may be fewer inputs than options.
    places = ("q", "k", "v", *Options._fields)[: len(ctx.needs_input_grad)]
    flags = zip(places, ctx.needs_input_grad, strict=True)
    needed = [name for name, need in flags if need and name in _DIFFERENTIABLE]
    dq, dk, dv, others = _gradients(ctx, needed, dout, dlse)
    # Not by ctx.saved_tensors: under checkpointing they are unpacked once.
    others["tables"] = [None] * ctx.num_tables if ctx.num_tables else None
    return (dq, dk, dv, *map(others.get, places[3:]))


def _no_second_derivative(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "jali.attention has no second derivative; use jali.reference.attention where you need one"
    )


def no_jvp() -> NoReturn:
    raise NotImplementedError(
        "jali.attention has no forward-mode derivative (jvp); use reverse mode, or "
        "jali.reference.attention"
    )


def _no_vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
    raise NotImplementedError(
        "jali.attention cannot be vmapped; it has a batch and a head dim of its own: "
        "reshape the mapped dim into them"
    )


torch.library.register_autograd("jali::attention_forward", _graph_backward, setup_context=_setup)
torch.library.register_autograd("jali::attention_backward", _no_second_derivative)
torch.library.register_vmap("jali::attention_forward", _no_vmap)
torch.library.register_vmap("jali::attention_backward", _no_vmap)
