"""The numbers of every row of the linear slot: each declared value against float64, outputs and states.

In: a `Subject`. Out: jobs. A row that this machine cannot run, and a family without a reference, is one skipped job
with the reason. A refusal of what is declared is a fault; of what no declaration has a word for, a skipped job.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from backstamp.errors import BackstampError
from backstamp.model import LINEAR_FAMILIES
from backstamp.testing.conformance.linear_cases import LinearCase
from backstamp.testing.conformance.linear_row_cases import LINEAR_PHASES, linear_base_case, linear_cases_of, ways_of
from backstamp.testing.conformance.linear_solo import LinearSolo
from backstamp.testing.conformance.refusals import faults_of_ways, never_builds
from backstamp.testing.conformance.row_cases import UNCHECKED_FEATURES
from backstamp.testing.conformance.subject import Job, Skipped, Subject

__all__ = ["linear_numeric_jobs", "linear_runs_here"]

_FAMILIES: Final = frozenset({"gdn", "kda"})
_FIX: Final = "Correct the kernel, or do not declare it"


def linear_numeric_jobs(subject: Subject) -> Iterator[Job]:
    """Every case of every row of the linear slot."""
    for name, solo in subject.solos:
        offer = solo.offer
        if offer.family not in LINEAR_FAMILIES:
            continue
        alone = LinearSolo(found=solo.found, offer=offer, host=solo.host)
        reason = linear_runs_here(alone)
        if reason:
            yield Job("numerics", name, partial(_skip, reason))
            continue
        cause = never_builds(ways_of(_first_case(alone)), alone.build)
        if cause is not None:
            yield Job("numerics", f"{name}: build", partial(_raise, cause), _FIX)
            continue
        for case in linear_cases_of(offer):
            yield Job("numerics", f"{name}: {case.phase}, {case.name}", partial(_faults, alone, case), _FIX)
        for feature in sorted(offer.features & UNCHECKED_FEATURES):
            reason = f"the kit has no reference for {feature}: the call contract does not say where they go"
            yield Job("numerics", f"{name}: {feature}", partial(_skip, reason))
        for layout in sorted(set(offer.state_layouts) - {"vk", "kv"}):
            yield Job("numerics", f"{name}: states {layout}", partial(_skip, f"the kit knows no states {layout!r}"))


def linear_runs_here(solo: LinearSolo) -> str:
    """Why this machine, or the kit, cannot run a row at all, or an empty string."""
    offer = solo.offer
    if offer.family not in _FAMILIES:
        return f"the kit has no reference for {offer.family}"
    if not offer.phases & set(LINEAR_PHASES):
        return "it serves no phase of the slot"
    try:
        solo.plan(_first_case(solo))
    except BackstampError as refused:
        return f"needs {refused.needed}, got {refused.found}"
    return ""


def _first_case(solo: LinearSolo) -> LinearCase:
    offer = solo.offer
    return linear_base_case(offer, next(phase for phase in LINEAR_PHASES if phase in offer.phases))


def _faults(solo: LinearSolo, case: LinearCase) -> str:
    if case.graph and solo.host.device not in ("cuda", "rocm"):
        raise Skipped("CUDA graphs need a GPU")
    run = partial(_faults_of_way, solo)
    return faults_of_ways(ways_of(case), run, optional=case.optional, refused=case.refused)


def _faults_of_way(solo: LinearSolo, case: LinearCase) -> str:
    from backstamp.testing.conformance import linear_attend

    if solo.interpreted and "bf16" in (case.dtype, case.state_dtype):
        # it computes bf16 on integers: what it answers says nothing of the kernel
        raise Skipped("Triton's interpreter computes bf16 wrongly; run it on a GPU")
    backend, device = solo.build(case)
    made = linear_attend.make_linear_case(case, device)
    run = linear_attend.outcome_of_graph if case.graph else linear_attend.outcome_of
    return linear_attend.wrong_linear(run(backend, case, made), case, solo.offer.accuracy)


def _raise(cause: Exception) -> str:
    raise cause


def _skip(reason: str) -> str:
    raise Skipped(reason)
