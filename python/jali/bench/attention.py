"""Attention against torch's: forward, forward + backward, dtypes, FlexAttention, tiny calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import jali

from .report import Report, Result, cpu_flags
from .timing import interleaved

NUM_HEADS = 8
WINDOW = 256
NUM_DOCS = 12


@dataclass(frozen=True)
class Case:
    """A mask, how torch is told of it, and the goals (forward, forward + backward)."""

    name: str
    mask: jali.Mask | None
    dense: Tensor | None  # torch's attn_mask
    is_causal: bool
    goals: tuple[float | None, float | None]


def document_ids(length: int, num: int = NUM_DOCS) -> Tensor:
    """Ids [1, L] of `num` documents of equal length (the last takes the rest)."""
    return (torch.arange(length) * num // length).int()[None]


def cases(length: int, isa: str) -> list[Case]:
    """The cases of a length; long sequences have the sparse ones too."""
    wide = isa != "v3"
    causal = jali.CausalMask()
    out = [
        Case("dense", None, None, False, (1.6, 1.4) if wide else (1.1, 1.0)),
        Case("causal", causal, None, True, (1.5, 1.3) if wide else (1.05, 1.0)),
    ]
    if length >= 8192:
        i, j, ids = torch.arange(length)[:, None], torch.arange(length), document_ids(length)
        window = (j <= i) & (i - j < WINDOW)
        docs = (j <= i) & (ids[0][:, None] == ids[0])
        out += [
            Case(f"window {WINDOW}", causal & jali.WindowMask.last(WINDOW), window, False,
                 (15, 12) if wide else (None, None)),
            Case(f"{NUM_DOCS} documents", causal & jali.DocumentMask(ids), docs, False,
                 (12, 10) if wide else (None, None)),
        ]  # fmt: skip
    return out


def inputs(length: int, dim: int, dtype: torch.dtype = torch.float32, grad: bool = False,
           num_heads: int = NUM_HEADS) -> list[Tensor]:  # fmt: skip
    """q, k, v and the gradient of the output, [1, H, L, D]."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(1, num_heads, length, dim, generator=generator).to(dtype) for _ in range(4)]
    for x in made[:3]:
        x.requires_grad_(grad)
    return made


def call(attention: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], object]:
    """A function that runs attention on q, k, v."""
    q, k, v = tensors[:3]
    return lambda: attention(q, k, v)


def train_call(attention: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Callable[[], object]:
    """A function that runs forward and backward; it first drops the gradients, as an optimiser."""
    q, k, v, grad = tensors

    def step() -> None:
        q.grad = k.grad = v.grad = None
        attention(q, k, v).backward(grad)

    return step


def rivals(case: Case) -> dict[str, Callable[..., Tensor]]:
    """Both attentions of a case, as functions of q, k, v."""
    return {
        "jali": lambda q, k, v: jali.attention(q, k, v, mask=case.mask),
        "torch": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, attn_mask=case.dense, is_causal=case.is_causal
        ),
    }


def speed(report: Report, sizes: list[tuple[int, int]], rounds: int, isa: str) -> None:
    """Forward and forward + backward, fp32; sizes are (length, head dim)."""
    print(
        f"\nAttention, fp32, B1 H{NUM_HEADS}; times in ms, medians of {rounds} interleaved rounds"
    )
    print(f"  {'':>5} {'':>4}  {'':<13}{'forward':^34}{'forward + backward':^34}")
    print(
        f"  {'L':>5} {'D':>4}  {'mask':<13}"
        + f"{'jali':>8}{'torch':>9}{'ratio':>8}  {'goal':<9}" * 2
    )
    for length, dim in sizes:
        for case in cases(length, isa):
            line = f"  {length:>5} {dim:>4}  {case.name:<13}"
            both = rivals(case)
            for backward in (False, True):
                tensors = inputs(length, dim, grad=backward)
                make = train_call if backward else call
                calls = {name: make(function, tensors) for name, function in both.items()}
                t = interleaved(calls, rounds)
                result = report.add(
                    Result("forward + backward" if backward else "forward",
                           f"{case.name} L{length} D{dim}", t["torch"] / t["jali"], "×",
                           case.goals[backward], detail=t)
                )  # fmt: skip
                line += f"{1e3 * t['jali']:8.1f}{1e3 * t['torch']:9.1f}{result.value:7.2f}×  "
                line += f"{result.mark():<9}"
                print(line, end="", flush=True)
                line = ""
            print()


