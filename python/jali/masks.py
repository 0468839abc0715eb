"""All masks: which (row, key) cells attention may use.

In every formula i is a query row, p = i + q_offset its position (q_offset is by default Lk - Lq, so
the last row stands at the last key), j a key, b a sequence and h a query head. Bounds
0 <= i < Lq and 0 <= j < Lk always apply.
"""

from ._mask import AndMask, CallContext, DerivedMask, LeafMask, Mask, NotMask, OrMask, mask_class
from ._position_masks import CausalMask, DilatedMask, NeighborhoodMask, PrefixMask, WindowMask
from ._table_masks import (
    BlockCsrMask,
    BlockSparseMask,
    DenseMask,
    DocumentMask,
    KeyIntervalMask,
    KeyPaddingMask,
    PackedDocumentMask,
    RowIntervalMask,
)
from .dynamic import DynamicMask, TokenIndexMask, dynamic_scores
from .predicate import PredicateMask
from .tiles import TileMap

__all__ = [
    "AndMask",
    "BlockCsrMask",
    "BlockSparseMask",
    "CallContext",
    "CausalMask",
    "DenseMask",
    "DerivedMask",
    "DilatedMask",
    "DocumentMask",
    "DynamicMask",
    "KeyIntervalMask",
    "KeyPaddingMask",
    "LeafMask",
    "Mask",
    "NeighborhoodMask",
    "NotMask",
    "OrMask",
    "PackedDocumentMask",
    "PredicateMask",
    "PrefixMask",
    "RowIntervalMask",
    "TileMap",
    "TokenIndexMask",
    "WindowMask",
    "dynamic_scores",
    "mask_class",
]
