"""Jali: attention through the openings of a mask."""

from . import masks
from .masks import *  # noqa: F403
from .masks import __all__ as _masks

__version__ = "0.1.0"
__all__ = ["masks", *_masks]
