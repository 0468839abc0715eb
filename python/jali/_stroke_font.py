"""A stroke font of Jali's own, so that pictures need no font file and no drawing library."""

from __future__ import annotations

import functools
import itertools

Point = tuple[float, float]

# One letter = strokes separated by "|", each a list of points "xy" on a grid: baseline y = 2,
# height of x = 6, of capitals = 8, tails reach 0. "~" bends a stroke to a smooth curve, "@" also
# closes it.
_GLYPHS = {
    " ": "", "!": "08 04|02 02", '"': "08 06|18 16", "#": "12 18|32 38|04 44|06 46",
    "$": "~37 38 08 05 35 32 02 03|19 11", "%": "@08 28 26 06|@24 44 42 22|02 48",
    "&": "~42 06 08 28 26 04 02 32 45", "'": "08 06", "(": "~19 07 03 11", ")": "~09 17 13 01",
    "*": "25 28|04 46|06 44", "+": "05 45|27 23", ",": "12 01", "-": "05 25", ".": "02 02",
    "/": "01 39", "0": "@08 38 32 02", "1": "06 28 22", "2": "~07 08 38 35 02|02 32",
    "3": "~07 08 38 35 15|~15 35 32 02 03", "4": "22 28 04 34", "5": "38 08 05|~05 35 32 02 03",
    "6": "@05 35 32 02|~37 38 08 04 03", "7": "08 38 12", "8": "@08 38 35 05|@05 35 32 02",
    "9": "@08 38 35 05|~37 36 32 02 03", ":": "02 02|05 05", ";": "12 01|15 15", "<": "37 05 33",
    "=": "06 36|04 34", ">": "07 35 03", "?": "~07 08 38 35 15 14|12 12",
    "@": "@26 46 43 23|~46 43 53 58 08 02 42", "A": "02 28 42|15 35",
    "B": "02 08|~08 28 48 45 25 05|~05 25 45 42 22 02", "C": "~47 48 08 02 42 43",
    "D": "02 08|~08 28 48 42 22 02", "E": "38 08 02 32|05 25", "F": "38 08 02|05 25",
    "G": "~47 48 08 02 42 45|45 25", "H": "02 08|42 48|05 45", "I": "02 08", "J": "~38 33 32 02 03",
    "K": "02 08|48 04|26 42", "L": "08 02 32", "M": "02 08 24 48 42", "N": "02 08 42 48",
    "O": "@08 48 42 02", "P": "02 08|~08 28 48 45 25 05", "Q": "@08 48 42 02|24 42",
    "R": "02 08|~08 28 48 45 25 05|25 42", "S": "~47 48 08 05 45 42 02 03", "T": "08 48|28 22",
    "U": "~08 02 42 48", "V": "08 22 48", "W": "08 12 27 32 48", "X": "02 48|08 42",
    "Y": "08 25 48|25 22", "Z": "08 48 02 42", "[": "19 09 01 11", "\\": "09 31",
    "]": "09 19 11 01", "^": "06 28 46", "_": "01 31", "`": "08 17", "a": "@06 36 32 02|36 32",
    "b": "08 02|@06 36 32 02", "c": "~35 36 06 02 32 33", "d": "38 32|@06 36 32 02",
    "e": "04 34|~34 36 06 02 32 33", "f": "~28 18 17 12|06 26",
    "g": "@06 36 32 02|~36 31 30 00 01", "h": "08 02|~03 06 36 32", "i": "02 06|08 08",
    "j": "~16 11 10 00|18 18", "k": "08 02|36 04|15 32", "l": "~08 03 02 12",
    "m": "02 06|~03 06 26 22|~23 26 46 42", "n": "02 06|~03 06 36 32", "o": "@06 36 32 02",
    "p": "06 00|@06 36 32 02", "q": "36 30|@06 36 32 02", "r": "02 06|~03 06 26",
    "s": "~35 36 06 04 34 32 02 03", "t": "~18 13 12 22|06 26", "u": "~06 02 32 35|36 32",
    "v": "06 22 46", "w": "06 12 26 32 46", "x": "02 36|06 32", "y": "06 22|46 10",
    "z": "06 36 02 32", "{": "~29 19 15 05|~05 15 11 21", "|": "00 09",
    "}": "~09 19 15 25|~25 15 11 01", "~": "~04 16 34 46", "×": "03 36|06 33", "·": "05 05",
    "→": "05 45|27 45 23", "←": "45 05|27 05 23", "↓": "28 22|04 22 44",
    "≤": "37 15 34|02 32", "≥": "07 25 04|02 32",
    "∞": "@06 26 44 64 66 46 24 04", "…": "02 02|22 22|42 42", "−": "05 35",
}  # fmt: skip


def _parse(glyph: str) -> list[list[Point]]:
    strokes = []
    for stroke in glyph.split("|") if glyph else []:
        points = [(float(xy[0]), float(xy[1])) for xy in stroke.lstrip("~@").split()]
        if stroke[0] == "@":
            points = _closed_curve(points)
        elif stroke[0] == "~":
            points = _open_curve(points)
        strokes.append(points)
    return strokes


def _mid(a: Point, b: Point) -> Point:
    return ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)


def _bend(a: Point, corner: Point, b: Point, steps: int = 6) -> list[Point]:
    """Points behind `a` of the parabola from a to b that leaves towards `corner`."""
    out = []
    for t in (n / steps for n in range(1, steps + 1)):
        c, d, e = (1 - t) ** 2, 2 * t * (1 - t), t * t
        out.append((c * a[0] + d * corner[0] + e * b[0], c * a[1] + d * corner[1] + e * b[1]))
    return out


def _open_curve(p: list[Point]) -> list[Point]:
    out = [p[0], _mid(p[0], p[1])]
    for corner, following in itertools.pairwise(p[1:]):
        out += _bend(out[-1], corner, _mid(corner, following))
    return [*out, p[-1]]


def _closed_curve(p: list[Point]) -> list[Point]:
    out = [_mid(p[-1], p[0])]
    for n, corner in enumerate(p):
        out += _bend(out[-1], corner, _mid(corner, p[(n + 1) % len(p)]))
    return out


@functools.cache
def strokes_of(char: str) -> tuple[list[list[Point]], float]:
    """Strokes of a letter on the grid and its advance."""
    strokes = _parse(_GLYPHS.get(char, "02 08 38 32 02"))
    right = max((x for s in strokes for x, _ in s), default=1.0)
    return strokes, right + 1.7


def text_width(text: str, size: float) -> float:
    """Width in pixels of `text` in the stroke font; `size` is the height of a line."""
    return sum(strokes_of(c)[1] for c in text) * size / 10
