"""Eighth step of the flow: what the chosen rows must agree on.

In: the rows chosen for every phase. Out: page size and its source, KV layout, graph level, converted parameters. A
disagreement is an error naming both kernels; nothing is adjusted in silence.

.. versionadded:: 0.1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from backstamp.declarations import GRAPH_LEVELS, GraphLevel, PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest
from backstamp.graphs import level_of
from backstamp.hostfit import HostRow
from backstamp.launch import Launch
from backstamp.plan_rows import Conversion, PhasePlan
from backstamp.selection import Part
from backstamp.words import read_as

__all__ = [
    "common_layout", "common_page_size", "conversions_of", "graph_level", "kv_dtype_of_rows", "layout_of",
    "page_size_of", "share_a_cache",
]  # fmt: skip


def share_a_cache(parts: Sequence[Part], engine: EngineFacts) -> bool:
    """Whether what was chosen has a layout, a page size and a reading of the KV dtype in common, and those the cache
    has where it is fixed."""
    # phases mostly share their rows, and a row agrees with itself
    apart = list({id(part.row): part for part in parts}.values())
    rows = [part.row for part in apart]
    if common_layout(rows, engine.layouts) is None or common_page_size(rows) is None:
        return False
    fixed = engine.page_size
    if fixed is not None and not all(row.offer.page_sizes.accepts(fixed) for row in rows):
        return False
    return len(rows) == 1 or len({_kv_dtype(part) for part in apart}) == 1


def kv_dtype_of_rows(parts: Sequence[Part], who: str) -> str:
    """The KV dtype the chosen rows read: the launch's, or their own reading of the operator's word for it.

    Raises:
        ConflictingRequest: two kernels read the word in two ways; both are named.
    """
    reads = {_kv_dtype(part): part for part in reversed(parts)}
    if len(reads) > 1:
        found = " and ".join(f"{part.row.offer.kernel} reads {dtype}" for dtype, part in sorted(reads.items()))
        needed = f"kernels that read {parts[0].asked.question.kv_name} as one KV dtype, because they share a cache"
        raise ConflictingRequest(who, needed=needed, found=found, fix="Choose other kernels, or name the dtype itself")
    return next(iter(reads))


def _kv_dtype(part: Part) -> str:
    question = part.asked.question
    return part.row.offer.kv_dtype_names.get(question.kv_name, question.kv_dtype)


def common_layout(rows: Sequence[HostRow], offered: frozenset[str]) -> str | None:
    """The first layout id every row reads and the engine can have, best first as the first row ranks them."""
    for layout in rows[0].offer.layouts:
        if layout in offered and all(layout in row.offer.layouts for row in rows):
            return layout
    return None


def layout_of(rows: Sequence[HostRow], engine: EngineFacts, who: str) -> str:
    """The layout of a shared cache.

    Raises:
        ConflictingRequest: the kernels read no common layout; what each reads is told.
    """
    layout = common_layout(rows, engine.layouts)
    if layout is not None:
        return layout
    reads = dict.fromkeys(f"{row.offer.kernel} reads {', '.join(row.offer.layouts)}" for row in rows)
    raise ConflictingRequest(
        who,
        needed="kernels that read one KV layout, because they share a cache",
        found=" and ".join(reads),
        fix="Choose kernels with a layout in common",
    )


def common_page_size(rows: Sequence[HostRow]) -> int | None:
    """A page size every row reads: a preferred one where possible."""
    offers = [row.offer.page_sizes for row in rows]
    first = offers[0].preferred
    if all(pages.accepts(first) for pages in offers):
        return first
    candidates = [pages.preferred for pages in offers]
    candidates += [size for pages in offers for size in pages.exact]
    candidates.append(math.lcm(*(pages.multiple_of or 1 for pages in offers)))
    for size in candidates:
        if all(pages.accepts(size) for pages in offers):
            return size
    return None


def page_size_of(rows: Sequence[HostRow], launch: Launch, engine: EngineFacts, who: str) -> tuple[int, str]:
    """The page size in tokens and where it comes from.

    Raises:
        ConflictingRequest: the chosen kernels share no page size, what each reads is listed; or the engine has fixed
            another than the operator asked for.
    """
    if launch.page_size is not None:
        if engine.page_size not in (None, launch.page_size):
            raise ConflictingRequest(
                who,
                needed=f"page size {engine.page_size}, which {engine.name} has fixed",
                found=f"--page-size {launch.page_size}",
                fix="Leave --page-size out",
            )
        return launch.page_size, launch.source_of("page_size")
    if engine.page_size is not None:
        return engine.page_size, f"engine {engine.name}"
    size = common_page_size(rows)
    if size is None:
        reads = "; ".join(f"{row.offer.kernel} reads {row.offer.page_sizes.describe()}" for row in _unlike(rows))
        raise ConflictingRequest(who, needed="kernels that read one page size", found=reads, fix="Choose other kernels")
    owner = next((row.offer.kernel for row in rows if row.offer.page_sizes.preferred == size), None)
    return size, f"kernel {owner}" if owner is not None else "common to the chosen kernels"


def graph_level(parts: Iterable[Part], engine: EngineFacts) -> GraphLevel:
    """The strongest CUDA-graph level the engine wants and every captured row has in this launch."""
    wanted = GRAPH_LEVELS.index(engine.graph)
    return GRAPH_LEVELS[min([wanted, *(level_of(part.row, part.asked.question) for part in parts)])]


def conversions_of(rows: Iterable[PhasePlan]) -> tuple[Conversion, ...]:
    """Where a chosen kernel reads the stored sinks in a dtype of its own."""
    found: dict[Conversion, None] = {}
    for row in rows:
        for group in row.groups:
            needs = group.sinks
            if needs is None:
                continue
            for stored in needs.stored:
                wanted = read_as(needs.reads, needs.conversion, stored)
                if wanted is not None and wanted != stored:
                    found[Conversion("sinks", row.phase, group.kernel, stored, wanted)] = None
    return tuple(found)


def _unlike(rows: Sequence[HostRow]) -> list[HostRow]:
    seen: dict[tuple[str, PageSizes], HostRow] = {}
    for row in rows:
        # two rows of one kernel may read unlike pages
        seen.setdefault((row.offer.kernel, row.offer.page_sizes), row)
    return list(seen.values())
