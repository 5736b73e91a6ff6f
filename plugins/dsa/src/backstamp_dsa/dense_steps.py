"""One step of dense latent attention, cut into launches of one query length each: what the library takes.

In: a checked batch. Out: `DenseStep`: launches over rows of equal query length, with lengths and page tables that are
safe to hand over, kept at fixed addresses. Pages past a row's end become page 0 and empty rows one token long: the
library checks no bounds, and those answers are thrown away. It reads host mirrors where it has them, never a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from backstamp.attention import Batch
from backstamp.step_checks import IndexForm
from backstamp_dsa.dense_fill import LaunchFill

__all__ = ["DenseStep", "Launch", "Padding", "cut", "refill"]

#: Tokens times heads of one launch: its f32 shares, 2 KiB a token and head, stay at 256 MiB and one row more.
TOKEN_HEADS_PER_LAUNCH = 128 * 1024


@dataclass(frozen=True, slots=True)
class Padding:
    """Where tokens and places of a padded launch meet.

    Attributes:
        tokens: `[b * q_len]` i64 token of each place, 0 where there is none. Places in front of a short row are empty:
            the library's causal rule counts from a row's end.
        places: `[T]` i64 place of each token, 0 for padding tokens.
    """

    tokens: Tensor
    places: Tensor


@dataclass(slots=True)
class Launch:
    """Rows of one query length.

    Attributes:
        rows: `[b]` i64 rows of the batch, or None for all of them in order.
        q_len: query tokens of each row. behind: how many of a row's last tokens come after this launch's.
        first: the first token; the others follow it, unless `tokens` names them: `[b * q_len]` i64.
        padding: set where rows are padded to one query length; `seen` then counts the batch's tokens.
        kv_lens: `[b]` i32 keys up to the launch's last token, at least 1.
        table: `[b, W]` i32, with no id that is not read.
        seen: `[b * q_len]` bool, whether a token sees anything.
        schedules: the library's schedule by head count; it holds for the lengths it was made for.
    """

    rows: Tensor | None
    q_len: int
    behind: int
    first: int
    tokens: Tensor | None
    padding: Padding | None
    kv_lens: Tensor
    table: Tensor
    seen: Tensor
    schedules: dict[int, object] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of the launch."""
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Places of the launch: a token each, but where rows are padded."""
        return self.kv_lens.shape[0] * self.q_len


@dataclass(slots=True)
class DenseStep:
    """A planned step: its batch, the form of its index, and launches.

    `whole`: one launch over all rows, whatever their lengths. `captured`: a graph reads its schedules, which are
    written anew at their addresses by every plan that follows.
    """

    batch: Batch
    form: IndexForm
    launches: list[Launch]
    whole: bool
    captured: bool


def cut(batch: Batch, form: IndexForm, heads: int, capture: bool, fills: LaunchFill) -> DenseStep:
    """Cut a step into launches: one a query length where the host knows them, else rows padded to the longest."""
    uniform = batch.decode_q_len == batch.max_q_len and batch.num_decode_rows == batch.num_rows
    if batch.num_rows == 0 or batch.num_tokens == 0 or batch.max_q_len == 0:
        step = DenseStep(batch, form, [], False, capture)
    elif uniform and batch.num_tokens == batch.num_rows * batch.max_q_len:
        step = DenseStep(batch, form, [_launch(batch, None, batch.max_q_len, 0, 0, None)], True, capture)
    elif batch.host_exact and batch.qo_indptr_host is not None and not capture:
        step = DenseStep(batch, form, _by_length(batch, batch.qo_indptr_host.tolist(), heads), False, capture)
    else:
        step = DenseStep(batch, form, [_padded(batch)], True, capture)
    refill(step, fills)
    return step


def refill(step: DenseStep, fills: LaunchFill) -> None:
    """Write the batch's values into the step's buffers: device work alone."""
    for launch in step.launches:
        fills.fill(step.batch, launch)
        if launch.padding is not None:
            _fill_padding(step.batch, launch, launch.padding)


def _by_length(batch: Batch, offsets: list[int], heads: int) -> list[Launch]:
    """Launches over rows of equal query length, each cut where it would need more room than a launch has."""
    by_length: dict[int, list[int]] = {}
    for row in range(batch.num_rows):
        by_length.setdefault(offsets[row + 1] - offsets[row], []).append(row)
    by_length.pop(0, None)
    most = max(1, TOKEN_HEADS_PER_LAUNCH // heads)
    launches = []
    for q_len, rows in sorted(by_length.items()):
        together = max(1, most // q_len)
        for at in range(0, len(rows), together):
            for start in range(0, q_len, most):
                stop = min(q_len, start + most)
                launches.append(_of_rows(batch, offsets, rows[at : at + together], start, stop, q_len))
    return launches


def _of_rows(batch: Batch, offsets: list[int], rows: list[int], start: int, stop: int, q_len: int) -> Launch:
    """Tokens `[start, stop)` of some rows of one query length."""
    device, taken = batch.kv_lens.device, stop - start
    firsts = [offsets[row] + start for row in rows]
    # rows one after the other: a view of the caller's queries will do
    tokens = None
    if firsts != [firsts[0] + at * taken for at in range(len(rows))]:
        tokens = torch.tensor([[*range(first, first + taken)] for first in firsts], device=device).flatten()
    every = rows == [*range(batch.num_rows)]
    chosen = None if every else torch.tensor(rows, dtype=torch.int64, device=device)
    return _launch(batch, chosen, taken, q_len - stop, firsts[0], tokens)


def _padded(batch: Batch) -> Launch:
    """All rows at the longest query length."""
    device = batch.kv_lens.device
    launch = _launch(batch, None, batch.max_q_len, 0, 0, None)
    launch.padding = Padding(
        tokens=torch.zeros(batch.num_rows * batch.max_q_len, dtype=torch.int64, device=device),
        places=torch.zeros(batch.num_tokens, dtype=torch.int64, device=device),
    )
    launch.seen = torch.zeros(batch.num_tokens, dtype=torch.bool, device=device)
    return launch


def _launch(batch: Batch, rows: Tensor | None, q_len: int, behind: int, first: int, tokens: Tensor | None) -> Launch:
    table = batch.index.page_table
    assert table is not None, "the row declares page tables alone"
    count, device = batch.num_rows if rows is None else rows.shape[0], batch.kv_lens.device
    return Launch(
        rows=rows,
        q_len=q_len,
        behind=behind,
        first=first,
        tokens=tokens,
        padding=None,
        kv_lens=torch.empty(count, dtype=torch.int32, device=device),
        table=torch.empty(count, max(1, table.shape[1]), dtype=torch.int32, device=device),
        seen=torch.empty(count * q_len, dtype=torch.bool, device=device),
    )


def _fill_padding(batch: Batch, launch: Launch, padding: Padding) -> None:
    """Each row's tokens at the end of its places; tokens past the last row have none."""
    starts, stops = batch.qo_indptr[: batch.num_rows], batch.qo_indptr[1 : batch.num_rows + 1]
    back = torch.arange(launch.q_len, device=starts.device)[None] - launch.q_len
    token = stops[:, None] + back
    padding.tokens.copy_(torch.where(token >= starts[:, None], token, 0).flatten())
    at = torch.arange(batch.num_tokens, device=starts.device)
    # the row of a token: how many rows end at or before it
    row = torch.searchsorted(stops, at.to(stops.dtype), right=True)
    real = row < batch.num_rows
    row = row.clamp(max=batch.num_rows - 1)
    place = (row + 1) * launch.q_len - (stops[row] - at)
    padding.places.copy_(torch.where(real, place, 0))
    launch.seen.copy_(real & (batch.kv_lens[row] > 0))
