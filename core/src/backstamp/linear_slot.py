"""The linear slot of one runner, resolved beside its attention: decode, prefill and verify of its recurrent layers.

In: the same facts as the resolver. Out: a `LinearPlan` and the state layout, or None for a model without linear
layers. It touches no process-wide state and never writes a default back into the launch.

.. versionadded:: 0.1
"""

from __future__ import annotations

from backstamp.declarations import Phase
from backstamp.facts import Facts
from backstamp.linear import verify_follows
from backstamp.plan import LinearPlan, PhasePlan, Verdict
from backstamp.questions import needs_of, questions_for
from backstamp.rank import rank
from backstamp.selection import Choice, Table, ask, bind_key, phase_plan, table_of

__all__ = ["resolve_linear"]


def resolve_linear(
    facts: Facts, failed: tuple[Verdict, ...] = ()
) -> tuple[LinearPlan | None, tuple[tuple[str, str], ...]]:
    """Resolve the slot; unset verify follows decode where that is flashinfer, else it is triton where that serves."""
    if not facts.model.linear_groups:
        return None, ()
    asked = questions_for("linear", facts)
    common = ask(facts, "linear", asked)
    plans: dict[Phase, PhasePlan] = {}
    layouts: list[str] = []
    order: tuple[Phase, ...] = ("decode", "prefill", "verify")
    for at in order:
        table = table_of("linear", asked, common, needs_of(at, "linear", facts))
        choice = _choose(facts, table, plans, f"linear {at} backend")
        layouts += [layout for part in choice.parts for layout in part.row.offer.state_layouts[:1]]
        flag = f"--linear-attn-{at}-backend"
        plans[at] = phase_plan(table, choice, facts.launch.linear(at), flag, failed=failed)
    linear = LinearPlan(plans["decode"], plans["prefill"], plans["verify"])
    return linear, tuple(("linear", layout) for layout in dict.fromkeys(layouts))


def _choose(facts: Facts, table: Table, decided: dict[Phase, PhasePlan], who: str) -> Choice:
    request = facts.launch.linear(table.phase)
    if request is not None:
        return bind_key(facts, table, request.value, who, request.source)
    if table.phase == "verify":
        follow = verify_follows(str(decided["decode"].kernel))
        if follow in table.accepted():
            return Choice(follow, table.parts(follow), "default", (), ())
    return rank(facts, table, f"{who} (auto)")
