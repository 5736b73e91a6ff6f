"""The rows of one forward: which of a padded batch's tokens and keys are real, as host numbers.

In: Transformers' batch of equal lengths with a 2-D mask. Out: `Rows`, each cut to its own tokens, so that no kernel
meets padding. A mask that is no single run of real tokens a row is refused.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backstamp_transformers.errors import NotServed

__all__ = ["Rows", "read_rows"]


class Rows(NamedTuple):
    """One forward's rows.

    Attributes:
        q_lens, kv_lens: real tokens of each row; `kv_lens` counts this forward's too.
        kv_first: first real key of each row, by its place among the keys the cache hands over.
        tokens: i64 places of the real tokens in the flattened batch; None where every token is real.
    """

    q_lens: list[int]
    kv_lens: list[int]
    kv_first: list[int]
    tokens: Tensor | None


def read_rows(num_rows: int, q_len: int, q_offset: int, kv_offset: int, mask: Tensor | None) -> Rows:
    """Read a batch: `q_len` tokens a row after `q_offset` earlier ones, keys from position `kv_offset` on.

    `mask [B, S]` is true at real tokens, from position 0; what lies past its end is real. Reading it synchronises.

    Raises:
        NotServed: real tokens of a row that are not one run.
    """
    stop = q_offset + q_len
    whole = Rows([q_len] * num_rows, [stop - kv_offset] * num_rows, [0] * num_rows, None)
    if mask is None or bool(mask[:, :stop].all()):
        return whole
    seen = torch.nn.functional.pad(mask[:, :stop].bool(), (0, max(0, stop - mask.shape[1])), value=True).cpu()
    counts, q_lens, kv_lens, firsts = seen.sum(1).tolist(), [], [], []
    tokens: list[int] = []
    for row, count in enumerate(counts):
        first = int(seen[row].int().argmax()) if count else stop
        last = first + count
        if not bool(seen[row, first:last].all()):
            found = f"row {row} with padding between its tokens"
            raise NotServed("attention_mask", needed="one run of real tokens a row", found=found)
        q_first = max(first, q_offset)
        q_lens.append(max(0, last - q_first))
        tokens += range(row * q_len + q_first - q_offset, row * q_len + last - q_offset)
        kv_first = max(first, kv_offset)
        kv_lens.append(max(0, last - kv_first))
        firsts.append(kv_first - kv_offset)
    real = None if len(tokens) == num_rows * q_len else torch.tensor(tokens, dtype=torch.int64, device=mask.device)
    return Rows(q_lens, kv_lens, firsts, real)
