"""Eight masks on one sequence of packed documents: pictures, errors and times."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import jali

from ..draw import sheet_png
from . import text


@dataclass(frozen=True)
class Case:
    """A mask of the gallery and what it is for."""

    name: str
    about: str
    mask: jali.Mask


@dataclass(frozen=True)
class Row:
    """What was measured of one case; errors are max |x − fp64|, times are in milliseconds."""

    mask: str
    density: float
    tiles_skipped: float
    error_jali: float
    error_torch: float
    ms_jali: float
    ms_torch: float
    speedup: float


def cases(data: text.Packed, q: Tensor, k: Tensor) -> list[Case]:
    """The eight masks for packed documents data.tokens [1, L]."""
    ids, places, tokens = data.ids, data.places, data.tokens
    length = tokens.shape[1]
    documents = jali.CausalMask() & jali.DocumentMask(ids)
    sinks = jali.KeyPaddingMask(places < 4)
    head = places < 200  # the first bytes of a document are read in both directions
    prompt = jali.DocumentMask(torch.where(head, ids, -1))
    newline = (tokens[0] == ord("\n")).clone()

    def line_starts(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j < 64) | newline[j]

    # Keys worth keeping: bytes that the byte before them did not foretell.
    scores = text.surprise(tokens)[:, None]
    blocks = jali.BlockSparseMask.from_scores(q, k, block=(64, 64), top_k=8, causal=True)
    return [
        Case("documents", "causal within each document", documents),
        Case("window", "the last 256 bytes of the document",
             documents & jali.WindowMask.last(256)),
        Case("window + sinks", "the last 128 bytes and the first 4 of the document",
             documents & (jali.WindowMask.last(128) | sinks)),
        Case("prefix-LM", "each document's first 200 bytes see each other in both directions",
             documents | prompt),
        Case("strided", "the last 64 bytes and every 16th before them",
             documents & (jali.WindowMask.last(64) | jali.DilatedMask(16))),
        Case("lines", "the last 64 bytes and every line's end, a Python function",
             documents & jali.PredicateMask(line_starts)),
        Case("block top-k", "per head, the 8 blocks of 64 keys with the best scores",
             jali.CausalMask() & blocks),
        Case("dynamic", "the 128 most surprising bytes of the document so far",
             jali.DynamicMask(scores.expand(1, 1, length), keep=128,
                              within=jali.DocumentMask(ids))),
    ]  # fmt: skip


def project(tokens: Tensor, num_heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, H, L, D] of bytes by a random embedding: equal bytes get equal keys."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(3, 256, num_heads * width, generator=generator)
    q, k, v = (t[tokens[0]].view(1, -1, num_heads, width).transpose(1, 2) for t in table)
    noise = torch.randn(q.shape, generator=generator)
    return (q + noise).contiguous(), k.contiguous(), v.contiguous()


def median_ms(functions: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median time of each function in milliseconds, over interleaved rounds."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, spent in zip(functions, times, strict=True):
            begin = time.perf_counter()
            function()
            spent.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(t) for t in times]


def measure(case: Case, q: Tensor, k: Tensor, v: Tensor, rounds: int) -> Row:
    """Runs one case: Jali with the mask, torch with the same mask as a dense tensor."""
    _, heads, length, _ = q.shape
    dense = case.mask.dense(1, heads, length, length)
    tiles = case.mask.tiles(1, heads, length, length)

    def ours() -> Tensor:
        return jali.attention(q, k, v, mask=case.mask)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

    with torch.no_grad():
        got, reference = ours(), theirs()  # these warm up, too
        ms_jali, ms_torch = median_ms([ours, theirs], rounds)
        error_jali = error_torch = 0.0
        for h, i in itertools.product(range(heads), range(0, length, 512)):
            # A few rows at a time: the fp64 scores of all would not fit into any cache.
            at = (slice(None), slice(h, h + 1), slice(i, i + 512))
            keys, values = (x[:, h : h + 1].double() for x in (k, v))
            exact = jali.reference.attention(q[at].double(), keys, values, dense[at])
            error_jali = max(error_jali, (got[at] - exact).abs().max().item())
            error_torch = max(error_torch, (reference[at] - exact).abs().max().item())
    return Row(
        mask=case.name,
        density=dense.float().mean().item(),
        tiles_skipped=tiles.num_empty / (tiles.num_empty + tiles.num_partial + tiles.num_full),
        error_jali=error_jali,
        error_torch=error_torch,
        ms_jali=ms_jali,
        ms_torch=ms_torch,
        speedup=ms_torch / ms_jali,
    )


def beside(left: str, right: str, width: int) -> str:
    """Two blocks of text next to each other, the left one `width` characters wide."""
    a, b = left.splitlines(), right.splitlines()
    rows = max(len(a), len(b))
    a += [""] * (rows - len(a))
    b += [""] * (rows - len(b))
    return "\n".join(
        f"{x}{' ' * (width - _shown(x))}  {y}".rstrip() for x, y in zip(a, b, strict=True)
    )


def _shown(line: str) -> int:
    """Characters of a line that a terminal shows."""
    return len(re.sub(r"\x1b\[[\d;]*m", "", line))


def table_text(rows: list[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| mask | density | skipped | error Jali | error torch | Jali ms | torch ms | speedup |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        lines.append(
            f"| {r.mask:<14} | {100 * r.density:4.1f} % | {100 * r.tiles_skipped:4.1f} % | "
            f"{r.error_jali:.1e} | {r.error_torch:.1e} | {r.ms_jali:6.1f} | {r.ms_torch:6.1f} | "
            f"{r.speedup:4.1f}× |"
        )
    return "\n".join(lines)


def main(
    out: Path, length: int = 4096, heads: int = 4, width: int = 64, rounds: int = 5
) -> list[Row]:
    """Shows and measures all cases; writes pictures and tables into `out`."""
    data = text.pack(text.documents(longest=900), length, 1)
    q, k, v = project(data.tokens, heads, width)
    num_docs, threads = int(data.ids.max()) + 1, torch.get_num_threads()
    print(
        f"\nEight masks on {length} bytes of text, {num_docs} documents packed into one sequence.\n"
        "Above each: visible cells and skipped tiles of 128 × 128; █ full, ░▒▓ partial, · empty.\n"
        f"Below: the time of a forward pass (fp32, {heads} heads of {width}, {threads} threads, "
        f"median of {rounds}),\nthat of torch's scaled_dot_product_attention with the same mask as "
        "a dense tensor, and the\nerror against fp64.\n"
    )
    rows, blocks, pictures = [], [], []
    out.mkdir(parents=True, exist_ok=True)
    for n, case in enumerate(cases(data, q, k)):
        row = measure(case, q, k, v, rounds)
        rows.append(row)
        picture = case.mask.draw(1, heads, length, length, title=f"{case.name}: {case.about}")
        picture.save(out / f"{n + 1}_{case.name.replace(' + ', '_').replace(' ', '_')}.png")
        note = f"{100 * row.density:.1f} %, {100 * row.tiles_skipped:.0f} % skipped"
        pictures.append(dataclasses.replace(picture, title=case.name, note="density " + note))
        lines = [
            f"{case.name}: {note}",
            picture.terminal(38, legend=False, head=False),
            f"{row.ms_jali:.1f} ms, torch {row.ms_torch:.0f} ms, error {row.error_jali:.0e}",
        ]
        blocks.append("\n".join(lines))
        if n % 2:
            print(beside(blocks[-2], blocks[-1], width=39), end="\n\n", flush=True)
    (out / "masks.png").write_bytes(sheet_png(pictures))
    table = table_text(rows)
    print(table)
    (out / "masks.md").write_text(table + "\n", encoding="utf-8")
    with (out / "masks.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([f.name for f in fields(Row)])
        writer.writerows([getattr(r, f.name) for f in fields(Row)] for r in rows)
    sys.stdout.flush()
    return rows
