"""Masks and sizes as words on the command line: "causal & window(256) L=4096 D=64,128"."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import torch

import jali

#: Values of N=V, by name.
Sizes = dict[str, list[str]]

_SIZES = re.compile(r"(?:^|(?<=\s))(B|H|Hkv|L|Lq|Lk|D|Dv|dtype)=([\w.,]+)(?=\s|$)")


def split(text: str) -> tuple[str, Sizes]:
    """The text without its sizes, and these."""
    sizes = {name: values.split(",") for name, values in _SIZES.findall(text)}
    return _SIZES.sub("", text).strip(), sizes


def numbers_of(sizes: Sizes, name: str, most: int | None = None) -> list[int]:
    """The numbers of one name; none where it is missing."""
    values = sizes.get(name, [])
    if not all(value.isdigit() for value in values):
        raise ValueError(f"{name}={','.join(values)}: expected a number")
    if most is not None and len(values) > most:
        raise ValueError(f"{name}={','.join(values)}: expected one number")
    return [int(value) for value in values]


def dtypes_of(sizes: Sizes) -> list[torch.dtype]:
    dtypes = [
        getattr(torch, value.removeprefix("torch."), None) for value in sizes.get("dtype", [])
    ]
    for value, dtype in zip(sizes.get("dtype", []), dtypes, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={value}: no such torch dtype")
    return dtypes


def mask_of(text: str, num_keys: int) -> jali.Mask | None:
    """The mask; None for "dense" and for nothing."""
    return None if text in ("", "dense") else parse_mask(text, num_keys)


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
