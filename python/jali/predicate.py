"""PredicateMask: a Python function of (b, h, q, k), traced once into a small program.

The function is called a single time with four symbols. What it does to them (Python operators,
torch functions, indexing of captured tensors) is recorded as a list of instructions, which the
C++ core evaluates per cell and classifies per tile by interval arithmetic. The instructions are
structure; literals become run-time scalars and captured tensors become tables, so a new window
width or a new table recompiles nothing.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._convert import IntParam, int_param
from ._mask import CallContext, Mask, leaf_kind, mask_class

# Types of values, in the order of promotion. The numbers are part of the program format.
BOOL, INT, FLOAT = 0, 1, 2
_TYPE_NAMES = ("bool", "int", "float")
_TYPE_DTYPES = (torch.bool, torch.int64, torch.float32)
_TABLE_DTYPES = {torch.bool: 0, torch.int32: 1, torch.int64: 2, torch.float32: 3}
_TABLE_TYPES = (BOOL, INT, INT, FLOAT)

# Instructions; their position is their number in src/mask/predicate/program.h.
_OPS = (
    "const b h q k load to_int to_bool to_float add sub mul floor_div mod neg abs min max "
    "shl shr and or xor not lt le eq ne where"
).split()
_OP_NUMBER = {name: number for number, name in enumerate(_OPS)}
_INPUTS = ("b", "h", "q", "k")

_MAX_RANK = 5  # of a captured tensor


class _Trace:
    """The instructions recorded so far. Equal instructions are recorded once."""

    def __init__(self) -> None:
        self.nodes: list[tuple[Any, ...]] = []  # (op, *arguments)
        self.types: list[int] = []
        self.tables: list[Tensor] = []  # as captured; kept alive, so that id() stays unique
        self._known: dict[tuple[Any, ...], int] = {}

    def emit(self, type_: int, op: str, *args: Any) -> _Value:
        # Every literal is an instruction of its own even where two are equal: whether two widths
        # happen to coincide must not change the structure.
        node = (op, *args)
        at = None if op == "const" else self._known.get(node)
        if at is None:
            at = len(self.nodes)
            self.nodes.append(node)
            self.types.append(type_)
            self._known[node] = at
        return _Value(self, at, type_)

    def constant(self, value: bool | int | float) -> _Value:
        if isinstance(value, bool):
            return self.emit(BOOL, "const", value)
        if isinstance(value, int):
            if not -(2**63) <= value < 2**63:
                raise ValueError(f"predicate: the constant {value} does not fit 64 bits.")
            return self.emit(INT, "const", value)
        return self.emit(FLOAT, "const", float(value))

    def table(self, tensor: Tensor) -> int:
        for at, known in enumerate(self.tables):
            if known is tensor:
                return at
        if tensor.dtype not in _TABLE_DTYPES and (
            tensor.dtype.is_complex or tensor.dtype == torch.float64
        ):
            raise TypeError(
                f"predicate: a captured tensor has dtype {tensor.dtype}; expected bool, an integer "
                "dtype or float32. Convert it before, e.g. `table = table.float()`."
            )
        if tensor.dim() > _MAX_RANK:
            raise ValueError(
                f"predicate: a captured tensor has {tensor.dim()} dims; at most {_MAX_RANK} are "
                "supported. Flatten some of them and compute the index."
            )
        if tensor.numel() == 0:
            raise ValueError(
                f"predicate: a captured tensor of shape {tuple(tensor.shape)} has no elements to "
                "read."
            )
        self.tables.append(tensor)
        return len(self.tables) - 1

    def lift(self, value: Any, op: str) -> _Value:
        """`value` as a traced value: numbers and 0-d tensors are constants of the program."""
        if isinstance(value, _Value):
            if value.trace is not self:
                raise RuntimeError(
                    "predicate: a value of another trace was used; b, h, q, k and what is computed "
                    "from them must not be kept between calls of the function."
                )
            return value
        if isinstance(value, _TracedTable):
            missing = sum(index is None for index in value.indices)
            raise TypeError(
                f"predicate: `{op}` got a captured tensor of shape {tuple(value.tensor.shape)} of "
                f"which {missing} dims are not indexed; index all of them, e.g. `t[b, q]`."
            )
        if isinstance(value, Tensor):
            if value.dim() != 0:
                raise TypeError(
                    f"predicate: `{op}` got a captured tensor of shape {tuple(value.shape)} as a "
                    "whole; a predicate sees one cell at a time. Index it, e.g. `t[q]`, `t[b, k]`."
                )
            at = self.table(value)
            return self.emit(_table_type(value), "load", at)
        if isinstance(value, (bool, int, float)):
            return self.constant(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy scalars
            return self.constant(value.item())
        raise TypeError(
            f"predicate: `{op}` got a {type(value).__name__}; expected a traced value, a number or "
            "a torch tensor."
        )

    def cast(self, value: _Value, type_: int) -> _Value:
        if value.type == type_:
            return value
        node = self.nodes[value.at]
        if node[0] == "const":  # a literal takes the type that its use needs
            return self.constant((bool, int, float)[type_](node[1]))
        return self.emit(type_, ("to_bool", "to_int", "to_float")[type_], value.at)


def _table_type(tensor: Tensor) -> int:
    if tensor.dtype == torch.bool:
        return BOOL
    return FLOAT if tensor.dtype.is_floating_point else INT


def _truth_error(value: _Value) -> NoReturn:
    raise TypeError(
        "predicate: the function is traced once, it does not run per cell, so Python cannot ask "
        f"whether `{value.text()}` is true. Instead of `if` and `x if c else y` write "
        "torch.where(c, x, y); of `and`, `or`, `not`: &, |, ~; of a < b < c: (a < b) & (b < c); "
        "of min() and max(): torch.minimum and torch.maximum; of `x in (…)`: (x == …) | (x == …)."
    )


def _number_error(value: _Value, what: str) -> NoReturn:
    raise TypeError(
        "predicate: the function is traced once, it does not run per cell, so "
        f"`{value.text()}` has no value yet and {what} cannot use it. Index torch tensors "
        "(`torch.tensor(values)[q]`), not lists or NumPy arrays; loops need a fixed number of "
        "rounds; instead of int() write .long()."
    )


class _Value:
    """A number or a truth value per cell, while the predicate is traced."""

    __slots__ = ("trace", "at", "type")

    def __init__(self, trace: _Trace, at: int, type_: int) -> None:
        self.trace, self.at, self.type = trace, at, type_

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.where:  # x.where(c, y)
            args = (args[1], args[0], *args[2:])
        return _call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # x.where(c, y)
            return lambda c, y: _call(name, (c, self, y), {})
        return lambda *args, **kwargs: _call(name, (self, *args), kwargs)

    def text(self) -> str:
        return _text(self.trace.nodes, self.trace.types, self.at)

    def __repr__(self) -> str:
        return f"<traced {_TYPE_NAMES[self.type]} {self.text()}>"

    dtype = property(lambda self: _TYPE_DTYPES[self.type])
    device = property(lambda self: torch.device("cpu"))
    shape = property(lambda self: torch.Size(()))
    ndim = property(lambda self: 0)

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return torch.Size(())

    # What would need the value itself.
    def __bool__(self) -> NoReturn:
        _truth_error(self)

    def __index__(self) -> NoReturn:
        _number_error(self, "an index or range()")

    def __int__(self) -> NoReturn:
        _number_error(self, "int()")

    def __float__(self) -> NoReturn:
        _number_error(self, "float()")

    def __iter__(self) -> NoReturn:
        _number_error(self, "iteration")

    def __len__(self) -> NoReturn:
        _number_error(self, "len()")

    def __round__(self, *_: Any) -> NoReturn:
        _number_error(self, "round()")

    def __floor__(self) -> NoReturn:
        _number_error(self, "math.floor()")

    def __ceil__(self) -> NoReturn:
        _number_error(self, "math.ceil()")

    def __trunc__(self) -> NoReturn:
        _number_error(self, "math.trunc()")

    def item(self) -> NoReturn:
        _number_error(self, ".item()")

    def tolist(self) -> NoReturn:
        _number_error(self, ".tolist()")

    def __getitem__(self, index: Any) -> _Value:
        if index is Ellipsis or index == ():
            return self
        raise TypeError(
            f"predicate: `{self.text()}` is one number per cell and cannot be indexed; only "
            "captured tensors can."
        )

    __hash__ = object.__hash__


def _install_operators() -> None:
    for name in ("add sub mul floordiv truediv mod pow lshift rshift and or xor matmul".split()):

        def forward(self: _Value, other: Any, _name: str = f"__{name}__") -> Any:
            return _call(_name, (self, other), {})

        def reflected(self: _Value, other: Any, _name: str = f"__{name}__") -> Any:
            return _call(_name, (other, self), {})

        setattr(_Value, f"__{name}__", forward)
        setattr(_Value, f"__r{name}__", reflected)
    for name in "lt le gt ge eq ne neg pos abs invert divmod".split():

        def method(self: _Value, *args: Any, _name: str = f"__{name}__") -> Any:
            return _call(_name, (self, *args), {})

        setattr(_Value, f"__{name}__", method)
    _Value.__rdivmod__ = lambda self, other: _call("__divmod__", (other, self), {})  # type: ignore[attr-defined]


class _TracedTable:
    """A captured tensor of which not every dim has its index yet, as in `t[b]` of `t[b][q]`."""

    def __init__(self, trace: _Trace, tensor: Tensor, indices: list[_Value | None]) -> None:
        self.trace, self.tensor, self.indices = trace, tensor, indices

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        return _index(self, index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"predicate: `.{name}` of a partly indexed tensor; index all of its dims first, or "
            "compute a table before the function."
        )

    def _whole(self, *_: Any) -> NoReturn:
        self.trace.lift(self, "an operator")
        raise AssertionError

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = _whole
    __or__ = __ror__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _whole  # type: ignore[assignment]
    __mod__ = __floordiv__ = __xor__ = __invert__ = __neg__ = __bool__ = __iter__ = _whole  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def _find_trace(args: Any) -> _Trace | None:
    for arg in args:
        if isinstance(arg, (_Value, _TracedTable)):
            return arg.trace
        if isinstance(arg, (tuple, list)):
            found = _find_trace(arg)
            if found is not None:
                return found
    return None


def _index(table: Tensor | _TracedTable, index: Any) -> Any:
    """`table[index]` where a traced value is in the table or in the index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if isinstance(table, Tensor):
        trace = _find_trace(items)
        assert trace is not None
        table = _TracedTable(trace, table, [None] * table.dim())
    trace, tensor = table.trace, table.tensor
    free = [dim for dim, known in enumerate(table.indices) if known is None]
    if Ellipsis in [item for item in items if not isinstance(item, (_Value, Tensor))]:
        at = next(n for n, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(free) - len(items) + 1)
    if len(items) > len(free):
        raise IndexError(
            f"predicate: {len(items)} indices for the {len(free)} remaining dims of a captured "
            f"tensor of shape {tuple(tensor.shape)}."
        )
    indices = list(table.indices)
    for dim, item in zip(free, items, strict=False):
        if isinstance(item, slice):
            if item != slice(None):
                raise NotImplementedError(
                    "predicate: slicing together with a traced index; slice the tensor before the "
                    "function, or add to the index, e.g. `t[q + start]`."
                )
            continue
        if item is None or isinstance(item, (list, tuple)):
            raise NotImplementedError(
                f"predicate: an index of type {type(item).__name__}; index with one traced integer "
                "or int per dim."
            )
        if isinstance(item, int) and not isinstance(item, bool) and item < 0:
            item += tensor.shape[dim]  # a literal counts from the end, as everywhere
        value = trace.lift(item, "indexing")
        if value.type != INT:
            raise TypeError(
                f"predicate: a captured tensor is indexed by `{value.text()}`, a "
                f"{_TYPE_NAMES[value.type]}; expected an integer (write .long())."
            )
        indices[dim] = value
    if any(value is None for value in indices):
        return _TracedTable(trace, tensor, indices)
    return trace.emit(
        _table_type(tensor), "load", trace.table(tensor), *(v.at for v in indices if v is not None)
    )


