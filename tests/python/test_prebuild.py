"""GPU kernels compiled without a GPU: what lands in the cache, how good it is, what is refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jali
import pytest
import torch
from jali import _library, cli
from jali._prebuild import _kernels

pytestmark = pytest.mark.skipif(
    not any(Path(folder).glob("libnvrtc.so.1*") for folder in _library._library_folders()),
    reason="needs NVRTC: pip install nvidia-cuda-nvrtc",
)

B, HQ, HKV, LQ, LK = 2, 4, 2, 300, 500
IDS = torch.zeros(B, LK, dtype=torch.int32)
KEEP = torch.ones(B, LK, dtype=torch.bool)
IMAGE = torch.arange(LK) % 64 < 16


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def call(D: int = 64, Dv: int | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    def tokens(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.empty(B, heads, length, width, dtype=dtype, device="meta")

    return tokens(HQ, LQ, D), tokens(HKV, LK, D), tokens(HKV, LK, Dv or D)


OPTIONS = {
    "scale": -1.0,
    "softcap": 10.0,
    "bias": torch.empty(1, HQ, LQ, LK, device="meta"),
    "key_bias": torch.empty(1, 1, LK, dtype=torch.bfloat16),
    "alibi_slopes": torch.ones(HQ),
    "sinks": torch.zeros(HQ, dtype=torch.bfloat16),
    "dropout_p": 0.1,
}
VARLEN = {"cu_seqlens_q": ints(3), "cu_seqlens_k": ints(3)}
causal = jali.CausalMask()
documents = jali.DocumentMask(IDS)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache for the tests of this file; JALI_OFFLINE off."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("JALI_CACHE", str(folder))
        patch.delenv("JALI_OFFLINE", raising=False)
        yield folder


def files(folder: Path) -> set[Path]:
    return set(folder.glob("*/*.cubin"))


# name: mask, D, Dv, backward too
MASKS = {
    "dense": (None, 128, 128, True),
    "causal": (causal, 128, 64, True),
    "causal fp16": (causal, 40, 72, True),
    "causal 256": (causal, 256, 256, True),
    "window": (causal & jali.WindowMask.last(64), 64, 64, True),
    "documents": (causal & documents, 128, 128, True),
    "tree": (documents & (jali.WindowMask.last(64) | ~jali.PrefixMask(4)), 64, 64, True),
    "predicate": (
        jali.PredicateMask(lambda b, h, i, j: (j <= i) | (IMAGE[i] & IMAGE[j])), 64, 64, True,
    ),
    "intervals": (
        jali.KeyIntervalMask(None, ints(B, HQ, LK)) | jali.RowIntervalMask(ints(LQ), ints(LQ)),
        64, 64, True,
    ),
    "padding": (~jali.KeyPaddingMask(KEEP) & jali.DilatedMask(3), 64, 64, True),
    "neighbours": (jali.NeighborhoodMask((10, 50), (3, 7)), 64, 64, True),
    "blocks": (jali.BlockSparseMask(torch.ones(1, 1, 3, 4, dtype=torch.bool)), 64, 64, True),
    "blocks 128": (
        jali.BlockSparseMask(torch.ones(1, 1, 3, 4, dtype=torch.bool)), 128, 128, True,
    ),
    "cells": (jali.DenseMask(torch.ones(LQ, LK, dtype=torch.bool)), 96, 96, True),
    "dynamic": (jali.DynamicMask(torch.randn(B, HKV, LK), keep=64), 64, 64, True),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks_compile_to_good_kernels(cache: Path, name: str) -> None:
    mask, D, Dv, backward = MASKS[name]
    tensors = call(D, Dv, torch.float16 if "fp16" in name else torch.bfloat16)
    before = files(cache)
    kernels = jali.prebuild(*tensors, mask, backward=backward)
    names = {kernel.name for kernel in kernels}
    assert names >= {"forward"} and ("backward" in names) == backward
    even = name.startswith(("dense", "causal", "window"))  # classified as loaders go
    assert ("map" in names) == (not even)
    assert len(files(cache) - before) == len({x.module for x in kernels if x.compiled}) > 0
    assert all(kernel.compiled or kernel.name == "map" for kernel in kernels)  # maps are shared
    assert all(16 <= kernel.registers <= 255 for kernel in kernels)

    known = {path: path.stat().st_ino for path in files(cache)}
    again = jali.prebuild(*tensors, mask, backward=backward)
    assert not any(kernel.compiled for kernel in again)
    assert [(x.name, x.registers) for x in again] == [(x.name, x.registers) for x in kernels]
    assert known == {path: path.stat().st_ino for path in files(cache)}

    bad = "\n".join(f"{x.module}\n    {x}" for x in kernels if not x.clean)
    assert not bad, bad


def test_options_compile_to_good_kernels() -> None:
    kernels = jali.prebuild(*call(), causal, backward=False, **OPTIONS)
    assert "true, true, BiasType(" in kernels[0].module and kernels[0].clean, kernels[0]
    packed = [x[0].transpose(0, 1) for x in call()]
    varlen = jali.prebuild(*packed, causal, backward=False, **VARLEN)
    padded = jali.prebuild(*call(), causal, backward=False)
    # Each without what only the other needs.
    assert [x.module for x in varlen] == [x.module.replace(" for ", ", cut, for ") for x in padded]
    assert all(x.clean for x in varlen)
    deterministic = jali.prebuild(*call(), causal, deterministic=True)
    assert all(kernel.clean for kernel in deterministic)
    assert {x.module for x in deterministic} != {x.module for x in jali.prebuild(*call(), causal)}


def test_forwards_of_both_sizes_are_compiled() -> None:
    """Up to head dim 64, short calls have other tiles than long ones."""
    for mask in (None, causal):
        large, small = (x.module for x in jali.prebuild(*call(), mask, backward=False))
        assert small == large.replace(" for ", ", small for ")
        assert len(jali.prebuild(*call(72, 72), mask, backward=False)) == 1


def test_gradients_of_biases_are_compiled_for_where_they_require_one() -> None:
    def backward(**biases: torch.Tensor) -> tuple[str, set[str]]:
        kernels = jali.prebuild(*call(), **({"mask": causal} | biases))
        assert all(x.clean for x in kernels), [x for x in kernels if not x.clean]
        [module] = {x.module for x in kernels if x.name == "backward"}
        return module, {x.name for x in kernels if x.module == module}

    of_cells = torch.empty(B, HQ, LQ, LK, dtype=torch.bfloat16, device="meta")
    of_keys = torch.empty(1, 1, LK, device="meta")
    sums = {"sum_tokens", "write_cells"}
    plain, names = backward(bias=of_cells)
    assert not names & sums
    learnt = of_cells.detach().requires_grad_()
    wanted, _ = backward(bias=learnt)
    assert wanted != plain and backward(mask=learnt)[0].split(" for ")[0] in wanted
    plain, names = backward(key_bias=of_keys)
    wanted, more = backward(key_bias=of_keys.detach().requires_grad_())
    assert wanted != plain and not names & sums and sums <= more


def test_dropout_of_less_and_of_more_takes_the_same_kernels() -> None:
    """Where no kernel tells by differences of floats what is kept: at D 64."""

    def modules(p: float) -> set[str]:
        return {x.module for x in jali.prebuild(*call(), dropout_p=p)}

    assert modules(0.1) == modules(0.45)


@pytest.mark.parametrize("limit", ["1G", "abc", "0", "-5"])
def test_a_limit_that_is_no_number_of_megabytes(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JALI_CACHE_LIMIT", limit)
    with pytest.raises(ValueError, match=f"JALI_CACHE_LIMIT={limit}: expected a whole number"):
        jali.prebuild(*call(), backward=False)


def test_a_call_is_known_by_its_kind_alone() -> None:
    """Lengths, heads, widths of windows, strides, devices and padded dims change nothing."""
    before = jali.prebuild(*call(40), causal & jali.WindowMask.last(7), backward=False)
    q = torch.zeros(1, 9, 1, 36, dtype=torch.bfloat16)
    other = causal & jali.WindowMask.last(70)
    after = jali.prebuild(q, q[:, :3], q[:, :3], other, backward=False, q_offset=3)
    assert [x.module for x in after] == [x.module for x in before]
    swapped = [x.transpose(1, 2) for x in call(40)]
    again = jali.prebuild(*swapped, other, backward=False, layout="blhd")
    assert [x.module for x in again] == [x.module for x in before]
    assert not any(x.compiled for x in [*after, *again])


def test_packed_documents_have_the_kernels_of_packed_sequences() -> None:
    x = torch.empty(B, HQ, 1024, 64, dtype=torch.bfloat16, device="meta")

    def modules(mask: Any, **options: Any) -> set[str]:
        return {kernel.module for kernel in jali.prebuild(x, x, x, mask, **options)}

    def packed(mask: Any, backward: bool = True) -> set[str]:
        kernels = jali.prebuild(*[x[0].transpose(0, 1)] * 3, mask, backward=backward, **VARLEN)
        return {kernel.module for kernel in kernels}

    long, short = (jali.DocumentMask.from_lengths([n] * (1024 // n)) for n in (256, 32))
    window = causal & jali.WindowMask.last(64)
    assert modules(window & long) == packed(window) == modules(long & window)
    assert modules(long, backward=False) == packed(None, backward=False)
    for mask in (
        window & short,
        window & (long | jali.PrefixMask(3)),
        long & long,
        long & jali.DocumentMask(ints(1024)),
    ):
        plain = modules(window, backward=False) | packed(window, backward=False)
        assert not modules(mask, backward=False) & plain
    biased = {"bias": torch.empty(1, 1, 1024, 1024, device="meta"), "backward": False}
    assert not modules(window & long, **biased) & modules(window, **biased)
    assert ", cut," not in "".join(modules(window & long, **biased))


def test_what_no_kernel_serves_is_refused(cache: Path) -> None:
    before = files(cache)
    with pytest.raises(NotImplementedError, match="bfloat16 and float16"):
        jali.prebuild(*call(dtype=torch.float32), causal)
    with pytest.raises(NotImplementedError, match="up to 256"):
        jali.prebuild(*call(264), causal)
    with pytest.raises(NotImplementedError, match="this is sm_80"):
        jali.prebuild(*call(), causal, arch="sm_80")
    q, k, v = call()
    with pytest.raises(ValueError, match="must divide"):
        jali.prebuild(q, k[:, :1].expand(B, 3, LK, 64), v)
    with pytest.raises(ValueError, match="layout"):
        jali.prebuild(*call(), layout="lbhd")  # type: ignore[arg-type]
    assert files(cache) == before


def test_the_compilers_report_is_understood() -> None:
    log = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
ptxas         .     8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Compiling entry function 'finish' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 38 registers
"""
    bad, good = _kernels("module", log, True)
    assert (bad.name, bad.registers, bad.stack_bytes, bad.spill_bytes) == ("forward", 168, 16, 20)
    assert not bad.clean and "C7510" in bad.notes[0] and "20 bytes spilled" in str(bad)
    assert (good.name, good.registers, good.stack_bytes, good.spill_bytes) == ("finish", 38, 0, 0)
    with pytest.raises(RuntimeError, match="not as expected"):
        _kernels("module", "Compiling entry function 'forward' for 'sm_90a'", True)


