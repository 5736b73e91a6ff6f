"""Masks of the rows that meet one condition which no single declared value settles.

In: a `SlotIndex` and a `Question`. Out: a bit mask over the index's rows, and what one row reads of stored sinks. It
refuses nothing and words nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from backstamp.index import SlotIndex, bits_of
from backstamp.plan_rows import SinkNeeds
from backstamp.words import read_as, real_dtypes

if TYPE_CHECKING:
    from backstamp.declarations import Offer
    from backstamp.evaluation import Question

__all__ = ["aligned", "any_of", "installed", "kv_mask", "sink_needs", "sinks_mask"]


def any_of(masks: Iterator[int]) -> int:
    """The rows of any of these masks."""
    joined = 0
    for mask in masks:
        joined |= mask
    return joined


def kv_mask(index: SlotIndex, question: Question) -> int:
    """Rows that read the launch's KV dtype, by its canonical name or by their own reading of the operator's."""
    mask = index.has["kv_dtype"].get(question.kv_dtype, 0)
    if question.kv_dtype == question.dtype:
        mask |= index.has["kv_dtype"].get("same", 0)
    # rows that read the operator's name in their own way answer for themselves
    for at in bits_of(index.renamed):
        offer = index.rows[at].offer
        kv = offer.kv_dtype_names.get(question.kv_name, question.kv_dtype)
        reads = kv in real_dtypes(offer.kv_dtypes, question.dtype)
        mask = mask | 1 << at if reads else mask & ~(1 << at)
    return mask


def sinks_mask(index: SlotIndex, stored: str, dtype: str) -> int:
    """Rows that read sinks stored in a dtype, or convert them on the way in."""
    return any_of(
        mask
        for dtypes, conversion, mask in index.sinks
        if read_as(real_dtypes(dtypes, dtype), conversion, stored) is not None
    )


def sink_needs(offer: Offer, question: Question) -> SinkNeeds | None:
    """What a row reads of the sinks of a question's layers; None where they have none."""
    if not question.sinks:
        return None
    reads = tuple(sorted(real_dtypes(offer.sink_dtypes, question.dtype)))
    return SinkNeeds(question.sinks, reads, offer.sink_conversion)


def aligned(index: SlotIndex, question: Question) -> int:
    """Rows whose declared prefill alignment the launch's chunk keeps; an undeclared one is not kept."""
    chunk = question.chunk_tokens
    return any_of(mask for tokens, mask in index.alignments if chunk is None or chunk <= 0 or chunk % tokens == 0)


def installed(index: SlotIndex, question: Question) -> int:
    """Rows that lack nothing of their installation but what was bypassed."""
    if not question.bypass:
        return index.installed
    bypassed = (
        1 << at for at, row in enumerate(index.rows) if row.installations and row.lacks(question.bypass) is None
    )
    return index.installed | any_of(bypassed)
