"""What a refusal means to the kit: the row does not do what it declares, or what nobody can declare, or never builds.

In: the ways a case may be run, how to run one, and whether a declaration could have said that it is served. Out: what
is wrong, or a `Skipped` with the kernel's own words. It never takes a refusal for an answer.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from backstamp.errors import UnsupportedBatch
from backstamp.testing.conformance.subject import Skipped

__all__ = ["faults_of_ways", "never_builds"]

Way = TypeVar("Way")


def faults_of_ways(ways: Iterable[Way], run: Callable[[Way], str], *, optional: bool, refused: bool = False) -> str:
    """What is wrong with the first way that the kernel does not refuse.

    `optional`: no declaration has a word for the case, so that a kernel may refuse it when it is called. `refused`: the
    row does not declare it, so that a kernel must.

    Raises:
        Skipped: an optional case that is refused in every way.
    """
    first: UnsupportedBatch | None = None
    for way in ways:
        try:
            faults = run(way)
        except UnsupportedBatch as refusal:
            first = first or refusal
            continue
        return "served, where the row does not declare it: it has to be refused" if refused else faults
    assert first is not None, "a case has a way to run it"
    if refused:
        return ""
    words = f"needs {first.needed}, got {first.found}"
    if optional:
        raise Skipped(f"refused, and no declaration has a word for it: {words}")
    return f"refused when it was called: {words}"


def never_builds(ways: Iterable[Way], build: Callable[[Way], object]) -> Exception | None:
    """Why a row's plainest case cannot be built at all: told once, not in each of its cases.

    A case that is refused in words, or that the kit cannot make, has a job of its own that says so.
    """
    for way in ways:
        try:
            build(way)
        except UnsupportedBatch:
            continue
        except Skipped:
            return None
        except Exception as cause:
            return cause
        return None
    return None
