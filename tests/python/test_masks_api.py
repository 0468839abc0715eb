"""The mask classes: what they mean, accept, refuse, and how they behave as values."""

from __future__ import annotations

import doctest
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jali
import numpy as np
import pytest
import torch
from jali._mask import CallContext, DerivedMask, leaf_kind, mask_class
from jali._words import parse_mask
from torch import Tensor

B, H, LQ, LK = 2, 4, 7, 11
b, h, i, j = (
    torch.arange(n).view([-1 if d == n_ else 1 for d in range(4)])
    for n_, n in enumerate((B, H, LQ, LK))
)
p = i + LK - LQ


def ints(*shape: int, high: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, high, shape, generator=generator, dtype=torch.int32)


Q_IDS, K_IDS, IDS = ints(B, LQ, high=3) - 1, ints(B, LK, high=3) - 1, ints(B, LK, high=3) - 1
START, END = ints(B, 2, LK), ints(1, LK) + 2
FLASH = ints(B, 2, LK, 4, high=LQ + 1)
KEEP = ints(B, LK, high=2).bool()
BLOCKS = ints(B, H, 3, 3, high=2).bool()
DENSE = ints(1, H, LQ, 1, high=2).bool()
OFFSETS = torch.tensor([1, -2])
PTR, COL = torch.tensor([0, 1, 3, 3]), torch.tensor([2, 0, 1])
CSR = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, 0]]).bool()


CUT = torch.tensor([[0] * 3 + [1] * 5 + [-1] * 3, [0] * 5 + [1] * 6])


def at(table: Tensor, *index: Tensor) -> Tensor:
    return table[tuple(x.clamp(0, n - 1) for x, n in zip(index, table.shape, strict=True))]


def flash(n: int) -> list[Tensor]:
    """Column n of the FlashMask table at every cell, heads 2 -> 4."""
    return FLASH[..., n].long().repeat_interleave(2, 1)[:, :, None]


