"""Checks who includes whom, and that no tracked file names a path of one machine.

Imports go one way: binding -> api -> plan -> mask -> base; backends see plan, mask and base, never
the api or each other; include/jali and leaves stand on almost nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = re.compile(r'^\s*#\s*include\s+(<[^>]+>|"[^"]+")', re.MULTILINE)

# Folder of src -> folders of src that it may include. The public header is allowed everywhere
# but in leaves and base headers that kernels read.
LAYERS = {
    "base": {"base"},
    "mask": {"mask", "base"},
    "plan": {"plan", "mask", "base"},
    "backend": {"backend", "plan", "mask", "base"},
    "cpu": {"cpu", "backend", "plan", "mask", "base"},
    "cuda": {"cuda", "backend", "plan", "mask", "base"},
    "api": {"api", "backend", "plan", "mask", "base"},
}
GENERATED = {"leaf_list.h", "backend_list.h", "source_pack.h", "variant_list.h"}
PRIVATE_PATH = re.compile(rb"(?<![\w.])/(?:work|root|farm|home|tmp)/")


def includes_of(path: Path) -> list[tuple[int, str]]:
    text = path.read_text()
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in INCLUDE.finditer(text)]


def is_leaf(path: Path) -> bool:
    return path.parent == ROOT / "src" / "mask" / "leaf"


def complaint(path: Path, target: str) -> str:
    """Why `path` may not include `target` ('<x>' or '"x"'); empty if it may."""
    name = target[1:-1]
    top = path.relative_to(ROOT).parts[0]
    if top == "include":
        return (
            ""
            if target[0] == "<" and "/" not in name and "." not in name
            else ("the public header may include the standard library only")
        )
    if top == "binding":
        local = target[0] == '"' and (path.parent / name).exists()
        inside = name in GENERATED or (ROOT / "src" / name).exists()
        return (
            "the binding may include <jali/jali.h> only, nothing of src/"
            if (inside and not local)
            else ""
        )
    if is_leaf(path):
        return (
            ""
            if name == "mask/leaf.h" or name.startswith("base/")
            else ("a leaf may include mask/leaf.h and base/ only")
        )
    layer = path.relative_to(ROOT).parts[1]
    if layer not in LAYERS:
        return f"src/{layer} is unknown: give it a line in LAYERS of tools/check_includes.py"
    if target[0] == "<":
        return "torch stays in the binding" if name.startswith(("torch/", "ATen", "c10")) else ""
    if name in GENERATED:
        return ""
    if not (ROOT / "src" / name).exists():
        return 'name it from src/, as in "mask/leaf.h"'
    used = name.split("/")[0]
    if used not in LAYERS[layer]:
        return f"src/{layer} may include {', '.join(sorted(LAYERS[layer]))} only"
    return ""


def main() -> int:
    sources = [
        path
        for folder in ("src", "include", "binding")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".h", ".cpp", ".cuh"}
    ]
    problems = []
    for path in sources:
        for line, target in includes_of(path):
            why = complaint(path, target)
            if why:
                problems.append(f"{path.relative_to(ROOT)}:{line}: includes {target}: {why}")
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    for raw in filter(None, tracked):
        path = ROOT / raw.decode()
        if path.is_symlink() or not path.is_file():
            continue
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
            if PRIVATE_PATH.search(line):
                problems.append(f"{raw.decode()}:{number}: names a path of one machine")
    print("\n".join(problems + [f"includes: {len(sources)} files, {len(problems)} problems"]))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
