"""Options of the scores on a GPU, with gradients: every shape of a bias, dtypes, order."""

from __future__ import annotations

from typing import Any

import jali
import pytest
import torch

from tests.gpu.sizes import sizes, tiles
from tests.python import oracle
from tests.python.accuracy import check_attention

pytestmark = pytest.mark.gpu

B, Hq, Hkv, Lq, Lk = 2, 4, 2, 200, 330
BIASES = [
    (B, Hq, Lq, Lk), (1, Hq, Lq, Lk), (B, Hkv, Lq, Lk), (B, 1, Lq, Lk), (1, 1, Lq, Lk),
    (B, Hq, 1, Lk), (1, Hkv, 1, Lk), (B, 1, Lq, 1), (1, Hq, Lq, 1), (B, Hkv, 1, 1), (1, 1, 1, 1),
]  # fmt: skip
KEY_BIASES = [(B, Hq, Lk), (1, Hkv, Lk), (B, 1, Lk)]
NUMBERS: list[dict[str, Any]] = [
    {"softcap": 1.5}, {"scale": -0.2}, {"scale": 0.0}, {"dropout_p": 0.3, "seed": 2**35 + 1},
    {"dropout_p": 0.8, "seed": 9}, {"dropout_p": 1.0, "seed": 3},
    {"softcap": 1.5, "dropout_p": 0.3, "seed": 4},
]  # fmt: skip


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(
    D: int, options: dict[str, Any], dtype: torch.dtype = torch.bfloat16, **more: Any
) -> None:
    visible = oracle.Problem(B, Hq, Hkv, Lq, Lk).visible(oracle.CausalMask())
    for size in sizes(D):
        with tiles(size):
            check_attention(
                jali.CausalMask(), torch.from_numpy(visible), Hkv=Hkv, D=D, dtype=dtype,
                options=options, device="cuda", **more,
            )  # fmt: skip


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [40, 64, 128, 256])
def test_dropout_of_thousands_of_rows(D: int, deterministic: bool) -> None:
    """A backward draws again where the rows of a call end, every 1024, and for each head of a
    group."""
    rows, keys = 1200, 1300
    everything = torch.ones(1, Hq, rows, keys, dtype=torch.bool)
    for mask, visible in ((None, everything), (jali.CausalMask(), everything.tril(keys - rows))):
        with tiles("large" if deterministic else "small"):
            check_attention(
                mask, visible, Hkv=Hkv, D=D, dtype=torch.bfloat16, device="cuda",
                options={"dropout_p": 0.3, "seed": 5}, deterministic=deterministic,
            )  # fmt: skip


@pytest.mark.parametrize("dropped", [127, 128, 13440, 13441, 16384, 16385])
def test_dropout_of_so_many_of_all_numbers(dropped: int) -> None:
    """Of 32768. At D 128 a backward tells what is kept by differences of floats (from 128 to
    13440), by comparisons, or by what is not below (above 16384)."""
    check(128, {"dropout_p": dropped / 32768, "seed": 11})


@pytest.mark.parametrize("D", [40, 64, 128, 256])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_every_shape_of_a_bias(shape: tuple, D: int) -> None:
    check(D, {"bias": draw(*shape)})
    check(D, {"bias": draw(*shape), "softcap": 1.5, "sinks": draw(Hq)}, torch.float16)


