"""One option a phase, so that all phases of a runner share one cache.

In: the `Facts` of one resolve. Out: a `PhaseWork` in which every phase is taken. Options are tried in their own order,
the first that fits is taken, and taken back only where a later phase then finds none. It ranks nothing itself.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backstamp.component_choice import check_components
from backstamp.declarations import Phase
from backstamp.errors import NoKernel, Refused
from backstamp.facts import Facts
from backstamp.phase_choice import PhaseWork

__all__ = ["choose_phases"]

#: Options tried before the first reason is told: real catalogues settle at once, contrived ones must not hang.
_MOST_TRIES: Final = 2000


def choose_phases(facts: Facts) -> PhaseWork:
    """Take every phase of a runner.

    Raises:
        BackstampError: nothing serves a phase, with every reason; or nothing that serves can share a cache with the
        first options of the other phases.
    """
    work = PhaseWork(facts)
    check_components(facts, [item.component for item in (*work.main, *work.others)])
    order = work.order()
    if _take_all(work, order, [_MOST_TRIES]):
        return work
    # nothing fits together: the first options are taken as they come, and what they disagree on is the error
    work = PhaseWork(facts, greedy=True)
    for phase in order:
        work.take(phase, next(work.options(phase)))
    return work


def _take_all(work: PhaseWork, phases: Sequence[Phase], tries: list[int]) -> bool:
    """Take these phases, each by its first option with which the rest can be taken."""
    if not phases:
        return True
    phase, first = phases[0], None
    options = work.options(phase)
    while tries[0] > 0:
        tries[0] -= 1
        try:
            option = next(options, None)
        except Refused:
            # verify follows the halves: another choice of theirs may verify, if they are free to choose
            if phase != "verify" or not _is_free(work):
                raise
            return False
        if option is None:
            return False
        first = first or option
        if not work.fits(option):
            continue
        try:
            work.take(phase, option, first=first)
            if _take_all(work, phases[1:], tries):
                return True
        except NoKernel:
            if not work.others:
                raise
        work.drop(phase)
    return False


def _is_free(work: PhaseWork) -> bool:
    return any(choice.free for _, choice in work.chosen.values())
