"""One step as these kernels need it: a page table they can address, equal query lengths, and what each token sees.

In: a checked `Batch`. Out: a `Step` whose tensors keep their addresses while `refresh` gives them a later batch's
values. Host mirrors are read where they are exact; nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal
from backstamp_trtllm.token_fill import TokenFill

__all__ = ["WORD_BITS", "Step", "TokenRows", "new_mask", "plan_step", "refresh_step", "update_step"]


#: Bits of a word of a draft mask.
WORD_BITS = 32


@dataclass(slots=True)
class TokenRows:
    """Each token's row `[T]` i64, its place in that row `[T]` i32, and how many keys it sees `[T]` i32.

    Tokens of no row, and of rows without keys, see none. `mask [T, W]` i32 are the words of a causal draft mask (see
    `draft_masks`) over rows of at most `drafts` tokens, None where nothing reads one.
    """

    rows: Tensor
    offsets: Tensor
    visible: Tensor
    mask: Tensor | None = None
    drafts: int = 0


@dataclass(slots=True)
class Step:
    """What `plan` answers.

    Attributes:
        batch: the step, whose tensors are read at their addresses.
        fill: what writes the tokens.
        q_len: query tokens of every row; 0 where rows differ or nobody says.
        table: `[B, W]` i32 contiguous page ids; `copied` where it is ours and not the engine's.
        captured: a graph may have recorded it, so that no host length of a batch counts.
        tokens: what each token is; None where neither lengths nor pads need it.
        dead: `[T, 1, 1]` bool, tokens that see no key; None where the host knows of none.
        kv_indptr: `[B+1]` i32 cumulative key counts, for kernels that read them.
    """

    batch: Batch
    fill: TokenFill
    q_len: int
    table: Tensor
    copied: bool
    captured: bool = False
    tokens: TokenRows | None = None
    dead: Tensor | None = None
    kv_indptr: Tensor | None = None

    def serves(self, capture: bool) -> bool:
        """Whether a later batch may take the step over: one to capture needs a step that was planned for capture."""
        return self.captured or not capture

    @property
    def kv_lens(self) -> Tensor:
        """`[B]` i32."""
        return self.batch.kv_lens[: self.batch.num_rows]

    @property
    def qo_indptr(self) -> Tensor:
        """`[B+1]` i32."""
        return self.batch.qo_indptr[: self.batch.num_rows + 1]


def plan_step(
    batch: Batch,
    fill: TokenFill,
    *,
    capture: bool,
    every_token: bool = False,
    always_tokens: bool = False,
    kv_indptr: bool = False,
    table_multiple: int = 1,
    drafts: int = 0,
) -> Step:
    """A new step. `every_token` asks for `tokens` of steps with more than one token a row, `always_tokens` of any,
    `drafts` for a causal mask in them, `kv_indptr` for cumulative key counts, `table_multiple` for a page table of such
    a width.

    With `capture` no host length is trusted: a replay may have others.
    """
    rows, tokens = batch.num_rows, batch.num_tokens
    table, copied = _table(batch, table_multiple)
    q_len = 0 if rows == 0 or tokens == 0 else _equal_length(batch, capture)
    step = Step(batch, fill, q_len, table, copied, capture)
    if rows == 0 or tokens == 0:
        return step
    device = batch.kv_lens.device
    quiet = not capture and _all_see(batch)
    if not quiet or always_tokens or (every_token and step.q_len != 1):
        step.tokens = TokenRows(
            torch.empty(tokens, dtype=torch.int64, device=device),
            torch.empty(tokens, dtype=torch.int32, device=device),
            torch.empty(tokens, dtype=torch.int32, device=device),
            new_mask(tokens, drafts, device) if drafts and q_len != 1 else None,
            drafts,
        )
    if not quiet:
        step.dead = torch.empty(tokens, 1, 1, dtype=torch.bool, device=device)
    if kv_indptr:
        step.kv_indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    update_step(step)
    return step


def new_mask(num_tokens: int, drafts: int, device: torch.device) -> Tensor:
    """Room for a draft mask over rows of at most `drafts` tokens."""
    return torch.empty(num_tokens, -(-drafts // WORD_BITS), dtype=torch.int32, device=device)


def update_step(step: Step) -> None:
    """The device half: everything derived from lengths again, at the same addresses. Recordable in a graph."""
    if step.tokens is not None:
        step.fill.fill(step, step.tokens)
    if step.kv_indptr is not None:
        torch.cumsum(step.kv_lens, 0, dtype=torch.int32, out=step.kv_indptr[1:])


def refresh_step(request: BuildRequest, step: Step, batch: Batch) -> Step:
    """Give a step that graphs may have recorded a new batch's values.

    Raises:
        UnsupportedBatch: the batch needs another launch than the recorded one.
    """
    old = step.batch
    for name, needed, found in (
        ("num_rows", old.num_rows, batch.num_rows),
        ("num_tokens", old.num_tokens, batch.num_tokens),
        ("tree", old.tree and old.tree.kind, batch.tree and batch.tree.kind),
        ("equal q_len", step.q_len, _still_equal(step, batch)),
    ):
        if needed != found:
            raise refusal(request, name, f"{needed}, as planned", str(found), fix="Plan a new state")
    for name, most, length in (
        ("max_q_len", old.max_q_len, batch.max_q_len),
        ("max_kv_len", old.max_kv_len, batch.max_kv_len),
    ):
        if length > most:
            raise refusal(request, name, f"at most {most}, as planned", str(length), fix="Plan a new state")
    if step.dead is None and not _all_see(batch):
        raise refusal(request, "kv_lens", "rows that all see keys, as planned", "an empty row", fix="Plan a new state")
    later = Step(batch, step.fill, step.q_len, step.table, step.copied)
    pairs = [("qo_indptr", step.qo_indptr, later.qo_indptr), ("kv_lens", step.kv_lens, later.kv_lens)]
    if old.tree is not None and batch.tree is not None:
        # a mask over other lengths, or of shorter rows, lies at the start of the planned one
        part = tuple(slice(0, size) for size in batch.tree.buffer.shape)
        pairs.append(("tree.buffer", old.tree.buffer[part], batch.tree.buffer))
        if old.tree.indptr is not None and batch.tree.indptr is not None:
            pairs.append(("tree.indptr", old.tree.indptr, batch.tree.indptr))
    pairs.append(("index.page_table", *_common_pages(request, step, batch)))
    # all of them are looked at before the first one is written
    for target, source in [(pair[1], pair[2]) for pair in pairs if _moved(request, *pair)]:
        target.copy_(source)
    update_step(step)
    return step


def _table(batch: Batch, multiple: int) -> tuple[Tensor, bool]:
    """The page table as contiguous rows: the engine's own where its rows can be read whole, else a copy."""
    table = batch.index.page_table
    assert table is not None, "check_batch found a page table"
    table = table[: batch.num_rows]
    rows, width = table.shape
    fits = width % multiple == 0
    if table.dtype is torch.int32 and fits and table.is_contiguous():
        return table, False
    stride = table.stride(0)
    whole = table.untyped_storage().nbytes() // table.element_size() - table.storage_offset()
    wider = stride > width and stride % multiple == 0 and table.stride(1) == 1 and rows * stride <= whole
    if table.dtype is torch.int32 and wider:
        # a view of the first columns of a wider table: hand over its whole rows, the lengths say how many ids count
        return table.as_strided((rows, stride), (stride, 1)), False
    copy = torch.zeros(rows, -(-width // multiple) * multiple, dtype=torch.int32, device=table.device)
    copy[:, :width].copy_(table)
    return copy, True


def _common_pages(request: BuildRequest, step: Step, batch: Batch) -> tuple[Tensor, Tensor]:
    """The planned table and a later one, cut to the columns that both have."""
    table = batch.index.page_table
    assert table is not None, "check_batch found a page table"
    most = step.table.shape[1]
    wanted = min(table.shape[1], -(-batch.max_kv_len // request.page_size))
    if wanted > most:
        needed = f"at most {most} page ids a row, as planned"
        raise refusal(request, "index.page_table", needed, str(wanted), fix="Plan a new state")
    width = min(table.shape[1], most)
    return step.table[:, :width], table[: batch.num_rows, :width]


def _moved(request: BuildRequest, name: str, target: Tensor, source: Tensor) -> bool:
    """Whether new values lie elsewhere: what the engine keeps at a fixed address is up to date already.

    Raises:
        UnsupportedBatch: another shape, or the planned address under other strides, where the two share memory.
    """
    if target.shape != source.shape:
        needed = f"{list(target.shape)}, as planned"
        raise refusal(request, name, needed, str(list(source.shape)), fix="Plan a new state")
    if target.numel() == 0 or target.data_ptr() != source.data_ptr():
        return True
    strides = zip(target.shape, target.stride(), source.stride(), strict=True)
    if any(size > 1 and planned != found for size, planned, found in strides):
        needed = f"strides {target.stride()} at the planned address, or another address"
        raise refusal(request, name, needed, f"strides {source.stride()}", fix="Plan a new state")
    return False


def _equal_length(batch: Batch, capture: bool) -> int:
    """How many tokens every row has, if the engine says so or exact host lengths show it; else 0."""
    if batch.decode_q_len is not None and batch.num_decode_rows == batch.num_rows:
        length = batch.decode_q_len
    elif batch.phase == "draft_decode" and batch.max_q_len == 1:
        # the draft loop's rows are one query each, whatever else is unknown
        length = 1
    elif capture or batch.qo_indptr_host is None or not batch.host_exact:
        return 0
    else:
        # small vectors: a call of numpy costs a fifth of one of torch
        offsets = batch.qo_indptr_host.numpy()[: batch.num_rows + 1]
        lengths = offsets[1:] - offsets[:-1]
        length = int(lengths[0])
        if (lengths != length).any():
            return 0
    return length if length * batch.num_rows == batch.num_tokens else 0


def _still_equal(step: Step, batch: Batch) -> int:
    """The length of a later batch's rows, where the launch was planned for rows of one length.

    The engine's own word counts before the mirrors: rows past its decode rows are pads, whatever they hold.
    """
    if not step.q_len:
        return 0
    return batch.decode_q_len if batch.decode_q_len is not None else _equal_length(batch, capture=False)


def _all_see(batch: Batch) -> bool:
    """Whether exact host lengths show that every token has a row and every row has keys."""
    if not batch.host_exact or batch.qo_indptr_host is None or batch.kv_lens_host is None:
        return False
    rows, offsets, lens = batch.num_rows, batch.qo_indptr_host.numpy(), batch.kv_lens_host.numpy()
    return bool(offsets[rows] == batch.num_tokens and (lens[:rows] > 0).all())
