"""Fair timing: rivals take turns, in a new random order each round."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping

#: Seconds that a rival has the GPU at a time. The card is bound by power, and takes some 0.1 s to
#: find its clock: in shorter turns rivals have nearly the same one, in longer ones each its own.
gpu_turn = 0.03


def by_wall_clock(function: Callable[[], object], calls: int) -> float:
    """Seconds of so many calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - begin


def interleaved(
    rivals: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    warmups: int = 1,
    seconds: Callable[[Callable[[], object], int], float] = by_wall_clock,
) -> dict[str, float]:
    """Median seconds of one call of each rival; see `in_turns`."""
    times = in_turns(rivals, rounds, calls, warmups, seconds)
    return {name: statistics.median(t) for name, t in times.items()}


def in_turns(
    rivals: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    warmups: int = 1,
    seconds: Callable[[Callable[[], object], int], float] = by_wall_clock,
) -> dict[str, list[float]]:
    """Seconds of one call of each rival, round by round.

    Args:
        rivals: functions by name.
        rounds: measured rounds; each runs every rival once, in random order.
        calls: calls per measurement, for functions too short for the clock.
        warmups: rounds before the first measured one.
        seconds: measures so many calls of a function.
    """
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for n in range(warmups + rounds):
        for name in order.sample(list(rivals), len(rivals)):
            taken = seconds(rivals[name], calls)
            if n >= warmups:
                times[name].append(taken / calls)
    return times
