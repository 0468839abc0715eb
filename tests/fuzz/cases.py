"""Random masks as plain JSON: drawn by hypothesis, replayed from one line.

A node of the tree is ["and", a, b], ["or", a, b], ["not", a], or [leaf name, arguments]. A table is
{"draw": kind, "shape": [...], "seed": n, ...}: small to print and quick to shrink. A leaf's
arguments build both the public class and its twin in tests.python.oracle.
"""

from __future__ import annotations

import math
from typing import Any

import jali
import numpy as np
import torch
from hypothesis import strategies as st

from tests.python import oracle

Json = Any

# ---- from JSON to a mask and its meaning ----

_NUMPY = {"where": np.where, "min": np.minimum, "max": np.maximum}
_TORCH = {"where": torch.where, "min": torch.minimum, "max": torch.maximum}


def table(spec: Json) -> np.ndarray:
    rng, shape = np.random.default_rng(spec["seed"]), spec["shape"]
    match spec["draw"]:
        case "int":
            return rng.integers(spec["lo"], spec["hi"] + 1, shape).astype(np.int32)
        case "bool":
            return rng.random(shape) < spec["density"]
        case "float":  # few values: many ties, and what must never be kept
            values = np.array([-np.inf, np.nan, -0.0, 0.0, 1, 2, 3.5, -1], dtype=np.float32)
            return values[rng.integers(0, len(values), shape)]
        case "ids":  # sorted documents with a few tokens that belong to none
            ids = np.cumsum(rng.random(shape) < 1 / spec["mean"], axis=-1)
            return np.where(rng.random(shape) < 0.1, -1, ids).astype(np.int32)
        case "cuts":  # of packed documents; some are empty, tokens may be left over
            sizes = rng.integers(0, 2 * spec["mean"], shape) * (rng.random(shape) < 0.8)
            return (np.cumsum(sizes, axis=-1) - sizes[..., :1]).astype(np.int32)
    raise ValueError(f"unknown kind of table {spec['draw']!r}")


def evaluate(e: Json, names: dict[str, Any], ops: dict[str, Any], number: Any) -> Any:
    """A predicate's expression, over traced or NumPy values."""
    if isinstance(e, str):
        return names[e]
    if isinstance(e, int):
        return number(e)
    op, *args = e
    if op in ("//", "%"):  # by a literal: never 0
        left = evaluate(args[0], names, ops, number)
        return left // args[1] if op == "//" else left % args[1]
    x = [evaluate(a, names, ops, number) for a in args]
    match op:
        case "+":
            return x[0] + x[1]
        case "-":
            return x[0] - x[1]
        case "*":
            return x[0] * x[1]
        case "neg":
            return -x[0]
        case "abs":
            return abs(x[0])
        case "<":
            return x[0] < x[1]
        case "<=":
            return x[0] <= x[1]
        case "==":
            return x[0] == x[1]
        case "!=":
            return x[0] != x[1]
        case "&":
            return x[0] & x[1]
        case "|":
            return x[0] | x[1]
        case "^":
            return x[0] ^ x[1]
        case "~":
            return ~x[0]
    return ops[op](*x)  # fmt: skip


def predicate(e: Json, traced: bool) -> Any:
    def fn(b: Any, h: Any, i: Any, j: Any) -> Any:
        names = {"b": b, "h": h, "i": i, "j": j}
        if traced:
            return evaluate(e, names, _TORCH, lambda n: n)
        return evaluate(e, names, _NUMPY, np.int64)

    return fn


def build(node: Json) -> tuple[jali.Mask, oracle.Cells]:
    op = node[0]
    if op == "not":
        mask, cells = build(node[1])
        return ~mask, ~cells
    if op in ("and", "or"):
        (a, x), (b, y) = build(node[1]), build(node[2])
        return (a & b, x & y) if op == "and" else (a | b, x | y)
    args = dict(node[1])
    ours, theirs = {}, {}
    for name, value in args.items():
        if isinstance(value, dict):
            theirs[name] = table(value)
            ours[name] = torch.from_numpy(theirs[name])
        elif name == "fn":
            ours[name], theirs[name] = predicate(value, True), predicate(value, False)
        elif name == "within":
            ours[name], theirs[name] = build(value)
        else:
            ours[name] = theirs[name] = tuple(value) if isinstance(value, list) else value
    return getattr(jali, op)(**ours), getattr(oracle, op)(**theirs)


