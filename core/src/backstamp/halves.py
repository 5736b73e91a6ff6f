"""What every decision asks first: a resolved plan or a stamped runner, one of its halves, and named kernels.

In: a plan or a runner, a half, kernel names. Out: the rows that answer for it, and a `Decision` with its reason. It
reads what was resolved, never a field somebody typed; asking about no backend is an error, never a yes and never a no.

A half is the layers of the runner's main model: a vision tower of another kernel takes no feature from the decoder.

.. versionadded:: 0.2
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from backstamp.construction import RunnerBackends
from backstamp.declarations import Half
from backstamp.errors import BadInput, Unresolved
from backstamp.forward import phase_named
from backstamp.plan import Plan
from backstamp.plan_rows import GroupPlan, PhasePlan
from backstamp.stamp import verify_consumed

__all__ = [
    "Asked", "Decision", "any_phase_runs", "both_halves_run", "half_kernel", "half_row", "half_runs", "kernels_asked",
    "main_groups", "named", "named_rows", "no_backend", "pair", "plan_of",
]  # fmt: skip

Asked: TypeAlias = "Plan | RunnerBackends"


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer and the fact it rests on; true where the answer is yes."""

    yes: bool
    reason: str

    def __bool__(self) -> bool:
        return self.yes


def pair(of: Asked) -> tuple[str, str]:
    """The kernels of the prefill and the decode half; a draft answers with its own."""
    return half_kernel(of, "prefill"), half_kernel(of, "decode")


def half_kernel(of: Asked, half: Half) -> str:
    """The kernel of one half.

    Raises:
        Unresolved: there is no plan, or the plan has no kernel for this half. Unstamped, BuiltMismatch: a runner whose
        objects are not those of its plan.
    """
    row = half_row(of, half)
    if row.kernel is None:
        who = f"{plan_of(of).role} {half} half"
        raise Unresolved(who, needed="a kernel", found="a phase this runner never runs")
    return row.kernel


def half_runs(of: Asked, half: Half, kernels: Collection[str]) -> Decision:
    """Whether one half, all layers of its main model, is served by these kernels.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_kernel`.
    """
    wanted = kernels_asked(kernels)
    half_kernel(of, half)
    return named(f"{half} half", main_groups(half_row(of, half)), wanted)


def both_halves_run(of: Asked, kernels: Collection[str]) -> Decision:
    """Whether both halves are served by these kernels.

    Raises:
        Unresolved, Unstamped, BuiltMismatch: as `half_kernel`.
    """
    answers = [half_runs(of, half, kernels) for half in ("prefill", "decode")]
    refused = [answer for answer in answers if not answer.yes]
    return refused[0] if refused else Decision(True, " and ".join(answer.reason for answer in answers))


def any_phase_runs(of: Asked, kernel: str) -> Decision:
    """Whether any phase, layer or component of either slot runs a kernel: what a guard on it must ask.

    Raises:
        Unresolved: there is no plan, or no kernel to ask about.
    """
    plan = plan_of(of)
    kernels_asked((kernel,))
    phases = [name for name, row in named_rows(plan) if any(group.kernel == kernel for group in row.groups)]
    reason = f"{kernel} runs {', '.join(phases)}" if phases else f"no phase runs {kernel}"
    return Decision(bool(phases), reason)


def named_rows(plan: Plan) -> tuple[tuple[str, PhasePlan], ...]:
    """Every phase of both slots, by a name that says which."""
    linear = plan.linear.rows if plan.linear is not None else ()
    return (*((row.phase, row) for row in plan.phases), *((f"linear {row.phase}", row) for row in linear))


def plan_of(of: Asked) -> Plan:
    """The plan that answers; of a runner, once every object it serves with carries the stamp the plan names.

    Raises:
        Unresolved: neither. Unstamped, BuiltMismatch: an object was swapped in after start.
    """
    if isinstance(of, RunnerBackends):
        verify_consumed(of)
        return of.plan
    if not isinstance(of, Plan):
        raise no_backend(of)
    return of


def half_row(of: Asked, half: Half) -> PhasePlan:
    """The phase that is one half of a runner: a draft decodes in its loop.

    Raises:
        BadInput: no half. Unresolved, Unstamped, BuiltMismatch: as `plan_of`.
    """
    if half not in ("prefill", "decode"):
        raise BadInput("a decision about attention backends", needed="the half prefill or decode", found=repr(half))
    plan = plan_of(of)
    return plan.phase(phase_named(half, plan.role))


def main_groups(row: PhasePlan) -> tuple[GroupPlan, ...]:
    """The groups of the component a phase's kernel speaks for: the first, and the main model where there is one."""
    return tuple(group for group in row.groups if group.component == row.groups[0].component)


def named(who: str, groups: Collection[GroupPlan], kernels: frozenset[str]) -> Decision:
    """Whether all these groups run one of these kernels; the reason names those that do not, or else those that do."""
    running = dict.fromkeys(group.kernel for group in groups)
    others = sorted(running.keys() - kernels)
    return Decision(not others, f"{who} is {', '.join(others or running)}")


def kernels_asked(kernels: Collection[str]) -> frozenset[str]:
    """The kernels asked about; asking about none is an error, never a yes or a no.

    Raises:
        Unresolved: none, or something that is no name.
    """
    if not kernels or isinstance(kernels, str) or not all(isinstance(kernel, str) and kernel for kernel in kernels):
        raise no_backend(kernels)
    return frozenset(kernels)


def no_backend(found: object) -> Unresolved:
    """The error of a question about nothing; what was given is shortened, it may be a whole plan in the wrong place."""
    return Unresolved(
        "a decision about attention backends",
        needed="a resolved plan and the kernels asked about",
        found=f"no backend given ({reprlib.repr(found)})",
        fix="Resolve first; a runner holds its plan",
    )