def test_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JALI_CACHE", "replaced by --into, and put back at the end")
    words = ["prebuild", "dense", "causal & document(3)", "D=72", "dtype=bfloat16,float16"]
    assert cli.main([*words, "--forward", "--into", str(tmp_path)]) == 0
    assert len(files(tmp_path)) == 5
    told = capsys.readouterr().out
    assert len(re.findall(r"(?:dense|causal .*) D=72 b?float16: forward \d+", told)) == 4
    assert "5 kernels for 4 calls: 5 compiled, 0 found in the cache; 0 with spills" in told
    assert cli.main([*words, "--forward"]) == 0
    assert "5 kernels for 4 calls: 0 compiled, 5 found" in capsys.readouterr().out
    assert cli.main(["prebuild", "dense", "D=72", "--packed", "--forward"]) == 0
    told = capsys.readouterr().out
    assert "dense D=72 bfloat16, packed: forward " in told
    assert "2 kernels for 2 calls: 1 compiled, 1 found" in told
    assert cli.main(["prebuild", "causal", "D=512"]) == 1
    assert "up to 256" in capsys.readouterr().out
    assert cli.main(["prebuild", "nonsense"]) == 1
    assert "is no mask" in capsys.readouterr().err
    assert cli.main(["info"]) == 0
    told = capsys.readouterr().out
    assert f"cache     {tmp_path}: 6 modules of kernels, " in told
    assert "compiler  NVRTC 1" in told and "gpu       " in told


