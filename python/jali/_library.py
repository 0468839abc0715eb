"""Finds and loads libjali_torch.so, and turns its errors into Python's."""

from __future__ import annotations

import atexit
import importlib.util
import os
from pathlib import Path
from typing import NoReturn

import torch

_NAME = "libjali_torch.so"


def _locate() -> Path:
    chosen = os.environ.get("JALI_LIBRARY")
    if chosen:
        path = Path(chosen)
        if not path.is_file():
            raise ImportError(
                f"JALI_LIBRARY names {chosen!r}, which is no file; point it to {_NAME} or unset it"
            )
        return path
    # By the import system and not by __file__: an editable install keeps the library elsewhere.
    spec = importlib.util.find_spec("jali")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _NAME
        if path.is_file():
            return path
    raise ImportError(
        f"the jali package holds no {_NAME}: install it with `pip install .`, or build it with "
        "cmake and set JALI_LIBRARY to the file"
    )


#: The loaded library.
path = _locate()
torch.ops.load_library(str(path))


def _library_folders() -> list[str]:
    """Where NVIDIA's wheels put their libraries."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    roots = (spec.submodule_search_locations or ()) if spec else ()
    return [str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib"))]


# NVRTC, which may be at work in the background, must not meet the end of the process.
atexit.register(torch.ops.jali.wait_for_compilation)
torch.ops.jali.add_library_folders(list("\n".join(_library_folders()).encode()))
# Compiled GPU kernels that came with the package: see docs/hacking.md.
_pack = Path(__file__).parent / "kernels"
if _pack.is_dir():
    torch.ops.jali.add_kernel_packs(list(str(_pack).encode()))

_KINDS: dict[str, type[Exception]] = {
    "TypeError: ": TypeError,
    "NotImplementedError: ": NotImplementedError,
}


def raise_as_python(error: RuntimeError) -> NoReturn:
    """Raises a RuntimeError of the library as the exception that its text names.

    ValueError needs no help; C++ has no standard exception for the others.
    """
    text = str(error)
    for prefix, kind in _KINDS.items():
        if text.startswith(prefix):
            raise kind(text.removeprefix(prefix)) from None
    raise error
