"""`jali prebuild`: fills the cache of GPU kernels for masks, dims and dtypes named in words."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import torch

from ._prebuild import BuiltKernel, prebuild
from ._words import Sizes, dtypes_of, mask_of, numbers_of, split

USAGE = """\
jali prebuild [MASK ...] [N=V ...] [--common] [--packed] [--forward] [--options NAME,..]
              [--into FOLDER] [--arch sm_90a] [--threads N]
    Compiles the GPU kernels for every MASK with every D and dtype; needs no GPU. MASK and N as for
    why, each mask one word in quotes, "dense" for no mask; D, Dv and dtype take several values:
    jali prebuild causal 'causal & window(256)' D=64,128 dtype=bfloat16,float16
    --packed: those of attention_varlen, too, which are others.
    The option "dropout" stands for probabilities up to 1/2; those above have kernels of their own.
"""

#: Masks, dims and dtypes of --common.
COMMON_MASKS = ("dense", "causal", "causal & window", "causal & document")
COMMON_DIMS = (64, 128, 256)
COMMON_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Job:
    """A call whose kernels are wanted."""

    mask: str
    dtype: torch.dtype
    B: int
    H: int
    Hkv: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    options: tuple[str, ...] = ()
    packed: bool = False

    def __str__(self) -> str:
        dims = f"D={self.D}" + (f" Dv={self.Dv}" if self.Dv != self.D else "")
        options = f" with {', '.join(self.options)}" if self.options else ""
        packed = ", packed" if self.packed else ""
        return f"{self.mask} {dims} {str(self.dtype).removeprefix('torch.')}{options}{packed}"

    def run(self, backward: bool, arch: str) -> list[BuiltKernel]:
        def tokens(heads: int, length: int, width: int) -> torch.Tensor:
            return torch.empty(self.B, heads, length, width, dtype=self.dtype, device="meta")

        q = tokens(self.H, self.Lq, self.D)
        k, v = tokens(self.Hkv, self.Lk, self.D), tokens(self.Hkv, self.Lk, self.Dv)
        given: dict[str, Any] = {}
        for name in self.options:
            given.update(OPTIONS[name](self))
        if self.packed:
            q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            given["cu_seqlens_q"] = torch.arange(self.B + 1, dtype=torch.int32) * self.Lq
            given["cu_seqlens_k"] = torch.arange(self.B + 1, dtype=torch.int32) * self.Lk
        return prebuild(q, k, v, mask_of(self.mask, self.Lk), backward=backward, arch=arch, **given)


def _bias(job: Job, needs_grad: bool = False) -> dict[str, Any]:
    shape = (1, job.H, job.Lq, job.Lk)
    return {"bias": torch.empty(shape, dtype=job.dtype, device="meta", requires_grad=needs_grad)}


def _key_bias(job: Job, needs_grad: bool = False) -> dict[str, Any]:
    return {"key_bias": torch.empty(1, 1, job.Lk, device="meta", requires_grad=needs_grad)}


#: What --options takes: arguments of a call that has the option.
OPTIONS: dict[str, Any] = {
    "bias": _bias,
    "bias_grad": lambda job: _bias(job, needs_grad=True),
    "key_bias": _key_bias,
    "key_bias_grad": lambda job: _key_bias(job, needs_grad=True),
    "alibi": lambda job: {"alibi_slopes": torch.ones(job.H)},
    "softcap": lambda job: {"softcap": 30.0},
    "sinks": lambda job: {"sinks": torch.zeros(job.H)},
    "dropout": lambda job: {"dropout_p": 0.1},
    "deterministic": lambda job: {"deterministic": True},
}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="jali prebuild", usage=USAGE)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--common", action="store_true")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--options", default="")
    parser.add_argument("--into", default="")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_intermixed_args(words)


def jobs(
    words: Sequence[str], common: bool, options: Sequence[str], packed: bool = False
) -> Iterator[Job]:
    """What the words ask for; --common's dims and dtypes where they name none."""
    masks: list[str] = []
    sizes: Sizes = {}
    for word in words:
        text, found = split(word)
        masks += [text] if text else []
        sizes |= found
    numbers = {"B": 1, "H": 8, "L": 4096}
    for name in sizes.keys() - {"D", "Dv", "dtype"}:
        [numbers[name]] = numbers_of(sizes, name, most=1)
    dims = numbers_of(sizes, "D") or (list(COMMON_DIMS) if common else [128])
    dims_v = numbers_of(sizes, "Dv") or dims
    if len(dims_v) == 1:
        dims_v = dims_v * len(dims)
    if len(dims_v) != len(dims):
        raise ValueError(f"Dv has {len(dims_v)} values and D has {len(dims)}; give one or as many")
    dtypes = dtypes_of(sizes) or (list(COMMON_DTYPES) if common else [torch.bfloat16])
    if common:
        masks = [*COMMON_MASKS, *(mask for mask in masks if mask not in COMMON_MASKS)]
    L, H = numbers["L"], numbers["H"]
    for mask, dtype, (D, Dv), is_packed in itertools.product(
        masks or ["dense"],
        dtypes,
        zip(dims, dims_v, strict=True),
        [False, True] if packed else [False],
    ):
        yield Job(
            mask, dtype, numbers["B"], H, numbers.get("Hkv", H), numbers.get("Lq", L),
            numbers.get("Lk", L), D, Dv, tuple(options), is_packed,
        )  # fmt: skip


