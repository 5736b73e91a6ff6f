"""What decode knows of its rows: how long they may be, and the slot of each token, for a library that takes tokens.

In: a `LinearBatch`. Out: a bound, or i32 slots in one launch. It reads row numbers on the device and never waits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstamp.attention import LinearBatch

__all__ = ["longest_row", "slots_of_tokens"]


def longest_row(batch: LinearBatch) -> int | None:
    """An upper bound on the tokens of a row, None where the host knows none."""
    if batch.max_q_len is not None:
        return batch.max_q_len
    if batch.qo_indptr_host is None:
        return None
    ends: list[int] = batch.qo_indptr_host[: batch.num_rows + 1].tolist()
    return max((stop - start for start, stop in pairwise(ends)), default=0)


def slots_of_tokens(batch: LinearBatch, slots: Tensor) -> Tensor:
    """`[T]` i32, a tensor of its own: the slot of each token's row, -1 for a token of none."""
    found = torch.empty(batch.num_tokens, dtype=torch.int32, device=slots.device)
    _of_tokens[(batch.num_rows + 1,)](batch.qo_indptr, slots, found, batch.num_rows, batch.num_tokens, num_warps=1)
    return found


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _of_tokens(qo_indptr, slots_ptr, found_ptr, num_rows, num_tokens):
    """A program a row; the one past the last has the tokens of none."""
    row = tl.program_id(0)
    there = row < num_rows
    start = tl.load(qo_indptr + row)
    stop = tl.load(qo_indptr + row + 1, mask=there, other=num_tokens)
    slot = tl.load(slots_ptr + row, mask=there, other=-1).to(tl.int32)
    for token in range(start, stop):
        tl.store(found_ptr + token, slot)
