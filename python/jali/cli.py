"""The command line: info, list, why."""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections.abc import Callable, Sequence

import torch

import jali

from . import _library

USAGE = """\
python -m jali info                versions, library, instruction set, threads, JALI_* variables
python -m jali list                mask leaves with their fields, mask classes, backends
python -m jali why 'MASK [N=V..]'  which backend and tiles a problem gets, and what is skipped
    MASK: causal, window(n), prefix(n), document(n) (n documents of equal length), dilated(n) or
          any mask of jali.masks, with & | ~
    N:    B H Hkv L Lq Lk D Dv dtype, e.g. why 'causal & document(12) L=8192 D=64 dtype=bfloat16'
"""

_SIZES = re.compile(r"(?:^|(?<=\s))(B|H|Hkv|L|Lq|Lk|D|Dv|dtype)=(\w+)(?=\s|$)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"info": _info, "list": _list, "why": _why}
    if not words or words[0] not in commands:
        asked_help = bool(words) and words[0] in ("help", "-h", "--help")
        print(USAGE, end="", file=sys.stdout if asked_help else sys.stderr)
        return 0 if asked_help else 2
    try:
        commands[words[0]](words[1:])
    except (ValueError, TypeError, NotImplementedError) as error:
        print(f"jali {words[0]}: {error}", file=sys.stderr)
        return 1
    return 0


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
    text = " ".join(words)
    sizes = {"B": 1, "H": 8, "L": 4096, "D": 64}
    dtype = torch.float32
    for name, value in _SIZES.findall(text):
        if name == "dtype":
            dtype = getattr(torch, value, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"dtype={value}: no such torch dtype")
        elif value.isdigit():
            sizes[name] = int(value)
        else:
            raise ValueError(f"{name}={value}: expected a number")
    text = _SIZES.sub("", text).strip()
    Lq, Lk = sizes.get("Lq", sizes["L"]), sizes.get("Lk", sizes["L"])
    Hkv, Dv = sizes.get("Hkv", sizes["H"]), sizes.get("Dv", sizes["D"])
    mask = parse_mask(text, Lk) if text else None
    # Nothing is computed: expanded scalars stand for tensors of any size.
    one = torch.zeros((), dtype=dtype)
    q = one.expand(sizes["B"], sizes["H"], Lq, sizes["D"])
    k = one.expand(sizes["B"], Hkv, Lk, sizes["D"])
    v = one.expand(sizes["B"], Hkv, Lk, Dv)
    print(f"mask {mask!r}")
    print(jali.explain(q, k, v, mask))


def parse_mask(text: str, num_keys: int) -> jali.Mask:
    """A mask from text such as "causal & (window(256) | prefix(4))" or "CausalMask(0)"."""

    def document(count: int = 8) -> jali.Mask:
        return jali.DocumentMask(torch.arange(num_keys) * count // max(num_keys, 1))

    makers: dict[str, Callable[..., jali.Mask]] = {
        "causal": jali.CausalMask,
        "window": lambda n=256: jali.WindowMask.last(n),
        "prefix": lambda n=4: jali.PrefixMask(n),
        "dilated": lambda n=2: jali.DilatedMask(n),
        "document": document,
        **{name: getattr(jali.masks, name) for name in jali.masks.__all__ if "Mask" in name},
    }

    def evaluate(node: ast.AST) -> jali.Mask:
        match node:
            case ast.BinOp(left, ast.BitAnd(), right):
                return evaluate(left) & evaluate(right)
            case ast.BinOp(left, ast.BitOr(), right):
                return evaluate(left) | evaluate(right)
            case ast.UnaryOp(ast.Invert(), operand):
                return ~evaluate(operand)
            case ast.Name(name) if name in makers:
                return makers[name]()
            case ast.Call(ast.Name(name), given, named) if name in makers:
                values = [ast.literal_eval(x) for x in given]
                options = {x.arg: ast.literal_eval(x.value) for x in named if x.arg}
                return makers[name](*values, **options)
        raise ValueError(f"{ast.unparse(node)!r} is no mask; known are: {', '.join(makers)}")

    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{text!r} is no expression: {error.msg}") from None
    return evaluate(tree.body)
