"""Reads the fields of one host file, typed: what a field must be, and one clear line where it is not.

In: parsed JSON. Out: words, numbers and lists. What a field means is said in `backstamp.host`. A field nobody knows is
an error, because a misspelt one would be a fact lost in silence.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from backstamp.errors import BadHost
from backstamp.text import near

__all__ = ["SCHEMA", "WHAT_IS_A_HOST", "HostFields"]

SCHEMA: Final = 1
WHAT_IS_A_HOST: Final = "Record one with `backstamp hosts record`, or name one of `backstamp hosts list`"


class HostFields:
    """One host as it was written; every error names the host and the field."""

    def __init__(self, data: object, who: str) -> None:
        self._who = who
        if not isinstance(data, Mapping):
            raise BadHost(who, needed="a JSON object", found=type(data).__name__, fix=WHAT_IS_A_HOST)
        self._data: Mapping[str, object] = data
        self.recorded = "schema" in data
        if self.recorded and (data["schema"] != SCHEMA or isinstance(data["schema"], bool)):
            raise self.bad("schema", str(SCHEMA), repr(data["schema"]))

    def only(self, known: Sequence[str]) -> None:
        """Refuse a field that is not among these; one that starts with an underscore is a remark."""
        for name in self._data:
            if name not in known and not name.startswith("_"):
                match = near(name, list(known))
                fix = f"Did you mean {match!r}?" if match is not None else WHAT_IS_A_HOST
                raise BadHost(f"{self._who}, field {name}", needed=f"one of {', '.join(known)}", found=name, fix=fix)

    def text(self, name: str, default: str | None = None) -> str:
        """A word; it must be there, and say something, without `default`."""
        value = self._data.get(name, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self.bad(name, "a word", repr(value) if name in self._data else "no such field")
        return value

    def texts(self, names: Sequence[str]) -> dict[str, str]:
        """Those of these words that are there."""
        return {name: self.text(name) for name in names if name in self._data}

    def whole(self, name: str) -> int:
        """A whole number >= 0, 0 where unset."""
        value = self._data.get(name, 0)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.bad(name, "a whole number >= 0", repr(value))
        return value

    def flag(self, name: str) -> bool:
        """True or false, false where unset."""
        value = self._data.get(name, False)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false", repr(value))
        return value

    def words(self, name: str) -> list[str]:
        """A list of words, empty where unset."""
        value = self._list(name)
        words = [item for item in value if isinstance(item, str)]
        if len(words) != len(value):
            raise self.bad(name, "a list of words", repr(value))
        return words

    def pairs(self, name: str) -> dict[str, str] | None:
        """Words by name, or None where unset; a version that is null is unknown."""
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(item is None or isinstance(item, str) for item in value.values()):
            raise self.bad(name, "names with versions", repr(value))
        return {str(key): "unknown" if version is None else str(version) for key, version in value.items()}

    def rows(self, name: str, kinds: tuple[type[object], ...]) -> list[tuple[object, ...]]:
        """A list of rows, each with a value of each of these types; empty where unset."""
        rows: list[tuple[object, ...]] = []
        for item in self._list(name):
            # bool is an int to isinstance, and no device number
            if not isinstance(item, list) or [type(value) for value in item] != list(kinds):
                raise self.bad(name, f"rows of {', '.join(kind.__name__ for kind in kinds)}", repr(item))
            rows.append(tuple(item))
        return rows

    def bad(self, name: str, needed: str, found: str) -> BadHost:
        """The error about one field of this host."""
        return BadHost(f"{self._who}, field {name}", needed=needed, found=found, fix=WHAT_IS_A_HOST)

    def _list(self, name: str) -> list[object]:
        value = self._data.get(name, [])
        if not isinstance(value, list):
            raise self.bad(name, "a list", repr(value))
        return value
