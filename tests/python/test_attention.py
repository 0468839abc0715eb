"""jali.attention beyond masks: shapes, layouts, options, special values, determinism, resources."""

from __future__ import annotations

import itertools
import math
import threading
from typing import Any

import jali
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.python import oracle
from tests.python.accuracy import check_attention, check_varlen, compare

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def all_visible(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def causal(B: int, H: int, Lq: int, Lk: int) -> Tensor:
    cells = torch.arange(Lk) <= torch.arange(Lq)[:, None] + Lk - Lq
    return cells.expand(B, H, Lq, Lk)


def qkv(B: int, Hq: int, Hkv: int, Lq: int, Lk: int, D: int, Dv: int | None = None, **kw: Any):
    g = torch.Generator().manual_seed(0)
    shapes = ((B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv or D))
    return [torch.randn(s, generator=g, **kw) for s in shapes]


def forward_backward(q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = jali.attention(*leaves, mask, return_lse=True, **options)
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).to(out.dtype)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)]


# ---- shapes ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("Lq", "Lk"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 70), (70, 1)])
def test_short(Lq: int, Lk: int, dtype: torch.dtype) -> None:
    check_attention(None, all_visible(2, 4, Lq, Lk), Hkv=2, D=8, Dv=5, dtype=dtype)


def test_no_batch() -> None:
    q, k, v = qkv(0, 2, 1, 5, 6, 4)
    assert jali.attention(q, k, v).shape == (0, 2, 5, 4)


D_SAMPLES = [1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 63, 64, 65, 80, 96, 127, 128, 129, 192, 255, 256,
             257, 511, 576, 777, 1000, 1023, 1024]  # fmt: skip


@pytest.mark.parametrize("D", D_SAMPLES)
def test_head_dims(D: int) -> None:
    dtype = DTYPES[D % 4]
    check_attention(jali.CausalMask(), causal(1, 2, 37, 45), Hkv=1, D=D, dtype=dtype)


@pytest.mark.parametrize(("D", "Dv"), [(1, 1024), (1024, 1), (64, 80), (192, 128), (7, 9)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_dim_differs(D: int, Dv: int, dtype: torch.dtype) -> None:
    check_attention(jali.CausalMask(), causal(1, 2, 20, 33), Hkv=2, D=D, Dv=Dv, dtype=dtype)


@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3), (7, 1), (5, 5)])
def test_grouped_heads(Hq: int, Hkv: int) -> None:
    check_attention(jali.CausalMask(), causal(2, Hq, 30, 30), Hkv=Hkv, D=8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("L", [63, 64, 65, 200, 257])
def test_no_mask(L: int, dtype: torch.dtype) -> None:
    check_attention(None, all_visible(1, 2, L, L + 3), Hkv=1, D=32, dtype=dtype)


# ---- strides and layouts ----


def strided(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory layouts."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    slow = torch.full((x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[3]), torch.nan).to(x.dtype)
    slow[:, :, ::2] = x
    return {
        "blhd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "padded rows": wide[..., : x.shape[-1]],
        "every other row": slow[:, :, ::2],
        "heads outermost": x.transpose(0, 1).contiguous().transpose(0, 1),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", strided(torch.zeros(1, 1, 1, 1)))
def test_strides(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, 4, 2, 33, 40, 8, dtype=dtype)
    plain = forward_backward(q, k, v, jali.CausalMask())
    other = forward_backward(*(strided(x)[name] for x in (q, k, v)), jali.CausalMask())
    for a, b in zip(plain, other, strict=True):
        assert torch.equal(a, b)


def test_stride_zero() -> None:
    q, k, v = qkv(1, 1, 1, 33, 40, 8)
    wide = [x.expand(2, 4, -1, -1) for x in (q, k, v)]
    mask = jali.CausalMask()
    for a, b in zip(
        forward_backward(*wide, mask),
        forward_backward(*(x.contiguous() for x in wide), mask),
        strict=True,
    ):
        assert torch.equal(a, b)
    rows = k[:, :, :1].expand(1, 1, 40, 8)
    same = jali.attention(q, rows, v, mask)
    assert torch.equal(same, jali.attention(q, rows.contiguous(), v, mask))


def test_expanded_dout() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 20, 20, 8))
    out = jali.attention(q, k, v)
    ones = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), ones, strict=True):
        assert torch.equal(a, b)


