"""Block-sparse masks chosen from block summaries: one score per block of cells, never per cell.

Each block of rows and each block of keys is summarised by its mean vector; the softmax over the
allowed blocks of the means' scaled products estimates how much attention a block receives. This is
the common core of published methods, which differ in what they choose by it: a number of blocks
(MInference's block-sparse heads, arXiv 2407.02490) or the fewest blocks that hold a share of the
attention (FlexPrefill, 2502.20766; SpargeAttn, 2502.18137; XAttention, 2503.16428, with other
summaries). Their further rules (self-similarity, vertical and slash lines, antidiagonals) are not
part of it; `&` and `|` with other masks add such.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_OWNER = "BlockSparseMask.from_scores"


def select_blocks(
    q: Tensor,
    k: Tensor,
    block: tuple[int, int],
    *,
    top_k: int | None,
    top_p: float | None,
    threshold: float | None,
    causal: bool,
    offset: int | None,
    scale: float | None,
) -> Tensor:
    """The blocks of `BlockSparseMask.from_scores`: bool [B, Hq, rows, columns]."""
    _check(q, k, top_k, top_p, threshold)
    with torch.no_grad():
        mean_q, mean_k = _block_means(q, block[0]), _block_means(k, block[1])
        mean_k = mean_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = mean_q @ mean_k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        num_rows, num_columns = logits.shape[-2:]

        if causal:
            first = torch.arange(num_rows, device=q.device) * block[0]
            last = (first + block[0]).clamp(max=q.shape[2]) - 1
            shift = k.shape[2] - q.shape[2] if offset is None else offset
            key = torch.arange(num_columns, device=q.device) * block[1]
            allowed = key <= (last + shift)[:, None]
            diagonal = allowed & (key + block[1] > (first + shift)[:, None])
        else:
            allowed = torch.ones(num_rows, num_columns, dtype=torch.bool, device=q.device)
            diagonal = torch.zeros_like(allowed)

        logits = logits.masked_fill(~allowed, -math.inf)
        share = logits.softmax(-1).masked_fill(~allowed, 0)  # rows without a block: 0, not NaN
        # The diagonal comes first, so that it counts towards top_k and top_p.
        order = torch.where(diagonal, math.inf, logits).argsort(
            dim=-1, descending=True, stable=True
        )
        if top_k is not None:
            chosen = torch.arange(num_columns, device=q.device) < top_k
            chosen = chosen.expand(order.shape)
        elif top_p is not None:
            ordered = share.gather(-1, order)
            chosen = ordered.cumsum(-1) - ordered < top_p
        else:
            chosen = share.gather(-1, order) >= threshold
        # Slice, not index: with no keys there is no first column.
        chosen = torch.cat([torch.ones_like(chosen[..., :1]), chosen[..., 1:]], -1)
        blocks = torch.zeros_like(chosen).scatter(-1, order, chosen)
        return (blocks | diagonal) & allowed


def _block_means(x: Tensor, size: int) -> Tensor:
    """[B, H, L, D] -> fp32 [B, H, ceil(L / size), D]; the last block may be short."""
    length = x.shape[2]
    count = -(-length // size)
    sums = F.pad(x, (0, 0, 0, count * size - length)).unflatten(2, (count, size))
    lengths = (length - torch.arange(count, device=x.device) * size).clamp(max=size)
    return sums.sum(3, dtype=torch.float32) / lengths[:, None]


def _check(
    q: Tensor, k: Tensor, top_k: int | None, top_p: float | None, threshold: float | None
) -> None:
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(
            f"{_OWNER}: q and k must be [B, Hq, Lq, D] and [B, Hkv, Lk, D], got {list(q.shape)} "
            f"and {list(k.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{_OWNER}: q {list(q.shape)} and k {list(k.shape)} must agree in B and D, and k's "
            "heads must divide q's"
        )
    if (top_k is not None) + (top_p is not None) + (threshold is not None) != 1:
        raise ValueError(f"{_OWNER}: give exactly one of top_k, top_p and threshold")
    if top_k is not None and top_k < 1:
        raise ValueError(f"{_OWNER}: top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 <= top_p <= 1:
        raise ValueError(f"{_OWNER}: top_p must be within 0 and 1, got {top_p}")
