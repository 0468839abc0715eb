"""Dynamic masks and token lists against their definitions, row by row."""

from __future__ import annotations

import math
import pickle
import random

import jali
import pytest
import torch
import torch._dynamo
from jali import (
    CausalMask,
    DocumentMask,
    DynamicMask,
    KeyPaddingMask,
    TokenIndexMask,
    WindowMask,
    _dynamic_ends,
)
from jali._dynamic_ends import dynamic_ends
from torch.testing import assert_close


def f32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def best(scores, candidates, keep, threshold):
    """The definition: sort the candidates by (score, position) and take the first ones."""
    scores = [f32(x) for x in scores]
    kept = [
        j
        for j in candidates
        if not math.isnan(scores[j])
        and scores[j] != -math.inf
        and (threshold is None or scores[j] >= f32(threshold))
    ]
    kept.sort(key=lambda j: (scores[j], j), reverse=True)
    return set(kept if keep is None else kept[:keep])


def brute_force(scores, keep, threshold, causal, positions, row_ids, key_ids, kept, heads):
    """bool [B, heads, len(positions[b]), Lk] from nested lists: ids and kept per batch."""
    batch, length = len(positions), scores.shape[-1]
    out = torch.zeros(batch, heads, len(positions[0]), length, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            table = scores[b % scores.shape[0], h * scores.shape[1] // heads].tolist()
            for i, p in enumerate(positions[b]):
                candidates = [
                    j
                    for j in range(length)
                    if (not causal or j <= p)
                    and kept[b][j]
                    and all(r[b][i] == k[b][j] >= 0 for r, k in zip(row_ids, key_ids))
                ]
                for j in best(table, candidates, keep, threshold):
                    out[b, h, i, j] = True
    return out


def random_scores(rng, *shape):
    """Many ties, both zeros, NaN, both infinities."""
    values = [0.0, -0.0, 1.0, 1.0, -2.5, 0.37, math.nan, -math.inf, math.inf, 3.0, -1.0]
    return torch.tensor([rng.choice(values) for _ in range(math.prod(shape))]).reshape(shape)


def random_ids(rng, length, contiguous):
    ids = [rng.randrange(-1, 3) for _ in range(length)]
    return sorted(ids) if contiguous else ids


@pytest.mark.parametrize("seed", range(60))
def test_cells_follow_the_definition(seed):
    rng = random.Random(seed)
    B, Hkv, group = rng.choice([1, 2]), rng.choice([1, 2]), rng.choice([1, 2])
    Lk = rng.choice([1, 2, 7, 16, 23])
    Lq = rng.choice([1, 3, Lk])
    scores = random_scores(rng, rng.choice([1, B]), rng.choice([1, Hkv]), Lk)
    keep = rng.choice([None, 0, 1, 2, 5, Lk, Lk + 3])
    threshold = rng.choice([None, None, 0.0, 0.37])
    causal = rng.random() < 0.8

    limits, row_ids, key_ids = [], [], []
    kept = [[True] * Lk for _ in range(B)]
    # Where row 0 stands for the call, and (sometimes) elsewhere for the mask.
    call = rng.choice([None, 0, 2, "per batch"])
    if call == "per batch":
        call = torch.tensor([rng.randrange(-2, Lk + 2) for _ in range(B)])
    own = rng.choice([None, None, 1]) if causal else None

    def starts(offset):
        if offset is None:
            return [Lk - Lq] * B
        return offset.tolist() if isinstance(offset, torch.Tensor) else [offset] * B

    for _ in range(rng.randrange(3)):
        ids = [random_ids(rng, Lk, rng.random() < 0.5) for _ in range(B)]
        key_ids.append(ids)
        if rng.random() < 0.5:
            row_ids.append([random_ids(rng, Lq, False) for _ in range(B)])
            limits.append(DocumentMask(torch.tensor(row_ids[-1]), torch.tensor(ids)))
        else:
            at = [[p0 + i for i in range(Lq)] for p0 in starts(call)]
            row_ids.append([[ids[b][p] if 0 <= p < Lk else -1 for p in at[b]] for b in range(B)])
            limits.append(DocumentMask(torch.tensor(ids)))
    if rng.random() < 0.4:
        kept = [[rng.random() < 0.7 for _ in range(Lk)] for _ in range(B)]
        limits.append(KeyPaddingMask(torch.tensor(kept)))
    within = None
    for limit in limits:
        within = limit if within is None else within & limit

    mask = DynamicMask(scores, keep, threshold=threshold, within=within, causal=causal, offset=own)
    got = mask.dense(B, Hkv * group, Lq, Lk, q_offset=call, num_kv_heads=Hkv)
    positions = [[p0 + i for i in range(Lq)] for p0 in starts(call if own is None else own)]
    expected = brute_force(
        scores, keep, threshold, causal, positions, row_ids, key_ids, kept, Hkv * group
    )
    assert torch.equal(got, expected), f"seed {seed}: {mask!r}"


def test_equal_scores_are_a_sliding_window():
    mask = DynamicMask(torch.zeros(300), keep=40)
    assert torch.equal(
        mask.dense(1, 2, 300, 300), (WindowMask.last(40) & CausalMask()).dense(1, 2, 300, 300)
    )


def test_no_limit_is_the_candidates():
    ids = torch.tensor([[0, 0, 1, 1, 1, 0]])
    mask = DynamicMask(torch.randn(6), within=DocumentMask(ids))
    assert torch.equal(mask.dense(1, 1, 6, 6), (CausalMask() & DocumentMask(ids)).dense(1, 1, 6, 6))


def test_scores_are_compared_in_fp32():
    """Two fp64 scores that fp32 cannot tell apart tie: the newer key wins."""
    mask = DynamicMask(torch.tensor([1 + 1e-12, 1.0], dtype=torch.float64), keep=1)
    assert mask.dense(1, 1, 1, 2)[0, 0, 0].tolist() == [False, True]
    bf16 = DynamicMask(torch.tensor([1.0, 1.001], dtype=torch.bfloat16), keep=1)
    assert bf16.dense(1, 1, 1, 2)[0, 0, 0].tolist() == [False, True]


def test_chunks_and_decoding_see_what_the_whole_sees():
    scores = torch.randn(2, 3, 50)
    whole = DynamicMask(scores, keep=9).dense(2, 3, 50, 50)
    # Two sequences that are 20 and 33 tokens in: each sees scores up to its own last key.
    offset = torch.tensor([20, 33])
    chunk = DynamicMask(scores, keep=9).dense(2, 3, 5, 50, q_offset=offset)
    for b, p in enumerate(offset.tolist()):
        assert torch.equal(chunk[b], whole[b, :, p : p + 5])
    for length in (1, 9, 10, 50):  # a cache that grows
        step = DynamicMask(scores[..., :length], keep=9).dense(2, 3, 1, length)
        assert torch.equal(step[:, :, 0], whole[:, :, length - 1, :length])


def test_a_filter_behind_it_does_not_refill():
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0])
    keep = torch.tensor([False, True, True, True])
    inside = DynamicMask(scores, 2, within=KeyPaddingMask(keep)).dense(1, 1, 1, 4)
    behind = (DynamicMask(scores, 2) & KeyPaddingMask(keep)).dense(1, 1, 1, 4)
    assert inside.flatten().tolist() == [False, True, True, False]
    assert behind.flatten().tolist() == [False, True, False, False]


