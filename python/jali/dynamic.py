"""Masks that are chosen by scores or listed key by key; both lower to leaves at the call.

`DynamicMask` keeps the best keys of every row by one learned score per key (dynamic mask attention,
as in the Doge language models). By the interval theorem that whole L x L mask is one int32 per key:
a key is visible from its own position until enough better keys have come.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ._convert import IntParam, int_param, int_table, one_int, readable
from ._dynamic_ends import dynamic_ends
from ._library import raise_as_python
from ._mask import AndMask, CallContext, DerivedMask, Mask, mask_class
from ._position_masks import CausalMask
from ._table_masks import (
    BlockCsrMask,
    DocumentMask,
    KeyIntervalMask,
    KeyPaddingMask,
    PackedDocumentMask,
)

_ends = torch.ops.jali.dynamic_ends.default  # loaded by _library
torch.library.register_kernel("jali::dynamic_ends", "cuda", dynamic_ends)


@mask_class
class DynamicMask(DerivedMask):
    """Each row keeps the best of its candidates by score.

    The candidates of the row at position p are the keys j <= p that `within` shows it. Key j is
    visible when it is among the `keep` candidates of highest score (all of them where there are
    fewer), and its score is at least `threshold`. Scores are compared in fp32 (-0 = +0); of equal
    scores the newer key ranks higher; NaN and -inf are never kept. So equal scores are a sliding
    window of `keep` keys, and no row's choice depends on a later key.

    It lowers to `CausalMask(offset) & KeyIntervalMask(None, end, offset) & within` with one int32
    per key, computed in O(Lk), on a GPU by sorts in O(Lk log Lk). `mask & other` filters afterwards
    and does not refill: put documents and padding into `within` if a row is to keep `keep` keys of
    its own document.

    The selection has no gradient. To learn the scores, add them to the logits:
    `attention(q, k, v, DynamicMask(scores, 2048), key_bias=scores)`. The method is dynamic mask
    attention (Doge, flash-dmattn); `dynamic_scores` computes its scores.

    Args:
        scores: [B, H, Lk], any float dtype; B or 1, H is 1, Hkv or Hq, leading dims may be missing.
            Varlen: packed [H, Tk]. They are detached.
        keep: Keys per row, at least 0; None: all above the threshold.
        threshold: Lowest score that is kept, a float or a tensor that broadcasts to scores.
        within: What limits the candidates: documents, `KeyPaddingMask`, or an & of them.
            Other masks raise: a key that once left a row's candidates must not come back.
        causal: False: all rows share one set, the best `keep` keys of each document of `within`,
            or of the whole sequence.
        offset: Position of row 0 for `causal`, an int or an int tensor [B]; None: the call's
            q_offset. Chunks and decoding steps need nothing else: scores cover all keys.

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 2.0, 0.0])
        >>> jali.DynamicMask(scores, keep=2).dense(1, 1, 4, 4)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 0, 1, 0],
                [1, 0, 1, 0]], dtype=torch.int32)
    """

    scores: Tensor
    keep: int | None = None
    _: KW_ONLY
    threshold: float | Tensor | None = None
    within: Mask | None = None
    causal: bool = True
    offset: IntParam = None

    def __post_init__(self) -> None:
        owner = "DynamicMask"
        scores = self.scores if isinstance(self.scores, Tensor) else torch.as_tensor(self.scores)
        if not scores.dtype.is_floating_point:
            raise TypeError(f"{owner}: scores must be floats, got {scores.dtype}; use .float()")
        if not 1 <= scores.dim() <= 3:
            raise ValueError(
                f"{owner}: scores must be [B|1, H, Lk] with H = 1, Hkv or Hq (leading dims may be "
                f"missing), got {scores.dim()} dims"
            )
        object.__setattr__(self, "scores", scores.detach())
        if self.keep is not None:
            object.__setattr__(self, "keep", one_int(self.keep, owner, "keep", least=0))
        if isinstance(self.threshold, Tensor):
            object.__setattr__(self, "threshold", self.threshold.detach())
        elif self.threshold is not None and self.threshold != self.threshold:
            raise ValueError(f"{owner}: threshold is NaN; give a number or None")
        if self.within is not None:
            _limits(self.within, 0, False)
        object.__setattr__(self, "offset", int_param(self.offset, owner, "offset"))
        if not self.causal and self.offset is not None:
            raise ValueError(f"{owner}: offset has no meaning with causal=False; leave it out")

    def lower(self, ctx: CallContext) -> Mask:
        scores = self.scores.to(torch.float32)
        if scores.shape[-1] != ctx.Lk:
            raise ValueError(
                f"DynamicMask: scores have {scores.shape[-1]} keys, the call has {ctx.Lk}; give "
                "one score per key (varlen: packed, one per token of k)"
            )
        if self.threshold is not None:
            # A key below the threshold is one that is never kept: it ranks behind all that are.
            scores = torch.where(scores >= self.threshold, scores, -math.inf)
        documents, keep_keys = (
            ([], [])
            if self.within is None
            else _limits(self.within, ctx.Lk, ctx.cu_seqlens_k is not None)
        )
        keep = -1 if self.keep is None else self.keep
        try:
            end = _ends(scores, documents, keep_keys, ctx.cu_seqlens_k, keep, self.causal)
        except RuntimeError as error:
            raise_as_python(error)
        mask: Mask = KeyIntervalMask(None, end, self.offset if self.causal else 0)
        if self.causal:
            mask = CausalMask(self.offset) & mask
        return mask if self.within is None else mask & self.within


def _limits(within: Mask, num_keys: int, varlen: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The tables of keys of `within`: documents and kept keys."""
    if isinstance(within, AndMask):
        a, b = (_limits(x, num_keys, varlen) for x in (within.a, within.b))
        return a[0] + b[0], a[1] + b[1]
    if isinstance(within, DocumentMask):
        return [within.q_ids if within.k_ids is None else within.k_ids], []
    if isinstance(within, PackedDocumentMask):
        if varlen:
            raise NotImplementedError(
                "DynamicMask: in attention_varlen, within takes documents by ids; make a "
                "DocumentMask of them"
            )
        return [within.ids(num_keys)], []
    if isinstance(within, KeyPaddingMask):
        return [], [within.keep]
    raise TypeError(
        "DynamicMask: within must be a DocumentMask, a KeyPaddingMask or an & of them, got "
        f"{type(within).__name__}; other masks let keys leave a row's candidates: write "
        "DynamicMask(...) & other, which filters afterwards"
    )


