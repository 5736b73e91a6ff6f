"""Reads the fields of one Hugging Face config.json, typed: what a field must be, and one clear line where it is not.

In: a parsed config. Out: numbers, words and flags. It knows no model: what a field means is said in
`backstamp.model_layers` and its neighbours. It never takes a wrong type for an unset field.

.. versionadded:: 0.1
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from backstamp.errors import BadModel

__all__ = ["Fields"]

#: A composite config keeps its language model under one of these; speculators' drafts use the last.
_NESTED: Final = ("text_config", "llm_config", "language_config", "transformer_layer_config")
#: What the composite says for all its parts; a part's own word wins.
_FROM_OUTSIDE: Final = ("dtype", "torch_dtype", "num_nextn_predict_layers")


@dataclass(frozen=True, slots=True)
class Fields:
    """One config, or one part of it; every error names the config and the field."""

    who: str
    data: Mapping[str, object]

    def language_model(self) -> Fields:
        """The part that holds the language model: a nested config, or this one."""
        for name in _NESTED:
            inner = self.data.get(name)
            if inner is None:
                continue
            if not isinstance(inner, Mapping):
                raise self.bad(name, "a nested config", repr(inner))
            outside = {field: self.data[field] for field in _FROM_OUTSIDE if field in self.data}
            own = {field: value for field, value in inner.items() if value is not None}
            return Fields(f"{self.who}, {name}", {**outside, **own})
        return self

    def over(self, changes: Mapping[str, object]) -> Fields:
        """The same config with some fields changed."""
        return Fields(self.who, {**self.data, **changes})

    def under(self, defaults: Mapping[str, object]) -> Fields:
        """The same config with fields it leaves out."""
        return Fields(
            self.who, {**defaults, **{field: value for field, value in self.data.items() if value is not None}}
        )

    def has(self, *names: str) -> bool:
        """Whether any of these fields is set (null is unset)."""
        return any(self.data.get(name) is not None for name in names)

    def whole(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """The first of these fields that is set, a whole number of at least `least`; the field must be there without
        `default`."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self.bad(name, f"a whole number >= {least}", repr(value))
            return value
        if default is None:
            raise self.bad(names[0], " or ".join(names), "no such field")
        return default

    def factor(self, name: str) -> float:
        """A finite number >= 0, 0.0 where unset."""
        value = self.data.get(name)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.bad(name, "a finite number >= 0", repr(value))
        return float(value)

    def flag(self, name: str) -> bool | None:
        """True, false, or None where unset."""
        value = self.data.get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self.bad(name, "true or false", repr(value))

    def text(self, name: str) -> str | None:
        """A word, or None where unset."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.bad(name, "a word", repr(value))
        return value

    def words(self, *names: str) -> list[str] | None:
        """The first of these fields that is set, a list of words; None where none is."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            words = [item for item in value if isinstance(item, str)] if isinstance(value, list) else None
            if words is None or not isinstance(value, list) or len(words) != len(value):
                raise self.bad(name, "a list of words", _short(value))
            return words
        return None

    def wholes(self, name: str, least: int = 0) -> list[int] | None:
        """A list of whole numbers of at least `least`, or None where unset."""
        value = self.data.get(name)
        if value is None:
            return None
        numbers = [
            item for item in value if isinstance(item, int) and not isinstance(item, bool) and item >= least
        ] if isinstance(value, list) else None  # fmt: skip
        if numbers is None or not isinstance(value, list) or len(numbers) != len(value):
            raise self.bad(name, f"a list of whole numbers >= {least}", _short(value))
        return numbers

    def part(self, name: str) -> Fields | None:
        """A nested object, or None where unset."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.bad(name, "an object", _short(value))
        return Fields(f"{self.who}, {name}", value)

    def bad(self, name: str, needed: str, found: str) -> BadModel:
        """The error about one field of this config."""
        return BadModel(f"{self.who}, field {name}", needed=needed, found=found)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