class _IndexMode(TorchFunctionMode):
    """Hands `tensor[traced]` to the tracer: a plain tensor would not ask its index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and _find_trace(args) is not None:
            return _index(args[0], args[1])
        return func(*args, **(kwargs or {}))


# ---- What can be recorded: one function per operation, found by the operation's name. ----


def _pair(op: str, x: Any, y: Any, least: int = BOOL) -> tuple[_Trace, _Value, _Value]:
    trace = _find_trace((x, y))
    assert trace is not None
    x, y = trace.lift(x, op), trace.lift(y, op)
    type_ = max(x.type, y.type, least)
    return trace, trace.cast(x, type_), trace.cast(y, type_)


def _arithmetic(op: str, on_bools: str | None) -> Callable[..., _Value]:
    def record(x: Any, y: Any, *, alpha: Any = 1) -> _Value:
        if alpha != 1:
            y = _call("__mul__", (y, alpha), {}) if _find_trace((y, alpha)) else y * alpha
        trace, x, y = _pair(op, x, y)
        if x.type == BOOL:
            if on_bools is None:
                raise TypeError(
                    f"predicate: `{op}` of two bools; write ^ (exclusive or) or .long() first."
                )
            return trace.emit(BOOL, on_bools, x.at, y.at)
        return trace.emit(x.type, op, x.at, y.at)

    return record


def _integer(op: str, name: str, hint: str) -> Callable[..., _Value]:
    def record(x: Any, y: Any) -> _Value:
        trace, x, y = _pair(name, x, y, INT)
        if x.type == FLOAT:
            raise NotImplementedError(f"predicate: `{name}` of floats. {hint}")
        divisor = trace.nodes[y.at]
        if op in ("floor_div", "mod") and divisor == ("const", 0):
            raise ZeroDivisionError(f"predicate: `{name}` by the constant 0.")
        return trace.emit(INT, op, x.at, y.at)

    return record


def _bitwise(op: str) -> Callable[..., _Value]:
    def record(x: Any, y: Any) -> _Value:
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


def _logical(op: str) -> Callable[..., _Value]:
    def record(x: Any, y: Any) -> _Value:
        trace = _find_trace((x, y))
        assert trace is not None
        x, y = (trace.cast(trace.lift(v, f"logical_{op}"), BOOL) for v in (x, y))
        return trace.emit(BOOL, op, x.at, y.at)

    return record


def _compare(op: str, swap: bool = False) -> Callable[..., _Value]:
    def record(x: Any, y: Any) -> _Value:
        least = BOOL if op in ("eq", "ne") else INT
        trace, x, y = _pair(op, x, y, least)
        if swap:
            x, y = y, x
        return trace.emit(BOOL, op, x.at, y.at)

    return record


def _divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> _Value:
    if rounding_mode == "floor":
        return _call("__floordiv__", (x, y), {})
    if rounding_mode is not None:
        raise NotImplementedError(
            f'predicate: division with rounding_mode="{rounding_mode}"; write x // y.'
        )
    raise NotImplementedError(
        "predicate: true division `/`; write x // y (rounded down), or compare products, e.g. "
        "x < c * y instead of x / y < c, or multiply by a float constant."
    )


def _negate(x: _Value) -> _Value:
    if x.type == BOOL:
        raise TypeError("predicate: unary minus of a bool; write ~x.")
    return x.trace.emit(x.type, "neg", x.at)


def _absolute(x: _Value) -> _Value:
    return x if x.type == BOOL else x.trace.emit(x.type, "abs", x.at)


def _invert(x: _Value) -> _Value:
    if x.type == FLOAT:
        raise TypeError(f"predicate: `~` of the float `{x.text()}`; compare it first.")
    return x.trace.emit(x.type, "not", x.at)


def _power(x: Any, y: Any) -> _Value:
    if not isinstance(x, _Value) or not isinstance(y, int) or not 1 <= y <= 4:
        raise NotImplementedError(
            "predicate: `**` with anything but a constant exponent from 1 to 4; write a product, "
            "or 1 << x for a power of two."
        )
    result = x
    for _ in range(y - 1):
        result = _call("__mul__", (result, x), {})
    return result


def _extreme(op: str, on_bools: str) -> Callable[..., _Value]:
    pair = _arithmetic(op, on_bools)

    def record(x: Any, *others: Any, **kwargs: Any) -> _Value:
        others += tuple(kwargs.values())
        if len(others) != 1 or not isinstance(others[0], (Tensor, _Value)):
            raise NotImplementedError(
                f"predicate: torch.{op} over a dimension; torch.{op}(x, y) of two values and "
                f"torch.{op}imum are supported."
            )
        return pair(x, others[0])

    return record


def _clamp(x: Any, min: Any = None, max: Any = None) -> _Value:  # noqa: A002: torch's names
    if min is not None:
        x = _call("maximum", (x, min), {})
    if max is not None:
        x = _call("minimum", (x, max), {})
    return x


def _where(condition: Any, x: Any = None, y: Any = None, **kwargs: Any) -> _Value:
    x, y = kwargs.get("input", x), kwargs.get("other", y)
    if x is None or y is None:
        raise NotImplementedError("predicate: torch.where(c); write torch.where(c, x, y).")
    trace = _find_trace((condition, x, y))
    assert trace is not None
    condition = trace.lift(condition, "where")
    if condition.type != BOOL:
        raise TypeError(
            f"predicate: the condition of torch.where is `{condition.text()}`, a "
            f"{_TYPE_NAMES[condition.type]}; expected a bool, e.g. `x != 0`."
        )
    x, y = trace.lift(x, "where"), trace.lift(y, "where")
    type_ = max(x.type, y.type)
    x, y = trace.cast(x, type_), trace.cast(y, type_)
    return trace.emit(type_, "where", condition.at, x.at, y.at)


def _cast_to(type_: int) -> Callable[..., _Value]:
    return lambda x, *_, **__: x.trace.cast(x, type_)


def _to(x: _Value, *args: Any, **kwargs: Any) -> _Value:
    dtype = kwargs.get("dtype")
    for arg in args:
        if isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, (Tensor, _Value)):
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


def _filled(value: Any) -> Callable[..., _Value]:
    def record(x: _Value, *args: Any, dtype: Any = None, **kwargs: Any) -> _Value:
        _require_scalar_shape(kwargs.get("size", args))
        return _constant_like(x, value, dtype)

    return record


def _constant_like(x: _Value, value: Any, dtype: Any) -> _Value:
    if (dtype or x.dtype) == torch.bool and value in (0, 1):
        return x.trace.emit(BOOL, "const", _TRUE if value else _FALSE)
    return _to(x.trace.lift(value, "a new tensor"), dtype or x.dtype)


def _full_like(x: _Value, fill_value: Any, *, dtype: Any = None, **_: Any) -> _Value:
    return _to(x.trace.lift(fill_value, "full_like"), dtype or x.dtype)


def _new_full(x: _Value, size: Any, fill_value: Any, *, dtype: Any = None, **_: Any) -> _Value:
    _require_scalar_shape(size)
    return _full_like(x, fill_value, dtype=dtype)


def _logical_not(x: _Value) -> _Value:
    return _invert(x.trace.cast(x, BOOL))


def _same(x: _Value, *_: Any, **__: Any) -> _Value:
    return x


_HINT_FLOAT = "Only + - *, min, max, abs and comparisons are defined for floats; cast with .long()."
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def _define(names: str, function: Callable[..., Any]) -> None:
    for name in names.split():
        _FUNCTIONS[name] = function


_define("__add__ __radd__ add", _arithmetic("add", "or"))
_define("__sub__ sub subtract", _arithmetic("sub", None))
_define("__rsub__ rsub", lambda x, y: _call("__sub__", (y, x), {}))
_define("__mul__ __rmul__ mul multiply", _arithmetic("mul", "and"))
_define("__floordiv__ floor_divide", _integer("floor_div", "//", _HINT_FLOAT))
_define("__rfloordiv__", lambda x, y: _call("__floordiv__", (y, x), {}))
_define("__mod__ remainder", _integer("mod", "%", _HINT_FLOAT))
_define("__rmod__", lambda x, y: _call("__mod__", (y, x), {}))
_define("__truediv__ __div__ __rtruediv__ __rdiv__ div divide true_divide", _divide)
_define("__divmod__", lambda x, y: (_FUNCTIONS["__floordiv__"](x, y), _FUNCTIONS["__mod__"](x, y)))
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
_define("clamp_min", lambda x, min: _clamp(x, min=min))  # noqa: A006
_define("clamp_max", lambda x, max: _clamp(x, max=max))  # noqa: A006
_define("__lshift__ bitwise_left_shift", _integer("shl", "<<", _HINT_FLOAT))
_define("__rlshift__", lambda x, y: _call("__lshift__", (y, x), {}))
_define("__rshift__ bitwise_right_shift", _integer("shr", ">>", _HINT_FLOAT))
_define("__rrshift__", lambda x, y: _call("__rshift__", (y, x), {}))
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


def _call(name: str, args: Any, kwargs: Any) -> Any:
    function = _FUNCTIONS.get(name)
    if name == "__getitem__":
        return _index(*args)
    if function is None:
        raise NotImplementedError(
            f"predicate: the operation `{name.strip('_')}` cannot be traced. Supported: + - * // % "
            "** abs minimum maximum clamp where, comparisons, & | ^ ~ << >> logical_*, casts, and "
            "indexing of captured tensors; compute anything else into a tensor before the function "
            "and index it."
        )
    kwargs = dict(kwargs)
    if "input" in kwargs and function is not _where:  # torch.abs(input=x)
        args = (kwargs.pop("input"), *args)
    if "other" in kwargs and function is not _where:
        args = (*args, kwargs.pop("other"))
    kwargs.pop("out", None) if kwargs.get("out", 0) is None else None
    if args and not isinstance(args[0], _Value) and (trace := _find_trace(args)) is not None:
        args = (trace.lift(args[0], name.strip("_")), *args[1:])  # 3 - x, torch.add(tensor, x)
    return function(*args, **kwargs)


_install_operators()


# ---- The traced function. ----


@dataclasses.dataclass(frozen=True, eq=False)
class Expression:
    """A traced predicate: instructions, the literals they use, the tensors they read.

    `program` is the structure: the number of tables, per table its dtype and rank, then the
    instructions in order, each its number followed by its operands (indices of earlier
    instructions; a literal has its type, a load its table first). The last one is the result.
    `scalars` holds the literals in order (floats as the bits of a double).
    """

    program: tuple[int, ...]
    scalars: tuple[int, ...]
    tables: tuple[Tensor, ...]

    @staticmethod
    def trace(fn: Callable[..., Any]) -> Expression:
        """Calls `fn(b, h, q, k)` once with symbols. Raises what the tracer raises."""
        if not callable(fn):
            raise TypeError(
                f"PredicateMask: fn is a {type(fn).__name__}; expected a function of (b, h, q, k) "
                "that returns a bool."
            )
        trace = _Trace()
        with _IndexMode():
            result = fn(*(trace.emit(INT, name) for name in _INPUTS))
        if not isinstance(result, (_Value, _TracedTable, Tensor, bool)) and not hasattr(
            result, "item"
        ):
            raise TypeError(
                f"PredicateMask: the function returned a {type(result).__name__}; expected a bool, "
                "e.g. a comparison."
            )
        value = trace.lift(result, "return")
        if value.type != BOOL:
            raise TypeError(
                f"PredicateMask: the function returned `{value.text()}`, a "
                f"{_TYPE_NAMES[value.type]}; expected a bool, e.g. `x != 0`."
            )
        return _assemble(trace, value.at)

    def __str__(self) -> str:
        return _describe(self)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Expression):
            return NotImplemented
        return (
            self.program == other.program
            and self.scalars == other.scalars
            and all(map(_same_tensor, self.tables, other.tables))
        )

    def __hash__(self) -> int:
        shapes = tuple((tuple(t.shape), t.dtype) for t in self.tables)
        return hash((self.program, self.scalars, shapes))

    def to(self, device: Any) -> Expression:
        return dataclasses.replace(self, tables=tuple(t.to(device) for t in self.tables))


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _table_dtype(tensor: Tensor) -> torch.dtype:
    if tensor.dtype in _TABLE_DTYPES:
        return tensor.dtype
    return torch.float32 if tensor.dtype.is_floating_point else torch.int32 if (
        tensor.dtype in (torch.int8, torch.uint8, torch.int16)
    ) else torch.int64


def _assemble(trace: _Trace, result: int) -> Expression:
    """The instructions that the result needs, renumbered."""
    needed = [False] * len(trace.nodes)
    needed[result] = True
    for at in range(result, -1, -1):
        if needed[at]:
            for arg in _operands(trace.nodes[at]):
                needed[arg] = True
    number: dict[int, int] = {}
    tables: dict[int, int] = {}
    code: list[int] = []
    scalars: list[int] = []
    for at in range(result + 1):
        if not needed[at]:
            continue
        node = trace.nodes[at]
        number[at] = len(number)
        code.append(_OP_NUMBER[node[0]])
        if node[0] == "const":
            code.append(trace.types[at])
            scalars.append(_scalar_bits(node[1], trace.types[at]))
        elif node[0] == "load":
            code.append(tables.setdefault(node[1], len(tables)))
        code.extend(number[arg] for arg in _operands(node))
    used = [trace.tables[at] for at in tables]
    used = [t.detach().to(_table_dtype(t)) for t in used]
    header = [len(used)]
    for tensor in used:
        header += [_TABLE_DTYPES[tensor.dtype], tensor.dim()]
    return Expression((*header, *code), tuple(scalars), tuple(used))


def _operands(node: tuple[Any, ...]) -> tuple[int, ...]:
    if node[0] == "const":
        return ()
    return node[2:] if node[0] == "load" else node[1:]


def _scalar_bits(value: Any, type_: int) -> int:
    if type_ == FLOAT:
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)


# ---- Text, for repr and error messages. ----

# Operation: its format and how tightly it binds (Python's order), for as few brackets as possible.
_FORMATS = {
    "add": ("{0} + {1}", 9),
    "sub": ("{0} - {1}", 9),
    "mul": ("{0} * {1}", 10),
    "floor_div": ("{0} // {1}", 10),
    "mod": ("{0} % {1}", 10),
    "neg": ("-{0}", 11),
    "not": ("~{0}", 11),
    "shl": ("{0} << {1}", 8),
    "shr": ("{0} >> {1}", 8),
    "and": ("{0} & {1}", 7),
    "xor": ("{0} ^ {1}", 6),
    "or": ("{0} | {1}", 5),
    "lt": ("{0} < {1}", 4),
    "le": ("{0} <= {1}", 4),
    "eq": ("{0} == {1}", 4),
    "ne": ("{0} != {1}", 4),
    "abs": ("abs({0})", 0),
    "min": ("minimum({0}, {1})", 0),
    "max": ("maximum({0}, {1})", 0),
    "where": ("where({0}, {1}, {2})", 0),
    "to_int": ("int({0})", 0),
    "to_bool": ("bool({0})", 0),
    "to_float": ("float({0})", 0),
}
_ASSOCIATIVE = {"add", "mul", "and", "or", "xor"}
_TIGHT = 20


def _text(nodes: list[tuple[Any, ...]], types: list[int], at: int, max_length: int = 400) -> str:
    memo: dict[int, tuple[str, int]] = {}

    def part(n: int) -> tuple[str, int]:
        if n not in memo:
            memo[n] = build(n)
        return memo[n]

    def build(n: int) -> tuple[str, int]:
        node = nodes[n]
        if node[0] == "const":
            value = bool(node[1]) if types[n] == BOOL else node[1]
            return repr(value), _TIGHT if types[n] == BOOL or node[1] >= 0 else 11
        if node[0] in _INPUTS:
            return node[0], _TIGHT
        if node[0] == "load":
            index = ", ".join(part(arg)[0] for arg in node[2:])
            return (f"t{node[1]}[{index}]" if index else f"t{node[1]}"), _TIGHT
        pattern, tight = _FORMATS[node[0]]
        texts = []
        for place, arg in enumerate(node[1:]):
            text, inner = part(arg)
            needed = tight + (place > 0 or tight == 4)  # left-associative; comparisons do not chain
            if nodes[arg][0] == node[0] and node[0] in _ASSOCIATIVE:
                needed = tight
            texts.append(f"({text})" if tight and inner < needed else text)
        text = pattern.format(*texts)
        if len(text) > max_length:
            text = text[: max_length // 2] + " … " + text[-max_length // 2 :]
        return text, tight or _TIGHT

    for n in range(at):  # in order, so that a long program does not recurse deeply
        part(n)
    return part(at)[0]


def _decode(expression: Expression) -> tuple[list[tuple[Any, ...]], list[int]]:
    """The nodes and types that `_assemble` wrote."""
    code = expression.program
    num_tables = code[0]
    ranks = [code[2 + 2 * n] for n in range(num_tables)]
    kinds = [_TABLE_TYPES[code[1 + 2 * n]] for n in range(num_tables)]
    nodes: list[tuple[Any, ...]] = []
    types: list[int] = []
    scalars = iter(expression.scalars)
    at = 1 + 2 * num_tables
    arity = {op: fmt.count("{") for op, (fmt, _) in _FORMATS.items()}
    while at < len(code):
        op = _OPS[code[at]]
        if op == "const":
            type_, bits = code[at + 1], next(scalars)
            value = struct.unpack("<d", struct.pack("<q", bits))[0] if type_ == FLOAT else bits
            nodes.append((op, value))
            types.append(type_)
            at += 2
            continue
        count = 1 + ranks[code[at + 1]] if op == "load" else arity.get(op, 0)
        nodes.append((op, *code[at + 1 : at + 1 + count]))
        if op == "load":
            types.append(kinds[code[at + 1]])
        elif op in ("lt", "le", "eq", "ne", "to_bool"):
            types.append(BOOL)
        elif op == "to_float":
            types.append(FLOAT)
        elif op in _INPUTS or op == "to_int":
            types.append(INT)
        else:
            types.append(types[code[at + count]])  # that of the last operand
        at += 1 + count
    return nodes, types


def _describe(expression: Expression) -> str:
    nodes, types = _decode(expression)
    text = "lambda b, h, q, k: " + _text(nodes, types, len(nodes) - 1)
    for n, tensor in enumerate(expression.tables):
        dtype = str(tensor.dtype).removeprefix("torch.")
        text += f", t{n}={dtype}{list(tensor.shape)}"
    return text


@mask_class
class PredicateMask(Mask):
    """Cell (i, j) is visible when `fn(b, h, i + offset, j)` is true.

    `fn` gets the sequence b, the query head h, the row i (+ offset) and the key j, and returns a
    bool. FlexAttention's mask_mods (and `and_masks`, `or_masks` of them) run unchanged::

        def document_causal(b, h, q, k):
            return (document[b, q] == document[b, k]) & (k <= q)

        mask = PredicateMask(document_causal)

    It is traced once, when the mask is made: the function is called with symbols, and what it
    computes becomes a small program whose literals and captured tensors are run-time arguments.
    Supported: ``+ - * // %``, unary minus, ``abs``, ``**`` with a small constant exponent,
    ``torch.minimum``, ``maximum``, ``clamp``, ``where``, comparisons, ``& | ^ ~``,
    ``torch.logical_*``, shifts, casts between int, bool and float, and indexing of captured bool,
    integer and float32 tensors. Values mean what they mean in torch, with these additions:

    - integers are exact in 64 bits (they wrap beyond);
    - ``//`` and ``%`` round down, as in Python; by zero both give 0;
    - ``x << n`` is 0 and ``x >> n`` the sign (0 or -1) where n is not in 0..63;
    - a computed index is clamped to the tensor: below 0 reads the first, beyond the end the last
      element (only a literal index counts from the end when it is negative);
    - floats are computed in float32; a float cast to int is cut, limited to 64 bits, NaN is 0.

    offset: int, int tensor [B], or None for the call's q_offset (then `fn` gets positions).
    Tables are read at the function's own indices, also in varlen (b = sequence, i and j count
    from 0 in it). They are read when the mask is used: a change in place is seen (unless the
    dtype had to be converted).

    Raises TypeError or NotImplementedError, naming the operation and the way to write it, for
    what cannot be traced: Python's `if`, `and`, `or`, `not` on traced values, loops that depend on
    them, `/`, whole tensors.
    """

    fn: Any  # a function, held as its Expression
    offset: IntParam = 0

    def __post_init__(self) -> None:
        if not isinstance(self.fn, Expression):
            object.__setattr__(self, "fn", Expression.trace(self.fn))
        object.__setattr__(self, "offset", int_param(self.offset, "PredicateMask", "offset"))

    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        program.extend((_KIND, 1 + len(self.fn.program)))
        if self.offset is None:
            program.append(0)
        elif isinstance(self.offset, Tensor):
            program.append(2)
            tables.append(self.offset)
        else:
            program.append(1)
            scalars.append(self.offset)
        program.extend(self.fn.program)
        scalars.extend(self.fn.scalars)
        tables.extend(self.fn.tables)


_KIND = leaf_kind("predicate")
