"""Which dtype one stored sink parameter has, and which kernels read it converted.

In: a plan, or a runner built from one. Out: a `SinkChoice`. The parameter belongs to the model, and every phase that
has sinks reads it: a kernel that wants another dtype gets it converted in `plan()`, into a buffer of its own whose
address never changes (`backstamp.sink_buffers`). It never lets one kernel's rounding reach another in silence.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from backstamp.errors import ConflictingRequest, Unresolved
from backstamp.halves import Asked, plan_of
from backstamp.plan_rows import SinkNeeds
from backstamp.words import read_as, widens

__all__ = ["SinkChoice", "SinkRead", "stored_sinks"]

#: (phase, kernel, needs) of every group of layers with sinks.
Needs: TypeAlias = Sequence[tuple[str, str, SinkNeeds]]


class SinkRead(NamedTuple):
    """The dtype one phase's kernel reads sinks in."""

    phase: str
    kernel: str
    dtype: str


class SinkChoice(NamedTuple):
    """The dtype to store sinks in, what each phase reads, and why."""

    stored: str
    reads: tuple[SinkRead, ...]
    reason: str

    @property
    def converting(self) -> tuple[SinkRead, ...]:
        """The phases whose kernel reads another dtype than the stored one, and so a converted buffer."""
        return tuple(read for read in self.reads if read.dtype != self.stored)


def stored_sinks(of: Asked) -> SinkChoice:
    """The dtype to store the sinks of a runner in, so that every phase reads what the model says.

    Of the dtypes nobody loses anything by, the one that the fewest kernels convert, the model's own first. Where all
    kernels read one dtype that is narrower than the model's, and declare it, the model's is stored and they round it.

    Source: SGLang #34264, #34917; models/gpt_oss.py, where fp32 is stored for a base field of trtllm_mha alone.

    Raises:
        Unresolved: no plan, or none of its layers has sinks. ConflictingRequest: two kernels cannot be served without
        loss; both and their dtypes are named. Unstamped, BuiltMismatch: a runner whose objects are not those of its
        plan.
    """
    plan = plan_of(of)
    needs = [
        (row.phase, group.kernel, group.sinks)
        for row in plan.running
        for group in row.groups
        if group.sinks is not None
    ]
    who = f"sinks of {plan.model} ({plan.role})"
    if not needs:
        raise Unresolved(who, needed="layers with sinks", found="none that a phase of this plan runs")
    models = sorted({dtype for _, _, sinks in needs for dtype in sinks.stored})
    lossless = [choice for dtype in _candidates(needs, models) if (choice := _lossless(needs, dtype)) is not None]
    if lossless:
        # the first of those that are equal, and the model's own come first
        return min(lossless, key=lambda choice: len(_kernels(choice)))
    rounded = {read_as(sinks.reads, sinks.conversion, models[0]) for _, _, sinks in needs}
    if len(models) == 1 and len(rounded) == 1 and (dtype := rounded.pop()) is not None:
        reads = tuple(dict.fromkeys(SinkRead(phase, kernel, dtype) for phase, kernel, _ in needs))
        return SinkChoice(models[0], reads, f"every kernel rounds {models[0]} to {dtype}, as it declares")
    said = dict.fromkeys(f"{kernel} reads {', '.join(sinks.reads)} ({phase})" for phase, kernel, sinks in needs)
    raise ConflictingRequest(
        who,
        needed=f"one stored dtype that every kernel reads without loss of the model's {' and '.join(models)}",
        found=" and ".join(said),
        fix="Choose kernels that read one dtype, or one that widens what the other reads",
    )


def _candidates(needs: Needs, models: list[str]) -> list[str]:
    """Dtypes the model has or some kernel reads, each of which holds what the model stores; the model's first."""
    known = dict.fromkeys([*models, *(dtype for _, _, sinks in needs for dtype in sinks.reads)])
    return [dtype for dtype in known if all(own == dtype or widens(own, dtype) for own in models)]


def _lossless(needs: Needs, stored: str) -> SinkChoice | None:
    """What every phase reads of sinks stored so; None where one would lose by it."""
    reads: dict[SinkRead, None] = {}
    for phase, kernel, sinks in needs:
        dtype = read_as(sinks.reads, sinks.conversion, stored)
        if dtype is None or (dtype != stored and not widens(stored, dtype)):
            return None
        reads[SinkRead(phase, kernel, dtype)] = None
    choice = SinkChoice(stored, tuple(reads), "")
    kernels = _kernels(choice)
    reason = f"{', '.join(kernels)} widens {stored}" if kernels else f"every kernel reads {stored}"
    return choice._replace(reason=reason)


def _kernels(choice: SinkChoice) -> list[str]:
    return list(dict.fromkeys(read.kernel for read in choice.converting))
