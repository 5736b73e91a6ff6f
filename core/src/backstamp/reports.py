"""What was built, as JSON: the plan's own keys, filled from stamps read back from the objects.

In: built backends. Out: a dictionary for tools. Every kernel, plugin and library in it comes from a stamp, none from
the request.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from backstamp.construction import RunnerBackends
from backstamp.declarations import Phase
from backstamp.plan_rows import PhasePlan
from backstamp.stamp import is_container, read_stamp, steps_of

__all__ = ["BuiltReport", "PhaseReport", "built_report"]


class PhaseReport(TypedDict):
    """One phase: the plan's keys from the stamp, and the stamp of every draft step."""

    requested: str | None
    setting: str
    kernel: str | None
    plugin: dict[str, str]
    library: dict[str, str | None] | None
    source: str
    groups: list[dict[str, object]]
    verdicts: list[dict[str, object]]
    stamp: dict[str, object] | None
    steps: list[str]


class BuiltReport(TypedDict):
    """The plan's keys; only `phases` and the `linear` slot are read closely here."""

    phases: dict[str, PhaseReport]
    linear: dict[str, PhaseReport] | None


def built_report(backends: RunnerBackends) -> BuiltReport:
    """The JSON of a plan with every phase's kernel, plugin, library and source read from its built object.

    Raises:
        Unstamped: an object or step carries no stamp.
    """
    plan = backends.plan
    report = cast("BuiltReport", plan.as_json())
    _fill(report["phases"], plan.phases, backends.objects)
    if plan.linear is not None and report["linear"] is not None:
        _fill(report["linear"], plan.linear.rows, backends.linear_objects)
    return report


def _fill(
    reports: Mapping[str, PhaseReport], phases: Sequence[PhasePlan], objects: Mapping[tuple[Phase, int], object]
) -> None:
    """Fill the rows of one slot from its objects' stamps."""
    for phase in phases:
        row = reports[phase.phase]
        row["stamp"], row["steps"] = None, []
        if phase.kernel is None:
            continue
        stamps = [read_stamp(objects[phase.phase, at]) for at in range(len(phase.groups))]
        main = next((stamp for stamp in stamps if stamp.kernel == phase.kernel), stamps[0])
        row["kernel"] = main.kernel
        row["plugin"] = main.plugin.as_json()
        row["library"] = main.library.as_json() if main.library else None
        row["source"] = dict(main.sources)[phase.phase]
        row["stamp"] = main.as_json(phase.phase)
        built = objects[phase.phase, stamps.index(main)]
        row["steps"] = [read_stamp(step).kernel for step in steps_of(built)] if is_container(built) else []
        for group, stamp in zip(row["groups"], stamps, strict=True):
            group["kernel"], group["plugin"] = stamp.kernel, stamp.plugin.as_json()
            group["library"] = stamp.library.as_json() if stamp.library else None
