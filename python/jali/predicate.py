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
from typing import Any

import torch
from torch import Tensor

from . import _trace_ops  # noqa: F401
from ._convert import IntParam, int_param
from ._mask import CallContext, Mask, leaf_kind, mask_class
from ._program import (
    BOOL,
    FLOAT,
    INPUTS,
    INT,
    OP_NUMBER,
    TABLE_DTYPES,
    TYPE_NAMES,
    Node,
    decode,
    text_of,
)
from ._trace import IndexMode, Trace, TracedTable, Value


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

    @property
    def device(self) -> torch.device | None:
        """Of the tables; None: there are none."""
        return self.tables[0].device if self.tables else None

    @staticmethod
    def trace(fn: Callable[..., Any]) -> Expression:
        """Calls `fn(b, h, q, k)` once with symbols. Raises what the tracer raises."""
        if not callable(fn):
            raise TypeError(
                f"PredicateMask: fn is a {type(fn).__name__}; expected a function of (b, h, q, k) "
                "that returns a bool."
            )
        trace = Trace()
        with IndexMode():
            result = fn(*(trace.emit(INT, name) for name in INPUTS))
        if not isinstance(result, (Value, TracedTable, Tensor, bool)) and not hasattr(
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
                f"{TYPE_NAMES[value.type]}; expected a bool, e.g. `x != 0`."
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
    if tensor.dtype in TABLE_DTYPES:
        return tensor.dtype
    return (
        torch.float32
        if tensor.dtype.is_floating_point
        else torch.int32
        if (tensor.dtype in (torch.int8, torch.uint8, torch.int16))
        else torch.int64
    )


def _assemble(trace: Trace, result: int) -> Expression:
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
        code.append(OP_NUMBER[node[0]])
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
        header += [TABLE_DTYPES[tensor.dtype], tensor.dim()]
    return Expression((*header, *code), tuple(scalars), tuple(used))


def _operands(node: Node) -> tuple[int, ...]:
    if node[0] == "const":
        return ()
    return node[2:] if node[0] == "load" else node[1:]


def _scalar_bits(value: Any, type_: int) -> int:
    if type_ == FLOAT:
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return value if isinstance(value, torch.SymInt) else int(value)


def _describe(expression: Expression) -> str:
    nodes, types = decode(expression.program, expression.scalars)
    text = "lambda b, h, q, k: " + text_of(nodes, types, len(nodes) - 1)
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

    In a function under torch.compile, take the mask as an argument: new literals, widths and tables
    then recompile nothing. Made inside of it, the mask may use ints that never change; Dynamo
    cannot compare a traced value with a changing one.

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