def problem(case: Json) -> oracle.Problem:
    keys = ("B", "Hq", "Hkv", "Lq", "Lk", "q_offset", "cu_q", "cu_k")
    return oracle.Problem(**{k: case[k] for k in keys if k in case})


# ---- strategies ----


def seeds() -> st.SearchStrategy:
    return st.integers(0, 999)


@st.composite
def shapes(draw: st.DrawFn, longest: int = 80) -> Json:
    hkv = draw(st.sampled_from([1, 1, 2]))
    length = st.one_of(st.integers(1, longest), st.sampled_from([1, 16, 17, 63, 64, 65]))
    shape = {
        "B": draw(st.integers(1, 2)), "Hq": hkv * draw(st.integers(1, 2)), "Hkv": hkv,
        "Lq": draw(length), "Lk": draw(length),
    }  # fmt: skip
    shape["q_offset"] = draw(st.one_of(st.none(), offsets(shape)))
    return shape


def offsets(s: Json) -> st.SearchStrategy:
    number = st.integers(-s["Lq"] - 2, s["Lk"] + 2)
    return st.one_of(number, st.builds(
        lambda seed: {"draw": "int", "shape": [s["B"]], "seed": seed, "lo": -s["Lq"] - 2,
                      "hi": s["Lk"] + 2}, seeds()))  # fmt: skip


