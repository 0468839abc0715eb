"""JALI_CHECK: what a call on a GPU does not check, because it would have to wait for the GPU.

"values" copies tables, offsets and cu_seqlens to the CPU and checks their contents before the call;
"cpu" also repeats the forward on the CPU and compares. Both are slow: for finding faults.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from . import _ops
from ._library import raise_as_python

LEVEL = os.environ.get("JALI_CHECK", "")
if LEVEL not in ("", "values", "cpu"):
    raise ImportError(f"JALI_CHECK={LEVEL}: expected values or cpu")

#: Largest difference of a 16-bit result, of 1 + the largest value.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


def check_values(q: Tensor, k: Tensor, given: _ops.Given) -> None:
    """Raises what the CPU backend would say of the same tables."""
    options = _ops.Options(**_on_cpu(given))
    packed = options.cu_seqlens_q is not None
    if packed:
        assert options.cu_seqlens_q is not None
        B, (Tq, Hq, _), (Tk, Hkv, _) = options.cu_seqlens_q.shape[0] - 1, q.shape, k.shape
        Lq, Lk = 0, 0
        for name, tokens in (("q", Tq), ("k", Tk)):
            cu = getattr(options, f"cu_seqlens_{name}")
            if len(cu) > 0 and int(cu[-1]) > tokens:
                raise ValueError(
                    f"cu_seqlens_{name} ends at {int(cu[-1])}, but {name} has {tokens} tokens"
                )
    else:
        (B, Hq, Lq, _), (_, Hkv, Lk, _) = q.shape, k.shape
        Tq = Tk = -1
    try:
        torch.ops.jali.mask_varies(
            options.tables or [], options.scalars or [], options.program or [], B, Hq, Hkv, Lq, Lk,
            options.q_offsets, options.q_offset, options.cu_seqlens_q, options.cu_seqlens_k, Tq, Tk,
        )  # fmt: skip
    except RuntimeError as error:
        raise_as_python(error)


@torch.no_grad()
def check_results(
    q: Tensor, k: Tensor, v: Tensor, given: _ops.Given, out: Tensor, lse: Tensor
) -> None:
    """Compares the forward with the CPU backend's."""
    expected = _ops.forward(q.cpu(), k.cpu(), v.cpu(), **_on_cpu(given))
    for name, got, want in zip(("out", "lse"), (out, lse), expected, strict=True):
        a, b = got.detach().cpu().double(), want.double()
        difference = torch.where(a == b, 0, (a - b).abs())  # infinities are equal
        finite = b[b.isfinite()]
        allowed = _TOLERANCE[q.dtype] * (1 + (finite.abs().max().item() if finite.numel() else 0))
        wrong = ~(difference <= allowed)
        if wrong.any():
            at = tuple(int(x) for x in wrong.nonzero()[0])
            raise RuntimeError(
                f"JALI_CHECK=cpu: {name} differs from the CPU backend in {int(wrong.sum())} of "
                f"{wrong.numel()} elements, first at {list(at)}: {a[at].item():.6g} on the GPU, "
                f"{b[at].item():.6g} on the CPU; please report the call"
            )


def _on_cpu(given: _ops.Given) -> dict[str, Any]:
    def moved(x: Any) -> Any:
        if isinstance(x, Tensor):
            return x.detach().cpu()
        return [moved(y) for y in x] if isinstance(x, list) else x

    return {name: moved(x) for name, x in given.items()}
