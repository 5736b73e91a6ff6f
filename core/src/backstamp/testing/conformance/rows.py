"""Which rows of a plugin a check can be made of on this machine, and the job that says why one is not.

In: a `Subject`. Out: every row with the reason it is left out, empty where it is not. A row that is left out is a
skipped job, never nothing at all.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from backstamp.testing.conformance.numerics import DENSE_FAMILIES, runs_here
from backstamp.testing.conformance.solo import Solo
from backstamp.testing.conformance.subject import Job, Skipped, Subject

__all__ = ["each_row", "skipped_job"]


def each_row(subject: Subject) -> Iterator[tuple[str, Solo, str]]:
    """Every row, by name, with why the checks of dense attention cannot be made of it here."""
    for name, solo in subject.solos:
        dense = solo.offer.family in DENSE_FAMILIES
        other = f"rows of family {solo.offer.family} are held by numerics, which reads their stamps too"
        yield name, solo, runs_here(solo) if dense else other


def skipped_job(check: str, name: str, reason: str) -> Job:
    """The job that stands for a row a check is not made of."""
    return Job(check, name, partial(_skip, reason))


def _skip(reason: str) -> str:
    raise Skipped(reason)
