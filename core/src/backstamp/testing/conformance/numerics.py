"""The numbers of every attention row: each declared value against float64, and what an engine does between steps.

In: a `Subject`. Out: jobs. A row that this machine cannot run is one skipped job with the reason; a declared case that
the resolver refuses where the row's plain one is served is a fault.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from backstamp.errors import BackstampError
from backstamp.stamp import parts_of, read_stamp
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.row_cases import UNCHECKED_FEATURES, base_case, cases_of
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Skipped, Subject

if TYPE_CHECKING:
    from backstamp.testing.batches import MadeStep

__all__ = ["DENSE_FAMILIES", "built_case", "numeric_jobs", "refused_here", "runs_here"]

#: Families whose rows attend over every key.
DENSE_FAMILIES: Final = frozenset({"mha", "mla"})


def numeric_jobs(subject: Subject) -> Iterator[Job]:
    """Every case of every dense attention row."""
    for name, solo in subject.solos:
        if solo.offer.family not in DENSE_FAMILIES:
            continue
        reason = runs_here(solo)
        if reason:
            yield Job("numerics", name, lambda reason=reason: _skip(reason))  # type: ignore[misc]
            continue
        for case in cases_of(solo.offer):
            title = f"{name}: {case.phase}, {case.name}"
            fix = "Correct the kernel, or do not declare it"
            yield Job("numerics", title, lambda solo=solo, case=case: _faults(solo, case), fix)  # type: ignore[misc]
        for feature in sorted(solo.offer.features & UNCHECKED_FEATURES):
            reason = f"the kit has no reference for {feature}"
            yield Job("numerics", f"{name}: {feature}", lambda reason=reason: _skip(reason))  # type: ignore[misc]


def refused_here(solo: Solo) -> str:
    """Why the resolver gives a row no work on this machine, or an empty string."""
    offer = solo.offer
    phases = [phase for phase in ("prefill", "decode", "verify") if phase in offer.phases]
    if not phases:
        return "it serves no phase of a target"
    try:
        solo.plan(base_case(offer, phases[0]))
    except BackstampError as refused:
        return f"needs {refused.needed}, got {refused.found}"
    return ""


def runs_here(solo: Solo) -> str:
    """Why nothing can be asked of a row on this machine, or an empty string: refused, or it does not even build.

    That it does not build is the stamps check's to say; two hundred findings more would say it again.
    """
    reason = refused_here(solo)
    if reason:
        return reason
    phase = next(phase for phase in ("prefill", "decode", "verify") if phase in solo.offer.phases)
    try:
        built_case(solo, base_case(solo.offer, phase))
    except Exception as cause:
        return f"it does not build, see the stamps check ({type(cause).__name__})"
    return ""


def built_case(solo: Solo, case: AttentionCase) -> tuple[object, MadeStep]:
    """The stamped backend of a case's phase, with the step it is to serve.

    Raises:
        BackstampError: the row does not serve the case. AssertionError: another kernel answers.
    """
    from backstamp.device_check import torch_device
    from backstamp.testing.conformance import attend

    plan = solo.plan(case)
    step = attend.make_step(case, torch_device(plan.device))
    backend = solo.build(case, plan, step.layer, step.kv.k.shape[0]).serving_attention_backend(case.phase)
    for part in parts_of(backend):
        assert read_stamp(part).kernel == solo.offer.kernel
    return backend, step


def _faults(solo: Solo, case: AttentionCase) -> str:
    from backstamp.testing.conformance import attend

    if case.graph and solo.host.device not in ("cuda", "rocm"):
        raise Skipped("CUDA graphs need a GPU")
    if case.dtype == "bf16" and solo.interpreted:
        # it computes bf16 on integers: what it answers says nothing of the kernel
        raise Skipped("Triton's interpreter computes bf16 wrongly; run it on a GPU")
    backend, step = built_case(solo, case)
    check = attend.faults_of_graph if case.graph else attend.faults_of_step
    return check(backend, case, step, solo.offer.accuracy)


def _skip(reason: str) -> str:
    raise Skipped(reason)
