"""Compiles every mask leaf, and trees over them, for the GPU: ./dev kernels [name | line …]

Uses NVRTC from the wheel nvidia-cuda-nvrtc; needs no GPU and no CUDA toolkit. Each case is one
kernel that evaluates all that kernels ask of a mask; tests/nvrtc/*.cu are further cases, as they
stand, for calls without pieces (JALI_CUT); those that say "// cut, too" also for calls with pieces,
those that say "// ptxas -O1, too" at both levels. Fails on compile errors, on register spills and
on the compiler's C75xx notes (serialised WGMMA).

A line is a kernel of its own, in the words of tests/nvrtc/bwd.h and fwd.h:
'BACKWARD(Backward, name, BF16, 128, 128, leaf::Causal, false)'.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_DIR = ROOT / "src"
ARCH = "sm_90a"
WHOLE = ["-DJALI_CUT=false"]  # for calls without pieces

# Trees over leaves, as C++ types; a tree whose leaves do not exist is an error.
TREES = {
    "streaming": "And<leaf::Causal, Or<leaf::Window, leaf::Prefix>>",
    "documents_causal": "And<leaf::Causal, leaf::Document>",
    "documents_prefix": "And<Or<leaf::Causal, leaf::Prefix>, leaf::Document>",
    "far": "And<Not<leaf::Window>, Not<Or<leaf::Prefix, Not<leaf::Document>>>>",
}

KERNEL = """
#include "mask/combine.h"
{includes}
using namespace jali;
using M = {type};

