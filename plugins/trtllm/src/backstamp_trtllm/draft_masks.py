"""Draft masks as XQA reads them: for each query token, one bit for every token of its own row's step.

In: a step with its tokens, and the batch's tree if it has one. Out: `[T, W]` i32 words, bit j of a row's words set
where the token sees token j of its row; tokens before the step are visible whatever the mask says. Device work only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstamp.attention import Batch, TreeMask
from backstamp_trtllm.steps import WORD_BITS, Step, TokenRows

__all__ = ["fill_tree"]


def fill_tree(mask: Tensor, step: Step, drafts: int) -> None:
    """Give every token the bits of the batch's tree."""
    tree, tokens = step.batch.tree, step.tokens
    assert tree is not None, "planned with a tree"
    assert tokens is not None, "planned with every token"
    columns = torch.arange(drafts, device=mask.device)
    if tree.kind == "qlen":
        size = tree.buffer.shape[1]
        rows = tree.buffer[tokens.rows, tokens.offsets.clamp(max=size - 1)].bool()
        seen = rows.new_zeros(rows.shape[0], drafts)
        width = min(size, drafts)
        seen[:, :width] = rows[:, :width]
    else:
        seen = _flat_bits(tree, step.batch, tokens, columns)
    mask.copy_(_pack(seen))


def _flat_bits(tree: TreeMask, batch: Batch, tokens: TokenRows, columns: Tensor) -> Tensor:
    """`[T, drafts]` bool out of a mask that holds `[q_len, kv_len]` a row, as bytes or as bits."""
    assert tree.indptr is not None, "check_batch found its starts"
    indptr, kv_lens = batch.qo_indptr, batch.kv_lens
    q_lens = (indptr[tokens.rows + 1] - indptr[tokens.rows]).long()
    lengths = kv_lens[tokens.rows].long()
    first = tokens.offsets.long() * lengths + lengths - q_lens
    at = first[:, None] + columns[None, :]
    starts = tree.indptr[tokens.rows].long()[:, None]
    inside = (columns[None, :] < q_lens[:, None]) & (tokens.visible[:, None] > 0)
    buffer = tree.buffer.view(torch.uint8)
    last = buffer.numel() - 1
    if tree.kind == "full":
        return (buffer[(starts + at).clamp(0, last)] != 0) & inside
    bits = buffer[(starts + at // 8).clamp(0, last)].int() >> (at % 8).int()
    return ((bits & 1) != 0) & inside


def _pack(seen: Tensor) -> Tensor:
    """Bool `[N, drafts]` as `[N, W]` i32 words, little-endian."""
    count, drafts = seen.shape
    width = -(-drafts // WORD_BITS) * WORD_BITS
    padded = torch.zeros(count, width, dtype=torch.uint8, device=seen.device)
    padded[:, :drafts] = seen
    shifts = torch.arange(8, dtype=torch.uint8, device=seen.device)
    return (padded.view(count, -1, 8) << shifts).sum(2, dtype=torch.uint8).view(torch.int32)
