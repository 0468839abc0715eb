"""Conversion of a mask's parameters: whatever the user has to what the core takes.

Numbers stay Python ints (symbolic ones too), tables become int32 or bool tensors. Values are looked
at only where that costs no synchronisation: real tensors on the CPU.
"""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int16, torch.int8, torch.uint8)
_LIMIT = 2**31 - 1

#: A number, a tensor of numbers (or what torch.as_tensor takes), or nothing.
IntParam: TypeAlias = int | Tensor | None


def readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be looked at cheaply: real, on the CPU, not being traced."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
    )


def int_param(value: Any, owner: str, name: str, *, optional: bool = True) -> IntParam:
    """A number or a 1-D int32 tensor (one number per sequence or head)."""
    if value is None and optional:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return in_64_bits(value, owner, name)
    if isinstance(value, torch.SymInt):
        return value
    if isinstance(value, Tensor):
        return int_table(value.reshape(1) if value.dim() == 0 else value, owner, name, 1)
    if isinstance(value, (list, tuple)):
        return int_table(value, owner, name, 1)
    if getattr(value, "ndim", 0):  # a NumPy array
        return int_table(value, owner, name, 1)
    if hasattr(value, "__index__") and not isinstance(value, bool):
        return operator.index(value)
    none = " or None" if optional else ""
    raise TypeError(
        f"{owner}: {name} must be an int or a 1-D int tensor{none}, got {type(value).__name__}"
    )


def in_64_bits(number: int, owner: str, name: str) -> int:
    """The number, which the core must be able to take."""
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{owner}: {name} must fit in 64 bits, got {number}")
    return number


def one_int(value: Any, owner: str, name: str, *, least: int | None = None) -> int:
    """One number, not a tensor of them."""
    if isinstance(value, bool) or not (
        isinstance(value, (int, torch.SymInt)) or hasattr(value, "__index__")
    ):
        raise TypeError(f"{owner}: {name} must be an int, got {type(value).__name__}")
    number = value if isinstance(value, (int, torch.SymInt)) else operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{owner}: {name} must be at least {least}")
    return number


def int_table(value: Any, owner: str, name: str, max_rank: int, min_rank: int = 1) -> Tensor:
    """An int32 tensor of min_rank to max_rank dims."""
    table = _tensor(value, owner, name)
    if table.dtype != torch.int32:
        if table.dtype not in _INTEGERS:
            raise TypeError(
                f"{owner}: {name} must hold integers (int32), got {table.dtype}; "
                "convert it with .to(torch.int32)"
            )
        if table.dtype == torch.int64 and readable(table) and table.numel():
            low, high = (int(x) for x in torch.aminmax(table))
            if low < -_LIMIT or high > _LIMIT:
                raise ValueError(
                    f"{owner}: {name} must fit in 32 bits, but its values reach from {low} to "
                    f"{high}; clamp them to ±{_LIMIT} (no length is beyond that)"
                )
        table = table.to(torch.int32)
    _check_rank(table, owner, name, max_rank, min_rank)
    return table


def bool_table(value: Any, owner: str, name: str, max_rank: int, min_rank: int = 1) -> Tensor:
    """A bool tensor of min_rank to max_rank dims; integers count as `!= 0`."""
    table = _tensor(value, owner, name)
    if table.dtype != torch.bool:
        if table.dtype not in (*_INTEGERS, torch.int32):
            raise TypeError(
                f"{owner}: {name} must be bool (True: visible), got {table.dtype}; "
                "a float bias goes to attention(bias=...)"
            )
        table = table != 0
    _check_rank(table, owner, name, max_rank, min_rank)
    return table


def _tensor(value: Any, owner: str, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{owner}: {name} must be a tensor (or a list or array of numbers), "
            f"got {type(value).__name__}"
        ) from None


def _check_rank(table: Tensor, owner: str, name: str, max_rank: int, min_rank: int) -> None:
    if not min_rank <= table.dim() <= max_rank:
        wanted = str(max_rank) if min_rank == max_rank else f"{min_rank} to {max_rank}"
        raise ValueError(
            f"{owner}: {name} must have {wanted} dims, got {table.dim()}; "
            "squeeze or reshape it to the documented shape"
        )
