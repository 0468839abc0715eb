"""The base of all masks: an expression over leaves, without a shape.

A mask is an immutable value. `flatten` turns it into what the operators take: its structure as a
list of ints, its numbers and its tables in the order in which the structure consumes them.

A new mask is a module-level dataclass (`@mask_class`) over one of two bases: `LeafMask`, for a leaf
of the C++ core, or `DerivedMask`, which is replaced by an expression of other masks when a call's
shape is known.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from typing_extensions import dataclass_transform

if TYPE_CHECKING:
    from .tiles import TileMap

#: Structure, tables, numbers: see `Mask.flatten`.
Flat = tuple[list[int], list[Tensor], list[int]]

AND, OR, NOT = -1, -2, -3

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, eq_default=False)
def mask_class(cls: type[_T]) -> type[_T]:
    """Class decorator of every mask: a frozen dataclass that keeps `Mask`'s ==, hash and repr."""
    return dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)


def leaf_kind(name: str) -> int:
    """The number that stands for a leaf in a program: FNV-1a of its name, 31 bits."""
    x = 2166136261
    for byte in name.encode():
        x = ((x ^ byte) * 16777619) & 0xFFFFFFFF
    return x & 0x7FFFFFFF


class CallContext(NamedTuple):
    """What a mask is told of the call that it is used in.

    Without `cu_seqlens_q`, there are B sequences of Lq rows and Lk keys. With it (varlen), B is the
    number of sequences and Lq and Lk are the numbers of packed tokens, Tq and Tk.
    """

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    q_offset: int | Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    device: torch.device


