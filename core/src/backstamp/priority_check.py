"""Where the declared priority of kernels disagrees with what was measured on a machine.

In: a plan that was resolved with a machine's times. Out: a `Report`: a fault for each phase in which priority would
have taken a kernel that is slower than the fastest by more than two runs differ. It resolves and times nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

from backstamp.declarations import PHASES, Phase
from backstamp.findings import Finding, Outcome, Report
from backstamp.measured import MEASURED
from backstamp.plan import Plan
from backstamp.plan_rows import Timing

__all__ = ["NOISE", "priority_report"]

#: Two runs of one kernel differ by some hundredths; less than this is no disagreement.
NOISE: Final = 1.05
_RULE: Final = "priority-order"
_RULES: Final = MappingProxyType(
    {_RULE: "Where no record of times is given, auto takes the kernel of the highest declared priority."}
)


def priority_report(plan: Plan, tool: str = "backstamp tune --check") -> Report:
    """One outcome for each phase that runs and for each component that times decided."""
    outcomes = [_outcome(timing) for timing in plan.timings]
    told = {(timing.slot, timing.phase) for timing in plan.timings}
    for slot, rows in (("attention", plan.running), ("linear", plan.running_linear)):
        for row in rows:
            if (slot, row.phase) not in told:
                why = f"no time decided {row.phase}: its source is {row.source}, not {MEASURED}"
                why = "; ".join((why, *_unmeasured(plan, row.phase)))
                outcomes.append(Outcome(check="priority", name=f"{slot} {row.phase}", reason=why))
    return Report(tool=tool, subject=f"{plan.model} on {plan.host}", outcomes=tuple(outcomes), rules=_RULES)


def _unmeasured(plan: Plan, phase: Phase) -> Iterator[str]:
    """What the plan says is missing for a phase: texts that name another are of that one."""
    others = tuple(f"{other}: " for other in PHASES if other != phase)
    for warning in plan.warnings:
        if warning.code == "unmeasured" and not warning.text.startswith(others):
            yield warning.text


def _outcome(timing: Timing) -> Outcome:
    name = f"{timing.slot} {timing.phase}, {timing.component}"
    first, fastest = timing.by_priority, timing.kernel
    instead = timing.by_priority_microseconds
    if instead is None:
        note = f"{timing.phase}: {first} has the highest priority, and no time"
        finding = Finding("note", _RULE, first, note, "Run `backstamp tune` where it can run")
        return Outcome(check="priority", name=name, findings=(finding,))
    ratio = instead / timing.microseconds
    if ratio <= NOISE:
        return Outcome(check="priority", name=name)
    text = (
        f"{timing.phase}: needs the fastest kernel first, {fastest} at {timing.microseconds:.1f} us a layer, got "
        f"{first} by priority, {instead:.1f} us, {ratio:.2f} times that"
    )
    finding = Finding("fault", _RULE, first, text, "Resolve with --measurements here; declare priorities that follow")
    return Outcome(check="priority", name=name, findings=(finding,))
