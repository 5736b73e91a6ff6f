"""Is a large step's answer right? Held against float64 on a few tokens of its first, middle and last rows.

In: what a kernel wrote and the step it was given. Out: a line of words on the first sample that is off, empty where
none is. The reference is the conformance kit's, and so are its bounds.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from backstamp.attention import Batch, KVIndex

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.testing.batches import MadeStep

__all__ = ["wrong_samples"]

#: Tokens at either end of a row; all of them where a row has no more.
_TOKENS: Final = 8


def wrong_samples(out: Tensor, step: MadeStep, dtype: str, accuracy: str) -> str:
    """What is wrong with `out [T, Hq, Dv]` on the sampled tokens."""
    from backstamp.testing.conformance.verdicts import ACCURACY_FACTORS, TOLERANCES, not_finite, off
    from backstamp.testing.reference import reference_attention

    if accuracy not in ACCURACY_FACTORS:
        return f"accuracy class {accuracy!r} has no bound; those that have are {', '.join(ACCURACY_FACTORS)}"
    offsets = step.batch.qo_indptr.tolist()
    for row, first, count in _samples(step.batch):
        start = offsets[row] + first
        share = slice(start, start + count)
        truth, _ = reference_attention(step.q[share], step.kv, step.layer, _part(step.batch, row, first, count))

        def where(token: int, row: int = row, first: int = first) -> str:
            return f"row {row}, query {first + token}"

        words = not_finite(out[share], where)
        words = words or off(out[share], truth, TOLERANCES[dtype], ACCURACY_FACTORS[accuracy], "output", where)
        if words:
            return words
    return ""


def _samples(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(row, first query, how many) of each sample."""
    offsets = batch.qo_indptr.tolist()
    for row in sorted({0, batch.num_rows // 2, batch.num_rows - 1}):
        length = offsets[row + 1] - offsets[row]
        if length <= 2 * _TOKENS:
            yield row, 0, length
        else:
            yield row, 0, _TOKENS
            yield row, length - _TOKENS, _TOKENS


def _part(batch: Batch, row: int, first: int, count: int) -> Batch:
    """Some tokens of one row as a batch of their own: what follows them is not there, as the causal rule has it."""
    offsets, kv_lens = batch.qo_indptr.tolist(), batch.kv_lens.tolist()
    length = offsets[row + 1] - offsets[row]
    kv_len = kv_lens[row] - length + first + count
    return replace(
        batch,
        num_rows=1,
        num_tokens=count,
        max_q_len=count,
        max_kv_len=kv_len,
        qo_indptr=batch.qo_indptr.new_tensor([0, count]),
        kv_lens=batch.kv_lens.new_tensor([kv_len]),
        index=_index(batch.index, row),
        qo_indptr_host=None,
        kv_lens_host=None,
        tree=None if batch.tree is None else replace(batch.tree, buffer=batch.tree.buffer[row : row + 1]),
    )


def _index(index: KVIndex, row: int) -> KVIndex:
    one = slice(row, row + 1)
    return replace(
        index,
        page_table=None if index.page_table is None else index.page_table[one],
        kv_indptr=None if index.kv_indptr is None else index.kv_indptr[row : row + 2],
        row_ids=None if index.row_ids is None else index.row_ids[one],
    )
