"""Masks made of positions: no table of tokens, nothing that grows with the lengths."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ._convert import IntParam, int_param, one_int
from ._mask import LeafMask, leaf_kind, mask_class


@mask_class
class CausalMask(LeafMask):
    """A row sees the keys at or before its own position: j <= p.

    Args:
        offset: Position of row 0 (p = i + offset): an int or an int tensor [B]. None: the call's
            q_offset, by default Lk - Lq (the last row stands at the last key). 0: top-left.

    Example:
        >>> jali.CausalMask().dense(1, 1, 2, 4)[0, 0].int()
        tensor([[1, 1, 1, 0],
                [1, 1, 1, 1]], dtype=torch.int32)
    """

    offset: IntParam = None
    _kind: ClassVar[int] = leaf_kind("causal")

    def __post_init__(self) -> None:
        _convert(self, "offset")

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.offset,)


@mask_class
class WindowMask(LeafMask):
    """A row sees the keys around its own position, both ends included: p - left <= j <= p + right.

    Args:
        left: Keys before the position, an int or an int tensor [H] (one per head, H is 1, Hkv or
            Hq). None: unlimited.
        right: The same after the position.
        offset: Position of row 0, an int or an int tensor [B]; None: the call's q_offset.

    Note that left = n shows n + 1 keys; for "the last n keys" write `WindowMask.last(n)`.

    Example:
        >>> jali.WindowMask(1, 0).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1]], dtype=torch.int32)
    """

    left: IntParam
    right: IntParam
    offset: IntParam = None
    _kind: ClassVar[int] = leaf_kind("window")

    def __post_init__(self) -> None:
        _convert(self, "left")
        _convert(self, "right")
        _convert(self, "offset")

    @staticmethod
    def last(n: IntParam, offset: IntParam = None) -> WindowMask:
        """The last n keys up to and with the row's own position: p - n < j <= p.

        Args:
            n: Number of keys, an int or an int tensor [H].
            offset: As for `WindowMask`.
        """
        keys = int_param(n, "WindowMask.last", "n", optional=False)
        assert keys is not None
        return WindowMask(keys - 1, 0, offset)

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.left, self.right, self.offset)


@mask_class
class PrefixMask(LeafMask):
    """Every row sees the first keys of its sequence: j < length.

    Serves prefix-LM (`PrefixMask(n) | CausalMask()`), attention sinks
    (`WindowMask.last(256) & CausalMask() | PrefixMask(4) & CausalMask()`) and key lengths.

    Args:
        length: Number of keys, an int or an int tensor [B].

    Example:
        >>> jali.PrefixMask(2).dense(1, 1, 1, 4)[0, 0].int()
        tensor([[1, 1, 0, 0]], dtype=torch.int32)
    """

    length: IntParam
    _kind: ClassVar[int] = leaf_kind("prefix")

    def __post_init__(self) -> None:
        _convert(self, "length", optional=False)

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.length,)


@mask_class
class DilatedMask(LeafMask):
    """A row sees every step-th key, counted from its own position: (p - j) mod step == 0.

    Args:
        step: At least 1.
        offset: Position of row 0, an int or an int tensor [B]; None: the call's q_offset.

    Example:
        >>> jali.DilatedMask(2).dense(1, 1, 2, 4)[0, 0].int()
        tensor([[1, 0, 1, 0],
                [0, 1, 0, 1]], dtype=torch.int32)
    """

    step: int
    offset: IntParam = None
    _kind: ClassVar[int] = leaf_kind("dilated")

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", one_int(self.step, "DilatedMask", "step", least=1))
        _convert(self, "offset")

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.step, self.offset)


@mask_class
class NeighborhoodMask(LeafMask):
    """A row sees its neighbourhood on a grid of 1, 2 or 3 dims, as NATTEN defines it.

    Rows and keys are the cells of a grid in row-major order. Per dim of n cells, a row at x sees
    the `kernel` cells of x's residue class mod `dilation` that are nearest to x; near an edge the
    neighbourhood moves inwards and keeps its size. A causal dim shows the `kernel` cells up to x
    instead (fewer near its start). A key is visible if it is so in every dim. Cells behind the
    grid (i or j >= its volume) see and are seen by nothing.

    Args:
        shape: Size of the grid: an int or a tuple of 1 to 3.
        kernel: Size of the neighbourhood per dim; kernel * dilation <= shape.
        dilation: Step per dim.
        causal: Per dim, whether only cells up to the own one are seen.
            kernel, dilation and causal may be one value for all dims.

    Example:
        >>> jali.NeighborhoodMask(5, 3).dense(1, 1, 5, 5)[0, 0].int()
        tensor([[1, 1, 1, 0, 0],
                [1, 1, 1, 0, 0],
                [0, 1, 1, 1, 0],
                [0, 0, 1, 1, 1],
                [0, 0, 1, 1, 1]], dtype=torch.int32)
    """

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    dilation: tuple[int, ...] = (1,)
    causal: tuple[bool, ...] = (False,)
    _kind: ClassVar[int] = leaf_kind("neighborhood")

    def __init__(
        self,
        shape: int | tuple[int, ...],
        kernel: int | tuple[int, ...],
        dilation: int | tuple[int, ...] = 1,
        causal: bool | tuple[bool, ...] = False,
    ) -> None:
        owner = "NeighborhoodMask"
        grid = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"{owner}: shape must have 1 to 3 dims, got {len(grid)}")
        dims = len(grid)
        values: tuple[tuple[str, Any, int], ...] = (
            ("shape", grid, 1),
            ("kernel", kernel, 1),
            ("dilation", dilation, 1),
            ("causal", causal, 0),
        )
        for name, value, least in values:
            per_dim = tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims
            if len(per_dim) != dims:
                raise ValueError(
                    f"{owner}: {name} must be one value or {dims} (one per dim of shape), "
                    f"got {len(per_dim)}"
                )
            if name == "causal":
                per_dim = tuple(bool(x) for x in per_dim)
            else:
                per_dim = tuple(one_int(x, owner, name, least=least) for x in per_dim)
            object.__setattr__(self, name, per_dim)
        for size, cells, step in zip(self.shape, self.kernel, self.dilation, strict=True):
            if cells * step > size:
                raise ValueError(
                    f"{owner}: kernel * dilation must not exceed shape in any dim, got "
                    f"{cells} * {step} > {size}; make the kernel or the dilation smaller"
                )

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        ones, zeros = (1,) * (3 - len(self.shape)), (0,) * (3 - len(self.shape))
        causal = tuple(int(x) for x in self.causal)
        return (*ones, *self.shape, *ones, *self.kernel, *ones, *self.dilation, *zeros, *causal)


def _convert(mask: LeafMask, name: str, *, optional: bool = True) -> None:
    value = getattr(mask, name)
    converted = int_param(value, type(mask).__name__, name, optional=optional)
    if converted is not value:
        object.__setattr__(mask, name, converted)
