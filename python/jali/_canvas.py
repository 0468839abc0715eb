"""A small drawing surface that writes PNG and SVG, with nothing but torch and zlib.

A `Canvas` is a list of shapes. `svg()` writes them as text; `png()` paints them: rectangles and
lines by their exact distance (smooth edges), letters from a stroke font of Jali's own.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import torch

from ._stroke_font import Point, strokes_of, text_width


def rgb(color: str) -> tuple[int, int, int]:
    """'#rrggbb' as three numbers."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def blend(a: str, b: str, t: float) -> str:
    """The colour a fraction `t` of the way from a to b."""
    mixed = (round(x + (y - x) * t) for x, y in zip(rgb(a), rgb(b), strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


@dataclass(frozen=True)
class _Rect:
    x: float
    y: float
    w: float
    h: float
    color: str


@dataclass(frozen=True)
class _Line:
    points: tuple[Point, ...]
    color: str
    width: float


@dataclass(frozen=True)
class _Text:
    x: float
    y: float
    text: str
    size: float
    color: str
    anchor: str  # start, middle, end
    upward: bool
    bold: bool


@dataclass(frozen=True, eq=False)
class _Grid:
    x: float
    y: float
    w: float  # of one field
    h: float
    gap: float  # of a field's size that shows the background
    index: torch.Tensor  # uint8 [rows, columns] into the palette
    palette: tuple[str, ...]


@dataclass
class Canvas:
    """Shapes in pixels, origin at the top left; painted in the order they were added."""

    width: int
    height: int
    background: str = "#ffffff"
    shapes: list[_Rect | _Line | _Text | _Grid] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, color: str) -> None:
        self.shapes.append(_Rect(x, y, w, h, color))

    def grid(
        self, x: float, y: float, w: float, h: float, index: torch.Tensor, palette: Sequence[str],
        gap: float = 0.0,
    ) -> None:  # fmt: skip
        """A field of w × h for each entry of `index`, which points into the palette."""
        self.shapes.append(_Grid(x, y, w, h, gap, index.to(torch.uint8).cpu(), tuple(palette)))

    def line(self, points: Sequence[Point], color: str, width: float = 1.5) -> None:
        self.shapes.append(_Line(tuple(points), color, width))

    def text(
        self, x: float, y: float, text: str, *, size: float = 14, color: str = "#000000",
        anchor: str = "start", upward: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """`y` is the baseline; `upward` turns the text by a quarter (then x is the baseline)."""
        self.shapes.append(_Text(x, y, text, size, color, anchor, upward, bold))

    # SVG -------------------------------------------------------------------------------------

    def svg(self) -> str:
        out = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}">',
            f'<rect width="100%" height="100%" fill="{self.background}"/>',
        ]
        run: list[_Rect] = []  # rectangles of one colour share one path

        def flush() -> None:
            if run:
                path = "".join(f"M{r.x:g} {r.y:g}h{r.w:g}v{r.h:g}h{-r.w:g}z" for r in run)
                out.append(f'<path fill="{run[0].color}" d="{path}"/>')
                run.clear()

        for s in self.shapes:
            if not isinstance(s, _Rect) or (run and run[0].color != s.color):
                flush()
            if isinstance(s, _Rect):
                run.append(s)
            elif isinstance(s, _Grid):
                out += _grid_paths(s)
            elif isinstance(s, _Line):
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in s.points)
                out.append(
                    f'<polyline points="{points}" fill="none" stroke="{s.color}" '
                    f'stroke-width="{s.width:g}" stroke-linejoin="round" stroke-linecap="round"/>'
                )
            else:
                turn = f' transform="rotate(-90 {s.x:g} {s.y:g})"' if s.upward else ""
                weight = ' font-weight="bold"' if s.bold else ""
                out.append(
                    f'<text x="{s.x:g}" y="{s.y:g}" font-size="{s.size:g}" fill="{s.color}" '
                    f'font-family="Helvetica, Arial, sans-serif" '
                    f'text-anchor="{s.anchor}"{weight}{turn}>{escape(s.text)}</text>'
                )
        flush()
        return "\n".join([*out, "</svg>", ""])

    # PNG -------------------------------------------------------------------------------------

    def png(self, zoom: int = 2) -> bytes:
        """The picture as a PNG file, `zoom` pixels per unit."""
        image = torch.empty(self.height * zoom, self.width * zoom, 3)
        image[:] = torch.tensor(rgb(self.background), dtype=torch.float32)
        for s in self.shapes:
            if isinstance(s, _Rect):
                y0, y1 = round(s.y * zoom), round((s.y + s.h) * zoom)
                x0, x1 = round(s.x * zoom), round((s.x + s.w) * zoom)
                image[max(y0, 0) : max(y1, 0), max(x0, 0) : max(x1, 0)] = torch.tensor(
                    rgb(s.color), dtype=torch.float32
                )
            elif isinstance(s, _Grid):
                _paint_grid(image, s, zoom)
            elif isinstance(s, _Line):
                points = [(x * zoom, y * zoom) for x, y in s.points]
                _stroke(image, [points], s.width * zoom, s.color)
            else:
                self._letters(image, s, zoom)
        return write_png(image.round().to(torch.uint8))

    @staticmethod
    def _letters(image: torch.Tensor, s: _Text, zoom: int) -> None:
        unit = s.size * zoom / 10
        width = text_width(s.text, s.size * zoom)
        along = {"start": 0.0, "middle": -width / 2, "end": -width}[s.anchor]
        for char in s.text:
            strokes, advance = strokes_of(char)
            placed = []
            for stroke in strokes:
                flat = [(along + x * unit, (y - 2) * unit) for x, y in stroke]
                if s.upward:
                    placed.append([(s.x * zoom - v, s.y * zoom - u) for u, v in flat])
                else:
                    placed.append([(s.x * zoom + u, s.y * zoom - v) for u, v in flat])
            _stroke(image, placed, s.size * zoom * (0.125 if s.bold else 0.088), s.color)
            along += advance * unit


