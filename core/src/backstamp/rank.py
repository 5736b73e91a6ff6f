"""Which kernel a phase gets where nobody asked: a family's wish, a list in order, or the best by rank.

In: one phase's table of verdicts. Out: a `Choice`. It reads the same table an explicit request is held to, so what is
refused when asked for is never picked here. Approximate, interpreted and contested rows are never picked.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from backstamp.declarations import GRAPH_LEVELS
from backstamp.facts import Facts
from backstamp.graphs import level_of
from backstamp.hostfit import INSTALLATION
from backstamp.keys import side_of
from backstamp.plan import Verdict, Warn
from backstamp.refusals import no_kernel, refused_key
from backstamp.selection import Choice, Part, Table

__all__ = ["Fits", "in_order", "pickable", "rank"]

#: Whether rows can join what is already chosen: one page size, one layout.
Fits = Callable[[tuple[Part, ...]], bool]


def rank(facts: Facts, table: Table, who: str, fits: Fits | None = None, avoided: Sequence[str] = ()) -> Choice:
    """Choose by rank: this host's measurements first where there are any, then priority, ties by name.

    Distributions outside a given allow list rank below all inside; the plan says so where one would have won.
    `avoided` kernels are passed over.

    Raises:
        NoKernel: nothing accepts, with every reason.
    """
    measurements = facts.measurements
    outside: list[str] = []
    for kernel in _ranked(facts, table):
        parts = table.parts(kernel, pickable(facts, table))
        if kernel in avoided or len(parts) != len(table.asked) or (fits is not None and not fits(parts)):
            continue
        name, distribution = parts[0].row.offer.kernel, parts[0].row.plugin.distribution
        timed = measurements is not None and measurements.time_of(table.slot, table.phase, name) is not None
        policy = facts.launch.policy
        if policy.allow and distribution in policy.allow:
            outside = [item for item in _by_merit(facts, table) if _distribution(table, item) not in policy.deny]
        return Choice(
            name, parts, "auto (measured)" if timed else "auto", _outranked(facts, table, outside, kernel), ()
        )
    raise no_kernel(facts, table, who)


def in_order(
    facts: Facts, table: Table, kernels: Sequence[str], who: str, source: str, fits: Fits | None
) -> Choice | None:
    """The first kernel of a list that serves and may be picked; None where none does.

    Raises:
        Refused: the first whose machine and model fit is not installed: that is the answer, as for a key.
    """
    policy = facts.launch.policy
    passed: list[Verdict] = []
    for kernel in sorted(
        kernels, key=lambda name: bool(policy.allow) and _distribution(table, name) not in policy.allow
    ):
        name = side_of(facts, table.slot, kernel)
        verdict = table.verdicts.get(name)
        if verdict is None:
            passed.append(
                Verdict(kernel, False, "not_installed", "plugin", f"a plugin that has {kernel}", "none installed")
            )
            continue
        if not verdict.accepted:
            passed.append(verdict)
            if verdict.code in INSTALLATION:
                raise refused_key(facts.host, table, kernel, who, tuple(passed))
            continue
        parts = table.parts(name, pickable(facts, table))
        if len(parts) != len(table.asked) or (fits is not None and not fits(parts)):
            continue
        if parts[0].row.plugin.distribution in policy.deny:
            continue
        lost = [item.kernel for item in passed if item.code == "not_installed"]
        warnings = [
            Warn("lost", f"{who}: {kernel} binds; passed over {item}, no installed plugin has it") for item in lost
        ]
        return Choice(parts[0].row.offer.kernel, parts, source, tuple(warnings), tuple(passed))
    return None


def pickable(facts: Facts, table: Table) -> int:
    """The rows `auto` may take, with the side the policy chose of each name two distributions claim."""
    index = table.answers[0].slot_index
    mask = index.pickable
    for side in facts.launch.policy.duplicates:
        mask |= index.chosen(side)
    return mask


def _ranked(facts: Facts, table: Table) -> Iterable[str]:
    """Accepted kernels best first; the index is in priority order already, and sorting keeps that order in ties."""
    policy = facts.launch.policy
    if not policy.allow and not policy.deny:
        return _by_merit(facts, table)
    names = [name for name in _by_merit(facts, table) if _distribution(table, name) not in policy.deny]
    return sorted(names, key=lambda name: bool(policy.allow) and _distribution(table, name) not in policy.allow)


def _by_merit(facts: Facts, table: Table) -> Iterable[str]:
    """Accepted kernels by what they are, whoever ships them."""
    measurements, keeps = facts.measurements, facts.launch.policy.keep_graph
    if measurements is None and not keeps:
        return table.by_rank(pickable(facts, table))
    wanted = GRAPH_LEVELS.index(facts.engine.graph)

    def order(name: str) -> tuple[bool, float]:
        loses = keeps and any(level_of(part.row, part.asked.question) < wanted for part in table.parts(name))
        time = measurements.time_of(table.slot, table.phase, name) if measurements is not None else None
        return loses, time if time is not None else float("inf")

    return sorted(table.by_rank(pickable(facts, table)), key=order)


def _outranked(facts: Facts, table: Table, by_merit: Sequence[str], chosen: str) -> tuple[Warn, ...]:
    """Say which kernels outside the allow list would have come first."""
    ahead = list(dict.fromkeys(by_merit))
    ahead = ahead[: ahead.index(chosen)] if chosen in ahead else []
    allow = facts.launch.policy.allow
    would = [f"{name} ({_distribution(table, name)})" for name in ahead if _distribution(table, name) not in allow]
    if not would:
        return ()
    return (Warn("outside", f"{table.phase}: {', '.join(would)} would have won; outside the allow list"),)


def _distribution(table: Table, name: str) -> str:
    row = table.answers[0].row_of(name)
    return row.plugin.distribution if row is not None else ""
