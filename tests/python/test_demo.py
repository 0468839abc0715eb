"""The demo and the benchmark: their data, their model, their reports, and short runs of both."""

import json
import re
import statistics
import subprocess
import sys

import jali
import pytest
import torch
from jali.bench.report import Report, Result
from jali.bench.timing import interleaved
from jali.demo import gallery, plot, text, train
from jali.demo.model import KINDS, LanguageModel, Shared, rotary, shared_mask

DOCS = [b"abcde", b"fg", b"hijklmno", b"p"]


def test_packing_keeps_bytes_documents_places_and_targets():
    packed = text.pack(DOCS, 8)  # 16 bytes: the third document is cut between two sequences
    assert bytes(packed.tokens.flatten().tolist()) == b"".join(DOCS)
    assert packed.ids.tolist() == [[0] * 5 + [1] * 2 + [2], [2] * 7 + [3]]
    assert packed.places.tolist() == [[0, 1, 2, 3, 4, 0, 1, 0], [0, 1, 2, 3, 4, 5, 6, 0]]
    ends = [4, 6, 14, 15]
    following = [-1 if n in ends else b"".join(DOCS)[n + 1] for n in range(16)]
    assert packed.targets.flatten().tolist() == following


def test_packing_says_when_text_is_too_short():
    with pytest.raises(ValueError, match="16 bytes of text do not fill 3 sequences of 8"):
        text.pack(DOCS, 8, 3)


def test_documents_are_real_text_of_bounded_length():
    docs = text.documents(longest=1000, shortest=100)
    assert docs == text.documents(longest=1000, shortest=100)
    assert sum(map(len, docs)) > 1e6
    assert all(100 <= len(d) <= 1000 for d in docs)
    assert any(b"def attention" in d for d in docs), "Jali's own sources are among them"


def test_rare_pairs_surprise_more():
    bits = text.surprise(torch.tensor([list(b"abababababababac")]))[0]
    assert bits[15] > bits[1:15].max() >= 0


@pytest.mark.parametrize("kind", KINDS)
def test_model_is_causal_and_keeps_documents_apart(kind):
    torch.manual_seed(0)
    model = LanguageModel(kind, width=32, depth=2, num_heads=2, keep=16)
    for block in model.blocks:
        if kind == "dynamic":
            torch.nn.init.normal_(block.attention.A)
    tokens = torch.randint(256, (1, 96))
    ids = torch.tensor([[0] * 40 + [1] * 56], dtype=torch.int32)
    places = torch.cat([torch.arange(40), torch.arange(56)])[None].int()
    with torch.no_grad():
        before = model(tokens, ids, places)
        tokens[0, 60] ^= 1
        changed = (model(tokens, ids, places) - before).abs().amax(-1)[0] > 0
    assert not changed[:60].any(), "no row sees a later byte or another document"
    assert changed[60]
    with torch.no_grad():
        tokens[0, 5] ^= 1
        changed = (model(tokens, ids, places) - before).abs().amax(-1)[0] > 0
    assert not changed[40:60].any()


def test_dynamic_model_starts_as_a_sliding_window():
    torch.manual_seed(0)
    model = LanguageModel("dynamic", width=32, depth=2, num_heads=2, keep=16)
    data = text.pack(text.documents(), 128, 1)
    with torch.no_grad():
        got = model(data.tokens, data.ids, data.places)
        mask = jali.CausalMask() & jali.DocumentMask(data.ids) & jali.WindowMask.last(16)
        shared = Shared(data.ids, mask, *rotary(128, 16))
        x = model.embed(data.tokens)
        for block in model.blocks:
            block.attention.kind = "window"
            x = block(x, shared)
    torch.testing.assert_close(got, model.head(model.norm(x)), atol=1e-5, rtol=1e-4)


def test_all_kinds_start_from_the_same_weights():
    dense, window, dynamic = (LanguageModel(k).state_dict() for k in KINDS)
    assert dense.keys() == window.keys() < dynamic.keys()
    for name, weight in dense.items():
        assert torch.equal(weight, window[name])
        assert torch.equal(weight, dynamic[name])


def test_dynamic_scores_learn():
    torch.manual_seed(0)
    model = LanguageModel("dynamic", width=32, depth=1, num_heads=2, keep=16)
    attention = model.blocks[0].attention
    torch.nn.init.constant_(attention.A, 0.1)
    data = text.pack(text.documents(), 128, 1)
    train.loss_of(model, data, slice(0, 1)).backward()
    assert attention.A.grad.abs().min() > 0
    assert attention.dt_proj.weight.grad.abs().max() > 0


