"""The program of a predicate: its types and operations, and how it reads as text."""

from __future__ import annotations

import struct
from typing import Any

import torch

#: (operation, *arguments): the nodes of the operands; a literal's value; a load's table first.
Node = tuple[Any, ...]

# Types of values, in the order of promotion. The numbers are part of the program format.
BOOL, INT, FLOAT = 0, 1, 2
TYPE_NAMES = ("bool", "int", "float")
TYPE_DTYPES = (torch.bool, torch.int64, torch.float32)
TABLE_DTYPES = {torch.bool: 0, torch.int32: 1, torch.int64: 2, torch.float32: 3}
TABLE_TYPES = (BOOL, INT, INT, FLOAT)

# Instructions; their position is their number in src/mask/predicate/program.h.
_NAMES = """
    const b h q k load to_int to_bool to_float add sub mul floor_div mod neg abs min max shl shr
    and or xor not lt le eq ne where
"""
OPS = tuple(_NAMES.split())
OP_NUMBER = {name: number for number, name in enumerate(OPS)}
INPUTS = ("b", "h", "q", "k")

# Operation: its format and how tightly it binds (Python's order), for as few brackets as possible.
FORMATS = {
    "add": ("{0} + {1}", 9),
    "sub": ("{0} - {1}", 9),
    "mul": ("{0} * {1}", 10),
    "floor_div": ("{0} // {1}", 10),
    "mod": ("{0} % {1}", 10),
    "neg": ("-{0}", 11),
    "not": ("~{0}", 11),
    "shl": ("{0} << {1}", 8),
    "shr": ("{0} >> {1}", 8),
    "and": ("{0} & {1}", 7),
    "xor": ("{0} ^ {1}", 6),
    "or": ("{0} | {1}", 5),
    "lt": ("{0} < {1}", 4),
    "le": ("{0} <= {1}", 4),
    "eq": ("{0} == {1}", 4),
    "ne": ("{0} != {1}", 4),
    "abs": ("abs({0})", 0),
    "min": ("minimum({0}, {1})", 0),
    "max": ("maximum({0}, {1})", 0),
    "where": ("where({0}, {1}, {2})", 0),
    "to_int": ("int({0})", 0),
    "to_bool": ("bool({0})", 0),
    "to_float": ("float({0})", 0),
}
_ASSOCIATIVE = {"add", "mul", "and", "or", "xor"}
_TIGHT = 20


def text_of(nodes: list[Node], types: list[int], at: int, max_length: int = 400) -> str:
    memo: dict[int, tuple[str, int]] = {}

    def part(n: int) -> tuple[str, int]:
        if n not in memo:
            memo[n] = build(n)
        return memo[n]

    def build(n: int) -> tuple[str, int]:
        node = nodes[n]
        if node[0] == "const":
            value = bool(node[1]) if types[n] == BOOL else node[1]
            return repr(value), _TIGHT if types[n] == BOOL or node[1] >= 0 else 11
        if node[0] in INPUTS:
            return node[0], _TIGHT
        if node[0] == "load":
            index = ", ".join(part(arg)[0] for arg in node[2:])
            return (f"t{node[1]}[{index}]" if index else f"t{node[1]}"), _TIGHT
        pattern, tight = FORMATS[node[0]]
        texts = []
        for place, arg in enumerate(node[1:]):
            text, inner = part(arg)
            needed = tight + (place > 0 or tight == 4)  # left-associative; comparisons do not chain
            if nodes[arg][0] == node[0] and node[0] in _ASSOCIATIVE:
                needed = tight
            texts.append(f"({text})" if tight and inner < needed else text)
        text = pattern.format(*texts)
        if len(text) > max_length:
            text = text[: max_length // 2] + " … " + text[-max_length // 2 :]
        return text, tight or _TIGHT

    for n in range(at):  # in order, so that a long program does not recurse deeply
        part(n)
    return part(at)[0]


def decode(code: tuple[int, ...], literals: tuple[int, ...]) -> tuple[list[Node], list[int]]:
    """The nodes of an assembled program, and their types."""
    num_tables = code[0]
    ranks = [code[2 + 2 * n] for n in range(num_tables)]
    kinds = [TABLE_TYPES[code[1 + 2 * n]] for n in range(num_tables)]
    nodes: list[Node] = []
    types: list[int] = []
    scalars = iter(literals)
    at = 1 + 2 * num_tables
    arity = {op: fmt.count("{") for op, (fmt, _) in FORMATS.items()}
    while at < len(code):
        op = OPS[code[at]]
        if op == "const":
            type_, bits = code[at + 1], next(scalars)
            value = struct.unpack("<d", struct.pack("<q", bits))[0] if type_ == FLOAT else bits
            nodes.append((op, value))
            types.append(type_)
            at += 2
            continue
        count = 1 + ranks[code[at + 1]] if op == "load" else arity.get(op, 0)
        nodes.append((op, *code[at + 1 : at + 1 + count]))
        if op == "load":
            types.append(kinds[code[at + 1]])
        elif op in ("lt", "le", "eq", "ne", "to_bool"):
            types.append(BOOL)
        elif op == "to_float":
            types.append(FLOAT)
        elif op in INPUTS or op == "to_int":
            types.append(INT)
        else:
            types.append(types[code[at + count]])  # that of the last operand
        at += 1 + count
    return nodes, types
