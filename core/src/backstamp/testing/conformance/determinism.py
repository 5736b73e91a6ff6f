"""The same bits for a row whatever shares its batch, and wherever its prompt is cut: rows that declare it.

In: a `Subject`. Out: jobs. Each row of a step is run alone, with the others and in reverse; a prompt is run whole, and
cut at multiples of the declared alignment.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.contract import built_part, cut_case, same_bits, tokens_of
from backstamp.testing.conformance.row_cases import base_case, cases_of
from backstamp.testing.conformance.rows import each_row, skipped_job
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Skipped, Subject

__all__ = ["determinism_jobs"]

_CASES: Final = ("plain", "bf16", "fp16", "window", "all features", "long rows", "many rows")
_FIX: Final = "Make a row's sums independent of its neighbours, or do not declare deterministic"
_CUT: Final = "Declare the alignment at which its sums are cut, or do not declare deterministic"
#: Tokens of the longest prompt that is cut: an alignment beyond it is told as skipped.
_MOST_TOKENS: Final = 1024


def determinism_jobs(subject: Subject) -> Iterator[Job]:
    """Every row that declares it, case by case, and the cut of its prompts."""
    for name, solo, reason in each_row(subject):
        if not solo.offer.deterministic:
            continue
        if reason:
            yield skipped_job("determinism", name, reason)
            continue
        for case in cases_of(solo.offer):
            if case.name in _CASES and not case.phase.startswith("draft"):
                yield Job("determinism", f"{name}: {case.phase}, {case.name}", partial(_same_rows, solo, case), _FIX)
        if "prefill" in solo.offer.phases and solo.offer.prefix:
            yield Job("determinism", f"{name}: prefill, cut at its alignment", partial(_same_cuts, solo), _CUT)


def _same_rows(solo: Solo, case: AttentionCase) -> str:
    """Each row alone, and all in reverse, against all in order."""
    from backstamp.testing.conformance.attend import rows_of, serve

    backend, step = built_part(solo, case)
    together = serve(backend, case, step, backend.plan(step.batch))
    live = [row for row, (q, _) in enumerate(case.rows) if q]
    # a few of many: what one of forty is alone, the others are too
    for rows in ([row] for row in live[:8]):
        alone = rows_of(step, rows)
        out = serve(backend, cut_case(case, rows), alone, backend.plan(alone.batch))
        if not same_bits(out, tokens_of(together, step, rows)):
            return f"row {rows[0]} has other bits alone than among {len(case.rows)} rows"
    turned = list(reversed(range(len(case.rows))))
    made = rows_of(step, turned)
    out = serve(backend, cut_case(case, turned), made, backend.plan(made.batch))
    return "" if same_bits(out, tokens_of(together, step, turned)) else "the same rows in reverse have other bits"


def _same_cuts(solo: Solo) -> str:
    """One prompt whole, and in chunks that begin at multiples of the alignment, over the same cache."""
    from backstamp.testing.conformance.attend import make_step, serve

    alignment = solo.offer.alignment_tokens or 1
    if alignment * 2 > _MOST_TOKENS:
        raise Skipped(f"a prompt cut at {alignment} tokens is longer than the kit runs")
    # where any cut is the same, cut within a page and a tile
    cut = alignment if alignment > 1 else 37
    length = 2 * cut + 5
    case = replace(base_case(solo.offer, "prefill"), rows=((length, length), (3, length)))
    backend, step = built_part(solo, case)
    whole = serve(backend, case, step, backend.plan(step.batch))[:length]
    for start in (cut, 2 * cut):
        rest = replace(case, rows=((length - start, length), (3, length)))
        part = make_step(rest, str(step.q.device))
        # the rest of the same prompt: its own queries, the same cache under the same pages
        part = replace(part, kv=step.kv, batch=replace(part.batch, index=step.batch.index), layer=step.layer)
        part.q[: length - start].copy_(step.q[start:length])
        out = serve(backend, rest, part, backend.plan(part.batch))[: length - start]
        if not same_bits(out, whole[start:]):
            return f"a prompt of {length} tokens has other bits from token {start} on where a chunk begins there"
    return ""
