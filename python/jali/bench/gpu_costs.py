"""What attention on a GPU costs besides the products: options, plans, the host, compilation."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, profile

import jali

from . import timing
from .gpu import (
    Problem,
    backward_call,
    documents,
    forward_call,
    gradients,
    interleaved,
    our_call,
    sdpa,
)
from .report import Report, Result
from .timing import by_wall_clock

#: What a dense bias or its gradient may cost is its memory's traffic, at this speed.
BYTES_PER_SECOND = 4.0e12


#: What options are timed with.
OPTIONS_PROBLEMS = {
    "d128 H16 8K": Problem(1, 16, 16, 8192, 128, 128),
    "d64 H32 8K": Problem(1, 32, 32, 8192, 64, 64),
}


def with_options(
    problem: Problem,
) -> list[tuple[str, Callable[[], dict[str, Any]], float, float]]:
    """name, what makes the keywords, bytes that a forward and a backward read and write for it."""
    heads, length = problem.Hq, problem.L

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def bias() -> Tensor:
        return made(1, heads, length, length)

    traffic = 2 * heads * length**2
    return [
        ("softcap 30", lambda: {"softcap": 30.0}, 0, 0),
        ("key_bias", lambda: {"key_bias": made(1, heads, length)}, 0, 0),
        ("key_bias, its gradient",
         lambda: {"key_bias": made(1, heads, length).requires_grad_()}, 0, 0),
        ("ALiBi", lambda: {"alibi_slopes": torch.rand(heads, device="cuda")}, 0, 0),
        ("sinks", lambda: {"sinks": made(heads)}, 0, 0),
        ("dropout 0.1", lambda: {"dropout_p": 0.1, "seed": 1}, 0, 0),
        ("lse", lambda: {"return_lse": True}, 0, 0),
        ("deterministic", lambda: {"deterministic": True}, 0, 0),
        ("bias per row and key", lambda: {"bias": bias()}, traffic, traffic),
        ("the same, its gradient", lambda: {"bias": bias().requires_grad_()}, traffic, 2 * traffic),
    ]  # fmt: skip


def options(report: Report, rounds: int) -> None:
    """Time of dense attention with an option against the same without."""
    for shape, problem in OPTIONS_PROBLEMS.items():
        print(f"\nOptions, {shape}, bf16: time against attention without; {rounds} rounds")
        options_of(report, rounds, shape, problem)


def options_of(report: Report, rounds: int, shape: str, problem: Problem) -> None:
    """The same of one shape."""
    for name, make, *traffic in with_options(problem):
        keywords = make()
        line = f"  {name:26}"
        for backward in (False, True):
            tensors = problem.tensors(backward)
            own, plain = our_call(tensors, backward, **keywords), our_call(tensors, backward)
            with torch.set_grad_enabled(backward):
                seconds = interleaved({"own": own, "plain": plain}, rounds, problem.calls())
            free = traffic[backward] / BYTES_PER_SECOND
            value = (seconds["own"] - free) / seconds["plain"]
            section = "options, backward" if backward else "options, forward"
            result = report.add(
                Result(section, f"{name}, {shape}", value, "x dense", 1.10, at_most=True,
                       detail=seconds)
            )  # fmt: skip
            line += f"{section[9:]:>10} {seconds['own'] / seconds['plain']:6.3f}"
            line += f" {result.mark()}" + (f" ({value:.3f} less its traffic)" if free else "")
        print(line, flush=True)


def kernel_times(call: Callable[[], object]) -> dict[str, float]:
    """Seconds of each kernel of a call, the fastest of four calls."""
    call()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(4):
            call()
        torch.cuda.synchronize()
    for event in found.events():
        if event.device_type == DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time / 1e6)
    return {name: sum(sorted(t)[: max(1, len(t) // 4)]) for name, t in times.items()}


def plan(report: Report) -> None:
    """Time on the device before attention begins: blocks of tables, the map of tiles."""
    causal = jali.CausalMask()
    print("\nPlans on the device, H1 d64: us before the attention kernel")
    for length in (1 << 15, 1 << 20):
        inline, stored = (10e-6, 100e-6) if length == 1 << 15 else (100e-6, 5e-3)
        docs = jali.DocumentMask(documents(length, max(12, length // 16384)))
        for name, mask, goal in (
            ("causal window", causal & jali.WindowMask.last(1024), inline),
            ("causal window or prefix", causal & (jali.WindowMask.last(1024) | jali.PrefixMask(64)),
             inline),
            ("causal documents", causal & docs, stored),
        ):  # fmt: skip
            problem = Problem(1, 1, 1, length, 64, 64)
            tensors = problem.tensors(True)
            mask = mask.to("cuda")
            line = f"  {name:26}{length:>9,}"
            for backward in (False, True):
                times = kernel_times(our_call(tensors, backward, mask))
                before = sum(t for n, t in times.items() if "map" in n or "summar" in n)
                section = "plan, backward" if backward else "plan, forward"
                result = report.add(Result(section, f"{name} {length}", before * 1e6, "us",
                                           goal * 1e6, at_most=True, detail=times))  # fmt: skip
                line += f"{section[6:]:>10} {before * 1e6:7.1f} {result.mark()}"
            print(line, flush=True)


def by_host_clock(call: Callable[[], object], calls: int) -> float:
    """Seconds until so many calls are launched on an idle device."""
    torch.cuda.synchronize()
    return by_wall_clock(call, calls)


class OneLaunch(torch.autograd.Function):
    """Three inputs, and a backward of one short kernel: what autograd itself costs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        grad.zero_()
        return q, k, v


