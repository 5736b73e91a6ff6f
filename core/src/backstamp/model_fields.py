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

__all__ = ["LANGUAGE_PARTS", "Fields"]

#: A composite config keeps its language model under one of these: Qwen-Omni's in two steps (the thinker, then its
#: text_config), speculators' drafts under the last.
LANGUAGE_PARTS: Final = (
    "thinker_config",
    "text_config",
    "llm_config",
    "language_config",
    "transformer_layer_config",
)
#: What the composite says for all its parts; a part's own word wins.
_FROM_OUTSIDE: Final = ("dtype", "torch_dtype", "num_nextn_predict_layers")
#: One of these is there in a config that keeps its language model flat beside its towers.
_FLAT: Final = ("num_attention_heads", "n_head", "num_hidden_layers", "n_layer")
#: More layers than any model has; a count beyond it is a slip, not a reason to run out of memory.
_MOST_LAYERS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Fields:
    """One config, or one part of it; every error names the config and the field."""

    who: str
    data: Mapping[str, object]

    def language_model(self) -> Fields:
        """The part that holds the language model: a nested config, or this one.

        Raises:
            BadModel: the part is named and is no config, or is null and nothing is said in its place.
        """
        for name in LANGUAGE_PARTS:
            inner = self.data.get(name)
            if inner is None:
                continue
            if not isinstance(inner, Mapping):
                raise self.bad(name, "a nested config", repr(inner))
            outside = {field: self.data.get(field) for field in _FROM_OUTSIDE if inner.get(field) is None}
            return Fields(f"{self.who}, {name}", {**inner, **outside}).language_model()
        empty = [name for name in LANGUAGE_PARTS if name in self.data]
        if empty and not self.has(*_FLAT):
            raise self.bad(empty[0], "a nested config", "null")
        return self

    def over(self, changes: Mapping[str, object]) -> Fields:
        """The same config with some fields changed."""
        return Fields(self.who, {**self.data, **changes})

    def under(self, defaults: Mapping[str, object]) -> Fields:
        """The same config with fields it leaves out; one it sets to null is not left out."""
        return Fields(self.who, {**defaults, **self.data})

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

    def count(self, *names: str, default: int | None = None) -> int:
        """A number of layers, as `whole`."""
        value = self.whole(*names, default=default)
        if value > _MOST_LAYERS:
            raise self.bad(names[0], f"at most {_MOST_LAYERS} layers", str(value))
        return value

    def factor(self, name: str) -> float:
        """A finite number >= 0, 0.0 where unset."""
        value = self.data.get(name)
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self.bad(name, "a finite number >= 0", repr(value))
        return float(value)

    def below_zero(self, name: str) -> float | None:
        """A finite number < 0, or None where unset."""
        value = self.data.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value >= 0:
            raise self.bad(name, "a finite number < 0", repr(value))
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