def _stroke(image: torch.Tensor, lines: list[list[Point]], width: float, color: str) -> None:
    """Paints polylines of one colour: a pixel is covered by its distance to the nearest segment."""
    segments = torch.tensor([(*a, *b) for line in lines for a, b in itertools.pairwise(line)])
    ink = torch.tensor(rgb(color), dtype=torch.float32)
    for part in segments.split(48) if len(segments) else ():  # each within a small window
        x0, y0 = (part.view(-1, 2).amin(0) - width - 1).floor().int().clamp_min(0).tolist()
        x1, y1 = (part.view(-1, 2).amax(0) + width + 2).ceil().int().tolist()
        x1, y1 = min(x1, image.shape[1]), min(y1, image.shape[0])
        if x0 >= x1 or y0 >= y1:
            continue
        y, x = torch.meshgrid(torch.arange(y0, y1) + 0.5, torch.arange(x0, x1) + 0.5, indexing="ij")
        ax, ay, bx, by = (c[:, None, None] for c in part.unbind(1))
        dx, dy = bx - ax, by - ay
        t = ((x - ax) * dx + (y - ay) * dy) / (dx * dx + dy * dy).clamp_min(1e-9)
        t = t.clamp(0, 1)
        distance = torch.hypot(x - ax - t * dx, y - ay - t * dy).amin(0)
        cover = (width / 2 + 0.5 - distance).clamp(0, 1)[..., None]
        image[y0:y1, x0:x1].lerp_(ink.expand(y1 - y0, x1 - x0, 3), cover)


def _grid_paths(s: _Grid) -> list[str]:
    """One path per colour; neighbours in a row are joined where no gap parts them."""
    paths: list[list[str]] = [[] for _ in s.palette]
    h = s.h * (1 - s.gap)
    for r, row in enumerate(s.index.tolist()):
        c = 0
        while c < len(row):
            end = c + 1
            while s.gap == 0 and end < len(row) and row[end] == row[c]:
                end += 1
            w = (end - c) * s.w * (1 - s.gap)
            at = f"M{s.x + c * s.w:g} {s.y + r * s.h:g}"
            paths[row[c]].append(f"{at}h{w:g}v{h:g}h{-w:g}z")
            c = end
    return [
        f'<path fill="{color}" d="{"".join(path)}"/>'
        for color, path in zip(s.palette, paths, strict=True)
        if path
    ]


def _paint_grid(image: torch.Tensor, s: _Grid, zoom: int) -> None:
    rows, cols = s.index.shape
    height, width = round(rows * s.h * zoom), round(cols * s.w * zoom)
    at_y = (torch.arange(height) + 0.5) / (s.h * zoom)
    at_x = (torch.arange(width) + 0.5) / (s.w * zoom)
    row, col = at_y.long().clamp_max(rows - 1), at_x.long().clamp_max(cols - 1)
    colors = torch.tensor([rgb(c) for c in s.palette], dtype=torch.float32)
    fields = colors[s.index.long()[row][:, col]]
    y0, x0 = round(s.y * zoom), round(s.x * zoom)
    inside = ((at_y % 1) < 1 - s.gap)[:, None] & ((at_x % 1) < 1 - s.gap)
    window = image[y0 : y0 + height, x0 : x0 + width]
    window.copy_(torch.where(inside[..., None], fields, window))


def write_png(pixels: torch.Tensor) -> bytes:
    """PNG file of an image: uint8 [height, width, 3]."""
    height, width, channels = pixels.shape
    if pixels.dtype != torch.uint8 or channels != 3:
        raise ValueError(f"write_png takes uint8 [height, width, 3], got {pixels.dtype} "
                         f"{list(pixels.shape)}")  # fmt: skip
    flat = pixels.reshape(height, -1)
    lines = torch.full((height, 1 + 3 * width), 2, dtype=torch.uint8)  # filter 2: minus the line
    lines[:, 1:] = flat  # above, which is mostly 0 here
    lines[1:, 1:] -= flat[:-1]
    raw = ctypes.string_at(lines.data_ptr(), lines.numel())

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(raw, 9))
        + chunk(b"IEND", b"")
    )