def overhead(report: Report, rounds: int) -> None:
    """Host time of a call whose kernels are short."""
    print("\nHost time of a call, B1 H1 L128 d64: us; torch is SDPA's flash backend")
    problem = Problem(1, 1, 1, 128, 64, 64)
    causal = jali.CausalMask()
    docs = jali.DocumentMask(documents(128)).to("cuda")
    empty = torch.empty(1, device="cuda")
    for name, mask in (("dense", None), ("causal", causal), ("causal documents", causal & docs)):
        for backward in (False, True):
            tensors = problem.tensors(backward)
            make = backward_call if backward else forward_call
            launch: Callable[[], object] = empty.zero_
            if backward:  # through autograd, as attention goes
                q, k, v, grad = tensors
                launch = gradients(OneLaunch.apply(q, k, v), [q, k, v], grad.clone())
            rivals = {
                "jali": make(lambda q, k, v, m=mask: jali.attention(q, k, v, m), tensors),
                "torch": make(sdpa(SDPBackend.FLASH_ATTENTION, mask is not None), tensors),
                "launch": launch,
            }
            with torch.set_grad_enabled(backward):
                # Few calls in a turn: the device's queue must never make the host wait.
                seconds = timing.interleaved(
                    rivals, max(rounds, 21), calls=100, warmups=3, seconds=by_host_clock
                )
            own = (seconds["jali"] - seconds["launch"]) * 1e6
            section = "overhead, backward" if backward else "overhead, forward"
            result = report.add(
                Result(section, name, own, "us", 40.0 if backward else 25.0, at_most=True,
                       detail=seconds)
            )  # fmt: skip
            shown = "  ".join(f"{n} {s * 1e6:.1f}" for n, s in seconds.items())
            print(f"  {name:20}{section[10:]:9}{own:7.1f} beyond a launch {result.mark()}"
                  f"   ({shown})", flush=True)  # fmt: skip


FIRST_CALL = """
import sys, time, torch, jali
q, k, v = (torch.randn(1, 1, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for _ in range(3))
jali.attention(q, k, v).sum().backward()  # the driver, the compiler, their libraries
ids = (torch.arange(512) // 100).int()[None]
mask = jali.CausalMask() & jali.DocumentMask(ids) | jali.WindowMask(3, 5)
if sys.argv[1] == "light":
    mask = jali.CausalMask() & jali.WindowMask.last(100)
if sys.argv[1] == "predicate":
    mask = jali.PredicateMask(lambda b, h, q, k: (q // 16 == k // 16) | (k < 7))
mask = mask.to("cuda")
torch.cuda.synchronize()
begin = time.perf_counter()
with torch.set_grad_enabled("backward" in sys.argv[2]):
    out = jali.attention(q, k, v, mask)
if out.requires_grad:
    out.sum().backward()
torch.cuda.synchronize()
print(time.perf_counter() - begin)
"""


def first_call(report: Report) -> None:
    """Seconds until the first result of a new mask structure, and of one in the cache: of a forward
    alone, and of one with its backward, whose kernels are compiled beside each other."""
    print("\nFirst call of a mask structure in a process, d128; ms")
    for name in ("light", "stored", "predicate"):
        cases = f"{name}, new", f"{name}, cached"
        lines = {case: f"  {case:22}" for case in cases}
        for step, goals in (("forward", (1500, 50)), ("forward + backward", (2500, 100))):
            with tempfile.TemporaryDirectory() as folder:
                # The compiler's own cache on disk may know the kernels from before.
                env = {**os.environ, "JALI_CACHE": folder, "CUDA_CACHE_DISABLE": "1"}
                for case, goal in zip(cases, goals):
                    command = [sys.executable, "-c", FIRST_CALL, name, step]
                    done = subprocess.run(
                        command, env=env, capture_output=True, text=True, check=True
                    )
                    ms = float(done.stdout.splitlines()[-1]) * 1e3
                    result = report.add(
                        Result(f"first call, {step}", case, ms, "ms", goal, at_most=True)
                    )
                    lines[case] += f"{step:>20} {ms:7.1f} {result.mark()}"
        print("\n".join(lines.values()), flush=True)
