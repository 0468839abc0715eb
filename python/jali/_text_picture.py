"""Pictures as lines of text: coloured half blocks, or plain half blocks, shades and Braille."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._canvas import rgb
from ._palette import EMPTY, FULL, PALETTE, SHADES, palette_index


def fields_as_text(
    share: torch.Tensor, num_rows: int, num_keys: int, width: int, color: bool, tiled: bool
) -> list[str]:
    """Lines for the fields share [rows, columns]; the first names the keys, both axes show ends."""
    margin = len(str(num_rows - 1)) + 2
    room = max(width - margin - 1, 8)
    rows, cols = share.shape
    dots = not color and not tiled and room < max(rows, cols) <= 2 * room
    fields = share if dots else _fit(share, room)  # dots: 2 × 4 cells a character
    high, wide = (4, 2) if dots else (2, 1)
    rows, cols = fields.shape[0], -(-fields.shape[1] // wide)
    end = str(num_keys - 1)
    out = [" " * margin + f"{'0 key j →':<{max(cols - len(end), 9)}}{end}"]
    last = (rows - 1) // high * high
    for r in range(0, rows, high):
        lines = fields[r : r + high]
        body = _dots(lines) if dots else _colored(lines) if color else _plain(lines)
        label = "0" if r == 0 else str(num_rows - 1) if r == last else ""
        out.append(f"{label:>{margin - 1}} {body}")
    return out


def legend_as_text(tiled: bool, color: bool) -> str:
    """What the colours or characters mean."""
    if tiled:
        entries = [(FULL, "█", "full"), (SHADES[7], "▒", "partial"), (EMPTY, "·", "empty: skipped")]
    else:
        entries = [(FULL, "█", "visible"), (EMPTY, "·", "masked")]
    return "  " + "  ".join(
        f"{_ansi(38, c)}█\x1b[0m {name}" if color else f"{sign} {name}" for c, sign, name in entries
    )


def _fit(share: torch.Tensor, width: int) -> torch.Tensor:
    """`share` resized to at most `width` rows and columns of square pixels."""
    share = torch.where(share.isnan(), 0.5, share)
    rows, cols = share.shape
    times = max(1, min(32 // max(cols, 1), 32 // max(rows, 1)))  # small masks: enlarge
    if times > 1:
        return share.repeat_interleave(times, 0).repeat_interleave(times, 1)
    shrink = max(cols / width, rows / width, 1.0)
    if shrink == 1.0:
        return share
    size = (max(round(rows / shrink), 1), max(round(cols / shrink), 1))
    return F.adaptive_avg_pool2d(share[None], size)[0]


def _color(share: float) -> str:
    return PALETTE[int(palette_index(torch.tensor([share]))[0])]


def _ansi(ground: int, color: str) -> str:
    return "\x1b[{};2;{};{};{}m".format(ground, *rgb(color))


def _colored(lines: torch.Tensor) -> str:
    """Two lines of fields as upper half blocks: the lower field is the background."""
    out, last = [], None
    low = lines[1].tolist() if len(lines) > 1 else [None] * lines.shape[1]
    for pair in zip(lines[0].tolist(), low, strict=True):
        now = (_color(pair[0]), None if pair[1] is None else _color(pair[1]))
        if now != last:
            out.append(_ansi(38, now[0]) + (_ansi(48, now[1]) if now[1] else "\x1b[49m"))
            last = now
        out.append("▀")
    return "".join(out) + "\x1b[0m"


def _plain(lines: torch.Tensor) -> str:
    """Half blocks where both halves are all or nothing, shades of grey elsewhere."""
    low = lines[1].tolist() if len(lines) > 1 else [0.0] * lines.shape[1]
    out = []
    for top, bottom in zip(lines[0].tolist(), low, strict=True):
        if top in (0.0, 1.0) and bottom in (0.0, 1.0):
            out.append("·▀▄█"[int(top) + 2 * int(bottom)])
        else:
            out.append("░▒▓"[min(int((top + bottom) * 1.5), 2)])
    return "".join(out)


def _dots(lines: torch.Tensor) -> str:
    """Four lines of cells in Braille: 2 × 4 cells a character."""
    bits = torch.tensor([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
    cells = F.pad(lines > 0, (0, lines.shape[1] % 2, 0, 4 - len(lines)))
    codes = (cells.unflatten(1, (-1, 2)) * bits[:, None]).sum((0, 2))
    return "".join(chr(0x2800 + code) for code in codes.tolist())