def test_strided_dout() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 20, 24, 8))
    dout = torch.randn(1, 2, 8, 20).transpose(2, 3)
    plain = torch.autograd.grad(jali.attention(q, k, v), (q, k, v), dout.contiguous())
    for a, b in zip(torch.autograd.grad(jali.attention(q, k, v), (q, k, v), dout), plain):
        assert torch.equal(a, b)


def test_output_has_the_stride_order_of_q() -> None:
    q, k, v = qkv(2, 4, 2, 9, 9, 8, Dv=5)
    assert jali.attention(q, k, v).is_contiguous()
    q = strided(q)["blhd"]
    assert jali.attention(q, k, v).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("return_lse", [False, True])
def test_layout_blhd(return_lse: bool) -> None:
    q, k, v = qkv(2, 4, 2, 9, 12, 8, Dv=5)
    kw = {"mask": jali.CausalMask(), "return_lse": return_lse}
    one = jali.attention(q, k, v, **kw)
    two = jali.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="blhd", **kw)
    if return_lse:
        assert torch.equal(one[1], two[1])  # [B, Hq, Lq] in both
        one, two = one[0], two[0]
    assert torch.equal(one, two.transpose(1, 2))


# ---- rows that see nothing, special values ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    mask = jali.CausalMask(offset=-20)  # the first 20 rows
    visible = (torch.arange(90) <= torch.arange(90)[:, None] - 20).expand(1, 2, 90, 90)
    check_attention(mask, visible, Hkv=1, D=16, dtype=dtype)
    q, k, v = qkv(1, 2, 1, 90, 90, 16, dtype=dtype)
    out, lse, dq, dk, _ = forward_backward(q, k, v, mask)
    assert (out[:, :, :20] == 0).all() and (dq[:, :, :20] == 0).all()
    assert (lse[:, :, :20] == -torch.inf).all() and torch.isfinite(lse[:, :, 20:]).all()
    assert (dk[:, :, 70:] == 0).all()  # keys that nobody sees


def test_rows_with_a_sink_only() -> None:
    sinks = torch.tensor([0.5, -3.0])
    q, k, v = qkv(1, 2, 1, 6, 5, 4)
    out, lse = jali.attention(q, k, v, jali.PrefixMask(0), sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 6))
    check_attention(
        jali.CausalMask(offset=-3), torch.ones(9, 9).tril(-3).bool().expand(1, 2, 9, 9), Hkv=2,
        options={"sinks": torch.tensor([0.5, -3.0])},
    )  # fmt: skip


def test_scores_of_minus_infinity() -> None:
    key_bias = torch.zeros(1, 1, 70)
    key_bias[..., ::2] = -torch.inf
    q, k, v = qkv(1, 2, 1, 70, 70, 8)
    seen = jali.attention(q, k, v, key_bias=key_bias)
    masked = jali.attention(q, k, v, jali.KeyPaddingMask(key_bias[:, 0] == 0))
    torch.testing.assert_close(seen, masked)
    key_bias[:] = -torch.inf
    out, lse = jali.attention(q, k, v, key_bias=key_bias, return_lse=True)
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_special_values_propagate_as_in_sdpa(where: str, value: float) -> None:
    inputs = dict(zip("qkv", qkv(1, 1, 1, 70, 70, 8), strict=True))
    inputs[where][0, 0, 5, 3] = value
    ours = jali.attention(*inputs.values())
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = torch.nn.functional.scaled_dot_product_attention(*inputs.values())
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_special_values_in_invisible_keys_do_not_leak(value: float) -> None:
    q, k, v = qkv(1, 2, 1, 130, 130, 8)
    mask = jali.PrefixMask(100)
    clean = forward_backward(q, k, v, mask)
    for x in (k, v):
        x[:, :, 100:] = value
    for a, b in zip(clean, forward_backward(q, k, v, mask), strict=True):
        torch.testing.assert_close(a, b)  # such tiles sum in another order


