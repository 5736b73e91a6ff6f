"""What plugins declare beside kernels: family defaults, tombstones of retired settings, features on by default.

In: the sound plugins of a catalogue. Out: `Defaults`, the same whatever the discovery order. What two distributions
say differently about one thing is said by neither, and a note names both.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from backstamp.declarations import EntryPair, FamilyDefault, FeatureDefault, RetiredSetting, Role
from backstamp.discovery import Found

__all__ = ["Defaults", "FamilyKey", "collect_defaults"]

Row = TypeVar("Row")


class FamilyKey(NamedTuple):
    """What a family default speaks about."""

    model_type: str
    component: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Each with the distribution that says it; `notes` name what was dropped and why."""

    families: Mapping[FamilyKey, tuple[FamilyDefault, str]] = field(default_factory=dict)
    retired: Mapping[str, tuple[RetiredSetting, str]] = field(default_factory=dict)
    features: Mapping[str, tuple[FeatureDefault, str]] = field(default_factory=dict)
    entry_pairs: tuple[tuple[EntryPair, str], ...] = ()
    notes: tuple[str, ...] = ()


def collect_defaults(sound: Iterable[Found]) -> Defaults:
    """Join what the plugins say, one owner a thing."""
    plugins = sorted(sound, key=lambda item: item.plugin)
    families = [(_family_key(row), row, item) for item in plugins for row in item.declared.family_defaults]
    retired = [(row.name, row, item) for item in plugins for row in item.declared.retired_settings]
    features = [(row.feature, row, item) for item in plugins for row in item.declared.feature_defaults]
    notes: list[str] = []
    return Defaults(
        families=_owned("family default", families, notes),
        retired=_owned("retired setting", retired, notes),
        features=_owned("feature default", features, notes),
        entry_pairs=tuple((pair, item.plugin.distribution) for item in plugins for pair in item.declared.entry_classes),
        notes=tuple(notes),
    )


def _family_key(row: FamilyDefault) -> FamilyKey:
    return FamilyKey(row.model_type, row.component, row.role)


Key = TypeVar("Key", bound=Hashable)


def _owned(what: str, rows: Iterable[tuple[Key, Row, Found]], notes: list[str]) -> dict[Key, tuple[Row, str]]:
    """The rows whose key one distribution alone speaks about; like rows of two are one row."""
    owned: dict[Key, tuple[Row, str]] = {}
    dropped: dict[Key, list[str]] = {}
    for key, row, found in rows:
        before = owned.setdefault(key, (row, found.plugin.distribution))
        if before[0] != row:
            dropped.setdefault(key, [before[1]]).append(found.plugin.distribution)
    for key, owners in dropped.items():
        del owned[key]
        name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
        notes.append(f"{what} {name}: {' and '.join(dict.fromkeys(owners))} say different things, so neither counts")
    return owned
