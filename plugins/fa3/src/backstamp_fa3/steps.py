"""One planned step: the tensors a call hands to the library, and what of its output belongs to nobody.

In: a checked `Batch` and its index. Out: a `Step`. It reads host numbers only; the one thing it launches is the marking
of tokens that see nothing, where no exact host mirror says which they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backstamp.attention import Batch
from backstamp.factories import BuildRequest
from backstamp.row_checks import refusal
from backstamp.step_checks import IndexForm

__all__ = ["Step", "Unseen", "clear_unseen", "mark_unseen", "new_step", "refresh"]


@dataclass(frozen=True, slots=True)
class Unseen:
    """Tokens whose output is no answer, marked on the device.

    Attributes:
        marks: `[T]` bool.
        rows, lens: `[T]` i32, each token's row and its keys; None where the library answers rows without keys itself.
    """

    marks: Tensor
    rows: Tensor | None
    lens: Tensor | None


@dataclass(slots=True)
class Step:
    """A planned step of one KV group; its tensors are read at every forward and graph replay.

    Attributes:
        batch: the batch, `qo_indptr` and `kv_lens` cut to its rows.
        page_table: `[B, W]` i32, cut to the longest row; None where the step carries no page table.
        tokens: query tokens that belong to a row; None where `unseen` must say it.
        unseen: what the device marks, or None where `tokens` says it.
        captured: whether a graph may have recorded it, so that no host number of a batch may count.
        schedules: what a library prepared once for the layers of one shape.
    """

    batch: Batch
    page_table: Tensor | None
    tokens: int | None
    unseen: Unseen | None
    captured: bool
    schedules: dict[tuple[int, ...], object]


def new_step(request: BuildRequest, batch: Batch, form: IndexForm, *, capture: bool, keyless: bool) -> Step:
    """Read a checked batch; `keyless` where the library leaves anything for the tokens of a row without keys.

    Raises an `UnsupportedBatch` for a page table of another dtype than i32, or with gaps.
    """
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
    cut = batch
    if (batch.qo_indptr.shape[0], batch.kv_lens.shape[0]) != (rows + 1, rows):
        cut = replace(batch, qo_indptr=batch.qo_indptr[: rows + 1], kv_lens=batch.kv_lens[:rows])
    tokens = None if capture else _known_tokens(batch, keyless)
    return Step(cut, table, tokens, None if tokens is not None else _unseen(batch, keyless), capture, {})


def _known_tokens(batch: Batch, keyless: bool) -> int | None:
    """Tokens of a row, from exact host mirrors; None where these do not say all that must be cleared."""
    offsets, lens = batch.qo_indptr_host, batch.kv_lens_host
    if offsets is None or not batch.host_exact:
        return None
    # small vectors: a call of numpy costs a fifth of one of torch
    ends = offsets.numpy()[: batch.num_rows + 1]
    if keyless and (lens is None or ((lens.numpy()[: batch.num_rows] == 0) & (ends[1:] > ends[:-1])).any()):
        return None
    return int(ends[-1])


def _unseen(batch: Batch, keyless: bool) -> Unseen:
    device, count = batch.qo_indptr.device, batch.num_tokens
    marks = torch.empty(count, dtype=torch.bool, device=device)
    rows, lens = (torch.empty(count, dtype=torch.int32, device=device) if keyless else None for _ in range(2))
    return Unseen(marks, rows, lens)


def refresh(request: BuildRequest, state: Step, fresh: Step) -> Step:
    """Give a step that graphs may have recorded a new batch's values, at the addresses it was planned with.

    Never for a step to capture whose state was planned for none: what `unseen` must mark then, it does not hold.
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
            bound = f"at most {most}, as planned"
            raise refusal(request, name, bound, str(wanted), phase=new.phase, fix="Plan a new state")
    pairs = [("qo_indptr", old.qo_indptr, new.qo_indptr), ("kv_lens", old.kv_lens, new.kv_lens)]
    if state.page_table is not None and fresh.page_table is not None:
        width, most = fresh.page_table.shape[1], state.page_table.shape[1]
        if width > most:
            bound = f"at most {most} page ids a row, as planned"
            raise refusal(request, "index.page_table", bound, str(width), phase=new.phase, fix="Plan a new state")
        pairs.append(("index.page_table", state.page_table[:, :width], fresh.page_table))
    # all of them are looked at before the first one is written
    for target, source in [(pair[1], pair[2]) for pair in pairs if _moved(request, *pair, phase=new.phase)]:
        target.copy_(source)
    if not state.captured:
        state.tokens = fresh.tokens
        state.unseen = fresh.unseen
    state.schedules.clear()
    return state


def _moved(request: BuildRequest, name: str, target: Tensor, source: Tensor, *, phase: str) -> bool:
    """Whether new values lie elsewhere: what the engine keeps at a fixed address is up to date already.

    Raises an `UnsupportedBatch` where the address is the planned one and the strides are not: the two share memory.
    """
    if target.numel() == 0 or target.data_ptr() != source.data_ptr():
        return True
    strides = zip(target.shape, target.stride(), source.stride(), strict=True)
    if any(size > 1 and planned != found for size, planned, found in strides):
        bound = f"strides {target.stride()} at the planned address, or another address"
        raise refusal(request, name, bound, f"strides {source.stride()}", phase=phase, fix="Plan a new state")
    return False


def mark_unseen(step: Step, positions: Tensor) -> None:
    """Mark on the device the tokens that see nothing; `positions` is `[>= T]` i32, counting up from 0."""
    unseen, batch = step.unseen, step.batch
    if unseen is None or batch.num_rows == 0:
        return
    tokens = positions[: batch.num_tokens]
    torch.ge(tokens, batch.qo_indptr[-1:], out=unseen.marks)
    if unseen.rows is not None and unseen.lens is not None:
        torch.searchsorted(batch.qo_indptr[1:], tokens, right=True, out_int32=True, out=unseen.rows)
        unseen.rows.clamp_(max=batch.num_rows - 1)
        torch.index_select(batch.kv_lens, 0, unseen.rows, out=unseen.lens)
        unseen.marks.logical_or_(unseen.lens.eq_(0))


def clear_unseen(step: Step, out: Tensor, lse: Tensor | None) -> None:
    """Make what was written for tokens that see nothing 0, and their LSE -inf: libraries may leave anything there."""
    if step.unseen is not None:
        out.masked_fill_(step.unseen.marks[:, None, None], 0.0)
        if lse is not None:
            lse.masked_fill_(step.unseen.marks[:, None], float("-inf"))
    elif step.tokens is not None and step.tokens < step.batch.num_tokens:
        out[step.tokens :].zero_()
        if lse is not None:
            lse[step.tokens :] = float("-inf")
