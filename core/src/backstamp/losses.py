"""What a choice costs, and which accepted kernel would not cost it.

In: the tables and choices of every phase. Out: `Loss` rows. It changes no choice.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from backstamp.declarations import GRAPH_LEVELS, PHASES, Phase
from backstamp.facts import Facts
from backstamp.graphs import level_of
from backstamp.plan import Loss
from backstamp.selection import Choice, Part, Table

__all__ = ["GRAPHED", "losses_of"]

#: Phases that engines capture.
GRAPHED: tuple[Phase, ...] = ("decode", "verify", "draft_decode")


def losses_of(facts: Facts, chosen: Mapping[Phase, tuple[Table, Choice]]) -> tuple[Loss, ...]:
    """Every loss of every phase, in phase order."""
    losses: list[Loss] = []
    for phase in PHASES:
        if phase in chosen:
            table, choice = chosen[phase]
            if facts.engine.graph != "never" and phase in GRAPHED:
                losses += _graph_loss(facts, table, choice)
            if facts.measurements is not None:
                losses += _time_loss(facts, table, choice)
            losses += _accuracy_loss(table, choice)
    return tuple(losses)


def _graph_loss(facts: Facts, table: Table, choice: Choice) -> Iterator[Loss]:
    wanted, have = GRAPH_LEVELS.index(facts.engine.graph), _level(choice.parts)
    if have < wanted:
        better = [name for name in table.accepted() if _level(table.parts(name)) >= wanted]
        cost = f"CUDA graph {GRAPH_LEVELS[wanted]} -> {GRAPH_LEVELS[have]}"
        yield Loss("graph", table.phase, choice.kernel, cost, min(better, default=""))


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
