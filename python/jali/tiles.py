"""What a mask shows when it is asked directly: its cells and its tile classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._convert import int_param, int_table, one_int
from ._library import raise_as_python
from ._mask import CallContext, Mask
from ._table_masks import block_size

_ops = torch.ops.jali


@dataclass(frozen=True, eq=False)
class TileMap:
    """Tile classes of a mask.

    Attributes:
        classes: int8 [B|1, H|1, ceil(Lq / m), ceil(Lk / n)]: 0 empty (no cell in bounds is
            visible), 1 partial, 2 full (all are). The batch or head dim is 1 where the mask does
            not vary over it.
        num_empty, num_partial, num_full: Tiles of each class in `classes`.
        density: The share of tiles that are not empty: work against dense attention.
    """

    classes: Tensor
    num_empty: int
    num_partial: int
    num_full: int
    density: float


def dense(
    mask: Mask,
    B: int,
    H: int,
    Lq: int,
    Lk: int,
    q_offset: int | Tensor | None = None,
    num_kv_heads: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    tokens: tuple[int, int] | None = None,
) -> Tensor:
    """See `Mask.dense`; tokens: see `shape_arguments`."""
    home = _gpu_of(mask)
    mask, q_offset, cu_seqlens_q, cu_seqlens_k = on_cpu(mask, q_offset, cu_seqlens_q, cu_seqlens_k)
    shape = shape_arguments(
        mask, B, H, num_kv_heads, Lq, Lk, q_offset, cu_seqlens_q, cu_seqlens_k, tokens
    )
    try:
        cells = _ops.mask_dense(*shape)
        return cells if home is None else cells.to(home)
    except RuntimeError as error:
        raise_as_python(error)


def tiles(
    mask: Mask,
    B: int,
    H: int,
    Lq: int,
    Lk: int,
    tile: tuple[int, int] = (128, 128),
    q_offset: int | Tensor | None = None,
    num_kv_heads: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> TileMap:
    """See `Mask.tiles`."""
    rows, keys = block_size(tile, "tile")
    home = _gpu_of(mask)
    mask, q_offset, cu_seqlens_q, cu_seqlens_k = on_cpu(mask, q_offset, cu_seqlens_q, cu_seqlens_k)
    shape = shape_arguments(mask, B, H, num_kv_heads, Lq, Lk, q_offset, cu_seqlens_q, cu_seqlens_k)
    try:
        by_batch, by_head = _ops.mask_varies(*shape)
        batches, heads = B if by_batch else 1, H if by_head else 1
        classes, counts = _ops.mask_tiles(*shape, rows, keys, batches, heads)
    except RuntimeError as error:
        raise_as_python(error)
    empty, partial, full = counts.tolist()
    density = (partial + full) / classes.numel() if classes.numel() else 0.0
    classes = classes if home is None else classes.to(home)
    return TileMap(classes, empty, partial, full, density)


def on_cpu(*arguments: Any) -> tuple[Any, ...]:
    """What looks at a mask runs on the CPU; tables on a GPU are copied."""

    def moved(x: Any) -> Any:
        device = x._device() if isinstance(x, Mask) else getattr(x, "device", None)
        return x.to("cpu") if device is not None and device.type == "cuda" else x

    return tuple(moved(x) for x in arguments)


def _gpu_of(mask: Mask) -> torch.device | None:
    device = mask._device()
    return device if device is not None and device.type == "cuda" else None


def shape_arguments(
    mask: Mask | None,
    B: int,
    Hq: int,
    Hkv: int | None,
    Lq: int,
    Lk: int,
    q_offset: int | Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    tokens: tuple[int, int] | None = None,
) -> tuple[Any, ...]:
    """A mask and its index space as the operators on masks take them.

    tokens: In varlen, the tokens (Tq, Tk) of packed tables; None: as many as cu_seqlens cover.
    """
    sizes = {"B": B, "H": Hq, "Lq": Lq, "Lk": Lk}
    B, Hq, Lq, Lk = (one_int(size, "mask", name, least=0) for name, size in sizes.items())
    heads = Hq if Hkv is None else one_int(Hkv, "mask", "num_kv_heads", least=1)
    offset = int_param(q_offset, "mask", "q_offset")
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k go together: give both or neither")
    if cu_seqlens_q is not None:
        cu_seqlens_q = int_table(cu_seqlens_q, "mask", "cu_seqlens_q", 1)
        cu_seqlens_k = int_table(cu_seqlens_k, "mask", "cu_seqlens_k", 1)
    program, tables, scalars = [], [], []  # type: ignore[var-annotated]
    if mask is not None:
        lengths = tokens or (Lq, Lk)
        if cu_seqlens_q is not None and cu_seqlens_k is not None and tokens is None:
            lengths = int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])
        device = mask._device() or torch.device("cpu")
        ctx = CallContext(B, Hq, heads, *lengths, offset, cu_seqlens_q, cu_seqlens_k, device)
        program, tables, scalars = mask.flatten(ctx)
    by_tensor = isinstance(offset, Tensor)
    return (
        tables,
        scalars,
        program,
        B,
        Hq,
        heads,
        Lq,
        Lk,
        offset if by_tensor else None,
        None if by_tensor else offset,
        cu_seqlens_q,
        cu_seqlens_k,
        *(tokens or (-1, -1)),
    )
