"""Packed documents on a GPU: kernels begin new tiles with each, or look cells up."""

from __future__ import annotations

from typing import Any

import jali
import pytest
import torch
from jali.bench.gpu import packed_documents

from tests.python.accuracy import check_attention

pytestmark = pytest.mark.gpu

# What documents are & with, and the same cells of positions p and keys j.
OTHERS: dict[str, tuple[Any, Any]] = {
    "alone": (None, lambda p, j: j >= 0),
    "causal": (jali.CausalMask(), lambda p, j: j <= p),
    "window": (
        jali.CausalMask() & jali.WindowMask.last(100), lambda p, j: (j <= p) & (p - 100 < j)
    ),
    "offset": (jali.WindowMask(None, 3, offset=-7), lambda p, j: j <= p - 4),
    # More than consumers know of a row: with a map of tiles.
    "many windows": (
        jali.CausalMask() & jali.WindowMask.last(300) & jali.WindowMask.last(200)
        & jali.WindowMask.last(400) & jali.WindowMask.last(500),
        lambda p, j: (j <= p) & (p - 200 < j),
    ),
}  # fmt: skip
L = 1100  # documents long enough on average for tiles of their own, in the backward, too
# [B, documents]: tokens are left over, documents are empty, short, as long as tiles.
LENGTHS = {
    "one": [[L]],
    "tail": [[200, 1, 0, 656]],
    "empty at the end": [[700, 400, 0]],
    "of each sequence": [[128, 384, 130], [0, 477, 600]],
}


def visible_cells(lengths: list[list[int]], cells: Any, H: int = 4) -> torch.Tensor:
    ids = jali.DocumentMask.from_lengths(lengths).ids(L)
    p = torch.arange(L)
    same = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] >= 0)
    return (same & cells(p[:, None], p))[:, None].expand(2, H, -1, -1)  # one for both sequences


def masked(lengths: list[list[int]], other: Any) -> jali.Mask:
    documents = jali.DocumentMask.from_lengths(lengths).to("cuda")
    return documents if other is None else other & documents


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("other", OTHERS)
def test_masks(other: str, D: int, deterministic: bool, record_property) -> None:
    """Deterministic: turns are counted by tiles of their own, too."""
    mask, cells = OTHERS[other]
    for n, lengths in enumerate(LENGTHS.values()):
        dtype = (torch.bfloat16, torch.float16)[n % 2]
        check_attention(masked(lengths, mask), visible_cells(lengths, cells), Hkv=4 // (1 + n % 2),
                        D=D, dtype=dtype, seed=n, device="cuda",
                        deterministic=deterministic)  # fmt: skip
    record_property("cases", len(LENGTHS))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("D", [128, 192, 256])
def test_many_backwards(D: int, deterministic: bool) -> None:
    """Key tiles without a row tile beside short and long ones: blocks must not lose each other."""
    q, k, v, dout = torch.randn(4, 2, 8, 8192, D, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = jali.CausalMask() & packed_documents(8192)
    out = jali.attention(*leaves, mask.to("cuda"), deterministic=deterministic)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(300):
        dq, dk, dv = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert torch.equal(dk, first[1])
        assert torch.equal(dv, first[2])
        assert not deterministic or torch.equal(dq, first[0])
    torch.testing.assert_close(dq, first[0], rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("count", [5, 32, 33])
def test_key_tiles_of_unlike_sequences(count: int) -> None:
    """Up to 32 sequences have theirs sorted by length; none may be left out, or come twice."""
    lengths = [37 * n * n % 700 for n in range(count)]  # the first one is empty
    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    tensors = [torch.randn(sum(lengths), H, 128, device="cuda", dtype=torch.bfloat16)
               for H in (4, 2, 2, 4)]  # fmt: skip
    leaves = [x.requires_grad_() for x in tensors[:3]]
    mask = jali.CausalMask()
    out = jali.attention_varlen(*leaves, cu, cu, mask)
    found = torch.autograd.grad(out, leaves, tensors[3])
    for n, length in enumerate(lengths):
        part = slice(cu[n], cu[n] + length)
        own = [x[part].detach()[None].requires_grad_() for x in leaves]
        wanted = jali.attention(*own, mask, layout="blhd")
        wanted = [wanted, *torch.autograd.grad(wanted, own, tensors[3][part][None])]
        for a, b in zip((out, *found), wanted, strict=True):
            torch.testing.assert_close(a[part], b[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("lengths", [[[700]], [[700, 0, 0]], [[0, 640, 60, 0]]])
def test_tokens_behind_the_last_document_see_sinks(lengths: list, record_property) -> None:
    mask, cells = OTHERS["causal"]
    options = {"sinks": torch.linspace(-1, 1, 4, dtype=torch.float64)}
    check_attention(masked(lengths, mask), visible_cells(lengths, cells), Hkv=2, D=128,
                    dtype=torch.bfloat16, device="cuda", options=options)  # fmt: skip
    record_property("cases", 1)


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.zeros(4, dtype=torch.float64), "softcap": 5.0},
        {"alibi_slopes": torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=torch.float64)},
        {"key_bias": torch.randn(2, 2, L, dtype=torch.float64)},
        # Not by tiles of their own:
        {"bias": torch.randn(1, 4, L, L, dtype=torch.float64)},
    ],
    ids=lambda x: "-".join(x),
)
def test_options(options: dict, record_property) -> None:
    lengths = LENGTHS["of each sequence"]
    mask, cells = OTHERS["causal"]
    check_attention(masked(lengths, mask), visible_cells(lengths, cells), Hkv=2, D=128,
                    dtype=torch.bfloat16, device="cuda", options=options)  # fmt: skip
    record_property("cases", 1)


