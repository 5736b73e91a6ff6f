"""What a draft takes over from its target: which half, which kernels, and which of their rows.

In: the facts of a draft's resolve, its target's plan among them. Out: keys and choices. What cannot be taken over is
told by whoever asked.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backstamp.declarations import Half, Phase
from backstamp.errors import BackstampError, NotInstalled, Refused
from backstamp.facts import Facts
from backstamp.rank import pickable
from backstamp.selection import Choice, Table, bind_key, by_rows
from backstamp.text import canonical

__all__ = ["inherited", "inherited_half", "target_kernels"]


def inherited_half(facts: Facts, phase: Phase) -> Half:
    """The half of its target that a phase of a draft takes over."""
    if phase == "draft_decode":
        return "decode"
    follows_decode = phase == "draft_extend" and facts.launch.speculative_attention_mode == "decode"
    return "decode" if follows_decode else "prefill"


def target_kernels(facts: Facts, half: Half) -> tuple[str, ...]:
    """The kernels of the target's main component in one half, the phase's own first, as keys."""
    if facts.target is None:
        return ()
    row = facts.target.phase(half)
    main = row.groups
    if len(main) > 1:
        main = tuple([group for group in row.groups if group.component == row.groups[0].component])
    ranked = sorted(main, key=lambda group: group.kernel != row.kernel) if len(main) > 1 else main
    contested = facts.host.catalogue.conflicts
    keys = [
        f"{group.plugin.distribution}:{group.kernel}" if ("attention", group.kernel) in contested else group.kernel
        for group in ranked
    ]
    return tuple(dict.fromkeys(keys))


def inherited(facts: Facts, table: Table, keys: Sequence[str], asked: bool, who: str) -> Iterator[Choice]:
    """What the target runs; where nobody `asked` for it, by the rows and distributions `auto` may take.

    Raises:
        Refused, NotInstalled: none of the keys binds here; the first one's reason.
    """
    refusal: BackstampError | None = None
    found = False
    for key in keys:
        try:
            choice = bind_key(facts, table, key, who, "inherited", "inherited")
        except (Refused, NotInstalled) as error:
            refusal = refusal or error
            continue
        denied = canonical(choice.parts[0].row.plugin.distribution) in facts.launch.policy.deny
        if asked or not denied:
            found = True
            yield from by_rows(table, choice, -1 if asked else pickable(facts, table))
    if not found and refusal is not None:
        raise refusal
