"""Layers that differ, each group with a kernel of its own: the policy `per_layer`.

In: one phase's table of the uniform question and a way to choose for one group of like layers. Out: the choices
joined, and a table whose verdicts say of each kernel whether it serves any group.

Source: vLLM #38891, #48114 (one decision for unlike layers made all of them slow).

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from backstamp.errors import BackstampError, NoKernel, Refused
from backstamp.facts import Facts
from backstamp.model import LayerGroup
from backstamp.plan_rows import Verdict, Warn
from backstamp.questions import questions_for
from backstamp.rank import Fits
from backstamp.selection import Choice, Part, Table, ask, table_of
from backstamp.settle import share_a_cache

__all__ = ["Choices", "by_layers", "choose_per_layer"]


#: The choices for one table, best first.
Choices = Callable[[Table], Iterator[Choice]]
#: Choices tried before the first disagreement is told: real models settle at once, contrived ones must not hang.
_MOST_TRIES: Final = 2000


class _Group(NamedTuple):
    """One group of like layers: its own table and every choice for it, best first."""

    group: LayerGroup
    table: Table
    choices: tuple[Choice, ...]


def by_layers(
    facts: Facts, table: Table, choices: Choices, fits: Fits | None, *, binding: bool
) -> Iterator[tuple[Table, Choice]]:
    """The ways choices serve a phase: all layers alike, or each group of like layers by itself, as the policy says.

    Rows of one kernel for unlike layers are one kernel, under every policy.

    Raises:
        BackstampError: what `choices` raises where no way serves.
    """
    layers, unlike = facts.launch.policy.layers, sum(len(item.groups) for item in table.asked) > 1
    if unlike and layers == "per_layer":
        yield from choose_per_layer(facts, table, choices, fits, binding=binding)
        return
    try:
        alike = choices(table)
        first = next(alike, None)
    except (Refused, NoKernel) as refusal:
        if not unlike:
            raise
        yield from _apart(facts, table, choices, fits, binding, refusal)
        return
    if first is not None:
        yield table, first
        yield from ((table, choice) for choice in alike)


def _apart(
    facts: Facts, table: Table, choices: Choices, fits: Fits | None, binding: bool, refusal: BackstampError
) -> Iterator[tuple[Table, Choice]]:
    """Layer by layer where all layers alike are refused; a uniform policy takes rows of one kernel only.

    Raises:
        BackstampError: the refusal of all layers together, where a group has no kernel or no one kernel has them all.
    """
    uniform = facts.launch.policy.layers == "uniform"
    found = False
    try:
        for of, choice in choose_per_layer(facts, table, choices, fits, binding=binding):
            if not uniform or len({part.row.name for part in choice.parts}) == 1:
                found = True
                yield of, choice
    except (Refused, NoKernel):
        raise refusal from None
    if uniform and not found:
        raise refusal


def choose_per_layer(
    facts: Facts, table: Table, choices: Choices, fits: Fits | None, *, binding: bool
) -> Iterator[tuple[Table, Choice]]:
    """Every way to give each group of like layers a kernel so that all share one cache, best first.

    `binding` takes the first of each group where no way fits, so that what they disagree on is told later.

    Raises:
        BackstampError: what `choices` raises for a group that nothing serves.
    """
    groups: list[_Group] = []
    for group in [group for item in table.asked for group in item.groups]:
        of_group = questions_for(table.slot, facts, (group,))
        own = table_of(table.slot, of_group, ask(facts, table.slot, of_group), table.needs)
        groups.append(_Group(group, own, tuple(choices(own))))
    cached = any(item.question.cached for item in table.asked)

    def joins(parts: Sequence[Part]) -> bool:
        return not cached or (share_a_cache(parts, facts.cache) and (fits is None or fits(tuple(parts))))

    empty = True
    for way in _ways(_with_a_common_layout(groups) if cached else groups, (), joins, [_MOST_TRIES]):
        empty = False
        yield _joined(table, groups, way)
    if empty and binding:
        yield _joined(table, groups, tuple(item.choices[0] for item in groups))


def _with_a_common_layout(groups: Sequence[_Group]) -> list[_Group]:
    """The groups without choices whose layout some group cannot read: most dead ends, seen before they are tried."""
    readable = [{layout for choice in item.choices for layout in _layouts(choice)} for item in groups]
    common = set.intersection(*readable) if readable else set()
    return [item._replace(choices=tuple(at for at in item.choices if common & _layouts(at))) for item in groups]


def _layouts(choice: Choice) -> set[str]:
    return set.intersection(*(set(part.row.offer.layouts) for part in choice.parts))


def _ways(
    groups: Sequence[_Group], taken: tuple[Choice, ...], joins: Callable[[Sequence[Part]], bool], tries: list[int]
) -> Iterator[tuple[Choice, ...]]:
    """Every list of choices, one a group, that joins; best first for the first group."""
    if len(taken) == len(groups):
        yield taken
        return
    for choice in groups[len(taken)].choices:
        tries[0] -= 1
        if tries[0] < 0:
            return
        more = (*taken, choice)
        if joins([part for item in more for part in item.parts]):
            yield from _ways(groups, more, joins, tries)


def _joined(table: Table, groups: Sequence[_Group], way: Sequence[Choice]) -> tuple[Table, Choice]:
    """The choices of all groups as one, and the table they were chosen from."""
    verdicts: dict[str, Verdict] = {}
    for item in groups:
        for name, verdict in item.table.verdicts.items():
            if verdict.accepted or name not in verdicts:
                verdicts[name] = verdict
    parts = tuple(part for choice in way for part in choice.parts)
    warnings = [warning for choice in way for warning in choice.warnings]
    # a full-attention layer's kernel stands for the phase
    ranked = [(item.group.facts.window_left >= 0, choice.kernel) for item, choice in zip(groups, way, strict=True)]
    kernel = min(ranked, key=lambda item: item[0])[1]
    kind, source = way[-1].kind, way[-1].source
    if len({choice.kernel for choice in way}) > 1:
        component = table.asked[0].component
        who = table.phase if component == "main" else f"{table.phase}, component {component}"
        warnings.append(Warn("per_layer", f"{who}: unlike layers run {', '.join(_counted(parts))}"))
        source = f"{source} (per_layer)"
    asked = tuple(one for item in groups for one in item.table.asked)
    answers = tuple(one for item in groups for one in item.table.answers)
    joined = Table(table.phase, table.slot, table.needs, asked, answers, verdicts)
    return joined, Choice(kernel, parts, kind, source, tuple(dict.fromkeys(warnings)))


def _counted(parts: Sequence[Part]) -> list[str]:
    """How many layers each kernel runs: "25 x fa2"."""
    counts: dict[str, int] = {}
    for part in parts:
        layers = sum(len(group.layers) for group in part.asked.groups)
        counts[part.row.offer.kernel] = counts.get(part.row.offer.kernel, 0) + layers
    return [f"{count} x {kernel}" for kernel, count in counts.items()]
