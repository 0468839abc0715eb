"""Curves as text (Braille) and as a picture, and a progress bar."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._canvas import Canvas
from .._palette import CURVES, EMPTY, FAINT, INK, PAPER
from .._stroke_font import text_width


@dataclass(frozen=True)
class Curve:
    """A named line through (x, y) points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def smooth(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Running mean that forgets by `weight` per value, without bias at the start."""
    out, total, norm = [], 0.0, 0.0
    for v in values:
        total = weight * total + (1 - weight) * v
        norm = weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + 1)


def curves_text(curves: Sequence[Curve], width: int = 72, height: int = 14) -> str:
    """The curves as lines of text: Braille in colors on a terminal, else a mark for each curve.

    `width` and `height` are those of the field, in characters (of 2 × 4 dots).
    """
    x0, x1 = _range([x for c in curves for x in c.x])
    y0, y1 = _range([y for c in curves for y in c.y])
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    dots = [[0] * width for _ in range(height)]
    owner = [[-1] * width for _ in range(height)]
    for n, curve in enumerate(curves):
        points = [
            ((x - x0) / (x1 - x0) * (2 * width - 1), (y1 - y) / (y1 - y0) * (4 * height - 1))
            for x, y in zip(curve.x, curve.y, strict=True)
        ]
        for (ax, ay), (bx, by) in zip(points, points[1:] or points, strict=False):
            steps = int(max(abs(bx - ax), abs(by - ay))) + 1
            for s in range(steps + 1):
                px = round(ax + (bx - ax) * s / steps)
                py = round(ay + (by - ay) * s / steps)
                dots[py // 4][px // 2] |= bits[py % 4][px % 2]
                owner[py // 4][px // 2] = n
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    codes = ("36", "33", "35", "32")

    def paint(n: int, dots: int) -> str:
        if n < 0:
            return " "
        return f"\x1b[{codes[n % 4]}m{chr(0x2800 + dots)}\x1b[0m" if color else "●×○+"[n % 4]

    out = []
    for r in range(height):
        label = {0: f"{y1:.2f}", height - 1: f"{y0:.2f}"}.get(r, "")
        cells = (paint(n, d) for n, d in zip(owner[r], dots[r], strict=True))
        out.append(f"{label:>7} ┤{''.join(cells)}".rstrip())
    out.append(" " * 8 + "└" + "─" * width)
    out.append(" " * 9 + f"{x0:<{width - 12}g}{x1:>12g}")
    out.append(" " * 9 + "   ".join(f"{paint(n, 0x3F)} {c.name}" for n, c in enumerate(curves)))
    return "\n".join(out)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Values as a line of bars, the mean of each stretch."""
    width = min(width, len(values))
    cuts = [round(n * len(values) / width) for n in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = _range(means)
    return "".join("▁▂▃▄▅▆▇█"[round((m - low) / (high - low) * 7)] for m in means)


def curves_png(
    path: Path,
    curves: Sequence[Curve],
    title: str,
    x_name: str,
    y_name: str,
    *,
    from_zero: bool = False,
) -> None:
    """Writes the curves as a PNG; from_zero: the y axis begins at 0, else at the smallest value."""
    left, top, width, height = 70.0, 70.0, 620.0, 340.0
    canvas = Canvas(round(left + width + 40), round(top + height + 96), PAPER)
    canvas.text(left, 28, title, size=15, color=INK, bold=True)
    x0, x1 = _range([x for c in curves for x in c.x])
    y0, y1 = _range([y for c in curves for y in c.y] + [0.0] * from_zero)
    for at in _ticks(y0, y1):
        y = top + (y1 - at) / (y1 - y0) * height
        canvas.line([(left, y), (left + width, y)], EMPTY, 1)
        canvas.text(left - 8, y + 4, f"{at:g}", size=11, color=FAINT, anchor="end")
    for at in _ticks(x0, x1):
        x = left + (at - x0) / (x1 - x0) * width
        canvas.line([(x, top + height), (x, top + height + 4)], FAINT, 1)
        canvas.text(x, top + height + 18, f"{at:g}", size=11, color=FAINT, anchor="middle")
    for n, curve in enumerate(curves):
        every = max(len(curve.x) // 600, 1)
        points = [
            (left + (x - x0) / (x1 - x0) * width, top + (y1 - y) / (y1 - y0) * height)
            for x, y in zip(curve.x[::every], curve.y[::every], strict=True)
        ]
        canvas.line(points, CURVES[n % len(CURVES)], 1.8)
    canvas.text(left + width / 2, top + height + 42, x_name, size=12, color=INK, anchor="middle")
    canvas.text(left, top - 14, y_name, size=12, color=INK)
    x = left
    for n, curve in enumerate(curves):
        y = top + height + 74
        canvas.line([(x, y - 4), (x + 22, y - 4)], CURVES[n % len(CURVES)], 3)
        canvas.text(x + 30, y, curve.name, size=12, color=INK)
        x += 30 + text_width(curve.name, 12) + 26
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canvas.png())


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers in [low, high], four to nine of them."""
    step = 10.0 ** len(str(int(high - low) + 1))
    parts = (2.0, 2.5, 2.0)
    n = 0
    while (high - low) / step < 4:
        step /= parts[n % 3]
        n += 1
    first = -int(-low // step) if low % step else int(low // step)
    return [round(k * step, 9) for k in range(first, int(high // step) + 1)]


class Progress:
    """A bar that fills with time; on a terminal it redraws itself, else it prints a few lines."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.live = sys.stdout.isatty()
        self.begin = time.perf_counter()
        self.next = 0.0

    def update(self, text: str, *, done: bool = False) -> None:
        """Shows the bar with `text` behind it, at most ten times a second."""
        passed = time.perf_counter() - self.begin
        if passed < self.next and not done:
            return
        self.next = passed + (0.1 if self.live else self.seconds / 3)
        part = 1.0 if done else min(passed / self.seconds, 1.0)
        bar = ("█" * round(24 * part)).ljust(24, "░")
        line = f"  {self.name:<16} {bar} {min(passed, self.seconds):4.0f} s  {text}"
        print(f"\r{line}\x1b[K" if self.live else line, end="\n" if done or not self.live else "",
              flush=True)  # fmt: skip