def test_other_positions_and_short_documents() -> None:
    lengths = [[20] * 50]  # too short for tiles of their own
    check_attention(masked(lengths, jali.CausalMask()), visible_cells(lengths, OTHERS["causal"][1]),
                    Hkv=4, D=64, dtype=torch.bfloat16, device="cuda")  # fmt: skip
    lengths = LENGTHS["tail"]
    cells = visible_cells(lengths, OTHERS["causal"][1])
    check_attention(masked(lengths, jali.CausalMask()), cells[:, :, 500:], Hkv=4, D=64,
                    dtype=torch.bfloat16, device="cuda")  # fmt: skip


def test_all_layouts_and_dropout_agree_with_ids() -> None:
    lengths = LENGTHS["of each sequence"]
    packed = jali.DocumentMask.from_lengths(lengths).to("cuda")
    masks = [jali.CausalMask() & m for m in (packed, jali.DocumentMask(packed.ids(L)))]
    tensors = [torch.randn(2, L, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    for options in ({"layout": "blhd"}, {"layout": "blhd", "dropout_p": 0.3, "seed": 3}):
        results = []
        for mask in masks:
            leaves = [x.clone().requires_grad_() for x in tensors[:3]]
            out = jali.attention(*leaves, mask, **options)
            results.append([out, *torch.autograd.grad(out, leaves, tensors[3])])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_kernels_of_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(1, 2, 512, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3)]

    def run(mask: Any) -> None:
        leaves = [x.clone().requires_grad_() for x in tensors]
        jali.attention(*leaves, mask).sum().backward()

    cuts = torch.tensor([0, 300, 512], device="cuda", dtype=torch.int32)
    packed = [x[0].transpose(0, 1).clone().requires_grad_() for x in tensors]
    window = jali.CausalMask() & jali.WindowMask.last(77)
    jali.attention_varlen(*packed, cuts, cuts, window).sum().backward()
    torch.cuda.synchronize()
    monkeypatch.setenv("JALI_OFFLINE", "1")
    monkeypatch.setenv("JALI_CACHE", "/nonexistent")
    run(masked([[200, 312]], window))
    with pytest.raises(RuntimeError, match="JALI_OFFLINE"):
        run(masked([[1] * 512], window))


def test_graph_replays_read_documents_anew() -> None:
    mask = masked([[100, 412]], jali.CausalMask())
    documents = next(x for x in (mask.a, mask.b) if isinstance(x, jali.PackedDocumentMask))
    tensors = [torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    jali.attention(*tensors, mask)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = jali.attention(*tensors, mask)
    documents.cu_seqlens.copy_(torch.tensor([[0, 333, 500]], device="cuda", dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, jali.attention(*tensors, mask))
    assert (out[:, :, 500:] == 0).all() and (out[:, :, :500] != 0).any(-1).all()


def test_wrong_lengths_lead_nowhere_else() -> None:
    cuts = torch.tensor([[0, 2**30, -5, 300, 100]], device="cuda", dtype=torch.int32)
    mask = jali.CausalMask() & jali.PackedDocumentMask(cuts)
    leaves = [
        torch.randn(1, 2, L, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    jali.attention(*leaves, mask).sum().backward()
    torch.cuda.synchronize()
