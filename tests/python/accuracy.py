"""The accuracy rule, in one place, and the comparison of a whole attention call with the oracle.

    max|x − fp64| <= 2·max|ref − fp64| + c·(1 + max|fp64|)

fp64 is the dense oracle in fp64 on the same (already rounded) inputs; ref is PyTorch in the input's
dtype with S and P rounded to it; c = 1e-5 for 16-bit, 1e-6 for fp32; fp64 has no ref and 1e-10.

out, lse and dv obey exactly that, but for the largest of few errors, which is luck (below). For
other gradients the worse of two refs counts: autograd, which cancels exactly where a row sees
one key, and the formula of a flash backward, which takes sum(dout · out) from the stored, rounded
output (`grads_from_stored`). On a GPU, whose tensor cores take dS rounded, the formula also counts
as computed in the input's dtype.

For fewer than 200 elements, or visible cells (one error each, which a whole row or key is
multiplied by; under ALiBi a row of weights w counts as 1 / sum(w²)), a third ref has that sum off,
up or down, in fp32 by eps · sum|dout · out|, in 16 bits, where each of its terms was rounded by
itself, by eps / 2 · sqrt(sum(dout · out)²). Of small random problems, 1 in 30 in 16 bits needs the
second ref, 1 in 500 in fp32; 1 in 3,000 in fp32 the third.

On a GPU P is rounded as exp(S - m), m near the row's maximum. Where a result breaks the rule (1 in
2,000 problems), outputs whose P was rounded at other places between powers of two are refs, too,
and what the formula makes of them, but their errors count once, not twice. Unless cells are few:
then they count twice, and what the formula makes of them in 16 bits does, too, also from dS that
was rounded before it was multiplied by what kept weights are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jali
import torch
from torch import Tensor

from tests.python import oracle

_C = {torch.float64: 1e-10, torch.float32: 1e-6, torch.bfloat16: 1e-5, torch.float16: 1e-5}
_FEW = 200  # elements or cells: the largest error among them is a matter of luck
_LEARNT = ("q", "k", "v", "bias", "key_bias", "sinks")  # the inputs with a gradient
_ALIBI = torch.float32  # the slopes' dtype whatever q's

#: (q, k, v, **options) → (out, lse)
Run = Callable[..., tuple[Tensor, Tensor]]


def allowed_error(truth: Tensor, refs: Sequence[Tensor], dtype: torch.dtype, times: int) -> float:
    """`times` the largest error of the worst ref, and a little."""
    truth = truth.detach().double()
    seen = truth != -torch.inf
    worst = max((_largest((x.detach().double() - truth)[seen]) for x in refs), default=0.0)
    little = _C[dtype] * (1 + _largest(truth[seen]))
    return little if dtype == torch.float64 else little + times * worst


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def error_of(name: str, got: Tensor, truth: Tensor) -> float:
    """The largest one. Raises AssertionError unless −inf stands at the same places, and no NaN."""
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, not {tuple(truth.shape)}"
    got, truth = got.detach().double(), truth.detach().double()
    infinite = truth == -torch.inf
    assert torch.equal(got == -torch.inf, infinite), f"{name}: -inf at the wrong rows"
    got, truth = got[~infinite], truth[~infinite]
    assert not got.isnan().any(), f"{name}: {int(got.isnan().sum())} NaN of {got.numel()}"
    return _largest(got - truth)


def judge(name: str, error: float, allowed: float, dtype: torch.dtype) -> None:
    """Raises AssertionError when the rule is broken."""
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g} ({dtype})"


def check_attention(
    mask: Any, visible: Tensor, *, Hkv: int, D: int = 8, Dv: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, with_dlse: bool = True,
    options: dict[str, Any] | None = None, device: str = "cpu", grads: bool = True, **more: Any,
) -> None:  # fmt: skip
    """Output, LSE and all gradients of jali.attention with `mask` against the oracle.

    visible: bool [B, Hq, Lq, Lk], what the mask means. Tensor options are given in fp64 and rounded
    to `dtype` here. `more` goes to jali.attention alone. device: where jali.attention runs; the
    rest stays on the CPU. grads: False compares output and LSE alone.
    """
    B, Hq, Lq, Lk = visible.shape
    shapes = ((B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv or D), (B, Hq, Lq, Dv or D))

    def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        options = {"q": q, "k": k, "v": v, "mask": mask} | options
        return _back(jali.attention(**_moved(options, device), return_lse=True, **more))

    def truth(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return oracle.attention(q, k, v, visible, **options)

    cells = int(visible.sum())
    bent = {n: x for n, x in (options or {}).items() if n in ("alibi_slopes", "q_offset")}
    if "alibi_slopes" in bent:
        flat = [torch.zeros(B, h, n, 1, dtype=torch.float64) for h, n in ((Hq, Lq), (Hkv, Lk))]
        eye = torch.eye(Lk, dtype=torch.float64).expand(B, Hkv, Lk, Lk)
        weights = truth(*flat, eye, **bent)[0]
        cells = int((1 / (weights**2).sum(-1)).nan_to_num(posinf=0).sum())
    compare(ours, truth, shapes, (B, Hq, Lq), dtype, seed, with_dlse, options, grads, device, cells)


def check_varlen(
    mask: Any, p: oracle.Problem, cells: oracle.Cells, *, D: int = 8, Dv: int | None = None,
    dtype: torch.dtype = torch.float32, seed: int = 0, with_dlse: bool = True,
    options: dict[str, Any] | None = None, device: str = "cpu", grads: bool = True,
) -> None:  # fmt: skip
    """The same for jali.attention_varlen over the packed sequences of `p`."""
    assert p.cu_q is not None and p.cu_k is not None
    tq, tk = p.cu_q[-1], p.cu_k[-1]
    shapes = ((tq, p.Hq, D), (tk, p.Hkv, D), (tk, p.Hkv, Dv or D), (tq, p.Hq, Dv or D))
    cu = [torch.tensor(x, dtype=torch.int32) for x in (p.cu_q, p.cu_k)]

    def ours(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "mask")
        options = dict(zip(names, (q, k, v, *cu, mask), strict=True)) | options
        return _back(jali.attention_varlen(**_moved(options, device), return_lse=True))

    def truth(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return oracle.attention_varlen(q, k, v, p, cells, **options)

    visible = int(p.visible(cells).sum())
    compare(
        ours, truth, shapes, (p.Hq, tq), dtype, seed, with_dlse, options, grads, device, visible
    )


def _moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    if device == "cpu":
        return arguments
    return {name: x.to(device) if hasattr(x, "to") else x for name, x in arguments.items()}


def _back(results: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = results
    return out.cpu(), lse.cpu()


def compare(
    ours: Run, truth: Run, shapes: Sequence[tuple], lse_shape: tuple, dtype: torch.dtype,
    seed: int = 0, with_dlse: bool = True, options: dict[str, Any] | None = None,
    grads: bool = True, device: str = "cpu", cells: int = _FEW,
) -> None:  # fmt: skip
    """Runs both forward and backward on the same random inputs and applies the rule to each
    result; `shapes` are those of q, k, v, out. cells: how many are visible."""
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
    if not grads:
        return _compare_forward(ours, truth, inputs, dtype)
    torch.set_num_threads(3)
    try:
        got = run_with_grads(ours, inputs, dout, upstream)
    finally:
        torch.set_num_threads(1)
    exact = run_with_grads(truth, inputs, dout, upstream, torch.float64)
    refs = []
    if dtype != torch.float64:
        refs.append(run_with_grads(truth, inputs, dout, upstream, dtype))
        refs.append(grads_from_stored(truth, inputs, dout, upstream, exact))
    if device != "cpu":  # tensor cores take P and dS rounded
        refs.append(grads_from_stored(truth, inputs, dout, upstream, exact, dtype=dtype))
    few = {name for name, x in got.items() if min(x.numel(), cells) < _FEW}
    if dtype != torch.float64 and few:
        eps, norm = torch.finfo(dtype).eps, 1
        if dtype != torch.float32:
            eps, norm = eps / 2, 2
        for error in (eps, -eps):
            worse = grads_from_stored(truth, inputs, dout, upstream, exact, error, norm)
            refs.append({name: x for name, x in worse.items() if name in few})
    elsewhere: list[dict[str, Tensor]] = []
    for name, x in got.items():
        error = error_of(name, x, exact[name])
        own = [r[name] for r in refs if name in r]
        allowed = allowed_error(exact[name], own, dtype, 2)
        if error > allowed and device != "cpu":
            elsewhere = elsewhere or rounded_elsewhere(
                truth, inputs, dout, upstream, exact, cells < _FEW
            )
            own = [r[name] for r in elsewhere if name in r]
            times = 2 if cells < _FEW else 1
            allowed = max(allowed, allowed_error(exact[name], own, dtype, times))
        judge(name, error, allowed, dtype)


def _compare_forward(ours: Run, truth: Run, inputs: dict[str, Any], dtype: torch.dtype) -> None:
    def as_dtype(to: torch.dtype) -> dict[str, Any]:
        return {
            name: x.to(to) if isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in inputs.items()
        }

    results = ours(**inputs), truth(**as_dtype(torch.float64)), truth(**as_dtype(dtype))
    for name, got, exact, ref in zip(("out", "lse"), *results, strict=True):
        allowed = allowed_error(exact, [ref], dtype, 2)
        judge(name, error_of(name, got, exact), allowed, dtype)


def rounded_elsewhere(
    truth: Run, inputs: dict[str, Any], dout: Tensor, dlse: Tensor | None,
    exact: dict[str, Tensor], few_cells: bool,
) -> list[dict[str, Tensor]]:  # fmt: skip
    """out with P rounded to the inputs' dtype when it was divided by 2^(n / 4), and the gradients
    from that by `grads_from_stored` in fp32, and where cells are few in that dtype."""
    # In 16 bits since wide heads take P rounded for dS, too.
    dtypes = [torch.float32, dout.dtype] if few_cells else [torch.float32]
    found = []
    for n in range(4):
        lse = (exact["lse"].detach() + n / 4 * math.log(2)).float()
        out = truth(**inputs, lse=lse)[0].double() * 2 ** (n / 4)
        found.append({"out": out})
        for dtype in dtypes:
            grads = grads_from_stored(truth, inputs, dout, dlse, exact | {"out": out}, dtype=dtype)
            found.append(grads)
    if few_cells and inputs.get("dropout_p"):
        kept = 1 - inputs["dropout_p"]
        found.append(
            grads_from_stored(truth, inputs, dout, dlse, exact, dtype=dout.dtype, times=kept)
        )
    return found


def grads_from_stored(
    truth: Run, inputs: dict[str, Any], dout: Tensor, dlse: Tensor | None, exact: dict[str, Tensor],
    delta_error: float = 0, norm: int = 1, dtype: torch.dtype = torch.float32, times: float = 1,
) -> dict[str, Tensor]:  # fmt: skip
    """All gradients but dv by the formula of a flash backward, in plain PyTorch in `dtype`, from
    what an exact forward stores: the output rounded to its dtype and LSE to fp32. delta is off by
    delta_error times the norm of the terms dout · out. times: what gradients are multiplied by
    until they are there."""
    lse = exact["lse"].detach().float()
    terms = dout.float() * exact["out"].detach().to(dout.dtype).float()
    delta = terms.sum(-1) + delta_error * terms.norm(norm, dim=-1)
    delta = delta if lse.dim() == 3 else delta.mT  # varlen: [Tq, Hq] to [Hq, Tq]
    dlse = -delta if dlse is None else dlse.float() - delta
    # dS = P (dP - delta + dlse): autograd's, when delta is a gradient of the sums of P.
    grads = run_with_grads(partial(truth, lse=lse), inputs, dout, dlse, dtype, times)
    differing = grads.keys() - {"out", "lse", "dv"}
    return {name: grads[name].to(inputs[name[1:]].dtype) for name in differing}


def run_with_grads(
    run: Run, inputs: dict[str, Any], dout: Tensor, dlse: Tensor | None,
    dtype: torch.dtype | None = None, times: float = 1,
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
    grads = torch.autograd.grad(loss * times, list(leaves.values()), allow_unused=True)
    return {"out": out, "lse": lse} | {
        "d" + name: torch.zeros_like(leaves[name]) if grad is None else grad / times
        for name, grad in zip(leaves, grads, strict=True)
    }
