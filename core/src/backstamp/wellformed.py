"""Whether the values of declared rows are what their fields say, and fit to be printed.

In: a plugin's `Declared`. Out: every fault, as text. It reads types and characters only; what the values mean is
`backstamp.soundness`'s to judge. A name that got past here reaches terminals, JSON, paths and comma-separated lists.

.. versionadded:: 0.2
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from typing import Final, cast

from backstamp.declarations import (
    Alias,
    EntryPair,
    FamilyDefault,
    FeatureDefault,
    Offer,
    PageSizes,
    RetiredSetting,
)
from backstamp.declared import Declared
from backstamp.text import plain

__all__ = ["malformed"]

_LIMIT_CHARACTERS: Final = 300
_NAME_CHARACTERS: Final = 100
#: Characters that end or split a name elsewhere: lists, `distribution:name`, paths, shells.
_NOT_IN_NAMES: Final = frozenset(",:/\\;|&<>'\"`$")
#: Words that stand for no kernel wherever a kernel's name may stand.
_RESERVED: Final = frozenset({"auto", "default", "none"})
_ROWS: Final[Mapping[str, type]] = {
    "offers": Offer,
    "aliases": Alias,
    "entry_classes": EntryPair,
    "retired_settings": RetiredSetting,
    "family_defaults": FamilyDefault,
    "feature_defaults": FeatureDefault,
}
#: The type of a field by the first word of its annotation; other fields are words (`Literal`, `str`).
_KINDS: Final[tuple[tuple[str, type], ...]] = (
    ("tuple", tuple),
    ("HeadDims", tuple),
    ("GroupSizes", tuple),
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
            kind = _ROWS[table.name]
            found = _row_faults(row) if type(row) is kind else [f"needs {kind.__name__}, got {type(row).__name__}"]
            faults += [f"{table.name}[{at}]: {fault}" for fault in found]
    return [plain(fault) for fault in dict.fromkeys(faults)]


def _row_faults(row: object) -> Iterable[str]:
    texts: list[tuple[str, str]] = []
    for name, kind, inner, optional in _columns(cast("Hashable", type(row))):
        value: object = getattr(row, name)
        if value is None and optional:
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            yield f"{name} needs {kind.__name__}, got {type(value).__name__}"
        elif isinstance(value, Mapping) and not all(isinstance(part, inner) for part in value.values()):
            yield f"{name} needs {inner.__name__} for every key, got {value!r}"
        elif not _holds_texts(value) and name not in ("head_dims", "group_sizes"):
            yield f"{name} needs text inside, got {value!r}"
        elif _holds_blanks(value):
            yield f"{name} needs words inside, got an empty one in {value!r}"
        else:
            _collect(name, value, texts)
            yield from _page_faults(value)
    # one look at everything; which text it is matters only where something is wrong
    together = "".join(text for _, text in texts)
    if not together.isprintable() or "::" in together or any(_is_odd(text) for _, text in texts):
        yield from (f"{name} {fault}" for name, text in texts for fault in _text_faults(text))
    if isinstance(row, Offer):
        yield from (f"kernel {fault}" for fault in _name_faults(row.kernel))
    elif isinstance(row, Alias) and _holds_texts(row.kernels) and isinstance(row.by_phase, Mapping):
        kernels = (*row.kernels, *(kernel for listed in row.by_phase.values() for kernel in listed))
        yield from (f"key {fault}" for fault in _name_faults(row.key))
        yield from (f"kernels {fault}" for kernel in kernels for fault in _name_faults(kernel))


@functools.cache
def _columns(row: Hashable) -> tuple[tuple[str, type, type, bool], ...]:
    """Each field of a row class: its name, the type its annotation stands for, that of a mapping's values, and whether
    None is one of its values."""
    columns = []
    for item in fields(row):  # type: ignore[arg-type]
        annotation = str(item.type)
        kind = next((kind for word, kind in _KINDS if annotation.startswith(word)), str)
        inner = next((kind for word, kind in _KINDS if f" {word}[" in annotation), str)
        columns.append((item.name, kind, inner, "None" in annotation))
    return tuple(columns)


def _collect(name: str, value: object, texts: list[tuple[str, str]]) -> None:
    """Every text inside a value, however deep."""
    if isinstance(value, str):
        texts.append((name, value))
    elif isinstance(value, Mapping):
        for pair in value.items():
            _collect(name, pair, texts)
    elif isinstance(value, (tuple, list, frozenset, set)):
        for part in value:
            _collect(name, part, texts)


def _holds_texts(value: object) -> bool:
    """Whether a collection holds text alone, however deep; any other value passes."""
    if isinstance(value, Mapping):
        value = tuple(part for pair in value.items() for part in pair)
    if not isinstance(value, (tuple, list, frozenset, set)):
        return True
    return all(isinstance(part, (str, tuple, frozenset)) and _holds_texts(part) for part in value)


def _holds_blanks(value: object) -> bool:
    """Whether a collection holds an empty word; a mapping's keys may be what somebody left empty."""
    parts = tuple(value.values()) if isinstance(value, Mapping) else value
    if not isinstance(parts, (tuple, list, frozenset, set)):
        return False
    return any(not part.strip() if isinstance(part, str) else _holds_blanks(part) for part in parts)


def _page_faults(value: object) -> Iterable[str]:
    if not isinstance(value, PageSizes):
        return
    for name, size in (("preferred", value.preferred), ("multiple_of", value.multiple_of)):
        if type(size) is not int:
            yield f"page_sizes.{name} needs int, got {type(size).__name__}"
    exact: object = value.exact
    if not isinstance(exact, tuple):
        yield f"page_sizes.exact needs tuple, got {type(exact).__name__}"
    elif not all(type(size) is int for size in exact):
        yield f"page_sizes.exact needs int inside, got {exact!r}"


def _is_odd(text: str) -> bool:
    return type(text) is not str or len(text) > _LIMIT_CHARACTERS


def _text_faults(text: str) -> Iterable[str]:
    # a subclass could compare as one word and print as another
    if type(text) is not str:
        yield f"needs plain text, got {type(text).__name__}"
    elif len(text) > _LIMIT_CHARACTERS:
        yield f"needs at most {_LIMIT_CHARACTERS} characters, got {len(text)}"
    elif not text.isprintable() or "::" in text:
        yield f"needs one printable line without '::', got {text!r}"


def _name_faults(name: object) -> Iterable[str]:
    # an empty name is an empty declaration, which soundness words
    if not isinstance(name, str) or not name.strip():
        return
    if len(name) > _NAME_CHARACTERS:
        yield f"needs at most {_NAME_CHARACTERS} characters, got {len(name)}"
    elif _NOT_IN_NAMES & set(name) or name != name.strip() or any(char.isspace() for char in name):
        yield f"needs a word without separators, got {name!r}"
    elif not (name[0].isalnum() or name[0] == "_"):
        # `..` is a path and `-k` a flag
        yield f"needs to start with a letter or a digit, got {name!r}"
    elif name.lower() in _RESERVED:
        yield f"needs a name of its own, got {name!r}, which means that no kernel is named"
