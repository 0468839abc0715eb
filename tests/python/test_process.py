"""What needs a process of its own: memory, fork, each instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    """Runs Python code in a fresh process; its stdout."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=ROOT, text=True,
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


MEMORY = """
import torch, jali
def peak():  # ru_maxrss of a new process starts at its parent's
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
L = 1 << 15
q, k, v = (torch.randn(1, 1, L, 16, requires_grad=True) for _ in range(3))
documents = jali.DocumentMask((torch.arange(L) // 999)[None])
mask = jali.CausalMask() & jali.WindowMask(64, 0) & documents
def step(n):
    x = [t[:, :, :n] for t in (q, k, v)]
    jali.attention(*x, mask if n == L else jali.CausalMask()).sum().backward()
step(256)
before = peak()
step(L)
print((peak() - before) // 1024)
"""


def test_memory_is_linear() -> None:
    # The inputs and their gradients are 2 MiB each; one bool per cell would be 1 GiB.
    assert int(run(MEMORY)) < 100


def test_nothing_is_left_unwritten() -> None:
    """The tests of that name, every byte of new memory set to 127: in fp16 a NaN, else huge."""
    run(
        "import sys, pytest; sys.exit(pytest.main(['-q', '-k', 'unwritten', "
        "'-p', 'no:cacheprovider', 'tests/python/test_attention.py']))",
        MALLOC_PERTURB_="128", GLIBC_TUNABLES="glibc.malloc.tcache_count=0",
    )  # fmt: skip


FORK = """
import os, torch, jali
torch.set_num_threads(3)
q, k, v = (torch.randn(1, 4, 200, 16) for _ in range(3))
first = jali.attention(q, k, v, jali.CausalMask())  # the pool is running now
pid = os.fork()
again = jali.attention(q, k, v, jali.CausalMask())
same = torch.equal(first, again)
if pid == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(pid, 0)
assert same and status == 0, status
"""


def test_fork() -> None:
    run(FORK)


ISA_FLAG = {"v2": "sse4_2", "v3": "avx2", "v4": "avx512f"}

ISA = """
import torch, jali
from tests.python.accuracy import check_attention
from tests.python.test_attention import OPTIONS, causal
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for L, D in ((70, 24), (150, 65)):
        check_attention(jali.CausalMask(), causal(2, 4, L, L), Hkv=2, D=D, dtype=dtype)
    for option in ("softcap", "bias", "key_bias", "alibi", "sinks", "dropout"):
        check_attention(
            jali.CausalMask(), causal(2, 4, 70, 90), Hkv=2, D=16, dtype=dtype,
            options=OPTIONS[option],
        )
print(bytes(torch.ops.jali.describe_library()).decode())
"""


def cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())


@pytest.mark.parametrize("isa", ISA_FLAG)
def test_each_instruction_set(isa: str) -> None:
    if ISA_FLAG[isa] not in cpu_flags():
        pytest.skip(f"this CPU has no {ISA_FLAG[isa]}")
    assert f"isa\t{isa}\n" in run(ISA, JALI_FORCE=isa), "JALI_FORCE chose another one"
