"""The rows of a step that torch-npu is handed: those with queries and keys, in host numbers, and their block table.

In: a checked batch with exact host lengths. Out: `LiveRows`, or None where there are none. Rows without queries or keys
are left out, because the library takes neither. No device value is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex
from backstamp.step_checks import IndexForm

__all__ = ["LiveRows", "live_rows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRows:
    """R rows of a step, T of its tokens.

    Attributes:
        tokens: the rows' query tokens, a slice where they are neighbours, else i64 `[T]`.
        q_lens, kv_lens: queries and readable keys of each row, none of them 0.
        block_table: `[R, W]` i32 page ids, contiguous.
    """

    tokens: slice | Tensor
    q_lens: Sequence[int]
    kv_lens: Sequence[int]
    block_table: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.q_lens)


def live_rows(batch: Batch, form: IndexForm) -> LiveRows | None:
    """The rows of a step to attend, in the batch's order."""
    assert batch.qo_indptr_host is not None, "declared as an input"
    assert batch.kv_lens_host is not None
    starts = batch.qo_indptr_host[: batch.num_rows + 1].tolist()
    lens = batch.kv_lens_host[: batch.num_rows].tolist()
    live = [row for row in range(batch.num_rows) if starts[row + 1] > starts[row] and lens[row] > 0]
    if not live:
        return None
    return LiveRows(
        tokens=_tokens(live, starts, batch.kv_lens.device),
        q_lens=[starts[row + 1] - starts[row] for row in live],
        kv_lens=[lens[row] for row in live],
        block_table=_block_table(batch.index, form, live, batch.num_rows),
    )


def _tokens(live: list[int], starts: list[int], device: torch.device) -> slice | Tensor:
    first, last = live[0], live[-1]
    count = sum(starts[row + 1] - starts[row] for row in live)
    if starts[last + 1] - starts[first] == count:
        return slice(starts[first], starts[last + 1])
    return torch.cat([torch.arange(starts[row], starts[row + 1]) for row in live]).to(device)


def _block_table(index: KVIndex, form: IndexForm, live: list[int], num_rows: int) -> Tensor:
    if form == "page_table":
        assert index.page_table is not None
        table, row_ids = index.page_table[:num_rows], None
    else:
        assert index.table is not None
        assert index.row_ids is not None
        table, row_ids = index.table, index.row_ids[:num_rows].long()
    if len(live) < num_rows:
        chosen = torch.tensor(live).to(table.device)
        row_ids = chosen if row_ids is None else row_ids[chosen]
    if row_ids is not None:
        table = table[row_ids]
    return table.int().contiguous()