def flex(report: Report, length: int, dim: int, rounds: int) -> None:
    """FlexAttention, compiled, forward, beside Jali on the same masks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = document_ids(length)
    causal = jali.CausalMask()
    pairs: dict[str, tuple[jali.Mask, Callable[..., Tensor]]] = {
        "causal": (causal, lambda b, h, i, j: j <= i),
        f"window {WINDOW}": (
            causal & jali.WindowMask.last(WINDOW),
            lambda b, h, i, j: (j <= i) & (i - j < WINDOW),
        ),
        f"{NUM_DOCS} documents": (
            causal & jali.DocumentMask(ids),
            lambda b, h, i, j: (j <= i) & (ids[0, i] == ids[0, j]),
        ),
    }
    q, k, v, _ = inputs(length, dim)
    print(f"\nFlexAttention (torch.compile) forward, L{length} D{dim}; times in ms")
    print(f"  {'mask':<13}{'jali':>8}{'flex':>9}{'ratio':>8}   flex: block mask, first call")
    try:
        compiled = torch.compile(flex_attention)
        for name, (mask, mod) in pairs.items():
            begin = time.perf_counter()
            block_mask = create_block_mask(mod, 1, 1, length, length, device="cpu")
            built = time.perf_counter() - begin
            with torch.no_grad():
                compiled(q, k, v, block_mask=block_mask)
                first = time.perf_counter() - begin - built
                calls = {
                    "jali": call(partial(jali.attention, mask=mask), (q, k, v)),
                    "flex": call(partial(compiled, block_mask=block_mask), (q, k, v)),
                }
                t = interleaved(calls, rounds)
            ratio = t["flex"] / t["jali"]
            detail = {**t, "block_mask": built, "first_call": first}
            report.add(
                Result("FlexAttention", f"{name} L{length} D{dim}", ratio, "×", detail=detail)
            )
            print(
                f"  {name:<13}{1e3 * t['jali']:8.1f}{1e3 * t['flex']:9.1f}{ratio:7.2f}×   "
                f"{1e3 * built:.0f} ms, {first:.1f} s",
                flush=True,
            )
    except Exception as error:  # the compiler's own failures have no common type
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        report.note(f"  FlexAttention did not run: {type(error).__name__}: {reason}")


def dtypes(report: Report, length: int, rounds: int) -> None:
    """16-bit inputs against fp32, forward, dense."""
    amx = "amx_bf16" in cpu_flags()
    print(f"\n16-bit inputs, dense forward, L{length}; times in ms, speed against Jali's fp32")
    print(f"  {'D':>4}{'jali fp32':>11}{'jali bf16':>11}{'jali fp16':>11}{'torch bf16':>12}"
          "   bf16 speed       fp16 speed       against torch bf16")  # fmt: skip
    for dim in (64, 128):
        made = {
            name: inputs(length, dim, dtype)
            for name, dtype in (
                ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)
            )
        }  # fmt: skip
        calls = {name: call(jali.attention, tensors) for name, tensors in made.items()}
        calls["torch"] = call(F.scaled_dot_product_attention, made["bf16"])
        t = interleaved(calls, rounds)
        rows = [
            report.add(
                Result("dtypes", f"{d} L{length} D{dim}", t["fp32"] / t[d], "× fp32", 0.8, detail=t)
            )
            for d in ("bf16", "fp16")
        ]
        goal = 0.8 if amx else None
        rows.append(report.add(Result("dtypes", f"bf16 against torch L{length} D{dim}",
                                      t["torch"] / t["bf16"], "×", goal, detail=t)))  # fmt: skip
        times = "".join(f"{1e3 * t[n]:{w}.1f}" for n, w in
                        (("fp32", 11), ("bf16", 11), ("fp16", 11), ("torch", 12)))  # fmt: skip
        print(
            f"  {dim:>4}{times}   " + "".join(f"{r.value:5.2f}× {r.mark():<10}" for r in rows),
            flush=True,
        )


def overhead(report: Report, rounds: int) -> None:
    """A call on inputs so small that only its overhead counts."""
    print("\nOverhead: B1 H1 L8 D16, causal; µs per call")
    both = rivals(Case("causal", jali.CausalMask(), None, True, (None, None)))
    for backward in (False, True):
        tensors = inputs(8, 16, grad=backward, num_heads=1)
        make = train_call if backward else call
        calls = {name: make(function, tensors) for name, function in both.items()}
        # Short turns: a busy machine then disturbs some of them, not the median.
        t = interleaved(calls, max(rounds, 51), calls=40, warmups=5)
        name = "forward + backward" if backward else "forward"
        # The promise is about one call; the step through autograd is printed beside it.
        result = report.add(Result("overhead", name, t["jali"] / t["torch"], "×",
                                   None if backward else 2.0, at_most=True, detail=t))  # fmt: skip
        print(
            f"  {name:<20}{1e6 * t['jali']:7.1f}{1e6 * t['torch']:8.1f}{result.value:7.2f}×  "
            f"{result.mark()}",
            flush=True,
        )
