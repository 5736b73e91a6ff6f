"""Whether the values of declared rows are what their fields say, and fit to be printed.

In: a plugin's `Declared`. Out: every fault, as text. It reads types and characters only; what the values mean is
`backstamp.soundness`'s to judge. A name that got past here reaches terminals, JSON, paths and comma-separated lists.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Final

from backstamp.declarations import Alias, Offer, PageSizes
from backstamp.declared import Declared
from backstamp.text import plain

__all__ = ["malformed"]

_LIMIT_CHARACTERS: Final = 300
_NAME_CHARACTERS: Final = 100
#: Characters that end or split a name elsewhere: lists, `distribution:name`, paths, shells.
_NOT_IN_NAMES: Final = frozenset(",:/\\;|&<>'\"`$")
#: The type of a field by the first word of its annotation; other fields are words (`Literal`, `str`).
_KINDS: Final[tuple[tuple[str, type], ...]] = (
    ("tuple", tuple),
    ("HeadDims", tuple),
    ("frozenset", frozenset),
    ("Mapping", Mapping),
    ("PageSizes", PageSizes),
    ("bool", bool),
    ("int", int),
)


def malformed(declared: Declared) -> list[str]:
    """Every value of a wrong type, and every text that must not be printed or named; empty where all is well."""
    faults: list[str] = []
    for table in fields(declared):
        rows: tuple[object, ...] = getattr(declared, table.name)
        for at, row in enumerate(rows):
            faults += [f"{table.name}[{at}]: {fault}" for fault in _row_faults(row)]
    return [plain(fault) for fault in dict.fromkeys(faults)]


def _row_faults(row: object) -> Iterable[str]:
    for item in fields(row):  # type: ignore[arg-type]
        value: object = getattr(row, item.name)
        annotation = str(item.type)
        if value is None and "None" in annotation:
            continue
        kind = next((kind for word, kind in _KINDS if annotation.startswith(word)), str)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            yield f"{item.name} needs {kind.__name__}, got {type(value).__name__}"
            continue
        yield from (f"{item.name} {fault}" for fault in _text_faults(value))
    if isinstance(row, Offer):
        yield from (f"kernel {fault}" for fault in _name_faults(row.kernel))
    elif isinstance(row, Alias):
        kernels = (*row.kernels, *(kernel for listed in row.by_phase.values() for kernel in listed))
        yield from (f"key {fault}" for fault in _name_faults(row.key))
        yield from (f"kernels {fault}" for kernel in kernels for fault in _name_faults(kernel))


def _text_faults(value: object) -> Iterable[str]:
    """Faults of every text inside a value, however deep."""
    if isinstance(value, str):
        # a subclass could compare as one word and print as another
        if type(value) is not str:
            yield f"needs plain text, got {type(value).__name__}"
        elif len(value) > _LIMIT_CHARACTERS:
            yield f"needs at most {_LIMIT_CHARACTERS} characters, got {len(value)}"
        elif not value.isprintable() or "::" in value:
            yield f"needs one printable line without '::', got {value!r}"
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _text_faults(pair)
    elif isinstance(value, (tuple, list, frozenset, set)):
        for part in value:
            yield from _text_faults(part)


def _name_faults(name: object) -> Iterable[str]:
    if not isinstance(name, str):
        yield f"needs text, got {type(name).__name__}"
    elif not name.strip():
        # an empty name is an empty declaration, which soundness words
        return
    elif len(name) > _NAME_CHARACTERS:
        yield f"needs at most {_NAME_CHARACTERS} characters, got {len(name)}"
    elif _NOT_IN_NAMES & set(name) or name != name.strip() or any(char.isspace() for char in name):
        yield f"needs a word without separators, got {name!r}"
