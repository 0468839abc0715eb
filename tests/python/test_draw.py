"""Pictures: what the files hold, and that a picture shows the mask and nothing else."""

import re
import struct
import zlib
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from jali._canvas import Canvas, rgb, write_png
from jali._palette import EMPTY, FULL, PARTIAL
from jali.draw import draw


@dataclass(frozen=True, eq=False)
class Classes:
    classes: torch.Tensor


@dataclass(frozen=True, eq=False)
class Plain:
    """A stand-in for a mask: just the two methods that a picture asks."""

    cells: torch.Tensor = field(repr=False)  # bool [B, H, Lq, Lk]

    def dense(self, B, H, Lq, Lk, *, q_offset=None, num_kv_heads=None):
        return self.cells.expand(B, H, Lq, Lk)

    def tiles(self, B, H, Lq, Lk, tile=(128, 128), *, q_offset=None, num_kv_heads=None):
        rows = [c.split(tile[1], 1) for c in self.cells[0, 0].split(tile[0], 0)]
        classes = [[1 + int(t.all()) - int(not t.any()) for t in row] for row in rows]
        return Classes(torch.tensor(classes, dtype=torch.int8)[None, None])


def causal(lq, lk=None):
    lk = lq if lk is None else lk
    return Plain(torch.ones(lq, lk, dtype=torch.bool).tril(lk - lq)[None, None])


def read_png(data):
    """The pixels [height, width, 3] of a PNG as written by write_png, its checksums checked."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body, head = 8, b"", b""
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, chunk = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        (crc,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert crc == zlib.crc32(kind + chunk)
        head, body = (chunk if kind == b"IHDR" else head), body + chunk * (kind == b"IDAT")
        at += 12 + size
    width, height = struct.unpack(">II", head[:8])
    lines = torch.frombuffer(bytearray(zlib.decompress(body)), dtype=torch.uint8)
    lines = lines.view(height, 1 + 3 * width)
    assert (lines[:, 0] == 2).all()  # each line is the difference to the one above
    return lines[:, 1:].cumsum(0).to(torch.uint8).reshape(height, width, 3)


def test_png_holds_exactly_its_pixels():
    pixels = torch.randint(256, (7, 5, 3), dtype=torch.uint8)
    assert torch.equal(read_png(write_png(pixels)), pixels)


def test_png_refuses_other_pixels():
    with pytest.raises(ValueError, match=r"uint8 \[height, width, 3\]"):
        write_png(torch.zeros(2, 2, 4, dtype=torch.uint8))


@pytest.mark.parametrize(("lq", "lk"), [(1, 1), (8, 8), (3, 40), (40, 3), (1, 77), (130, 256)])
def test_every_cell_is_painted_in_its_color(lq, lk):
    mask = Plain(torch.rand(1, 1, lq, lk) < 0.4)
    picture = draw(mask, Lq=lq, Lk=lk)
    assert not picture.tiled
    canvas = picture._canvas()
    (grid,) = (s for s in canvas.shapes if hasattr(s, "palette"))
    image = read_png(canvas.png(zoom=2))
    y = (2 * (grid.y + (torch.arange(lq) + 0.4) * grid.h)).long()
    x = (2 * (grid.x + (torch.arange(lk) + 0.4) * grid.w)).long()
    painted = image[y][:, x]
    for color, cells in ((FULL, mask.cells[0, 0]), (EMPTY, ~mask.cells[0, 0])):
        assert torch.equal((painted == torch.tensor(rgb(color))).all(-1), cells)


def test_svg_has_one_field_per_cell_and_escapes_the_title():
    svg = draw(causal(8), Lq=8, title="a < b & c")._repr_svg_()
    fields = Counter()
    for color, path in re.findall(r'<path fill="(#\w+)" d="([^"]+)"', svg):
        fields[color] += path.count("M")
    assert (fields[FULL], fields[EMPTY]) == (36 + 1, 28 + 1)  # + 1: the legend
    assert "a &lt; b &amp; c" in svg


def test_tiles_are_shaded_by_the_share_of_visible_cells_in_bounds():
    lq, lk = 600, 700  # neither is a multiple of the tile
    mask = causal(lq, lk)
    picture = draw(mask, Lq=lq, Lk=lk, tile=(128, 128))
    assert picture.tiled
    for r in range(5):
        for c in range(6):
            part = mask.cells[0, 0, 128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
            assert picture.share[r, c] == pytest.approx(part.float().mean().item())
    assert "skipped" in picture.note and "600 queries × 700 keys" in picture.note


def test_costly_masks_are_drawn_from_their_tile_classes_alone(monkeypatch):
    monkeypatch.setattr("jali.draw._CHEAP", 1000)
    mask = causal(512)
    picture = draw(mask, Lq=512, tile=(128, 128))
    assert torch.equal(picture.share.isnan(), torch.eye(4, dtype=torch.bool))
    assert PARTIAL in picture._repr_svg_()
    assert "density" not in picture.note
    with pytest.raises(ValueError, match="pass a larger tile"):
        draw(mask, Lq=512, tile=(1, 1))


def test_text_without_color():
    text = draw(causal(16), Lq=16, title="causal").terminal(40, color=False)
    lines = text.splitlines()
    assert lines[:2] == ["causal", "16 queries × 16 keys, density 53.1 %"]
    assert lines[3] == "  0 " + "██" + "·" * 30
    assert lines[-2] == " 15 " + "█" * 32
    assert "\x1b" not in text


def test_text_in_braille_shows_each_cell():
    mask = causal(64)
    lines = draw(mask, Lq=64).terminal(40, color=False).splitlines()
    body = [line for line in lines if re.search("[\u2801-\u28ff]", line)]
    assert len(body) == 16
    dots = sum((ord(c) - 0x2800).bit_count() for line in body for c in line if ord(c) >= 0x2800)
    assert dots == mask.cells.sum()


def test_colored_text_is_as_wide_as_asked():
    text = draw(causal(300), Lq=300).terminal(50, color=True, legend=False)
    for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
        assert len(line) <= 50


def test_save_by_suffix(tmp_path):
    picture = draw(causal(4), Lq=4)
    assert picture.save(tmp_path / "new" / "a.png").read_bytes() == picture._repr_png_()
    assert picture.save(tmp_path / "a.svg").read_text(encoding="utf-8") == picture._repr_svg_()
    assert picture.save(tmp_path / "a.txt").read_text(encoding="utf-8").count("█") > 0
    with pytest.raises(ValueError, match=r"'a\.gif'.*\.png, \.svg, \.txt"):
        picture.save(tmp_path / "a.gif")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "pass Lq"),
        ({"Lq": 0}, "at least 1"),
        ({"Lq": 4, "b": 1}, "outside B = 1"),
        ({"Lq": 4, "tile": (0, 4)}, "tile"),
    ],
)
def test_errors_say_what_was_expected(wrong, message):
    with pytest.raises(ValueError, match=message):
        draw(causal(4), **wrong)


def test_canvas_paints_letters_and_lines_inside_its_bounds():
    canvas = Canvas(60, 30, "#ffffff")
    canvas.text(2, 20, "jali ✓", color="#000000")  # unknown letters become a box
    canvas.line([(-5, 5), (200, 5)], "#ff0000", 2)
    image = read_png(canvas.png(zoom=1))
    assert (image.sum(-1) < 200).any()
    assert (image[5] == torch.tensor([255, 0, 0])).all()
