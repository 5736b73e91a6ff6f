"""The linear slot of one runner, resolved beside its attention: decode, prefill and verify of its recurrent layers.

In: the same facts as the resolver. Out: a `LinearSlot`, empty for a model without linear layers. It touches no
process-wide state and never writes a default back into the launch.

.. versionadded:: 0.1
"""

from __future__ import annotations

from typing import Final, NamedTuple

from backstamp.declarations import Phase
from backstamp.facts import Facts
from backstamp.linear import verify_follows
from backstamp.plan import LinearPlan, PhasePlan, Verdict
from backstamp.questions import needs_of, questions_for
from backstamp.rank import rank
from backstamp.selection import Choice, Decision, Table, ask, bind_key, phase_plan, table_of

__all__ = ["LinearSlot", "resolve_linear"]


class LinearSlot(NamedTuple):
    """The slot's part of a plan, its state layout, and the decisions behind them."""

    plan: LinearPlan | None
    layouts: tuple[tuple[str, str], ...]
    decisions: tuple[Decision, ...]


_NONE: Final = LinearSlot(None, (), ())


def resolve_linear(facts: Facts, failed: tuple[Verdict, ...] = ()) -> LinearSlot:
    """Resolve the slot; unset verify follows decode where that is flashinfer, else it is triton where that serves."""
    if not facts.model.linear_groups:
        return _NONE
    asked = questions_for("linear", facts)
    common = ask(facts, "linear", asked)
    plans: dict[Phase, PhasePlan] = {}
    decisions: list[Decision] = []
    layouts: list[str] = []
    order: tuple[Phase, ...] = ("decode", "prefill", "verify")
    for at in order:
        table = table_of("linear", asked, common, needs_of(at, "linear", facts))
        choice = _choose(facts, table, plans, f"linear {at} backend")
        decisions.append(Decision(at, table, choice))
        layouts += [layout for part in choice.parts for layout in part.row.offer.state_layouts[:1]]
        flag = f"--linear-attn-{at}-backend"
        plans[at] = phase_plan(table, choice, facts.launch.linear(at), flag, failed=failed)
    linear = LinearPlan(plans["decode"], plans["prefill"], plans["verify"])
    return LinearSlot(linear, tuple(("linear", layout) for layout in dict.fromkeys(layouts)), tuple(decisions))


def _choose(facts: Facts, table: Table, decided: dict[Phase, PhasePlan], who: str) -> Choice:
    request = facts.launch.linear(table.phase)
    if request is not None:
        return bind_key(facts, table, request.value, who, request.source)
    if table.phase == "verify":
        follow = verify_follows(str(decided["decode"].kernel))
        if follow in table.accepted():
            return Choice(follow, table.parts(follow), "default", (), ())
    return rank(facts, table, f"{who} (auto)")