@torch.library.register_fake("jali::dynamic_ends")
def _(
    scores: Tensor,
    documents: Sequence[Tensor],
    keep_keys: Sequence[Tensor],
    cu_seqlens_k: Tensor | None,
    keep: int,
    causal: bool,
) -> Tensor:
    heads = scores.shape[-2] if scores.dim() >= 2 else 1
    batch = scores.shape[0] if scores.dim() == 3 else 1
    if cu_seqlens_k is None:
        for table in (*documents, *keep_keys):
            if table.dim() == 2 and table.shape[0] != 1:
                batch = table.shape[0]
    return scores.new_empty((batch, heads, scores.shape[-1]), dtype=torch.int32)


@mask_class
class TokenIndexMask(DerivedMask):
    """Each block of rows lists its keys: j is visible when it is in indices[b, h, i // block].

    Indices may come in any order and more than once. It lowers to block CSR with blocks of
    `block` rows and one key.

    Args:
        indices: int [B, H, ceil(Lq / block), n], keys from 0 to Lk - 1, -1: none. B or 1; H is 1,
            Hkv or Hq; leading dims may be missing.
        block: Rows that share a list.

    Example:
        >>> jali.TokenIndexMask(torch.tensor([[2, 0], [1, -1]])).dense(1, 1, 2, 3)[0, 0].int()
        tensor([[1, 0, 1],
                [0, 1, 0]], dtype=torch.int32)
    """

    indices: Tensor
    block: int = 1

    def __post_init__(self) -> None:
        owner = "TokenIndexMask"
        object.__setattr__(self, "indices", int_table(self.indices, owner, "indices", 4, 2))
        object.__setattr__(self, "block", one_int(self.block, owner, "block", least=1))

    def lower(self, ctx: CallContext) -> Mask:
        if readable(self.indices) and self.indices.numel():
            low, high = (int(x) for x in torch.aminmax(self.indices))
            if low < -1 or (high >= ctx.Lk and ctx.cu_seqlens_k is None):
                raise ValueError(
                    f"TokenIndexMask: indices reach from {low} to {high}; expected keys from 0 to "
                    f"Lk - 1 = {ctx.Lk - 1}, or -1 for none"
                )
        blocks = -(-ctx.Lq // self.block)
        if ctx.cu_seqlens_q is None and self.indices.shape[-2] < blocks:
            raise ValueError(
                f"TokenIndexMask: indices has {self.indices.shape[-2]} lists; expected "
                f"ceil(Lq / block) = {blocks}"
            )
        # Ascending, with -1 in front; then each new key of a list moves to its place, and all
        # else to a place behind the end.
        keys = self.indices.sort(-1).values
        new = keys >= 0
        new[..., 1:] &= keys[..., 1:] != keys[..., :-1]
        end = new.flatten(-2).cumsum(-1, dtype=torch.int32)
        place = torch.where(new.flatten(-2), end - 1, end.shape[-1])
        columns = keys.new_zeros(*end.shape[:-1], end.shape[-1] + 1)
        columns = columns.scatter(-1, place.to(torch.int64), keys.flatten(-2))[..., :-1]
        count = new.sum(-1, dtype=torch.int32)
        row_ptr = F.pad(count.cumsum(-1, dtype=torch.int32), (1, 0))
        return BlockCsrMask(row_ptr, columns, (self.block, 1))


def dynamic_scores(
    v: Tensor,
    dt_proj: Tensor,
    A: Tensor,
    bias: Tensor | None = None,
    *,
    form: str = "exp",
    layout: str = "bhld",
) -> Tensor:
    """The scores of dynamic mask attention: one per key and KV head, from the values.

    x = V_flat @ dt_proj^T + bias, with V_flat [B, L, Hkv * Dv] all KV heads of a token side by
    side, so that every score mixes all of them; then exp(A * softplus(x)) (form "exp": Hugging
    Face's Doge and its checkpoints) or A * softplus(x) (form "log"). Both choose the same keys up
    to rounding, but their logits differ. Differentiable; use the result twice:
    `attention(q, k, v, DynamicMask(scores, keep), key_bias=scores)`.

    Args:
        v: [B, Hkv, L, Dv], or [B, L, Hkv, Dv] with layout "blhd"; without rotary embedding.
        dt_proj: [Hkv, Hkv * Dv].
        A: [Hkv]. At zero all scores of a head are equal: a sliding window.
        bias: [Hkv], added to x.
        form: "exp" or "log".

    Returns:
        [B, Hkv, L]; fp32 for 16-bit inputs (the projection runs in v's dtype).
    """
    if form not in ("exp", "log"):
        raise ValueError(f'dynamic_scores: form must be "exp" or "log", got {form!r}')
    if layout not in ("bhld", "blhd"):
        raise ValueError(f'dynamic_scores: layout must be "bhld" or "blhd", got {layout!r}')
    if v.dim() != 4:
        raise ValueError(f"dynamic_scores: v must have 4 dims ({layout}), got {v.dim()}")
    tokens = v.transpose(1, 2) if layout == "bhld" else v
    heads, width = tokens.shape[2], tokens.shape[3]
    if tuple(dt_proj.shape) != (heads, heads * width):
        raise ValueError(
            f"dynamic_scores: dt_proj must be [Hkv, Hkv * Dv] = [{heads}, {heads * width}], got "
            f"{list(dt_proj.shape)}"
        )
    x = F.linear(tokens.flatten(2), dt_proj, bias)
    wide: Any = torch.float64 if x.dtype == torch.float64 else torch.float32
    delta = A.to(wide) * F.softplus(x.to(wide))
    return (delta.exp() if form == "exp" else delta).transpose(1, 2)
