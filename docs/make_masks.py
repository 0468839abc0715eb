"""Writes docs/masks.md and its pictures from the masks' docstrings: `python docs/make_masks.py`."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import replace
from pathlib import Path

import jali
import torch
from jali.draw import sheet_png

HERE = Path(__file__).resolve().parent
L = 32  # rows and keys of the pictures

# Class → expressions whose pictures stand in its section; they use what `names` returns.
SECTIONS: dict[str, list[str]] = {
    "CausalMask": ["jali.CausalMask()"],
    "WindowMask": ["jali.WindowMask(6, 2)", "jali.CausalMask() & jali.WindowMask.last(8)"],
    "PrefixMask": ["jali.PrefixMask(6)", "jali.CausalMask() | jali.PrefixMask(10)"],
    "KeyPaddingMask": ["jali.KeyPaddingMask(keep)"],
    "DocumentMask": ["jali.DocumentMask(ids)", "jali.CausalMask() & jali.DocumentMask(ids)"],
    "PackedDocumentMask": [
        "jali.PackedDocumentMask([0, 9, 23, 32])",
        "jali.CausalMask() & jali.DocumentMask.from_lengths([9, 14, 9])",
    ],
    "KeyIntervalMask": ["jali.KeyIntervalMask(start, end)"],
    "RowIntervalMask": ["jali.RowIntervalMask(start, end)"],
    "DilatedMask": [
        "jali.DilatedMask(4)",
        "jali.CausalMask() & (jali.WindowMask.last(4) | jali.DilatedMask(4))",
    ],
    "NeighborhoodMask": [
        "jali.NeighborhoodMask(32, 7)",
        "jali.NeighborhoodMask((4, 8), (3, 5))",
    ],
    "BlockSparseMask": [
        "jali.BlockSparseMask(blocks, block=(4, 4))",
        "jali.BlockSparseMask.from_scores(q, k, block=(4, 4), top_k=3)",
    ],
    "TokenIndexMask": ["jali.TokenIndexMask(indices, block=4)"],
    "DenseMask": ["jali.DenseMask(dense)"],
    "PredicateMask": ["jali.PredicateMask(lambda b, h, i, j: (i ^ j) % 8 < 3)"],
    "DynamicMask": [
        "jali.DynamicMask(scores, keep=6)",
        "jali.DynamicMask(scores, keep=6, within=jali.DocumentMask(ids))",
    ],
}

INTRO = """# Masks

Written by `docs/make_masks.py` from the masks' docstrings. i is a query row, p = i + q_offset its
position, j a key; q_offset is Lk − Lq unless the call or the mask says otherwise. Teal cells are
visible. Masks combine with `&`, `|` and `~`; every one of them has `dense`, `tiles`, `draw`, `to`,
`==`, `hash`, a readable `repr`, and can be pickled.
"""


def names() -> dict[str, object]:
    """What the expressions may use; the same on every machine."""
    g = torch.Generator().manual_seed(3)
    start = torch.randint(L // 2, (L,), generator=g)
    return {
        "jali": jali,
        "torch": torch,
        "keep": torch.arange(L) % 11 < 8,
        "ids": torch.tensor([0] * 7 + [1] * 13 + [2] * 12),
        "start": start,
        "end": start + 4 + torch.randint(L // 2, (L,), generator=g),
        "blocks": torch.rand(L // 4, L // 4, generator=g) < 0.35,
        "q": torch.randn(1, 1, L, 4, generator=g),
        "k": torch.randn(1, 1, L, 4, generator=g),
        "indices": torch.randint(L, (L // 4, 5), generator=g),
        "dense": torch.rand(L, L, generator=g) < 0.3,
        "scores": torch.randn(L, generator=g),
    }


def picture_name(class_name: str) -> str:
    return f"{class_name.removesuffix('Mask').lower()}.png"


def text() -> str:
    """The page."""
    parts = [INTRO]
    for name, expressions in SECTIONS.items():
        doc = inspect.getdoc(getattr(jali, name)) or ""
        meaning, _, rest = doc.partition("\n\n")
        rest = rest.partition("Example:")[0].strip()
        parts.append(f"## {name}\n\n{meaning}\n")
        width = 282 * len(expressions) + 26
        parts.append(f'<img src="images/{picture_name(name)}" width="{width}" alt="{name}">\n')
        parts.append("```python\n" + "\n".join(expressions) + "\n```\n")
        if rest:
            parts.append("```text\n" + textwrap.dedent(rest) + "\n```\n")
    return "\n".join(parts)


def main() -> None:
    for name, expressions in SECTIONS.items():
        pictures = []
        for expression in expressions:
            mask = eval(expression, names())
            title = expression.replace("jali.", "")
            picture = mask.draw(1, 1, L, L, title=title)
            pictures.append(replace(picture, note=picture.note.rpartition(", ")[2]))
        sheet = sheet_png(pictures, columns=len(pictures), side=256)
        (HERE / "images" / picture_name(name)).write_bytes(sheet)
    (HERE / "masks.md").write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
