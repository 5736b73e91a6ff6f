"""The verify tree as the library's packed custom mask, written on the device.

In: a `TreeMask` and the row lengths the library was planned with. Out: one bit a query and key, row-major within a row
of the batch, little-endian, each row from a byte offset of its own. Reads the tree's buffer when called, so a graph
can record it; no sync, and what the prefix columns of `full` and `packed` hold is ignored, as the contract says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import TreeMask

__all__ = ["MaskBuffers", "make_mask_buffers", "write_mask"]

_WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskBuffers:
    """What a wrapper reads of a mask, at fixed addresses, and the lengths the bits are laid out by.

    `words [B * words_per_row]` i32, seen by the library as bytes; `indptr [B+1]` i32 byte offsets; `qo_indptr [B+1]`
    and `kv_lens [B]` i32. `max_q_len` is the most tokens a row may own.
    """

    words: Tensor
    indptr: Tensor
    qo_indptr: Tensor
    kv_lens: Tensor
    max_q_len: int

    @property
    def bytes(self) -> Tensor:
        """The mask as the library takes it: uint8."""
        return self.words.view(torch.uint8)


def make_mask_buffers(rows: int, max_q_len: int, max_kv_len: int, device: torch.device) -> MaskBuffers:
    """Room for a mask of every row at its longest."""
    row_words = -(-max_q_len * max_kv_len // _WORD_BITS)
    starts = torch.arange(rows + 1, dtype=torch.int64, device=device) * (row_words * 4)
    return MaskBuffers(
        words=torch.empty(max(1, rows * row_words), dtype=torch.int32, device=device),
        indptr=starts.to(torch.int32),
        qo_indptr=torch.zeros(rows + 1, dtype=torch.int32, device=device),
        kv_lens=torch.zeros(rows, dtype=torch.int32, device=device),
        max_q_len=max_q_len,
    )


def write_mask(buffers: MaskBuffers, tree: TreeMask, window_left: int) -> None:
    """Set every bit, then clear those of keys a token does not see.

    With a window the kernel itself hides keys further back than `kernel_window(window_left, max_q_len)`; here only the
    keys between that and the token's logical position are cleared.
    """
    buffers.words.fill_(-1)
    size, device = buffers.max_q_len, buffers.words.device
    kv_len = buffers.kv_lens.long()[:, None, None]
    q_len = (buffers.qo_indptr[1:] - buffers.qo_indptr[:-1]).long()[:, None, None]
    prefix = kv_len - q_len
    token = torch.arange(size, device=device)
    query, key = token[None, :, None], token[None, None, :]
    inside = (query < q_len) & (key < q_len) & (kv_len > 0)
    sees = _tree_bits(tree, inside, query * kv_len + prefix + key)
    hidden = inside & ~sees
    position = prefix + sees.sum(2, keepdim=True) - 1
    if window_left >= 0:
        hidden = hidden | (inside & (position - position.transpose(1, 2) > window_left))
        back = torch.arange(2 * size, device=device)[None, None, :] + prefix + query - window_left - size
        outside = (query < q_len) & (back >= 0) & (back < prefix) & (position - back > window_left)
        _clear(buffers, query * kv_len + back, outside)
    _clear(buffers, query * kv_len + prefix + key, hidden)


def _clear(buffers: MaskBuffers, element: Tensor, hidden: Tensor) -> None:
    """Clear the bits of hidden elements: each is set and named once, so taking them away borrows nothing."""
    element = element * hidden
    first = (buffers.indptr[:-1].long() // 4)[:, None, None]
    bit = torch.ones((), dtype=torch.int64, device=element.device) << (element % _WORD_BITS)
    word = first + element // _WORD_BITS
    # bit 31 is the sign: its value wraps, and so does the sum
    value = torch.where(bit >= 1 << 31, bit - (1 << 32), bit) * hidden
    buffers.words.index_add_(0, word.flatten(), value.flatten().to(torch.int32), alpha=-1)


def _tree_bits(tree: TreeMask, inside: Tensor, element: Tensor) -> Tensor:
    """Bool `[B, S, S]`: which of its step's tokens each token sees; False outside a row."""
    rows, size = inside.shape[0], inside.shape[1]
    if tree.kind == "qlen":
        return tree.buffer[:rows, :size, :size].bool() & inside
    assert tree.indptr is not None, "check_batch refuses a full or packed tree without indptr"
    element = element * inside
    first = tree.indptr[:rows].long()[:, None, None]
    if tree.kind == "full":
        return tree.buffer[first + element].bool() & inside
    packed = tree.buffer.view(torch.uint8)
    return ((packed[first + element // 8] >> (element % 8)) & 1).bool() & inside
