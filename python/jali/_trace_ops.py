"""The operations that a predicate may use: one recording function each, found by its torch name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._program import BOOL, FLOAT, INT, TYPE_NAMES
from ._trace import FUNCTIONS, Trace, Value, call, find_trace


def _pair(op: str, x: Any, y: Any, least: int = BOOL) -> tuple[Trace, Value, Value]:
    trace = find_trace((x, y))
    assert trace is not None
    x, y = trace.lift(x, op), trace.lift(y, op)
    type_ = max(x.type, y.type, least)
    return trace, trace.cast(x, type_), trace.cast(y, type_)


def _arithmetic(op: str, on_bools: str | None) -> Callable[..., Value]:
    def record(x: Any, y: Any, *, alpha: Any = 1) -> Value:
        if alpha != 1:
            y = call("__mul__", (y, alpha), {}) if find_trace((y, alpha)) else y * alpha
        trace, x, y = _pair(op, x, y)
        if x.type == BOOL:
            if on_bools is None:
                raise TypeError(
                    f"predicate: `{op}` of two bools; write ^ (exclusive or) or .long() first."
                )
            return trace.emit(BOOL, on_bools, x.at, y.at)
        return trace.emit(x.type, op, x.at, y.at)

    return record


def _integer(op: str, name: str, hint: str) -> Callable[..., Value]:
    def record(x: Any, y: Any) -> Value:
        trace, x, y = _pair(name, x, y, INT)
        if x.type == FLOAT:
            raise NotImplementedError(f"predicate: `{name}` of floats. {hint}")
        divisor = trace.nodes[y.at]
        by_zero = divisor[0] == "const" and type(divisor[1]) is int and divisor[1] == 0
        if by_zero and op in ("floor_div", "mod"):
            raise ZeroDivisionError(f"predicate: `{name}` by the constant 0.")
        return trace.emit(INT, op, x.at, y.at)

    return record


def _bitwise(op: str) -> Callable[..., Value]:
    def record(x: Any, y: Any) -> Value:
        trace, x, y = _pair(op, x, y)
        if x.type == FLOAT:
            raise TypeError(f"predicate: bitwise `{op}` of floats; compare them first.")
        if x.type == BOOL:  # what new_ones and new_zeros gave to and_masks and or_masks
            for known, other in ((x, y), (y, x)):
                node = trace.nodes[known.at]
                if node[0] == "const" and node[1] is (_TRUE if op == "and" else _FALSE):
                    return other
        return trace.emit(x.type, op, x.at, y.at)

    return record


def _logical(op: str) -> Callable[..., Value]:
    def record(x: Any, y: Any) -> Value:
        trace = find_trace((x, y))
        assert trace is not None
        x, y = (trace.cast(trace.lift(v, f"logical_{op}"), BOOL) for v in (x, y))
        return trace.emit(BOOL, op, x.at, y.at)

    return record


def _compare(op: str, swap: bool = False) -> Callable[..., Value]:
    def record(x: Any, y: Any) -> Value:
        least = BOOL if op in ("eq", "ne") else INT
        trace, x, y = _pair(op, x, y, least)
        if swap:
            x, y = y, x
        return trace.emit(BOOL, op, x.at, y.at)

    return record


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return call("__floordiv__", (x, y), {})
    if rounding_mode is not None:
        raise NotImplementedError(
            f'predicate: division with rounding_mode="{rounding_mode}"; write x // y.'
        )
    raise NotImplementedError(
        "predicate: true division `/`; write x // y (rounded down), or compare products, e.g. "
        "x < c * y instead of x / y < c, or multiply by a float constant."
    )


def _negate(x: Value) -> Value:
    if x.type == BOOL:
        raise TypeError("predicate: unary minus of a bool; write ~x.")
    return x.trace.emit(x.type, "neg", x.at)


def _absolute(x: Value) -> Value:
    return x if x.type == BOOL else x.trace.emit(x.type, "abs", x.at)


def _invert(x: Value) -> Value:
    if x.type == FLOAT:
        raise TypeError(f"predicate: `~` of the float `{x.text()}`; compare it first.")
    return x.trace.emit(x.type, "not", x.at)


def _power(x: Any, y: Any) -> Value:
    if not isinstance(x, Value) or not isinstance(y, int) or not 1 <= y <= 4:
        raise NotImplementedError(
            "predicate: `**` with anything but a constant exponent from 1 to 4; write a product, "
            "or 1 << x for a power of two."
        )
    result = x
    for _ in range(y - 1):
        result = call("__mul__", (result, x), {})
    return result


def _extreme(op: str, on_bools: str) -> Callable[..., Value]:
    pair = _arithmetic(op, on_bools)

    def record(x: Any, *others: Any, **kwargs: Any) -> Value:
        others += tuple(kwargs.values())
        if len(others) != 1 or not isinstance(others[0], (Tensor, Value)):
            raise NotImplementedError(
                f"predicate: torch.{op} over a dimension; torch.{op}(x, y) of two values and "
                f"torch.{op}imum are supported."
            )
        return pair(x, others[0])

    return record


def _clamp(x: Any, min: Any = None, max: Any = None) -> Value:
    if min is not None:
        x = call("maximum", (x, min), {})
    if max is not None:
        x = call("minimum", (x, max), {})
    return x


def _where(condition: Any, x: Any = None, y: Any = None, **kwargs: Any) -> Value:
    x, y = kwargs.get("input", x), kwargs.get("other", y)
    if x is None or y is None:
        raise NotImplementedError("predicate: torch.where(c); write torch.where(c, x, y).")
    trace = find_trace((condition, x, y))
    assert trace is not None
    condition = trace.lift(condition, "where")
    if condition.type != BOOL:
        raise TypeError(
            f"predicate: the condition of torch.where is `{condition.text()}`, a "
            f"{TYPE_NAMES[condition.type]}; expected a bool, e.g. `x != 0`."
        )
    x, y = trace.lift(x, "where"), trace.lift(y, "where")
    type_ = max(x.type, y.type)
    x, y = trace.cast(x, type_), trace.cast(y, type_)
    return trace.emit(type_, "where", condition.at, x.at, y.at)


def _cast_to(type_: int) -> Callable[..., Value]:
    return lambda x, *_, **__: x.trace.cast(x, type_)


def _to(x: Value, *args: Any, **kwargs: Any) -> Value:
    dtype = kwargs.get("dtype")
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (Tensor, Value)):
            dtype = arg.dtype
    if dtype is None:
        return x
    if dtype == torch.bool:
        return x.trace.cast(x, BOOL)
    if dtype == torch.float32:
        return x.trace.cast(x, FLOAT)
    if dtype in (torch.int32, torch.int64):
        return x.trace.cast(x, INT)
    raise NotImplementedError(
        f"predicate: a cast to {dtype}; expected bool, int32, int64 or float32."
    )


class _Known(int):
    """A bool that belongs to the structure (torch.ones, not a literal), so it may be folded."""


_TRUE, _FALSE = _Known(1), _Known(0)


def _require_scalar_shape(size: Any) -> None:
    if tuple(size) not in ((), ((),), (torch.Size(()),)):
        raise NotImplementedError(
            f"predicate: a new tensor of shape {tuple(size)}; a predicate sees one cell at a time, "
            "so only shape () is supported."
        )


def _filled(value: Any) -> Callable[..., Value]:
    def record(x: Value, *args: Any, dtype: Any = None, **kwargs: Any) -> Value:
        _require_scalar_shape(kwargs.get("size", args))
        return _constant_like(x, value, dtype)

    return record


def _constant_like(x: Value, value: Any, dtype: Any) -> Value:
    if (dtype or x.dtype) == torch.bool and value in (0, 1):
        return x.trace.emit(BOOL, "const", _TRUE if value else _FALSE)
    return _to(x.trace.lift(value, "a new tensor"), dtype or x.dtype)


def _full_like(x: Value, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    return _to(x.trace.lift(fill_value, "full_like"), dtype or x.dtype)


def _new_full(x: Value, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> Value:
    _require_scalar_shape(size)
    return _full_like(x, fill_value, dtype=dtype)


def _logical_not(x: Value) -> Value:
    return _invert(x.trace.cast(x, BOOL))


def _same(x: Value, *_: Any, **__: Any) -> Value:
    return x


_HINT_FLOAT = "Only + - *, min, max, abs and comparisons are defined for floats; cast with .long()."


def _define(names: str, function: Callable[..., Any]) -> None:
    for name in names.split():
        FUNCTIONS[name] = function


_define("__add__ __radd__ add", _arithmetic("add", "or"))
_define("__sub__ sub subtract", _arithmetic("sub", None))
_define("__rsub__ rsub", lambda x, y: call("__sub__", (y, x), {}))
_define("__mul__ __rmul__ mul multiply", _arithmetic("mul", "and"))
_define("__floordiv__ floor_divide", _integer("floor_div", "//", _HINT_FLOAT))
_define("__rfloordiv__", lambda x, y: call("__floordiv__", (y, x), {}))
_define("__mod__ remainder", _integer("mod", "%", _HINT_FLOAT))
_define("__rmod__", lambda x, y: call("__mod__", (y, x), {}))
_define("__truediv__ __div__ __rtruediv__ __rdiv__ div divide true_divide", _divide)
_define("__divmod__", lambda x, y: (FUNCTIONS["__floordiv__"](x, y), FUNCTIONS["__mod__"](x, y)))
_define("__pow__ pow", _power)
_define("square", lambda x: _power(x, 2))
_define("__neg__ neg negative", _negate)
_define("__abs__ abs absolute", _absolute)
_define("__pos__ positive", _same)
_define("__invert__ bitwise_not", _invert)
_define("minimum", _arithmetic("min", "and"))
_define("maximum", _arithmetic("max", "or"))
_define("min", _extreme("min", "and"))
_define("max", _extreme("max", "or"))
_define("clamp clip", _clamp)
_define("clamp_min", lambda x, min: _clamp(x, min=min))
_define("clamp_max", lambda x, max: _clamp(x, max=max))
_define("__lshift__ bitwise_left_shift", _integer("shl", "<<", _HINT_FLOAT))
_define("__rlshift__", lambda x, y: call("__lshift__", (y, x), {}))
_define("__rshift__ bitwise_right_shift", _integer("shr", ">>", _HINT_FLOAT))
_define("__rrshift__", lambda x, y: call("__rshift__", (y, x), {}))
_define("__and__ __rand__ bitwise_and", _bitwise("and"))
_define("__or__ __ror__ bitwise_or", _bitwise("or"))
_define("__xor__ __rxor__ bitwise_xor", _bitwise("xor"))
_define("logical_and", _logical("and"))
_define("logical_or", _logical("or"))
_define("logical_xor", _logical("xor"))
_define("logical_not", _logical_not)
_define("__lt__ lt less", _compare("lt"))
_define("__le__ le less_equal", _compare("le"))
_define("__gt__ gt greater", _compare("lt", swap=True))
_define("__ge__ ge greater_equal", _compare("le", swap=True))
_define("__eq__ eq", _compare("eq"))
_define("__ne__ ne not_equal", _compare("ne"))
_define("where", _where)
_define("to type", _to)
_define("type_as", lambda x, y: _to(x, y.dtype))
_define("bool", _cast_to(BOOL))
_define("int long", _cast_to(INT))
_define("float", _cast_to(FLOAT))
_define("new_ones", _filled(1))
_define("new_zeros", _filled(0))
_define("new_full", _new_full)
_define("new_tensor", lambda x, value, dtype=None, **_: _new_full(x, (), value, dtype=dtype))
_define("ones_like", lambda x, *, dtype=None, **_: _constant_like(x, 1, dtype))
_define("zeros_like", lambda x, *, dtype=None, **_: _constant_like(x, 0, dtype))
_define("full_like", _full_like)
_define("clone contiguous detach cpu squeeze view reshape expand_as any all", _same)
