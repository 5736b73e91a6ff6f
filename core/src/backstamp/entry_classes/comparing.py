"""Last step: pairs → what one side lacks; classes with gated layers → what none of them answers.

In: entry classes as each platform has them. Out: `Violation`s, `Uncovered` classes, and a `Trouble` where a base that
was not read leaves it open. Presence counts, not identity.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

from backstamp.entry_classes.engines import Gate
from backstamp.entry_classes.facts import EntryClass, Trouble, Uncovered, Violation
from backstamp.entry_classes.pairing import Paired

__all__ = ["ByPlatform", "compare", "compare_pairs", "cover"]

#: Platform → entry classes by name, those that exist there.
ByPlatform = Mapping[str, Mapping[str, EntryClass]]


def compare(draft: EntryClass, target: EntryClass, hooks: Iterable[str]) -> Iterator[Violation | Trouble]:
    """Each hook that one of two classes has and the other has not."""
    for hook in hooks:
        if (hook in draft.hooks) == (hook in target.hooks):
            continue
        side: Literal["draft", "target"] = "draft" if hook in target.hooks else "target"
        lacking = draft if side == "draft" else target
        if not lacking.unread:
            yield Violation(draft.name, target.name, hook, side, lacking.file, lacking.line)
    for one, other in ((draft, target), (target, draft)):
        # what one unread base gives both it gives both; what only one stands on may be all the difference
        alone = set(one.unread) - set(other.unread)
        undecided = [hook for hook in hooks if one.unread and hook not in one.hooks and (alone or hook in other.hooks)]
        if undecided:
            pair, bases = f"{draft.name} and {target.name}", ", ".join(one.unread)
            text = f"needs {', '.join(undecided)} decided for {pair}, got a base that was not read: {bases}"
            yield Trouble("unread-base", one.name, text, one.file, one.line)


def compare_pairs(
    pairs: Sequence[Paired], read: ByPlatform, hooks: Sequence[str]
) -> tuple[tuple[Violation, ...], tuple[Trouble, ...]]:
    """What every pair lacks on the platforms that have both its classes, and what stays open."""
    violations: list[Violation] = []
    open_questions: dict[Trouble, None] = {}
    for pair in pairs:
        names = (pair.draft.name, pair.target.name)
        there = [platform for platform, classes in read.items() if all(name in classes for name in names)]
        found: dict[Violation, list[str]] = {}
        for platform in there:
            for item in compare(read[platform][names[0]], read[platform][names[1]], hooks):
                if isinstance(item, Violation):
                    found.setdefault(item, []).append(platform)
                else:
                    open_questions[item] = None
        violations += [item._replace(platforms=_where(item, found, there)) for item in found]
    return tuple(violations), tuple(open_questions)


def cover(read: ByPlatform, gates: Sequence[Gate]) -> tuple[tuple[Uncovered, ...], tuple[str, ...]]:
    """The classes with gated layers that do not answer the gate, and the names of those that do."""
    found: dict[Uncovered, list[str]] = {}
    gated: dict[str, list[str]] = {}
    for platform, classes in read.items():
        for name, entry in classes.items():
            for gate in gates:
                markers = tuple(sorted(gate.markers & entry.markers))
                if not markers:
                    continue
                gated.setdefault(name, []).append(platform)
                if gate.hook not in entry.hooks and not entry.unread:
                    item = Uncovered(name, gate.hook, markers, entry.file, entry.line)
                    found.setdefault(item, []).append(platform)
    uncovered = tuple(item._replace(platforms=_where(item, found, gated[item.name])) for item in found)
    lacking = {item.name for item in uncovered}
    return uncovered, tuple(name for name in gated if name not in lacking)


Item = TypeVar("Item", Violation, Uncovered)


def _where(item: Item, found: Mapping[Item, list[str]], there: Sequence[str]) -> tuple[str, ...]:
    """The platforms of a finding; none to name where it is so on all there are."""
    return () if len(found[item]) == len(there) else tuple(found[item])