def test_large_scores() -> None:
    q, k, v = qkv(1, 1, 1, 40, 40, 8)
    out, lse = jali.attention(q * 1e3, k * 1e3, v, return_lse=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


# What is left unwritten shows here only by chance; test_process.py runs these with new memory full
# of huge numbers and NaN.


def assert_written(*tensors: Tensor, **where: Any) -> None:
    for n, x in enumerate(tensors):
        assert (x.abs() < 1e4).all(), f"result {n} holds what nobody wrote {where or ''}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_left_unwritten(dtype: torch.dtype) -> None:
    q, k, v = qkv(1, 2, 1, 130, 70, 24, dtype=dtype)
    mask = jali.WindowMask(3, 2, offset=-9)  # empty rows at both ends, unseen keys in between
    out, lse, *grads = forward_backward(q, k, v, mask)
    assert_written(out, lse.masked_fill(lse == -torch.inf, 0), *grads)


@pytest.mark.parametrize(
    "lengths", [(2, 0, 0), (2, 0, 5), (2, 5, 0), (0, 3, 4), (2, 3, 4), (1, 70, 65)], ids=str
)
def test_no_bias_gradient_is_left_unwritten(lengths: tuple[int, int, int]) -> None:
    B, Lq, Lk = lengths
    q, k, v = (x.requires_grad_() for x in qkv(B, 4, 2, Lq, Lk, 8))
    for shape in itertools.product({1, B}, (1, 2, 4), {1, Lq}, {1, Lk}):
        learnt = [torch.zeros(s, requires_grad=True) for s in (shape, (1, 2, Lk), (4,))]
        bias, key_bias, sinks = learnt
        out = jali.attention(q, k, v, bias=bias, key_bias=key_bias, sinks=sinks)
        assert_written(out, *torch.autograd.grad(out.sum(), [q, k, v, *learnt]), bias=shape)


VARLEN_EDGES = [
    ([0], [0]), ([0, 0], [0, 0]), ([0, 22], [0, 0]), ([0, 0], [0, 5]), ([0, 3, 3, 5], [0, 0, 4, 4])
]  # fmt: skip


@pytest.mark.parametrize("behind", [0, 2])
@pytest.mark.parametrize("bounds", VARLEN_EDGES, ids=str)
def test_nothing_is_left_unwritten_by_varlen(
    bounds: tuple[list[int], list[int]], behind: int
) -> None:
    cu_q, cu_k = map(torch.tensor, bounds)
    N, tq, tk = len(cu_q) - 1, int(cu_q[-1]) + behind, int(cu_k[-1]) + behind
    longest = [max(torch.diff(cu).tolist(), default=0) for cu in (cu_q, cu_k)]
    inputs = [torch.randn(s, requires_grad=True) for s in ((tq, 4, 8), (tk, 2, 8), (tk, 2, 8))]
    for shape in itertools.product({1, N}, (1, 4), {1, longest[0]}, {1, longest[1]}):
        learnt = [torch.zeros(s, requires_grad=True) for s in (shape, (4, tk), (4,))]
        bias, key_bias, sinks = learnt
        out = jali.attention_varlen(*inputs, cu_q, cu_k, bias=bias, key_bias=key_bias, sinks=sinks)
        assert_written(out, *torch.autograd.grad(out.sum(), [*inputs, *learnt]), bias=shape)


# ---- options ----

G = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=G, dtype=torch.float64)


OPTIONS = {
    "scale": {"scale": 0.2},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": randn(2, 4, 70, 90)},
    "bias_rows": {"bias": randn(1, 2, 70, 1)},
    "key_bias": {"key_bias": randn(2, 2, 90)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])},
    "sinks": {"sinks": randn(4)},
    "dropout": {"dropout_p": 0.3, "seed": 11},
    "q_offset": {"q_offset": 5},
    "q_offset_tensor": {"q_offset": torch.tensor([5, -7], dtype=torch.int32)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*OPTIONS, "all"])
