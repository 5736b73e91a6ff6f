"""One step as the contract has it: from SGLang's `ForwardBatch` to a `Batch`.

In: a forward batch, SGLang's table of token slots and the index forms a kernel reads. Out: a `Batch` over SGLang's own
tensors where they are what the contract asks for, and small ones made once a step where they are not. It reads host
lengths only, never a device value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from backstamp.attention import Batch, KVIndex, TreeMask
from backstamp.declarations import Phase

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from torch import Tensor

__all__ = ["Chains", "Slots", "batch_of", "draft_batch"]


class Slots(NamedTuple):
    """Where tokens lie: SGLang's `table [R, W]` of token slots, and the sliding layers' own slots by those, if any."""

    table: Tensor
    page_size: int
    to_window: Tensor | None = None


class Chains(NamedTuple):
    """The chains of a draft loop: `topk` a request, `num_steps` slots each, one after another behind the prefix."""

    topk: int
    num_steps: int


class _Rows(NamedTuple):
    """The rows of a step; `skip [B]` is how many slots lie between a row's `prefix [B]` and its own chain."""

    q_lens: list[int]
    kv_lens: Tensor
    kv_lens_host: Tensor
    table_rows: Tensor
    prefix: Tensor | None = None
    skip: Tensor | None = None


def batch_of(forward: ForwardBatch, phase: Phase, slots: Slots, forms: frozenset[str]) -> Batch:
    """A step of extends (chunks of prompts, decode rows among them), of decode rows, or of drafted tokens to verify."""
    added, tree = 0, None
    if phase == "decode":
        q_lens = [1] * forward.batch_size
    elif phase == "verify":
        # here alone SGLang's lengths leave this step's tokens out
        added = forward.spec_info.draft_token_num
        q_lens = [added] * forward.batch_size
    else:
        q_lens = [int(length) for length in forward.extend_seq_lens_cpu]
    host = _host_lens(forward) + added
    rows = _Rows(q_lens, (forward.seq_lens + added).to(torch.int32), host, forward.req_pool_indices)
    if phase == "verify" and forward.spec_info.topk > 1:
        sizes = added * rows.kv_lens
        tree = TreeMask(kind="full", buffer=forward.spec_info.custom_mask, indptr=sizes.cumsum(0) - sizes)
    return _batch(phase, rows, slots, forms, tree)


def draft_batch(forward: ForwardBatch, step: int, chains: Chains, slots: Slots, forms: frozenset[str]) -> Batch:
    """Step `step` of a draft loop: a row for every chain, one query over the prefix and the chain so far."""
    topk, num_steps = chains
    rows = _Rows(
        q_lens=[1] * forward.batch_size * topk,
        kv_lens=(forward.seq_lens + step + 1).to(torch.int32).repeat_interleave(topk),
        kv_lens_host=(_host_lens(forward) + step + 1).repeat_interleave(topk),
        table_rows=forward.req_pool_indices.repeat_interleave(topk),
    )
    if topk > 1:
        skip = torch.arange(topk, device=forward.seq_lens.device).repeat(forward.batch_size) * num_steps
        rows = rows._replace(prefix=forward.seq_lens.repeat_interleave(topk), skip=skip)
    return _batch("draft_decode", rows, slots, forms, None)


def _host_lens(forward: ForwardBatch) -> Tensor:
    assert forward.seq_lens_cpu is not None, "host lengths are asked for"
    return forward.seq_lens_cpu.to(torch.int32)


def _batch(phase: Phase, rows: _Rows, slots: Slots, forms: frozenset[str], tree: TreeMask | None) -> Batch:
    count, max_kv_len, device = len(rows.q_lens), int(rows.kv_lens_host.max()), rows.kv_lens.device
    qo_indptr_host = torch.zeros(count + 1, dtype=torch.int32)
    qo_indptr_host[1:] = torch.tensor(rows.q_lens, dtype=torch.int32).cumsum(0)
    decodes = phase in ("decode", "draft_decode")
    return Batch(
        phase=phase,
        num_rows=count,
        num_tokens=sum(rows.q_lens),
        max_q_len=max(rows.q_lens),
        max_kv_len=max_kv_len,
        num_decode_rows=count if decodes else 0,
        num_decode_tokens=count if decodes else 0,
        decode_q_len=1 if decodes else None,
        qo_indptr=qo_indptr_host.to(device, non_blocking=True),
        kv_lens=rows.kv_lens,
        index=_index(rows, max_kv_len, slots, forms),
        qo_indptr_host=qo_indptr_host,
        kv_lens_host=rows.kv_lens_host,
        tree=tree,
    )


def _index(rows: _Rows, max_kv_len: int, slots: Slots, forms: frozenset[str]) -> KVIndex:
    """The first form the kernel reads of those that cost least here."""
    page_size = slots.page_size
    if page_size == 1 and slots.to_window is None and rows.skip is None and "indirect" in forms:
        # SGLang's own table
        return KVIndex(page_size=1, table=slots.table, row_ids=rows.table_rows)
    tokens = _tokens(rows, max_kv_len, slots)
    pages = (tokens // page_size if page_size > 1 else tokens).to(torch.int32)
    if "page_table" in forms:
        return KVIndex(page_size=page_size, page_table=pages)
    if "indirect" in forms:
        return KVIndex(page_size=page_size, table=pages, row_ids=torch.arange(len(pages), device=pages.device))
    counts = (rows.kv_lens_host + page_size - 1) // page_size
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
    indptr[1:] = counts.cumsum(0)
    held = torch.arange(pages.shape[1]) < counts[:, None]
    return KVIndex(
        page_size=page_size, kv_indptr=indptr.to(pages.device), kv_indices=pages[held.to(pages.device)].contiguous()
    )


def _tokens(rows: _Rows, max_kv_len: int, slots: Slots) -> Tensor:
    """The slot of each page's first token, `[B, W]`, in the layers' own slots."""
    if rows.skip is None or rows.prefix is None:
        tokens = slots.table[rows.table_rows, : max_kv_len : slots.page_size]
    else:
        # chains side by side have pages of one token: SGLang takes no others
        columns = torch.arange(max_kv_len, device=slots.table.device).expand(len(rows.q_lens), -1)
        columns = columns + (columns >= rows.prefix[:, None]) * rows.skip[:, None]
        tokens = slots.table[rows.table_rows[:, None], columns]
    return tokens if slots.to_window is None else slots.to_window[tokens.long()]
