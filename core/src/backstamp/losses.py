"""What a choice costs, and which accepted kernel would not cost it.

In: the decisions of every phase, component and slot. Out: `Loss` rows, and a warning where a graph is lost altogether.
It changes no choice.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from backstamp.declarations import GRAPH_LEVELS, Phase
from backstamp.facts import Facts
from backstamp.graphs import level_of, lowered_under
from backstamp.plan_rows import Loss, Warn
from backstamp.selection import Choice, Decision, Part, Table

__all__ = ["GRAPHED", "graphs_off", "losses_of"]

#: Phases that engines capture. Source: SGLang 0.5.23 `EAGLEDraftExtendCudaGraphRunner` for the last.
GRAPHED: Final[tuple[Phase, ...]] = ("decode", "verify", "draft_decode", "draft_extend")


def losses_of(facts: Facts, decisions: Iterable[Decision]) -> tuple[Loss, ...]:
    """Every loss of every decision, each once, in the order given."""
    losses: list[Loss] = []
    for decision in decisions:
        lost = _lost_graph(facts, decision) if facts.engine.graph != "never" else None
        if lost is not None:
            cost = f"CUDA graph {facts.engine.graph} -> {GRAPH_LEVELS[lost.level]}{lost.under}"
            losses.append(Loss("graph", decision.phase, decision.choice.kernel, cost, lost.alternative))
        if facts.measurements is not None:
            losses += _time_loss(facts, decision.table, decision.choice)
        losses += _accuracy_loss(decision.table, decision.choice)
    return tuple(dict.fromkeys(losses))


def graphs_off(facts: Facts, decisions: Iterable[Decision]) -> Iterator[Warn]:
    """A warning for each decision that leaves an engine that wants a CUDA graph without any."""
    for decision in decisions:
        lost = _lost_graph(facts, decision)
        if lost is not None and lost.level == 0:
            instead = f"{lost.alternative} would keep it" if lost.alternative else "no kernel here would keep it"
            who = f"{decision.phase}: {decision.choice.kernel}"
            yield Warn("graph_off", f"{who} runs without a CUDA graph{lost.under}; {instead}")


class _Lost(NamedTuple):
    level: int
    under: str
    alternative: str


def _lost_graph(facts: Facts, decision: Decision) -> _Lost | None:
    """What is left of the graph an engine wants, and why; None where all of it is."""
    phase, table, choice = decision
    if phase not in GRAPHED:
        return None
    wanted, have = GRAPH_LEVELS.index(facts.engine.graph), _level(choice.parts)
    if have >= wanted:
        return None
    weakest = [part for part in choice.parts if _level((part,)) == have]
    conditions = dict.fromkeys(when for part in weakest for when in lowered_under(part.row, part.asked.question))
    better = [name for name in table.accepted() if _level(table.parts(name)) >= wanted]
    return _Lost(have, f" under {' and '.join(conditions)}" if conditions else "", min(better, default=""))


def _time_loss(facts: Facts, table: Table, choice: Choice) -> Iterator[Loss]:
    """A kernel measured slower here than another that serves too."""
    assert facts.measurements is not None, "no measurements, no loss of time"
    times = {name: facts.measurements.time_of(table.slot, table.phase, name) for name in table.accepted()}
    own, known = times.get(choice.kernel), {name: time for name, time in times.items() if time is not None}
    if own is not None and known:
        best = min(known, key=lambda name: (known[name], name))
        if known[best] < own:
            cost = f"{own / known[best]:.2f} times the measured time of {best}"
            yield Loss("time", table.phase, choice.kernel, cost, best)


def _accuracy_loss(table: Table, choice: Choice) -> Iterator[Loss]:
    rough = [part.row.offer for part in choice.parts if part.row.offer.accuracy != "exact"]
    if rough:
        index = table.answers[0].slot_index
        exact = [name for name in table.accepted() if len(table.parts(name, index.pickable)) == len(table.asked)]
        yield Loss("accuracy", table.phase, choice.kernel, f"approximate: {rough[0].accuracy}", min(exact, default=""))


def _level(parts: tuple[Part, ...]) -> int:
    return min(level_of(part.row, part.asked.question) for part in parts)