def test_options(name: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {}
    for one in OPTIONS.values() if name == "all" else (OPTIONS[name],):
        options |= one
    offset = options.get("q_offset", 20)
    offset = offset.tolist() if isinstance(offset, Tensor) else [offset] * 2
    visible = torch.stack(
        [(torch.arange(90) <= torch.arange(70)[:, None] + o).expand(4, 70, 90) for o in offset]
    )
    check_attention(jali.CausalMask(), visible, Hkv=2, D=16, Dv=12, dtype=dtype, options=options)


def test_bias_gradients_of_many_rows() -> None:
    """One fp32 chain over the rows breaks the rule by a factor of 3."""
    biases = {"bias": torch.zeros(1, 1, 1, 1), "key_bias": torch.zeros(1, 1, 32)}
    check_attention(None, all_visible(1, 1, 16384, 32), Hkv=1, options=biases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_agrees_with_the_oracle(dtype: torch.dtype) -> None:
    """jali.reference.attention is the specification; the oracle is an independent reading."""
    options: dict[str, Any] = {}
    for one in OPTIONS.values():
        options |= one
    offset = options["q_offset"]
    visible = torch.arange(90) <= (torch.arange(70)[:, None] + offset[:, None, None])[:, None]
    visible = visible.expand(2, 4, 70, 90)

    def specification(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        return jali.reference.attention(q, k, v, jali.CausalMask(), return_lse=True, **kw)

    def truth(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Any:
        return oracle.attention(q, k, v, visible, **kw)

    shapes = ((2, 4, 70, 16), (2, 2, 90, 16), (2, 2, 90, 12), (2, 4, 70, 12))
    compare(specification, truth, shapes, (2, 4, 70), dtype, options=options)


def test_softcap_zero_is_off() -> None:
    q, k, v = qkv(1, 1, 1, 9, 9, 8)
    assert torch.equal(jali.attention(q, k, v, softcap=0.0), jali.attention(q, k, v))


def test_probabilities() -> None:
    q, k, v = qkv(1, 2, 1, 9, 12, 8)
    out, probs = jali.attention(q, k, v, jali.CausalMask(), return_probs=True)
    assert probs.shape == (1, 2, 9, 12)
    torch.testing.assert_close(probs.sum(-1), torch.ones(1, 2, 9))
    torch.testing.assert_close(probs @ v.repeat_interleave(2, dim=1), out)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_what_sdpa_takes_as_attn_mask(kind: str) -> None:
    q, k, v = qkv(2, 4, 4, 20, 30, 8)
    mask = torch.rand(2, 1, 20, 30) < 0.5 if kind == "bool" else torch.randn(20, 30)
    if kind == "bool":
        mask[..., 0] = True
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(jali.attention(q, k, v, mask), theirs, rtol=1e-4, atol=1e-5)


def test_a_float_mask_is_a_bias_with_a_gradient() -> None:
    q, k, v = qkv(1, 2, 2, 20, 30, 8)
    mask = torch.randn(20, 30, requires_grad=True)
    dout = torch.randn(1, 2, 20, 8)
    (ours,) = torch.autograd.grad(jali.attention(q, k, v, mask), mask, dout)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    (theirs,) = torch.autograd.grad(theirs, mask, dout)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_float_mask_adds_to_a_bias() -> None:
    q, k, v = qkv(1, 2, 2, 20, 30, 8)
    mask, bias = torch.randn(20, 30), torch.randn(1, 2, 20, 30)
    both = jali.attention(q, k, v, mask, bias=bias)
    torch.testing.assert_close(both, jali.attention(q, k, v, bias=bias + mask))


# ---- dropout ----


def dropped(mask: Any, B: int, H: int, Lq: int, Lk: int, p: float, seed: Any) -> Tensor:
    """Which cells the library keeps: equal scores and one-hot values make out show the weights."""
    q, k = torch.zeros(B, H, Lq, 4), torch.zeros(B, 1, Lk, 4)
    v = torch.eye(Lk).expand(B, 1, Lk, Lk)
    return jali.attention(q, k, v, mask, dropout_p=p, seed=seed) != 0


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**40 + 7, torch.tensor(12345)])
def test_dropout_numbers(p: float, seed: Any) -> None:
    numbers = oracle.dropout_numbers(int(seed), 2, 3, 75, 139)
    kept = torch.from_numpy(oracle.dropout_keeps(numbers, p))
    assert torch.equal(dropped(None, 2, 3, 75, 139, p, seed), kept)
    # Another mask visits other tiles, and sees the same numbers.
    visible = causal(2, 3, 75, 139)
    assert torch.equal(dropped(jali.CausalMask(), 2, 3, 75, 139, p, seed), kept & visible)
    assert torch.equal(dropped(None, 1, 1, 7, 139, p, seed)[0, 0], kept[0, 0, :7])


def test_dropout_of_everything() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 9, 9, 8))
    out, lse = jali.attention(q, k, v, dropout_p=1.0, return_lse=True)
    assert (out == 0).all() and torch.isfinite(lse).all()
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (grad == 0).all()


