"""What a predicate's function sees while it is traced: symbols that record what is done to them.

Operations are found by name in `FUNCTIONS`, which `_trace_ops` fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ._program import BOOL, FLOAT, INT, TABLE_DTYPES, TYPE_DTYPES, TYPE_NAMES, Node, text_of

_MAX_RANK = 5  # of a captured tensor

#: What can be recorded, by its torch name; `_trace_ops` fills it.
FUNCTIONS: dict[str, Callable[..., Any]] = {}


class Trace:
    """The instructions recorded so far. Equal instructions are recorded once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []  # (op, *arguments)
        self.types: list[int] = []
        self.tables: list[Tensor] = []  # as captured; kept alive, so that id() stays unique
        self._known: dict[Node, int] = {}

    def emit(self, type_: int, op: str, *args: Any) -> Value:
        # Every literal is an instruction of its own even where two are equal: whether two widths
        # happen to coincide must not change the structure.
        node = (op, *args)
        at = None if op == "const" else self._known.get(node)
        if at is None:
            at = len(self.nodes)
            self.nodes.append(node)
            self.types.append(type_)
            if op != "const":
                self._known[node] = at
        return Value(self, at, type_)

    def constant(self, value: bool | int | float) -> Value:
        if isinstance(value, torch.SymInt):  # a size, under torch.export
            return self.emit(INT, "const", value)
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
        if tensor.dtype not in TABLE_DTYPES and (
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

    def lift(self, value: Any, op: str) -> Value:
        """`value` as a traced value: numbers and 0-d tensors are constants of the program."""
        if isinstance(value, Value):
            if value.trace is not self:
                raise RuntimeError(
                    "predicate: a value of another trace was used; b, h, q, k and what is computed "
                    "from them must not be kept between calls of the function."
                )
            return value
        if isinstance(value, TracedTable):
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
            return self.emit(table_type(value), "load", at)
        if isinstance(value, (bool, int, float, torch.SymInt)):
            return self.constant(value)
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy scalars
            return self.constant(value.item())
        raise TypeError(
            f"predicate: `{op}` got a {type(value).__name__}; expected a traced value, a number or "
            "a torch tensor."
        )

    def cast(self, value: Value, type_: int) -> Value:
        if value.type == type_:
            return value
        node = self.nodes[value.at]
        if node[0] == "const":  # a literal takes the type that its use needs
            return self.constant((bool, int, float)[type_](node[1]))
        return self.emit(type_, ("to_bool", "to_int", "to_float")[type_], value.at)


def table_type(tensor: Tensor) -> int:
    if tensor.dtype == torch.bool:
        return BOOL
    return FLOAT if tensor.dtype.is_floating_point else INT


def _truth_error(value: Value) -> NoReturn:
    raise TypeError(
        "predicate: the function is traced once, it does not run per cell, so Python cannot ask "
        f"whether `{value.text()}` is true. Instead of `if` and `x if c else y` write "
        "torch.where(c, x, y); of `and`, `or`, `not`: &, |, ~; of a < b < c: (a < b) & (b < c); "
        "of min() and max(): torch.minimum and torch.maximum; of `x in (…)`: (x == …) | (x == …)."
    )


def _number_error(value: Value, what: str) -> NoReturn:
    raise TypeError(
        "predicate: the function is traced once, it does not run per cell, so "
        f"`{value.text()}` has no value yet and {what} cannot use it. Index torch tensors "
        "(`torch.tensor(values)[q]`), not lists or NumPy arrays; loops need a fixed number of "
        "rounds; instead of int() write .long()."
    )


class Value:
    """A number or a truth value per cell, while the predicate is traced."""

    __slots__ = ("at", "trace", "type")

    def __init__(self, trace: Trace, at: int, type_: int) -> None:
        self.trace, self.at, self.type = trace, at, type_

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.where:  # x.where(c, y)
            args = (args[1], args[0], *args[2:])
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # x.where(c, y)
            return lambda c, y: call(name, (c, self, y), {})
        return lambda *args, **kwargs: call(name, (self, *args), kwargs)

    def text(self) -> str:
        return text_of(self.trace.nodes, self.trace.types, self.at)

    def __repr__(self) -> str:
        return f"<traced {TYPE_NAMES[self.type]} {self.text()}>"

    dtype = property(lambda self: TYPE_DTYPES[self.type])
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

    def __getitem__(self, index: Any) -> Value:
        if index is Ellipsis or index == ():
            return self
        raise TypeError(
            f"predicate: `{self.text()}` is one number per cell and cannot be indexed; only "
            "captured tensors can."
        )

    __hash__ = object.__hash__


_BINARY = "add sub mul floordiv truediv mod pow lshift rshift and or xor matmul"
_ONE_SIDED = "lt le gt ge eq ne neg pos abs invert divmod"


def _install_operators() -> None:
    for name in _BINARY.split():

        def forward(self: Value, other: Any, _name: str = f"__{name}__") -> Any:
            return call(_name, (self, other), {})

        def reflected(self: Value, other: Any, _name: str = f"__{name}__") -> Any:
            return call(_name, (other, self), {})

        setattr(Value, f"__{name}__", forward)
        setattr(Value, f"__r{name}__", reflected)
    for name in _ONE_SIDED.split():

        def method(self: Value, *args: Any, _name: str = f"__{name}__") -> Any:
            return call(_name, (self, *args), {})

        setattr(Value, f"__{name}__", method)
    Value.__rdivmod__ = lambda self, other: call("__divmod__", (other, self), {})  # type: ignore[attr-defined]


class TracedTable:
    """A captured tensor of which not every dim has its index yet, as in `t[b]` of `t[b][q]`."""

    def __init__(self, trace: Trace, tensor: Tensor, indices: list[Value | None]) -> None:
        self.trace, self.tensor, self.indices = trace, tensor, indices

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(getattr(func, "__name__", str(func)), args, kwargs or {})

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
    __or__ = __ror__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _whole
    __mod__ = __floordiv__ = __xor__ = __invert__ = __neg__ = __bool__ = __iter__ = _whole
    __hash__ = None  # type: ignore[assignment]


def find_trace(args: Any) -> Trace | None:
    for arg in args:
        if isinstance(arg, (Value, TracedTable)):
            return arg.trace
        if isinstance(arg, (tuple, list)):
            found = find_trace(arg)
            if found is not None:
                return found
    return None


def _index(table: Tensor | TracedTable, index: Any) -> Any:
    """`table[index]` where a traced value is in the table or in the index."""
    items = list(index) if isinstance(index, tuple) else [index]
    if isinstance(table, Tensor):
        trace = find_trace(items)
        assert trace is not None
        table = TracedTable(trace, table, [None] * table.dim())
    trace, tensor = table.trace, table.tensor
    free = [dim for dim, known in enumerate(table.indices) if known is None]
    if Ellipsis in [item for item in items if not isinstance(item, (Value, Tensor))]:
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
                f"{TYPE_NAMES[value.type]}; expected an integer (write .long())."
            )
        indices[dim] = value
    if any(value is None for value in indices):
        return TracedTable(trace, tensor, indices)
    return trace.emit(
        table_type(tensor), "load", trace.table(tensor), *(v.at for v in indices if v is not None)
    )