class Mask:
    """Which (row, key) cells attention may use. Combine masks with `&`, `|` and `~`.

    A mask has no shape: lengths and positions are bound at the call, widths and tables are held by
    the mask. It is immutable, compares by content and can be pickled.
    """

    #: Whether `flatten` needs the call. PERF: to describe the call costs as much as a leaf.
    _needs_call = False

    # Tables and scalars are appended to, so that a mask of n leaves is flattened in O(n).
    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        raise NotImplementedError

    def flatten(self, ctx: CallContext | None = None) -> Flat:
        """The mask as the operators take it.

        Args:
            ctx: The call; needed by masks that depend on it (`DynamicMask`, `TokenIndexMask`).

        Returns:
            `(program, tables, scalars)`. `program` is the structure in postfix: -1 and, -2 or,
            -3 not, or a leaf's kind, the number of ints that follow and these; for most leaves one
            int per field: 0 absent, 1 a scalar, 2 a table. `scalars` and `tables` are what the
            program consumes, in order.
        """
        program: list[int] = []
        tables: list[Tensor] = []
        scalars: list[int] = []
        self._emit(program, tables, scalars, ctx)
        return program, tables, scalars

    @functools.cached_property
    def _flat(self) -> Flat:
        """flatten() of a mask that does not depend on the call. Nobody may change the lists.

        PERF: 1 us a call.
        """
        return self.flatten()

    def lower(self, ctx: CallContext) -> Mask:
        """The same mask for this call as an expression over leaves."""
        return self

    def __and__(self, other: Mask) -> Mask:
        return AndMask(self, _operand(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return OrMask(self, _operand(other, "|"))

    def __invert__(self) -> Mask:
        return NotMask(self)

    def complement(self) -> Mask:
        """`~self`, for code under torch.compile: torch 2.13 does not trace the operator `~`."""
        return NotMask(self)

    __rand__ = __and__
    __ror__ = __or__

    def __bool__(self) -> bool:
        raise TypeError(
            "a jali Mask has no truth value: write `a & b`, `a | b`, `~a` instead of `a and b`, "
            "`a or b`, `not a`, and `mask is None` to ask whether there is one"
        )

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented if not isinstance(other, Mask) else False
        return all(_same(a, b) for a, b in zip(_values(self), _values(other), strict=True))

    def __hash__(self) -> int:
        # Of structure and shapes only: no table is read, and it is the same in every process.
        return hash((leaf_kind(type(self).__name__), *map(_fingerprint, _values(self))))

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            default = field.default
            if default is dataclasses.MISSING or not _same(value, default):
                shown.append(f"{field.name}={_show(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _device(self) -> torch.device | None:
        """Where its tables are; None if it has none."""
        for value in _values(self):
            device = value._device() if isinstance(value, Mask) else getattr(value, "device", None)
            if device is not None:
                return device
        return None

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tables on `device`."""
        changes = {
            field.name: moved
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if (moved := _move(old := getattr(self, field.name), device)) is not old
        }
        return dataclasses.replace(self, **changes) if changes else self  # type: ignore[type-var]

    def dense(
        self,
        B: int,
        H: int,
        Lq: int,
        Lk: int,
        *,
        q_offset: int | Tensor | None = None,
        num_kv_heads: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Every cell of the mask: for inspection and tests, it takes B H Lq Lk bytes.

        Args:
            B, H, Lq, Lk: Sequences, query heads, rows, keys.
            q_offset: Position of row 0, an int or an int tensor [B]; None: Lk - Lq.
            num_kv_heads: Key heads, a divisor of H; None: H.
            cu_seqlens_q, cu_seqlens_k: Varlen: int [B + 1] first tokens of the sequences; Lq and
                Lk are then the longest sequences. Packed tables must end with the last sequence.

        Returns:
            bool [B, H, Lq, Lk].
        """
        from . import tiles

        return tiles.dense(self, B, H, Lq, Lk, q_offset, num_kv_heads, cu_seqlens_q, cu_seqlens_k)

    def tiles(
        self,
        B: int,
        H: int,
        Lq: int,
        Lk: int,
        tile: tuple[int, int] = (128, 128),
        *,
        q_offset: int | Tensor | None = None,
        num_kv_heads: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> TileMap:
        """Which tiles of the mask are empty, partial and full; exact.

        Args:
            tile: Rows and keys of a tile.
            B, H, Lq, Lk, q_offset, num_kv_heads, cu_seqlens_q, cu_seqlens_k: As for `dense`.

        Returns:
            A `TileMap`.
        """
        from . import tiles

        return tiles.tiles(
            self, B, H, Lq, Lk, tile, q_offset, num_kv_heads, cu_seqlens_q, cu_seqlens_k
        )

    def draw(self, *args: Any, **kwargs: Any) -> Any:
        """A picture of the mask: see `jali.draw.draw`, which this calls with the mask first."""
        from . import draw

        return draw.draw(self, *args, **kwargs)


@mask_class
class AndMask(Mask):
    """Cells that both masks allow; written `a & b`."""

    a: Mask
    b: Mask

    @property
    def _needs_call(self) -> bool:  # type: ignore[override]
        return self.a._needs_call or self.b._needs_call

    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        self.a._emit(program, tables, scalars, ctx)
        self.b._emit(program, tables, scalars, ctx)
        program.append(AND)

    def lower(self, ctx: CallContext) -> Mask:
        return AndMask(self.a.lower(ctx), self.b.lower(ctx))

    def __repr__(self) -> str:
        return f"{_nested(self.a, AndMask)} & {_nested(self.b, AndMask)}"


@mask_class
class OrMask(Mask):
    """Cells that either mask allows; written `a | b`."""

    a: Mask
    b: Mask

    @property
    def _needs_call(self) -> bool:  # type: ignore[override]
        return self.a._needs_call or self.b._needs_call

    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        self.a._emit(program, tables, scalars, ctx)
        self.b._emit(program, tables, scalars, ctx)
        program.append(OR)

    def lower(self, ctx: CallContext) -> Mask:
        return OrMask(self.a.lower(ctx), self.b.lower(ctx))

    def __repr__(self) -> str:
        return f"{_nested(self.a, OrMask)} | {_nested(self.b, OrMask)}"


@mask_class
class NotMask(Mask):
    """Cells in bounds that the mask does not allow; written `~a`."""

    a: Mask

    @property
    def _needs_call(self) -> bool:  # type: ignore[override]
        return self.a._needs_call

    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        self.a._emit(program, tables, scalars, ctx)
        program.append(NOT)

    def lower(self, ctx: CallContext) -> Mask:
        return NotMask(self.a.lower(ctx))

    def __repr__(self) -> str:
        return f"~{_nested(self.a, NotMask)}"


class LeafMask(Mask):
    """A mask that the C++ core knows as a leaf of this kind."""

    _kind: ClassVar[int]

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        """The values of the C++ leaf's fields, in the order of its `fields()`."""
        raise NotImplementedError

    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        values = self._fields()
        program.append(self._kind)
        program.append(len(values))
        for value in values:
            if value is None:
                program.append(0)
            elif isinstance(value, Tensor):
                program.append(2)
                tables.append(value)
            else:
                program.append(1)
                scalars.append(value)


class DerivedMask(Mask):
    """A mask that needs the call's shape; `lower` gives the expression that stands for it."""

    _needs_call = True

    def lower(self, ctx: CallContext) -> Mask:
        raise NotImplementedError

    def _emit(
        self,
        program: list[int],
        tables: list[Tensor],
        scalars: list[int],
        ctx: CallContext | None,
    ) -> None:
        if ctx is None:
            raise ValueError(
                f"{type(self).__name__} depends on the call's shape: pass flatten a CallContext"
            )
        self.lower(ctx)._emit(program, tables, scalars, ctx)


def all_of(masks: Iterable[Mask]) -> Mask | None:
    """The & of all masks; None if there are none."""
    result: Mask | None = None
    for mask in masks:
        result = mask if result is None else result & mask
    return result


def _operand(other: object, operator: str) -> Mask:
    if isinstance(other, Mask):
        return other
    hint = "; wrap it: jali.DenseMask(tensor)" if isinstance(other, Tensor) else ""
    raise TypeError(
        f"`{operator}` needs a jali Mask on both sides, got {type(other).__name__}{hint}"
    )


def _nested(mask: Mask, parent: type[Mask]) -> str:
    bare = isinstance(mask, (parent, NotMask)) or not isinstance(mask, (AndMask, OrMask))
    return repr(mask) if bare else f"({mask!r})"


def _values(mask: Mask) -> list[Any]:
    return [getattr(mask, field.name) for field in dataclasses.fields(mask)]  # type: ignore[arg-type]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            return False
        alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
        return a is b or (alike and torch.equal(a, b))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _fingerprint(value: Any) -> Any:
    """Something hashable that is equal for equal values and the same in every process."""
    if isinstance(value, Tensor):
        return (leaf_kind(str(value.dtype)), *value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(map(_fingerprint, value))
    if isinstance(value, str):
        return leaf_kind(value)
    if value is None:
        return 0
    if callable(value) and not isinstance(value, Mask):
        return leaf_kind(getattr(value, "__qualname__", type(value).__qualname__))
    return value


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{dtype}{list(value.shape)}{where}"
    if callable(value) and not isinstance(value, Mask):
        return getattr(value, "__qualname__", repr(value))
    return repr(value)


def _move(value: Any, device: torch.device | str) -> Any:
    if hasattr(value, "to"):  # a tensor, a mask, what a predicate was traced to
        return value.to(device)
    if isinstance(value, Sequence) and not isinstance(value, str):
        moved = [_move(x, device) for x in value]
        changed = any(m is not x for m, x in zip(moved, value, strict=True))
        return type(value)(moved) if changed else value  # type: ignore[call-arg]
    return value