def test_window_and_dynamic_have_the_same_keys_per_row():
    data = text.pack(text.documents(), 1024, 1)
    keep = 64
    window = shared_mask("window", data.ids, data.places, keep)
    dynamic = jali.DynamicMask(
        text.surprise(data.tokens), keep=keep, within=jali.DocumentMask(data.ids)
    )
    # Where the document is long enough: window and sinks overlap until then.
    rows = data.places[0] >= keep
    counts = [m.dense(1, 1, 1024, 1024)[0, 0].sum(-1)[rows] for m in (window, dynamic)]
    assert rows.any()
    assert all((c == keep).all() for c in counts)


def test_gallery_runs_and_writes_its_files(tmp_path, capsys):
    rows = gallery.main(tmp_path, length=512, heads=2, width=16, rounds=1)
    assert len(rows) == 8
    for row in rows:
        assert row.error_jali < 1e-5, row.mask
        assert 0 < row.density < 1
        assert row.ms_jali > 0
    assert any(row.mask == "dynamic" for row in rows)
    assert len(list(tmp_path.glob("[1-8]_*.png"))) == 8
    assert (tmp_path / "masks.md").read_text(encoding="utf-8").count("\n") == 10
    assert (tmp_path / "masks.csv").read_text(encoding="utf-8").count("\n") == 9
    shown = capsys.readouterr().out
    assert "█" in shown and "| dynamic" in shown


@pytest.fixture
def one_thread():
    """Keeps steps short on a busy machine, where OpenMP's threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_training_runs_and_learns_a_little(tmp_path, capsys, one_thread):
    runs = train.main(2, tmp_path, length=128, keep=32)
    assert [r.kind for r in runs] == list(KINDS)
    for run in runs:
        # Not the last losses' mean: a few may be of a table of letters that no text has.
        later = run.losses[len(run.losses) // 2 :]
        assert statistics.median(later) < run.losses[0] < 8.5
        assert run.held_out < min(8.2, run.losses[0] - 0.2)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out" in (tmp_path / "training.md").read_text(encoding="utf-8")
    assert "bits/byte" in capsys.readouterr().out


def test_curves_as_text_show_each_curve():
    curves = [plot.Curve("up", [0, 1, 2], [0, 1, 2]), plot.Curve("down", [0, 1, 2], [2, 1, 0])]
    shown = plot.curves_text(curves, width=20, height=6)
    top, bottom = shown.splitlines()[0], shown.splitlines()[5]
    assert top.index("×") < top.index("●")
    assert bottom.index("●") < bottom.index("×")
    assert "2.00" in top and "0.00" in bottom


def test_sparkline_and_smoothing():
    assert plot.sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert plot.smooth([2.0, 2.0, 2.0]) == pytest.approx([2, 2, 2])


def test_rivals_take_turns_in_random_order():
    calls = []
    rivals = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = interleaved(rivals, rounds=6)
    rounds = ["".join(calls[n : n + 3]) for n in range(0, 21, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len(set(rounds)) > 1
    assert set(times) == {"a", "b", "c"}


def test_report_marks_goals_and_writes_json(tmp_path):
    report = Report()
    fast = report.add(Result("speed", "dense", 2.0, "×", goal=1.6))
    slow = report.add(Result("speed", "causal", 1.2, "×", goal=1.5))
    small = report.add(Result("memory", "plan", 3.0, "MB", goal=8, at_most=True))
    assert (fast.mark(), slow.mark(), small.mark()) == ("≥ 1.6 ✓", "≥ 1.5 ✗", "≤ 8 ✓")
    assert report.summary().startswith("2 of 3 goals met")
    report.save(tmp_path / "cpu.json")
    saved = json.loads((tmp_path / "cpu.json").read_text(encoding="utf-8"))
    assert [r["passed"] for r in saved["results"]] == [True, False, True]
    assert saved["machine"]["torch"] == torch.__version__
    table = (tmp_path / "cpu.md").read_text(encoding="utf-8")
    assert "| speed | causal | 1.2 × | ≥ 1.5 ✗ |" in table


def test_benchmark_command_runs(tmp_path):
    command = [sys.executable, "-m", "jali.bench", "cpu", "--quick", "--only", "overhead"]
    done = subprocess.run([*command, "--out", tmp_path], capture_output=True, text=True, check=True)
    assert re.search(r"forward +[\d.]+ +[\d.]+ +[\d.]+×  ≤ 2 [✓✗]", done.stdout), done.stdout
    assert (tmp_path / "cpu_quick.json").exists()
