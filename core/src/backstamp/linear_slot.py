"""The linear slot of one runner, resolved beside its attention: decode, prefill and verify of its recurrent layers.

In: the same facts as the resolver. Out: a `LinearSlot`, empty for a model without linear layers. It touches no
process-wide state and never writes a default back into the launch.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, NoReturn

from backstamp.declarations import Phase
from backstamp.errors import ConflictingRequest
from backstamp.facts import Facts
from backstamp.launch import Request
from backstamp.linear import verify_follows
from backstamp.per_layer import choose_per_layer
from backstamp.plan import LinearPlan
from backstamp.plan_rows import PhasePlan, Verdict, not_run
from backstamp.questions import needs_of, questions_for, running_phases
from backstamp.rank import allowed_names, pickable, ranked
from backstamp.selection import Choice, Decision, Part, Table, ask, bind_request, by_rows, phase_plan, table_of

__all__ = ["LinearSlot", "resolve_linear"]


#: Decode first: prefill hands it the state, verify follows it.
_ORDER: tuple[Phase, ...] = ("decode", "prefill", "verify")


#: Choices tried before the first disagreement is told.
_MOST_TRIES: Final = 500


class LinearSlot(NamedTuple):
    """The linear slot of a runner: its plan (None without linear layers), state layout, decisions of what it runs."""

    plan: LinearPlan | None = None
    layouts: tuple[tuple[str, str], ...] = ()
    decisions: tuple[Decision, ...] = ()


def resolve_linear(facts: Facts, failed: tuple[Verdict, ...] = ()) -> LinearSlot:
    """Resolve the slot; unset verify follows decode where that is flashinfer, else it is triton where that serves.

    Raises:
        BackstampError: a phase that nothing serves; verify only where something drafts.
        ConflictingRequest: kernels that read no common state layout, both named.
    """
    if not facts.model.linear_groups:
        return LinearSlot()
    asked = questions_for("linear", facts)
    common = ask(facts, "linear", asked)
    tables = {at: table_of("linear", asked, common, needs_of(at, "linear", facts)) for at in _ORDER}
    taken: dict[Phase, Choice] = {}
    if not _take_all(facts, tables, _ORDER, taken, [_MOST_TRIES]):
        _raise_unlike(facts, tables)
    plans = {at: _plan(facts, tables[at], taken.get(at), failed) for at in _ORDER}
    layouts = _layouts([part for choice in taken.values() for part in choice.parts])
    # a verify nobody runs has a kernel, for the runner's stamp, and nothing to be told of
    told = [at for at in taken if at != "verify" or "verify" in running_phases(facts.launch, facts.role)]
    decisions = tuple(Decision(at, tables[at], taken[at]) for at in told)
    linear = LinearPlan(plans["decode"], plans["prefill"], plans["verify"])
    return LinearSlot(linear, tuple(("linear", layout) for layout in layouts[:1]), decisions)


def _plan(facts: Facts, table: Table, choice: Choice | None, failed: tuple[Verdict, ...]) -> PhasePlan:
    flag = f"--linear-attn-{table.phase}-backend"
    if choice is None:
        return not_run(table.phase, flag)
    return phase_plan(table, choice, facts.launch.linear(table.phase), flag, failed=failed)


def _take_all(
    facts: Facts, tables: Mapping[Phase, Table], order: Sequence[Phase], taken: dict[Phase, Choice], tries: list[int]
) -> bool:
    """Take each phase by its first choice with which the rest reads one state layout."""
    if not order:
        return True
    for choice in _choices(facts, tables[order[0]], taken):
        tries[0] -= 1
        if tries[0] < 0:
            return False
        parts = [part for before in taken.values() for part in before.parts]
        if choice is not None and not _share([*parts, *choice.parts]):
            continue
        if choice is not None:
            taken[order[0]] = choice
        if _take_all(facts, tables, order[1:], taken, tries):
            return True
        taken.pop(order[0], None)
    return False


def _choices(facts: Facts, table: Table, taken: Mapping[Phase, Choice]) -> Iterator[Choice | None]:
    """Every way to serve a phase, best first; None where a phase nobody runs may stay empty."""
    who = f"linear {table.phase} backend"
    request = facts.launch.linear(table.phase)
    apart = sum(len(item.groups) for item in table.asked) > 1
    layers = facts.launch.policy.layers
    if request is not None and apart and layers == "per_layer":
        asked = partial(_asked, facts, request=request, who=who)
        yield from (way for _, way in choose_per_layer(facts, table, asked, None, binding=True))
        return
    if request is not None:
        yield from by_rows(table, bind_request(facts, table, request, who))
        return
    if table.phase == "verify":
        if not facts.launch.speculative and not table.has_accepted():
            yield None
            return
        yield from _follows(facts, table, taken["decode"])
    if apart and (layers == "per_layer" or (layers == "auto" and not table.has_accepted())):
        choices = partial(ranked, facts, who=f"{who} (auto)")
        yield from (way for _, way in choose_per_layer(facts, table, choices, None, binding=False))
        return
    yield from ranked(facts, table, f"{who} (auto)")


def _asked(facts: Facts, table: Table, request: Request, who: str) -> Iterator[Choice]:
    return by_rows(table, bind_request(facts, table, request, who))


def _follows(facts: Facts, table: Table, decode: Choice) -> Iterator[Choice]:
    """Decode's kernel where that is flashinfer, else triton; by rows `auto` may take, for nobody asked."""
    follow = verify_follows(decode.kernel)
    name = decode.parts[0].row.name if follow == decode.kernel else follow
    if name in allowed_names(facts, table):
        for parts in table.all_parts(name, pickable(facts, table)):
            yield Choice(follow, parts, "follows", "default")


def _share(parts: Sequence[Part]) -> bool:
    return bool(_layouts(parts)) or not any(part.row.offer.state_layouts for part in parts)


def _layouts(parts: Sequence[Part]) -> list[str]:
    """State layouts every row that declares any reads, as the first of them ranks them."""
    declared = [part.row.offer.state_layouts for part in parts if part.row.offer.state_layouts]
    return [layout for layout in declared[0] if all(layout in of for of in declared)] if declared else []


def _raise_unlike(facts: Facts, tables: Mapping[Phase, Table]) -> NoReturn:
    """Name what each phase's first choice reads."""
    taken: dict[Phase, Choice] = {}
    for at in _ORDER:
        choice = next(_choices(facts, tables[at], taken))
        if choice is not None:
            taken[at] = choice
    reads = [
        f"{part.row.offer.kernel} ({at}) reads {', '.join(part.row.offer.state_layouts)}"
        for at, choice in taken.items()
        for part in choice.parts
        if part.row.offer.state_layouts
    ]
    raise ConflictingRequest(
        f"linear slot of {facts.model.name}",
        needed="kernels that read one state layout, because they share the states",
        found=" and ".join(dict.fromkeys(reads)),
        fix="Choose kernels with a state layout in common",
    )
