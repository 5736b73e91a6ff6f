"""Which kernel a phase gets where nobody asked: a family's wish, a list in order, or the best by rank.

In: one phase's table of verdicts. Out: a `Choice`. It reads the same table an explicit request is held to, so what is
refused when asked for is never picked here. Approximate, interpreted and contested rows are never picked.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

from backstamp.declarations import GRAPH_LEVELS
from backstamp.facts import Facts
from backstamp.graphs import level_of
from backstamp.hostfit import INSTALLATION
from backstamp.keys import side_of
from backstamp.plan_rows import Verdict, Warn
from backstamp.refusals import no_kernel, refused_key
from backstamp.selection import Choice, Part, Table
from backstamp.text import canonical

__all__ = ["Fits", "first_fit", "in_order", "pickable", "ranked"]

#: Whether rows can join what is already chosen: one page size, one layout.
Fits = Callable[[tuple[Part, ...]], bool]


def ranked(facts: Facts, table: Table, who: str) -> Iterator[Choice]:
    """Every choice by rank: this host's measurements first where there are any, then priority, ties by name.

    Distributions outside a given allow list rank below all inside; the plan says so where one would have won.

    Raises:
        NoKernel: nothing accepts, with every reason.
    """
    mask, empty = pickable(facts, table), True
    for kernel in dict.fromkeys(_ranked(facts, table)):
        for parts in table.all_parts(kernel, mask):
            empty = False
            source, warnings = _source(facts, table, parts), _outranked(facts, table, parts)
            yield Choice(parts[0].row.offer.kernel, parts, "auto", source, warnings)
    if empty:
        raise no_kernel(facts, table, who)


def _source(facts: Facts, table: Table, parts: tuple[Part, ...]) -> str:
    if facts.measurements is None:
        return "auto"
    time = facts.measurements.time_of(table.slot, table.phase, parts[0].row.offer.kernel)
    return "auto (measured)" if time is not None else "auto"


def in_order(
    facts: Facts, table: Table, kernels: Sequence[str], who: str, kind: Literal["family", "auto"]
) -> Iterator[Choice]:
    """What serves of a list of kernels and may be picked, in its order.

    Raises:
        Refused: the first whose machine and model fit is not installed: that is the answer, as for a key.
    """
    policy = facts.launch.policy
    mask = pickable(facts, table)
    passed: list[Verdict] = []
    for kernel in sorted(kernels, key=lambda name: _is_outside(facts, table, name)):
        name = side_of(facts, table.slot, kernel)
        verdict = table.verdicts.get(name)
        if verdict is None:
            needed = f"a plugin that has {kernel}"
            passed.append(Verdict(kernel, False, "not_installed", "plugin", needed, "none installed"))
        elif not verdict.accepted:
            passed.append(verdict)
            if verdict.code in INSTALLATION:
                raise refused_key(facts.host, table, kernel, who, tuple(passed))
        elif _distribution(table, name) not in policy.deny:
            lost = [item.kernel for item in passed if item.code == "not_installed"]
            text = f"{who}: {kernel} binds; passed over {', '.join(lost)}, no installed plugin has it"
            warnings = (Warn("lost", text),) if lost else ()
            for parts in table.all_parts(name, mask):
                yield Choice(parts[0].row.offer.kernel, parts, kind, kind, warnings, tuple(passed))


def _is_outside(facts: Facts, table: Table, name: str) -> bool:
    allow = facts.launch.policy.allow
    return bool(allow) and _distribution(table, name) not in allow


def first_fit(choices: Iterator[Choice], fits: Fits | None) -> Choice | None:
    """The first choice that fits, None where none does."""
    return next((choice for choice in choices if fits is None or fits(choice.parts)), None)


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
    return sorted(names, key=lambda name: _is_outside(facts, table, name))


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


def _outranked(facts: Facts, table: Table, parts: tuple[Part, ...]) -> tuple[Warn, ...]:
    """Say which kernels outside the allow list would have come before the one chosen."""
    policy, chosen = facts.launch.policy, parts[0].row
    if not policy.allow or canonical(chosen.plugin.distribution) not in policy.allow:
        return ()
    ahead = list(dict.fromkeys(_by_merit(facts, table)))
    ahead = ahead[: ahead.index(chosen.name)]
    would = [name for name in ahead if _distribution(table, name) not in policy.allow | policy.deny]
    if not would:
        return ()
    named = ", ".join(f"{name} ({_distribution(table, name)})" for name in would)
    return (Warn("outside", f"{table.phase}: {named} would have won; outside the allow list"),)


def _distribution(table: Table, name: str) -> str:
    row = table.answers[0].row_of(name)
    return canonical(row.plugin.distribution) if row is not None else ""
