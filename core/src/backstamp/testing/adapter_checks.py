"""Conformance of an engine's adapter: what was asked for a draft reaches the draft, in every speculator family.

In: an adapter and the draft's plan. Out: nothing, or one error that lists every family whose draft is something else.

Source: vLLM #54826, #46770.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from backstamp.errors import BuiltMismatch, Unstamped
from backstamp.plan import Plan
from backstamp.stamp import is_container, read_stamp, steps_of

__all__ = ["SPECULATOR_FAMILIES", "DraftAdapter", "check_draft_is_consumed"]

SPECULATOR_FAMILIES: Final = ("mtp", "eagle", "dflash")


class DraftAdapter(Protocol):
    """What an adapter offers to be checked: how it builds the draft of one speculator family from a plan."""

    def build_draft(self, family: str, plan: Plan) -> object:
        """The built draft backend, a container of steps or a single one."""
        ...


def check_draft_is_consumed(adapter: DraftAdapter, plan: Plan, families: Sequence[str] = SPECULATOR_FAMILIES) -> None:
    """Build the draft of every family and hold its stamp against the plan.

    Raises:
        BuiltMismatch: a family whose draft, or one of whose steps, is not what the plan says; all are named.
    """
    wanted = {row.kernel for row in plan.running}
    faults = [fault for family in families for fault in _faults(adapter.build_draft(family, plan), wanted, family)]
    if faults:
        raise BuiltMismatch(
            f"adapter {type(adapter).__name__}",
            needed=f"a draft of {', '.join(sorted(map(str, wanted)))} in every speculator family",
            found="; ".join(faults),
            fix="Hand the draft's plan to every path that builds a draft",
        )


def _faults(built: object, wanted: set[str | None], family: str) -> list[str]:
    faults = []
    for item in (built, *(steps_of(built) if is_container(built) else ())):
        try:
            stamp = read_stamp(item)
        except Unstamped:
            faults.append(f"{family}: {type(item).__name__} without a stamp")
            continue
        if stamp.kernel not in wanted or stamp.role != "draft":
            faults.append(f"{family}: {stamp.kernel} ({stamp.role})")
    return list(dict.fromkeys(faults))
