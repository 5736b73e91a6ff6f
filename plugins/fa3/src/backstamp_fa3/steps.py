"""One planned step: the tensors a call hands to the library, and what of its output belongs to no row.

In: a checked `Batch` and its index. Out: a `Step`. It reads host numbers only; the one thing it launches is the marking
of padding tokens, where no exact host mirror says how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backstamp.attention import Batch
from backstamp.factories import BuildRequest
from backstamp.row_checks import refusal
from backstamp.step_checks import IndexForm

__all__ = ["Step", "clear_pads", "mark_pads", "new_step", "refresh"]


@dataclass(slots=True)
class Step:
    """A planned step of one KV group; its tensors are read at every forward and graph replay.

    Attributes:
        batch: the batch, `qo_indptr` and `kv_lens` cut to its rows.
        page_table: `[B, W]` i32, cut to the longest row; None where the step carries no page table.
        tokens: query tokens that belong to a row; None where only the device knows.
        pads: `[T]` bool, tokens of no row; None where `tokens` says it.
        captured: whether a graph may have recorded it, so that no host number of a batch may count.
        schedules: what a library prepared once for the layers of one shape.
    """

    batch: Batch
    page_table: Tensor | None
    tokens: int | None
    pads: Tensor | None
    captured: bool
    schedules: dict[tuple[int, ...], object]


def new_step(request: BuildRequest, batch: Batch, form: IndexForm, *, capture: bool) -> Step:
    """Read a checked batch. Raises an `UnsupportedBatch` for a page table of another dtype than i32, or with gaps."""
    rows = batch.num_rows
    table = None
    if form == "page_table":
        assert batch.index.page_table is not None, "the form was chosen because it is there"
        table = batch.index.page_table
        if table.dtype is not torch.int32 or table.stride(1) != 1:
            found = f"{table.dtype} with a last stride of {table.stride(1)}"
            raise refusal(request, "index.page_table", "int32 with a last stride of 1", found, phase=batch.phase)
        # libraries take the width of the table for the longest row and choose their split by it
        table = table[:rows, : max(1, -(-batch.max_kv_len // batch.index.page_size))]
    for name, tensor in (("qo_indptr", batch.qo_indptr), ("kv_lens", batch.kv_lens)):
        if tensor.stride(0) != 1:
            raise refusal(request, name, "a stride of 1", str(tensor.stride(0)), phase=batch.phase)
    cut = replace(batch, qo_indptr=batch.qo_indptr[: rows + 1], kv_lens=batch.kv_lens[:rows])
    tokens = None
    if batch.qo_indptr_host is not None and batch.host_exact and not capture:
        tokens = int(batch.qo_indptr_host[rows])
    pads = None
    if tokens is None:
        pads = torch.empty(batch.num_tokens, dtype=torch.bool, device=batch.qo_indptr.device)
    return Step(cut, table, tokens, pads, capture, {})


def refresh(request: BuildRequest, state: Step, fresh: Step) -> Step:
    """Give a step that graphs may have recorded a new batch's values, at the addresses it was planned with.

    Raises an `UnsupportedBatch` where the batch needs another launch than the recorded one.
    """
    old, new = state.batch, fresh.batch
    for name, needed, found in (
        ("num_rows", old.num_rows, new.num_rows),
        ("num_tokens", old.num_tokens, new.num_tokens),
        ("causal", old.causal, new.causal),
        ("index", state.page_table is not None, fresh.page_table is not None),
    ):
        if needed != found:
            raise refusal(request, name, f"{needed}, as planned", str(found), phase=new.phase, fix="Plan a new state")
    for name, most, wanted in (
        ("max_q_len", old.max_q_len, new.max_q_len),
        ("max_kv_len", old.max_kv_len, new.max_kv_len),
    ):
        if wanted > most:
            needed = f"at most {most}, as planned"
            raise refusal(request, name, needed, str(wanted), phase=new.phase, fix="Plan a new state")
    pairs = [(old.qo_indptr, new.qo_indptr), (old.kv_lens, new.kv_lens)]
    if state.page_table is not None and fresh.page_table is not None:
        width = fresh.page_table.shape[1]
        pairs.append((state.page_table[:, :width], fresh.page_table))
    for target, source in pairs:
        # what the engine keeps at a fixed address is up to date already
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)
    if not state.captured:
        state.tokens = fresh.tokens
        state.pads = fresh.pads
    state.schedules.clear()
    return state


def mark_pads(step: Step, positions: Tensor) -> None:
    """Mark the tokens of no row on the device; `positions` is `[>= T]` i32, counting up from 0."""
    if step.pads is not None:
        torch.ge(positions[: step.batch.num_tokens], step.batch.qo_indptr[-1:], out=step.pads)


def clear_pads(step: Step, out: Tensor, lse: Tensor | None) -> None:
    """Make what was written for tokens of no row 0, and their LSE -inf: a merge of split keys may leave anything."""
    if step.pads is not None:
        out.masked_fill_(step.pads[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(step.pads[:, None], float("-inf"))
    elif step.tokens is not None and step.tokens < step.batch.num_tokens:
        out[step.tokens :].zero_()
        if lse is not None:
            lse[step.tokens :] = float("-inf")
