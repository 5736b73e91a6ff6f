"""How two spellings of declarations are read, once for everybody: joined conditions, and the dtype called "same".

In: words of an `Offer`. Out: sets to compare. It compares nothing itself.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["holding", "real_dtypes", "words_of"]


def words_of(condition: str) -> frozenset[str]:
    """The words that must hold together: "spec+dcp" is two."""
    return frozenset(condition.split("+"))


def holding(conditions: Iterable[str], words: frozenset[str]) -> list[str]:
    """The conditions all of whose words hold, in order."""
    return sorted(condition for condition in conditions if words_of(condition) <= words)


def real_dtypes(names: Iterable[str], dtype: str) -> frozenset[str]:
    """Declared dtypes for queries of `dtype`: "same" is the query's own."""
    return frozenset(dtype if name == "same" else name for name in names)
