"""Rows as the call contract's `Batch`, and the slots of their keys in the index form a kernel reads.

In: host lengths, and where each row's keys lie, a slot a token. Out: a `Batch` whose host mirrors are exact. A page is
one token here, whatever the engine's own pages are: slots address every cache of Transformers without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, TreeMask
from backstamp.declarations import Phase

__all__ = ["index_of_runs", "index_of_slots", "make_batch", "phase_of"]


def phase_of(q_lens: Sequence[int]) -> Phase:
    """A step of one token a row is decode; every other is prefill, with or without a prefix."""
    return "decode" if max(q_lens) <= 1 else "prefill"


def make_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    causal: bool,
    index: KVIndex,
    device: torch.device,
    tree: TreeMask | None = None,
) -> Batch:
    """The batch of one step; `kv_lens` count this step's tokens too."""
    rows = len(q_lens)
    # one copy to the device for all: each takes the host tens of microseconds, in every step
    token_rows = np.repeat(np.arange(rows), q_lens)
    host = torch.from_numpy(np.concatenate([[0], np.cumsum(q_lens), kv_lens, token_rows]).astype(np.int32))
    there = host.to(device)
    offsets, lens = slice(rows + 1), slice(rows + 1, 2 * rows + 1)
    return Batch(
        phase=phase_of(q_lens),
        num_rows=rows,
        num_tokens=len(token_rows),
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        qo_indptr=there[offsets],
        kv_lens=there[lens],
        index=index,
        causal=causal,
        tree=tree,
        qo_indptr_host=host[offsets],
        kv_lens_host=host[lens],
        token_rows=there[2 * rows + 1 :],
    )


def index_of_runs(firsts: Sequence[int], kv_lens: Sequence[int], form: str, device: torch.device) -> KVIndex:
    """The index of rows whose keys lie in one run of slots each, from `firsts` on."""
    first = torch.tensor(firsts, dtype=torch.int32, device=device)
    if form == "csr":
        lens = torch.tensor(kv_lens)
        rows = torch.repeat_interleave(lens).to(device)
        indptr = _indptr(kv_lens, device)
        within = torch.arange(len(rows), dtype=torch.int32, device=device) - indptr[rows]
        return KVIndex(page_size=1, kv_indptr=indptr, kv_indices=first[rows] + within)
    return _of_table(first[:, None] + torch.arange(max(1, *kv_lens), dtype=torch.int32, device=device), form)


def index_of_slots(slots: Tensor, kv_lens: Sequence[int], form: str) -> KVIndex:
    """The index of rows whose keys lie anywhere: `slots [N]`, row after row in order of position."""
    slots = slots[: sum(kv_lens)].to(torch.int32)
    if form == "csr":
        return KVIndex(page_size=1, kv_indptr=_indptr(kv_lens, slots.device), kv_indices=slots)
    lens = torch.tensor(kv_lens, device=slots.device)
    places = torch.arange(max(kv_lens), device=slots.device)
    table = slots.new_zeros(len(kv_lens), len(places))
    table[places[None, :] < lens[:, None]] = slots
    return _of_table(table, form)


def _of_table(table: Tensor, form: str) -> KVIndex:
    if form == "indirect":
        return KVIndex(page_size=1, table=table, row_ids=torch.arange(len(table), device=table.device))
    return KVIndex(page_size=1, page_table=table)


def _indptr(lens: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
