"""Masks of the rows that meet one condition which no single declared value settles.

In: a `SlotIndex` and a `Question`. Out: a bit mask over the index's rows. It refuses nothing and words nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from backstamp.index import SlotIndex, bits_of
from backstamp.words import real_dtypes

if TYPE_CHECKING:
    from backstamp.evaluation import Question

__all__ = ["aligned", "any_of", "installed", "kv_mask", "sinks_fit", "sinks_mask"]


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
        mask for dtypes, conversion, mask in index.sinks if sinks_fit(dtypes, conversion, stored, dtype) != "no"
    )


def sinks_fit(
    dtypes: frozenset[str], conversion: str, stored: str, dtype: str
) -> Literal["as stored", "converted", "no"]:
    """How a row with these declared dtypes takes sinks stored in `stored`, for queries of `dtype`."""
    wanted = real_dtypes(dtypes, dtype)
    if stored in wanted:
        return "as stored"
    # bf16 and fp16 are both exact in fp32; nothing else is wider
    widens = stored in ("bf16", "fp16") and "fp32" in wanted
    return "converted" if conversion == "any" or (conversion == "lossless" and widens) else "no"


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
