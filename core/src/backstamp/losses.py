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
from backstamp.measured import time_of
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
            losses.append(Loss("graph", decision.phase, lost.kernel, cost, lost.alternative))
        for kernel in dict.fromkeys(part.row.offer.kernel for part in decision.choice.parts):
            if facts.measurements is not None:
                losses += _time_loss(facts, decision, kernel)
            losses += _accuracy_loss(decision, kernel)
    return tuple(dict.fromkeys(losses))


def graphs_off(facts: Facts, decisions: Iterable[Decision]) -> Iterator[Warn]:
    """A warning for each decision that leaves an engine that wants a CUDA graph without any."""
    for decision in decisions:
        lost = _lost_graph(facts, decision)
        if lost is not None and lost.level == 0:
            instead = f"{lost.alternative} would keep it" if lost.alternative else "no kernel here would keep it"
            who = f"{decision.phase}: {lost.kernel}"
            yield Warn("graph_off", f"{who} runs without a CUDA graph{lost.under}; {instead}")


class _Lost(NamedTuple):
    kernel: str
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
    kernel = weakest[0].row.offer.kernel
    better = [name for name, parts in _serving(table, choice, kernel).items() if _level(parts) >= wanted]
    return _Lost(kernel, have, f" under {' and '.join(conditions)}" if conditions else "", min(better, default=""))


def _serving(table: Table, choice: Choice, kernel: str, among: int = -1) -> dict[str, tuple[Part, ...]]:
    """Every kernel that serves all the layers which the choice leaves to one kernel, with its rows for them."""
    runs = [part.asked for part in choice.parts if part.row.offer.kernel == kernel]
    # layers that follow a half one by one are parts of a table's question, and no question of it
    asked = [at for at, item in enumerate(table.asked) if item in runs] or range(len(table.asked))
    serving: dict[str, tuple[Part, ...]] = {}
    for name in table.answers[0].slot_index.names:
        rows = [(table.asked[at], table.answers[at].row_of(name, among)) for at in asked]
        parts = tuple([Part(item, row) for item, row in rows if row is not None])
        if len(parts) == len(rows):
            serving[name] = parts
    return serving


def _time_loss(facts: Facts, decision: Decision, kernel: str) -> Iterator[Loss]:
    """A kernel measured slower here than another that serves too."""
    phase, table, choice = decision
    times = {name: time_of(facts, table, parts) for name, parts in _serving(table, choice, kernel).items()}
    own, known = times.get(kernel), {name: time for name, time in times.items() if time is not None}
    if own is not None and known:
        best = min(known, key=lambda name: (known[name], name))
        if known[best] < own:
            cost = f"{own / known[best]:.2f} times the measured time of {best}"
            yield Loss("time", phase, kernel, cost, best)


def _accuracy_loss(decision: Decision, kernel: str) -> Iterator[Loss]:
    phase, table, choice = decision
    offers = [part.row.offer for part in choice.parts if part.row.offer.kernel == kernel]
    rough = [offer for offer in offers if offer.accuracy != "exact"]
    if rough:
        exact = _serving(table, choice, kernel, table.answers[0].slot_index.pickable)
        yield Loss("accuracy", phase, kernel, f"approximate: {rough[0].accuracy}", min(exact, default=""))


def _level(parts: tuple[Part, ...]) -> int:
    return min(level_of(part.row, part.asked.question) for part in parts)
