"""What a call computes and what it skips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._call import as_mask, context, heads_first, unplanned
from ._convert import int_table
from ._library import raise_as_python
from .tiles import on_cpu, shape_arguments


@dataclass(frozen=True)
class Explanation:
    """Counters of one attention call; `print` shows them as sentences.

    Attributes:
        backend: What runs it, e.g. "cpu".
        source: Where the forward's tiles come from: "dense" (all are visited), "inline" (each is
            classified as it comes), "stored" (in a map that is made before).
        tile: Rows and keys of a tile.
        num_empty, num_partial, num_full: Tiles skipped, run with the mask, run without it; over
            all sequences and heads.
        num_visible: Visible cells.
        num_cells: All cells.
        density: Visible cells / all cells.
        work: Tiles run / all tiles: the time against dense attention.
        plan_bytes, plan_seconds: Size and time of the analysis of the mask.
    """

    backend: str
    source: str
    tile: tuple[int, int]
    num_empty: int
    num_partial: int
    num_full: int
    num_visible: int
    num_cells: int
    plan_bytes: int
    plan_seconds: float

    @property
    def density(self) -> float:
        return self.num_visible / self.num_cells if self.num_cells else 0.0

    @property
    def work(self) -> float:
        active = self.num_partial + self.num_full
        tiles = active + self.num_empty
        return active / tiles if tiles else 0.0

    def __str__(self) -> str:
        rows, keys = self.tile
        return (
            f"backend {self.backend}, tiles {rows} x {keys}, source {self.source}\n"
            f"tiles: {self.num_empty:,} empty (skipped), {self.num_partial:,} partial, "
            f"{self.num_full:,} full: {self.work:.1%} of the dense work\n"
            f"cells: {self.num_visible:,} of {self.num_cells:,} visible ({self.density:.1%})\n"
            f"plan: {self.plan_bytes:,} bytes, {self.plan_seconds * 1e3:.2f} ms"
        )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    q_offset: int | Tensor | None = None,
    layout: str = "bhld",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Explanation:
    """What `jali.attention` does with these arguments, without doing it.

    Args:
        q, k, v, mask, q_offset, layout: As for `attention`; with cu_seqlens_q and cu_seqlens_k as
            for `attention_varlen`.

    Returns:
        An `Explanation`.
    """
    q, k, v = heads_first(layout, q, k, v)
    mask, q_offset = unplanned(mask, q_offset)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q = int_table(cu_seqlens_q, "explain", "cu_seqlens_q", 1)
        cu_seqlens_k = int_table(cu_seqlens_k, "explain", "cu_seqlens_k", 1)
    ctx = context(q, k, q_offset, cu_seqlens_q, cu_seqlens_k)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = None  # a bias hides nothing
    lengths = ctx.Lq, ctx.Lk
    cells = ctx.B * ctx.Lq * ctx.Lk
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        per_sequence = torch.diff(cu_seqlens_q), torch.diff(cu_seqlens_k)
        lengths = tuple(int(x.max()) if x.numel() else 0 for x in per_sequence)  # type: ignore[assignment]
        cells = int((per_sequence[0].long() * per_sequence[1].long()).sum())
    made = None if mask is None else as_mask(mask, ctx)
    made, q_offset, cu_seqlens_q, cu_seqlens_k = on_cpu(made, q_offset, cu_seqlens_q, cu_seqlens_k)
    shape = shape_arguments(
        made,
        ctx.B,
        ctx.Hq,
        ctx.Hkv,
        *lengths,
        q_offset,
        cu_seqlens_q,
        cu_seqlens_k,
        None if cu_seqlens_q is None else (ctx.Lq, ctx.Lk),
    )
    try:
        counts, seconds, text = torch.ops.jali.explain(*shape, q, v.shape[-1])
    except RuntimeError as error:
        raise_as_python(error)
    backend, source = bytes(text).decode().rsplit(" ", 1)
    rows, keys, *tiles, visible, plan_bytes = counts
    empty, partial, full = tiles
    return Explanation(
        backend,
        source,
        (rows, keys),
        empty,
        partial,
        full,
        visible,
        cells * ctx.Hq,
        plan_bytes,
        seconds,
    )
