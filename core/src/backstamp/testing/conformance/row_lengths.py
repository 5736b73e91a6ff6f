"""How long the rows of a step are: (query tokens, KV tokens with them) of each, where kernels go wrong.

In: an offer's pages and a phase. Out: rows. Nothing here knows a feature.

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.declarations import Offer, Phase
from backstamp.testing.conformance.cases import AttentionCase

__all__ = ["even_rows", "long_rows", "many_rows", "rows_about_pages"]


def rows_about_pages(offer: Offer, phase: Phase, page: int) -> tuple[tuple[int, int], ...]:
    """Rows about a page's boundary: the second is never empty, the third is a pad."""
    # pages of one token have every boundary anyway
    page = max(page, 8)
    pad = (0, offer.fill_value)
    if phase in ("decode", "draft_decode"):
        return ((1, 1), (1, page), pad, (1, page + 1), (1, 2 * page + 5), (1, 2 * page))
    if phase == "verify":
        return ((4, 4), (4, page), pad, (4, page + 1), (4, 2 * page + 5))
    if phase == "draft_extend":
        return ((1, page + 4), (3, 3), pad, (4, 2 * page))
    if "paged" not in offer.kv_forms or not offer.prefix:
        return ((page, page), (page + 1, page + 1), pad, (1, 1), (2 * page, 2 * page))
    return ((page, page), (page + 1, 2 * page + 1), pad, (1, 1), (1, page + 3), (0, page), (7, 2 * page))


def long_rows(base: AttentionCase) -> tuple[tuple[int, int], ...]:
    """More keys and queries than one tile or split takes."""
    lens = {"prefill": (70, 129, 33), "verify": (4, 4, 4), "draft_extend": (4, 2, 5)}.get(base.phase, (1, 1, 1))
    kv_lens = (70, 600, 257)
    if base.phase == "prefill" and not base.cached_prefix:
        return ((70, 70), (257, 257), (129, 129))
    return tuple((q, max(q, kv)) for q, kv in zip(lens, kv_lens, strict=True))


def many_rows(base: AttentionCase) -> tuple[tuple[int, int], ...]:
    """More rows than one block of a grid takes."""
    q_len = {"prefill": 2, "verify": 4, "draft_extend": 2}.get(base.phase, 1)
    more = 1 if base.cached_prefix else 0
    return tuple((q_len, q_len + more * (3 * row % 29)) for row in range(40))


def even_rows(phase: Phase, page: int) -> tuple[tuple[int, int], ...]:
    """Rows of one query length, as a graph is recorded for."""
    q_len = 1 if phase == "decode" else 4
    return tuple((q_len, q_len + 16 + (page + 7) * row) for row in range(4))
