"""How words of declarations are read, once for everybody: joined conditions, the dtype called "same", conversions.

In: words of an `Offer`. Out: sets to compare, and the dtype a kernel reads a stored one in. It refuses nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["holding", "read_as", "real_dtypes", "widens", "words_of"]


def words_of(condition: str) -> frozenset[str]:
    """The words that must hold together: "spec+dcp" is two."""
    return frozenset(condition.split("+"))


def holding(conditions: Iterable[str], words: frozenset[str]) -> list[str]:
    """The conditions all of whose words hold, in order."""
    return sorted(condition for condition in conditions if words_of(condition) <= words)


def real_dtypes(names: Iterable[str], dtype: str) -> frozenset[str]:
    """Declared dtypes for queries of `dtype`: "same" is the query's own."""
    return frozenset(dtype if name == "same" else name for name in names)


def widens(stored: str, wanted: str) -> bool:
    """Whether every value of one dtype is exact in another, wider one: bf16 and fp16 in fp32, and no others."""
    return stored in ("bf16", "fp16") and wanted == "fp32"


def read_as(reads: Collection[str], conversion: str, stored: str) -> str | None:
    """The dtype a kernel that reads these reads a stored parameter in: as stored, or as its `conversion` ("no",
    "lossless", "any") makes it; None where it cannot.

    Of several it takes the widest, so that nothing is lost needlessly.
    """
    if stored in reads:
        return stored
    if "fp32" in reads and (conversion == "any" or (conversion == "lossless" and widens(stored, "fp32"))):
        return "fp32"
    return min(reads, default=None) if conversion == "any" else None
