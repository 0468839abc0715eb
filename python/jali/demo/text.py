"""Real text as bytes: Jali's own documentation and sources, and Python's standard library.

A document is a piece of a file that ends at a top-level definition or heading. Documents are packed
one behind the other into sequences of a fixed length; `ids` says which document a byte belongs to,
so that a mask can keep them apart.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_BREAK = re.compile(rb"\n(?=(?:def|class|async def|@|#+) ?\w)")  # a new piece may start behind it


@dataclass(frozen=True)
class Packed:
    """Documents packed into sequences.

    Attributes:
        tokens: int64 [N, L], the bytes.
        ids: int32 [N, L], document of each byte, counted over all sequences.
        places: int32 [N, L], place of each byte within its document (its part in this sequence).
        targets: int64 [N, L], the following byte of the same document; -1 at a document's end.
    """

    tokens: Tensor
    ids: Tensor
    places: Tensor
    targets: Tensor


def files() -> list[Path]:
    """The package's own text and the standard library's modules, in a fixed order."""
    package = Path(__file__).resolve().parents[1]
    own = sorted(package.rglob("*.py"))
    checkout = package.parents[1]
    if (checkout / "python" / "jali").is_dir():  # installed packages come without docs/
        own += sorted([*checkout.glob("*.md"), *checkout.glob("docs/*.md")])
    library = Path(sysconfig.get_paths()["stdlib"])
    folders = ("asyncio", "email", "http", "json", "logging", "unittest", "importlib")
    modules = [p for f in folders for p in (library / f).glob("*.py")]
    return own + sorted([*library.glob("*.py"), *modules])


def documents(longest: int = 1536, shortest: int = 200, seed: int = 0) -> list[bytes]:
    """Pieces of all files, at most `longest` bytes each, shuffled by `seed`."""
    pieces = []
    for path in files():
        rest = path.read_bytes()
        while len(rest) > longest:
            ends = [m.start() + 1 for m in _BREAK.finditer(rest, shortest, longest)]
            at = ends[-1] if ends else max(rest.rfind(b"\n", 0, longest) + 1, longest // 2)
            pieces.append(rest[:at])
            rest = rest[at:]
        pieces.append(rest)
    pieces = [p for p in pieces if len(p) >= shortest]
    random.Random(seed).shuffle(pieces)
    return pieces


def pack(docs: list[bytes], length: int, num: int | None = None) -> Packed:
    """Packs documents into `num` sequences (None: all that can be filled) of `length` bytes.

    Raises:
        ValueError: the documents do not fill that many sequences.
    """
    size = sum(map(len, docs))
    num = size // length if num is None else num
    if num < 1 or num * length > size:
        raise ValueError(f"{size} bytes of text do not fill {num} sequences of {length}")
    tokens = torch.frombuffer(bytearray(b"".join(docs)), dtype=torch.uint8).long()
    lengths = torch.tensor([len(d) for d in docs])
    ids = torch.arange(len(docs)).repeat_interleave(lengths)
    following = torch.cat([tokens[1:], tokens[:1]])
    last = torch.cat([ids[1:] != ids[:-1], torch.ones(1, dtype=torch.bool)])
    following[last] = -1
    tokens, ids, following = (x[: num * length].view(num, length) for x in (tokens, ids, following))
    new = torch.ones(num, length, dtype=torch.bool)
    new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    here = torch.arange(length).expand(num, length)
    places = here - torch.where(new, here, 0).cummax(1).values
    return Packed(tokens, ids.int(), places.int(), following)


def surprise(tokens: Tensor) -> Tensor:
    """Bits of information of each byte given the byte before it, float32, shape of `tokens`.

    Counted over the tokens themselves: rare pairs are what a reader would mark.
    """
    before = torch.cat([tokens[..., :1], tokens[..., :-1]], -1)
    pairs = torch.zeros(256, 256)
    pairs.index_put_((before.flatten(), tokens.flatten()), torch.ones(()), accumulate=True)
    probability = (pairs + 0.1) / (pairs + 0.1).sum(1, keepdim=True)
    return -probability[before, tokens].log2()
