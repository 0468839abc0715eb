"""jali under torch.compile and torch.export: one graph for all lengths, offsets, widths, tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jali
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

HQ, HKV, D = 4, 2, 8


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def qkv(L: int, grad: bool = True, B: int = 2, extra: int = 3) -> tuple[Tensor, ...]:
    shapes = ((B, HQ, L, D), (B, HKV, L + extra, D), (B, HKV, L + extra, D))
    return tuple(torch.randn(s, requires_grad=grad) for s in shapes)


#: Masks and options from three numbers that change from call to call.
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, int, int], Tensor]] = {
    "none": lambda q, k, v, n, off: jali.attention(q, k, v),
    "causal": lambda q, k, v, n, off: jali.attention(q, k, v, jali.CausalMask(off)),
    "window and sinks": lambda q, k, v, n, off: jali.attention(
        q, k, v, jali.CausalMask() & (jali.WindowMask.last(n) | jali.PrefixMask(off)), q_offset=off
    ),
    "documents": lambda q, k, v, n, off: jali.attention(
        q, k, v, jali.DocumentMask(torch.arange(k.shape[2]) // n) & jali.DilatedMask(n).complement()
    ),
    "intervals": lambda q, k, v, n, off: jali.attention(
        q, k, v, jali.KeyIntervalMask(None, torch.arange(k.shape[2]) + n, offset=off)
    ),
    "blocks": lambda q, k, v, n, off: jali.attention(
        q, k, v, jali.BlockSparseMask(torch.ones(20, 20).tril().bool(), (n, n + 1))
    ),
    "dense": lambda q, k, v, n, off: jali.attention(
        q, k, v, torch.arange(q.shape[2])[:, None] % n != torch.arange(k.shape[2]) % n
    ),
    "bias": lambda q, k, v, n, off: jali.attention(
        q, k, v, bias=q.sum(-1, keepdim=True) * 0.1, sinks=torch.ones(HQ), softcap=3.0
    ),
    "blhd": lambda q, k, v, n, off: jali.attention(
        *(x.transpose(1, 2).contiguous() for x in (q, k, v)), jali.CausalMask(), layout="blhd"
    ).transpose(1, 2),
    "strided": lambda q, k, v, n, off: jali.attention(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)), return_lse=True
    )[0],
    "varlen": lambda q, k, v, n, off: jali.attention_varlen(
        *(x[0].transpose(0, 1) for x in (q, k, v)),
        torch.tensor([0, 2, 7]),
        torch.tensor([0, 5, 9]),
        jali.CausalMask() | jali.PrefixMask(n),
    ),
}  # fmt: skip


def check_equal(
    function: Callable[..., Tensor], compiled: Callable[..., Tensor], *args: Any
) -> None:
    """Outputs and gradients of both, at fresh leaves."""
    results = []
    for call in (function, compiled):
        leaves = [x.detach().requires_grad_() for x in args[:3]]
        out = call(*leaves, *args[3:])
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dynamic", [True, None])
def test_new_lengths_offsets_and_widths_do_not_recompile(name: str, dynamic: bool | None) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=dynamic, backend=counter)
    graphs = []
    for L, n, off in ((16, 3, 2), (24, 5, 7), (33, 9, 4), (47, 4, 9), (16, 6, 3)):
        check_equal(CALLS[name], compiled, *qkv(L), n, off)
        graphs.append(sum(len(g.graph.nodes) > 0 for g in counter.graphs))
    # With dynamic=None torch itself takes sizes as fixed until the first change.
    assert graphs[-1] == (1 if dynamic else 2), graphs
    assert graphs[-1] == graphs[0 if dynamic else 1]


@pytest.mark.parametrize("name", ["window and sinks", "documents"])
def test_inductor(name: str) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, dynamic=True)
    for L, n, off in ((16, 3, 2), (29, 5, 7)):
        check_equal(CALLS[name], compiled, *qkv(L), n, off)


def test_masks_as_arguments() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: jali.Mask) -> Tensor:
        return jali.attention(q, k, v, mask)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for L, n in ((16, 3), (24, 5), (33, 9)):
        ids = torch.arange(L + 3) // n
        mask = jali.WindowMask(n, 2) & jali.DocumentMask(ids) | jali.PrefixMask(n)
        check_equal(call, compiled, *qkv(L), mask)
    assert sum(len(g.graph.nodes) > 0 for g in counter.graphs) == 1


def test_another_structure_is_another_graph() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: jali.Mask) -> Tensor:
        return jali.attention(q, k, v, mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for mask in (jali.CausalMask(), ~jali.CausalMask(), jali.CausalMask(2), None):
        check_equal(call, compiled, *qkv(9), mask)


def test_a_plan_as_argument() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, plan: jali.Plan) -> Tensor:
        return jali.attention(q, k, v, plan)

    plan = jali.plan(jali.CausalMask() & jali.WindowMask.last(3), 2, HQ, HKV, 9, 12)
    check_equal(call, torch.compile(call, fullgraph=True, backend="aot_eager"), *qkv(9), plan)


def test_dropout_draws_anew_in_every_run_of_a_graph() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(q, k, v, dropout_p=0.5)

    args = qkv(16, grad=False)
    first, second = call(*args), call(*args)
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = call(*args)
    torch.manual_seed(5)
    assert torch.equal(call(*args), third)


def test_a_seed_that_changes_does_not_recompile() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, seed: Any) -> Tensor:
        return jali.attention(q, k, v, dropout_p=0.5, seed=seed)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    for seed in (3, 11, 12345):
        check_equal(call, compiled, *qkv(16), seed)
    assert sum(len(g.graph.nodes) > 0 for g in counter.graphs) == 1


class Layer(torch.nn.Module):
    def __init__(self, mask: jali.Mask) -> None:
        super().__init__()
        self.mask = mask
        self.project = torch.nn.Linear(D, D)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(self.project(q), k, v, self.mask, softcap=5.0)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    layer = Layer(jali.CausalMask() & jali.WindowMask.last(4)).eval()
    length = torch.export.Dim("length", min=2, max=512)
    keys = torch.export.Dim("keys", min=2, max=512)
    shapes = ({2: length}, {2: keys}, {2: keys})
    program = torch.export.export(layer, qkv(16, grad=False), dynamic_shapes=shapes, strict=strict)
    for L in (16, 31):
        args = qkv(L, grad=False)
        torch.testing.assert_close(program.module()(*args), layer(*args))


def test_autocast_in_and_around_a_graph() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(q, k, v, jali.CausalMask())

    def cast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(*tensors)

    q, k, v = qkv(9)
    want = layer(*(x.bfloat16() for x in (q, k, v)))
    compiled = [torch.compile(f, fullgraph=True, backend="aot_eager") for f in (cast, layer)]
    outs = [compiled[0](q, k, v), compiled[1](q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        outs.append(compiled[1](q, k, v))
    assert [x.dtype for x in outs] == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert torch.equal(outs[0], want) and torch.equal(outs[2], want)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (outs[0], want))):
        assert torch.equal(a, b)


def test_an_exported_program_can_be_checkpointed() -> None:
    mask = jali.CausalMask() & jali.DocumentMask((torch.arange(9) // 4).int()[None])

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return jali.attention(q, q, q, mask)

    q = torch.randn(1, 2, 9, 8, requires_grad=True)
    exported = torch.export.export(Layer(), (q,)).module()
    checkpoint(exported, q, use_reentrant=False).sum().backward()
    got, q.grad = q.grad, None
    Layer()(q).sum().backward()
    torch.testing.assert_close(got, q.grad)


def test_lengths_that_a_graph_does_not_know() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def kept(x: Tensor, keep: Tensor, ends: Tensor) -> Tensor:
        x = x[keep]
        return jali.attention_varlen(x, x, x, ends, ends, jali.CausalMask())

    x = torch.randn(20, 2, 8, requires_grad=True)
    keep = torch.arange(20) % 3 > 0
    ends = torch.tensor([0, 5, int(keep.sum())], dtype=torch.int32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = kept(x, keep, ends)
        [grad] = torch.autograd.grad(got.sum(), x)
    packed = x[keep]
    want = jali.attention_varlen(packed, packed, packed, ends, ends, jali.CausalMask())
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(grad, torch.autograd.grad(want.sum(), x)[0])


def test_errors_while_tracing_are_the_same() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(q, k, v, jali.CausalMask())

    q, k, v = qkv(8, grad=False)
    with pytest.raises(Exception, match="a divisor of q's"):
        call(q[:, :3], k, v)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="different head dims"):
        call(q, k[..., :4], v)


def test_errors_when_a_graph_runs_are_pythons() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        return jali.attention(q, k, v, jali.KeyPaddingMask(keep))

    with pytest.raises(ValueError, match="key_padding"):
        call(*qkv(8, grad=False), torch.ones(2, 5, dtype=torch.bool))


def test_no_gradients_in_a_graph() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return jali.attention(q, k, v, jali.CausalMask())

    args = qkv(8, grad=False)
    with torch.no_grad():
        compiled = torch.compile(call, fullgraph=True)
        torch.testing.assert_close(compiled(*args), call(*args))


def test_fake_tensors_give_the_shapes_without_computing() -> None:
    q, k, v = (x.detach().to("meta") for x in qkv(1000))
    out, lse = torch.ops.jali.attention_forward(
        q, k, v, *[None] * 12, None, 0.0, 0.0, False
    )  # fmt: skip
    assert out.shape == (2, HQ, 1000, D) and lse.shape == (2, HQ, 1000) and out.is_meta
