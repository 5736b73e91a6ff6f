"""Reads the fields of one JSON record, typed: what a field must be, and one clear line where it is not.

In: parsed JSON. Out: words, numbers, lists and nested records. What a field means is said by the module that reads
it. A field that is missing, of another type or unknown is an error that names it by its path; nothing is filled in.

.. versionadded:: 0.2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from backstamp.errors import BadInput
from backstamp.text import plain

__all__ = ["JsonFields"]

_Word = TypeVar("_Word", bound=str)
_MISSING = "no such field"


class JsonFields:
    """One record, or one part of it; `error` is the class of what it raises, `path` where the part lies."""

    def __init__(self, data: object, who: str, error: type[BadInput], path: str = "") -> None:
        self.who, self.error, self.path = who, error, path
        if not isinstance(data, Mapping):
            raise error(self._at(path), needed="a JSON object", found=_short(data))
        self._data: Mapping[object, object] = data

    def only(self, known: Iterable[str]) -> JsonFields:
        """Refuse a field that is not among these: it would be a fact lost in silence."""
        names = list(known)
        for name in self._data:
            if name not in names:
                raise self.bad(str(name), f"one of {', '.join(names)}", "a field nobody knows")
        return self

    def names(self) -> tuple[str, ...]:
        """The names of a record whose keys are names."""
        for name in self._data:
            if not isinstance(name, str) or not name:
                raise self.error(self._at(self.path), needed="names as keys", found=_short(name))
        return tuple(str(name) for name in self._data)

    def has(self, name: str) -> bool:
        """Whether the field is there."""
        return name in self._data

    def schema(self, ours: int) -> None:
        """Refuse a record written to another schema."""
        value = self._data.get("schema")
        if isinstance(value, bool) or value != ours:
            found = _short(value) if "schema" in self._data else _MISSING
            raise self.bad("schema", str(ours), found, "Write it again with this version of Backstamp")

    def text(self, name: str) -> str:
        """A string, empty where it says nothing."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self.bad(name, "a string", _short(value))
        return value

    def word(self, name: str) -> str:
        """A string that says something."""
        value = self.text(name)
        if not value.strip():
            raise self.bad(name, "a word", repr(value))
        return value

    def word_or_none(self, name: str) -> str | None:
        """A word, or null."""
        return None if self._get(name) is None else self.word(name)

    def one_of(self, name: str, words: Sequence[_Word]) -> _Word:
        """One of these words."""
        value = self._get(name)
        for word in words:
            if value == word:
                return word
        raise self.bad(name, f"one of {', '.join(words)}", _short(value))

    def whole(self, name: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.bad(name, f"a whole number >= {least}", _short(value))
        return value

    def number(self, name: str) -> float:
        """A finite number, as it was written."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.bad(name, "a finite number", _short(value))
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false", _short(value))
        return value

    def value(self, name: str) -> object:
        """Whatever is there, to be read elsewhere."""
        return self._get(name)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._list(name)
        words = tuple(item for item in value if isinstance(item, str))
        if len(words) != len(value):
            raise self.bad(name, "a list of strings", _short(value))
        return words

    def wholes(self, name: str) -> tuple[int, ...]:
        """A list of whole numbers >= 0."""
        value = self._list(name)
        numbers = tuple(item for item in value if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
        if len(numbers) != len(value):
            raise self.bad(name, "a list of whole numbers >= 0", _short(value))
        return numbers

    def part(self, name: str) -> JsonFields:
        """A nested record."""
        return JsonFields(self._get(name), self.who, self.error, self._path(name))

    def part_or_none(self, name: str) -> JsonFields | None:
        """A nested record, or null."""
        return None if self._get(name) is None else self.part(name)

    def parts(self, name: str) -> tuple[JsonFields, ...]:
        """A list of nested records."""
        at = self._path(name)
        items = enumerate(self._list(name))
        return tuple(JsonFields(item, self.who, self.error, f"{at}[{index}]") for index, item in items)

    def bad(self, name: str, needed: str, found: str, fix: str = "") -> BadInput:
        """The error about one field of this record."""
        return self.error(self._at(self._path(name)), needed=needed, found=found, fix=fix)

    def _get(self, name: str) -> object:
        if name not in self._data:
            raise self.bad(name, "a value", _MISSING)
        return self._data[name]

    def _list(self, name: str) -> Sequence[object]:
        value = self._get(name)
        if not isinstance(value, list):
            raise self.bad(name, "a list", _short(value))
        return value

    def _path(self, name: str) -> str:
        return f"{self.path}.{plain(name)}" if self.path else plain(name)

    def _at(self, path: str) -> str:
        return f"{self.who}, field {path}" if path else self.who


def _is_finite(value: float) -> bool:
    """JSON has whole numbers of any length, which no float holds."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _short(value: object) -> str:
    text = plain(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
