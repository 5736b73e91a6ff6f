"""Draft entry classes answer the loader exactly when their targets do.

In: entry classes, read from source or live, and the hooks a loader asks for. Out: a `Parity`: every pair, every draft
without one, a `Violation` for each hook that one side lacks, and each class with gated layers that does not touch the
gate. Presence counts, not identity: a draft may delegate with adapted arguments. Maps of weight names are no hooks. It
never imports what it reads from source.

Source: SGLang #33312, #34376: a draft without its target's hook cut accept length from 5.60 to 2.05.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstamp.entry_classes.comparing import compare, compare_pairs, cover
from backstamp.entry_classes.engines import Gate, platforms_of, read_gates
from backstamp.entry_classes.facts import EntryClass, Listed, Trouble, Uncovered, Violation
from backstamp.entry_classes.live import live_class
from backstamp.entry_classes.names import Unread
from backstamp.entry_classes.pairing import Paired, Unpaired, pair_up, read_pairs
from backstamp.entry_classes.reading import Reader
from backstamp.entry_classes.sources import Gathered, from_engine, from_folder, from_plugins, row_of
from backstamp.entry_classes.tree import garbage_waits

__all__ = [
    "Gate",
    "Parity",
    "Uncovered",
    "Violation",
    "check_hook_parity",
    "check_parity",
    "from_engine",
    "from_folder",
    "from_plugins",
    "read_gates",
    "read_pairs",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What one check found.

    Attributes:
        subject: what was pointed at. hooks: everything that was asked. classes: the names of the entry classes read.
        covered: the entry classes with gated layers that answer the gate.
        troubles: what could not be read, or decided for want of it; each is a fault.
        absent: classes that were declared and lie in modules that are not installed here.
        notes: bases that were not read and decided nothing, and what else is worth knowing.
    """

    subject: str
    hooks: tuple[str, ...]
    classes: tuple[str, ...]
    pairs: tuple[Paired, ...]
    unpaired: tuple[Unpaired, ...]
    violations: tuple[Violation, ...]
    uncovered: tuple[Uncovered, ...] = ()
    covered: tuple[str, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    absent: tuple[Trouble, ...] = ()
    notes: tuple[Trouble, ...] = ()


def check_hook_parity(pairs: Iterable[tuple[type, type]], hooks: Iterable[str]) -> tuple[Violation, ...]:
    """Every hook that a live draft has and its target has not, or the reverse; pairs are (draft, target)."""
    names = tuple(hooks)
    compared = [compare(live_class(draft, names), live_class(target, names), names) for draft, target in pairs]
    # of a live class every base is there to ask
    return tuple(item for found in compared for item in found if isinstance(item, Violation))


def check_parity(
    gathered: Gathered,
    *,
    hooks: Sequence[str] = (),
    pairs: Mapping[str, tuple[str, ...]] | None = None,
    gates: Sequence[Gate] = (),
) -> Parity:
    """Compare every draft with its targets on each platform, and ask every class with gated layers for the gate.

    `hooks` are asked beside the engines' own, `pairs` (draft → targets) stand before every other pairing, and `gates`
    beside the engines' gates.

    Raises:
        BadInput: a pair names a class that is not among those read.
    """
    every_gate = (*(gate for engine in gathered.engines for gate in engine.gates), *gates)
    own = [hook for engine in gathered.engines for hook in engine.hooks]
    every = tuple(dict.fromkeys((*own, *(gate.hook for gate in every_gate), *hooks)))
    rows = (*gathered.rows, *_rows_of(pairs or {}, gathered.rows))
    platforms = platforms_of(gathered.engines)
    with garbage_waits():
        readers = [_reader(gathered, platform, every, every_gate) for platform in platforms]
        answers = {reader.platform: [reader.read(row) for row in rows] for reader in readers}
    read = {
        platform: {item.name: item for item in items if isinstance(item, EntryClass)}
        for platform, items in answers.items()
    }
    classes = {name: entry for platform in reversed(platforms) for name, entry in read[platform].items()}
    declared = {
        draft: tuple(target for target in targets if target in classes)
        for draft, targets in gathered.declared.items()
        if draft in classes
    }
    paired, unpaired = pair_up(tuple(classes.values()), gathered.engines, pairs or {}, declared)
    violations, undecided = compare_pairs(paired, read, every)
    uncovered, covered = cover(read, every_gate)
    missing = list(_missing(gathered, rows, answers))
    return Parity(
        subject=gathered.subject,
        hooks=every,
        classes=tuple(classes),
        pairs=paired,
        unpaired=unpaired,
        violations=violations,
        uncovered=uncovered,
        covered=covered,
        troubles=(
            *gathered.troubles,
            *_unparsed(gathered),
            *(item for item in missing if item.rule == "unread-class"),
            *undecided,
        ),
        absent=tuple(item for item in missing if item.rule == "absent-class"),
        notes=(
            *gathered.notes,
            *_unread_bases(classes.values(), undecided),
            *dict.fromkeys(note for reader in readers for note in reader.notes),
            *_unanswered(hooks, read),
            *dict.fromkeys(note for pair in paired for note in _decorated(pair, every)),
        ),
    )


def _reader(gathered: Gathered, platform: str, hooks: tuple[str, ...], gates: Sequence[Gate]) -> Reader:
    on_class = frozenset(hook for engine in gathered.engines for hook in engine.on_class)
    markers = frozenset(marker for gate in gates for marker in gate.markers)
    return Reader(gathered.tree, platform, hooks, on_class, markers)


def _rows_of(pairs: Mapping[str, tuple[str, ...]], rows: Sequence[Listed]) -> Iterator[Listed]:
    """Rows for the classes that pairs name as "module:Class" and no list has."""
    known = {name for row in rows for name in (*row.archs, row.label)}
    named = dict.fromkeys(name for draft, targets in pairs.items() for name in (draft, *targets))
    for name in named:
        if ":" in name and name not in known:
            yield row_of(name)


def _unparsed(gathered: Gathered) -> Iterator[Trouble]:
    """The files asked for that do not parse; one elsewhere shows as the base or class that was not read."""
    folder = gathered.tree.folder
    for path, trouble in sorted(gathered.tree.troubles.items()):
        if folder is not None and path.is_relative_to(folder):
            yield trouble


def _missing(
    gathered: Gathered, rows: Sequence[Listed], answers: Mapping[str, Sequence[EntryClass | Unread]]
) -> Iterator[Trouble]:
    """The listed classes that no platform has."""
    for index, row in enumerate(rows):
        unread = [item for item in (items[index] for items in answers.values()) if isinstance(item, Unread)]
        if len(unread) < len(answers):
            continue
        label = row.label or row.name
        if not row.module.endswith(".py") and gathered.tree.find(row.module) is None:
            yield Trouble("absent-class", label, f"needs the module {row.module}, which is not here")
            continue
        file = gathered.tree.shown(Path(row.module)) if row.module.endswith(".py") else ""
        yield Trouble("unread-class", label, f"needs a class statement, got {unread[0].dotted}", file)


def _unanswered(hooks: Sequence[str], read: Mapping[str, Mapping[str, EntryClass]]) -> Iterator[Trouble]:
    """The hooks that were asked for by name and that nothing has: more likely a misspelling than parity."""
    answered = {hook for classes in read.values() for entry in classes.values() for hook in entry.hooks}
    for hook in hooks:
        if hook not in answered:
            yield Trouble("unanswered-hook", hook, "was asked for, and no entry class answers it")


def _decorated(pair: Paired, hooks: Sequence[str]) -> Iterator[Trouble]:
    """The classes of a pair that lack a hook their decorator may give them."""
    for entry in (pair.draft, pair.target):
        if entry.decorators and not entry.hooks.issuperset(hooks):
            text = f"is handed to {', '.join(entry.decorators)}, which was not read and may give it a hook"
            yield Trouble("unread-decorator", entry.name, text, entry.file, entry.line)


def _unread_bases(classes: Iterable[EntryClass], undecided: Sequence[Trouble]) -> Iterator[Trouble]:
    """Each base that was not read, once, with how many classes stand on it."""
    settled = {item.subject for item in undecided}
    standing: dict[str, list[EntryClass]] = {}
    for entry in classes:
        for base in entry.unread if entry.name not in settled else ():
            standing.setdefault(base, []).append(entry)
    for base, entries in sorted(standing.items()):
        first = entries[0]
        others = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
        text = f"was not read; {first.name}{others} may answer more than is counted"
        yield Trouble("unread-base", base, text, first.file, first.line)