@pytest.mark.parametrize("heads", [Hq, Hkv, 1])
@pytest.mark.parametrize(
    "D, rows, keys",
    [(32, 300, 648), (64, 300, 648), (96, 300, 648), (256, 300, 648),
     (128, 300, 648), (128, 300, 650), (128, 300, 652), (128, 1, 648), (128, 300, 8),
     (128, 2500, 264)],
)  # fmt: skip
def test_a_bias_eight_keys_at_a_time(D: int, rows: int, keys: int, heads: int) -> None:
    """Its rows are aligned: it goes by way of shared memory, but for 650 and 652 keys. No mask, a
    light one, a heavy one."""
    everything = torch.ones(B, Hq, rows, keys, dtype=torch.bool)
    causal = everything.tril(keys - rows)
    ids = (torch.arange(keys) // 250).int()[None]
    where = (torch.arange(rows) + keys - rows).clamp(0, keys - 1)
    same = ids[0, where][:, None] == ids[0]
    for mask, visible in (
        (None, everything),
        (jali.CausalMask(), causal),
        (jali.CausalMask() & jali.DocumentMask(ids[:, where], ids), causal & same),
    ):
        for deterministic in (False, True) if heads == Hq else (False,):
            check_attention(
                mask, visible, Hkv=Hkv, D=D, dtype=torch.bfloat16, device="cuda",
                options={"bias": draw(B, heads, rows, keys)}, deterministic=deterministic,
            )  # fmt: skip


@pytest.mark.parametrize("mask", [None, jali.CausalMask()], ids=str)
@pytest.mark.parametrize("D", [40, 64, 96, 128])
@pytest.mark.parametrize("name", ["bias", "key_bias"])
def test_a_bias_without_a_gradient_gives_the_others_the_same(
    name: str, D: int, mask: jali.Mask | None
) -> None:
    """On that, and on the order of sums, depends whether a bias comes by way of shared memory, and
    what is known of a row tile early."""
    keys = 328
    leaves = [
        draw(b, h, n, D, seed=s).to("cuda", torch.bfloat16).requires_grad_()
        for s, (b, h, n) in enumerate([(B, Hq, Lq), (B, Hkv, keys), (B, Hkv, keys)])
    ]

    def call(learns: bool, deterministic: bool) -> list[torch.Tensor]:
        bias = draw(B, Hq, Lq, keys) if name == "bias" else draw(B, Hq, keys)
        bias[..., 5:40] = -torch.inf
        bias = bias.to("cuda", torch.bfloat16).requires_grad_(learns)
        options = {name: bias, "deterministic": deterministic}
        out = jali.attention(*leaves, mask, **options)
        dq, dk, dv = torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(out))
        return [out, dk, dv, *([dq] if deterministic else [])]

    for deterministic in (False, True):
        with_gradient, without = (call(learns, deterministic) for learns in (True, False))
        for a, b in zip(with_gradient, without, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("D", [40, 64, 128, 256])
@pytest.mark.parametrize("shape", KEY_BIASES, ids=str)
def test_every_shape_of_a_key_bias(shape: tuple, D: int) -> None:
    check(D, {"key_bias": draw(*shape)})
    check(D, {"key_bias": draw(*shape), "alibi_slopes": draw(Hq).abs() / 8}, torch.float16)


@pytest.mark.parametrize("D", [64, 128, 192, 256])
@pytest.mark.parametrize("q_offset", [-300, 0, 500, 2000])
def test_alibi_on_both_sides_of_the_diagonal(q_offset: int, D: int) -> None:
    """Key tiles before the diagonal, across it and behind it: no mask, a light one, a heavy one."""
    rows, keys = 300, 900
    everything = torch.ones(B, Hq, rows, keys, dtype=torch.bool)
    ids = (torch.arange(keys) // 250).int()[None]
    where = (q_offset + torch.arange(rows)).clamp(0, keys - 1)
    window = (q_offset + torch.arange(rows))[:, None] - torch.arange(keys) <= 400
    slopes = {"alibi_slopes": draw(Hq).abs(), "q_offset": q_offset}
    for mask, visible in (
        (None, everything),
        (jali.WindowMask(400, None), everything & window),
        (jali.DocumentMask(ids[:, where], ids), everything & (ids[0, where][:, None] == ids[0])),
    ):
        for options in (slopes, slopes | {"sinks": draw(Hq), "key_bias": draw(B, Hkv, keys)}):
            check_attention(
                mask, visible, Hkv=Hkv, D=D, dtype=torch.bfloat16, options=options, device="cuda"
            )


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_key_bias_hides_keys(dtype: torch.dtype, D: int) -> None:
    key_bias = draw(B, 1, Lk)
    key_bias[:, :, 5:40] = key_bias[:, :, 128:256] = -torch.inf  # a tile of keys among them
    key_bias[1, :, :190] = -torch.inf  # rows that see nothing else
    check(D, {"key_bias": key_bias}, dtype, grads=False)


@pytest.mark.parametrize("D", [40, 64, 128, 256])
@pytest.mark.parametrize("options", NUMBERS, ids=str)
def test_numbers(options: dict[str, Any], D: int) -> None:
    check(D, options)
    check(D, options | {"sinks": draw(Hq)}, torch.float16)
    check(D, options, deterministic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("D", [40, 64, 96, 128, 256])
def test_softcap_of_scores_that_are_low_or_not(D: int, dtype: torch.dtype) -> None:
    """In bf16 LSE tells the backward which row tiles' scores are well below the cap, and go by a
    polynomial; heads with a large sink may not, beside others of the same keys."""
    sinks = torch.tensor([0.0, 25.0, 25.0, 0.0], dtype=torch.float64)
    check(D, {"softcap": 30.0}, dtype)
    check(D, {"softcap": 30.0, "sinks": sinks}, dtype)
    check(D, {"softcap": 30.0, "sinks": sinks}, dtype, deterministic=True)
    check(D, {"softcap": 50.0, "scale": 1.0}, dtype)
    everything = torch.ones(B, Hq, 300, 640, dtype=torch.bool)
    check_attention(None, everything, Hkv=Hkv, D=D, dtype=dtype, device="cuda",
                    options={"softcap": 30.0, "sinks": sinks})  # fmt: skip


@pytest.mark.parametrize("D", [64, 128, 256])
def test_everything_together(D: int) -> None:
    options = {
        "softcap": 1.5, "bias": draw(B, Hkv, Lq, Lk), "key_bias": draw(1, 1, Lk, seed=2),
        "alibi_slopes": draw(Hq).abs() / 8, "sinks": draw(Hq), "dropout_p": 0.25, "seed": 5,
    }  # fmt: skip
    check(D, options)
    check(D, options, deterministic=True)


def gradients(D: int, bias: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """out and the gradients of q, k, v and bias."""
    leaves = [
        draw(b, h, n, D, seed=s).to("cuda", torch.bfloat16).requires_grad_()
        for s, (b, h, n) in enumerate([(B, Hq, Lq), (B, Hkv, Lk), (B, Hkv, Lk)])
    ]
    leaves.append(bias.cuda().detach().requires_grad_())
    out = jali.attention(*leaves[:3], jali.CausalMask(), bias=leaves[3], **options)
    return [out, *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9).to(out))]


@pytest.mark.parametrize("D", [64, 256])
def test_a_bias_in_fp32_is_the_same_but_for_rounding(D: int) -> None:
    bias = draw(B, Hq, Lq, Lk).bfloat16()
    half = gradients(D, bias, deterministic=True)
    single = gradients(D, bias.float(), deterministic=True)
    assert single[-1].dtype == torch.float32
    for a, b in zip(half, single, strict=True):
        if D == 256:
            assert torch.equal(a, b.to(a.dtype))
        else:  # fp32 has smaller tiles: another order of sums
            assert (a.float() - b.float()).norm() <= 2**-8 * a.float().norm()


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("shape", [(B, Hkv, Lq, Lk), (1, 1, 1, Lk), (1, 1, Lq, 1)], ids=str)
def test_deterministic_gradients_of_a_bias_repeat(shape: tuple, D: int) -> None:
    first, *others = (
        gradients(D, draw(*shape).bfloat16(), dropout_p=0.2, seed=1, deterministic=True)
        for _ in range(5)
    )
    for other in others:
        for a, b in zip(first, other, strict=True):
            assert torch.equal(a, b)


def test_what_has_no_order_is_refused() -> None:
    bias = draw(1, 1, Lq, Lk).bfloat16()
    with pytest.raises(NotImplementedError, match="expand the bias"):
        gradients(64, bias, deterministic=True)
    gradients(64, bias)


def test_cells_that_nobody_sees_have_no_gradient() -> None:
    above = torch.ones(Lq, Lk, dtype=torch.bool).tril(Lk - Lq).logical_not().cuda()
    for dtype in (torch.bfloat16, torch.float32):
        *_, dbias = gradients(64, draw(B, Hq, Lq, Lk).to(dtype))
        assert (dbias[..., above] == 0).all() and (dbias[..., ~above] != 0).any()
