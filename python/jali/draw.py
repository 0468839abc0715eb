"""Pictures of masks: PNG, SVG and text, of the cells themselves or of tiles.

    picture = (jali.CausalMask() & jali.WindowMask.last(24)).draw(Lq=64)
    picture.save("window.png")      # or .svg, .txt
    print(picture.terminal())

Up to 256 rows and keys every cell is drawn. Beyond, the mask is drawn in tiles: empty (skipped),
partial (each cell asked, shaded by how many are visible where that is cheap to know), full.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ._canvas import Canvas
from ._palette import EMPTY, FAINT, FULL, INK, PALETTE, PAPER, PARTIAL, SHADES, palette_index
from ._stroke_font import text_width
from ._text_picture import fields_as_text, legend_as_text

if TYPE_CHECKING:
    from .masks import Mask

_CELLS = 256  # up to this length every cell is drawn
_FIELDS = 512  # most fields that a picture shows in a row
_CHEAP = 1 << 26  # most cells evaluated for exact shades (B · H · Lq · Lk)


@dataclass(frozen=True, eq=False)
class Picture:
    """A drawn mask. `save(path)` by suffix; shows itself in notebooks; `print` gives text.

    Attributes:
        title: what is drawn, usually the mask's repr.
        note: size, density and tiles in one line.
        share: float32 [rows, columns], visible share of each field; NaN: partial, share unknown.
        num_rows, num_keys: what the axes count (Lq, Lk).
        tiled: whether fields are tiles; else they are cells.
    """

    title: str
    note: str
    share: torch.Tensor
    num_rows: int
    num_keys: int
    tiled: bool

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes .png, .svg or .txt (by suffix; folders are made) and returns the path."""
        path = Path(path)
        writers = {
            ".png": self._repr_png_,
            ".svg": lambda: self._repr_svg_().encode(),
            ".txt": lambda: (self.terminal(color=False) + "\n").encode(),
        }
        if path.suffix.lower() not in writers:
            raise ValueError(
                f"cannot save a picture as '{path.name}': the suffix is one of {', '.join(writers)}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(writers[path.suffix.lower()]())
        return path

    def _repr_png_(self) -> bytes:
        return self._canvas().png()

    def _repr_svg_(self) -> str:
        return self._canvas().svg()

    def __str__(self) -> str:
        return self.terminal()

    def terminal(
        self,
        width: int | None = None,
        *,
        color: bool | None = None,
        head: bool = True,
        legend: bool = True,
    ) -> str:
        """The picture as lines of text.

        Args:
            width: characters of a line; None: the terminal's, 80 at most.
            color: ANSI colours; None: if standard output is a terminal and NO_COLOR is not set.
            head: whether title and note stand above.
            legend: whether the last line explains the colours.
        """
        if color is None:
            color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        if width is None:
            width = min(shutil.get_terminal_size().columns, 80)
        lines = fields_as_text(self.share, self.num_rows, self.num_keys, width, color, self.tiled)
        if head:
            above = [textwrap.wrap(t, max(width, 24)) for t in (self.title, self.note)]
            lines = [*itertools.chain(*above), *lines]
        return "\n".join([*lines, *([legend_as_text(self.tiled, color)] if legend else [])])

    def _canvas(self) -> Canvas:
        share, size = self.share, 512.0
        rows, cols = share.shape
        w = size / max(rows, cols)
        w = float(int(w)) if w >= 2 else w
        h = max(w, 24.0 / rows)
        left, top = 74.0, 78.0
        lines = _wrap(self.title, 560, 15)
        top += 20 * (len(lines) - 1)
        grid_w, grid_h = w * cols, h * rows
        canvas = Canvas(round(max(left + grid_w + 28, left + 560)), round(top + grid_h + 76), PAPER)
        for n, line in enumerate(lines):
            canvas.text(left, 26 + 20 * n, line, size=15, color=INK, bold=True)
        canvas.text(left, top - 33, self.note, size=12, color=FAINT)

        canvas.grid(left, top, w, h, palette_index(share), PALETTE, gap=0.125 if w >= 6 else 0.0)

        for at in _ticks(self.num_keys):
            x = left + (at + 0.5 * (not self.tiled)) / self.num_keys * grid_w
            canvas.line([(x, top - 5), (x, top - 2)], FAINT, 1)
            canvas.text(x, top - 8, str(at), size=10, color=FAINT, anchor="middle")
        if rows > 1:
            for at in _ticks(self.num_rows):
                y = top + (at + 0.5 * (not self.tiled)) / self.num_rows * grid_h
                canvas.line([(left - 5, y), (left - 2, y)], FAINT, 1)
                canvas.text(left - 8, y + 3.5, str(at), size=10, color=FAINT, anchor="end")
        canvas.text(left + grid_w / 2, top + grid_h + 20, "key j →", size=12, color=INK,
                    anchor="middle")  # fmt: skip
        canvas.text(24, top + grid_h / 2, "← query i", size=12, color=INK, anchor="middle",
                    upward=True)  # fmt: skip
        self._legend(canvas, left, top + grid_h + 48)
        return canvas

    def _legend(self, canvas: Canvas, x: float, y: float) -> None:
        entries: list[tuple[tuple[str, ...], str]] = [((FULL,), "visible"), ((EMPTY,), "masked")]
        if self.tiled:
            shades = (PARTIAL,) if self.share.isnan().any() else SHADES[::3]
            entries = [((FULL,), "full"), (shades, "partial"), ((EMPTY,), "empty: skipped")]
        for colors, name in entries:
            for n, color in enumerate(colors):
                canvas.rect(x + 9 * n, y - 10, 9 if len(colors) > 1 else 12, 12, color)
            x += max(9 * len(colors), 12) + 7
            canvas.text(x, y, name, size=12, color=INK)
            x += text_width(name, 12) + 22


def draw(
    mask: Mask,
    B: int = 1,
    H: int = 1,
    Lq: int | None = None,
    Lk: int | None = None,
    *,
    b: int = 0,
    h: int = 0,
    tile: tuple[int, int] | None = None,
    q_offset: int | torch.Tensor | None = None,
    num_kv_heads: int | None = None,
    title: str | None = None,
) -> Picture:
    """Draws what batch entry `b` and head `h` of a mask see.

    Args:
        mask: any mask.
        B, H, Lq, Lk: the shape of the call (Lk None: Lq).
        b, h: which of the B batch entries and H heads is drawn.
        tile: rows and keys of a field; None: single cells up to a length of 256, else a power of
            two up to 128 that gives at most 128 fields in a row if it can. More than 512 fields
            in a row are merged.
        q_offset, num_kv_heads: as in `Mask.dense`.
        title: None: the mask's repr.

    Raises:
        ValueError: no Lq, or b, h, tile out of range.
    """
    if Lq is None:
        raise ValueError("draw needs the number of query rows: pass Lq (Lk defaults to it)")
    Lk = Lq if Lk is None else Lk
    if Lq < 1 or Lk < 1:
        raise ValueError(f"nothing to draw: Lq = {Lq}, Lk = {Lk}; both must be at least 1")
    if not (0 <= b < B and 0 <= h < H):
        raise ValueError(f"b = {b}, h = {h} lie outside B = {B}, H = {H}")
    if tile is not None and min(tile) < 1:
        raise ValueError(f"tile is {tile}; rows and keys of a tile are at least 1")
    if tile is None:
        side = 1
        while side < 128 and max(Lq, Lk) > max(_CELLS, 128 * side):
            side *= 2
        tile = (side, side)
    shape: dict[str, Any] = {"q_offset": q_offset, "num_kv_heads": num_kv_heads}
    title = repr(mask) if title is None else title
    size = f"{Lq} {'query' if Lq == 1 else 'queries'} × {Lk} {'key' if Lk == 1 else 'keys'}"
    tiled = tile != (1, 1)

    cells = None
    if B * H * Lq * Lk <= _CHEAP:
        cells = mask.dense(B, H, Lq, Lk, **shape)[b, h].cpu()
    elif not tiled:
        raise ValueError(
            f"{B} × {H} × {Lq} × {Lk} cells are too many to draw one by one: pass a larger tile"
        )
    notes = [size]
    if cells is not None:
        notes.append(f"density {_percent(cells.float().mean().item())}")
    if not tiled:
        assert cells is not None
        return Picture(title, ", ".join(notes), _merge(cells.float()), Lq, Lk, False)

    found = mask.tiles(B, H, Lq, Lk, tile, **shape)
    classes = found.classes[b if found.classes.shape[0] > 1 else 0]
    classes = classes[h if classes.shape[0] > 1 else 0].cpu()
    notes.append(f"tiles of {tile[0]} × {tile[1]}: {_percent((classes == 0).float().mean().item())}"
                 " skipped")  # fmt: skip
    if cells is not None:
        share = _tile_shares(cells, tile)
    else:
        share = classes.float() / 2
        share[classes == 1] = float("nan")
    return Picture(title, ", ".join(notes), _merge(share), Lq, Lk, True)


def sheet_png(pictures: Sequence[Picture], columns: int = 4, side: int = 230) -> bytes:
    """Several pictures on one sheet, as a PNG: `side` units each, with title and note below."""
    gap, caption = 26, 44
    rows = -(-len(pictures) // columns)
    canvas = Canvas(columns * (side + gap) + gap, rows * (side + caption + gap) + gap, PAPER)
    for n, picture in enumerate(pictures):
        x = gap + n % columns * (side + gap)
        y = gap + n // columns * (side + caption + gap)
        field = side / max(picture.share.shape)
        canvas.grid(x, y, field, field, palette_index(picture.share), PALETTE,
                    gap=0.125 if field >= 6 else 0.0)  # fmt: skip
        size = min(13, 13 * side / max(text_width(picture.title, 13), 1))
        canvas.text(x, y + side + 18, picture.title, size=size, color=INK, bold=True)
        canvas.text(x, y + side + 35, picture.note, size=10.5, color=FAINT)
    return canvas.png()


def _tile_shares(cells: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """Visible share of each tile's cells, those out of bounds not counted."""
    rows, cols = cells.shape
    pad = (0, -cols % tile[1], 0, -rows % tile[0])
    num = F.pad(cells, pad).unflatten(0, (-1, tile[0])).unflatten(2, (-1, tile[1]))
    num_rows = torch.full((num.shape[0],), tile[0])
    num_rows[-1] -= pad[3]
    num_cols = torch.full((num.shape[2],), tile[1])
    num_cols[-1] -= pad[1]
    return num.sum((1, 3)) / (num_rows[:, None] * num_cols)


def _merge(share: torch.Tensor) -> torch.Tensor:
    """At most _FIELDS fields in a row; a merged field is empty or full only if all of it is."""
    rows, cols = share.shape
    if max(rows, cols) <= _FIELDS:
        return share
    shrink = max(rows, cols) / _FIELDS
    size = (max(round(rows / shrink), 1), max(round(cols / shrink), 1))
    known = torch.where(share.isnan(), 0.5, share)
    return F.adaptive_avg_pool2d(known[None], size)[0]


def _percent(x: float) -> str:
    return f"{100 * x:.3g} %"


def _ticks(n: int) -> list[int]:
    """A handful of round positions in [0, n)."""
    if n <= 8:
        return list(range(n))
    step = 1
    while n / step > 8:
        step *= 2
    return list(range(0, n, step))


def _wrap(text: str, width: float, size: float) -> list[str]:
    """Lines no wider than `width` pixels, four at most."""
    lines = textwrap.wrap(text, int(width / text_width("n", size))) or [""]
    return lines if len(lines) <= 4 else [*lines[:3], lines[3][:-1] + "…"]
