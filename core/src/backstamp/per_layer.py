"""Layers that differ, each group with a kernel of its own: the policy `per_layer`.

In: one phase's table of the uniform question and a way to choose for one group of like layers. Out: the choices
joined, and a table whose verdicts say of each kernel whether it serves any group.

Source: vLLM #38891, #48114 (one decision for unlike layers made all of them slow).

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from backstamp.evaluation import Answer
from backstamp.facts import Facts
from backstamp.plan_rows import Verdict, Warn
from backstamp.questions import Asked, questions_for
from backstamp.rank import Fits, first_fit
from backstamp.refusals import no_kernel
from backstamp.selection import Choice, Kind, Part, Table, ask, table_of
from backstamp.settle import share_a_cache

__all__ = ["choose_per_layer"]


def choose_per_layer(
    facts: Facts, table: Table, choices: Callable[[Table], Iterator[Choice]], fits: Fits | None, *, binding: bool
) -> tuple[Table, Choice]:
    """Choose for each group of like layers; later groups must share a page size and a layout with earlier ones.

    `binding` choices were asked for: where none fits, the first is taken, and what it disagrees on is told later.

    Raises:
        NoKernel: a group's choices are none that fits, with every reason.
    """
    parts: list[Part] = []
    cached = any(item.question.cached for item in table.asked)

    def joins(more: tuple[Part, ...]) -> bool:
        if not cached:
            return True
        return share_a_cache([*parts, *more], facts.engine) and (fits is None or fits(more))

    warnings: list[Warn] = []
    verdicts: dict[str, Verdict] = {}
    asked: list[Asked] = []
    answers: list[Answer] = []
    kernels: list[tuple[bool, str]] = []
    kind: Kind = "auto"
    source = ""
    for group in [group for item in table.asked for group in item.groups]:
        of_group = questions_for(table.slot, facts, (group,))
        own = table_of(table.slot, of_group, ask(facts, table.slot, of_group), table.needs)
        choice = first_fit(choices(own), joins) or (next(choices(own)) if binding else None)
        if choice is None:
            raise no_kernel(facts, own, f"{table.phase} attention backend (per_layer)")
        parts += choice.parts
        warnings += choice.warnings
        asked += own.asked
        answers += own.answers
        kernels.append((group.facts.window_left >= 0, choice.kernel))
        kind, source = choice.kind, choice.source
        for name, verdict in own.verdicts.items():
            if verdict.accepted or name not in verdicts:
                verdicts[name] = verdict
    # a full-attention layer's kernel stands for the phase
    kernel = min(kernels, key=lambda item: item[0])[1]
    if len({name for _, name in kernels}) > 1:
        component = table.asked[0].component
        who = table.phase if component == "main" else f"{table.phase}, component {component}"
        warnings.append(Warn("per_layer", f"{who}: unlike layers run {', '.join(_counted(parts))}"))
        source = f"{source} (per_layer)"
    joined = Table(table.phase, table.slot, table.needs, tuple(asked), tuple(answers), verdicts)
    return joined, Choice(kernel, tuple(parts), kind, source, tuple(dict.fromkeys(warnings)))


def _counted(parts: list[Part]) -> list[str]:
    """How many layers each kernel runs: "25 x fa2"."""
    counts: dict[str, int] = {}
    for part in parts:
        layers = sum(len(group.layers) for group in part.asked.groups)
        counts[part.row.offer.kernel] = counts.get(part.row.offer.kernel, 0) + layers
    return [f"{count} x {kernel}" for kernel, count in counts.items()]
