"""What a component gets in a phase where nobody asked: its family's wish, the hybrid list, then the best by rank.

In: one phase's table. Out: choices, best first. Where a wish or a list gives nothing, what comes after it says so.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backstamp.facts import Facts
from backstamp.keys import foreign_kernels
from backstamp.plan_rows import Warn
from backstamp.rank import in_order, ranked
from backstamp.selection import Choice, Table

__all__ = ["HYBRID_KEY", "auto_choices"]

#: `auto` of a hybrid model's full-attention layers is this key's list.
HYBRID_KEY: Final = "hybrid_linear_attn"


def auto_choices(facts: Facts, table: Table, who: str) -> Iterator[Choice]:
    """Every choice for what nobody asked for.

    Raises:
        NoKernel: nothing accepts. Refused: a list's first fitting kernel is not installed.
    """
    component = table.asked[0].component
    wishes: list[str] = []
    rule = facts.rule(component)
    if rule.kernels:
        yield from in_order(facts, table, rule.kernels, who, "family")
        wishes.append(f"family {facts.model.name} prefers {', '.join(rule.kernels)}")
    hybrid = facts.host.catalogue.aliases.get(("attention", HYBRID_KEY))
    if hybrid is not None and facts.model.is_hybrid and component == "main":
        kernels = hybrid.alias.for_phase(table.phase)
        said = f"{HYBRID_KEY} stands for {', '.join(kernels)}"
        if foreign_kernels(facts, table, hybrid):
            wishes.append(f"{said}, where {hybrid.plugin.distribution} speaks for kernels that are not its own")
        else:
            yield from in_order(facts, table, kernels, who, "auto")
            wishes.append(said)
    lost = tuple([Warn("lost", f"{table.phase}: {wish}; none of them is taken") for wish in wishes])
    for choice in ranked(facts, table, who):
        yield choice._replace(warnings=choice.warnings + lost) if lost else choice
