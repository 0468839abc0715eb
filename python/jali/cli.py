"""The command line: info, list, why, prebuild."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence

import torch

import jali

from . import _library, _prebuild_command
from ._words import dtypes_of, mask_of, numbers_of, split

USAGE = f"""\
python -m jali info                versions, library, instruction set, GPUs, driver, compiler, cache
                                   of GPU kernels, JALI_* variables
python -m jali list                mask leaves with their fields, mask classes, backends
python -m jali why 'MASK [N=V..]'  which backend and tiles a problem gets, and what is skipped
    MASK: causal, window(n), prefix(n), document(n) (n documents of equal length), dilated(n) or
          any mask of jali.masks, with & | ~
    N:    B H Hkv L Lq Lk D Dv dtype, e.g. why 'causal & document(12) L=8192 D=64 dtype=bfloat16'
python -m {_prebuild_command.USAGE}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int | None]] = {
        "info": _info,
        "list": _list,
        "why": _why,
        "prebuild": _prebuild_command.run,
    }
    if not words or words[0] not in commands:
        asked_help = bool(words) and words[0] in ("help", "-h", "--help")
        print(USAGE, end="", file=sys.stdout if asked_help else sys.stderr)
        return 0 if asked_help else 2
    try:
        return commands[words[0]](words[1:]) or 0
    except (ValueError, TypeError, NotImplementedError) as error:
        print(f"jali {words[0]}: {error}", file=sys.stderr)
        return 1


def _describe(what: str) -> list[list[str]]:
    text = bytes(getattr(torch.ops.jali, what)()).decode()
    return [line.split("\t") for line in text.splitlines()]


def _info(_: list[str]) -> None:
    print(f"jali      {jali.__version__}")
    print(f"library   {_library.path}")
    print(f"torch     {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"python    {platform.python_version()} on {platform.machine()}")
    variables = []
    for kind, *fields in _describe("describe_library"):
        if kind == "variable":
            variables.append(fields)
        else:
            print(f"{kind:9} {fields[0]}")
    print("\nvariables (now; values; meaning)")
    for name, value, values, doc in variables:
        print(f"  {name:14} {value or 'unset'}; {values}; {doc}")


def _list(_: list[str]) -> None:
    print("mask leaves and their fields (dims: B batch, H head, Q row, K key; ? optional)")
    for kind, name, *rest in _describe("describe_leaves"):
        if kind == "leaf":
            print(f"  {name}")
        else:
            print(f"    {name:11} {rest[0]:5} {rest[1]}")
    print("\nmask classes")
    for name in jali.masks.__all__:
        doc = getattr(jali.masks, name).__doc__ or ""
        if name.endswith("Mask") and name not in ("Mask", "LeafMask", "DerivedMask"):
            print(f"  {name:17} {doc.splitlines()[0]}")
    print("\nbackends")
    for kind, name, *_rest in _describe("describe_library"):
        if kind == "backend":
            print(f"  {name}")


def _why(words: list[str]) -> None:
    text, given = split(" ".join(words))
    sizes = {"B": 1, "H": 8, "L": 4096, "D": 64}
    for name in given.keys() - {"dtype"}:
        [sizes[name]] = numbers_of(given, name, most=1)
    dtypes = dtypes_of(given) or [torch.float32]
    if len(dtypes) > 1:
        raise ValueError(f"dtype={','.join(given['dtype'])}: expected one dtype")
    Lq, Lk = sizes.get("Lq", sizes["L"]), sizes.get("Lk", sizes["L"])
    Hkv, Dv = sizes.get("Hkv", sizes["H"]), sizes.get("Dv", sizes["D"])
    mask = mask_of(text, Lk)
    # Nothing is computed: expanded scalars stand for tensors of any size.
    one = torch.zeros((), dtype=dtypes[0])
    q = one.expand(sizes["B"], sizes["H"], Lq, sizes["D"])
    k = one.expand(sizes["B"], Hkv, Lk, sizes["D"])
    v = one.expand(sizes["B"], Hkv, Lk, Dv)
    print(f"mask {mask!r}")
    print(jali.explain(q, k, v, mask))