def test_common_kernels() -> None:
    from jali._prebuild_command import jobs

    common = list(jobs(["Hkv=2"], True, []))
    assert len(common) == len(set(common)) == 4 * 3 * 2
    assert {str(job.dtype) for job in common} == {"torch.bfloat16", "torch.float16"}
    assert {job.D for job in common} == {64, 128, 256} and common[0].Hkv == 2
    assert [job.packed for job in jobs(["dense"], False, [], True)] == [False, True]
    assert len(list(jobs(["window(3)", "D=64 dtype=float16"], True, []))) == 5


# What needs a process of its own.

START = """
import torch, jali
x = torch.empty(1, 1, 1, 128, dtype=torch.float16, device="meta")
"""
MAKE = START + "print(*(k.compiled for k in jali.prebuild(x, x, x, backward=False)))"


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "JALI_CACHE": str(folder), **more}


def run(code: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment(folder, **more), capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip


def test_killed_while_compiling_and_then_offline(tmp_path: Path) -> None:
    missing = run(MAKE, tmp_path, JALI_OFFLINE="1")
    assert missing.returncode == 1
    assert "NotImplementedError: kernel fwd_sm90" in missing.stderr
    assert str(tmp_path) in missing.stderr and "jali prebuild" in missing.stderr

    with subprocess.Popen([sys.executable, "-c", MAKE], env=environment(tmp_path)) as killed:
        while not list(tmp_path.glob("*/*.lock")):  # made right before it compiles
            assert killed.poll() is None
            time.sleep(0.01)
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL and not files(tmp_path)
    after = run(MAKE, tmp_path)
    assert after.stdout == "True\n", after.stderr

    offline = run(MAKE + "\nprint(open('/proc/self/maps').read())", tmp_path, JALI_OFFLINE="1")
    assert offline.stdout.startswith("False\n"), offline.stderr
    assert "libjali_torch" in offline.stdout and "libnvrtc" not in offline.stdout


def test_a_pack_is_found_without_a_compiler(tmp_path: Path) -> None:
    pack, empty = tmp_path / "pack", tmp_path / "empty"
    assert run(MAKE, pack).stdout == "True\n"
    before = files(pack)
    use = MAKE.replace(
        "import torch, jali",
        f"""
import torch, jali
torch.ops.jali.add_kernel_packs(list({str(pack)!r}.encode()))
""",
    )
    found = run(use + "\nprint(open('/proc/self/maps').read())", empty)
    assert found.stdout.startswith("False\n"), found.stderr
    assert "libnvrtc" not in found.stdout and not files(empty) and files(pack) == before
