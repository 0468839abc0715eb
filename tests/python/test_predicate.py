"""PredicateMask: tracing, cells against plain torch evaluation, tile classes, errors.

In this order: operations, a line each; FlexAttention's examples; what torch would refuse; widths of
integers; random expressions; the mask as a value; errors; lengths beyond a tile; attention and
torch.compile.
"""

from __future__ import annotations

import functools
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import jali
import pytest
import torch
import torch._dynamo.testing
from hypothesis import example, given, note, settings
from hypothesis import strategies as st
from jali.predicate import PredicateMask
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

ROOT = Path(__file__).resolve().parents[2]
B, H, LQ, LK = 2, 3, 9, 13

generator = torch.Generator().manual_seed(5)
IDS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4])
BY_BATCH = torch.randint(-3, 9, (B, 13), generator=generator)
BY_HEAD = torch.randint(0, 9, (H,), generator=generator, dtype=torch.int32)
FLAGS = torch.rand(13, generator=generator) < 0.5
GRID = torch.rand(B, H, 13, 13, generator=generator) < 0.5
FLOATS = torch.randn(13, generator=generator)
SMALL = torch.randint(0, 5, (13,), generator=generator, dtype=torch.uint8)
PREFIX = torch.tensor(4)


def cells(fn, B=B, H=H, Lq=LQ, Lk=LK, offset=0):
    """What fn says when torch evaluates it for every cell."""
    b, h = torch.arange(B)[:, None, None, None], torch.arange(H)[:, None, None]
    q, k = torch.arange(Lq)[:, None] + offset, torch.arange(Lk)
    return torch.as_tensor(fn(b, h, q, k)).expand(B, H, Lq, Lk)


def cells_one_by_one(fn, B=B, H=H, Lq=LQ, Lk=LK):
    """The same with 0-d tensors: for what does not broadcast, as `t[b][q]`."""
    out = torch.zeros(B, H, Lq, Lk, dtype=torch.bool)
    for at in torch.cartesian_prod(*map(torch.arange, (B, H, Lq, Lk))):
        out[tuple(at)] = fn(*at)
    return out


