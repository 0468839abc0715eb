"""`python -m jali.bench cpu [--isa v3] [--quick]`, `… gpu`: what Jali promises, measured."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

PARTS = ("speed", "dtypes", "overhead", "memory", "plan", "flex")
GPU_PARTS = (
    "dense", "dims", "masks", "flex", "options", "plan", "overhead", "first_call", "memory",
    "pictures",
)  # fmt: skip


def main() -> int:
    """Runs the benchmark; the exit status does not depend on the goals."""
    parser = argparse.ArgumentParser(prog="jali bench", description=__doc__)
    parser.add_argument("backend", choices=["cpu", "gpu"], help="what to measure")
    parser.add_argument("--isa", choices=["v2", "v3", "v4"], help="x86-64 level of Jali's kernels; "
                        "default: the best that this processor has")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: a minute")
    parser.add_argument(
        "--only", choices=sorted({*PARTS, *GPU_PARTS}), nargs="+", action="extend",
        help="some parts alone",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, help="measured rounds (CPU 5, GPU 7; quick 3)")
    parser.add_argument("--turn", type=float, default=0.03, help="GPU: seconds that a rival "
                        "has the card at a time; from 0.3 on each has the clock that it has when "
                        "it runs alone")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder of the JSON")
    args = parser.parse_args()
    if args.isa and os.environ.get("JALI_FORCE") != args.isa:
        # The level is chosen when the library is loaded: start again with it set.
        env = {**os.environ, "JALI_FORCE": args.isa}
        return subprocess.run(
            [sys.executable, "-m", "jali.bench", *sys.argv[1:]], env=env
        ).returncode
    run_gpu(args) if args.backend == "gpu" else run(args)
    return 0


def run_gpu(args: argparse.Namespace) -> None:
    """The parts that were asked for, on the current GPU."""
    from . import gpu, gpu_costs, timing
    from .report import Report, machine

    begin = time.perf_counter()
    timing.gpu_turn = args.turn
    report = Report()
    print(f"{machine()['gpu']}  jali {machine()['jali']}  torch {machine()['torch']}")
    rounds = args.rounds or (3 if args.quick else 7)
    parts = {
        "dense": lambda: gpu.dense(report, rounds),
        "dims": lambda: gpu.dims(report, rounds),
        "masks": lambda: gpu.sparse(report, rounds),
        "flex": lambda: gpu.flex(report, rounds),
        "options": lambda: gpu_costs.options(report, rounds),
        "plan": lambda: gpu_costs.plan(report),
        "overhead": lambda: gpu_costs.overhead(report, rounds),
        "first_call": lambda: gpu_costs.first_call(report),
        "memory": lambda: gpu.memory(report, args.out),
        "pictures": lambda: gpu.pictures(report, rounds, args.out),
    }
    path = args.out / f"gpu{'_quick' if args.quick else ''}.json"
    for name in args.only or GPU_PARTS:
        parts[name]()
        report.save(path)  # what is measured stays, whatever ends the run
    print(f"\n{report.summary()}\n{path} written, {time.perf_counter() - begin:.0f} s")


def run(args: argparse.Namespace) -> None:
    """Everything that was asked for, in this process."""
    from . import attention, memory
    from .report import Report, machine

    begin = time.perf_counter()
    report = Report()
    print(
        "  ".join(
            f"{k}: {' '.join(v) if isinstance(v, list) else v}" for k, v in machine().items() if v
        )
    )
    isa = args.isa or ""
    rounds = args.rounds or (3 if args.quick else 5)
    sizes = [(length, dim) for length in (2048, 8192) for dim in (64, 128)]
    if args.quick:
        sizes = [(2048, 64), (8192, 64)]
    parts = {
        "speed": lambda: attention.speed(report, sizes, rounds, isa),
        "dtypes": lambda: attention.dtypes(report, 2048, rounds),
        "overhead": lambda: attention.overhead(report, rounds),
        "memory": lambda: memory.attention_memory(report, args.quick),
        "plan": lambda: memory.plan_cost(report, args.quick),
        "flex": lambda: attention.flex(report, 2048 if args.quick else 8192, 64, rounds),
    }
    for name in args.only or PARTS:
        parts[name]()
    path = args.out / f"cpu{'_' + isa if isa else ''}{'_quick' if args.quick else ''}.json"
    report.save(path)
    print(f"\n{report.summary()}\n{path} written, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
