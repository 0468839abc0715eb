"""Masks made of tables: per token, per block or per cell.

In every table the batch and head dims may be missing or 1 (they broadcast, aligned right as in
torch), and a head dim counts 1, Hkv or Hq. In varlen calls a table per token may be packed
([Tq] or [Tk], all sequences behind each other) or padded ([B, longest]).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ._convert import IntParam, bool_table, int_param, int_table, one_int
from ._mask import LeafMask, Mask, leaf_kind, mask_class
from ._position_masks import CausalMask


@mask_class
class KeyPaddingMask(LeafMask):
    """Every row sees the keys that are kept: keep[b, j].

    Args:
        keep: bool [B, Lk] (integers count as != 0), True: visible.

    Example:
        >>> jali.KeyPaddingMask(torch.tensor([[True, True, False]])).dense(1, 1, 1, 3)[0, 0].int()
        tensor([[1, 1, 0]], dtype=torch.int32)
    """

    keep: Tensor
    _kind: ClassVar[int] = leaf_kind("key_padding")

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep", bool_table(self.keep, "KeyPaddingMask", "keep", 2))

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.keep,)


@mask_class
class DocumentMask(LeafMask):
    """A row sees the keys of its own document: q_ids[b, i] == k_ids[b, j] >= 0.

    With one table, the row at position p = i + q_offset reads q_ids[b, p]; outside the table it
    sees nothing. A negative id belongs to no document.

    Args:
        q_ids: int32 [B, Lq], the document of each row; alone [B, Lk], that of each token.
        k_ids: int32 [B, Lk], the document of each key.

    Example:
        >>> jali.DocumentMask(torch.tensor([0, 0, 1])).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """

    q_ids: Tensor
    k_ids: Tensor | None = None
    _kind: ClassVar[int] = leaf_kind("document")

    def __post_init__(self) -> None:
        owner = "DocumentMask"
        object.__setattr__(self, "q_ids", int_table(self.q_ids, owner, "q_ids", 2))
        if self.k_ids is not None:
            object.__setattr__(self, "k_ids", int_table(self.k_ids, owner, "k_ids", 2))

    @staticmethod
    def from_cu_seqlens(cu_seqlens: Tensor) -> PackedDocumentMask:
        """Documents packed behind each other, which are faster than ids."""
        return PackedDocumentMask(cu_seqlens)

    @staticmethod
    def from_lengths(lengths: Any) -> PackedDocumentMask:
        """Documents packed behind each other.

        Args:
            lengths: int [B, N] or [N], tokens of each document (a tensor or a list).
        """
        sizes = int_table(lengths, "DocumentMask.from_lengths", "lengths", 2)
        ends = torch.cumsum(sizes, -1, dtype=torch.int32)
        return PackedDocumentMask(torch.cat([torch.zeros_like(ends[..., :1]), ends], -1))

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.q_ids, self.k_ids)


@mask_class
class PackedDocumentMask(LeafMask):
    """Documents lie behind each other, and a row sees the keys of its own.

    Document n is the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1; the row at position p = i +
    q_offset is in the document of token p. Tokens behind the last document belong to none.

    GPU kernels begin new tiles with every document, as for packed sequences, instead of looking
    cells up. They do for a mask of this one alone or & CausalMask, WindowMask, with as many rows as
    keys, documents of 256 tokens or more on average (64, where no gradient is wanted), and without
    a bias over rows and keys and dropout; else it is a mask like others.

    Args:
        cu_seqlens: int32 [B, N + 1] or [N + 1], from 0, not decreasing: the first token of each
            document and the end of the last.

    Example:
        >>> jali.PackedDocumentMask(torch.tensor([0, 2, 3])).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 1, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """

    cu_seqlens: Tensor
    _kind: ClassVar[int] = leaf_kind("packed_document")

    def __post_init__(self) -> None:
        bounds = int_table(self.cu_seqlens, "PackedDocumentMask", "cu_seqlens", 2)
        object.__setattr__(self, "cu_seqlens", bounds)

    def ids(self, length: int) -> Tensor:
        """int32 [B, length] or [1, length]: the document of each token, -1 for those of none."""
        bounds = torch.atleast_2d(self.cu_seqlens)
        tokens = torch.arange(length, dtype=torch.int32, device=bounds.device)
        tokens = tokens.expand(bounds.shape[0], length).contiguous()
        ids = torch.searchsorted(bounds, tokens, right=True, out_int32=True) - 1
        return torch.where(tokens < bounds[:, -1:], ids, -1)

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.cu_seqlens,)


@mask_class
class KeyIntervalMask(LeafMask):
    """Each key is seen by one interval of rows: start[b, h, j] <= i + offset < end[b, h, j].

    Args:
        start: int32 [B, H, Lk]; None: no lower bound.
        end: int32 [B, H, Lk]; None: no upper bound.
        offset: Position of row 0, an int or an int tensor [B]. None: the call's q_offset.

    Example:
        >>> jali.KeyIntervalMask(None, torch.tensor([1, 3, 2])).dense(1, 1, 3, 3)[0, 0].int()
        tensor([[1, 1, 1],
                [0, 1, 1],
                [0, 1, 0]], dtype=torch.int32)
    """

    start: Tensor | None
    end: Tensor | None
    offset: IntParam = 0
    _kind: ClassVar[int] = leaf_kind("key_interval")

    def __post_init__(self) -> None:
        _convert_bounds(self)
        object.__setattr__(self, "offset", int_param(self.offset, "KeyIntervalMask", "offset"))

    @staticmethod
    def from_flashmask(startend_row_indices: Tensor, causal: bool = True) -> Mask:
        """FlashMask's column description: per key up to two intervals of rows that do NOT see it.

        Args:
            startend_row_indices: int [B, H|1, Lk, n]. Rows hidden from a key, with causal=True:
                n = 1: [start, end of the sequence); n = 2: [start, end). With causal=False:
                n = 2: [0, upper end) and [lower start, end of the sequence), given as (lower
                start, upper end); n = 4: [lower start, lower end) and [upper start, upper end).
            causal: Whether rows i < j do not see key j either.

        Returns:
            An expression of `KeyIntervalMask` and `CausalMask(0)`.
        """
        owner = "KeyIntervalMask.from_flashmask"
        table = int_table(startend_row_indices, owner, "startend_row_indices", 4, 4)
        bounds = table.unbind(-1)
        count = len(bounds)
        if count not in ((1, 2) if causal else (2, 4)):
            raise ValueError(
                f"{owner}: the last dim of startend_row_indices must be "
                f"{'1 or 2' if causal else '2 or 4'} with causal={causal}, got {count}"
            )
        if count == 1:
            return CausalMask(0) & KeyIntervalMask(None, bounds[0])
        if causal:
            return CausalMask(0) & KeyIntervalMask(bounds[0], bounds[1]).complement()
        if count == 2:
            return KeyIntervalMask(bounds[1], bounds[0])
        lower, upper = KeyIntervalMask(bounds[0], bounds[1]), KeyIntervalMask(bounds[2], bounds[3])
        return lower.complement() & upper.complement()

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.start, self.end, self.offset)


@mask_class
class RowIntervalMask(LeafMask):
    """Each row sees one interval of keys: start[b, h, i] <= j < end[b, h, i].

    Args:
        start: int32 [B, H, Lq]; None: no lower bound.
        end: int32 [B, H, Lq]; None: no upper bound.

    Example:
        >>> jali.RowIntervalMask(torch.tensor([0, 1]), None).dense(1, 1, 2, 3)[0, 0].int()
        tensor([[1, 1, 1],
                [0, 1, 1]], dtype=torch.int32)
    """

    start: Tensor | None
    end: Tensor | None
    _kind: ClassVar[int] = leaf_kind("row_interval")

    def __post_init__(self) -> None:
        _convert_bounds(self)

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.start, self.end)


@mask_class
class BlockSparseMask(LeafMask):
    """Blocks of rows see blocks of keys: blocks[b, h, i // bm, j // bn].

    Args:
        blocks: bool [B, H, ceil(Lq / bm), ceil(Lk / bn)].
        block: (bm, bn), the rows and keys of a block; any size.

    Example:
        >>> jali.BlockSparseMask(torch.eye(2).bool(), (1, 2)).dense(1, 1, 2, 4)[0, 0].int()
        tensor([[1, 1, 0, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """

    blocks: Tensor
    block: tuple[int, int] = (128, 128)
    _kind: ClassVar[int] = leaf_kind("block_bitset")

    def __post_init__(self) -> None:
        owner = "BlockSparseMask"
        object.__setattr__(self, "blocks", bool_table(self.blocks, owner, "blocks", 4, 2))
        object.__setattr__(self, "block", block_size(self.block, owner))

    @staticmethod
    def from_csr(
        row_ptr: Tensor, col_idx: Tensor, block: tuple[int, int] = (128, 128)
    ) -> BlockCsrMask:
        """The same mask from sorted block columns per block row.

        Args:
            row_ptr: int [B, H, rows + 1], where each block row's columns begin in col_idx.
            col_idx: int [B, H, nnz], block columns, ascending within a block row.
            block: (bm, bn), the rows and keys of a block.
        """
        return BlockCsrMask(row_ptr, col_idx, block)

    @staticmethod
    def from_scores(
        q: Tensor,
        k: Tensor,
        block: tuple[int, int] = (128, 128),
        *,
        top_k: int | None = None,
        top_p: float | None = None,
        threshold: float | None = None,
        causal: bool = False,
        offset: int | None = None,
        scale: float | None = None,
    ) -> BlockSparseMask:
        """Chooses blocks by an estimate of the attention that they receive.

        Each block is summarised by its mean query or key, in fp32; a block's share is the softmax
        of scale * mean_q . mean_k over the allowed blocks of its block row. This is the common
        core of published training-free methods (MInference, FlexPrefill, SpargeAttn); nothing of
        size Lq x Lk is made. Every block row keeps at least its best allowed block. The choice has
        no gradient. Give exactly one of top_k, top_p and threshold.

        Args:
            q: [B, Hq, Lq, D].
            k: [B, Hkv, Lk, D], Hkv divides Hq.
            block: (bm, bn), the rows and keys of a block; the last ones may be short.
            top_k: Number of blocks per block row.
            top_p: Keep the fewest best blocks whose shares reach this sum, 0 to 1.
            threshold: Keep the blocks whose share is at least this.
            causal: Only blocks that hold a key at or before one of their rows are allowed, and
                those that the diagonal passes are always kept (they come first in top_k and
                top_p). Combine the mask with `CausalMask()`: whole blocks are chosen. A block of
                rows shares its choice, so a row's keys depend on later rows of its block: meant
                for prefill, not for training a causal model.
            offset: Position of row 0 for `causal`; None: Lk - Lq.
            scale: None: 1 / sqrt(D).

        Returns:
            A `BlockSparseMask` with blocks [B, Hq, ceil(Lq / bm), ceil(Lk / bn)].
        """
        from ._block_select import select_blocks

        size = block_size(block, "BlockSparseMask.from_scores")
        blocks = select_blocks(
            q,
            k,
            size,
            top_k=top_k,
            top_p=top_p,
            threshold=threshold,
            causal=causal,
            offset=offset,
            scale=scale,
        )
        return BlockSparseMask(blocks, size)

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.blocks, self.block[0], self.block[1])


@mask_class
class BlockCsrMask(LeafMask):
    """A block-sparse mask as sorted block columns per block row: `BlockSparseMask.from_csr`.

    Args:
        row_ptr: int32 [B, H, rows + 1], where each block row's columns begin in col_idx.
        col_idx: int32 [B, H, nnz], block columns, ascending within a block row.
        block: (bm, bn), the rows and keys of a block.
    """

    row_ptr: Tensor
    col_idx: Tensor
    block: tuple[int, int] = (128, 128)
    _kind: ClassVar[int] = leaf_kind("block_csr")

    def __post_init__(self) -> None:
        owner = "BlockSparseMask.from_csr"
        object.__setattr__(self, "row_ptr", int_table(self.row_ptr, owner, "row_ptr", 3))
        object.__setattr__(self, "col_idx", int_table(self.col_idx, owner, "col_idx", 3))
        object.__setattr__(self, "block", block_size(self.block, owner))

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.row_ptr, self.col_idx, self.block[0], self.block[1])


@mask_class
class DenseMask(LeafMask):
    """Any mask, one bool per cell: tensor[b, h, i, j].

    Args:
        tensor: bool [B, H, Lq, Lk]; each dim may be 1 (it broadcasts) and leading ones missing.

    Example:
        >>> jali.DenseMask(torch.tensor([[True, False]])).dense(1, 1, 2, 2)[0, 0].int()
        tensor([[1, 0],
                [1, 0]], dtype=torch.int32)
    """

    tensor: Tensor
    _kind: ClassVar[int] = leaf_kind("dense")

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor", bool_table(self.tensor, "DenseMask", "tensor", 4))

    def _fields(self) -> tuple[int | Tensor | None, ...]:
        return (self.tensor,)


def _convert_bounds(mask: KeyIntervalMask | RowIntervalMask) -> None:
    owner = type(mask).__name__
    if mask.start is None and mask.end is None:
        raise ValueError(f"{owner}: start and end are both None; give at least one of them")
    if mask.start is not None:
        object.__setattr__(mask, "start", int_table(mask.start, owner, "start", 3))
    if mask.end is not None:
        object.__setattr__(mask, "end", int_table(mask.end, owner, "end", 3))


def block_size(block: Any, owner: str) -> tuple[int, int]:
    """A checked (rows, keys)."""
    if isinstance(block, (tuple, list)) and len(block) == 2:
        rows, keys = block
    else:
        rows = keys = block
    return one_int(rows, owner, "block", least=1), one_int(keys, owner, "block", least=1)
