"""Wrong arguments: the right exception, and a message that says what was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jali
import pytest
import torch


def qkv(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    usual = {"q": (2, 4, 10, 8), "k": (2, 2, 12, 8), "v": (2, 2, 12, 8)} | shapes
    return {name: torch.zeros(shape) for name, shape in usual.items()}


def attention(mask: Any = None, dtype: torch.dtype | None = None, **arguments: Any) -> Any:
    """A call that is right but for `arguments`; shapes may stand for q, k and v."""
    shapes = {n: arguments.pop(n) for n in "qkv" if isinstance(arguments.get(n), tuple)}
    inputs = {n: x.to(dtype or x.dtype) for n, x in qkv(**shapes).items()}
    return jali.attention(**(inputs | arguments), mask=mask)


def varlen(cu_q: Any, cu_k: Any, mask: Any = None, **arguments: Any) -> Any:
    q, k, v = torch.zeros(10, 4, 8), torch.zeros(12, 2, 8), torch.zeros(12, 2, 8)
    inputs = {"q": q, "k": k, "v": v} | arguments
    return jali.attention_varlen(
        **inputs, cu_seqlens_q=torch.as_tensor(cu_q), cu_seqlens_k=torch.as_tensor(cu_k), mask=mask
    )


def learnt(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fails(
    kind: type[Exception] | tuple[type[Exception], ...], words: str, call: Callable[[], Any]
) -> Any:
    """`words` must all be in the message, in any order."""
    return pytest.param(kind, words.split(), call, id=words.replace(" ", "-"))


SHAPES = [
    fails(ValueError, "q 3 [B,", lambda: attention(q=(4, 10, 8))),
    fails(ValueError, "k 2 [B,", lambda: attention(k=(12, 8))),
    fails(ValueError, "4 3 divide heads", lambda: attention(k=(2, 3, 12, 8), v=(2, 3, 12, 8))),
    fails(ValueError, "k v agree [2,", lambda: attention(v=(2, 2, 13, 8))),
    fails(ValueError, "k v agree heads|dim", lambda: attention(v=(2, 4, 12, 8))),
    fails(ValueError, "batch agree", lambda: attention(q=(3, 4, 10, 8))),
    fails(ValueError, "head dim 8 9 equal", lambda: attention(k=(2, 2, 12, 9))),
    fails(ValueError, "D 1025 1024", lambda: attention(q=(1, 1, 2, 1025), k=(1, 1, 2, 1025),
                                                       v=(1, 1, 2, 8))),
    fails(ValueError, "Dv 1025 1024", lambda: attention(v=(2, 2, 12, 1025))),
    fails(ValueError, "D 0 1", lambda: attention(q=(2, 4, 10, 0), k=(2, 2, 12, 0))),
    fails(ValueError, "bias [2, 4, 10, 13]", lambda: attention(bias=torch.zeros(2, 4, 10, 13))),
    fails(ValueError, "bias heads 3", lambda: attention(bias=torch.zeros(1, 3, 10, 12))),
    fails(ValueError, "key_bias [2, 2, 10]", lambda: attention(key_bias=torch.zeros(2, 2, 10))),
    fails(ValueError, "sinks [3] Hq", lambda: attention(sinks=torch.zeros(3))),
    fails(ValueError, "alibi_slopes [2] Hq", lambda: attention(alibi_slopes=torch.zeros(2))),
    fails(ValueError, "q_offset [3] B", lambda: attention(q_offset=ints(1, 2, 3))),
    fails(ValueError, "q_offset 2^30", lambda: attention(q_offset=2**40)),
    fails(ValueError, "layout bhld blhd", lambda: attention(layout="lbhd")),
]  # fmt: skip

DTYPES = [
    fails(TypeError, "q int64 float32", lambda: attention(dtype=torch.int64)),
    fails(TypeError, "complex|Complex float32", lambda: attention(dtype=torch.complex64)),
    fails(TypeError, "k float64 q float32", lambda: attention(k=torch.zeros(2, 2, 12, 8).double())),
    fails(TypeError, "bias float64", lambda: attention(bias=torch.zeros(2, 4, 10, 12).double())),
    fails(TypeError, "sinks int64", lambda: attention(sinks=torch.zeros(4).long())),
    fails(TypeError, "q_offset", lambda: attention(q_offset=1.5)),
    fails(TypeError, "seed", lambda: attention(dropout_p=0.5, seed=1.5)),
    fails(TypeError, "mask", lambda: attention(mask="causal")),
    fails(TypeError, "q", lambda: attention(q=[[1.0]])),
]

NUMBERS = [
    fails(ValueError, "dropout_p 1.5", lambda: attention(dropout_p=1.5)),
    fails(ValueError, "dropout_p -0.1", lambda: attention(dropout_p=-0.1)),
    fails(ValueError, "dropout_p nan", lambda: attention(dropout_p=float("nan"))),
    fails(ValueError, "softcap -1", lambda: attention(softcap=-1.0)),
    fails(ValueError, "scale inf", lambda: attention(scale=float("inf"))),
]

STRIDES = [
    fails(ValueError, "k stride last contiguous",
          lambda: attention(k=torch.zeros(2, 2, 8, 12).transpose(-1, -2))),
    fails(ValueError, "q stride last contiguous",
          lambda: attention(q=torch.zeros(2, 4, 10, 16)[..., ::2])),
    fails(ValueError, "v stride last contiguous",
          lambda: attention(v=torch.zeros(2, 2, 12, 1).expand(2, 2, 12, 8))),
]  # fmt: skip

DEVICES = [
    fails((NotImplementedError, TypeError, ValueError), "device meta|q", lambda: attention(
        q=torch.zeros(2, 4, 10, 8, device="meta"))),
    fails((TypeError, ValueError), "device bias|meta", lambda: attention(
        bias=torch.zeros(1, 1, 1, 12, device="meta"))),
]  # fmt: skip

OPTIONS = [
    fails(ValueError, "seed 64 bits", lambda: attention(dropout_p=0.1, seed=2**63)),
    fails(ValueError, "left 64 bits", lambda: attention(jali.WindowMask(2**70, 0))),
    fails(TypeError, "v tensor list", lambda: attention(v=[0.5])),
    fails(ValueError, "q 2 dims [B, L, heads, D]", lambda: attention(
        q=torch.zeros(3, 8), layout="blhd")),
    fails(TypeError, "bias tensor float", lambda: attention(bias=0.5)),
    fails(TypeError, "key_bias tensor list", lambda: attention(key_bias=[0.5])),
    fails(TypeError, "alibi_slopes tensor list", lambda: attention(alibi_slopes=[1.0] * 4)),
    fails(TypeError, "sinks tensor float", lambda: attention(sinks=0.0)),
    fails(NotImplementedError, "scale gradient detach", lambda: attention(scale=learnt())),
    fails(NotImplementedError, "softcap gradient detach", lambda: attention(softcap=learnt())),
    fails(NotImplementedError, "alibi_slopes gradient detach", lambda: attention(
        alibi_slopes=learnt(4))),
    fails(TypeError, "seed meta cpu", lambda: attention(
        dropout_p=0.1, seed=torch.zeros((), dtype=torch.int64, device="meta"))),
    fails(TypeError, "q_offset meta cpu", lambda: attention(
        q_offset=torch.zeros(2, dtype=torch.int32, device="meta"))),
]  # fmt: skip

VARLEN = [
    fails(ValueError, "cu_seqlens_q decrease 2 7 3", lambda: varlen([0, 7, 3, 10], [0, 4, 8, 12])),
    fails(ValueError, "cu_seqlens_k decrease", lambda: varlen([0, 4, 10], [0, 13, 12])),
    fails(ValueError, "cu_seqlens_q [0] 0", lambda: varlen([1, 10], [0, 12])),
    fails(ValueError, "cu_seqlens entries 3", lambda: varlen([0, 4, 10], [0, 12])),
    fails(ValueError, "cu_seqlens end 11 tokens 10", lambda: varlen([0, 11], [0, 12])),
    fails(ValueError, "cu_seqlens end 13 tokens 12", lambda: varlen([0, 10], [0, 13])),
    fails((TypeError, ValueError), "cu_seqlens_q", lambda: varlen([0.0, 10.0], [0, 12])),
    fails(ValueError, "cu_seqlens_q dims|[", lambda: varlen([[0, 10]], [0, 12])),
    fails(ValueError, "q [tokens, heads,", lambda: varlen([0, 10], [0, 12],
                                                          q=torch.zeros(1, 4, 10, 8))),
    fails(ValueError, "key_bias 13", lambda: varlen([0, 10], [0, 12], key_bias=torch.zeros(1, 13))),
    fails(ValueError, "key_padding keep 11", lambda: varlen(
        [0, 5, 10], [0, 12, 12], jali.KeyPaddingMask(torch.ones(11).bool()))),
]  # fmt: skip

MASKS = [
    fails(ValueError, "key_padding keep 11 Lk 12", lambda: attention(
        jali.KeyPaddingMask(torch.ones(2, 11).bool()))),
    fails(ValueError, "keep batch 3 2", lambda: attention(
        jali.KeyPaddingMask(torch.ones(3, 12).bool()))),
    fails(ValueError, "window left heads 3", lambda: attention(jali.WindowMask(ints(1, 2, 3), 0))),
    fails(ValueError, "prefix length [3] B", lambda: attention(jali.PrefixMask(ints(1, 2, 3)))),
    fails(ValueError, "document", lambda: attention(
        jali.DocumentMask(torch.zeros(2, 9).int(), torch.zeros(2, 12).int()))),
    fails(ValueError, "dense tensor", lambda: attention(
        jali.DenseMask(torch.ones(2, 4, 9, 12).bool()))),
    fails(ValueError, "blocks rows|columns", lambda: attention(
        jali.BlockSparseMask(torch.ones(3, 2).bool(), block=(2, 2)))),
    fails(ValueError, "row_ptr decrease", lambda: attention(
        jali.BlockSparseMask.from_csr(ints(0, 2, 1), ints(0, 1, 2), block=(5, 4)))),
    fails(ValueError, "row_ptr col_idx", lambda: attention(
        jali.BlockSparseMask.from_csr(ints(0, 2, 9), ints(0, 1, 2), block=(5, 4)))),
    fails(ValueError, "col_idx increase|sort|ascending", lambda: attention(
        jali.BlockSparseMask.from_csr(ints(0, 2, 3), ints(1, 0, 2), block=(5, 4)))),
    fails(ValueError, "indices", lambda: attention(
        jali.TokenIndexMask(torch.full((1, 1, 10, 2), 12).int()))),
    fails(ValueError, "indices", lambda: attention(
        jali.TokenIndexMask(torch.zeros(1, 1, 4, 2).int()))),
    fails(ValueError, "scores", lambda: attention(
        jali.DynamicMask(torch.zeros(2, 2, 11), keep=3))),
    fails(ValueError, "NeighborhoodMask kernel dilation shape", lambda: jali.NeighborhoodMask(
        8, 5, dilation=2)),
    fails(ValueError, "NeighborhoodMask shape 1 3 dims", lambda: jali.NeighborhoodMask(
        (2, 2, 2, 2), 1)),
    fails(ValueError, "DilatedMask step 1", lambda: jali.DilatedMask(0)),
    fails(TypeError, "CausalMask offset int", lambda: jali.CausalMask(offset=0.5)),
    fails(TypeError, "DocumentMask q_ids int32", lambda: jali.DocumentMask(torch.zeros(4))),
    fails(ValueError, "DocumentMask 32 bits", lambda: jali.DocumentMask(torch.tensor([2**40]))),
    fails(TypeError, "DenseMask bool bias", lambda: jali.DenseMask(torch.zeros(4, 4))),
    fails(ValueError, "KeyIntervalMask start end None", lambda: jali.KeyIntervalMask(None, None)),
    fails(ValueError, "DynamicMask keep 0", lambda: jali.DynamicMask(torch.zeros(4), keep=-1)),
    fails(ValueError, "threshold NaN", lambda: jali.DynamicMask(
        torch.zeros(4), threshold=float("nan"))),
    fails((TypeError, ValueError), "within", lambda: jali.DynamicMask(
        torch.zeros(4), keep=2, within=jali.WindowMask(2, 0))),
    fails(TypeError, "Mask sides", lambda: jali.CausalMask() & torch.ones(3, 3).bool()),
    fails(TypeError, "truth &", lambda: bool(jali.CausalMask())),
    fails(ValueError, "tile 1", lambda: jali.CausalMask().tiles(1, 1, 4, 4, tile=(0, 4))),
    fails(ValueError, "dense tensor [3, Lq", lambda: attention(torch.ones(3, 12).bool())),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    SHAPES + DTYPES + NUMBERS + OPTIONS + STRIDES + DEVICES + VARLEN + MASKS,
)
def test_message(kind: type[Exception], words: list[str], call: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    for word in words:  # "a|b": one of them
        assert any(w in text for w in word.split("|")), f"no {word!r} in: {text}"
    assert "\n  File" not in text and ".cpp" not in text, f"internals in: {text}"
    assert len(text) > 20, f"too short to help: {text}"


@pytest.mark.gpu
def test_cuda_mask_with_cpu_inputs() -> None:
    mask = jali.KeyPaddingMask(torch.ones(2, 12).bool()).to("cuda")
    with pytest.raises(TypeError, match=r"(?s)GPU.*CPU.*\.to"):
        attention(mask)


def test_a_failed_call_leaves_the_library_usable() -> None:
    with pytest.raises(ValueError, match="dropout_p"):
        attention(dropout_p=2.0)
    assert attention().shape == (2, 4, 10, 8)


@pytest.mark.parametrize("order", ["vmap", "forward-mode"])
def test_unsupported_transforms_raise(order: str) -> None:
    q = torch.randn(3, 1, 1, 4, 8)
    if order == "vmap":
        with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)vmap"):
            torch.vmap(jali.attention)(q, q, q)
    else:
        with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)forward|jvp"):
            torch.func.jvp(lambda x: jali.attention(x, q[0], q[0]), (q[0],), (q[0],))


def test_checks_of_gpu_calls_see_what_the_cpu_sees() -> None:
    from jali import _check, _ops

    q = torch.randn(30, 2, 8)
    cu = torch.tensor([0, 20, 10, 30], dtype=torch.int32)
    given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    with pytest.raises(ValueError, match="decreases"):
        _check.check_values(q, q, given)
    far = torch.tensor([0, 31], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q ends at 31, but q has 30 tokens"):
        _check.check_values(q, q, {"cu_seqlens_q": far, "cu_seqlens_k": far})
    fine = {"cu_seqlens_q": cu.sort()[0], "cu_seqlens_k": cu.sort()[0]}
    _check.check_values(q, q, fine)
    q = q.bfloat16()
    out, lse = _ops.forward(q, q, q, **fine)
    _check.check_results(q, q, q, fine, out, lse)
    out[3, 1, 2] += 0.5
    with pytest.raises(RuntimeError, match=r"out differs .* first at \[3, 1, 2\]"):
        _check.check_results(q, q, q, fine, out, lse)
