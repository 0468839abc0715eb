"""GPU kernels compiled before they are needed, on a machine that may have no GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ._call import heads_first, prepare
from ._convert import int_table
from ._library import raise_as_python


@dataclass(frozen=True)
class BuiltKernel:
    """A GPU kernel in the cache.

    Attributes:
        name: Of the kernel within its module: "forward", "backward", ...
        module: What it was compiled for: variant, dtype, dims, options, "cut" (packed sequences)
            and the mask's type.
        registers: Of a thread.
        stack_bytes, spill_bytes: Local memory of a thread; a good kernel has none.
        notes: The compiler's warnings on the module, e.g. C7510: serialized tensor-core products.
        compiled: By this call; False: it was in the cache.
    """

    name: str
    module: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    notes: tuple[str, ...]
    compiled: bool

    @property
    def clean(self) -> bool:
        """No stack, no spills, no warning."""
        return not (self.stack_bytes or self.spill_bytes or self.notes)

    def __str__(self) -> str:
        memory = f"{self.spill_bytes} bytes spilled, stack of {self.stack_bytes}"
        return "; ".join(
            [
                f"{self.name}: {self.registers} registers",
                memory if self.spill_bytes or self.stack_bytes else "no spills",
                *self.notes,
            ]
        )


@torch.no_grad()
def prebuild(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any = None,
    *,
    backward: bool = True,
    arch: str = "sm_90a",
    scale: float | None = None,
    bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    q_offset: int | Tensor | None = None,
    layout: Literal["bhld", "blhd"] = "bhld",
    deterministic: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> list[BuiltKernel]:
    """Compiles the GPU kernels that `attention` would run with such arguments, into the cache.

    Needs NVRTC (`pip install nvidia-cuda-nvrtc`) but no GPU. Kernels depend on dtypes, head dims,
    the structure of the mask, which options are given and whether sequences are packed; not on
    numbers of heads, or what is in a tensor. So any tensors of the right kind will do, on any
    device: meta tensors need no memory. Nor do they depend on lengths or widths, but for forwards
    of head dims up to 64, of which there may be one for short sequences and windows, and one for
    long ones: both are compiled. Five more exceptions: documents that lie behind each other have
    the kernels of packed sequences, unless they are short (`PackedDocumentMask`); a bias over rows
    and keys has other kernels where its keys or strides are odd, and, if its gradient is wanted,
    where sequences or query heads share it (pass it with the B and the heads of the calls); a
    predicate may need 64-bit numbers for long sequences; in bf16 a softcap above 56 has another
    forward than one below; a dropout_p above 0.5 has other kernels than one below, and below 0.0039
    or from 0.4102 on may have another backward.

    Args:
        q, k, v, mask: As for `attention`, or with cu_seqlens as for `attention_varlen`.
        backward: Also the kernels of the gradients; those of bias and key_bias where these have
            requires_grad.
        arch: The GPU's architecture as the compiler calls it; "sm_90a": H100, H200.
        scale, bias, key_bias, alibi_slopes, softcap, sinks, dropout_p, q_offset, layout,
            deterministic, cu_seqlens_q, cu_seqlens_k: As for `attention` and `attention_varlen`.

    Returns:
        The kernels. Their files are in the folder that JALI_CACHE names, else ~/.cache/jali.

    Raises:
        NotImplementedError: where no GPU kernel serves such a call, or the compiler is missing.
        ValueError, TypeError: as `attention`.

    Example:
        >>> q = k = v = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16, device="meta")
        >>> kernels = jali.prebuild(q, k, v, jali.CausalMask())  # doctest: +SKIP
    """
    cells = [x for x in (bias, mask) if isinstance(x, Tensor) and x.is_floating_point()]
    wanted = {
        "need_bias": any(x.requires_grad for x in cells),
        "need_key_bias": key_bias is not None and key_bias.requires_grad,
    }
    q, k, v = heads_first(layout, q, k, v)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        cu_seqlens_q = int_table(cu_seqlens_q, "prebuild", "cu_seqlens_q", 1)
        cu_seqlens_k = int_table(cu_seqlens_k, "prebuild", "cu_seqlens_k", 1)
    if sinks is not None:
        sinks = sinks.to(torch.float32)  # as a call on a GPU does
    given = prepare(
        q,
        k,
        mask,
        scale,
        bias,
        key_bias,
        alibi_slopes,
        softcap,
        sinks,
        dropout_p,
        0,
        q_offset,
        deterministic,
        cu_seqlens_q,
        cu_seqlens_k,
    )
    try:
        text = torch.ops.jali.prebuild(
            q, k, v, **given, **wanted, backward=backward, arch=list(arch.encode())
        )
    except RuntimeError as error:
        raise_as_python(error)
    fields = bytes(text).decode().split("\0")[:-1]
    modules = zip(fields[::4], fields[1::4], fields[3::4], strict=True)
    return [x for name, log, now in modules for x in _kernels(name, log, now == "1")]


def _kernels(module: str, log: str, compiled: bool) -> list[BuiltKernel]:
    """From the compiler's log, which tells of each kernel behind its name."""
    _, *parts = re.split(r"Compiling entry function '(\w+)'", log)
    notes = tuple(
        dict.fromkeys(line.strip() for line in re.findall(r".*(?:\(C\d+\)|warning).*", log))
    )
    built = []
    for name, report in zip(parts[::2], parts[1::2], strict=True):
        registers = re.search(r"Used (\d+) registers", report)
        # Functions that were not inlined have a line of their own.
        lines = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        if registers is None or not lines:
            raise RuntimeError(f"the compiler's report on {name} is not as expected:\n{log}")
        stack, stores, loads = (sum(map(int, column)) for column in zip(*lines, strict=True))
        built.append(
            BuiltKernel(name, module, int(registers[1]), stack, max(stores, loads), notes, compiled)
        )
    return built
