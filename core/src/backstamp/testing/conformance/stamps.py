"""The stamp equals the declaration on every path: target, draft, each step, every key that leads to a row.

In: a `Subject`. Out: jobs. Everything is built by the row's real factory for this machine and read back; a leaf that
answers an alias, another name, or a container that hides its steps is refused by construction, and told here.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from backstamp.catalogue import build_catalogue
from backstamp.declarations import PHASES
from backstamp.errors import BackstampError
from backstamp.installation import library_name
from backstamp.stamp import Stamp, parts_of, read_stamp
from backstamp.testing.conformance.cases import AttentionCase
from backstamp.testing.conformance.numerics import DENSE_FAMILIES, built_case, refused_here
from backstamp.testing.conformance.row_cases import base_case
from backstamp.testing.conformance.rows import skipped_job
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Subject

__all__ = ["stamp_jobs"]


def stamp_jobs(subject: Subject) -> Iterator[Job]:
    """A job a row and phase, and one a key."""
    for name, solo in subject.solos:
        dense = solo.offer.family in DENSE_FAMILIES
        reason = refused_here(solo) if dense else f"rows of family {solo.offer.family} are held by numerics"
        if reason:
            yield skipped_job("stamps", name, reason)
            continue
        for phase in (phase for phase in PHASES if phase in solo.offer.all_phases):
            case = base_case(solo.offer, phase)
            yield Job("stamps", f"{name}: {phase}", partial(_stamp_faults, solo, case))
            if phase == "draft_decode":
                longer = replace(case, num_steps=5)
                yield Job("stamps", f"{name}: {phase}, five steps", partial(_stamp_faults, solo, longer))
    for alias in subject.found.declared.aliases:
        run_key = lambda key=alias.key, slot=alias.slot: _key_faults(subject, key, slot)  # noqa: E731
        yield Job("stamps", f"key {alias.key}", run_key, "List names of kernels that some plugin declares")


def _stamp_faults(solo: Solo, case: AttentionCase) -> str:
    try:
        backend, _ = built_case(solo, case)
    except BackstampError as refused:
        return refused.message
    faults = [fault for part in parts_of(backend) for fault in _unlike(read_stamp(part), solo, case)]
    return "; ".join(dict.fromkeys(faults))


def _unlike(stamp: Stamp, solo: Solo, case: AttentionCase) -> Iterator[str]:
    """What of a stamp is not what the row declares."""
    offer = solo.offer
    library = stamp.library.distribution if stamp.library else None
    role = "draft" if case.phase.startswith("draft") else "target"
    for what, wanted, found in (
        ("kernel", offer.kernel, stamp.kernel),
        ("slot", offer.slot, stamp.slot),
        ("role", role, stamp.role),
        ("plugin", solo.found.plugin.distribution, stamp.plugin.distribution),
        ("library", library_name(offer.requires[0]) if offer.requires else None, library),
    ):
        if wanted != found:
            yield f"stamp's {what} needs {wanted!r}, got {found!r}"
    if case.phase not in stamp.phases:
        yield f"stamp's phases need {case.phase}, got {', '.join(stamp.phases)}"


def _key_faults(subject: Subject, key: str, slot: str) -> str:
    """A key that only names others is never a kernel, and one of its own plugin's kernels is among those it names."""
    catalogue = build_catalogue(subject.discovery)
    alias = next(item for item in subject.found.declared.aliases if (item.key, item.slot) == (key, slot))
    own = {offer.kernel for offer in subject.found.declared.offers if offer.slot == slot}
    if key in own and key not in alias.kernels:
        return f"{key!r} is a kernel of this plugin, and a key that leads to {', '.join(alias.kernels)} instead"
    known = {name for at, name in catalogue.rows if at == slot}
    if not set(alias.kernels) & (known | own):
        return f"none of {', '.join(alias.kernels)} is a kernel that an installed plugin declares"
    return ""
