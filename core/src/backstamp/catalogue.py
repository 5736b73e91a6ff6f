"""Fourth step of the flow: every plugin's declarations as one immutable snapshot.

In: a `Discovery`. Out: a `Catalogue` of rows, aliases, conflicts and failures, the same whatever the discovery order.
A conflict poisons the one name two distributions claim and names both; every other name stays usable.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from backstamp.declarations import Alias, Offer, Slot
from backstamp.defaults import Defaults, collect_defaults
from backstamp.discovery import Discovery, Failure, Found
from backstamp.errors import DeclarationError
from backstamp.first_party import FIRST_PARTY
from backstamp.plan_rows import GroupPlan, PluginRef
from backstamp.soundness import faults_of
from backstamp.text import qualified

__all__ = ["AliasRow", "Catalogue", "Conflict", "Row", "build_catalogue"]


class Row(NamedTuple):
    """One offer and the plugin that declares it."""

    offer: Offer
    plugin: PluginRef


class AliasRow(NamedTuple):
    """One alias and the plugin that declares it."""

    alias: Alias
    plugin: PluginRef


class Conflict(NamedTuple):
    """A name that more than one distribution claims."""

    name: str
    slot: Slot
    distributions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All declarations and all failures of one process, frozen.

    `rows` are grouped by (slot, kernel) in name order; `aliases` by (slot, key). A name that two distributions claim
    is in `conflicts`; what each of them has is in `rows` and `aliases` under `distribution:name`, and only there.
    `parent_only` are names that the parent process registered and this one did not.
    """

    rows: Mapping[tuple[Slot, str], tuple[Row, ...]] = field(default_factory=dict)
    aliases: Mapping[tuple[Slot, str], AliasRow] = field(default_factory=dict)
    conflicts: Mapping[tuple[Slot, str], Conflict] = field(default_factory=dict)
    defaults: Defaults = field(default_factory=Defaults)
    parent_only: frozenset[str] = frozenset()
    failures: tuple[Failure, ...] = ()
    found: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def keys(self, slot: Slot) -> tuple[str, ...]:
        """Every key an operator may type for a slot: kernel names and alias names."""
        kernels = [kernel for at, kernel in self.rows if at == slot]
        return tuple(sorted({*kernels, *(key for at, key in self.aliases if at == slot)}))

    def owner(self, key: str, slot: Slot) -> PluginRef | None:
        """The plugin that declares a key, if one does."""
        if (slot, key) in self.aliases:
            return self.aliases[slot, key].plugin
        rows = self.rows.get((slot, key))
        return rows[0].plugin if rows else None

    def row(self, slot: Slot, group: GroupPlan) -> Row | None:
        """The declared row a group's plan accepted; None where other plugins are installed than it was made with."""
        for name in (group.kernel, qualified(f"{group.plugin.distribution}:{group.kernel}")):
            rows = self.rows.get((slot, name), ())
            if group.row < len(rows):
                row = rows[group.row]
                if row.plugin == group.plugin and row.offer.family == group.family:
                    return row
        return None

    def failure_of(self, name: str) -> Failure | None:
        """The failed plugin known to own a name, if one does."""
        for failure in self.failures:
            if name in failure.names or FIRST_PARTY.get(name) == failure.plugin.distribution:
                return failure
        return None

    def is_alias_only(self, name: str, slot: Slot) -> bool:
        """Whether a name is a key but no kernel: such a name is never a stamp."""
        return (slot, name) in self.aliases and (slot, name) not in self.rows


def build_catalogue(discovery: Discovery) -> Catalogue:
    """Check every plugin's rows and join them; a plugin with faulty rows becomes a failure listing all its faults."""
    sound: list[Found] = []
    failures = list(discovery.failures)
    for found in discovery.found:
        try:
            faults = faults_of(found.declared, found.packages)
        except (TypeError, AttributeError, ValueError, KeyError, AssertionError) as error:
            # a field of the wrong type; one plugin must not take the others down
            faults = [f"a field has the wrong type ({error})"]
        if faults:
            failures.append(_faulty(found, faults))
        else:
            sound.append(found)
    contested = {key: owners for key, owners in _owners(sound).items() if len(owners) > 1}
    rows = _collect_rows(sound, contested)
    aliases = _collect_aliases(sound, contested)
    defaults = collect_defaults(sound)
    return Catalogue(
        rows={key: tuple(rows[key]) for key in sorted(rows)},
        aliases={key: aliases[key] for key in sorted(aliases)},
        conflicts={key: _conflict(key, contested[key]) for key in sorted(contested)},
        defaults=defaults,
        parent_only=discovery.parent_only,
        failures=tuple(sorted(failures, key=lambda failure: failure.plugin)),
        found=tuple(sorted(sound, key=lambda item: item.plugin)),
        notes=(*discovery.notes, *defaults.notes),
    )


def _faulty(found: Found, faults: list[str]) -> Failure:
    who = f"plugin {found.plugin.name} ({found.plugin.distribution} {found.plugin.version})"
    error = DeclarationError(
        who, needed="declarations that hold together", found="; ".join(faults), fix="Correct plugin.py and declare anew"
    )
    # a faulty name may be anything, a list too
    named: list[object] = [offer.kernel for offer in found.declared.offers]
    named += [alias.key for alias in found.declared.aliases]
    return Failure(
        plugin=found.plugin,
        entry=found.module,
        cause=f"DeclarationError: {'; '.join(faults)}",
        error=error,
        names=frozenset({found.plugin.name, *(name for name in named if isinstance(name, str))}),
    )


Contested = Mapping[tuple[Slot, str], set[str]]


def _collect_rows(sound: Iterable[Found], contested: Contested) -> dict[tuple[Slot, str], list[Row]]:
    rows: dict[tuple[Slot, str], list[Row]] = {}
    for found in sorted(sound, key=lambda item: item.plugin):
        for offer in found.declared.offers:
            name = _name(offer.slot, offer.kernel, found, contested)
            rows.setdefault((offer.slot, name), []).append(Row(offer, found.plugin))
    return rows


def _collect_aliases(sound: Iterable[Found], contested: Contested) -> dict[tuple[Slot, str], AliasRow]:
    aliases: dict[tuple[Slot, str], AliasRow] = {}
    for found in sorted(sound, key=lambda item: item.plugin):
        for alias in found.declared.aliases:
            name = _name(alias.slot, alias.key, found, contested)
            aliases.setdefault((alias.slot, name), AliasRow(alias, found.plugin))
    return aliases


def _name(slot: Slot, name: str, found: Found, contested: Contested) -> str:
    return qualified(f"{found.plugin.distribution}:{name}") if (slot, name) in contested else name


def _owners(sound: Iterable[Found]) -> dict[tuple[Slot, str], set[str]]:
    """Which distributions claim each name; an alias and a kernel of one name are one claim to it."""
    owners: dict[tuple[Slot, str], set[str]] = {}
    for found in sound:
        names = [(offer.slot, offer.kernel) for offer in found.declared.offers]
        names += [(alias.slot, alias.key) for alias in found.declared.aliases]
        for name in names:
            owners.setdefault(name, set()).add(found.plugin.distribution)
    return owners


def _conflict(key: tuple[Slot, str], owners: set[str]) -> Conflict:
    slot, name = key
    return Conflict(name, slot, tuple(sorted(owners)))
