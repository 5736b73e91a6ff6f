"""Which kernel a phase gets where nobody asked: a family's wish, a list in order, or the best by rank.

In: one phase's table of verdicts. Out: a `Choice`. It reads the same table an explicit request is held to, so what is
refused when asked for is never picked here. Approximate, interpreted and contested rows are never picked.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from backstamp.declarations import GRAPH_LEVELS
from backstamp.facts import Facts
from backstamp.graphs import level_of
from backstamp.hostfit import HostRow
from backstamp.installation import INSTALLATION
from backstamp.keys import absent, side_of
from backstamp.measured import MEASURED, time_of, unmeasured
from backstamp.plan_rows import Verdict, Warn
from backstamp.refusals import no_kernel, refused_key
from backstamp.selection import Choice, Part, Table
from backstamp.text import canonical

__all__ = ["Fits", "allowed_names", "first_by_priority", "first_fit", "in_order", "not_picked", "pickable", "ranked"]

#: Whether rows can join what is already chosen: one page size, one layout.
Fits = Callable[[tuple[Part, ...]], bool]


def ranked(facts: Facts, table: Table, who: str) -> Iterator[Choice]:
    """Every choice by rank: this host's measurements first where there are any, then priority, ties by name.

    Distributions outside a given allow list rank below all inside; the plan says so where one would have won.

    Raises:
        NoKernel: nothing accepts, with every reason.
    """
    mask, empty, untimed = pickable(facts, table), True, _unmeasured(facts, table)
    for kernel in dict.fromkeys(_ranked(facts, table)):
        for parts in table.all_parts(kernel, mask):
            empty = False
            source, warnings = _source(facts, table, parts), (*_outranked(facts, table, parts), *untimed)
            yield Choice(parts[0].row.offer.kernel, parts, "auto", source, warnings)
    if empty:
        raise no_kernel(facts, table, who)


def _source(facts: Facts, table: Table, parts: tuple[Part, ...]) -> str:
    return MEASURED if time_of(facts, table, parts) is not None else "auto"


def _unmeasured(facts: Facts, table: Table) -> tuple[Warn, ...]:
    if facts.measurements is None:
        return ()
    return unmeasured(facts, table, {name: _time(facts, table, name) for name in dict.fromkeys(_ranked(facts, table))})


def _time(facts: Facts, table: Table, name: str) -> float | None:
    return time_of(facts, table, table.parts(name, pickable(facts, table)))


def in_order(
    facts: Facts, table: Table, kernels: Sequence[str], who: str, kind: Literal["family", "auto"]
) -> Iterator[Choice]:
    """What serves of a list of kernels and may be picked, in its order.

    Raises:
        Refused: the first whose machine and model fit is not installed: that is the answer, as for a key.
    """
    mask = pickable(facts, table)
    passed: list[Verdict] = []
    for name in sorted(
        [side_of(facts, table.slot, kernel) for kernel in kernels], key=lambda name: _order(facts, table, name)
    ):
        verdict = table.verdicts.get(name) or absent(facts, table.slot, name)
        if not verdict.accepted:
            passed.append(verdict)
            if verdict.code in INSTALLATION - {"not_installed"}:
                raise refused_key(facts, table, name, who, tuple(passed))
        elif _distribution(table, name) not in facts.launch.policy.deny:
            warnings = [
                Warn("lost", f"{who}: {name} binds; passed over {item.kernel}, {_why(item)}")
                for item in passed
                if item.code in ("not_installed", "failed", "conflict")
            ]
            for parts in table.all_parts(name, mask):
                yield Choice(parts[0].row.offer.kernel, parts, kind, kind, tuple(warnings), tuple(passed))


def _why(absentee: Verdict) -> str:
    return "no installed plugin has it" if absentee.code == "not_installed" else f"got {absentee.have}"


def _order(facts: Facts, table: Table, name: str) -> tuple[bool, bool]:
    """What comes after the others of a list: outside the allow list, or with a weaker graph where graphs are kept."""
    loses = facts.launch.policy.keep_graph and _loses_graph(facts, table, name)
    return _is_outside(facts, table, name), loses


def _loses_graph(facts: Facts, table: Table, name: str) -> bool:
    wanted = GRAPH_LEVELS.index(facts.engine.graph)
    return any(level_of(part.row, part.asked.question) < wanted for part in table.parts(name))


def _is_outside(facts: Facts, table: Table, name: str) -> bool:
    allow = facts.launch.policy.allow
    return bool(allow) and _distribution(table, name) not in allow


def first_fit(choices: Iterator[Choice], fits: Fits | None) -> Choice | None:
    """The first choice that fits, None where none does."""
    return next((choice for choice in choices if fits is None or fits(choice.parts)), None)


def not_picked(verdict: Verdict, row: HostRow) -> Verdict:
    """Why a kernel that would serve if asked for does not: nobody asked, and its row here is approximate."""
    if not verdict.accepted:
        return verdict
    needed = "an exact row, because nobody asked for an approximate one"
    return Verdict(row.name, False, "accuracy", "accuracy", needed, "approximate rows only", row.plugin.name)


def pickable(facts: Facts, table: Table) -> int:
    """The rows `auto` may take, with the side the policy chose of each name two distributions claim."""
    index = table.answers[0].slot_index
    mask = index.pickable
    for side in facts.launch.policy.duplicates:
        mask |= index.chosen(side)
    return mask


def first_by_priority(facts: Facts, table: Table) -> tuple[Part, ...]:
    """The rows `auto` would take first if nothing had been timed; none where no kernel serves every question."""
    name = next(iter(_ranked(replace(facts, measurements=None), table)), None)
    return table.parts(name, pickable(facts, table)) if name is not None else ()


def allowed_names(facts: Facts, table: Table) -> frozenset[str]:
    """Accepted kernels of distributions that are not denied, nor outside an allow list that has others."""
    names = list(dict.fromkeys(_ranked(facts, table)))
    inside = [name for name in names if not _is_outside(facts, table, name)]
    return frozenset(inside or names)


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

    def order(name: str) -> tuple[bool, float]:
        loses = keeps and _loses_graph(facts, table, name)
        time = _time(facts, table, name)
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
