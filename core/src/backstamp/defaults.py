"""What plugins declare beside kernels: family defaults, tombstones of retired settings, features on by default.

In: the sound plugins of a catalogue. Out: `Defaults`, the same whatever the discovery order, with every distribution's
row of a thing. Whose row counts is settled by `settle`, where the operator's policy is known: trust decides first, and
what two say differently that are trusted alike is said by neither.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from backstamp.declarations import Device, EntryPair, FamilyDefault, FeatureDefault, RetiredSetting, Role
from backstamp.discovery import Found
from backstamp.first_party import is_trusted
from backstamp.text import canonical

if TYPE_CHECKING:
    from backstamp.policy import Policy

__all__ = ["Defaults", "FamilyKey", "FeatureKey", "Said", "Settled", "collect_defaults", "settle", "undenied"]

Row = TypeVar("Row")
#: Rows about one thing, each with the distribution that says it.
Said = tuple[tuple[Row, str], ...]


class FamilyKey(NamedTuple):
    """What a family default speaks about."""

    model_type: str
    component: str
    role: Role


class FeatureKey(NamedTuple):
    """What a feature default speaks about: one optimisation on one kind of device."""

    feature: str
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Each thing with all that is said of it; `notes` name what is said differently, and by whom."""

    families: Mapping[FamilyKey, Said[FamilyDefault]] = field(default_factory=dict)
    retired: Mapping[str, Said[RetiredSetting]] = field(default_factory=dict)
    features: Mapping[FeatureKey, Said[FeatureDefault]] = field(default_factory=dict)
    entry_pairs: tuple[tuple[EntryPair, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Settled(Generic[Row]):
    """Whose row of one thing counts.

    Attributes:
        row: the row that counts; None where those trusted alike differ.
        distribution: who says it. trusted: whether that one may speak for kernels that are not its own.
        left_out: untrusted rows that a trusted one stands before, and that differ from it; none of a denied one's.
        contradicted: who says different things, so that neither counts.
    """

    row: Row | None
    distribution: str
    trusted: bool
    left_out: Said[Row]
    contradicted: tuple[str, ...] = ()


def collect_defaults(sound: Iterable[Found]) -> Defaults:
    """Join what the plugins say, every distribution's row of each thing."""
    plugins = sorted(sound, key=lambda item: item.plugin)
    notes: list[str] = []
    families = [(_family_key(row), row, item) for item in plugins for row in item.declared.family_defaults]
    retired = [(row.name, row, item) for item in plugins for row in item.declared.retired_settings]
    features = [
        (FeatureKey(row.feature, row.device), row, item) for item in plugins for row in item.declared.feature_defaults
    ]
    return Defaults(
        families=_gathered("family default", families, notes),
        retired=_gathered("retired setting", retired, notes),
        features=_gathered("feature default", features, notes),
        entry_pairs=tuple((pair, item.plugin.distribution) for item in plugins for pair in item.declared.entry_classes),
        notes=tuple(notes),
    )


def undenied(said: Said[Row], policy: Policy) -> Said[Row]:
    """The rows of distributions that the operator does not deny: the wishes of those it denies are none."""
    return tuple([item for item in said if canonical(item[1]) not in policy.deny])


def settle(said: Said[Row], policy: Policy) -> Settled[Row]:
    """Whose row counts: a trusted one before any other; like rows of two are one row."""
    trusted = [item for item in said if is_trusted(item[1], policy)]
    ranked = trusted or list(said)
    row, distribution = ranked[0]
    # of whoever the operator denies nobody expects a word
    others = [item for item in said if item not in trusted and canonical(item[1]) not in policy.deny]
    left_out = tuple([item for item in others if trusted and item[0] != row])
    if any(other != row for other, _ in ranked):
        owners = tuple(sorted({owner for _, owner in ranked}))
        return Settled(None, distribution, bool(trusted), left_out, owners)
    return Settled(row, distribution, bool(trusted), left_out)


def _family_key(row: FamilyDefault) -> FamilyKey:
    return FamilyKey(row.model_type, row.component, row.role)


Key = TypeVar("Key", bound="str | tuple[str, ...]")


def _gathered(what: str, rows: Sequence[tuple[Key, Row, Found]], notes: list[str]) -> dict[Key, Said[Row]]:
    """Every row by what it speaks about."""
    said: dict[Key, Said[Row]] = {}
    for key, row, found in rows:
        said[key] = (*said.get(key, ()), (row, found.plugin.distribution))
    for key, of_key in said.items():
        if any(row != of_key[0][0] for row, _ in of_key):
            name = key if isinstance(key, str) else " ".join(key)
            owners = " and ".join(dict.fromkeys(owner for _, owner in of_key))
            notes.append(f"{what} {name}: {owners} say different things; a trusted one counts, of equals neither")
    return said
