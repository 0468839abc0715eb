"""Attention on a GPU: dense against cuDNN and FlashAttention, masks against the dense speed and
FlexAttention. Rivals run interleaved in random order: the card is bound by power, and one that runs
alone looks faster than it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import jali

from ..demo.plot import Curve, curves_png
from . import timing
from .report import Report, Result

Call = Callable[[], object]


def pictures(report: Report, rounds: int, folder: Path) -> None:
    """Speed over length and time over density, as curves."""
    length = over_length(report, rounds)
    curves_png(folder / "gpu_length.png", length, "Forward speed by length",
               "thousand tokens a sequence", "TFLOP/s", from_zero=True)  # fmt: skip
    density = over_density(report, rounds)
    curves_png(folder / "gpu_density.png", density, "Time by density of random blocks",
               "percent of the tiles", "time, dense = 1", from_zero=True)  # fmt: skip
    print(f"{folder}/gpu_length.png and gpu_density.png written")


def repeated(call: Call, times: int) -> Call:
    def run() -> None:
        for _ in range(times):
            call()

    return run


def by_events(function: Call, calls: int) -> float:
    """Seconds of so many calls on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    repeated(function, calls)()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


interleaved = partial(timing.interleaved, seconds=by_events)


@dataclass(frozen=True)
class Problem:
    """One shape; B sequences of L rows and keys."""

    B: int
    Hq: int
    Hkv: int
    L: int
    D: int
    Dv: int

    def tensors(self, grad: bool) -> list[Tensor]:
        """q, k, v and the gradient of the output, bf16."""
        shapes = [(self.Hq, self.D), (self.Hkv, self.D), (self.Hkv, self.Dv), (self.Hq, self.Dv)]
        made = [
            torch.randn(self.B, h, self.L, d, device="cuda", dtype=torch.bfloat16)
            for h, d in shapes
        ]
        for x in made[:3]:
            x.requires_grad_(grad)
        return made

    def flops(self, cells: float, backward: bool) -> float:
        """Of `cells` visible cells of one head and sequence."""
        per_cell = 2 * (3 * self.D + 2 * self.Dv) if backward else 2 * (self.D + self.Dv)
        return self.B * self.Hq * cells * per_cell

    def calls(self) -> int:
        """How often to call it in one measurement: about `timing.gpu_turn` seconds."""
        seconds = max(self.flops(self.L**2, False) / 500e12, 234e-6)
        return max(8, int(timing.gpu_turn / seconds))


