"""The linear slot of one runner, resolved beside its attention: decode, prefill and verify of its recurrent layers.

In: the same facts as the resolver. Out: a `LinearPlan` and the state layout, or None for a model without linear
layers. It touches no process-wide state and never writes a default back into the launch.

.. versionadded:: 0.1
"""

from __future__ import annotations

from backstamp.compiled import HostCatalogue
from backstamp.declarations import Phase, Role
from backstamp.engine import EngineFacts
from backstamp.launch import Launch
from backstamp.measurements import Measurements
from backstamp.model import ModelFacts
from backstamp.plan import LinearPlan, PhasePlan
from backstamp.questions import needs_of, questions_for
from backstamp.selection import Choice, Table, ask, bind_key, phase_plan, rank, table_of

__all__ = ["resolve_linear"]


def resolve_linear(
    host: HostCatalogue,
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    kv_dtype: str,
    measurements: Measurements | None,
    role: Role,
) -> tuple[LinearPlan | None, tuple[tuple[str, str], ...]]:
    """Resolve the slot; unset verify follows decode where that is flashinfer, else it is triton where that serves."""
    if not model.linear_groups:
        return None, ()
    asked = questions_for("linear", launch, engine, model, kv_dtype)
    common = ask(host, "linear", asked)
    plans: dict[Phase, PhasePlan] = {}
    layouts: list[str] = []
    order: tuple[Phase, ...] = ("decode", "prefill", "verify")
    for at in order:
        table = table_of("linear", asked, common, needs_of(at, "linear", launch, engine))
        choice = _choose(host, launch, table, plans, measurements, f"linear {at} backend")
        layouts += [layout for part in choice.parts for layout in part.row.offer.state_layouts[:1]]
        plans[at] = phase_plan(table, choice, launch.linear(at), f"--linear-attn-{at}-backend")
    linear = LinearPlan(plans["decode"], plans["prefill"], plans["verify"])
    return linear, tuple(("linear", layout) for layout in dict.fromkeys(layouts))


def _choose(
    host: HostCatalogue,
    launch: Launch,
    table: Table,
    decided: dict[Phase, PhasePlan],
    measurements: Measurements | None,
    who: str,
) -> Choice:
    request = launch.linear(table.phase)
    if request is not None:
        return bind_key(host, table, request.value, who, request.source)
    if table.phase == "verify":
        follow = "flashinfer" if decided["decode"].kernel == "flashinfer" else "triton"
        if follow in table.accepted():
            return Choice(follow, table.parts(follow), "default", (), ())
    return rank(host, table, f"{who} (auto)", launch.policy, measurements)
