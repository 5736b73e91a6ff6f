"""The numbers of every sparse row: each declared value against the reference, over choices with everything in them.

In: a `Subject`. Out: jobs. A row that this machine cannot run is one skipped job with the reason. A refusal of what is
declared is a fault; of what no declaration has a word for, a skipped job.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from backstamp.declarations import PHASES
from backstamp.device_check import torch_device
from backstamp.errors import BackstampError
from backstamp.stamp import parts_of, read_stamp
from backstamp.testing.conformance.refusals import faults_of_ways, never_builds
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.sparse_cases import (
    SPARSE_FAMILIES,
    SparseCase,
    sparse_base_case,
    sparse_cases_of,
    sparse_ways_of,
)
from backstamp.testing.conformance.subject import Job, Skipped, Subject

if TYPE_CHECKING:
    from backstamp.testing.conformance.sparse_attend import SparseStep

__all__ = ["sparse_numeric_jobs", "sparse_runs_here"]

_FIX: Final = "Correct the kernel, or do not declare it"
#: Features that the references of a family compute.
_KNOWN: Final = {
    "sparse_mla": frozenset({"indices", "lse", "topk", "non_causal"}),
    "csa": frozenset({"indices", "lse", "topk", "window", "sinks"}),
}


def sparse_numeric_jobs(subject: Subject) -> Iterator[Job]:
    """Every case of every sparse row."""
    for name, solo in subject.solos:
        offer = solo.offer
        if offer.family not in SPARSE_FAMILIES:
            continue
        reason = sparse_runs_here(solo)
        if reason:
            yield Job("numerics", name, partial(_skip, reason))
            continue
        cause = never_builds(sparse_ways_of(_first_case(solo)), partial(_built, solo))
        if cause is not None:
            yield Job("numerics", f"{name}: build", partial(_raise, cause), _FIX)
            continue
        for case in sparse_cases_of(offer):
            yield Job("numerics", f"{name}: {case.phase}, {case.name}", partial(_faults, solo, case), _FIX)
        for feature in sorted(offer.features - _KNOWN[offer.family]):
            reason = f"the kit has no reference for {feature} of sparse attention"
            yield Job("numerics", f"{name}: {feature}", partial(_skip, reason))


def sparse_runs_here(solo: Solo) -> str:
    """Why this machine cannot run a row at all, or an empty string."""
    if not solo.offer.all_phases:
        return "it serves no phase"
    try:
        solo.plan(_first_case(solo))
    except BackstampError as refused:
        return f"needs {refused.needed}, got {refused.found}"
    return ""


def _first_case(solo: Solo) -> SparseCase:
    offer = solo.offer
    return sparse_base_case(offer, next(phase for phase in PHASES if phase in offer.all_phases))


def _faults(solo: Solo, case: SparseCase) -> str:
    if case.graph and solo.host.device not in ("cuda", "rocm"):
        raise Skipped("CUDA graphs need a GPU")
    if case.dtype == "bf16" and solo.interpreted:
        # it computes bf16 on integers: what it answers says nothing of the kernel
        raise Skipped("Triton's interpreter computes bf16 wrongly; run it on a GPU")
    return faults_of_ways(sparse_ways_of(case), partial(_faults_of_way, solo), optional=case.optional)


def _faults_of_way(solo: Solo, case: SparseCase) -> str:
    from backstamp.testing.conformance import sparse_attend

    backend, made = _built(solo, case)
    return sparse_attend.faults_of_sparse(backend, case, made, solo.offer.accuracy)


def _built(solo: Solo, case: SparseCase) -> tuple[object, SparseStep]:
    """The stamped backend of a case's phase, with the step it is to serve."""
    from backstamp.testing.conformance import sparse_attend

    plan = solo.plan(case)
    made = sparse_attend.make_sparse_step(case, torch_device(plan.device))
    built = solo.build(case, plan, made.step.layer, made.step.kv.k.shape[0])
    backend = built.serving_attention_backend(case.phase)
    for part in parts_of(backend):
        assert read_stamp(part).kernel == solo.offer.kernel
    return backend, made


def _raise(cause: Exception) -> str:
    raise cause


def _skip(reason: str) -> str:
    raise Skipped(reason)
