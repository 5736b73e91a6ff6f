"""One step as the contract has it: from SGLang's `ForwardBatch` to a `Batch`.

In: a forward batch, SGLang's table of token slots and the index forms a kernel reads. Out: a `Batch` over SGLang's own
tensors where they are what the contract asks for, and small ones made once a step where they are not. It reads host
lengths only, never a device value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from backstamp.attention import Batch, KVIndex
from backstamp.declarations import Phase

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import Tensor

__all__ = ["Slots", "batch_of"]


class Slots(NamedTuple):
    """Where tokens lie: SGLang's `table [R, W]` of token slots, and the sliding layers' own slots by those, if any."""

    table: Tensor
    page_size: int
    to_window: Tensor | None = None


def batch_of(forward: ForwardBatch, phase: Phase, slots: Slots, forms: frozenset[str]) -> Batch:
    """A step of extends (chunks of prompts, decode rows among them) or of decode rows, one query each."""
    rows = forward.batch_size
    assert forward.seq_lens_cpu is not None, "host lengths are asked for"
    kv_lens_host = forward.seq_lens_cpu.to(torch.int32)
    device = forward.seq_lens.device
    q_lens = [1] * rows if phase == "decode" else [int(length) for length in forward.extend_seq_lens_cpu]
    qo_indptr_host = torch.zeros(rows + 1, dtype=torch.int32)
    qo_indptr_host[1:] = torch.tensor(q_lens, dtype=torch.int32).cumsum(0)
    max_kv_len = int(kv_lens_host.max())
    return Batch(
        phase=phase,
        num_rows=rows,
        num_tokens=sum(q_lens),
        max_q_len=max(q_lens),
        max_kv_len=max_kv_len,
        num_decode_rows=rows if phase == "decode" else 0,
        num_decode_tokens=rows if phase == "decode" else 0,
        decode_q_len=1 if phase == "decode" else None,
        qo_indptr=qo_indptr_host.to(device, non_blocking=True),
        # SGLang's are 64-bit
        kv_lens=forward.seq_lens.to(torch.int32),
        index=_index(forward.req_pool_indices, kv_lens_host, max_kv_len, slots, forms),
        slot_mapping=forward.out_cache_loc,
        qo_indptr_host=qo_indptr_host,
        kv_lens_host=kv_lens_host,
    )


def _index(rows: Tensor, kv_lens_host: Tensor, max_kv_len: int, slots: Slots, forms: frozenset[str]) -> KVIndex:
    """The first form the kernel reads of those that cost least here."""
    page_size = slots.page_size
    if page_size == 1 and slots.to_window is None and "indirect" in forms:
        # SGLang's own table
        return KVIndex(page_size=1, table=slots.table, row_ids=rows)
    tokens = slots.table[rows, :max_kv_len:page_size]
    if slots.to_window is not None:
        tokens = slots.to_window[tokens.long()]
    pages = (tokens // page_size if page_size > 1 else tokens).to(torch.int32)
    if "page_table" in forms:
        return KVIndex(page_size=page_size, page_table=pages)
    if "indirect" in forms:
        return KVIndex(page_size=page_size, table=pages, row_ids=torch.arange(len(pages), device=pages.device))
    counts = (kv_lens_host + page_size - 1) // page_size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    held = torch.arange(pages.shape[1]) < counts[:, None]
    return KVIndex(
        page_size=page_size, kv_indptr=indptr.to(pages.device), kv_indices=pages[held.to(pages.device)].contiguous()
    )