def test_dropout_draws_a_seed() -> None:
    q, k, v = qkv(1, 2, 1, 40, 40, 8)
    torch.manual_seed(3)
    first, second = (jali.attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(jali.attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)


# ---- varlen ----

LENGTHS = [
    ([5, 0, 70, 1, 130], [9, 3, 64, 0, 131]),
    ([1, 1, 1], [1, 65, 7]),
    ([128], [128]),
    ([0, 0], [0, 5]),
    ([64, 3], [0, 0]),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(
    "name", ["causal", "window", "sinks", "dropout", "bias", "key_bias", "alibi"]
)
def test_varlen(name: str, lengths: tuple[list[int], list[int]], dtype: torch.dtype) -> None:
    cu_q, cu_k = ([0, *np.cumsum(x).tolist()] for x in lengths)
    p = oracle.Problem(len(lengths[0]), 4, 2, max(lengths[0]), max(lengths[1]), None, cu_q, cu_k)
    options: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": randn(4)},
        "dropout": {"dropout_p": 0.4, "seed": 5},
        "bias": {"bias": randn(p.B, 2, p.Lq, p.Lk)},
        "key_bias": {"key_bias": randn(2, cu_k[-1])},
        "alibi": {"alibi_slopes": randn(4).abs() / 4},
    }
    window = name == "window"
    mask = jali.WindowMask(20, 5) if window else jali.CausalMask()
    cells = oracle.WindowMask(20, 5) if window else oracle.CausalMask()
    check_varlen(mask, p, cells, D=16, Dv=8, dtype=dtype, options=options.get(name))


def test_varlen_is_the_loop_over_sequences() -> None:
    cu_q, cu_k = torch.tensor([0, 30, 100]).int(), torch.tensor([0, 70, 170]).int()
    torch.manual_seed(0)
    q, k, v = torch.randn(100, 4, 8), torch.randn(170, 2, 8), torch.randn(170, 2, 8)
    packed = jali.attention_varlen(q, k, v, cu_q, cu_k, jali.CausalMask())
    for n in range(2):
        one, (rq, rk) = [], (slice(int(c[n]), int(c[n + 1])) for c in (cu_q, cu_k))
        for x, r in ((q, rq), (k, rk), (v, rk)):
            one.append(x[r].transpose(0, 1)[None])
        alone = jali.attention(*one, jali.CausalMask())[0].transpose(0, 1)
        torch.testing.assert_close(packed[rq], alone)


# ---- LSE ----


def test_lse_gradient_alone() -> None:
    check_attention(jali.CausalMask(), causal(1, 2, 40, 50), Hkv=1, D=8, with_dlse=True)
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 40, 50, 8, dtype=torch.float64))
    _, lse = jali.attention(q, k, v, jali.CausalMask(), return_lse=True)
    dq, dk = torch.autograd.grad(lse.sum(), (q, k))
    s = (q @ k.repeat_interleave(2, 1).transpose(-1, -2)) * 8**-0.5
    expected = torch.logsumexp(s.masked_fill(~causal(1, 2, 40, 50), -torch.inf), -1)
    torch.testing.assert_close(lse, expected)
    for a, b in zip((dq, dk), torch.autograd.grad(expected.sum(), (q, k)), strict=True):
        torch.testing.assert_close(a, b)


def test_merge_lse() -> None:
    q, k, v = qkv(2, 4, 2, 30, 90, 8, dtype=torch.float64)
    whole, lse = jali.attention(q, k, v, return_lse=True)
    cuts = [(0, 13), (13, 14), (14, 90), (90, 90)]  # the last part sees nothing
    parts = [jali.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in cuts]
    out, merged = jali.merge_lse([o for o, _ in parts], [x for _, x in parts])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(merged, lse)
    nothing, minus = jali.merge_lse([out * 0] * 2, [torch.full_like(lse, -torch.inf)] * 2)
    assert (nothing == 0).all() and (minus == -torch.inf).all()


def test_merge_lse_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 1, 10, 20, 4, dtype=torch.float64))
    dout = torch.randn(1, 2, 10, 4, dtype=torch.float64)
    whole = torch.autograd.grad(jali.attention(q, k, v), (q, k, v), dout)
    parts = [
        jali.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 7), (7, 20))
    ]
    out, _ = jali.merge_lse(*map(list, zip(*parts, strict=True)))
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), whole, strict=True):
        torch.testing.assert_close(a, b)


