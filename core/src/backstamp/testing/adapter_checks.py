"""Conformance of an engine's adapter: what was asked for a draft reaches the draft, in every speculator family.

In: an adapter and the draft's plan. Out: nothing, or one error that lists every family whose draft is something else.

Source: vLLM #54826, #46770.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from backstamp.declarations import Phase
from backstamp.errors import BuiltMismatch, ContainerWithoutChildren, Unstamped
from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan
from backstamp.stamp import parts_of, read_stamp

__all__ = ["SPECULATOR_FAMILIES", "DraftAdapter", "check_draft_is_consumed"]

SPECULATOR_FAMILIES: Final = ("mtp", "eagle", "dflash")


class DraftAdapter(Protocol):
    """What an adapter offers to be checked: how it builds the draft of one speculator family from a plan."""

    def build_draft(self, family: str, plan: Plan) -> object | Mapping[Phase, object]:
        """The draft's loop: a container of steps, or the draft-extend backend where it takes a single step.

        An adapter that answers by phase is checked in every phase the plan runs.
        """
        ...


def check_draft_is_consumed(adapter: DraftAdapter, plan: Plan, families: Sequence[str] = SPECULATOR_FAMILIES) -> None:
    """Build the draft of every family and hold each stamp against the plan of its own phase.

    Raises:
        BuiltMismatch: a family whose draft, or one of whose steps, is not what the plan says; all are named.
    """
    running = {row.phase: row for row in plan.running}
    faults = [fault for family in families for fault in _family_faults(adapter, family, plan, running)]
    if faults:
        kernels = ", ".join(f"{row.kernel} for {phase}" for phase, row in running.items())
        raise BuiltMismatch(
            f"adapter {type(adapter).__name__}",
            needed=f"a draft of {kernels} in every speculator family",
            found="; ".join(faults),
            fix="Hand the draft's plan to every path that builds a draft",
        )


def _family_faults(adapter: DraftAdapter, family: str, plan: Plan, running: Mapping[Phase, PhasePlan]) -> Iterator[str]:
    built = adapter.build_draft(family, plan)
    if not isinstance(built, Mapping):
        phase: Phase = "draft_decode" if "draft_decode" in running else "draft_extend"
        yield from (f"{family}: {fault}" for fault in _faults(built, running[phase]))
        return
    for phase, row in running.items():
        if phase not in built:
            yield f"{family}: nothing for {phase}"
        else:
            yield from (f"{family}: {fault}" for fault in _faults(built[phase], row))


def _faults(built: object, row: PhasePlan) -> Iterator[str]:
    """What is wrong with the object of one phase, or with one of its steps."""
    try:
        parts = parts_of(built)
    except (BuiltMismatch, ContainerWithoutChildren) as cause:
        yield f"{type(built).__name__} for {row.phase}: {cause.found}"
        return
    wanted = [(group.kernel, group.plugin, group.library) for group in row.groups]
    faults: dict[str, None] = {}
    for item in parts:
        try:
            stamp = read_stamp(item)
        except Unstamped:
            faults[f"{type(item).__name__} without a stamp for {row.phase}"] = None
            continue
        fits = (stamp.kernel, stamp.plugin, stamp.library) in wanted and stamp.role == "draft"
        if not fits or row.phase not in stamp.phases:
            whose = f"{stamp.kernel} of {stamp.plugin.distribution} ({stamp.role})"
            faults[f"{whose}, built for {', '.join(stamp.phases)}, runs {row.phase}, planned as {row.kernel}"] = None
    yield from faults