# One line per operation (and per way to write it).
OPERATIONS = {
    "add": lambda b, h, q, k: q + 2 + b + k > 9,
    "radd": lambda b, h, q, k: 2 + q < k,
    "sub": lambda b, h, q, k: q - k < 3,
    "rsub": lambda b, h, q, k: 5 - q < k,
    "mul": lambda b, h, q, k: q * k > 20,
    "floordiv": lambda b, h, q, k: (q - k) // 3 == -1,
    "floordiv negative": lambda b, h, q, k: (q - k) // -3 == 1,
    "floordiv traced": lambda b, h, q, k: (q - 5) // (k + 1) == -1,
    "rfloordiv": lambda b, h, q, k: 12 // (k + 1) > q // 2,
    "mod": lambda b, h, q, k: (q - k) % 3 == 1,
    "table method where": lambda b, h, q, k: PREFIX.where(q > k, k) == 4,
    "torch.eq keyword": lambda b, h, q, k: torch.eq(input=q, other=k),
    "mod negative": lambda b, h, q, k: (q - k) % -3 == -1,
    "mod traced": lambda b, h, q, k: (q - 5) % (k + 1) == 2,
    "mod power of two": lambda b, h, q, k: (q - k) % 4 == 3,
    "rmod": lambda b, h, q, k: 12 % (k + 1) == 0,
    "divmod": lambda b, h, q, k: torch.floor_divide(q, 4) == torch.remainder(k, 4),
    "neg": lambda b, h, q, k: -q + k == 2,
    "pos": lambda b, h, q, k: +q == k,
    "pow": lambda b, h, q, k: q**2 + torch.square(k) < 70,
    "abs": lambda b, h, q, k: abs(q - k) <= 2,
    "torch.abs": lambda b, h, q, k: torch.abs(q - k) <= 2,
    "method abs": lambda b, h, q, k: (q - k).abs() <= 2,
    "minimum": lambda b, h, q, k: torch.minimum(q, k) > 4,
    "maximum": lambda b, h, q, k: torch.maximum(q, k) < 6,
    "min of two": lambda b, h, q, k: torch.min(q, k) == 3,
    "max of two": lambda b, h, q, k: torch.max(q, k) == 3,
    "clamp": lambda b, h, q, k: torch.clamp(q - k, -2, 3) == 3,
    "clamp min": lambda b, h, q, k: (q - k).clamp(min=1) == 1,
    "clamp max": lambda b, h, q, k: (q - k).clamp(max=1) == 1,
    "where": lambda b, h, q, k: torch.where(q % 2 == 0, k <= q, k > q),
    "where int": lambda b, h, q, k: torch.where(q > k, q, k * 2) % 3 == 0,
    "where number": lambda b, h, q, k: torch.where(q > k, 1, k) == 1,
    "method where": lambda b, h, q, k: q.where(q > k, k) == 7,
    "lt": lambda b, h, q, k: q < k,
    "le": lambda b, h, q, k: q <= k,
    "gt": lambda b, h, q, k: q > k,
    "ge": lambda b, h, q, k: q >= k,
    "eq": lambda b, h, q, k: q == k,
    "ne": lambda b, h, q, k: q != k,
    "torch.ge": lambda b, h, q, k: torch.ge(q, k),
    "eq bools": lambda b, h, q, k: (q < 4) == (k < 4),
    "ne bools": lambda b, h, q, k: (q < 4) != (k < 4),
    "lt bools": lambda b, h, q, k: (q < 4) < (k < 4),
    "bool with int": lambda b, h, q, k: (q < 4) + 1 == k,
    "bool plus bool": lambda b, h, q, k: (q < 4) + (k < 4),
    "bool times bool": lambda b, h, q, k: (q < 4) * (k < 4),
    "and": lambda b, h, q, k: (q < 4) & (k < 4),
    "or": lambda b, h, q, k: (q < 4) | (k < 4),
    "xor": lambda b, h, q, k: (q < 4) ^ (k < 4),
    "not": lambda b, h, q, k: ~(q < 4),
    "and ints": lambda b, h, q, k: q & k == 0,
    "and constant": lambda b, h, q, k: (q - k) & 3 == 1,
    "or ints": lambda b, h, q, k: q | k == 7,
    "xor ints": lambda b, h, q, k: (q ^ k) > 5,
    "not ints": lambda b, h, q, k: ~q + k == 1,
    "logical_and": lambda b, h, q, k: torch.logical_and(q, k < 5),
    "logical_or": lambda b, h, q, k: torch.logical_or(q < 2, k < 5),
    "logical_xor": lambda b, h, q, k: torch.logical_xor(q < 2, k < 5),
    "logical_not": lambda b, h, q, k: torch.logical_not(q - k),
    "shl": lambda b, h, q, k: (q << 2) > (1 << k),
    "shr": lambda b, h, q, k: ((q - 5) >> 1) == (k >> 2),
    "long": lambda b, h, q, k: (q < k).long() + (k < 5).int() == 2,
    "to bool": lambda b, h, q, k: (q - k).to(torch.bool),
    "float": lambda b, h, q, k: q.float() * 0.75 > k,
    "float to int": lambda b, h, q, k: ((q - k) * 0.7).long() == -1,
    "float constants": lambda b, h, q, k: q * 0.3 + 0.5 >= k - 1.5,
    "float min": lambda b, h, q, k: torch.minimum(q * 0.3, -k + 0.25) < -abs(k * 0.5),
    "constant": lambda b, h, q, k: True,
    "0-d tensor": lambda b, h, q, k: k < PREFIX,
    "table of rows": lambda b, h, q, k: IDS[q] == k,
    "tables": lambda b, h, q, k: IDS[q] == IDS[k],
    "table 2-D": lambda b, h, q, k: BY_BATCH[b, q] <= k,
    "table of heads": lambda b, h, q, k: q - k < BY_HEAD[h],
    "bool table": lambda b, h, q, k: FLAGS[k] & (q >= k),
    "not bool table": lambda b, h, q, k: ~FLAGS[q],
    "grid": lambda b, h, q, k: GRID[b, h, q, k],
    "grid constant": lambda b, h, q, k: GRID[1, -1, q, k],
    "float table": lambda b, h, q, k: FLOATS[q] * 2.0 - FLOATS[k] > 0.25,
    "uint8 table": lambda b, h, q, k: SMALL[k] * 2 > q,
    "table of table": lambda b, h, q, k: IDS[IDS[q]] == IDS[k],
    "mixed index": lambda b, h, q, k: FLAGS[(q - k).abs()],
    "computed index": lambda b, h, q, k: IDS[torch.clamp(q - 3, 0, 12)] < k,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation(name):
    fn = OPERATIONS[name]
    mask = PredicateMask(fn)
    expected = cells(fn)
    assert torch.equal(mask.dense(B, H, LQ, LK), expected)
    check_tiles(mask, expected)


NESTED = {
    "t[b][q]": lambda b, h, q, k: BY_BATCH[b][q] == k,
    "t[b, :][k]": lambda b, h, q, k: BY_BATCH[b, :][k] > q,
    "t[b][h][q][k]": lambda b, h, q, k: GRID[b][h][q][k],
    "t[..., k]": lambda b, h, q, k: GRID[b, ..., k][h, q],
}


@pytest.mark.parametrize("name", NESTED)
def test_nested_indexing(name):
    fn = NESTED[name]
    assert torch.equal(PredicateMask(fn).dense(B, H, LQ, LK), cells_one_by_one(fn))


def test_divmod():
    mask = PredicateMask(lambda b, h, q, k: divmod(q, 4)[0] == divmod(k, 4)[1])
    assert torch.equal(mask.dense(B, H, LQ, LK), cells(lambda b, h, q, k: q // 4 == k % 4))


def exact_classes(dense, tile):
    def reduced(cells, beyond, reduce):
        (m, n), (Lq, Lk) = tile, cells.shape[2:]
        padded = torch.nn.functional.pad(cells, (0, -Lk % n, 0, -Lq % m), value=beyond)
        return reduce(padded.unflatten(3, (-1, n)).unflatten(2, (-1, m)), dim=(3, 5))

    return reduced(dense, False, torch.any).to(torch.int8) + reduced(dense, True, torch.all)


def check_tiles(mask, dense, tiles=((4, 4), (2, 8), (64, 64))):
    """The classes, which rest on the interval analysis wherever it is sure."""
    batches, heads, Lq, Lk = dense.shape
    for tile in tiles:
        classes = mask.tiles(batches, heads, Lq, Lk, tile).classes
        assert torch.equal(classes.expand(batches, heads, -1, -1), exact_classes(dense, tile))


# ---- FlexAttention's examples, as users write them. ----


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx <= 50


def prefix(b, h, q_idx, kv_idx):
    return kv_idx <= torch.tensor([20, 90])[b]


def dilated(b, h, q_idx, kv_idx):
    return ((q_idx - kv_idx) % 4 == 0) & ((q_idx - kv_idx).abs() <= 40)


def sinks(b, h, q_idx, kv_idx):
    return (kv_idx < 4) | (q_idx - kv_idx < 32)


def block_diagonal(b, h, q_idx, kv_idx):
    return q_idx // 32 == kv_idx // 32


def per_head_window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 16 << h


def generate_doc_mask_mod(mask_mod, document_id):
    offsets = torch.cat([torch.tensor([0]), torch.bincount(document_id).cumsum(0)[:-1]])

    def doc_mask_mod(b, h, q_idx, kv_idx):
        same_doc = document_id[q_idx] == document_id[kv_idx]
        q_logical = q_idx - offsets[document_id[q_idx]]
        kv_logical = kv_idx - offsets[document_id[kv_idx]]
        return same_doc & mask_mod(b, h, q_logical, kv_logical)

    return doc_mask_mod


def generate_natten(width, kernel):
    def natten_mask_mod(b, h, q_idx, kv_idx):
        q_x, q_y = q_idx // width, q_idx % width
        kv_x, kv_y = kv_idx // width, kv_idx % width
        center_x = q_x.clamp(kernel // 2, (width - 1) - kernel // 2)
        center_y = q_y.clamp(kernel // 2, (width - 1) - kernel // 2)
        hori_mask = (center_x - kv_x).abs() <= kernel // 2
        vert_mask = (center_y - kv_y).abs() <= kernel // 2
        return hori_mask & vert_mask

    return natten_mask_mod


DOCUMENTS = torch.repeat_interleave(torch.arange(5), torch.tensor([30, 7, 100, 3, 60]))
LENGTHS = torch.tensor([150, 33])
FLEX = {
    "causal": causal,
    "sliding window": and_masks(causal, sliding_window),
    "prefix lm": or_masks(prefix, causal),
    "documents": generate_doc_mask_mod(and_masks(causal, sliding_window), DOCUMENTS),
    "natten": generate_natten(14, 5),
    "dilated": dilated,
    "sinks": and_masks(causal, sinks),
    "block diagonal": block_diagonal,
    "per head": and_masks(causal, per_head_window),
    "lengths": lambda b, h, q, k: (k < LENGTHS[b]) & (q < LENGTHS[b]),
    "noop": noop_mask,
    "contradiction": lambda b, h, q, k: (q < k) & (q > k),
    "cancelling": lambda b, h, q, k: (q + k) - q <= k - 1,
}


@pytest.mark.parametrize("name", FLEX)
@pytest.mark.parametrize("lengths", [(196, 196), (65, 130), (1, 196)])
def test_flex_attention_examples(name, lengths):
    fn = FLEX[name]
    mask = PredicateMask(fn)
    expected = cells(fn, 2, 3, *lengths)
    assert torch.equal(mask.dense(2, 3, *lengths), expected)
    check_tiles(mask, expected, ((64, 64), (16, 32), (128, 128)))


def test_combines_with_other_masks():
    mask = PredicateMask(block_diagonal) & jali.CausalMask() | ~PredicateMask(causal, offset=3)
    q, k = torch.arange(64)[:, None], torch.arange(64)
    expected = ((q // 32 == k // 32) & (k <= q)) | (k > q + 3)
    assert torch.equal(mask.dense(1, 1, 64, 64)[0, 0], expected)


def test_offset():
    shape = (2, 1, 6, 10)
    fn = OPERATIONS["mod"]
    for offset in (0, 4, -3):
        dense = PredicateMask(fn, offset=offset).dense(*shape)
        assert torch.equal(dense, cells(fn, *shape, offset=offset))
    per_batch = PredicateMask(fn, offset=torch.tensor([2, -7])).dense(*shape)
    for b, offset in enumerate((2, -7)):
        assert torch.equal(per_batch[b : b + 1], cells(fn, 1, *shape[1:], offset=offset))
    position = PredicateMask(causal, offset=None)
    assert torch.equal(position.dense(*shape), jali.CausalMask().dense(*shape))
    assert torch.equal(
        position.dense(*shape, q_offset=torch.tensor([1, 3])),
        jali.CausalMask().dense(*shape, q_offset=torch.tensor([1, 3])),
    )


def test_varlen_reads_plain_tables():
    cu_q, cu_k = torch.tensor([0, 5, 12]), torch.tensor([0, 9, 17])
    fn = OPERATIONS["table 2-D"]
    mask = PredicateMask(fn)
    dense = mask.dense(2, 1, 7, 9, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    expected = cells(fn, 2, 1, 7, 9)
    assert torch.equal(dense[0, 0, :5], expected[0, 0, :5])
    assert torch.equal(dense[1, 0, :, :8], expected[1, 0, :, :8])


# ---- Where torch would raise: defined here. ----


def test_division_by_zero_gives_zero():
    zero_at = torch.tensor([0, 2, 0])
    quotient = PredicateMask(lambda b, h, q, k: (k + 5) // zero_at[q] == 0).dense(1, 1, 3, 4)[0, 0]
    remainder = PredicateMask(lambda b, h, q, k: (k + 5) % zero_at[q] == 0).dense(1, 1, 3, 4)[0, 0]
    assert quotient[0].all() and quotient[2].all() and not quotient[1].any()
    assert remainder[0].all() and remainder[1].tolist() == [False, True, False, True]
    huge = torch.tensor([-(2**63)])
    mask = PredicateMask(lambda b, h, q, k: huge[q] // (k - 1) < 0)
    assert mask.dense(1, 1, 1, 3)[0, 0, 0].tolist() == [True, False, True]  # / -1 wraps


def test_indices_are_clamped():
    table = torch.tensor([3, 1, 4])
    dense = PredicateMask(lambda b, h, q, k: table[q - 2] == k).dense(1, 1, 8, 5)[0, 0]
    assert dense.int().argmax(1).tolist() == [3, 3, 3, 1, 4, 4, 4, 4]
    matrix = torch.arange(6).view(2, 3)
    dense = PredicateMask(lambda b, h, q, k: matrix[q, 5 - q] == k).dense(1, 1, 8, 6)[0, 0]
    assert dense.int().argmax(1).tolist() == [2, 5, 5, 5, 4, 3, 3, 3]


def test_shifts_out_of_range():
    def fn(b, h, q, k):
        return torch.where(k < 4, (q - 1) << (k * 40 - 40), (q - 1) >> (k * 40 - 180)) == -1

    dense = PredicateMask(fn).dense(1, 1, 2, 8)[0, 0]
    # left by -40, 0, 40, 80; right by -20, 20, 60, 100
    assert dense[0].tolist() == [False, True, False, False, True, True, True, True]
    assert not dense[1].any()


def test_strided_and_broadcast_tables():
    table = torch.arange(40).view(8, 5)[::2, 1:].t()
    wide = torch.tensor([2]).expand(7)
    fn = lambda b, h, q, k: table[q, k] % 3 == wide[k]  # noqa: E731
    assert torch.equal(PredicateMask(fn).dense(1, 1, 4, 4), cells(fn, 1, 1, 4, 4))


def test_nan_and_infinity():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -0.0])
    for fn in (
        lambda b, h, q, k: x[q] < x[k],
        lambda b, h, q, k: x[q] != x[k],
        lambda b, h, q, k: torch.minimum(x[q], x[k]) == torch.maximum(x[k], x[q]),
        lambda b, h, q, k: x[q] * x[k] >= 0.0,
        lambda b, h, q, k: (x[q] - x[k]).bool(),
        lambda b, h, q, k: torch.clamp(x[q], 0, 1) + x[k] <= 1.0,
    ):
        mask, expected = PredicateMask(fn), cells(fn, 1, 1, 5, 5)
        assert torch.equal(mask.dense(1, 1, 5, 5), expected)
        check_tiles(mask, expected, ((1, 1), (2, 2), (1, 5)))


# ---- Width of integers. ----

BIG = torch.tensor([2**31 - 1, 2**40, -(2**31)])
BIG32 = torch.tensor([2**31 - 1, 0, -(2**31)], dtype=torch.int32)


@pytest.mark.parametrize(
    "fn",
    [
        lambda b, h, q, k: (q + 1) * 1_000_000 * (k + 1) > 3_000_000_000,
        lambda b, h, q, k: (BIG[q] + 1) // 2 == 2**30 + k,
        lambda b, h, q, k: BIG[k] - q * 3 > 2**31 - 5,
        lambda b, h, q, k: (q + 1) << (k * 20) > 2**32,
        lambda b, h, q, k: -BIG[q] == 2**31 - k,
        lambda b, h, q, k: abs(BIG[q] * 5) % 7 == k,
        lambda b, h, q, k: (q * 70_000) * (k * 70_000) - q * (k * 4_900_000_000) == 0,
        lambda b, h, q, k: BIG32[q].long() + 1 > k,
    ],
)
def test_overflow_of_32_bits(fn):
    assert torch.equal(PredicateMask(fn).dense(1, 1, 3, 3), cells(fn, 1, 1, 3, 3))


def test_64_bits_wrap_as_in_torch():
    fn = lambda b, h, q, k: (q + 2**62) * (k + 3) > 0  # noqa: E731
    mask, expected = PredicateMask(fn), cells(fn, 1, 1, 20, 20)
    assert torch.equal(mask.dense(1, 1, 20, 20), expected)
    check_tiles(mask, expected, ((4, 4), (20, 20)))


# ---- Random expressions. ----

NAMES = {
    "ids": IDS,
    "by_batch": BY_BATCH,
    "by_head": BY_HEAD,
    "flags": FLAGS,
    "floats": FLOATS,
    "where": torch.where,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
}


class Clamped:
    """A table with this project's rule for indices beyond it."""

    def __init__(self, table):
        # Integers are exact here, where torch would wrap an int32 table's at 32 bits.
        self.table = table if table.dtype in (torch.bool, torch.float32) else table.long()

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        pairs = zip(index, self.table.shape, strict=True)
        return self.table[tuple(torch.as_tensor(i).clamp(0, n - 1) for i, n in pairs)]


def guarded(operator):
    """Division with this project's rule for 0."""

    def apply(x, y):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        return torch.where(y == 0, 0, operator(x, torch.where(y == 0, 1, y)))

    return apply


TRACED = {**NAMES, "div": lambda x, y: x // y, "mod": lambda x, y: x % y}
PLAIN = {
    **{name: Clamped(x) if isinstance(x, torch.Tensor) else x for name, x in NAMES.items()},
    "div": guarded(torch.floor_divide),
    "mod": guarded(torch.remainder),
}


CONSTANTS = st.integers(-40, 40) | st.sampled_from([64, 128, 100_000, 2**31, -(2**40)])


def one_of(texts):
    return st.sampled_from(texts.split("; "))


DIVISORS = one_of("2; 3; 4; 7; 16; -3; -4; 100; q; k; h; by_batch[b, q]")
INT_LEAVES = one_of("q; k; q; k; b; h; ids[q]; ids[k]; by_batch[b, k]; by_head[h]")
BOOL_LEAVES = one_of("flags[q]; flags[k]; (k <= q); (ids[q] == ids[k])")
FLOAT_LEAVES = one_of("floats[q]; floats[k]; q.float(); (k - q).float()")
COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def form(text, *parts):
    return st.tuples(*parts).map(lambda drawn: text.format(*drawn))


def binary(operators, operands):
    return form("({1} {0} {2})", st.sampled_from(operators), operands, operands)


# Expressions as text, of limited depth: unlimited ones mostly grow until they are thrown away.


@functools.cache
def ints(depth):
    if depth == 0:
        return INT_LEAVES
    x, c = ints(depth - 1), bools(depth - 1)
    return st.one_of(
        INT_LEAVES,
        binary("+-*", x),
        form("({} {} {})", x, st.sampled_from("+*"), CONSTANTS),
        form("({} - {})", CONSTANTS, x),
        form("{}({}, {})", st.sampled_from(["div", "mod"]), x, DIVISORS),
        binary("&|^", x),
        form("({} {} {})", x, st.sampled_from(["<<", ">>"]), st.integers(0, 9)),
        form("({}{})", st.sampled_from("-~"), x),
        form("{}.abs()", x),
        form("{}({}, {})", st.sampled_from(["minimum", "maximum"]), x, x),
        form("where({}, {}, {})", c, x, x | CONSTANTS),
        form("{}.clamp({}, 20)", x, st.integers(-5, 5)),
        form("ids[{}]", x),
        form("by_batch[{}, {}]", x, x),
        form("{}.long()", c),
    )


@functools.cache
def floats(depth):
    if depth == 0:
        return FLOAT_LEAVES
    x = floats(depth - 1)
    return st.one_of(
        FLOAT_LEAVES,
        binary("+-*", x),
        form("({} * {})", x, st.floats(-4, 4, width=32)),
        form("minimum({}, {})", x, x),
        form("(-{}.abs())", x),
        form("where({}, {}, {})", bools(depth - 1), x, x),
    )


@functools.cache
def bools(depth):
    if depth == 0:
        return BOOL_LEAVES
    x, c = ints(depth - 1), bools(depth - 1)
    return st.one_of(
        binary(COMPARISONS, x),
        binary(COMPARISONS, x),
        form("({} {} {})", x, st.sampled_from(COMPARISONS), CONSTANTS),
        binary(COMPARISONS, floats(depth - 1)),
        binary(["&", "|", "^", "==", "!="], c),
        form("(~{})", c),
        form("where({}, {}, {})", c, c, c),
    )


def check_expression(text, lengths):
    fn = eval(f"lambda b, h, q, k: {text}", dict(TRACED))
    plain = eval(f"lambda b, h, q, k: {text}", dict(PLAIN))
    mask, expected = PredicateMask(fn), cells(plain, B, H, *lengths)
    note(f"{mask!r}")
    assert torch.equal(mask.dense(B, H, *lengths), expected), f"check_expression({text!r})"
    check_tiles(mask, expected, ((4, 4), (1, 8), (16, 64)))


@settings(max_examples=int(os.environ.get("JALI_CASES", "400")), deadline=None)
@given(bools(4), st.sampled_from([(9, 13), (17, 70), (1, 5), (40, 3)]))
@example("(ids[div(q, 3)] == mod((q - k), 4))", (17, 70))
def test_random_expressions(text, lengths):
    check_expression(text, lengths)


# ---- The mask as a value. ----


def test_same_structure_for_other_constants():
    def make(n, width, ids):
        return PredicateMask(lambda b, h, q, k: (q // n == k // n) & (ids[q] == ids[k] + width))

    masks = [make(2, 2, IDS), make(3, 2, IDS), make(128, 0, IDS + 1)]
    programs = [mask.flatten()[0] for mask in masks]
    assert programs[0] == programs[1] == programs[2]
    assert masks[0].flatten()[2] != masks[1].flatten()[2]


def test_common_subexpressions_are_recorded_once():
    once = PredicateMask(lambda b, h, q, k: (q * k > 3) & (IDS[q] > q))
    twice = PredicateMask(lambda b, h, q, k: (q * k > 3) & (IDS[q] > q) & (q * k > IDS[q]))
    assert len(twice.fn.program) == len(once.fn.program) + 3 + 3  # one comparison, one `&`


def test_is_a_value():
    def make(n=3, ids=IDS):
        return PredicateMask(lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < n), offset=1)

    mask = make()
    assert mask == make() and hash(mask) == hash(make())
    assert mask == make(ids=IDS.clone())
    assert mask != make(4) and mask != make(ids=IDS + 1) and mask != jali.CausalMask()
    assert mask != PredicateMask(mask.fn)
    copy = pickle.loads(pickle.dumps(mask))
    assert copy == mask and torch.equal(copy.dense(1, 1, 9, 9), mask.dense(1, 1, 9, 9))
    assert mask.to("cpu") == mask
    text = repr(mask)
    assert "t0[q] == t0[k]" in text and "q - k < 3" in text and "int64[13]" in text
    assert "offset=1" in text


def test_tables_are_read_at_the_call():
    table = torch.tensor([1, 2, 3], dtype=torch.int32)
    mask = PredicateMask(lambda b, h, q, k: table[q] == k)
    before = mask.dense(1, 1, 3, 5)
    table += 1
    assert not torch.equal(before, mask.dense(1, 1, 3, 5))


def test_repr_brackets():
    texts = {
        "(q - k) * 2 < q - (k - 1)": lambda b, h, q, k: (q - k) * 2 < q - (k - 1),
        "(q < k) & ~(k < 3)": lambda b, h, q, k: (q < k) & ~(k < 3),
        "(q < k) == (k < 3)": lambda b, h, q, k: (q < k) == (k < 3),
        "-(q + k) // 3 <= abs(q) % 5": lambda b, h, q, k: -(q + k) // 3 <= abs(q) % 5,
        "(q & 1) << 2 == k": lambda b, h, q, k: (q & 1) << 2 == k,
    }
    for text, fn in texts.items():
        assert repr(PredicateMask(fn)) == f"PredicateMask(fn=lambda b, h, q, k: {text})"
        again = eval(f"lambda b, h, q, k: {text}")
        assert torch.equal(
            PredicateMask(again).dense(1, 1, 9, 9), PredicateMask(fn).dense(1, 1, 9, 9)
        )


# ---- Errors. ----

A_LIST = list(range(20))
WHOLE = torch.arange(4)


def if_statement(b, h, q, k):
    if q > k:
        return q == 0
    return k == 0


def loop(b, h, q, k):
    result = q > k
    for _ in range(q):
        result = ~result
    return result


ERRORS = {
    "if": (if_statement, TypeError, "torch.where"),
    "and": (lambda b, h, q, k: q > k and k > 3, TypeError, "(a < b) & (b < c)"),
    "not": (lambda b, h, q, k: not q > k, TypeError, "`k < q` is true"),
    "chained": (lambda b, h, q, k: 0 < q < k, TypeError, "&"),
    "builtin min": (lambda b, h, q, k: min(q, k) > 3, TypeError, "torch.minimum"),
    "in": (lambda b, h, q, k: q in (1, 2), TypeError, "(x == …) | (x == …)"),
    "loop": (loop, TypeError, "fixed number of rounds"),
    "list": (lambda b, h, q, k: A_LIST[q] > k, TypeError, "torch.tensor(values)[q]"),
    "int()": (lambda b, h, q, k: int(q) > k, TypeError, ".long()"),
    "item": (lambda b, h, q, k: q.item() > k, TypeError, ".item()"),
    "divide": (lambda b, h, q, k: q / 2 > k, NotImplementedError, "x // y"),
    "sin": (lambda b, h, q, k: torch.sin(q) > k, NotImplementedError, "`sin`"),
    "method": (lambda b, h, q, k: q.cumsum(0) > k, NotImplementedError, "`cumsum`"),
    "matmul": (lambda b, h, q, k: q @ k > 2, NotImplementedError, "`matmul`"),
    "float floordiv": (lambda b, h, q, k: q.float() // 2 > k, NotImplementedError, "floats"),
    "bitwise float": (lambda b, h, q, k: (q.float() & 2) > k, TypeError, "floats"),
    "zero": (lambda b, h, q, k: q // 0 > k, ZeroDivisionError, "constant 0"),
    "bool minus": (lambda b, h, q, k: (q > k) - (k > 2), TypeError, "two bools"),
    "negated bool": (lambda b, h, q, k: -(q > k), TypeError, "~x"),
    "whole": (lambda b, h, q, k: q == WHOLE, TypeError, "as a whole"),
    "partial": (lambda b, h, q, k: BY_BATCH[b] > k, TypeError, "1 dims are not indexed"),
    "partial sum": (lambda b, h, q, k: BY_BATCH[b].sum() > k, NotImplementedError, "`.sum`"),
    "too many": (lambda b, h, q, k: IDS[q, k], IndexError, "2 indices"),
    "bool index": (lambda b, h, q, k: IDS[q > k] == 1, TypeError, ".long()"),
    "slice": (lambda b, h, q, k: BY_BATCH[b, 1:][q] == 1, NotImplementedError, "slic"),
    "double": (lambda b, h, q, k: FLOATS.double()[q] > k, TypeError, ".float()"),
    "cast": (lambda b, h, q, k: q.to(torch.int8) > k, NotImplementedError, "int8"),
    "shape": (lambda b, h, q, k: q.new_ones(3), NotImplementedError, "one cell at a time"),
    "int result": (lambda b, h, q, k: q - k, TypeError, "x != 0"),
    "no result": (lambda b, h, q, k: None, TypeError, "NoneType"),
    "big": (lambda b, h, q, k: q > 2**70, ValueError, "64 bits"),
    "where int": (lambda b, h, q, k: torch.where(q, k, 1) > 2, TypeError, "expected a bool"),
    "dim": (lambda b, h, q, k: q.max(0) > 2, NotImplementedError, "over a dimension"),
    "string": (lambda b, h, q, k: q == "a", TypeError, "str"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_operation_and_the_way_to_write_it(name):
    fn, kind, text = ERRORS[name]
    with pytest.raises(kind) as error:
        PredicateMask(fn)
    assert text in str(error.value)


def test_errors_of_arguments():
    with pytest.raises(TypeError, match="expected a function"):
        PredicateMask(3)
    with pytest.raises(TypeError, match="offset"):
        PredicateMask(causal, offset=1.5)
    with pytest.raises(ValueError, match="offset"):
        PredicateMask(causal, offset=2**40).dense(1, 1, 4, 4)
    with pytest.raises(ValueError, match=r"\[B = 1\]"):
        PredicateMask(causal, offset=torch.tensor([1, 2])).dense(1, 1, 4, 4)


def test_values_must_not_leave_the_function():
    kept = []
    PredicateMask(lambda b, h, q, k: kept.append(q) is None)
    with pytest.raises(RuntimeError, match="another trace"):
        PredicateMask(lambda b, h, q, k: k < kept[0])


def test_lengths_zero_and_one():
    mask = PredicateMask(lambda b, h, q, k: IDS[q] == IDS[k])
    for Lq, Lk in ((0, 5), (5, 0), (0, 0), (1, 1)):
        assert mask.dense(1, 1, Lq, Lk).shape == (1, 1, Lq, Lk)
        mask.tiles(1, 1, Lq, Lk)


# ---- Larger than a tile: spans and stored blocks are used. ----


@pytest.mark.parametrize("name", ["sliding window", "documents", "block diagonal", "dilated"])
def test_long(name):
    fn = FLEX[name]
    if name == "documents":
        rng = random.Random(1)
        ids = torch.repeat_interleave(
            torch.arange(40), torch.tensor([rng.randrange(1, 120) for _ in range(40)])
        )
        fn = generate_doc_mask_mod(FLEX["sliding window"], ids)
        lengths = (len(ids), len(ids))
    else:
        lengths = (1500, 2300)
    mask, expected = PredicateMask(fn), cells(fn, 1, 1, *lengths)
    assert torch.equal(mask.dense(1, 1, *lengths), expected)
    check_tiles(mask, expected, ((128, 128), (64, 256)))


# ---- In attention, and under torch.compile. ----


def test_attention_and_gradients():
    fn = generate_doc_mask_mod(causal, DOCUMENTS)
    mask, dense = PredicateMask(fn), cells(fn, 1, 1, 150, 150)
    results = []
    for visible in (mask, dense):
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 2, 3, 150, 16, dtype=torch.float64).requires_grad_().unbind()
        out = jali.attention(q, k, v, mask=visible)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def attend(x, mask):
    return jali.attention(x, x, x, mask=mask)


def test_compile_new_constants_and_tables_do_not_recompile():
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for n, length in enumerate((40, 48, 56, 64, 72)):
        ids = torch.arange(length) // (5 + n)
        width = 3 + n
        mask = PredicateMask(lambda b, h, q, k, w=width, t=ids: (q - k < w) & (t[q] == t[k]))
        x = torch.randn(1, 2, length, 16)
        assert torch.equal(compiled(x, mask), attend(x, mask))
    assert counter.frame_count <= 2  # the first, and the one for changing numbers


class Model(torch.nn.Module):
    """Makes its mask anew in each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(64) // 10)

    def forward(self, x):
        mask = PredicateMask(lambda b, h, q, k: (q - k < 7) & (self.ids[q] == self.ids[k]))
        return attend(x, mask)


def test_compile_of_a_mask_made_inside():
    torch._dynamo.reset()
    model, x = Model(), torch.randn(1, 2, 64, 16)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x[:, :, :40]), model(x[:, :, :40]))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    torch._dynamo.reset()
    model, x = Model(), torch.randn(1, 2, 64, 16)
    shapes = {"x": {2: torch.export.Dim("L", min=2, max=64)}}
    exported = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict).module()
    for length in (64, 40):
        assert torch.equal(exported(x[:, :, :length]), model(x[:, :, :length]))


@pytest.mark.parametrize("level", ["v2", "v3", "v4"])
def test_every_instruction_set(level):
    """The same cells from each compiled instance; what the machine lacks is skipped."""
    code = (
        "import torch, tests.python.test_predicate as t\n"
        "for fn in [*t.OPERATIONS.values(), *t.FLEX.values()]:\n"
        "    dense = t.PredicateMask(fn).dense(2, 3, 9, 13)\n"
        "    assert torch.equal(dense, t.cells(fn))\n"
    )
    environment = {**os.environ, "JALI_FORCE": level}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT
    )
    if "this machine runs at most" in run.stderr:
        pytest.skip(f"this machine lacks {level}")
    assert run.returncode == 0, run.stderr