@pytest.mark.parametrize("behind", [0, 3])
def test_varlen_is_each_sequence_alone(behind):
    """Also with tokens behind the last sequence."""
    torch.manual_seed(0)
    lengths = [5, 0, 21, 4]
    total, D = sum(lengths) + behind, 8
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    q, k, v = torch.randn(total, 4, D), torch.randn(total, 2, D), torch.randn(total, 2, D)
    scores = torch.randn(2, total).round(decimals=1)
    ids = torch.randint(0, 3, (total,))
    out = jali.attention_varlen(q, k, v, cu, cu, DynamicMask(scores, 4, within=DocumentMask(ids)))
    for a, z in zip(cu[:-1].tolist(), cu[1:].tolist()):
        if a == z:
            continue
        mask = DynamicMask(scores[:, a:z], 4, within=DocumentMask(ids[a:z][None]))
        one = jali.attention(*(x[a:z].transpose(0, 1)[None] for x in (q, k, v)), mask)
        assert_close(out[a:z], one[0].transpose(0, 1))


def test_scores_learn_through_key_bias():
    torch.manual_seed(1)
    B, Hq, Hkv, L, D, keep = 2, 4, 2, 24, 4, 6
    q = torch.randn(B, Hq, L, D, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(B, Hkv, L, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    dt_proj = torch.randn(Hkv, Hkv * D, dtype=torch.float64, requires_grad=True)
    A = torch.randn(Hkv, dtype=torch.float64, requires_grad=True)

    def forward(attend):
        scores = jali.dynamic_scores(v, dt_proj, A)
        return attend(q, k, v, DynamicMask(scores, keep), scores)

    def dense(q, k, v, mask, bias):
        cells = brute_force(
            mask.scores, keep, None, True, [range(L)] * B, [], [], [[True] * L] * B, Hq
        )
        k, v, bias = (x.repeat_interleave(Hq // Hkv, 1) for x in (k, v, bias))
        logits = q @ k.mT / math.sqrt(D) + bias[:, :, None]
        return logits.masked_fill(~cells, -math.inf).softmax(-1) @ v

    ours = forward(lambda q, k, v, mask, bias: jali.attention(q, k, v, mask, key_bias=bias))
    truth = forward(dense)
    assert_close(ours, truth)
    grad = torch.randn_like(truth)
    inputs = (q, k, v, dt_proj, A)
    for got, expected in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(truth, inputs, grad)
    ):
        assert_close(got, expected)


@pytest.mark.parametrize("form", ["exp", "log"])
def test_dynamic_scores_formula(form):
    torch.manual_seed(2)
    v = torch.randn(2, 3, 5, 4)
    dt_proj, A, bias = torch.randn(3, 12), torch.randn(3), torch.randn(3)
    got = jali.dynamic_scores(v, dt_proj, A, bias, form=form)
    for b in range(2):
        for j in range(5):
            flat = torch.cat([v[b, h, j] for h in range(3)])
            for h in range(3):
                x = float(flat @ dt_proj[h] + bias[h])
                delta = float(A[h]) * math.log1p(math.exp(x))
                expected = math.exp(delta) if form == "exp" else delta
                assert math.isclose(float(got[b, h, j]), expected, rel_tol=1e-4, abs_tol=1e-5)
    assert_close(
        jali.dynamic_scores(v.transpose(1, 2), dt_proj, A, bias, form=form, layout="blhd"), got
    )
    assert jali.dynamic_scores(v.bfloat16(), dt_proj.bfloat16(), A).dtype == torch.float32


def test_it_is_a_value():
    scores, ids = torch.randn(2, 6), torch.zeros(1, 6, dtype=torch.int32)
    a, b = (DynamicMask(scores.clone(), 3, within=DocumentMask(ids)) for _ in range(2))
    assert a == b and hash(a) == hash(b)
    assert a != DynamicMask(scores, 4, within=DocumentMask(ids))
    assert a != DynamicMask(scores + 1, 3, within=DocumentMask(ids))
    assert pickle.loads(pickle.dumps(a)) == a
    assert a.to("cpu") == a
    assert (
        repr(a)
        == "DynamicMask(scores=float32[2, 6], keep=3, within=DocumentMask(q_ids=int32[1, 6]))"
    )
    learned = (scores.requires_grad_() * 2).exp()
    assert not DynamicMask(learned, 3).scores.requires_grad


def test_tiles_are_exact():
    mask = DynamicMask(torch.randn(1, 2, 300), 20, within=DocumentMask(torch.arange(300) // 90))
    cells = mask.dense(1, 2, 300, 300)
    tiles = mask.tiles(1, 2, 300, 300, (64, 32))
    for y in range(tiles.classes.shape[2]):
        for x in range(tiles.classes.shape[3]):
            part = cells[:, :, y * 64 : y * 64 + 64, x * 32 : x * 32 + 32].flatten(2)
            expected = part.any(-1).int() + part.all(-1).int()
            assert torch.equal(tiles.classes[..., y, x].int(), expected)


def test_operator_checks():
    scores = torch.randn(2, 3, 17)
    ids = torch.randint(0, 3, (2, 17), dtype=torch.int32)
    keep_keys = torch.rand(17) < 0.8
    cu = torch.tensor([0, 5, 17], dtype=torch.int32)
    for args in (
        (scores, [ids], [keep_keys], None, 4, True),
        (scores[:1], [ids], [], None, -1, False),
        (scores[0], [], [], None, 0, True),
        (scores[0, 0], [], [], None, 3, True),
        (scores[0], [ids[0]], [], cu, 4, True),
    ):
        torch.library.opcheck(torch.ops.jali.dynamic_ends.default, args)


def draw_selection(draw: random.Random) -> tuple:
    """Arguments of the operator."""
    packed = draw.random() < 0.35
    B, H = 1 if packed else draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
    L = draw.choice([1, 2, 3, 7, 16, 17, 33, 64, 100])
    scores = torch.randn(B, H, L)
    kind = draw.choice(["all differ", "ties", "special"])
    if kind == "ties":
        scores = torch.randint(-1, 2, (B, H, L)) * draw.choice([1.0, -0.0])
    if kind == "special":
        special = draw.choice([math.nan, -math.inf, math.inf, 0.0, -0.0])
        scores[torch.rand(B, H, L) < 0.3] = special
    if B == 1 and draw.random() < 0.3:
        scores = scores[0]
    cu, tables = None, [(L,), (1, L)] if scores.dim() < 3 else [(L,), (1, L), (B, L)]
    if packed:
        num, used = draw.choice([1, 2, 5]), draw.choice([L, draw.randint(0, L)])
        cuts = sorted(draw.randint(0, used) for _ in range(num - 1))
        cu = torch.tensor([0, *cuts, used], dtype=torch.int32)
        longest = int(cu.diff().max())
        tables = [(L,), (1, L), (num, longest)] if num > 1 and longest < L else [(L,), (1, L)]
    documents = [
        torch.randint(-1, 3, draw.choice(tables), dtype=torch.int32)
        for _ in range(draw.choice([0, 0, 1, 2]))
    ]
    keep_keys = [torch.rand(draw.choice(tables)) < 0.8 for _ in range(draw.choice([0, 0, 1]))]
    keep = draw.choice([-1, 0, 1, 2, 3, 8, 50, 1000])
    return scores, documents, keep_keys, cu, keep, draw.random() < 0.75


@pytest.mark.parametrize("seed", range(8))
def test_selection_of_cuda_tensors_is_the_same(seed, monkeypatch):
    """It is made of PyTorch's operators, which do the same on a CPU."""
    if seed % 2:  # as for many keys: by narrow digits
        monkeypatch.setattr(_dynamic_ends, "_MOST_COUNTS", 1 << seed)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(100):
        args = draw_selection(draw)
        expected = torch.ops.jali.dynamic_ends.default(*args)
        got = dynamic_ends(*args)
        assert got.dtype == expected.dtype and torch.equal(got, expected), args


def test_selection_of_cuda_tensors_reads_no_value():
    """On the meta device there is none to read, and tensors elsewhere do not mix with it."""
    draw = random.Random(1)
    for _ in range(30):
        *tensors, cu, keep, causal = draw_selection(draw)
        scores, documents, keep_keys = torch.utils._pytree.tree_map(lambda x: x.to("meta"), tensors)
        cu = None if cu is None else cu.to("meta")
        ends = dynamic_ends(scores, documents, keep_keys, cu, keep, causal)
        assert ends.device.type == "meta" and ends.dtype == torch.int32


def test_selection_of_cuda_tensors_says_what_was_wrong():
    scores = torch.randn(2, 3, 17)
    wrong = torch.zeros(2, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a document table has shape \[2, 16\].*\[B\|1, 17\]"):
        dynamic_ends(scores, [wrong], [], None, 4, True)
    with pytest.raises(ValueError, match=r"batch dims of scores and tables are \[2, 3\]"):
        dynamic_ends(scores, [torch.zeros(3, 17, dtype=torch.int32)], [], None, 4, True)
    cu = torch.tensor([0, 5, 17], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"expected packed \[H, 17\]"):
        dynamic_ends(scores, [], [], cu, 4, True)
    with pytest.raises(ValueError, match="one row of 16 entries, but there are 17 keys"):
        dynamic_ends(scores[0], [wrong[:1]], [], cu, 4, True)


@pytest.mark.parametrize("tensor", [False, True])
def test_compiles_whole_and_once(tensor):
    """keep, lengths and the threshold are run-time values."""

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def run(q, k, v, scores, keep, threshold, ids):
        mask = DynamicMask(scores, keep, threshold=threshold, within=DocumentMask(ids))
        return jali.attention(q, k, v, mask, key_bias=scores)

    torch._dynamo.reset()
    for call, (L, keep, threshold) in enumerate([(33, 5, -0.5), (40, 7, 0.25), (57, 20, 0.7)]):
        q, k, v = (torch.randn(1, 2, L, 8) for _ in range(3))
        scores, ids = torch.randn(1, 2, L), torch.arange(L)[None] // 19
        with torch._dynamo.config.patch(error_on_recompile=call > 0):
            got = run(q, k, v, scores, keep, torch.tensor(threshold) if tensor else threshold, ids)
        mask = DynamicMask(scores, keep, threshold=threshold, within=DocumentMask(ids))
        assert_close(got, jali.attention(q, k, v, mask, key_bias=scores))


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (TypeError, "scores must be floats", lambda: DynamicMask(torch.arange(3), 1)),
        (ValueError, "got 4 dims", lambda: DynamicMask(torch.zeros(1, 1, 1, 3), 1)),
        (ValueError, "keep must be at least 0", lambda: DynamicMask(torch.zeros(3), -1)),
        (TypeError, "keep must be an int", lambda: DynamicMask(torch.zeros(3), 1.5)),
        (ValueError, "threshold is NaN", lambda: DynamicMask(torch.zeros(3), threshold=math.nan)),
        (
            TypeError,
            "within must be .* got WindowMask",
            lambda: DynamicMask(torch.zeros(3), 1, within=WindowMask(1, 1)),
        ),
        (
            TypeError,
            "within must be .* got OrMask",
            lambda: DynamicMask(
                torch.zeros(3),
                1,
                within=KeyPaddingMask(torch.ones(3).bool()) | DocumentMask(torch.zeros(3).int()),
            ),
        ),
        (ValueError, "offset", lambda: DynamicMask(torch.zeros(3), 1, causal=False, offset=1)),
        (
            ValueError,
            "scores have 3 keys, the call has 4",
            lambda: DynamicMask(torch.zeros(3), 1).dense(1, 1, 4, 4),
        ),
        (
            ValueError,
            "document table has shape \\[3\\]",
            lambda: DynamicMask(torch.zeros(4), 1, within=DocumentMask(torch.zeros(3).int())).dense(
                1, 1, 4, 4
            ),
        ),
        (
            ValueError,
            "form",
            lambda: jali.dynamic_scores(
                torch.zeros(1, 1, 2, 2), torch.zeros(1, 2), torch.zeros(1), form="x"
            ),
        ),
        (
            ValueError,
            "dt_proj must be",
            lambda: jali.dynamic_scores(torch.zeros(1, 1, 2, 2), torch.zeros(2, 2), torch.zeros(1)),
        ),
        (
            ValueError,
            "reach from -2 to 1",
            lambda: TokenIndexMask(torch.tensor([[-2, 1]])).dense(1, 1, 1, 4),
        ),
        (
            ValueError,
            "reach from 0 to 4",
            lambda: TokenIndexMask(torch.tensor([[0, 4]])).dense(1, 1, 1, 4),
        ),
    ],
)
def test_errors_say_what_was_wrong(error, text, make):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize("seed", range(20))
def test_token_lists(seed):
    rng = random.Random(seed)
    B, H = rng.choice([1, 2]), rng.choice([1, 2])
    Lq, Lk, block = rng.choice([1, 5, 16]), rng.choice([1, 4, 20]), rng.choice([1, 2, 7])
    n = rng.choice([0, 1, 3, 9])
    rows = -(-Lq // block)
    indices = torch.tensor(
        [rng.randrange(-1, Lk) for _ in range(B * H * rows * n)], dtype=torch.int64
    ).reshape(B, H, rows, n)
    got = TokenIndexMask(indices, block).dense(B, H, Lq, Lk)
    expected = torch.zeros(B, H, Lq, Lk, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for i in range(Lq):
                for j in indices[b, h, i // block].tolist():
                    if j >= 0:
                        expected[b, h, i, j] = True
    assert torch.equal(got, expected)


def test_token_lists_compile():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(q, k, v, indices):
        return jali.attention(q, k, v, TokenIndexMask(indices, 4) & CausalMask())

    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    indices = torch.randint(-1, 16, (1, 2, 4, 6))
    assert_close(
        run(q, k, v, indices), jali.attention(q, k, v, TokenIndexMask(indices, 4) & CausalMask())
    )