#: name -> (mask, its formula as a tensor)
MASKS: dict[str, tuple[jali.Mask, Tensor]] = {
    "causal": (jali.CausalMask(), j <= p),
    "causal top-left": (jali.CausalMask(0), j <= i),
    "causal per batch": (jali.CausalMask(OFFSETS), j <= i + OFFSETS.view(2, 1, 1, 1)),
    "window": (jali.WindowMask(2, 1), (p - 2 <= j) & (j <= p + 1)),
    "window left": (jali.WindowMask(2, None), p - 2 <= j),
    "window per head": (jali.WindowMask(torch.tensor([0, 5]), 0),
                        (p - torch.tensor([0, 0, 5, 5]).view(1, 4, 1, 1) <= j) & (j <= p)),
    "last": (jali.WindowMask.last(3), (p - 3 < j) & (j <= p)),
    "last per head": (jali.WindowMask.last([1, 2, 3, 4], 0),
                      (i - 1 - h < j) & (j <= i)),
    "prefix": (jali.PrefixMask(4), j < 4),
    "prefix per batch": (jali.PrefixMask([3, 0]), j < torch.tensor([3, 0]).view(2, 1, 1, 1)),
    "padding": (jali.KeyPaddingMask(KEEP), KEEP[:, None, None]),
    "documents": (jali.DocumentMask(Q_IDS, K_IDS),
                  (at(Q_IDS, b, i) == at(K_IDS, b, j)) & (at(Q_IDS, b, i) >= 0)),
    "documents by position": (jali.DocumentMask(IDS),
                              (at(IDS, b, p) == at(IDS, b, j)) & (at(IDS, b, p) >= 0)),
    "packed documents": (jali.PackedDocumentMask([0, 3, 3, 8]),
                         (at(CUT, 0 * b, p) == at(CUT, 0 * b, j)) & (at(CUT, 0 * b, p) >= 0)),
    "packed documents per batch": (jali.PackedDocumentMask([[0, 3, 8], [0, 5, LK]]),
                                   (at(CUT, b, p) == at(CUT, b, j)) & (at(CUT, b, p) >= 0)),
    "key intervals": (jali.KeyIntervalMask(START, END),
                      (START.repeat_interleave(2, 1)[:, :, None] <= i) & (i < END[0])),
    "key intervals by position": (jali.KeyIntervalMask(None, END, None), p < END[0]),
    "row intervals": (jali.RowIntervalMask(ints(LQ), ints(B, 1, LQ)),
                      (ints(LQ)[:, None] <= j) & (j < ints(B, 1, LQ)[..., None])),
    "row intervals, no start": (jali.RowIntervalMask(None, ints(LQ)), j < ints(LQ)[:, None]),
    "dilated": (jali.DilatedMask(3), (p - j) % 3 == 0),
    "dilated top-left": (jali.DilatedMask(3, 0), (i - j) % 3 == 0),
    "blocks": (jali.BlockSparseMask(BLOCKS, (3, 4)), at(BLOCKS, b, h, i // 3, j // 4)),
    "block csr": (jali.BlockSparseMask.from_csr(PTR, COL, (3, 4)), at(CSR, i // 3, j // 4)),
    "dense": (jali.DenseMask(DENSE), DENSE),
    "predicate": (jali.PredicateMask(lambda b, h, q, k: (q + h) % 3 != k % (b + 2)),
                  (i + h) % 3 != j % (b + 2)),
    "flashmask causal 1": (jali.KeyIntervalMask.from_flashmask(FLASH[..., :1]),
                           (i < flash(0)) & (j <= i)),
    "flashmask causal 2": (jali.KeyIntervalMask.from_flashmask(FLASH[..., :2]),
                           ~((flash(0) <= i) & (i < flash(1))) & (j <= i)),
    "flashmask 2": (jali.KeyIntervalMask.from_flashmask(FLASH[..., :2], causal=False),
                    (i < flash(0)) & (i >= flash(1))),
    "flashmask 4": (jali.KeyIntervalMask.from_flashmask(FLASH, causal=False),
                    ~((flash(0) <= i) & (i < flash(1))) & ~((flash(2) <= i) & (i < flash(3)))),
    "and": (jali.CausalMask() & jali.PrefixMask(3), (j <= p) & (j < 3)),
    "or": (jali.CausalMask(0) | jali.PrefixMask(3), (j <= i) | (j < 3)),
    "not": (~jali.CausalMask(), j > p),
    "complement": (jali.CausalMask().complement(), j > p),
    "tree": (~(jali.DilatedMask(2) & ~jali.KeyPaddingMask(KEEP)) | jali.CausalMask(0),
             ~(((p - j) % 2 == 0) & ~KEEP[:, None, None]) | (j <= i)),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_dense_is_the_formula(name: str) -> None:
    mask, cells = MASKS[name]
    got = mask.dense(B, H, LQ, LK, num_kv_heads=2)
    assert got.dtype == torch.bool and got.shape == (B, H, LQ, LK)
    assert torch.equal(got, cells.expand(B, H, LQ, LK))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("tile", [(2, 3), (4, 4), (128, 128)])
def test_tiles_are_exact(name: str, tile: tuple[int, int]) -> None:
    mask, cells = MASKS[name]
    cells = cells.expand(B, H, LQ, LK)
    found = mask.tiles(B, H, LQ, LK, tile, num_kv_heads=2)
    m, n = tile
    want = torch.empty(B, H, -(-LQ // m), -(-LK // n), dtype=torch.int8)
    for r in range(want.shape[2]):
        for c in range(want.shape[3]):
            part = cells[:, :, r * m : (r + 1) * m, c * n : (c + 1) * n].flatten(2)
            want[:, :, r, c] = part.any(-1).to(torch.int8) + part.all(-1)
    assert found.classes.dtype == torch.int8
    assert torch.equal(found.classes.expand_as(want), want)
    counts = [int((found.classes == c).sum()) for c in range(3)]
    assert [found.num_empty, found.num_partial, found.num_full] == counts
    assert found.density == sum(counts[1:]) / sum(counts)


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_values(name: str) -> None:
    mask, cells = MASKS[name]
    if "predicate" not in name:  # a lambda has no pickle
        copy = pickle.loads(pickle.dumps(mask))
        assert copy == mask and hash(copy) == hash(mask) and repr(copy) == repr(mask)
        assert torch.equal(copy.dense(B, H, LQ, LK, num_kv_heads=2), cells.expand(B, H, LQ, LK))
    assert mask.to("cpu") == mask
    for other, (different, _) in MASKS.items():
        same = different is mask or {name, other} == {"not", "complement"}
        assert (mask == different) == same
    with pytest.raises(TypeError, match="has no truth value"):
        bool(mask)
    with pytest.raises(AttributeError):
        mask.offset = 1  # type: ignore[attr-defined]


def test_equality_looks_into_tables_and_hash_does_not() -> None:
    one, other = (jali.KeyPaddingMask(torch.tensor([True, x])) for x in (True, False))
    assert one != other and hash(one) == hash(other)
    assert one == jali.KeyPaddingMask(torch.tensor([1, 1]))
    assert jali.PrefixMask(2) != jali.PrefixMask(3)
    assert jali.CausalMask() != jali.CausalMask(0) and jali.CausalMask() != 3
    assert len({jali.CausalMask(), jali.CausalMask(), jali.PrefixMask(1)}) == 2


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "import jali, torch; print(hash(jali.CausalMask() & jali.KeyPaddingMask(torch.ones(3))))"
    code = code.replace("torch.ones(3)", "torch.ones(3).bool()")
    outputs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        for _ in range(2)
    }
    here = hash(jali.CausalMask() & jali.KeyPaddingMask(torch.ones(3).bool()))
    assert outputs == {f"{here}\n"}


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (jali.CausalMask(), "CausalMask()"),
        (jali.CausalMask(0), "CausalMask(offset=0)"),
        (~jali.PrefixMask(3), "~PrefixMask(length=3)"),
        (jali.DocumentMask(IDS), "DocumentMask(q_ids=int32[2, 11])"),
        (jali.PackedDocumentMask([0, 4]), "PackedDocumentMask(cu_seqlens=int32[2])"),
        (
            (jali.CausalMask() | jali.PrefixMask(1)) & ~(jali.DilatedMask(2) & jali.CausalMask()),
            "(CausalMask() | PrefixMask(length=1)) & ~(DilatedMask(step=2) & CausalMask())",
        ),
        (jali.NeighborhoodMask(4, 3, 1, True),
         "NeighborhoodMask(shape=(4,), kernel=(3,), causal=(True,))"),
    ],
)  # fmt: skip
def test_repr(mask: jali.Mask, text: str) -> None:
    assert repr(mask) == text


def test_to_moves_tables_of_the_whole_tree() -> None:
    mask = jali.CausalMask() & ~jali.KeyIntervalMask(START, None) | jali.PrefixMask([1, 2])
    moved = mask.to("meta")
    _, tables, _ = moved.flatten()
    assert [t.device.type for t in tables] == ["meta", "meta"] and moved != mask
    assert jali.CausalMask().to("meta") == jali.CausalMask()


def test_flatten_separates_structure_from_numbers() -> None:
    small, large = (jali.CausalMask(n) & ~jali.WindowMask.last(n) for n in (1, 1000))
    assert small.flatten()[0] == large.flatten()[0]
    assert small.flatten()[2] == [1, 0, 0] and large.flatten()[2] == [1000, 999, 0]


# From other descriptions


def test_document_mask_from_lengths() -> None:
    mask = jali.DocumentMask.from_lengths([3, 0, 2])
    ids = torch.tensor([0, 0, 0, 2, 2])
    assert torch.equal(mask.dense(1, 1, 5, 5)[0, 0], ids[:, None] == ids)
    longer = jali.DocumentMask.from_cu_seqlens(torch.tensor([0, 3, 5]))
    assert longer.ids(7).tolist() == [[0, 0, 0, 1, 1, -1, -1]]
    assert not longer.dense(1, 1, 7, 7)[0, 0, 5:].any()
    batch = jali.DocumentMask.from_lengths([[3, 0, 2], [1, 1, 1]])
    assert batch.cu_seqlens.tolist() == [[0, 3, 3, 5], [0, 1, 2, 3]]
    assert batch.ids(4).tolist() == [[0, 0, 0, 2], [0, 1, 2, -1]]


Dims = tuple[int, ...]


def brute_neighborhood(shape: Dims, kernel: Dims, dilation: Dims, causal: Dims) -> Tensor:
    """Row by row: the `kernel` cells of x's residue class that are nearest, inside the grid."""
    grid = torch.cartesian_prod(*(torch.arange(n) for n in shape)).view(-1, len(shape))
    cells = torch.ones(len(grid), len(grid), dtype=torch.bool)
    for d, (n, k, step, past) in enumerate(zip(shape, kernel, dilation, causal, strict=True)):
        for row, x in enumerate(grid[:, d].tolist()):
            group = list(range(x % step, n, step))
            place = group.index(x)
            first = max(place - k + 1, 0) if past else min(max(place - k // 2, 0), len(group) - k)
            last = place if past else first + k - 1
            cells[row] &= torch.isin(grid[:, d], torch.tensor(group[first : last + 1]))
    return cells


@pytest.mark.parametrize(
    "arguments",
    [
        ((7,), (3,), (1,), (False,)),
        ((9,), (3,), (3,), (False,)),
        ((8,), (4,), (1,), (True,)),
        ((4, 5), (3, 2), (1, 2), (False, True)),
        ((3, 4, 4), (3, 1, 2), (1, 1, 2), (True, False, False)),
    ],
)
def test_neighborhood(arguments: tuple[Any, ...]) -> None:
    cells = brute_neighborhood(*arguments)
    got = jali.NeighborhoodMask(*arguments).dense(1, 1, *cells.shape)[0, 0]
    assert torch.equal(got, cells)


def test_varlen_dense_and_tiles() -> None:
    cu_q, cu_k = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 5])
    cells = jali.CausalMask().dense(2, 1, 3, 4, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    assert torch.equal(cells[0, 0, :2], torch.arange(4) <= torch.arange(2)[:, None] + 2)
    assert torch.equal(cells[1, 0, :, :1], torch.arange(1) <= torch.arange(3)[:, None] - 2)
    assert not cells[0, 0, 2:].any() and not cells[1, 0, :, 1:].any()


def test_derived_masks_are_told_where_the_tables_are() -> None:
    seen = []

    @mask_class
    class Spy(DerivedMask):
        table: Tensor

        def lower(self, ctx: CallContext) -> jali.Mask:
            seen.append(ctx.device)
            return jali.CausalMask()

    (jali.CausalMask() & ~Spy(torch.ones(2, device="meta"))).dense(1, 1, 2, 2)
    (jali.CausalMask() & ~Spy(torch.ones(2))).dense(1, 1, 2, 2)
    assert [device.type for device in seen] == ["meta", "cpu"]


def test_varlen_dense_refuses_packed_tables_with_a_tail() -> None:
    cu = torch.tensor([0, 2, 5])
    ids = torch.tensor([0, 0, 1, 1, 2])
    cells = jali.DocumentMask(ids).dense(2, 1, 3, 3, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert cells[0, 0, :2, :2].all() and cells[1, 0].int().tolist() == [
        [1, 1, 0],
        [1, 1, 0],
        [0, 0, 1],
    ]
    tail = torch.cat([ids, ids[:2]])  # its length is no padded one either: nobody could tell
    for ask in (jali.DocumentMask(tail).dense, jali.DocumentMask(tail).tiles):
        with pytest.raises(ValueError, match="7 entries, but the sequences cover 5 tokens"):
            ask(2, 1, 3, 3, cu_seqlens_q=cu, cu_seqlens_k=cu)
    q = torch.randn(7, 1, 4)  # the call itself knows how many tokens there are
    out = jali.attention_varlen(q, q, q, cu, cu, jali.DocumentMask(tail))
    want = jali.attention_varlen(q[:5], q[:5], q[:5], cu, cu, jali.DocumentMask(ids))
    assert torch.equal(out[:5], want)


# What constructors take and refuse


def test_constructors_convert() -> None:
    for value in ([1, 2], np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([1, 2]).short()):
        assert jali.PrefixMask(value) == jali.PrefixMask(torch.tensor([1, 2], dtype=torch.int32))
    assert jali.PrefixMask(np.int64(3)) == jali.PrefixMask(3)
    assert jali.KeyPaddingMask([[1, 0]]) == jali.KeyPaddingMask(torch.tensor([[True, False]]))
    assert jali.BlockSparseMask(BLOCKS, 3) == jali.BlockSparseMask(BLOCKS, (3, 3))


REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "float": (TypeError, "length must be an int or a 1-D int tensor", lambda: jali.PrefixMask(1.5)),
    "bool": (TypeError, "length must be an int", lambda: jali.PrefixMask(True)),
    "none": (TypeError, "length must be an int", lambda: jali.PrefixMask(None)),
    "rank": (ValueError, "must have 1 dims, got 2", lambda: jali.PrefixMask([[1]])),
    "float table": (TypeError, "must hold integers", lambda: jali.DocumentMask(torch.ones(3))),
    "float keep": (TypeError, "must be bool", lambda: jali.KeyPaddingMask(torch.ones(3))),
    "object": (TypeError, "must be a tensor", lambda: jali.KeyPaddingMask("yes")),
    "range": (ValueError, "must fit in 32 bits", lambda: jali.PrefixMask(torch.tensor([2**40]))),
    "step": (ValueError, "step must be at least 1", lambda: jali.DilatedMask(0)),
    "step table": (TypeError, "step must be an int", lambda: jali.DilatedMask([1, 2])),
    "interval": (ValueError, "start and end are both None",
                 lambda: jali.KeyIntervalMask(None, None)),
    "flashmask": (ValueError, "must be 1 or 2 with causal=True",
                  lambda: jali.KeyIntervalMask.from_flashmask(FLASH)),
    "flashmask rank": (ValueError, "must have 4 dims",
                       lambda: jali.KeyIntervalMask.from_flashmask(FLASH[0])),
    "block": (ValueError, "block must be at least 1", lambda: jali.BlockSparseMask(BLOCKS, (0, 1))),
    "blocks": (ValueError, "must have 2 to 4 dims", lambda: jali.BlockSparseMask(BLOCKS[0, 0, 0])),
    "kernel": (ValueError, "must not exceed shape", lambda: jali.NeighborhoodMask(4, 3, 2)),
    "dims": (ValueError, "kernel must be one value or 2",
             lambda: jali.NeighborhoodMask((4, 4), (1, 1, 1))),
    "four dims": (ValueError, "1 to 3 dims", lambda: jali.NeighborhoodMask((2,) * 4, 1)),
    "and tensor": (TypeError, r"wrap it: jali.DenseMask\(tensor\)",
                   lambda: jali.CausalMask() & torch.ones(2).bool()),
    "or number": (TypeError, "needs a jali Mask on both sides", lambda: jali.CausalMask() | 3),
    "tile": (ValueError, "at least 1", lambda: jali.CausalMask().tiles(1, 1, 4, 4, (0, 4))),
    "negative": (ValueError, "Lq must be at least 0", lambda: jali.CausalMask().dense(1, 1, -1, 4)),
    "heads": (ValueError, "Hq a multiple of Hkv",
              lambda: jali.CausalMask().dense(1, 4, 2, 2, num_kv_heads=3)),
    "one cu_seqlens": (ValueError, "go together", lambda: jali.CausalMask().dense(
        1, 1, 2, 2, cu_seqlens_q=torch.tensor([0, 2]))),
    "table batch": (ValueError, "key_padding",
                    lambda: jali.KeyPaddingMask(KEEP).dense(3, 1, 2, LK)),
    "table heads": (ValueError, "window", lambda: jali.WindowMask([1, 2, 3], 0).dense(1, 4, 2, 2)),
    "table length": (ValueError, "key_padding",
                     lambda: jali.KeyPaddingMask(KEEP).dense(B, 1, 2, 99)),
    "block grid": (ValueError, "block_bitset",
                   lambda: jali.BlockSparseMask(BLOCKS, 2).dense(B, H, 7, 11)),
    "csr order": (ValueError, "block_csr", lambda: jali.BlockSparseMask.from_csr(
        [0, 2, 2], [1, 0], 4).dense(1, 1, 8, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    kind, text, call = REFUSED[name]
    with pytest.raises(kind, match=text) as caught:
        call()
    assert type(caught.value) is kind


# The whole


def leaves() -> dict[str, list[str]]:
    """C++ leaves and their fields."""
    text = bytes(torch.ops.jali.describe_leaves()).decode()
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        kind, name, *_ = line.split("\t")
        if kind == "leaf":
            found[name] = []
        else:
            found[list(found)[-1]].append(name)
    return found


def test_every_leaf_has_a_class_with_its_fields() -> None:
    examples = [mask for mask, _ in MASKS.values()] + [jali.NeighborhoodMask(5, 3)]
    classes = {m._kind: m for m in examples if isinstance(m, jali.LeafMask)}
    for name, fields in leaves().items():
        if name == "predicate":  # its program is its own
            continue
        assert len(classes[leaf_kind(name)]._fields()) == len(fields), name


def test_examples_in_docstrings() -> None:
    from jali import _position_masks, _table_masks

    for module in (_position_masks, _table_masks):
        result = doctest.testmod(module, extraglobs={"jali": jali, "torch": torch})
        assert result.attempted >= 5 and not result.failed


def test_no_mask_of_a_million_tokens_makes_cells() -> None:
    ids = torch.arange(2**20) // 5000
    mask = jali.CausalMask() & jali.DocumentMask(ids) & jali.WindowMask.last(1024)
    q = torch.zeros(1).expand(1, 1, 2**20, 64)
    explanation = jali.explain(q, q, q, mask)
    assert explanation.plan_bytes <= 8 << 20
    assert explanation.num_visible < 1024 << 20


# Command line


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jali", *arguments], capture_output=True, text=True, check=False
    )


def test_command_line() -> None:
    info, every, why = run("info"), run("list"), run("why", "causal & document(4) L=512 D=32")
    assert info.returncode == every.returncode == why.returncode == 0, why.stderr
    assert jali.__version__ in info.stdout and "JALI_FORCE" in info.stdout
    assert all(name in every.stdout for name in leaves()) and "CausalMask" in every.stdout
    assert "CausalMask() & DocumentMask" in why.stdout and "of the dense work" in why.stdout
    nothing = run()
    assert nothing.returncode == 2 and "python -m jali why" in nothing.stderr
    wrong = run("why", "causal & nonsense")
    assert wrong.returncode == 1 and "'nonsense' is no mask" in wrong.stderr


def test_masks_from_text() -> None:
    parsed = parse_mask("causal & (window(3) | ~prefix) & CausalMask(offset=0)", 8)
    assert parsed == jali.CausalMask() & (
        jali.WindowMask.last(3) | ~jali.PrefixMask(4)
    ) & jali.CausalMask(0)
