"""Jali: attention through the openings of a mask.

    out = jali.attention(q, k, v, jali.CausalMask() & jali.WindowMask.last(256))

`jali.attention` is differentiable and compiles; `jali.masks` has all masks; `jali.reference` is the
specification in dense PyTorch.
"""

from . import masks, reference
from ._call import Plan
from ._prebuild import BuiltKernel, prebuild
from .attention import attention, attention_varlen, merge_lse, plan
from .explain import Explanation, explain
from .masks import *  # noqa: F403
from .masks import __all__ as _masks

__version__ = "0.1.0"
__all__ = [
    "BuiltKernel",
    "Explanation",
    "Plan",
    "attention",
    "attention_varlen",
    "explain",
    "masks",
    "merge_lse",
    "plan",
    "prebuild",
    "reference",
    *_masks,
]
