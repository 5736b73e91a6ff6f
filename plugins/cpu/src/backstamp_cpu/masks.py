"""Who sees whom in a group of rows: causal rule or tree, sliding window, left padding.

In: a batch, the spans of some rows and their padded sizes. Out: a bool mask `[R, S, K]`, or None where every token
sees every key. R rows of the group, S query tokens a row, K keys a row, both padded to the longest. The tree is read
here, in `forward`, because a tree kernel may fill its buffer after `plan`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from backstamp.attention import TreeMask
from backstamp_cpu.gather import host_ints
from backstamp_cpu.rows import Span, StepRows

__all__ = ["distances", "sees_all", "tree_bits", "visible"]


def sees_all(rows: StepRows, spans: Sequence[Span], window_left: int, num_keys: int) -> bool:
    """Whether no mask is needed: no padding, and every token sees every key of its row's span."""
    if rows.tree or any(span.stop - span.start != num_keys for span in spans):
        return False
    # a single token sees its whole span: spans are cut to the window and to `kv_starts`
    return all(rows.q_len(s.row) == 1 or (not rows.causal[s.row] and window_left < 0) for s in spans)


def visible(
    rows: StepRows,
    spans: Sequence[Span],
    window_left: int,
    tree: TreeMask | None,
    num_queries: int,
    num_keys: int,
    device: torch.device,
) -> Tensor:
    """Bool `[R, S, K]`: whether token i of row r sees the key at position `spans[r].start + k`."""
    kv_len, q_len = _lens(rows, spans, device)
    keys, positions = _positions(rows, spans, num_queries, num_keys, device)
    prefix = (kv_len - q_len)[:, None, None]
    if tree is None:
        causal = torch.tensor([rows.causal[s.row] for s in spans]).to(device)[:, None, None]
        seen = (keys <= positions) | ~causal
        key_positions = keys
    else:
        bits = tree_bits(tree, rows, spans, num_queries, device)
        in_step = keys >= prefix
        column = (keys - prefix).clamp(0, num_queries - 1).expand(-1, num_queries, -1)
        seen = torch.gather(bits, 2, column) | ~in_step
        # a token stands after the prefix and the tree tokens it sees, itself among them
        positions = prefix + bits.sum(2, keepdim=True) - 1
        logical = torch.gather(positions, 1, column[:, :1, :].transpose(1, 2)).transpose(1, 2)
        key_positions = torch.where(in_step, logical, keys)
    if window_left >= 0:
        seen = seen & (positions - key_positions <= window_left)
    is_query = torch.arange(num_queries, device=device)[None, :, None] < q_len[:, None, None]
    return seen & is_query & (keys < kv_len[:, None, None])


def tree_bits(tree: TreeMask, rows: StepRows, spans: Sequence[Span], num_queries: int, device: torch.device) -> Tensor:
    """Bool `[R, S, S]`: which of its step's tokens each token sees; False in padding."""
    kv_len, q_len = _lens(rows, spans, device)
    row = host_ints([span.row for span in spans], device)
    step = torch.arange(num_queries, device=device)
    is_query = step[None, :] < q_len[:, None]
    inside = is_query[:, :, None] & is_query[:, None, :]
    if tree.kind == "qlen":
        return tree.buffer[row, :num_queries, :num_queries] & inside
    assert tree.indptr is not None, "check_batch refuses a full or packed tree without indptr"
    kv_len, prefix = kv_len[:, None, None], (kv_len - q_len)[:, None, None]
    # padding reads element 0 of its row, which exists, and is masked
    element = (step[None, :, None] * kv_len + prefix + step[None, None, :]) * inside
    first = tree.indptr[row].long()[:, None, None]
    if tree.kind == "full":
        return tree.buffer[first + element] & inside
    return ((tree.buffer[first + element // 8] >> (element % 8)) & 1).bool() & inside


def distances(rows: StepRows, spans: Sequence[Span], num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """i64 `[R, S, K]`: key position less query position, as ALiBi counts them."""
    keys, positions = _positions(rows, spans, num_queries, num_keys, device)
    return keys - positions


def _lens(rows: StepRows, spans: Sequence[Span], device: torch.device) -> tuple[Tensor, Tensor]:
    kv_len = host_ints([rows.kv_lens[span.row] for span in spans], device)
    return kv_len, host_ints([rows.q_len(span.row) for span in spans], device)


def _positions(
    rows: StepRows, spans: Sequence[Span], num_queries: int, num_keys: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions of keys `[R, 1, K]` and of queries `[R, S, 1]`."""
    kv_len, q_len = _lens(rows, spans, device)
    start = host_ints([span.start for span in spans], device)
    keys = start[:, None, None] + torch.arange(num_keys, device=device)[None, None, :]
    queries = (kv_len - q_len)[:, None, None] + torch.arange(num_queries, device=device)[None, :, None]
    return keys, queries
