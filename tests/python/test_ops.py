"""jali.attention from PyTorch: operators, gradients, options, layouts, errors.

In this order: operators and gradients; layouts; autocast; dropout; kinds of masks; varlen; what is
refused.
"""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import jali
import pytest
import torch
from jali import _ops
from jali._call import prepare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

B, HQ, HKV, LQ, LK, D, DV = 2, 4, 2, 7, 11, 8, 5


def inputs(dtype: torch.dtype = torch.float64, grad: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = ((B, HQ, LQ, D), (B, HKV, LK, D), (B, HKV, LK, DV))
    return tuple(torch.randn(s, dtype=dtype, requires_grad=grad) for s in shapes)


def learnt(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


#: Every option of the signature that changes numbers, made anew for each test.
OPTIONS: dict[str, Any] = {
    "none": dict,
    "mask": lambda: {"mask": jali.CausalMask() & jali.WindowMask(3, 1) | jali.PrefixMask(1)},
    "table": lambda: {"mask": jali.KeyPaddingMask(torch.arange(LK) < torch.tensor([[5], [0]]))},
    "scale": lambda: {"scale": 0.3},
    "bias": lambda: {"bias": learnt(B, HKV, 1, LK)},
    "wide bias": lambda: {"bias": learnt(LQ, LK)},
    "float mask": lambda: {"mask": learnt(1, 1, LQ, LK)},
    "key bias": lambda: {"key_bias": learnt(1, HQ, LK)},
    "alibi": lambda: {"alibi_slopes": torch.rand(HQ)},
    "softcap": lambda: {"softcap": 1.5},
    "sinks": lambda: {"sinks": learnt(HQ)},
    "dropout": lambda: {"dropout_p": 0.3, "seed": 1234567890123},
    "offset": lambda: {"q_offset": 2},
    "offsets": lambda: {"q_offset": torch.tensor([1, -3])},
}  # fmt: skip


def tensors_in(options: dict[str, Any]) -> list[Tensor]:
    return [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]


_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("mask", "scale", "bias", "key_bias", "alibi_slopes", "softcap", "sinks")),
    **dict.fromkeys(("seed", "q_offset")),
    "dropout_p": 0.0,
    "deterministic": False,
}


def raw_arguments(q: Tensor, k: Tensor, **given: Any) -> _ops.Options:
    return _ops.Options(**prepare(q, k, **{**_DEFAULTS, **given}))


@pytest.mark.parametrize("name", OPTIONS)
def test_gradcheck(name: str) -> None:
    options = OPTIONS[name]()
    learnable = [key for key, x in options.items() if isinstance(x, Tensor) and x.requires_grad]

    def call(q: Tensor, k: Tensor, v: Tensor, *given: Tensor) -> Any:
        chosen = {**options, **dict(zip(learnable, given, strict=True))}
        out, lse = jali.attention(q, k, v, return_lse=True, **chosen)
        return out, torch.where(lse == -torch.inf, 0, lse)

    assert torch.autograd.gradcheck(call, (*inputs(), *tensors_in(options)))


@pytest.mark.parametrize("pair", list(itertools.combinations(OPTIONS, 2)), ids="+".join)
def test_pairs_of_options_agree_with_the_reference(pair: tuple[str, str]) -> None:
    options: dict[str, Any] = {}
    for name in pair:
        options.update(OPTIONS[name]())
    q, k, v = inputs()
    leaves = [q, k, v, *tensors_in(options)]
    out, lse = jali.attention(q, k, v, return_lse=True, **options)
    want, want_lse = jali.reference.attention(q, k, v, return_lse=True, **options)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    dout = torch.randn_like(out)
    dlse = torch.where(lse.detach() == -torch.inf, 0, torch.randn_like(lse))
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    expected = torch.autograd.grad([want, want_lse], leaves, [dout, dlse])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck_forward_and_backward(name: str) -> None:
    options = OPTIONS[name]()
    q, k, v = inputs()
    raw = raw_arguments(q, k, **options)
    torch.library.opcheck(_ops.forward, (q, k, v, *raw))
    with torch.no_grad():
        out, lse = _ops.forward(q, k, v, *raw)
    need = [x is not None and x.requires_grad for x in (raw.bias, raw.key_bias, raw.sinks)]
    fixed = (x.detach() if isinstance(x, Tensor) else x for x in (q, k, v, out, lse, *raw))
    q, k, v, out, lse, *rest = fixed
    for dlse in (None, torch.randn_like(lse)):
        arguments = (q, k, v, out, lse, torch.randn_like(out), dlse, *rest, *need)
        torch.library.opcheck(_ops.backward, arguments)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_opcheck_sees_the_strides_of_every_layout(order: tuple[int, ...]) -> None:
    back = [order.index(d) for d in range(3)]
    q, k, v = (x.permute(*order, 3).contiguous().permute(*back, 3) for x in inputs(grad=False))
    torch.library.opcheck(_ops.forward, (q, k, v, *raw_arguments(q, k)))