@dataclass
class Tally:
    """Prints each job as it ends, over a bar that says how far it is."""

    total: int
    begin: float = field(default_factory=time.perf_counter)
    done: int = 0
    refused: int = 0
    kernels: dict[tuple[str, str], BuiltKernel] = field(default_factory=dict)

    def end(self, job: Job, made: Future[list[BuiltKernel]]) -> None:
        self.done += 1
        try:
            built = made.result()
        except (NotImplementedError, ValueError, TypeError) as error:
            self.refused += 1
            self._line(f"  {job}: {error}")
        else:
            # Another job may have been first to compile what both need.
            for kernel in built:
                before = self.kernels.get((kernel.module, kernel.name))
                self.kernels[kernel.module, kernel.name] = (
                    before if before and before.compiled else kernel
                )
            self._line(f"  {job}: " + ", ".join(f"{x.name} {x.registers}" for x in built))
            for kernel in built:
                if not kernel.clean:
                    self._line(f"    {kernel}")
        self.bar()

    def _line(self, text: str) -> None:
        print(("\r\033[K" if sys.stdout.isatty() else "") + text, flush=True)

    def bar(self) -> None:
        if sys.stdout.isatty() and self.done < self.total:
            filled = 40 * self.done // self.total
            seconds = time.perf_counter() - self.begin
            bar = f"[{'#' * filled:40}] {self.done} of {self.total} calls, {seconds:.0f} s"
            print(f"\r\033[K{bar}", end="", flush=True)

    def close(self) -> None:
        kernels = self.kernels.values()
        compiled = sum(x.compiled for x in kernels)
        spilling = sum(not x.clean for x in kernels)
        refused = f", {self.refused} calls refused" if self.refused else ""
        print(
            f"{len(kernels)} kernels for {self.total} calls: {compiled} compiled, "
            f"{len(kernels) - compiled} found in the cache; {spilling} with spills, stack or "
            f"warnings{refused}; {time.perf_counter() - self.begin:.0f} s"
        )


def run(words: Sequence[str]) -> int:
    """The command; 1 where a call was refused."""
    asked = _parse(words)
    options = [name for name in asked.options.split(",") if name]
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"--options {name}: expected some of {', '.join(OPTIONS)}")
    if asked.into:
        os.environ["JALI_CACHE"] = asked.into
    todo = list(jobs(asked.words, asked.common, options, asked.packed))
    for job in todo:
        mask_of(job.mask, job.Lk)  # a typing error ends the command before anything is compiled
    tally = Tally(len(todo))
    print("kernels and their registers:", flush=True)
    tally.bar()
    # PERF: NVRTC 13.0 compiles in as many threads as there are, without waiting for each other.
    with ThreadPoolExecutor(asked.threads) as pool:
        pending = {pool.submit(job.run, not asked.forward, asked.arch): job for job in todo}
        for future in as_completed(pending):
            tally.end(pending[future], future)
    tally.close()
    return 1 if tally.refused else 0