@st.composite
def tables(draw: st.DrawFn, s: Json, dims: str, kind: str, **more: Any) -> Json:
    """dims from "B", "H", "G" (key heads), "Q", "K"; leading ones may be 1 or missing."""
    sizes = {
        "B": st.sampled_from([1, s["B"]]), "H": st.sampled_from([1, s["Hkv"], s["Hq"]]),
        "G": st.sampled_from([1, s["Hkv"]]),
        "Q": st.just(s.get("Tq", s["Lq"])), "K": st.just(s.get("Tk", s["Lk"])),
    }  # fmt: skip
    if "Tq" in s:  # varlen: packed tokens, or padded sequences
        padded = dims[0] == "B" and s["B"] > 1 and draw(st.booleans())
        sizes["B"] = st.just(s["B"] if padded else 1)
        if padded:
            sizes |= {"Q": st.just(s["Lq"]), "K": st.just(s["Lk"])}
    shape = [draw(sizes[d]) for d in dims]
    while len(shape) > 1 and shape[0] == 1 and dims[-len(shape)] in "BHG" and draw(st.booleans()):
        shape = shape[1:]
    return {"draw": kind, "shape": shape, "seed": draw(seeds())} | more


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Json:
    """Integer-valued expressions of b, h, i, j and literals; no overflow of 64 bits."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return draw(st.one_of(st.sampled_from(["i", "j", "i", "j", "b", "h"]),
                              st.integers(-9, 99)))  # fmt: skip
    sub = expressions(depth - 1)
    op = draw(st.sampled_from(["+", "-", "*", "//", "%", "neg", "abs", "min", "max"]))
    if op in ("//", "%"):
        return [op, draw(sub), draw(st.sampled_from([1, 2, 3, 7, 16, -4]))]
    if op in ("min", "max"):  # torch.minimum wants two traced values
        return [op, ["+", "i", draw(sub)], ["-", "j", draw(sub)]]
    return [op, draw(sub)] if op in ("neg", "abs") else [op, draw(sub), draw(sub)]


@st.composite
def conditions(draw: st.DrawFn, depth: int = 2) -> Json:
    if depth == 0 or draw(st.booleans()):
        op = draw(st.sampled_from(["<", "<=", "==", "!="]))
        # One side starts from an index, so that the comparison is never one of two literals.
        return [op, ["+", draw(st.sampled_from("ij")), draw(expressions())], draw(expressions())]
    sub = conditions(depth - 1)
    op = draw(st.sampled_from(["&", "|", "^", "~", "where"]))
    return [op] + [draw(sub) for _ in range({"~": 1, "where": 3}.get(op, 2))]


@st.composite
def leaves(draw: st.DrawFn, s: Json, names: tuple[str, ...]) -> Json:
    name = draw(st.sampled_from(names))
    lq, lk = s["Lq"], s["Lk"]
    own = st.one_of(st.none(), offsets(s))

    def ints(dims: str, lo: int, hi: int) -> Json:
        return draw(tables(s, dims, "int", lo=lo, hi=hi))

    def width() -> Json:
        if draw(st.integers(0, 3)) == 0:
            return ints("H", 0, lk)
        return draw(st.one_of(st.none(), st.integers(0, 12), st.integers(-3, lk + 2)))

    match name:
        case "CausalMask":
            args = {"offset": draw(own)}
        case "WindowMask":
            args = {"left": width(), "right": width(), "offset": draw(own)}
        case "PrefixMask":
            length = st.integers(0, lk + 2)
            args = {"length": draw(length)}
            if draw(st.booleans()):
                args = {"length": {"draw": "int", "shape": [s["B"]], "seed": draw(seeds()),
                                   "lo": 0, "hi": lk + 2}}  # fmt: skip
        case "KeyPaddingMask":
            density = draw(st.sampled_from([0.1, 0.5, 0.97]))
            args = {"keep": draw(tables(s, "BK", "bool", density=density))}
        case "DocumentMask":
            mean = draw(st.sampled_from([3, 20, 60]))
            if draw(st.booleans()):
                args = {"q_ids": draw(tables(s, "BK", "ids", mean=mean))}
            else:
                args = {"q_ids": draw(tables(s, "BQ", "ids", mean=mean)),
                        "k_ids": draw(tables(s, "BK", "ids", mean=mean))}  # fmt: skip
        case "PackedDocumentMask":
            shape = draw(st.sampled_from([[n] for n in (1, 2, 5)] + [[s["B"], 4]]))
            mean = draw(st.sampled_from([3, 20, 60]))
            args = {"cu_seqlens": {"draw": "cuts", "shape": shape, "mean": mean,
                                   "seed": draw(seeds())}}  # fmt: skip
        case "KeyIntervalMask":
            args = {"start": ints("BHK", -3, lq), "end": ints("BHK", -3, lq + 9)}
            if draw(st.integers(0, 3)) == 0:
                args[draw(st.sampled_from(["start", "end"]))] = None
            args["offset"] = draw(own)
        case "RowIntervalMask":
            args = {"start": ints("BHQ", -3, lk), "end": ints("BHQ", -3, lk + 9)}
        case "DilatedMask":
            args = {"step": draw(st.integers(1, 9)), "offset": draw(own)}
        case "NeighborhoodMask":
            args = draw(neighborhoods(draw(st.sampled_from([lq, lk]))))
        case "BlockSparseMask":
            block = [draw(st.sampled_from([1, 8, 16, 50])), draw(st.sampled_from([1, 8, 16, 50]))]
            args = {"blocks": draw(tables(s, "BH", "bool", density=0.4)), "block": block}
            args["blocks"]["shape"] += [-(-lq // block[0]), -(-lk // block[1])]
        case "TokenIndexMask":
            block = draw(st.sampled_from([1, 4, 32]))
            args = {"indices": ints("BH", -1, lk - 1), "block": block}
            args["indices"]["shape"] += [-(-lq // block), draw(st.integers(1, 9))]
        case "DenseMask":
            args = {"tensor": draw(tables(s, "BH", "bool", density=0.5))}
            args["tensor"]["shape"] += [draw(st.sampled_from([1, n])) for n in (lq, lk)]
        case "PredicateMask":
            args = {"fn": draw(conditions()), "offset": draw(own)}
        case "DynamicMask":
            dims = "GK" if "Tq" in s else "BGK"  # varlen: packed only
            args = {"scores": draw(tables(s, dims, "float")),
                    "keep": draw(st.one_of(st.none(), st.integers(1, 12))),
                    "causal": draw(st.booleans()),
                    "offset": None}  # fmt: skip
            if args["keep"] is None or draw(st.booleans()):
                args["threshold"] = draw(st.sampled_from([-0.5, 0.0, 1.0]))
            if draw(st.booleans()):
                args["within"] = draw(leaves(s, ("KeyPaddingMask", "DocumentMask")))
            if args["causal"]:
                args["offset"] = draw(own)
    return [name, args]


@st.composite
def neighborhoods(draw: st.DrawFn, total: int) -> Json:
    a = draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    shape = [a, total // a] if draw(st.booleans()) else [total]
    dilation = [draw(st.integers(1, max(1, n // 2))) for n in shape]
    kernel = [draw(st.integers(1, n // d)) for n, d in zip(shape, dilation, strict=True)]
    assert math.prod(shape) == total
    causal = [draw(st.booleans()) for _ in shape]
    return {"shape": shape, "kernel": kernel, "dilation": dilation, "causal": causal}


ALL = (
    "CausalMask", "WindowMask", "PrefixMask", "KeyPaddingMask", "DocumentMask",
    "PackedDocumentMask", "KeyIntervalMask",
    "RowIntervalMask", "DilatedMask", "BlockSparseMask", "TokenIndexMask", "DenseMask",
    "PredicateMask", "DynamicMask", "NeighborhoodMask",
)  # fmt: skip
VARLEN = (*ALL[:9], "PredicateMask", "DynamicMask")


@st.composite
def trees(draw: st.DrawFn, s: Json, depth: int, names: tuple[str, ...]) -> Json:
    op = draw(st.sampled_from(["and", "or", "not", "leaf", "and"])) if depth else "leaf"
    if op == "leaf":
        return draw(leaves(s, names))
    sub = trees(s, depth - 1, names)
    return [op, draw(sub)] if op == "not" else [op, draw(sub), draw(sub)]


@st.composite
def cases(draw: st.DrawFn, longest: int = 80) -> Json:
    s = draw(shapes(longest))
    tile = [draw(st.sampled_from([1, 8, 16, 64, 128])) for _ in range(2)]
    depth = draw(st.sampled_from([2, 3, 4, 1, 0]))
    return s | {"tile": tile, "tree": draw(trees(s, depth, ALL))}


@st.composite
def attention_cases(draw: st.DrawFn, longest: int = 70) -> Json:
    case = draw(cases(longest))
    return case | draw(options())


@st.composite
def options(draw: st.DrawFn) -> Json:
    chosen = draw(st.sets(st.sampled_from(
        ["scale", "softcap", "bias", "key_bias", "alibi_slopes", "sinks", "dropout_p"]),
        max_size=3))  # fmt: skip
    return {
        "D": draw(st.sampled_from([1, 3, 8, 16, 33])),
        "Dv": draw(st.sampled_from([1, 4, 8, 16, 31])),
        "dtype": draw(st.sampled_from(["float64", "float32", "bfloat16", "float16"])),
        "seed": draw(seeds()),
        "options": sorted(chosen),
    }


@st.composite
def varlen_cases(draw: st.DrawFn) -> Json:
    n = draw(st.integers(1, 4))
    lengths = [[draw(st.integers(0, 40)) for _ in range(n)] for _ in range(2)]
    cu_q, cu_k = ([0, *np.cumsum(x).tolist()] for x in lengths)
    hkv = draw(st.sampled_from([1, 2]))
    s = {
        "B": n, "Hq": hkv * draw(st.integers(1, 2)), "Hkv": hkv,
        "Lq": max(lengths[0]), "Lk": max(lengths[1]), "Tq": cu_q[-1], "Tk": cu_k[-1],
        "q_offset": None,
    }  # fmt: skip
    tree = draw(trees(s, draw(st.sampled_from([2, 3, 1, 0])), VARLEN))
    tile = [draw(st.sampled_from([1, 8, 16, 64])) for _ in range(2)]
    return s | {"cu_q": cu_q, "cu_k": cu_k, "tile": tile, "tree": tree} | draw(options())
