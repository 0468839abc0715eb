"""The colours of pictures, and which of them shows what share of a field."""

from __future__ import annotations

import torch

from ._canvas import blend

PAPER, INK, FAINT = "#fbf8f1", "#2b2a27", "#8b857a"
EMPTY, FULL, PARTIAL = "#e9e3d5", "#14555f", "#dc9a3a"
SHADES = tuple(blend("#f4dfb2", "#c96f16", n / 13) for n in range(14))
#: 0 empty, 1 full, 2 .. 15 partial by visible share, 16 partial with unknown share.
PALETTE = (EMPTY, FULL, *SHADES, PARTIAL)
CURVES = ("#14555f", "#c96f16", "#7a3b69", "#5b7a2b")


def palette_index(share: torch.Tensor) -> torch.Tensor:
    """The entry of PALETTE for each visible share (NaN: partial, share unknown); int64."""
    shade = 2 + (share.nan_to_num() * len(SHADES)).long().clamp(0, len(SHADES) - 1)
    shade[share <= 0] = 0
    shade[share >= 1] = 1
    shade[share.isnan()] = len(PALETTE) - 1
    return shade
