"""The host half of a step: what `plan` reads off a batch, as Python numbers, one per row.

In: a `Batch`. Out: `StepRows`, and for one layer kind the span of keys each row reads. Takes the host mirrors where
they are exact and syncs with the device where they are not. Never reads the tree: its buffer may be filled later.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from backstamp.attention import Batch, RaggedKV

__all__ = ["NewOffsets", "Span", "StepRows", "read_rows"]


@dataclass(frozen=True, slots=True)
class Span:
    """The keys one row reads: positions `start` to `stop`, a range every layer of one window shares."""

    row: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """One number a row; `q_starts` has one more. `tree` says the batch has a tree, not what it holds."""

    q_starts: list[int]
    kv_lens: list[int]
    causal: list[bool]
    kv_starts: list[int]
    tree: bool

    def q_len(self, row: int) -> int:
        """Query tokens of a row."""
        return self.q_starts[row + 1] - self.q_starts[row]

    def spans(self, window_left: int) -> list[Span]:
        """The span of each row that has queries and may see a key, in row order.

        Without a tree every key of a span is seen by a token of its row, so nothing else is ever read: a page behind
        the window or left of `kv_starts` may hold anything.
        """
        spans = []
        for row, kv_len in enumerate(self.kv_lens):
            q_len = self.q_len(row)
            start = self.kv_starts[row]
            if window_left >= 0:
                # in a tree a token that sees nothing, not even itself, has the position before its step
                first = kv_len - q_len - (1 if self.tree else 0)
                start = max(start, first - window_left)
            if q_len > 0 and start < kv_len:
                spans.append(Span(row, start, kv_len))
        return spans


def read_rows(batch: Batch) -> StepRows:
    """Read a batch's row numbers; one device sync for each tensor without an exact host mirror."""
    exact = batch.host_exact
    q_starts = batch.qo_indptr_host if exact and batch.qo_indptr_host is not None else batch.qo_indptr
    kv_lens = batch.kv_lens_host if exact and batch.kv_lens_host is not None else batch.kv_lens
    rows = batch.num_rows
    if isinstance(batch.causal, Tensor):
        causal = [bool(flag) for flag in batch.causal.tolist()]
    else:
        causal = [batch.causal] * rows
    kv_starts = [0] * rows if batch.kv_starts is None else batch.kv_starts.tolist()[:rows]
    return StepRows(
        q_starts=q_starts.tolist()[: rows + 1],
        kv_lens=kv_lens.tolist()[:rows],
        causal=causal,
        kv_starts=kv_starts,
        tree=batch.tree is not None,
    )


class NewOffsets:
    """The host form of `RaggedKV.kv_indptr`, read once a step however many layers pass the same tensor."""

    __slots__ = ("_offsets", "_tensor")

    def __init__(self) -> None:
        self._tensor: Tensor | None = None
        self._offsets: tuple[int, ...] = ()

    def read(self, new: RaggedKV) -> tuple[int, ...]:
        """The offsets of one layer's new tokens; syncs when it meets another tensor."""
        if new.kv_indptr is not self._tensor:
            self._offsets = tuple(new.kv_indptr.tolist())
            self._tensor = new.kv_indptr
        return self._offsets
