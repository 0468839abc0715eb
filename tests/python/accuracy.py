"""The accuracy rule, in one place, and the comparison of a whole attention call with the oracle.

    max|x − fp64| <= 2·max|ref − fp64| + c·(1 + max|fp64|)

fp64 is the dense oracle in fp64 on the same (already rounded) inputs; ref is PyTorch in the input's
dtype with S and P rounded to it; c = 1e-5 for 16-bit, 1e-6 for fp32; fp64 has no ref and 1e-10.
ref may hit the truth by luck: where a row sees one key, S has no gradient, and ref finds exactly
that. So it never counts as better than fp64 rounded to the dtype of the result, than fp64 gradients
given the rounded output, and, for fewer than 1,000 elements, max(eps, 4e-6) · (1 + max|fp64|).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jali
import torch
from torch import Tensor

from tests.python import oracle

_C = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}
_FEW = 1000  # elements
_LEARNT = ("q", "k", "v", "bias", "key_bias", "sinks")  # the inputs with a gradient
_ALIBI = torch.float32  # the slopes' dtype whatever q's

#: (q, k, v, **options) → (out, lse)
Run = Callable[..., tuple[Tensor, Tensor]]


def check(name: str, got: Tensor, truth: Tensor, *refs: Tensor, dtype: torch.dtype) -> None:
    """Raises AssertionError when `got` breaks the rule; −inf must stand at the same places. Of the
    references the worst counts."""
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(truth.shape)}"
    stored = got.dtype
    got, truth, *refs = (x.detach().double() for x in (got, truth, *refs))
    infinite = truth == -torch.inf
    assert torch.equal(got == -torch.inf, infinite), f"{name}: -inf at the wrong rows"
    got, truth, *refs = (x[~infinite] for x in (got, truth, *refs))
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} NaN of {got.numel()}"
    if not got.numel():
        return
    error = (got - truth).abs().max().item()
    size = 1 + truth.abs().max().item()
    allowed = _C[dtype] * size
    if dtype != torch.float64:
        errors = [(x - truth).abs().max().item() for x in (*refs, truth.to(stored))]
        if truth.numel() < _FEW:
            errors.append(max(torch.finfo(stored).eps, 4e-6) * size)
        allowed += 2 * max(errors)
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g} ({dtype})"


def check_attention(
    mask: Any, visible: Tensor, *, Hkv: int, D: int = 8, Dv: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, with_dlse: bool = True,
    options: dict[str, Any] | None = None, **more: Any,
) -> None:  # fmt: skip
    """Output, LSE and all gradients of jali.attention with `mask` against the oracle.

    visible: bool [B, Hq, Lq, Lk], what the mask means. Tensor options are given in fp64 and rounded
    to `dtype` here. `more` goes to jali.attention alone.
    """
    B, Hq, Lq, Lk = visible.shape
    shapes = ((B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv or D), (B, Hq, Lq, Dv or D))

    def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return jali.attention(q, k, v, mask, return_lse=True, **options, **more)

    def truth(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return oracle.attention(q, k, v, visible, **options)

    compare(ours, truth, shapes, (B, Hq, Lq), dtype, seed, with_dlse, options)


def check_varlen(
    mask: Any, p: oracle.Problem, cells: oracle.Cells, *, D: int = 8, Dv: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, with_dlse: bool = True,
    options: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """The same for jali.attention_varlen over the packed sequences of `p`."""
    assert p.cu_q is not None and p.cu_k is not None
    tq, tk = p.cu_q[-1], p.cu_k[-1]
    shapes = ((tq, p.Hq, D), (tk, p.Hkv, D), (tk, p.Hkv, Dv or D), (tq, p.Hq, Dv or D))
    cu = [torch.tensor(x, dtype=torch.int32) for x in (p.cu_q, p.cu_k)]

    def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return jali.attention_varlen(q, k, v, *cu, mask, return_lse=True, **options)

    def truth(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return oracle.attention_varlen(q, k, v, p, cells, **options)

    compare(ours, truth, shapes, (p.Hq, tq), dtype, seed, with_dlse, options)


def compare(
    ours: Run, truth: Run, shapes: Sequence[tuple], lse_shape: tuple, dtype: torch.dtype,
    seed: int = 0, with_dlse: bool = True, options: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Runs both forward and backward on the same random inputs and applies the rule to each
    result; `shapes` are those of q, k, v, out."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout, dlse = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        for shape in (*shapes, lse_shape)
    )
    inputs = {"q": q, "k": k, "v": v} | {
        name: x.to(_ALIBI if name == "alibi_slopes" else dtype) if isinstance(x, Tensor) else x
        for name, x in (options or {}).items()
        if name != "q_offset"
    }
    if options and "q_offset" in options:
        inputs["q_offset"] = options["q_offset"]

    upstream = dlse if with_dlse else None
    torch.set_num_threads(3)
    try:
        got = run_with_grads(ours, inputs, dout, upstream)
    finally:
        torch.set_num_threads(1)
    exact = run_with_grads(truth, inputs, dout, upstream, torch.float64)
    refs = []
    if dtype != torch.float64:
        refs.append(run_with_grads(truth, inputs, dout, upstream, dtype))
        # A backward takes sum(dout · out) from the stored output, in fp32; what that misses acts
        # as a gradient of lse.
        given = dout.float() * exact["out"].to(dtype).float()
        missed = (dout.double() * exact["out"]).sum(-1) - given.sum(-1)
        missed = missed if len(lse_shape) == 3 else missed.mT  # varlen: [Tq, Hq] to [Hq, Tq]
        dlse = missed if upstream is None else missed + upstream
        refs.append(run_with_grads(truth, inputs, dout, dlse, torch.float64))
    for name, x in got.items():
        check(name, x, exact[name], *(r[name] for r in refs or [exact]), dtype=dtype)


def run_with_grads(
    run: Run, inputs: dict[str, Any], dout: Tensor, dlse: Tensor | None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """out, lse and the gradient of every learnt input, computed in `dtype` (None: as given)."""
    inputs = {
        name: x.detach().to(dtype) if dtype and isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in inputs.items()
    }  # fmt: skip
    leaves = {name: inputs[name].detach().requires_grad_() for name in _LEARNT if name in inputs}
    out, lse = run(**(inputs | leaves))
    loss = (out * dout.to(out.dtype)).sum(dtype=lse.dtype)
    if dlse is not None:  # rows that see nothing have no gradient
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {"out": out, "lse": lse} | {
        "d" + name: torch.zeros_like(leaves[name]) if grad is None else grad
        for name, grad in zip(leaves, grads, strict=True)
    }