extern "C" __global__ void probe(const __grid_constant__ M mask, Frame f, i32 num_rows, u8* cells,
                                 u8* classes, Span* spans) {{
  f.b = blockIdx.x;
  f.h = blockIdx.y;
  const i32 i0 = 64 * blockIdx.z, j0 = 64 * threadIdx.x;
  const typename M::RowBlock rows = mask.rows(f, i0, min_of(i0 + 64, f.num_rows));
  const typename M::ColBlock cols = mask.cols(f, j0, min_of(j0 + 64, f.num_keys));
  const i32 at = (blockIdx.x * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
  classes[at * blockDim.x + threadIdx.x] = static_cast<u8>(mask.classify(f, rows, cols));
  spans[2 * at] = mask.key_span(f, rows);
  spans[2 * at + 1] = mask.row_span(f, cols);
  for (i32 j = j0; j < min_of(j0 + 64, f.num_keys); ++j) {{
    const typename M::Col col = mask.col(f, j);
    for (i32 i = i0; i < min_of(i0 + num_rows, f.num_rows); ++i) {{
      cells[i64(i) * f.num_keys + j] = mask.visible(mask.row(f, i), col);
    }}
  }}
}}
"""


def leaf_stems() -> list[str]:
    return sorted(path.stem for path in (SOURCE_DIR / "mask" / "leaf").glob("*.h"))


def camel(stem: str) -> str:
    """The name of a leaf's struct: key_interval -> KeyInterval."""
    return "".join(word.capitalize() for word in stem.split("_"))


def mask_kernel(cpp_type: str) -> str:
    """The text of a kernel that evaluates the mask type."""
    stems = [stem for stem in leaf_stems() if f"leaf::{camel(stem)}" in cpp_type]
    includes = "\n".join(f'#include "mask/leaf/{stem}.h"' for stem in stems)
    return KERNEL.format(includes=includes, type=cpp_type)


def line_kernel(line: str) -> str:
    """The text of what one line of tests/nvrtc makes; it may use every leaf."""
    header = "fwd.h" if line.lstrip().startswith("FORWARD") else "bwd.h"
    includes = [
        f"nvrtc/{header}",
        "cuda/kernel/stored.h",
        *(f"mask/leaf/{s}.h" for s in leaf_stems()),
    ]
    return "".join(f'#include "{path}"\n' for path in includes) + line


def cases() -> dict[str, tuple[str, list[str]]]:
    """Name -> kernel text, further options."""
    types = {stem: f"leaf::{camel(stem)}" for stem in leaf_stems()}
    types.update({f"tree {name}": cpp_type for name, cpp_type in TREES.items()})
    texts = {name: mask_kernel(cpp_type) for name, cpp_type in types.items()}
    texts.update({p.name: p.read_text() for p in sorted((ROOT / "tests" / "nvrtc").glob("*.cu"))})
    all_cases = {name: (text, WHOLE) for name, text in texts.items()}
    for name, text in texts.items():
        if "\n// ptxas -O1, too" in text:
            all_cases[f"{name} -O1"] = text, [*WHOLE, "--ptxas-options=-O1"]
        if "\n// cut, too" in text:
            all_cases[f"{name} cut"] = text, ["-DJALI_CUT=true"]
    return all_cases


def open_nvrtc() -> ctypes.CDLL:
    """NVRTC from the wheel. Its builtins must be open first, from the same folder."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    for root in roots:
        for library in sorted(root.glob("*/lib/libnvrtc.so.1*")):
            for builtins in library.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    sys.exit("NVRTC is missing: pip install nvidia-cuda-nvrtc==13.0.88 (./dev installs it)")


class Nvrtc:
    def __init__(self) -> None:
        self.lib = open_nvrtc()
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, function: str, *arguments: object) -> None:
        code = getattr(self.lib, function)(*arguments)
        if code:
            raise RuntimeError(f"{function}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def compile(self, name: str, text: str, further: list[str]) -> tuple[str, str]:
        """Returns (error, summary); error is empty when the kernels are good."""
        program = ctypes.c_void_p()
        self.call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            text.encode(),
            name.encode(),
            0,
            None,
            None,
        )
        options = [
            f"-arch={ARCH}",
            "-std=c++20",
            "-default-device",  # what a leaf leaves unmarked (fields) is a device function too
            f"-I{SOURCE_DIR}",
            f"-I{ROOT / 'tests'}",
            "--ptxas-options=-v",
            "--ptxas-options=--warn-on-spills",
            "--ptxas-options=--warning-as-error",
            *further,
        ]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        begin = time.thread_time()
        code = self.lib.nvrtcCompileProgram(program, len(options), array)
        seconds = time.thread_time() - begin
        size = ctypes.c_size_t()
        self.call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.call("nvrtcGetProgramLog", program, log)
        if not code:
            self.call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        self.call("nvrtcDestroyProgram", ctypes.byref(program))
        error, summary = verdict(code, log.value.decode())
        return error, summary and f"{summary}  {size.value / 1024:5.0f} KB  {seconds:5.2f} s"


def verdict(code: int, log: str) -> tuple[str, str]:
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if code:
        return f"does not compile:\n{log}", ""
    if not registers or not spills:
        return f"the compiler's report is not as expected:\n{log}", ""
    if any(found != ("0", "0") for found in spills):
        return f"spills registers:\n{log}", ""
    if "C75" in log:
        return f"the compiler notes:\n{log}", ""
    return "", f"{max(int(r) for r in registers):3} registers"


def main(wanted: list[str]) -> int:
    nvrtc = Nvrtc()
    lines = [w for w in wanted if "(" in w]
    names = [w for w in wanted if w not in lines]
    todo = {k: v for k, v in cases().items() if not wanted or any(n in k for n in names)}
    todo |= {line: (line_kernel(line), WHOLE) for line in lines}
    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC runs outside Python's lock
        results = dict(zip(todo, pool.map(lambda n: nvrtc.compile(n, *todo[n]), todo)))
    failed = {name: error for name, (error, _) in results.items() if error}
    for name, (_, summary) in results.items():
        print(f"  {name:24} {summary or 'FAILED'}")
    for name, error in failed.items():
        print(f"\n{name} {error}")
    seconds = time.perf_counter() - begin
    passed = len(results) - len(failed)
    print(f"NVRTC {ARCH}: {passed} passed, {len(failed)} failed in {seconds:.1f} s")
    return 1 if failed or not results else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