# ---- the same bits ----


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


MASKS = {
    "none": lambda: None,
    "causal window": lambda: jali.CausalMask() & jali.WindowMask(50, 0),
    "documents": lambda: jali.DocumentMask.from_lengths([60, 200, 40]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_bits_do_not_depend_on_threads(name: str, dtype: torch.dtype, threads) -> None:
    q, k, v = qkv(1, 3, 1, 300, 300, 20, dtype=dtype)
    runs = []
    for n in (1, 2, 3, 5, 1):
        threads(n)
        runs.append(forward_backward(q, k, v, MASKS[name](), dropout_p=0.1, seed=3))
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            assert torch.equal(a, b)


def test_bits_of_bias_gradients(threads) -> None:
    q, k, v = qkv(2, 4, 2, 150, 150, 16)
    runs = []
    for n in (1, 3, 5):
        threads(n)
        bias, key_bias, sinks = (
            torch.ones(s, requires_grad=True) for s in ((1, 1, 150, 1), (1, 2, 150), (4,))
        )
        out = jali.attention(q, k, v, jali.CausalMask(), bias=bias, key_bias=key_bias, sinks=sinks)
        runs.append(torch.autograd.grad((out * out).sum(), (bias, key_bias, sinks)))
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            assert torch.equal(a, b)


def test_concurrent_calls() -> None:
    q, k, v = qkv(1, 2, 1, 200, 200, 16)
    masks = [jali.CausalMask(), jali.WindowMask(20, 20), None, jali.PrefixMask(50)]
    alone = [forward_backward(q, k, v, m) for m in masks]
    wrong: list[str] = []

    def work(n: int) -> None:
        for _ in range(5):
            got = forward_backward(q, k, v, masks[n])
            if not all(torch.equal(a, b) for a, b in zip(alone[n], got, strict=True)):
                wrong.append(f"mask {n}")

    pool = [threading.Thread(target=work, args=(n % 4,)) for n in range(8)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    assert not wrong


# ---- plans and explanations ----


@pytest.mark.parametrize("name", ["causal window", "documents"])
def test_plan(name: str) -> None:
    q, k, v = qkv(2, 4, 2, 300, 300, 16)
    mask = MASKS[name]()
    plan = jali.plan(mask, 2, 4, 2, 300, 300)
    for _ in range(2):  # used again
        for a, b in zip(
            forward_backward(q, k, v, mask), forward_backward(q, k, v, plan), strict=True
        ):
            assert torch.equal(a, b)


def test_explain_counts_tiles() -> None:
    q, k, v = qkv(2, 4, 2, 300, 500, 16)
    mask = jali.CausalMask() & jali.WindowMask.last(40)
    e = jali.explain(q, k, v, mask)
    tiles = mask.tiles(2, 4, 300, 500, tile=e.tile, num_kv_heads=2)
    copies = 2 * 4 // math.prod(tiles.classes.shape[:2])
    assert e.num_full == tiles.num_full * copies
    assert e.num_partial == tiles.num_partial * copies
    assert e.num_empty == tiles.num_empty * copies
    assert e.work == pytest.approx(tiles.density)
    visible = int(mask.dense(2, 4, 300, 500, num_kv_heads=2).sum())
    assert (e.num_visible, e.num_cells) == (visible, 2 * 4 * 300 * 500)
    assert str(e.num_full) in str(e)


@pytest.mark.gpu
def test_cuda_inputs_are_refused_until_the_gpu_backend_lands() -> None:
    q, k, v = (x.cuda() for x in qkv(1, 1, 1, 8, 8, 8))
    with pytest.raises(NotImplementedError, match=r"(?i)cuda"):
        jali.attention(q, k, v)


@pytest.mark.parametrize("shape", [(2, 2, 11, 13), (1, 1, 11, 13), (2, 1, 1, 13)])
def test_a_bias_longer_than_every_sequence_gets_zeros_beyond(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    bias = torch.randn(shape, requires_grad=True)
    grads = [
        torch.autograd.grad(f(q, k, v, cu, cu, jali.CausalMask(), bias=bias).sum(), bias)[0]
        for f in (jali.attention_varlen, jali.reference.attention_varlen)
    ]
    assert (grads[0][..., 7:] == 0).all()
    assert torch.allclose(grads[0], grads[1], atol=1e-5)