class IndexMode(TorchFunctionMode):
    """Hands `tensor[traced]` to the tracer: a plain tensor would not ask its index."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and find_trace(args) is not None:
            return _index(args[0], args[1])
        return func(*args, **(kwargs or {}))


def call(name: str, args: Any, kwargs: Any) -> Any:
    """Records the operation of this torch name, or says that it cannot be traced."""
    function = FUNCTIONS.get(name)
    if name in ("__getitem__", "getitem"):
        return _index(*args)
    if function is None:
        raise NotImplementedError(
            f"predicate: the operation `{name.strip('_')}` cannot be traced. Supported: + - * // % "
            "** abs minimum maximum clamp where, comparisons, & | ^ ~ << >> logical_*, casts, and "
            "indexing of captured tensors; compute anything else into a tensor before the function "
            "and index it."
        )
    kwargs = dict(kwargs)
    if "input" in kwargs and name != "where":  # torch.abs(input=x)
        args = (kwargs.pop("input"), *args)
    if "other" in kwargs and name != "where":
        args = (*args, kwargs.pop("other"))
    kwargs.pop("out", None) if kwargs.get("out", 0) is None else None
    if args and not isinstance(args[0], Value) and (trace := find_trace(args)) is not None:
        args = (trace.lift(args[0], name.strip("_")), *args[1:])  # 3 - x, torch.add(tensor, x)
    return function(*args, **kwargs)


_install_operators()