def forward_call(attention: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Call:
    q, k, v = (x.detach() for x in tensors[:3])
    return lambda: attention(q, k, v)


def gradients(out: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> Call:
    """The backward alone: the graph is kept."""
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def backward_call(attention: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Call:
    q, k, v, grad = tensors
    return gradients(attention(q, k, v), (q, k, v), grad)


def ours(mask: Any = None, **options: Any) -> Callable[..., Tensor]:
    """Jali's output alone."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = jali.attention(q, k, v, mask, **options)
        return out[0] if isinstance(out, tuple) else out

    return call


def our_call(tensors: Sequence[Tensor], backward: bool, mask: Any = None, **options: Any) -> Call:
    """Jali's forward; or its backward, with the gradients of options that are trained, too."""
    attention = ours(mask, **options)
    if not backward:
        return forward_call(attention, tensors)
    *qkv, grad = tensors
    trained = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    return gradients(attention(*qkv), [*qkv, *trained], grad)


def sdpa(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    return call


def measure(
    problem: Problem, rivals: dict[str, Callable[..., Tensor]], rounds: int, backward: bool
) -> dict[str, float]:
    """Seconds of each rival that runs this problem at all."""
    tensors = problem.tensors(backward)
    make = backward_call if backward else forward_call
    able: dict[str, Call] = {}
    for name, attention in rivals.items():
        try:
            call = make(attention, tensors)
            call()
            torch.cuda.synchronize()
            able[name] = call
        except (RuntimeError, NotImplementedError) as error:
            if name == "jali":
                raise
            print(f"    {name} does not run it: {str(error).splitlines()[0][:90]}")
    with torch.set_grad_enabled(backward):
        return interleaved(able, rounds, problem.calls())


def speeds(
    problem: Problem,
    causal: bool,
    backends: dict[str, SDPBackend],
    rounds: int,
    backward: bool,
) -> dict[str, float]:
    """TFLOP/s of Jali ("jali") and of those PyTorch backends that run this problem."""
    rivals = {"jali": ours(jali.CausalMask() if causal else None)}
    rivals |= {name: sdpa(backend, causal) for name, backend in backends.items()}
    seconds = measure(problem, rivals, rounds, backward)
    cells = problem.L * (problem.L + 1) / 2 if causal else problem.L**2
    return {n: problem.flops(cells, backward) / t / 1e12 for n, t in seconds.items()}


# (floor, goal) of forward and backward
Goals = tuple[tuple[float, float], tuple[float, float]]


def against(result: Result, floor: float, goal: float) -> str:
    """Floor and goal as printed behind a number: the goal is met, the floor is (·), or neither."""
    mark = "✓" if result.value >= goal else "·" if result.passed else "✗"
    return f"{floor:.2f} → {goal:.2f} {mark}"


# name, problem, causal, goals against cuDNN
DENSE: list[tuple[str, Problem, bool, Goals]] = [
    ("d128 16K", Problem(1, 16, 16, 16384, 128, 128), False, ((1.10, 1.13), (1.17, 1.25))),
    ("d128 16K causal", Problem(1, 16, 16, 16384, 128, 128), True, ((1.20, 1.27), (1.20, 1.28))),
    ("d128 GQA 32/8 16K causal", Problem(1, 32, 8, 16384, 128, 128), True,
     ((1.15, 1.22), (1.15, 1.22))),
    ("d64 16K", Problem(1, 32, 32, 16384, 64, 64), False, ((1.15, 1.30), (1.26, 1.33))),
    ("d64 16K causal", Problem(1, 32, 32, 16384, 64, 64), True, ((1.17, 1.28), (1.32, 1.40))),
    ("d256 16K", Problem(1, 8, 8, 16384, 256, 256), False, ((1.05, 1.09), (1.28, 1.50))),
    ("d256 16K causal", Problem(1, 8, 8, 16384, 256, 256), True, ((1.15, 1.20), (1.22, 1.40))),
    ("d96 16K causal", Problem(1, 16, 16, 16384, 96, 96), True, ((1.10, 1.20), (1.10, 1.20))),
    ("d192 16K causal", Problem(1, 16, 16, 16384, 192, 192), True, ((1.10, 1.20), (1.10, 1.20))),
    ("d128 1K b16", Problem(16, 16, 16, 1024, 128, 128), False, ((1.08, 1.12), (1.15, 1.35))),
    ("d128 1K b16 causal", Problem(16, 16, 16, 1024, 128, 128), True,
     ((1.15, 1.25), (1.15, 1.45))),
]  # fmt: skip


def dense(report: Report, rounds: int) -> None:
    """Against cuDNN and FlashAttention-2, both as PyTorch calls them."""
    print(f"\nDense and causal, bf16; TFLOP/s, medians of {rounds} interleaved rounds")
    print(f"{'':26}{'jali':>7}{'cuDNN':>8}{'flash':>8}{'ratio':>8}  floor → goal")
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    for backward in (False, True):
        print("backward" if backward else "forward")
        for name, problem, causal, goals in DENSE:
            speed = speeds(problem, causal, backends, rounds, backward)
            floor, goal = goals[backward]
            best = speed.get("cudnn", speed.get("flash", float("nan")))
            result = report.add(
                Result("backward" if backward else "forward", name, speed["jali"] / best, "x cuDNN",
                       goal=floor, detail=speed)
            )  # fmt: skip
            print(
                f"  {name:24}{speed['jali']:7.0f}{speed.get('cudnn', float('nan')):8.0f}"
                f"{speed.get('flash', float('nan')):8.0f}{result.value:8.2f}  "
                f"{against(result, floor, goal)}",
                flush=True,
            )


#: D and Dv: every shape of tiles that kernels have, and rows that begin anywhere in a sector of L2.
DIMS = [
    (32, 32), (40, 40), (64, 64), (72, 72), (80, 80), (96, 96), (104, 104), (112, 112), (128, 128),
    (160, 160), (192, 192), (192, 128), (224, 224), (256, 256), (64, 128), (128, 64),
]  # fmt: skip


def dims(report: Report, rounds: int) -> None:
    """Other head dims, causal, and of short sequences without a mask, against cuDNN."""
    print(f"\nHead dims, bf16, H 2048 / D, 8K tokens; TFLOP/s, {rounds} rounds")
    print(f"{'':22}{'forward':>8}{'cuDNN':>7}{'ratio':>7}{'backward':>10}{'cuDNN':>7}{'ratio':>7}")
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION}
    for D, Dv in DIMS:
        for length, size, causal in ((8192, "8K", True), (1024, "1K", True), (256, "256", False)):
            heads = 2048 // max(D, Dv)
            problem = Problem(8192 // length, heads, heads, length, D, Dv)
            name = f"d{D}" + f"/{Dv}" * (Dv != D) + f" {size}" + " causal" * causal
            line = f"  {name:20}"
            for backward in (False, True):
                speed = speeds(problem, causal, backends, rounds, backward)
                cudnn = speed.get("cudnn", float("nan"))
                section = "dims, backward" if backward else "dims, forward"
                ratio = speed["jali"] / cudnn
                report.add(Result(section, name, ratio, "x cuDNN", goal=1.0, detail=speed))
                line += f"{speed['jali']:{10 if backward else 8}.0f}{cudnn:7.0f}{ratio:7.2f}"
            print(line, flush=True)


def packed_documents(length: int, count: int = 12) -> jali.PackedDocumentMask:
    """Documents between 11 random cuts, seed 1."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(length - 1, generator=generator)[: count - 1] + 1
    return jali.PackedDocumentMask([0, *sorted(cuts.tolist()), length])


def documents(length: int, count: int = 12) -> Tensor:
    """The same as ids [1, L]."""
    return packed_documents(length, count).ids(length)


def random_blocks(length: int, share: float) -> Tensor:
    n = length // 128
    generator = torch.Generator().manual_seed(1)
    blocks = torch.rand(1, 1, n, n, generator=generator) < share
    return blocks | torch.eye(n, dtype=torch.bool)


def sparse_cases() -> list[tuple[str, Problem, jali.Mask, Goals | None]]:
    """name, problem, mask (on the CPU), goals: speed on visible cells ÷ dense speed."""
    causal = jali.CausalMask()
    p32, p8 = Problem(1, 16, 16, 32768, 128, 128), Problem(2, 16, 16, 8192, 128, 128)
    docs32, docs8 = packed_documents(32768), packed_documents(8192)
    ids32, ids8 = (jali.DocumentMask(documents(length)) for length in (32768, 8192))
    window = causal & jali.WindowMask.last(1024)
    made: list[tuple[str, Problem, jali.Mask, Goals | None]] = [
        ("window 1024, 32K", p32, window, ((0.78, 0.84), (0.73, 0.82))),
        ("window 1024, 8K b2", p8, window, ((0.72, 0.80), (0.70, 0.78))),
        ("12 documents, 32K", p32, docs32, ((0.95, 0.98), (0.95, 0.98))),
        ("12 documents causal, 32K", p32, causal & docs32, ((0.87, 0.92), (0.92, 0.95))),
        ("12 documents causal, 8K b2", p8, causal & docs8, ((0.63, 0.74), (0.61, 0.72))),
        ("by ids, 32K", p32, ids32, None),
        ("by ids causal, 32K", p32, causal & ids32, None),
        ("by ids causal, 8K b2", p8, causal & ids8, None),
    ]
    for share, floor, goal in ((0.10, 0.90, 0.95), (0.25, 0.93, 0.97), (0.50, 0.95, 0.98)):
        mask = jali.BlockSparseMask(random_blocks(32768, share))
        made.append((f"random blocks {share:.0%}, 32K", p32, mask, ((floor, goal),) * 2))
    return made


def visible_cells(problem: Problem, mask: jali.Mask) -> float:
    """Of one head and sequence, exactly."""
    one = torch.zeros((), dtype=torch.bfloat16).expand(1, 1, problem.L, 64)
    return float(jali.explain(one, one, one, mask).num_visible)


def sparse(report: Report, rounds: int) -> None:
    """The speed on visible cells against the dense speed of the same run."""
    base = Problem(1, 16, 16, 16384, 128, 128)
    print(f"\nMasks, d128 H16, bf16; TFLOP/s on visible cells ÷ dense d128 16K; {rounds} rounds")
    print(f"{'':30}{'jali':>7}{'dense':>7}{'ratio':>8}  floor → goal")
    for backward in (False, True):
        print("backward" if backward else "forward")
        tensors = base.tensors(backward)
        reference = our_call(tensors, backward)
        full_flops = base.flops(base.L**2, backward)
        for name, problem, mask, goals in sparse_cases():
            own = our_call(problem.tensors(backward), backward, mask.to("cuda"))
            own(), reference()
            flops = problem.flops(visible_cells(problem, mask), backward)
            times = max(1, round(full_flops / flops))  # as long as the dense call
            rivals = {"own": repeated(own, times), "dense": reference}
            with torch.set_grad_enabled(backward):
                seconds = interleaved(rivals, rounds, base.calls())
            speed = times * flops / seconds["own"] / 1e12
            full = full_flops / seconds["dense"] / 1e12
            floor, goal = goals[backward] if goals else (None, 0.0)
            section = "masks, backward" if backward else "masks, forward"
            result = report.add(Result(section, name, speed / full, "x dense", goal=floor,
                                       detail={"jali": speed, "dense": full}))  # fmt: skip
            met = "" if floor is None else against(result, floor, goal)
            print(f"  {name:28}{speed:7.0f}{full:7.0f}{result.value:8.2f}  {met}", flush=True)


def flex_cases() -> list[tuple[str, jali.Mask, Any]]:
    """Masks at 16K and the same as FlexAttention's mask_mod."""
    L, side, span = 16384, 128, 1024
    spans = (torch.arange(L) // span).int()
    where = spans.cuda()
    grid = jali.NeighborhoodMask((side, side), (13, 13))

    def prefix_lm(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | (k < 2048)

    def longformer(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k).abs() <= 256) | (k < 64) | (q < 64)

    def image_spans(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k <= q) | (where[q] == where[k])

    def neighborhood(b: Any, h: Any, q: Any, k: Any) -> Any:
        y, x = (q // side).clamp(6, side - 7), (q % side).clamp(6, side - 7)
        return ((k // side - y).abs() <= 6) & ((k % side - x).abs() <= 6)

    window = jali.WindowMask(256, 256)
    ids = jali.DocumentMask(spans[None])
    return [
        ("prefix-LM 2048", jali.CausalMask() | jali.PrefixMask(2048), prefix_lm),
        ("Longformer", window | jali.PrefixMask(64) | jali.PredicateMask(lambda b, h, q, k: q < 64),
         longformer),
        ("image spans", jali.CausalMask() | ids, image_spans),
        ("neighbourhood 13 x 13", grid, neighborhood),
    ]  # fmt: skip


#: What FlexAttention is timed with.
FLEX_PROBLEM = Problem(1, 16, 16, 16384, 128, 128)


def flex(report: Report, rounds: int) -> None:
    """Against compiled FlexAttention with its BlockMask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    problem = FLEX_PROBLEM
    print(f"\nAgainst FlexAttention, d128 H16 16K, bf16; ms, {rounds} rounds")
    for name, mask, mod in flex_cases():
        torch._dynamo.reset()  # or it falls back to eager without a word
        compiled = torch.compile(flex_attention)
        block_mask = create_block_mask(mod, None, None, problem.L, problem.L, device="cuda")

        def theirs(q: Tensor, k: Tensor, v: Tensor, f: Any = compiled, m: Any = block_mask) -> Any:
            return f(q, k, v, block_mask=m)

        rivals = {"jali": ours(mask.to("cuda")), "flex": theirs}
        for backward in (False, True):
            seconds = measure(problem, rivals, rounds, backward)
            if "flex" not in seconds:
                continue
            section = "flex, backward" if backward else "flex, forward"
            result = report.add(
                Result(section, name, seconds["flex"] / seconds["jali"], "x flex", goal=1.3)
            )
            print(f"  {name:24}{section[6:]:9}{seconds['jali'] * 1e3:8.2f}"
                  f"{seconds['flex'] * 1e3:8.2f}{result.value:8.2f} {result.mark()}",
                  flush=True)  # fmt: skip


def over_length(report: Report, rounds: int) -> list[Curve]:
    """Forward speed over the length, 16K tokens in all, d128 H16."""
    print("\nSpeed over the length, forward, d128 H16, 16K tokens in all; TFLOP/s")
    lengths = [1024, 2048, 4096, 8192, 16384]
    curves: dict[str, list[float]] = {}
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION}
    for length in lengths:
        problem = Problem(16384 // length, 16, 16, length, 128, 128)
        for kind, causal in (("dense", False), ("causal", True)):
            for name, speed in speeds(problem, causal, backends, rounds, False).items():
                curves.setdefault(f"{name} {kind}", []).append(speed)
                report.add(Result("length", f"{name} {kind} {length}", speed, "TFLOP/s"))
        found = "  ".join(f"{name} {y[-1]:.0f}" for name, y in curves.items())
        print(f"  {length:>6}  {found}", flush=True)
    return [Curve(name, [n / 1024 for n in lengths], y) for name, y in curves.items()]


def over_density(report: Report, rounds: int) -> list[Curve]:
    """Time of random blocks over their share, against dense attention."""
    print("\nTime over the density, random 128 x 128 blocks, d128 H16 16K; dense = 1")
    problem = Problem(1, 16, 16, 16384, 128, 128)
    shares = [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0]
    curves: dict[str, list[float]] = {"forward": [], "backward": []}
    for share in shares:
        mask = jali.BlockSparseMask(random_blocks(problem.L, share)).to("cuda")
        for name, times in curves.items():
            backward = name == "backward"
            tensors = problem.tensors(backward)
            with torch.set_grad_enabled(backward):
                rivals = {
                    "own": our_call(tensors, backward, mask),
                    "dense": our_call(tensors, backward),
                }
                seconds = interleaved(rivals, rounds, 8)
            times.append(seconds["own"] / seconds["dense"])
            report.add(Result("density", f"{name} {share:.0%}", times[-1], "x dense time"))
        found = "  ".join(f"{name} {y[-1]:.3f}" for name, y in curves.items())
        print(f"  {share:>5.0%}  {found}", flush=True)
    percent = [100 * x for x in shares]
    return [Curve("ideal", percent, shares), *(Curve(n, percent, y) for n, y in curves.items())]


def extra_memory(length: int) -> dict[str, float]:
    """GB beyond inputs and results at the peak of a pass, causal & document, d128 H16; and what
    "q, k, v, out" and "float32 q" take."""
    problem = Problem(1, 16, 16, length, 128, 128)
    mask = (jali.CausalMask() & jali.DocumentMask(documents(length, 64))).to("cuda")
    q, k, v, grad = problem.tensors(True)
    out, lse = jali.attention(q, k, v, mask, return_lse=True)
    found = {"q, k, v, out": 4 * q.nbytes / 1e9, "float32 q": 4 * q.numel() / 1e9}
    for name, run in (
        ("forward", lambda: jali.attention(q.detach(), k.detach(), v.detach(), mask)),
        ("backward", lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)),
    ):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        results = run()
        torch.cuda.synchronize()
        results = results if isinstance(results, tuple) else (results,)
        made = sum(x.nbytes for x in results) + (lse.nbytes if name == "forward" else 0)
        found[name] = (torch.cuda.max_memory_allocated() - before - made) / 1e9
    return found


def memory(report: Report, folder: Path) -> None:
    """The same over the length, up to a million tokens, with goals for these, and as curves."""
    print("\nMemory, d128 H16, causal & document; GB")
    lengths = [1 << n for n in range(17, 21)]
    names = {"q, k, v, out": "q, k, v, out", "forward": "the forward adds",
             "backward": "the backward adds"}  # fmt: skip
    curves: dict[str, list[float]] = {name: [] for name in names}
    for length in lengths:
        found = extra_memory(length)
        for name, sizes in curves.items():
            sizes.append(found[name])
            report.add(Result("memory by length", f"{name} {length}", found[name], "GB"))
        row = "  ".join(f"{name} {sizes[-1]:.2f}" for name, sizes in curves.items())
        print(f"  {length:>9,}  {row}", flush=True)
    for name, allowed in (("forward", 1.0), ("backward", 1.0 + found["float32 q"])):
        result = Result("memory", name, found[name], "GB", goal=allowed, at_most=True)
        print(f"  {lengths[-1]:,} tokens, {name:10}{found[name]:8.2f} {report.add(result).mark()}")
    thousands = [n / 1024 for n in lengths]
    curves_png(folder / "gpu_memory.png",
               [Curve(shown, thousands, curves[name]) for name, shown in names.items()],
               "Memory by length", "thousand tokens", "GB", from_zero=True)  # fmt: skip
    print(f"{folder}/gpu_memory.png written")
