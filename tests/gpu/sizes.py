"""Forwards of head dims up to 64 have small tiles for short sequences and windows, and large ones
for others. Tests have short sequences, and ask for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def sizes(D: int) -> tuple[str, ...]:
    """Of the tiles of a forward."""
    return ("small", "large") if D <= 64 else ("",)


@contextmanager
def tiles(size: str) -> Iterator[None]:
    """Forwards have tiles of this size; "": as they choose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JALI_FORCE", size)
        yield
