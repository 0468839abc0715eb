"""Peak memory, measured in fresh processes: `python -m jali.bench.memory <what> <length>`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import jali

from .attention import WINDOW, document_ids, inputs, train_call
from .report import Report, Result

_HEADS, _DIM = 2, 64


def peak_mib() -> float:
    """Largest resident memory of this program so far.

    NOTE: ru_maxrss of a new process starts at its parent's.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def attention_step(who: str, length: int) -> dict[str, float]:
    """Peak memory that one forward + backward adds to its inputs, causal window of documents."""

    def step(length: int) -> float:
        tensors = inputs(length, _DIM, grad=True, num_heads=_HEADS)
        ids = document_ids(length)
        before = peak_mib()
        if who == "jali":
            mask = jali.CausalMask() & jali.DocumentMask(ids) & jali.WindowMask.last(WINDOW)
            train_call(lambda q, k, v: jali.attention(q, k, v, mask=mask), tensors)()
        else:
            i, j = torch.arange(length)[:, None], torch.arange(length)
            dense = (j <= i) & (ids[0][:, None] == ids[0]) & (i - j < WINDOW)
            train_call(
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense), tensors
            )()
        return peak_mib() - before

    step(256)  # libraries, threads
    return {"mib": step(length)}


def million(length: int) -> jali.Mask:
    """Causal, documents and a window, for about a million tokens."""
    ids = document_ids(length, 100)
    return jali.CausalMask() & jali.DocumentMask(ids) & jali.WindowMask.last(4096)


def tile_map(length: int) -> dict[str, float]:
    """Time of tiles() for one sequence, and its peak memory beyond the result."""
    mask = million(length)
    mask.tiles(1, 1, 256, 256)
    before = peak_mib()
    begin = time.perf_counter()
    found = mask.tiles(1, 1, length, length)
    seconds = time.perf_counter() - begin
    result = found.classes.numel() / 2**20
    return {"seconds": seconds, "mib": peak_mib() - before - result, "result_mib": result}


def fresh(*args: object) -> dict[str, float]:
    """What `main` prints in a new process."""
    command = [sys.executable, "-m", "jali.bench.memory", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def attention_memory(report: Report, quick: bool) -> None:
    """Growth of the peak with the length."""
    lengths = (4096, 16384) if quick else (4096, 16384, 65536)
    print("\nPeak memory that a forward + backward adds (causal window of documents, "
          f"H{_HEADS} D{_DIM}), MiB")  # fmt: skip
    print(f"  {'L':>6}{'jali':>9}{'torch':>9}   KiB per token, jali")
    found = []
    for length in lengths:
        ours = fresh("jali", length)["mib"]
        theirs = fresh("torch", length)["mib"] if length <= 16384 else float("nan")
        found.append(ours)
        report.add(Result("memory", f"L{length}", ours, "MiB", detail={"torch": theirs}))
        torch_text = f"{theirs:9.1f}" if theirs == theirs else f"{'-':>9}"
        print(f"  {length:>6}{ours:9.1f}{torch_text}   {1024 * ours / length:.2f}", flush=True)
    name = f"growth from L{lengths[-2]} to L{lengths[-1]} (4 is linear)"
    ratio = found[-1] / max(found[-2], 1.0)
    growth = report.add(Result("memory", name, ratio, "×", 5.0, at_most=True))
    print(f"  four times the length takes {growth.value:.2f}× the memory  {growth.mark()}")


def plan_cost(report: Report, quick: bool) -> None:
    """What a mask of a million tokens costs before the first product."""
    length = 1 << 17 if quick else 1 << 20
    mask = million(length)
    q = torch.zeros(1, 1, length, 1)
    plans = [jali.explain(q, q, q, mask) for _ in range(5)]
    seconds = sorted(p.plan_seconds for p in plans)[2]
    print(f"\nThe mask alone at {length} tokens, 100 documents, causal window of 4096")
    for value, unit, goal, digits in (
        (1e3 * seconds, "ms", 5.0, 2),
        (plans[0].plan_bytes / 1e6, "MB", 8.0, 2),
    ):
        r = report.add(Result("mask", f"plan, {unit}", value, unit, goal, at_most=True))
        print(f"  {'the plan that attention uses':<48}{value:9.{digits}f} {unit}   {r.mark()}")
    t = fresh("tiles", length)
    for value, unit, goal, name in (
        (1e3 * t["seconds"], "ms", 150.0, "tiles() of 128 × 128"),
        (t["mib"] * 1.048576, "MB", 32.0, "tiles() of 128 × 128, memory beyond its result"),
    ):
        r = Result("mask", f"tiles(), {unit}", value, unit, goal, at_most=True, detail=t)
        print(f"  {name:<48}{value:9.1f} {unit}   {report.add(r).mark()}", flush=True)


def main() -> None:
    """Measures one thing in this process."""
    what, length = sys.argv[1], int(sys.argv[2])
    print(json.dumps(tile_map(length) if what == "tiles" else attention_step(what, length)))


if __name__ == "__main__":
    main()
