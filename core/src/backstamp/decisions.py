"""What code beside attention may ask about the kernels of a plan: of one half, of both, of any phase.

In: a plan and kernel names. Out: a `Decision`, yes or no with its reason. It reads what was resolved, never a field
somebody typed; asking about no backend is an error, never a yes.

Source: SGLang #34264, where seven decisions read a base field that nobody had set.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from backstamp.declarations import Half, Phase
from backstamp.errors import BadInput, Unresolved
from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan

__all__ = ["Decision", "any_phase_runs", "both_halves_run", "half_kernel", "half_runs", "pair"]


@dataclass(frozen=True, slots=True)
class Decision:
    """An answer and the fact it rests on; true where the answer is yes."""

    yes: bool
    reason: str

    def __bool__(self) -> bool:
        return self.yes


def pair(plan: Plan) -> tuple[str, str]:
    """The kernels of the prefill and the decode half; a draft answers with its own."""
    return half_kernel(plan, "prefill"), half_kernel(plan, "decode")


def half_kernel(plan: Plan, half: Half) -> str:
    """The kernel of one half.

    Raises:
        Unresolved: there is no plan, or the plan has no kernel for this half.
    """
    kernel = _row(plan, half).kernel
    if kernel is None:
        raise Unresolved(f"{plan.role} {half} half", needed="a kernel", found="a phase this runner never runs")
    return kernel


def half_runs(plan: Plan, half: Half, kernels: Collection[str]) -> Decision:
    """Whether one half, all of its layers, is served by one of these kernels.

    Raises:
        Unresolved: as `half_kernel`.
    """
    row = _row(plan, half)
    half_kernel(plan, half)
    others = sorted({group.kernel for group in row.groups} - _kernels(kernels))
    if others:
        return Decision(False, f"{half} half is {', '.join(others)}")
    return Decision(True, f"{half} half is {row.kernel}")


def both_halves_run(plan: Plan, kernels: Collection[str]) -> Decision:
    """Whether both halves are served by these kernels.

    Raises:
        Unresolved: as `half_kernel`.
    """
    answers = [half_runs(plan, half, kernels) for half in ("prefill", "decode")]
    refused = [answer for answer in answers if not answer.yes]
    return refused[0] if refused else Decision(True, " and ".join(answer.reason for answer in answers))


def any_phase_runs(plan: Plan, kernel: str) -> Decision:
    """Whether any phase, layer or component of either slot runs a kernel: what a guard on its library must ask.

    Raises:
        Unresolved: there is no plan, or no kernel to ask about.
    """
    linear = _plan(plan).linear
    rows = [(row.phase, row) for row in plan.phases]
    rows += [(f"linear {row.phase}", row) for row in (linear.rows if linear is not None else ())]  # type: ignore[misc]
    _kernels({kernel})
    phases = [name for name, row in rows if any(group.kernel == kernel for group in row.groups)]
    reason = f"{kernel} runs {', '.join(phases)}" if phases else f"no phase runs {kernel}"
    return Decision(bool(phases), reason)


def _kernels(kernels: Collection[str]) -> frozenset[str]:
    """The kernels asked about; asking about none is an error, never a yes or a no."""
    if not kernels or not all(isinstance(kernel, str) and kernel for kernel in kernels):
        raise _nothing_asked(repr(kernels))
    return frozenset(kernels)


def _row(plan: Plan, half: Half) -> PhasePlan:
    if half not in ("prefill", "decode"):
        raise BadInput("a decision about attention backends", needed="the half prefill or decode", found=repr(half))
    phase: Phase = "draft_decode" if half == "decode" and _plan(plan).role == "draft" else half
    return _plan(plan).phase(phase)


def _plan(plan: Plan) -> Plan:
    if not isinstance(plan, Plan):
        raise _nothing_asked(repr(plan))
    return plan


def _nothing_asked(found: str) -> Unresolved:
    return Unresolved(
        "a decision about attention backends",
        needed="a resolved plan and the kernels asked about",
        found=f"no backend given ({found})",
        fix="Resolve first; a runner holds its plan",
    )
