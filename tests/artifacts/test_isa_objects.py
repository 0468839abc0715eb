"""No function may be shared between objects that are compiled for different instruction sets.

An inline function or a template that two objects hold is kept once by the linker, from either of
them: a machine without AVX-512 could then run the AVX-512 copy. What is compiled per instruction
set must therefore be always_inline or carry the instruction set in its name.
"""

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("JALI_BUILD_DIR", ROOT / "build"))


def weak_functions(objects: list[Path]) -> set[str]:
    listed = subprocess.run(
        ["nm", "-C", "--defined-only", *map(str, objects)],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(re.findall(r"^[0-9a-f]+ W (.+)$", listed.stdout, re.MULTILINE))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="one instruction set on this machine")
def test_instruction_sets_share_no_function() -> None:
    by_level: dict[str, list[Path]] = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        output = re.search(r" -o (\S+jali_core\.dir\S+)", entry["command"])
        if output:
            level = re.search(r"-march=(\S+)", entry["command"])
            path = Path(entry["directory"]) / output[1]
            by_level.setdefault(level[1] if level else "baseline", []).append(path)
    assert {"baseline", "x86-64-v3", "x86-64-v4"} <= set(by_level)
    functions = {level: weak_functions(objects) for level, objects in by_level.items()}
    assert functions["baseline"], "nm finds nothing: has it changed its format?"
    levels = sorted(functions)
    for n, level in enumerate(levels):
        for other in levels[n + 1 :]:
            shared = functions[level] & functions[other]
            assert not shared, f"in objects for {level} and for {other}: {sorted(shared)[:10]}"