def test_opcheck_varlen_truth_and_masks() -> None:
    q, k, v = (torch.randn(n, h, 4) for n, h in ((9, 4), (12, 2), (12, 2)))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 4, 9], [0, 5, 8, 12]))
    raw = raw_arguments(q, k, mask=jali.CausalMask(), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    torch.library.opcheck(_ops.forward, (q, k, v, *raw))
    torch.library.opcheck(torch.ops.jali.attention_truth.default, (q, k, v, None, None, *raw))
    program, tables, scalars = jali.WindowMask(2, 1).flatten()
    shape = (tables, scalars, program, 2, 4, 2, 9, 12, None, None, None, None, -1, -1)
    torch.library.opcheck(torch.ops.jali.mask_dense.default, shape)
    torch.library.opcheck(torch.ops.jali.mask_tiles.default, (*shape, 4, 4, 1, 1))


class Watched(TorchDispatchMode):
    """Sees what operators are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "jali":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["none", "mask", "table", "scale"])
def test_operators_of_few_arguments_give_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**OPTIONS[name](), "return_lse": True}
    called: list[str] = []
    for short in ("_masked_forward", "_masked_backward"):
        operator = getattr(_ops, short)
        monkeypatch.setattr(_ops, short, lambda *a, o=operator, s=short: called.append(s) or o(*a))
    q, k, v = inputs()
    dout, dlse = torch.randn(B, HQ, LQ, DV, dtype=q.dtype), torch.randn(B, HQ, LQ, dtype=q.dtype)

    def results() -> tuple[Tensor, ...]:
        out, lse = jali.attention(q, k, v, **options)
        return out, lse, *torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])

    got = results()
    assert called == ["_masked_forward", "_masked_backward"]
    with torch.no_grad():
        assert torch.equal(jali.attention(q, k, v, **options)[0], got[0])
    assert called[2:] == ["_masked_forward"]
    with Watched() as watched:
        want = results()
    assert watched.seen == ["jali::attention_forward", "jali::attention_backward"]
    # Whatever is looked on, the forward or the backward alone.
    out, lse = jali.attention(q, k, v, **options)
    with Watched() as watched:
        grads = torch.autograd.grad([out, lse], (q, k, v), [dout, dlse])
    assert watched.seen == ["jali::attention_backward"]
    for a, b, c in zip(got, want, (out, lse, *grads), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_the_operator_of_few_arguments_passes_opcheck_and_refuses_other_numbers() -> None:
    operator = torch.ops.jali.masked_forward.default
    q, k, v = inputs(grad=False)
    numbers = _ops._mask_numbers(*map(tuple, jali.WindowMask(2, 1).flatten()[::2]))
    torch.library.opcheck(operator, (q, k, v, numbers, None, 0.3, True))
    for wrong in (numbers.int(), numbers[None], numbers[:1], torch.tensor([-1]), numbers[::2]):
        with pytest.raises(RuntimeError, match="TypeError: a mask's numbers must be an int64"):
            operator(q, k, v, wrong, None, None, False)


def test_the_call_without_gradients_gives_the_same_bits() -> None:
    q, k, v = inputs()
    with_gradient = jali.attention(q, k, v, jali.CausalMask())
    assert with_gradient.requires_grad
    with torch.no_grad():
        assert torch.equal(jali.attention(q, k, v, jali.CausalMask()), with_gradient)
    without = jali.attention(q.detach(), k.detach(), v.detach(), jali.CausalMask())
    assert torch.equal(without, with_gradient) and not without.requires_grad


@pytest.mark.parametrize("who", range(3))
def test_a_gradient_for_one_input_alone(who: int) -> None:
    qkv = [x.detach() for x in inputs()]
    qkv[who].requires_grad_()
    (got,) = torch.autograd.grad(jali.attention(*qkv).sum(), qkv[who])
    (want,) = torch.autograd.grad(jali.reference.attention(*qkv).sum(), qkv[who])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_gradient_through_lse_alone() -> None:
    q, k, v = inputs()
    lse = jali.attention(q, k, v, return_lse=True)[1]
    got = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    want = torch.autograd.grad(
        jali.reference.attention(q, k, v, return_lse=True)[1].sum(), (q, k), allow_unused=True
    )
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert got[2] is None or not got[2].any()


def test_layout_blhd() -> None:
    q, k, v = inputs()
    want = jali.attention(q, k, v, jali.CausalMask())
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    got, lse = jali.attention(*swapped, jali.CausalMask(), layout="blhd", return_lse=True)
    assert got.shape == (B, LQ, HQ, DV) and lse.shape == (B, HQ, LQ)
    assert torch.equal(got.transpose(1, 2), want)


def test_out_lies_in_memory_as_q_does() -> None:
    q, k, v = inputs(grad=False)
    assert jali.attention(q, k, v).is_contiguous()
    blhd = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert jali.attention(blhd, k, v).transpose(1, 2).is_contiguous()


def storages(tensors: tuple[Tensor, ...]) -> int:
    return len({x.untyped_storage().data_ptr() for x in tensors})


def test_small_gradients_lie_in_one_allocation() -> None:
    q, k, v = inputs()
    q = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    out = jali.attention(q, k, v)
    got = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    assert storages(got) == 1
    # Outputs of the operator, and what a graph is made of, never do.
    separate = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True, create_graph=True)
    assert storages(separate) == 3
    for a, b in zip(got, separate):
        assert a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
    for x in got[::2]:
        x.fill_(7)
    assert torch.equal(got[1], separate[1])
    out.sum().backward()
    for leaf, want in zip((q, k, v), separate):
        assert leaf.grad is not None and torch.equal(leaf.grad, want)


def test_large_gradients_have_memory_of_their_own() -> None:
    qkv = [torch.randn(1, 1, 4096, 64, requires_grad=True) for _ in range(3)]
    window = jali.CausalMask() & jali.WindowMask.last(4)
    assert storages(torch.autograd.grad(jali.attention(*qkv, window).sum(), qkv)) == 3


def test_any_strides() -> None:
    q, k, v = inputs(grad=False)
    want = jali.attention(q, k, v)
    wide = [torch.stack([x, x + 1], 2)[:, :, 0] for x in (q, k, v)]  # gaps between heads
    assert not wide[0].is_contiguous() and torch.equal(jali.attention(*wide), want)
    one = k[:1, :, :1].expand(B, HKV, LK, D)
    torch.testing.assert_close(
        jali.attention(q, one, v), jali.attention(q, one.contiguous(), v), rtol=0, atol=0
    )


def test_return_values() -> None:
    q, k, v = inputs(grad=False)
    mask = jali.CausalMask()
    out, lse, probs = jali.attention(q, k, v, mask, return_lse=True, return_probs=True)
    assert lse.dtype == torch.float64 and probs.shape == (B, HQ, LQ, LK)
    values = v.repeat_interleave(HQ // HKV, 1)
    torch.testing.assert_close(probs @ values, out, rtol=0, atol=1e-12)
    assert torch.equal(jali.attention(q, k, v, mask, return_probs=True)[1], probs)
    assert (probs == 0).equal(~mask.dense(B, HQ, LQ, LK, num_kv_heads=HKV))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype)
    out, lse = jali.attention(q, k, v, jali.CausalMask(), return_lse=True)
    assert out.dtype == dtype and lse.dtype == torch.float32
    want = jali.reference.attention(q, k, v, jali.CausalMask())
    torch.testing.assert_close(out, want)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.dtype == dtype and grad.isfinite().all()


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_by_hand(dtype: torch.dtype) -> None:
    q, k, v = inputs(torch.float32)
    mixed = (q, k.to(torch.bfloat16), v.to(torch.float16))  # as of layers in different dtypes
    by_hand = [x.to(dtype) for x in mixed]
    bias, other = torch.randn(LQ, LK), torch.randn(1, HQ, LK, dtype=torch.bfloat16)
    want = jali.attention(*by_hand, jali.CausalMask(), bias=bias, key_bias=other.to(dtype))
    with torch.autocast("cpu", dtype):
        out = jali.attention(*mixed, jali.CausalMask(), bias=bias, key_bias=other)
        assert torch.equal(jali.attention(q, k, v, bias), jali.attention(q, k, v, bias=bias))
        with torch.autocast("cpu", enabled=False):
            assert jali.attention(q, k, v).dtype == torch.float32
    assert out.dtype == dtype and torch.equal(out, want)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want)), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_autocast_leaves_float64_and_takes_other_layouts() -> None:
    q, k, v = inputs(torch.float64, grad=False)
    cu = torch.tensor([0, 3, 5], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert jali.attention(q, k, v).dtype == torch.float64
        packed = [x[0].float().transpose(0, 1)[:5] for x in (q, k, v)]
        out = jali.attention_varlen(*packed, cu, cu, jali.CausalMask())
        rows = [x.float().transpose(1, 2) for x in (q, k, v)]
        assert jali.attention(*rows, layout="blhd").dtype == torch.bfloat16
    assert torch.equal(
        out, jali.attention_varlen(*(x.bfloat16() for x in packed), cu, cu, jali.CausalMask())
    )


# Dropout


def test_the_seed_decides_the_dropout() -> None:
    q, k, v = inputs(grad=False)

    def drop(seed: Any) -> Tensor:
        return jali.attention(q, k, v, dropout_p=0.5, seed=seed)

    assert torch.equal(drop(3), drop(torch.tensor(3)))
    assert torch.equal(drop(-1), drop(torch.tensor([-1])))
    assert not torch.equal(drop(3), drop(4))
    torch.manual_seed(0)
    first, second = drop(None), drop(None)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(drop(None), first)


def test_dropout_keeps_the_stated_share_and_the_mean() -> None:
    q = torch.zeros(1, 1, 512, 8)
    v = torch.ones(1, 1, 512, 1)
    out = jali.attention(q, q, v, dropout_p=0.25, seed=0)  # each weight 1/512: counts kept cells
    assert abs(out.mean().item() - 1) < 0.005
    assert 0.02 < out.std().item() < 0.03  # sqrt(p / (1 - p) / 512) = 0.0255
    assert not jali.attention(q, q, v, dropout_p=1.0, seed=0).any()


def test_checkpointing_repeats_the_dropout() -> None:
    q, k, v = inputs()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(q, k, v, jali.CausalMask(), dropout_p=0.4)

    results = []
    for wrapped in (False, True):
        torch.manual_seed(7)
        out = checkpoint(layer, q, k, v, use_reentrant=False) if wrapped else layer(q, k, v)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# Kinds of masks


def test_masks_of_other_kinds() -> None:
    q, k, v = inputs(grad=False)
    want = jali.attention(q, k, v, jali.CausalMask(2))
    cells = jali.CausalMask(2).dense(1, 1, LQ, LK)
    assert torch.equal(jali.attention(q, k, v, cells), want)
    assert torch.equal(jali.attention(q, k, v, cells[0, 0]), want)
    assert torch.equal(jali.attention(q, k, v, lambda b, h, i, j: j <= i + 2), want)
    float_mask = torch.zeros(LQ, LK, dtype=q.dtype).masked_fill(~cells[0, 0], -torch.inf)
    torch.testing.assert_close(jali.attention(q, k, v, float_mask), want, rtol=0, atol=1e-14)
    both = jali.attention(q, k, v, float_mask, bias=torch.ones(LQ, LK, dtype=q.dtype))
    torch.testing.assert_close(both, want, rtol=0, atol=1e-12)


def test_flex_attention_block_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = inputs(grad=False)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, B, HQ, LQ, LK, device="cpu")
    assert torch.equal(
        jali.attention(q, k, v, block_mask), jali.attention(q, k, v, jali.CausalMask(0))
    )


def test_flex_attention_blocks_without_a_mask_mod() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    q, k, v = inputs(grad=False)
    blocks = torch.tensor([[0, 1, 1], [1, 0, 0]]).bool()  # of 4 x 4
    count = torch.tensor([[[1, 1]]], dtype=torch.int32)
    # Behind the count: anything.
    index = torch.tensor([[[[2, 7, 0], [0, 0, 0]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 0]]], dtype=torch.int32), torch.ones(1, 1, 2, 3, dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(count, index, *full, BLOCK_SIZE=4, compute_q_blocks=False)
    want = jali.attention(q, k, v, jali.BlockSparseMask(blocks[None, None], (4, 4)))
    assert torch.equal(jali.attention(q, k, v, block_mask), want)


def test_flex_attention_blocks_that_hide_more_than_the_mask_mod() -> None:
    from torch.nn.attention.flex_attention import BlockMask

    q, k, v = inputs(grad=False)
    count, index = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 0, 0], [0, 2, 0]]]])
    full = torch.tensor([[[0, 1]]]), torch.tensor([[[[0, 0, 0], [1, 0, 0]]]])
    lists = [x.int() for x in (count, index, *full)]
    block_mask = BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=4, mask_mod=lambda b, h, i, j: i >= j - 3, compute_q_blocks=False
    )
    partial = torch.tensor([[0, 1, 0], [1, 0, 1]]).bool()[None, None]
    whole = torch.tensor([[0, 0, 0], [0, 1, 0]]).bool()[None, None]
    mask = jali.BlockSparseMask(partial, (4, 4)) & jali.CausalMask(3)
    want = jali.attention(q, k, v, mask | jali.BlockSparseMask(whole, (4, 4)))
    assert torch.equal(jali.attention(q, k, v, block_mask), want)
    assert not torch.equal(want, jali.attention(q, k, v, jali.CausalMask(3)))


class Stripes:
    """A foreign mask that can only be evaluated."""

    def dense(self, B: int, H: int, Lq: int, Lk: int) -> Tensor:
        return (torch.arange(Lk) % 2 == 0).expand(B, H, Lq, Lk)


def test_a_foreign_mask_is_evaluated_with_one_warning_and_within_a_limit() -> None:
    from jali import _call

    _call._warned.clear()
    q, k, v = inputs(grad=False)
    with pytest.warns(UserWarning, match="type Stripes is evaluated in every cell"):
        got = jali.attention(q, k, v, Stripes())
    assert torch.equal(got, jali.attention(q, k, v, Stripes().dense(B, HQ, LQ, LK)))
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jali.attention(q, k, v, Stripes())
    huge = torch.zeros(1).expand(1, 1, 2**15, 8)
    with pytest.raises(ValueError, match=r"more than the limit of 2\^28"):
        jali.attention(huge, huge, huge, Stripes())


def test_a_mask_function_that_cannot_be_traced_is_evaluated() -> None:
    from jali import _call

    def wave(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.sin(i * 0.5 + j) > 0

    _call._warned.clear()
    q, k, v = inputs(grad=False)
    cells = torch.sin(torch.arange(LQ)[:, None] * 0.5 + torch.arange(LK)) > 0
    with pytest.warns(UserWarning, match="evaluated in every cell"):
        assert torch.equal(jali.attention(q, k, v, wave), jali.attention(q, k, v, cells))


def test_plan_is_the_mask_and_checks_the_shape() -> None:
    q, k, v = inputs(grad=False)
    mask = jali.CausalMask() & jali.WindowMask.last(3)
    plan = jali.plan(mask, B, HQ, HKV, LQ, LK)
    assert torch.equal(jali.attention(q, k, v, plan), jali.attention(q, k, v, mask))
    with pytest.raises(ValueError, match="the plan was made for"):
        jali.attention(q[:1], k[:1], v[:1], plan)
    shifted = jali.plan(mask, B, HQ, HKV, LQ, LK, q_offset=1)
    assert torch.equal(jali.attention(q, k, v, shifted), jali.attention(q, k, v, mask, q_offset=1))
    with pytest.raises(ValueError, match="q_offset = 1, but the call has 2"):
        jali.attention(q, k, v, shifted, q_offset=2)


def test_a_plan_brings_its_offset_everywhere() -> None:
    q, k, v = inputs(grad=False)
    plan = jali.plan(jali.CausalMask(), B, HQ, HKV, LQ, LK, q_offset=1)
    out, probs = jali.attention(q, k, v, plan, return_probs=True)
    torch.testing.assert_close(probs @ v.repeat_interleave(HQ // HKV, 1), out)
    torch.testing.assert_close(jali.reference.attention(q, k, v, plan), out)
    again = jali.plan(plan, B, HQ, HKV, LQ, LK)
    assert torch.equal(jali.attention(q, k, v, again), out)
    visible = jali.CausalMask(1).dense(B, HQ, LQ, LK).sum()
    assert jali.explain(q, k, v, plan).num_visible == visible


def test_a_plan_of_a_derived_mask_is_not_for_packed_sequences() -> None:
    q, k, v = (x[0].transpose(0, 1) for x in inputs(grad=False))
    ends = torch.tensor([0, 7]), torch.tensor([0, 11])
    simple = jali.plan(jali.CausalMask(), 1, HQ, HKV, LQ, LK)
    want = jali.attention_varlen(q, k, v, *ends, jali.CausalMask())
    assert torch.equal(jali.attention_varlen(q, k, v, *ends, simple), want)
    derived = jali.plan(jali.DynamicMask(torch.randn(1, HKV, LK), keep=2), 1, HQ, HKV, LQ, LK)
    with pytest.raises(ValueError, match="pass the mask itself to attention_varlen"):
        jali.attention_varlen(q, k, v, *ends, derived)


def test_a_plan_refuses_another_tensor_of_offsets() -> None:
    q, k, v = inputs(grad=False)
    offsets = torch.tensor([1, 3])
    plan = jali.plan(jali.CausalMask(), B, HQ, HKV, LQ, LK, q_offset=offsets)
    want = jali.attention(q, k, v, jali.CausalMask(), q_offset=offsets)
    for same in (None, offsets, offsets.clone(), [1, 3]):
        assert torch.equal(jali.attention(q, k, v, plan, q_offset=same), want)
    for other in (torch.tensor([1, 2]), torch.tensor([1]), 1, torch.tensor([1, 3, 0])):
        with pytest.raises(ValueError, match=r"q_offset = \[1, 3\], but the call has"):
            jali.attention(q, k, v, plan, q_offset=other)
    number = jali.plan(jali.CausalMask(), B, HQ, HKV, LQ, LK, q_offset=1)
    want = jali.attention(q, k, v, jali.CausalMask(), q_offset=1)
    assert torch.equal(jali.attention(q, k, v, number, q_offset=torch.tensor([1, 1])), want)
    with pytest.raises(ValueError, match=r"q_offset = 1, but the call has \[1, 2\]"):
        jali.attention(q, k, v, number, q_offset=torch.tensor([1, 2]))
    free = jali.plan(jali.CausalMask(), B, HQ, HKV, LQ, LK)
    with pytest.raises(ValueError, match=r"q_offset = None, but the call has 0"):
        jali.attention(q, k, v, free, q_offset=0)


# Varlen


def varlen(grad: bool = True) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    q, k, v = (
        torch.randn(n, h, 6, dtype=torch.float64, requires_grad=grad)
        for n, h in ((13, 4), (16, 2), (16, 2))
    )
    cu_q, cu_k = torch.tensor([0, 4, 4, 11]), torch.tensor([0, 5, 8, 14])  # 2 tokens left over
    return q, k, v, cu_q, cu_k


VARLEN: dict[str, Any] = {
    "none": dict,
    "causal": lambda: {"mask": jali.CausalMask()},
    "packed table": lambda: {"mask": jali.KeyPaddingMask(torch.arange(16) % 3 > 0)},
    "padded table": lambda: {"mask": jali.KeyPaddingMask(torch.arange(18).view(3, 6) % 3 > 0)},
    "dense": lambda: {"mask": torch.arange(3 * 7 * 6).view(3, 1, 7, 6) % 5 > 0},
    "bias": lambda: {"bias": learnt(3, 1, 7, 6)},
    "key bias": lambda: {"key_bias": learnt(2, 16)},
    "sinks alibi": lambda: {"sinks": learnt(4), "alibi_slopes": torch.rand(4)},
    "dropout": lambda: {"dropout_p": 0.3, "seed": 5},
    "offsets": lambda: {"mask": jali.CausalMask(), "q_offset": torch.tensor([0, 1, 2])},
}


@pytest.mark.parametrize("name", VARLEN)
def test_varlen_agrees_with_the_reference(name: str) -> None:
    options = VARLEN[name]()
    q, k, v, cu_q, cu_k = varlen()
    leaves = [q, k, v, *tensors_in(options)]
    out, lse = jali.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)
    want, want_lse = jali.reference.attention_varlen(
        q, k, v, cu_q, cu_k, return_lse=True, **options
    )
    assert not out[11:].any() and (lse[:, 11:] == -torch.inf).all()  # behind the last sequence
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    dout, dlse = torch.randn_like(out), torch.where(lse.detach() == -torch.inf, 0, 1.0)
    got = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    expected = torch.autograd.grad([want, want_lse], leaves, [dout, dlse])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_varlen_probs() -> None:
    q, k, v, cu_q, cu_k = varlen(grad=False)
    probs = jali.attention_varlen(q, k, v, cu_q, cu_k, jali.CausalMask(), return_probs=True)[-1]
    assert probs.shape == (3, 4, 7, 6)


# merge_lse


@pytest.mark.parametrize("cut", [0, 1, 6, LK])
def test_merge_lse_joins_disjoint_keys(cut: int) -> None:
    q, k, v = inputs()
    mask = jali.CausalMask(2)
    parts = [
        jali.attention(q, k[:, :, at], v[:, :, at], mask=cells, return_lse=True)
        for at in (slice(0, cut), slice(cut, LK))
        for cells in (mask.dense(1, 1, LQ, LK)[..., at],)
    ]
    out, lse = jali.merge_lse(*zip(*parts, strict=True))
    want, want_lse = jali.attention(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((out.sum(), lse.sum()), (q, k, v)),
        torch.autograd.grad((want.sum(), want_lse.sum()), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_merge_lse_varlen_and_rows_without_keys() -> None:
    q, k, v, cu_q, cu_k = varlen(grad=False)
    out, lse = jali.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    merged, merged_lse = jali.merge_lse([out, nothing[0]], [lse, nothing[1]])
    torch.testing.assert_close(merged, out, rtol=0, atol=1e-15)
    assert torch.equal(merged_lse, lse)
    with pytest.raises(ValueError, match="as many lses as outs"):
        jali.merge_lse([out], [])


# explain


def test_explain_counts() -> None:
    q = torch.randn(1, 2, 256, 16)
    e = jali.explain(q, q, q, jali.CausalMask())
    tiles = jali.CausalMask().tiles(1, 2, 256, 256, e.tile)
    assert e.num_visible == 2 * 256 * 257 // 2 and e.num_cells == 2 * 256 * 256
    assert (e.num_empty, e.num_partial, e.num_full) == tuple(
        2 * n for n in (tiles.num_empty, tiles.num_partial, tiles.num_full)
    )
    assert "of the dense work" in str(e)
    assert jali.explain(q, q, q).work == 1.0
    packed = torch.randn(12, 2, 16)
    cu = torch.tensor([0, 4, 12])
    e = jali.explain(packed, packed, packed, jali.CausalMask(), cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert (e.num_visible, e.num_cells) == (2 * (10 + 36), 2 * (16 + 64))


# What is refused


def test_func_grad_equals_autograd() -> None:
    q, k, v = inputs()
    scores = torch.rand(B, HKV, LK, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(1, 1, LQ, LK, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(HQ, dtype=torch.float64, requires_grad=True)

    def loss(
        q: Tensor, k: Tensor, v: Tensor, scores: Tensor, bias: Tensor, sinks: Tensor
    ) -> Tensor:
        # The mask's tables come from an input that is being differentiated.
        mask = jali.DynamicMask(scores, 3)
        options: dict[str, Any] = {"bias": bias, "key_bias": scores, "sinks": sinks, "seed": 1}
        out, lse = jali.attention(q, k, v, mask, dropout_p=0.2, return_lse=True, **options)
        return out.square().sum() + lse.sum()

    leaves = (q, k, v, scores, bias, sinks)
    want = torch.autograd.grad(loss(*leaves), leaves)
    detached = tuple(x.detach() for x in leaves)
    got = torch.func.grad(loss, argnums=tuple(range(6)))(*detached)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    partial = torch.func.grad(lambda k: loss(detached[0], k, *detached[2:]))(detached[1])
    assert torch.equal(partial, want[1])


@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian"])
def test_func_transforms_of_gradients_are_refused(transform: str) -> None:
    q, k, v = (x.detach() for x in inputs())
    loss = torch.func.grad(lambda q: jali.attention(q, k, v).square().sum())
    call = {
        "grad": torch.func.grad(lambda q: loss(q).sum()),
        "jacrev": torch.func.jacrev(loss),
        "hessian": torch.func.hessian(loss),
    }
    with pytest.raises(NotImplementedError, match=r"no second derivative|vmapped|jvp"):
        call[transform](q)


def test_double_backward_is_refused() -> None:
    q, k, v = inputs()
    (grad,) = torch.autograd.grad(jali.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


def test_vmap_is_refused() -> None:
    q, k, v = (x.detach()[None] for x in inputs())
    with pytest.raises(NotImplementedError, match="cannot be vmapped"):
        torch.vmap(jali.attention)(q, k, v)


def _error_cases() -> dict[str, tuple[type[Exception], str, Any]]:
    q, k, v = (x.detach() for x in inputs())
    at = jali.attention
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    return {
        "rank": (ValueError, r"must be \[B, H, L, D\], got q with 3", lambda: at(q[0], k[0], v[0])),
        "batch": (ValueError, "batch dims must agree", lambda: at(q, k[:1], v[:1])),
        "heads": (ValueError, "must divide", lambda: at(q[:, :3], k, v)),
        "head dim": (ValueError, "head dim 8 but k has 7", lambda: at(q, k[..., :7], v)),
        "lengths": (ValueError, "all but the last dim must agree", lambda: at(q, k, v[:, :, 1:])),
        "dtype": (TypeError, "convert them to one dtype", lambda: at(q, k.float(), v)),
        "integers": (TypeError, "expected float64, float32",
                     lambda: at(q.long(), k.long(), v.long())),
        "strides": (ValueError, r"call .contiguous\(\)", lambda: at(q.mT.contiguous().mT, k, v)),
        "layout": (ValueError, 'must be "bhld" or "blhd"', lambda: at(q, k, v, layout="lbhd")),
        "bias": (ValueError, "bias.*expected", lambda: at(q, k, v, bias=q.new_zeros(B, HQ, 3, LK))),
        "bias heads": (ValueError, "3 heads", lambda: at(q, k, v, bias=q.new_zeros(B, 3, 1, LK))),
        "bias dtype": (TypeError, "q's float64 or float32",
                       lambda: at(q, k, v, bias=torch.zeros(LQ, LK).half())),
        "key bias": (ValueError, "key_bias", lambda: at(q, k, v, key_bias=q.new_zeros(3))),
        "sinks": (ValueError, "expected .Hq = 4", lambda: at(q, k, v, sinks=q.new_zeros(2))),
        "slopes": (ValueError, "expected contiguous float32 .Hq",
                   lambda: at(q, k, v, alibi_slopes=torch.ones(2))),
        "scale": (ValueError, "expected a finite number", lambda: at(q, k, v, scale=float("inf"))),
        "softcap": (ValueError, "softcap", lambda: at(q, k, v, softcap=-1.0)),
        "dropout": (ValueError, "expected 0 to 1", lambda: at(q, k, v, dropout_p=1.5)),
        "seed": (TypeError, "seed must be", lambda: at(q, k, v, dropout_p=0.5, seed=1.5)),
        "seed dtype": (TypeError, "seed must be",
                       lambda: at(q, k, v, dropout_p=0.5, seed=torch.tensor(1.0))),
        "offset": (TypeError, "q_offset must be an int", lambda: at(q, k, v, q_offset=1.5)),
        "offsets": (ValueError, r"q_offset \[3\]: expected an int or a tensor",
                    lambda: at(q, k, v, q_offset=[1, 2, 3])),
        "mask": (TypeError, "mask must be a jali Mask", lambda: at(q, k, v, 3)),
        "mask dtype": (TypeError, "must be bool", lambda: at(q, k, v, torch.ones(LQ, LK).int())),
        "mask shape": (ValueError, "dense", lambda: at(q, k, v, torch.ones(LQ, 3).bool())),
        "table": (ValueError, "key_padding",
                  lambda: at(q, k, v, jali.KeyPaddingMask(torch.ones(5).bool()))),
        "varlen rank": (ValueError, "tokens, heads", lambda: jali.attention_varlen(
            q, k, v, torch.tensor([0, 1]), torch.tensor([0, 1]))),
        "cu_seqlens": (ValueError, "cu_seqlens_q decreases at 2", lambda: jali.attention_varlen(
            *packed, torch.tensor([0, 3, 2]), torch.tensor([0, 1, 2]))),
        "cu_seqlens end": (ValueError, "cu_seqlens end at 99", lambda: jali.attention_varlen(
            *packed, torch.tensor([0, 3, 99]), torch.tensor([0, 1, 2]))),
        "cu_seqlens dtype": (TypeError, "cu_seqlens_q must hold integers",
                             lambda: jali.attention_varlen(*packed, torch.tensor([0.0, 2.0]),
                                                           torch.tensor([0, 2]))),
    }  # fmt: skip


@pytest.mark.parametrize("name", _error_cases())
def test_errors_say_what_was_wrong(name: str) -> None:
    kind, text, call = _error_cases()[name]
    with pytest.raises(kind, match=text) as caught:
        call()
    assert type(caught.value) is kind


def test_errors_when_a_gradient_is_needed_are_the_same() -> None:
    q, k, v = inputs()
    with pytest.raises(TypeError, match="convert them to one dtype"):
        jali.attention(q, k.float(), v)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.gpu
def test_cuda_is_not_there_yet() -> None:
    q = torch.zeros(1, 1, 4, 4, device="cuda")
    for call in (jali.attention, lambda *x: _ops.forward(*x, *raw_arguments(q.cpu(), q.cpu()))):
        with pytest.raises((NotImplementedError, RuntimeError), match="not yet"):
            call(q, q, q)


@pytest.mark.parametrize(("lq", "lk"), [(0, 3), (3, 0), (0, 0), (1, 1)])
def test_lengths_of_zero_and_one(lq: int, lk: int) -> None:
    q, k, v = (torch.randn(2, 2, n, 4, requires_grad=True) for n in (lq, lk, lk))
    out, lse = jali.attention(q, k, v, jali.CausalMask(), return_lse=True)
    assert out.shape == (2, 2, lq, 4)
    if lk == 0:
        assert not out.any() and (lse == -torch.inf).all()
    for x, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v)), strict=True):
        assert grad.shape == x.shape and grad.isfinite().all()


def test_an_explanation_pickles() -> None:
    q = torch.randn(1, 1, 8, 8)
    explanation = jali.explain(q, q, q)
    assert pickle.loads(pickle.dumps(explanation)) == explanation


def test_deterministic_algorithms_are_respected() -> None:
    q, k, _ = inputs(grad=False)
    assert not raw_arguments(q, k).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert raw_arguments(q, k).deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert not raw_arguments(q, k).deterministic
    finally:
        torch.use_deterministic_algorithms(False)
