"""How calls behave on a GPU: streams, graphs, compilation, repetition, memory, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jali
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu


def inputs(L: int = 500, H: int = 4, D: int = 64, dtype: torch.dtype = torch.bfloat16) -> list:
    return [torch.randn(2, H, L, D, device="cuda", dtype=dtype) for _ in range(3)]


def one_sequence(heads: int, length: int, D: int) -> list:
    """q, k, v that want gradients."""
    shape = (1, heads, length, D)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def documents(L: int = 500) -> torch.Tensor:
    return (torch.arange(L, device="cuda") // 90).int()[None]


def gradients(call, tensors: list) -> list:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = call(*leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(out.shape, device="cuda", generator=generator).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, dout)]


def test_repeats_are_bitwise_equal() -> None:
    mask = jali.CausalMask() & jali.DocumentMask(documents())
    tensors = inputs()
    call = lambda *x: jali.attention(*x, mask, deterministic=True)  # noqa: E731
    first = gradients(call, tensors)
    for _ in range(100):
        for a, b in zip(first, gradients(call, tensors), strict=True):
            assert torch.equal(a, b)
    fast = [jali.attention(*tensors, mask) for _ in range(100)]
    assert all(torch.equal(x, fast[0]) for x in fast)


@pytest.mark.parametrize("ids", [False, True])
def test_calls_wait_for_those_before_them(ids: bool) -> None:
    """A kernel is launched while the one before it still runs, and reads nothing before that is
    done. ids: one that makes a map comes between."""
    q, k, v = inputs(L=2000, D=128)
    mask = jali.CausalMask() & jali.DocumentMask(documents(2000)) if ids else jali.CausalMask()

    def chain(synchronizes: bool) -> list:
        outs = [q]
        for _ in range(30):
            outs.append(jali.attention(outs[-1], k, v, mask))
            if synchronizes:
                torch.cuda.synchronize()
        return outs

    assert all(torch.equal(a, b) for a, b in zip(chain(False), chain(True), strict=True))


@pytest.mark.parametrize("heads, D", [(64, 64), (64, 128), (32, 256)])
def test_sums_of_many_heads_keep_their_order(heads: int, D: int) -> None:
    """Key tiles add to dq in turns, and a turn is over when its additions are made: 1 call of 400
    differed where only the copy engine had said so."""
    tensors = one_sequence(heads, 1024, D)
    causal = jali.CausalMask()
    for mask in (None, causal, causal & jali.DocumentMask(documents(1024))):
        out = jali.attention(*tensors, mask, deterministic=True)
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, tensors, dout, retain_graph=True)
        for _ in range(400):
            again = torch.autograd.grad(out, tensors, dout, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("heads, length", [(193, 128), (64, 1024)])
def test_sums_are_rounded_when_they_are_complete(heads: int, length: int, D: int) -> None:
    """Whole lines of dq came out as zeros, in 3 of 4 calls with 193 heads, where key tiles were
    counted before what they had added was there for others."""
    tensors = one_sequence(heads, length, D)
    ordered = jali.attention(*tensors, deterministic=True)
    dout = torch.randn_like(ordered)
    expected = torch.autograd.grad(ordered, tensors[0], dout)[0]
    assert float(expected.abs().max()) > 0.2
    out = jali.attention(*tensors)
    for _ in range(200):
        dq = torch.autograd.grad(out, tensors[0], dout, retain_graph=True)[0]
        assert float((dq - expected).abs().max()) < 0.01  # two roundings of numbers below 1


def test_poisoned_memory_is_never_read() -> None:
    """What the allocator hands out is full of NaN, and what a stream's calls keep has been."""
    mask = jali.CausalMask() & jali.DocumentMask(documents())
    tensors = inputs()
    clean = gradients(lambda *x: jali.attention(*x, mask), tensors)
    nans = [torch.full_like(x, torch.nan) for x in tensors]
    gradients(lambda *x: jali.attention(*x, mask), nans)
    poison = [torch.full((n,), torch.nan, device="cuda") for n in (2**10, 2**16, 2**20, 2**24)]
    del poison
    for a, b in zip(clean, gradients(lambda *x: jali.attention(*x, mask), tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
        assert not b.isnan().any()


def test_side_stream() -> None:
    mask = jali.CausalMask() & jali.DocumentMask(documents())
    tensors = inputs()
    expected = jali.attention(*tensors, mask)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = jali.attention(*tensors, mask)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(got, expected)


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_devices
@pytest.mark.parametrize("D", [64, 128, 256])
def test_another_device_than_the_current_one(D: int) -> None:
    scores = torch.randn(2, 4, 500, device="cuda:0")
    masks = (
        None,
        jali.CausalMask() & jali.WindowMask.last(100),
        jali.CausalMask() & jali.DocumentMask(documents()) | jali.PrefixMask(3),
        jali.DynamicMask(scores, 50),
    )
    tensors = inputs(D=D)
    dout = torch.randn_like(tensors[0])
    for mask in masks:
        results = []
        for device in ("cuda:0", "cuda:1"):
            leaves = [x.to(device).requires_grad_() for x in tensors]
            there = None if mask is None else mask.to(device)
            out, lse = jali.attention(
                *leaves, there, dropout_p=0.1, seed=7, deterministic=True, return_lse=True
            )
            grads = torch.autograd.grad(out, leaves, dout.to(device))
            assert torch.cuda.current_device() == 0
            assert all(x.device == torch.device(device) for x in (out, lse, *grads))
            results.append([x.cpu() for x in (out, lse, *grads)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)


@two_devices
def test_streams_and_graphs_of_another_device() -> None:
    mask = (jali.CausalMask() & jali.DocumentMask(documents())).to("cuda:1")
    tensors = [x.to("cuda:1") for x in inputs()]
    expected = jali.attention(*tensors, mask)
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream):  # makes its device the current one
        got = jali.attention(*tensors, mask)
    torch.cuda.synchronize("cuda:1")
    assert torch.equal(got, expected)
    graph = torch.cuda.CUDAGraph()
    # NOTE: torch.cuda.graph keeps a stream of the device that is the current one when it is first
    # made, for all graphs that name none.
    with torch.cuda.graph(graph, stream=stream):
        out = jali.attention(*tensors, mask)
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    torch.cuda.synchronize("cuda:1")
    assert torch.equal(out, jali.attention(*tensors, mask))


@two_devices
def test_tables_of_another_device_are_refused() -> None:
    tensors = [x.to("cuda:1") for x in inputs()]
    with pytest.raises((TypeError, ValueError), match="is on"):
        jali.attention(*tensors, jali.DocumentMask(documents()))


def test_graph_replays_read_tables_anew() -> None:
    ids = documents().clone()
    mask = jali.CausalMask() & jali.DocumentMask(ids)
    tensors = inputs()
    jali.attention(*tensors, mask)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = jali.attention(*tensors, mask)
    graph.replay()
    assert torch.equal(out, jali.attention(*tensors, mask))
    ids.copy_((torch.arange(500, device="cuda") // 33).int()[None])
    tensors[0].copy_(torch.randn_like(tensors[0]))
    graph.replay()
    assert torch.equal(out, jali.attention(*tensors, mask))


def test_no_synchronisation() -> None:
    mask = jali.CausalMask() & jali.DocumentMask(documents())
    tensors = inputs()
    gradients(lambda *x: jali.attention(*x, mask), tensors)
    scores = torch.randn(2, 4, 500, device="cuda")
    chosen = jali.DynamicMask(scores, 50, within=jali.DocumentMask(documents()))
    gradients(lambda *x: jali.attention(*x, chosen), tensors)
    cu = torch.tensor([0, 100, 500], device="cuda", dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous() for x in tensors]
    call = lambda *x: jali.attention_varlen(*x, cu, cu, jali.CausalMask())  # noqa: E731
    gradients(call, packed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(lambda *x: jali.attention(*x, mask), tensors)
        gradients(lambda *x: jali.attention(*x, chosen), tensors)
        gradients(call, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compile_without_breaks_and_new_lengths_compile_no_kernel() -> None:
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def layer(q, k, v, n):
        return jali.attention(q, k, v, jali.CausalMask() & jali.WindowMask.last(n))

    for L, n in ((300, 64), (301, 65), (500, 99)):
        tensors = inputs(L)
        expected = jali.attention(*tensors, jali.CausalMask() & jali.WindowMask.last(n))
        torch.testing.assert_close(layer(*tensors, n), expected)
    assert counter.frame_count <= 2


def test_a_process_may_end_while_the_backward_is_compiled(tmp_path: Path) -> None:
    script = """if True:
        import jali, torch
        q, k, v = torch.randn(3, 1, 1, 64, 64, device="cuda", dtype=torch.bfloat16)
        q.requires_grad_()
        jali.attention(q, k, v, jali.CausalMask() & jali.WindowMask.last(9) | jali.PrefixMask(3))
        torch.cuda.synchronize()
    """
    env = {**os.environ, "JALI_CACHE": str(tmp_path), "CUDA_CACHE_DISABLE": "1"}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)
    assert len(list(tmp_path.glob("*/*.cubin"))) == 3  # forward, backward, its tile map


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_by_hand(dtype: torch.dtype) -> None:
    q, k, v = inputs(dtype=torch.float32)
    mask = jali.CausalMask() & jali.DocumentMask(documents())

    def layer(q, k, v):
        return jali.attention(q, k, v, mask, key_bias=torch.zeros(1, 1, 500, device="cuda"))

    def cast(q, k, v):
        with torch.autocast("cuda", dtype):
            return layer(q, k.to(torch.bfloat16), v)

    want = gradients(
        lambda q, k, v: layer(q.to(dtype), k.to(torch.bfloat16).to(dtype), v.to(dtype)), [q, k, v]
    )
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    for call in (cast, compiled):
        found = gradients(call, [q, k, v])
        assert [x.dtype for x in found] == [dtype, *[torch.float32] * 3]
        assert torch.equal(found[0], want[0])
        for a, b in zip(found[1:], want[1:], strict=True):
            torch.testing.assert_close(a, b)


def test_checkpoint_with_dropout_gives_the_same_numbers() -> None:
    tensors = inputs()

    def layer(q, k, v):
        return jali.attention(q, k, v, jali.CausalMask(), dropout_p=0.2, seed=5)

    assert torch.equal(layer(*tensors), layer(*tensors))
    found = gradients(lambda *x: checkpoint(layer, *x, use_reentrant=False), tensors)
    for a, b in zip(found, gradients(layer, tensors), strict=True):
        torch.testing.assert_close(a, b)
    on_cpu = jali.attention(
        *(x.float().cpu() for x in tensors), jali.CausalMask(), dropout_p=0.2, seed=5
    )
    torch.testing.assert_close(layer(*tensors).cpu().float(), on_cpu, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("heads, D", [(193, 128), (257, 64)])
def test_one_head_behind_those_that_all_blocks_begin_with(heads: int, D: int) -> None:
    """There are fewer row tiles left to prepare than warps that ask for them."""
    tensors = [torch.randn(1, heads, 128, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    expected = gradients(torch.nn.functional.scaled_dot_product_attention, tensors)
    for _ in range(100):
        for a, b in zip(gradients(jali.attention, tensors), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_maps_by_rows_and_by_keys_agree() -> None:
    """A deterministic backward waits for every key tile that is active in a row tile's line."""
    L = 5600
    mask = jali.NeighborhoodMask((8, 700), (3, 3))
    mask = mask & jali.DocumentMask(torch.zeros(1, L, device="cuda", dtype=torch.int32))
    for D in (64, 128, 256):
        tensors = [torch.randn(1, 1, L, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        call = lambda *x: jali.attention(*x, mask, deterministic=True)  # noqa: E731
        first, again = gradients(call, tensors), gradients(call, tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[100, 57], [128, 128], [1], [0, 0], []])
def test_packed_tokens_behind_the_last_sequence_get_zeros(lengths: list[int], D: int) -> None:
    tokens, used = 700, sum(lengths)
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    sinks = torch.zeros(4, device="cuda")
    packed = [torch.randn(tokens, H, D, device="cuda", dtype=torch.bfloat16) for H in (4, 2, 2)]
    for x in packed:
        x[used:] = torch.nan

    def call(count: int) -> list:
        leaves = [x[:count].detach().requires_grad_() for x in packed]
        # What the allocator gives out again is no number.
        [torch.full_like(x, torch.nan) for x in packed for _ in range(3)]
        out, lse = jali.attention_varlen(
            *leaves, ends, ends, jali.CausalMask(), sinks=sinks, return_lse=True
        )
        dout = torch.ones_like(out)
        dout[used:] = torch.nan
        return [out, lse.mT, *torch.autograd.grad(out, leaves, dout)]

    given = call(tokens)
    if used > 0:
        for a, b in zip(given, call(used), strict=True):
            torch.testing.assert_close(a[:used], b, rtol=0, atol=2e-2)
    for x, expected in zip(given, (0, -torch.inf, 0, 0, 0), strict=True):
        assert (x[used:] == expected).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("D, Dv", [(64, 64), (96, 64), (128, 128), (256, 256)])
def test_sequences_do_not_see_the_nan_of_others(D: int, Dv: int, bias: bool) -> None:
    lengths = [100, 57, 130, 1]
    ends = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    bad = torch.zeros(sum(lengths), dtype=torch.bool, device="cuda")
    bad[100:157] = True
    shapes = [(4, D), (2, D), (2, Dv)]
    clean = [torch.randn(len(bad), *s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    weights = torch.randn(len(bad), 4, Dv, device="cuda", dtype=torch.bfloat16)
    table = torch.randn(4, 1, 130, 136, device="cuda", dtype=torch.bfloat16) if bias else None
    for mask in (None, jali.CausalMask(), jali.WindowMask(70, 70)):
        results = []
        for value in (0.5, torch.nan):
            leaves = [x.detach().clone().requires_grad_() for x in clean]
            dout = weights.clone()
            with torch.no_grad():
                for x in (*leaves, dout):
                    x[bad] = value
                if bias:  # what pads it
                    for b, length in enumerate(lengths):
                        table[b, :, length:] = value
                        table[b, :, :, length:] = value
            out = jali.attention_varlen(*leaves, ends, ends, mask, bias=table)
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
        for a, b in zip(*results, strict=True):
            assert b[bad].isnan().all()
            torch.testing.assert_close(b[~bad], a[~bad], rtol=0, atol=2e-2)


def test_wrong_lengths_lead_nowhere_else() -> None:
    """They end with the tokens; calls return, whatever they say."""
    mask = jali.CausalMask()
    packed = [torch.randn(300, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def call(*ends: int) -> list:
        cu = torch.tensor(ends, device="cuda", dtype=torch.int32)
        leaves = [x.detach().requires_grad_() for x in packed]
        out = jali.attention_varlen(*leaves, cu, cu, mask)
        return [out, *torch.autograd.grad(out.float().sum(), leaves)]

    right = call(0, 100, 300)
    for wrong in ((0, 100, 5000), (0, 100, 2**31 - 1), (0, 100, 400, 300), (0, 100, 300, -7)):
        for a, b in zip(call(*wrong), right, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-2)
    for wrong in ((0, 100, 50, 300), (0, 100, -900, 300), (200, 100, 0), (-5, 2**31 - 1)):
        call(*wrong)
    torch.cuda.synchronize()


def test_odd_head_dims_and_strides_are_copied() -> None:
    for D in (1, 3, 36, 100):
        tensors = inputs(130, D=D)
        on_cpu = gradients_on_cpu(tensors)
        for a, b in zip(gradients(jali.attention, tensors), on_cpu, strict=True):
            torch.testing.assert_close(a.cpu().float(), b, rtol=3e-2, atol=3e-2)
    q, k, v = inputs(130)
    blhd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(jali.attention(*blhd), jali.attention(q, k, v))
    assert jali.attention(*blhd).stride() == blhd[0].stride()
    expanded = k[:, :1].expand(-1, 4, -1, -1)
    assert torch.equal(jali.attention(q, expanded, v), jali.attention(q, expanded.contiguous(), v))


def gradients_on_cpu(tensors: list) -> list:
    leaves = [x.float().cpu().requires_grad_() for x in tensors]
    out = jali.attention(*leaves)
    generator = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(out.shape, device="cuda", generator=generator).to(tensors[0].dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.float().cpu())]


@pytest.mark.parametrize("many", ["rows", "keys"])
def test_more_than_two_to_the_31_elements(many: str) -> None:
    large, small, D = 2**24 + 100, 128, 128  # 2^31 + 12800 elements
    last = slice(large - 100, large)  # all that is looked at
    Lq, Lk = (large, small) if many == "rows" else (small, large)
    q, k, v = (
        torch.randn(1, 1, n, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for n in (Lq, Lk, Lk)
    )
    dout = torch.zeros_like(q)
    mask = None
    if many == "rows":
        dout[:, :, last] = torch.randn_like(dout[:, :, last])
    else:
        dout.normal_()
        mask = ~jali.PrefixMask(large - 100)
    out = jali.attention(q, k, v, mask)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout)]

    long = (0,) if many == "rows" else (1, 2)
    few = [x[0, 0, last] if n in long else x[0, 0] for n, x in enumerate((q, k, v))]
    few = [x.detach().float()[None, None].requires_grad_() for x in few]
    expected = torch.nn.functional.scaled_dot_product_attention(*few)
    part = dout[:, :, last] if many == "rows" else dout
    expected = [expected, *torch.autograd.grad(expected, few, part.float())]
    for n, (x, y) in enumerate(zip(found, expected, strict=True)):
        if x.shape[2] == large:
            if n > 0:
                assert not x[:, :, :1000].any()
            x = x[:, :, last]
        torch.testing.assert_close(x.float(), y, rtol=2e-2, atol=5e-3)


def test_errors_name_the_way_out() -> None:
    q, k, v = inputs(64)
    with pytest.raises(NotImplementedError, match="bfloat16 and float16"):
        jali.attention(q.float(), k.float(), v.float())
    with pytest.raises(NotImplementedError, match="up to 256"):
        jali.attention(*inputs(64, D=264))
    with pytest.raises(TypeError, match=r"GPU 0.*\.to\(\)|CPU.*\.to\(\)"):
        jali.attention(q, k, v, jali.DocumentMask(torch.zeros(1, 64).int()))
    with pytest.raises(TypeError, match=r"another device|one device"):
        jali.attention(q, k.cpu(), v)


def test_masks_are_inspected_where_they_are() -> None:
    mask = jali.CausalMask() & jali.DocumentMask(documents())
    cells = mask.dense(1, 1, 500, 500)
    assert cells.is_cuda
    assert torch.equal(cells.cpu(), mask.to("cpu").dense(1, 1, 500, 500))
    assert mask.tiles(1, 1, 500, 500).num_empty == mask.to("cpu").tiles(1, 1, 500, 500).num_empty


def test_explain_tells_of_the_gpu() -> None:
    q, k, v = inputs()
    mask = jali.CausalMask() & jali.DocumentMask(documents())
    said = jali.explain(q, k, v, mask)
    assert said.backend == "cuda"
    assert said.num_visible == 8 * int(mask.dense(1, 1, 500, 500).sum())
    packed = jali.CausalMask() & jali.DocumentMask.from_lengths([128, 372])  # tiles begin anew
    said = jali.explain(q, k, v, packed)
    assert said.num_visible == 8 * int(packed.dense(1, 1, 500, 500).sum())
    assert said.tile == jali.explain(q, k, v, jali.CausalMask()).tile


def test_small_tiles_where_large_ones_would_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    causal, last = jali.CausalMask(), jali.WindowMask.last
    pieces = jali.DocumentMask.from_lengths

    def tile(L: int, mask: jali.Mask | None = None, D: int = 64) -> tuple[int, int]:
        return jali.explain(*inputs(L, H=1, D=D), mask).tile

    small, high, long = (128, 128), (192, 128), (128, 192)
    assert [tile(L) for L in (197, 256, 1024)] == [small] * 3
    assert [tile(L) for L in (192, 384, 2048)] == [high] * 3
    assert [tile(L, causal) for L in (1000, 4000, 4200)] == [small, small, long]
    assert [tile(9000, causal & last(n)) for n in (100, 2048, 2100)] == [small, small, long]
    assert tile(6000, causal & pieces([2000] * 3)) == small
    assert tile(9000, causal & pieces([3000] * 3)) == long
    assert tile(9000, causal & last(100) & pieces([4500] * 2)) == small
    assert tile(200, D=40) == small and tile(200, D=72) == tile(192, D=128) == small
    monkeypatch.setenv("JALI_FORCE", "large,stored")
    assert tile(256) == high
    monkeypatch.setenv("JALI_FORCE", "large")
    assert tile(256, causal) == long


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["window", "documents", "packed documents"])
def test_tiles_from_a_forced_source(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = inputs(L=1000, D=128)
    mask = jali.CausalMask() & {
        "window": jali.WindowMask.last(200),
        "documents": jali.DocumentMask(documents(1000)),
        "packed documents": jali.DocumentMask.from_lengths([400, 600]),
    }[name].to("cuda")

    def call(q, k, v):
        return jali.attention(q, k, v, mask, deterministic=deterministic)

    chosen = gradients(call, tensors)
    visited = {}
    for source in ("dense", "inline", "stored"):
        monkeypatch.setenv("JALI_FORCE", source)
        if source == "inline" and (name == "documents" or deterministic):
            with pytest.raises(NotImplementedError, match="JALI_FORCE=inline"):
                gradients(call, tensors)
            continue
        said = jali.explain(*tensors, mask)
        assert said.source == source
        visited[source] = said.num_partial + said.num_full
        for a, b in zip(gradients(call, tensors), chosen, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert visited["dense"] > 2 * visited["stored"]


def test_checks_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs()
    monkeypatch.setattr(jali._check, "LEVEL", "cpu")
    jali.attention(q, k, v, jali.CausalMask() & jali.DocumentMask(documents()))
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    cu = torch.tensor([0, 300, 200, 500], device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match="decreases"):
        jali.attention_varlen(*packed, cu, cu)
