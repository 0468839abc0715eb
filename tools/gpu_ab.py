"""Compares builds of the library on one GPU: ./dev gpu-ab OLD.so NEW.so [--only NAME …] …

Each build has a process of its own with the Python package of this checkout; calls are timed in
turns, in random order, since the card is bound by power and two runs behind each other differ by
8 %. Prints medians in us, their ratio to the first build's, and minima. Cases are those of
`./dev bench gpu`: dense, masks, FlexAttention's ("flex Longformer"), options ("option ALiBi, d64",
"option none"), and these under a causal mask ("causally ALiBi, d64").
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jali.bench.timing import in_turns


def make_calls(args: argparse.Namespace) -> dict[str, Callable[[], Callable[[], object]]]:
    """What makes the call of each case."""
    import jali
    from jali.bench import gpu, gpu_costs

    def maker(
        problem: gpu.Problem,
        mask: jali.Mask | None,
        make_option: Callable[[], dict[str, Any]] = dict,
    ) -> Callable[[], Callable[[], object]]:
        def call() -> Callable[[], object]:
            there = None if mask is None else mask.to("cuda")
            options = {"deterministic": args.deterministic, **make_option()}
            return gpu.our_call(problem.tensors(args.backward), args.backward, there, **options)

        return call

    causal = jali.CausalMask()
    makers = {name: maker(p, causal if c else None) for name, p, c, _ in gpu.DENSE}
    makers |= {name: maker(p, mask) for name, p, mask, _ in gpu.sparse_cases()}
    for name, mask, _ in gpu.flex_cases():
        makers[f"flex {name}"] = maker(gpu.FLEX_PROBLEM, mask)
    for shape, problem in gpu_costs.OPTIONS_PROBLEMS.items():
        makers[f"option none, {shape}"] = maker(problem, None)
        makers[f"causally none, {shape}"] = maker(problem, causal)
        for name, make, *_ in gpu_costs.with_options(problem):
            makers[f"option {name}, {shape}"] = maker(problem, None, make)
            makers[f"causally {name}, {shape}"] = maker(problem, causal, make)
    return {n: m for n, m in makers.items() if any(w in n for w in args.only or [""])}


def work(args: argparse.Namespace) -> None:
    """A build's process: says its cases, then for each line "NAME<tab>CALLS" the us of a call."""
    import torch
    from jali.bench import gpu

    makers = make_calls(args)
    print("\t".join(makers), flush=True)
    calls: dict[str, Callable[[], object]] = {}
    with torch.set_grad_enabled(args.backward):
        for line in sys.stdin:
            name, count = line.rstrip("\n").split("\t")
            if name not in calls:
                calls[name] = makers[name]()
            calls[name]()
            print(1e6 * gpu.by_events(calls[name], int(count)) / int(count), flush=True)


class Worker:
    """A build's process."""

    def __init__(self, library: Path) -> None:
        env = {**os.environ, "JALI_LIBRARY": str(library.resolve())}
        command = [sys.executable, __file__, "--work", *sys.argv[1:]]
        self.process = subprocess.Popen(
            command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.cases = self.answer().split("\t")

    def answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a build's process ended with status {self.process.wait()}, see above")
        return line.rstrip("\n")

    def ask(self, case: str, calls: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{case}\t{calls}\n")
        self.process.stdin.flush()

    def us(self, case: str, calls: int) -> float:
        """Of one call."""
        self.ask(case, calls)
        return float(self.answer())


def compare(args: argparse.Namespace) -> None:
    workers = [Worker(library) for library in args.library]
    cases = workers[0].cases
    if cases == [""]:
        sys.exit(f"no case of ./dev bench gpu has one of {args.only} in its name")
    print(f"{'us':30}" + "".join(f"{p.parent.name + '/' + p.name:>32}" for p in args.library))
    for case in cases:
        for worker in workers:  # all builds compile at the same time
            worker.ask(case, 1)
        slowest = max(float(worker.answer()) for worker in workers)
        calls = max(4, int(1e6 * args.turn / slowest))
        rivals = {str(n): partial(w.us, case, calls) for n, w in enumerate(workers)}
        times = in_turns(rivals, args.rounds, seconds=lambda us, _: us())
        first = statistics.median(times["0"])
        line = f"{case:30}"
        for found in times.values():
            median = statistics.median(found)
            line += f"{median:14.1f} {median / first:6.3f} {min(found):9.1f} "
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev gpu-ab", description=__doc__)
    parser.add_argument("library", type=Path, nargs="+", help="builds of libjali_torch.so")
    parser.add_argument("--only", nargs="+", action="extend", metavar="NAME",
                        help="cases with one of these in their names")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn", type=float, default=0.03,
                        help="seconds of each measurement: in 0.03 the power limit is felt, in 0.3 "
                        "all of it")  # fmt: skip
    parser.add_argument("--backward", action="store_true", help="the backward, not the forward")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    work(args) if args.work else compare(args)


if __name__ == "__main__":
    main()
