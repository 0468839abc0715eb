"""Trains the model three times, once for each way to choose keys, and compares."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from . import plot, text
from .model import KINDS, LanguageModel

NAMES = {
    "dense": "dense causal",
    "window": "window + sinks",
    "dynamic": "dynamic",
}


@dataclass
class Run:
    """What one training gave; losses in bits per byte."""

    kind: str
    losses: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # seen before each step
    tokens_per_second: float = 0.0
    held_out: float = 0.0


def loss_of(model: LanguageModel, data: text.Packed, rows: slice) -> torch.Tensor:
    """Mean loss in nats per byte over some of the sequences."""
    logits = model(data.tokens[rows], data.ids[rows], data.places[rows])
    return F.cross_entropy(logits.flatten(0, 1), data.targets[rows].flatten(), ignore_index=-1)


def train(kind: str, data: text.Packed, held_out: text.Packed, seconds: float, keep: int) -> Run:
    """Trains for `seconds` on the sequences in order; the same start and order for every kind."""
    model = LanguageModel(kind, keep=keep)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    run = Run(kind)
    length = data.tokens.shape[1]
    loss_of(model, data, slice(0, 1)).backward()  # starts threads, fills caches
    bar = plot.Progress(NAMES[kind], seconds)
    begin = time.perf_counter()
    step = 0
    while (passed := time.perf_counter() - begin) < seconds:
        rate = min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * passed / seconds))
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * rate
        optimizer.zero_grad()
        at = step % len(data.tokens)
        loss = loss_of(model, data, slice(at, at + 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.losses.append(loss.item() / math.log(2))
        run.num_tokens.append(step * length)
        step += 1
        bar.update(
            f"{step * length / 1000:6.0f}K bytes  {plot.smooth(run.losses[-30:])[-1]:.3f} bits/byte"
        )
    passed = time.perf_counter() - begin
    run.tokens_per_second = step * length / passed
    with torch.no_grad():
        parts = [loss_of(model, held_out, slice(n, n + 1)) for n in range(len(held_out.tokens))]
    run.held_out = torch.stack(parts).mean().item() / math.log(2)
    bar.update(
        f"{run.tokens_per_second:6.0f} bytes/s  held out {run.held_out:.3f} bits/byte", done=True
    )
    return run


def main(seconds: float, out: Path, length: int = 2048, keep: int = 128) -> list[Run]:
    """Trains all kinds for `seconds` each; prints and writes curves and a table into `out`."""
    docs = text.documents()
    num_held_out = 8
    held_out = text.pack(docs, length, num_held_out)
    data = text.pack(docs[int(held_out.ids.max()) + 1 :], length)
    per_document = length / int(data.ids[0].max() - data.ids[0].min() + 1)
    print(
        f"\nA byte-level language model on {data.tokens.numel() / 1e6:.1f} MB of Python and prose, "
        f"{length} bytes a sequence,\nabout {per_document:.0f}"
        f" bytes a document. Every mask keeps documents apart; window and dynamic see\n{keep} keys "
        f"per row. {seconds:g} s each.\n"
    )
    runs = [train(kind, data, held_out, seconds, keep) for kind in KINDS]
    curves = [
        plot.Curve(NAMES[r.kind], [n / 1e3 for n in r.num_tokens], plot.smooth(r.losses, 0.95))
        for r in runs
    ]
    print("\n  bits per byte over thousands of bytes seen\n")
    print(plot.curves_text(curves))
    plot.curves_png(
        out / "loss.png", curves, "Training loss by the way keys are chosen", "thousand bytes seen",
        "bits per byte",
    )  # fmt: skip
    table = ["| keys of a row | bytes/s | steps | held-out bits/byte |", "|---|--:|--:|--:|"]
    for r in runs:
        keys = "all of its document" if r.kind == "dense" else f"{keep}"
        table.append(
            f"| {NAMES[r.kind]}: {keys} | {r.tokens_per_second:.0f} | {len(r.losses)} | "
            f"{r.held_out:.3f} |"
        )
    (out / "training.md").write_text("\n".join(table) + "\n", encoding="utf-8")
    print("\n" + "\n".join("  " + line for line in table))
    return runs
