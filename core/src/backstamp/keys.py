"""What a key stands for: the ordered kernels behind it, and whose word that is.

In: a key as an operator wrote it, `name` or `distribution:name`. Out: kernel names as the index spells them, or the
error that nobody, two, a failed plugin or somebody else has the key. It judges no kernel.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstamp.catalogue import AliasRow, Catalogue
from backstamp.declarations import Slot
from backstamp.facts import Facts
from backstamp.first_party import is_trusted
from backstamp.plan_rows import PluginRef, Verdict, Warn
from backstamp.policy import Policy
from backstamp.refusals import conflicting_key, failed_key, foreign_alias, refused_key, unknown_key
from backstamp.text import canonical, qualified

if TYPE_CHECKING:
    from backstamp.selection import Table

__all__ = ["absent", "foreign_kernels", "kernels_of", "side_of"]


def kernels_of(facts: Facts, table: Table, key: str, who: str) -> tuple[tuple[str, ...], tuple[Warn, ...]]:
    """The ordered kernels a key stands for in this phase, and what to warn about the key itself.

    Raises:
        UnknownKey, NotInstalled, PluginFailed, AliasConflict, ForeignAlias, Refused: see `bind_key`.
    """
    name = _name_of(facts, table, key, who)
    row = facts.host.catalogue.aliases.get((table.slot, name))
    if row is None:
        return (name,), ()
    alias = row.alias
    warnings: tuple[Warn, ...] = ()
    if alias.deprecated is not None:
        warnings = (Warn("deprecated", f"{who}: {alias.key!r} is deprecated, use {alias.deprecated!r}"),)
    kernels = alias.for_phase(table.phase)
    if not kernels:
        none = Verdict(alias.key, False, "phase", "by_phase", f"a key for {table.phase}", "none listed")
        raise refused_key(facts, table, key, who, (none,))
    foreign = foreign_kernels(facts, table, row)
    if foreign and ":" not in key:
        raise foreign_alias(who, row, foreign)
    return tuple([side_of(facts, table.slot, kernel, row.plugin.distribution) for kernel in kernels]), warnings


def side_of(facts: Facts, slot: Slot, name: str, distribution: str = "") -> str:
    """A name as the index spells it: where two distributions claim it, the side of the one given, else of the one the
    policy chose; the bare name where neither says."""
    catalogue = facts.host.catalogue
    if (slot, name) not in catalogue.conflicts:
        return name
    for side in (qualified(f"{distribution}:{name}"), *_chosen(facts.launch.policy, name)):
        if _has(catalogue, slot, side):
            return side
    return name


def _name_of(facts: Facts, table: Table, key: str, who: str) -> str:
    """The catalogue's name for a key."""
    catalogue, slot = facts.host.catalogue, table.slot
    key = qualified(key)
    if _has(catalogue, slot, key):
        return key
    distribution, colon, bare = key.rpartition(":")
    conflict = catalogue.conflicts.get((slot, bare))
    if conflict is not None:
        name = side_of(facts, slot, bare, distribution)
        if _has(catalogue, slot, name) and (not colon or name == key):
            return name
        raise conflicting_key(who, conflict)
    owner = catalogue.owner(bare, slot)
    if owner is not None and (not colon or canonical(owner.distribution) == distribution):
        return bare
    failure = catalogue.failure_of(bare)
    if failure is not None:
        raise failed_key(who, bare, failure)
    raise unknown_key(facts.host, table, key, who)


def _chosen(policy: Policy, name: str) -> list[str]:
    return sorted(side for side in policy.duplicates if side.endswith(f":{name}"))


def _has(catalogue: Catalogue, slot: Slot, name: str) -> bool:
    return (slot, name) in catalogue.aliases or (slot, name) in catalogue.rows


def foreign_kernels(facts: Facts, table: Table, row: AliasRow) -> dict[str, PluginRef]:
    """Other distributions' kernels that an alias may not speak for: it is trusted with its own alone, unless it is
    first-party or allowed."""
    ours = row.plugin.distribution
    if is_trusted(ours, facts.launch.policy):
        return {}
    owners = {kernel: facts.host.catalogue.owner(kernel, table.slot) for kernel in row.alias.for_phase(table.phase)}
    return {kernel: owner for kernel, owner in owners.items() if owner is not None and owner.distribution != ours}


def absent(facts: Facts, slot: Slot, kernel: str) -> Verdict:
    """The verdict of a kernel no loaded plugin has: not installed, failed, claimed by two, or no kernel at all."""
    catalogue = facts.host.catalogue
    needed = f"a plugin that has {kernel}"
    conflict, failure = catalogue.conflicts.get((slot, kernel)), catalogue.failure_of(kernel)
    if conflict is not None:
        return Verdict(kernel, False, "conflict", "plugin", needed, f"two: {', '.join(conflict.distributions)}")
    if failure is not None:
        return Verdict(kernel, False, "failed", "plugin", needed, f"one that failed: {failure.cause}")
    if (slot, kernel) in catalogue.aliases:
        return Verdict(kernel, False, "alias", "kernels", "the name of a kernel", f"{kernel}, an alias itself")
    return Verdict(kernel, False, "not_installed", "plugin", needed, "none installed")
