"""What aliases, tombstones and defaults lead to: nowhere, in a circle, or past kernels they list.

In: a catalogue and known hosts. Out: findings, each with the plugin that said it. An alias lists kernels: an entry
that is only another alias's key is a fault, because no list is followed into another.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from backstamp.catalogue import AliasRow, Catalogue
from backstamp.declarations import PHASES, Alias, FamilyDefault, FeatureDefault, Phase, RetiredSetting, Slot
from backstamp.first_party import FIRST_PARTY, FIRST_PARTY_DISTRIBUTIONS
from backstamp.host import HostFacts
from backstamp.hostfit import archs_fit
from backstamp.launch import FLAGS
from backstamp.lint_reach import covers, hosts_of, misspelt
from backstamp.lint_rows import Said
from backstamp.text import near

__all__ = ["alias_flaws", "cycles", "family_flaws", "feature_flaws", "retired_flaws"]

#: What these take is a kernel's own inner choice, no key of a slot.
_NO_KEYS: Final = ("dsa_prefill_backend", "dsa_decode_backend")


def alias_flaws(row: AliasRow, catalogue: Catalogue, hosts: Sequence[HostFacts]) -> Iterator[Said]:
    """What is wrong with one alias, but for circles."""
    alias = row.alias
    in_a_circle = {edge for circle in cycles(catalogue) for edge in _edges(circle)}
    for name in dict.fromkeys([*alias.kernels, *(name for names in alias.by_phase.values() for name in names)]):
        if (alias.slot, alias.key, name) not in in_a_circle:
            yield from _entry(name, alias.slot, catalogue)
    for phase, names in alias.by_phase.items():
        if not names:
            fix = "Give it kernels, or leave the phase out"
            yield Said("fault", f"lists nothing for {phase}: the key is refused there on every host", fix)
    for phases, names in _lists(alias):
        yield from _past(names, phases, alias.slot, catalogue, hosts)
    if (alias.slot, alias.key) in catalogue.rows and not any(alias.key in names for _, names in _lists(alias)):
        fix = f"List {alias.key} among its kernels, or rename the key"
        yield Said("note", f"hides the kernel {alias.key}: nobody can ask for it by its name", fix)
    yield from _foreign(row, catalogue)
    if alias.deprecated is not None:
        yield from _deprecated(alias, alias.deprecated, catalogue)


def cycles(catalogue: Catalogue) -> tuple[tuple[Slot, tuple[str, ...]], ...]:
    """Aliases that lead to one another, each circle once, from its first key by name."""
    found: dict[frozenset[str], tuple[Slot, tuple[str, ...]]] = {}
    leads: dict[tuple[Slot, str], list[str]] = {}
    for (slot, key), row in catalogue.aliases.items():
        names = [name for _, names in _lists(row.alias) for name in names]
        leads[slot, key] = [name for name in dict.fromkeys(names) if catalogue.is_alias_only(name, slot)]
    for slot, key in leads:
        circle = _way_back(slot, key, leads)
        if circle:
            found.setdefault(frozenset({slot, *circle}), (slot, circle))
    return tuple(found.values())


def retired_flaws(setting: RetiredSetting, catalogue: Catalogue) -> Iterator[Said]:
    """Values that map to no key, and a tombstone of a setting that is alive."""
    if setting.name in FLAGS.values():
        yield Said("fault", "is a flag that is still read", "Drop the tombstone")
    slot: Slot = "linear" if setting.request.startswith("linear_") else "attention"
    for value, key in sorted(setting.values.items()):
        name = key.rpartition(":")[2]
        if setting.request not in _NO_KEYS and not _is_known(name, slot, catalogue):
            yield Said("fault", f"maps {value!r} to {key!r}, which is no key", _did_you_mean(name, slot, catalogue))


def family_flaws(default: FamilyDefault, catalogue: Catalogue) -> Iterator[Said]:
    """Kernels nobody has, among the preferred and the allowed."""
    for name in dict.fromkeys([*default.kernels, *sorted(default.allowed or ())]):
        yield from _entry(name, "attention", catalogue)


def feature_flaws(default: FeatureDefault, hosts: Sequence[HostFacts]) -> Iterator[Said]:
    """Archs no known host of the device has."""
    wrong = list(misspelt(default.archs, default.device))
    yield from wrong
    there = [host for host in hosts if default.device in ("any", host.device)]
    if not wrong and not any(archs_fit(default.archs, host.arch) for host in there):
        text = f"is on for {', '.join(default.archs)}, which no known {default.device} host has: it is never on"
        yield Said("fault", text, "Correct the archs, or drop the default")


def _lists(alias: Alias) -> list[tuple[frozenset[Phase], tuple[str, ...]]]:
    """Every list an alias has, with the phases it is read for."""
    own = [(frozenset({phase}), names) for phase, names in alias.by_phase.items()]
    rest = frozenset(PHASES) - frozenset(alias.by_phase)
    return [(rest, alias.kernels), *own] if alias.kernels else own


def _entry(name: str, slot: Slot, catalogue: Catalogue) -> Iterator[Said]:
    """What is wrong with a name where a kernel should be."""
    if (slot, name) in catalogue.rows or (slot, name) in catalogue.conflicts or catalogue.failure_of(name):
        return
    if catalogue.is_alias_only(name, slot):
        names = ", ".join(catalogue.aliases[slot, name].alias.kernels)
        yield Said("fault", f"names {name!r}, which is an alias and no kernel", f"List its kernels: {names or 'none'}")
    elif name not in FIRST_PARTY:
        other: Slot = "linear" if slot == "attention" else "attention"
        where = f"; it exists in the {other} slot" if (other, name) in catalogue.rows else ""
        text = f"names the kernel {name!r}, which nobody here has{where}"
        yield Said("fault", text, _did_you_mean(name, slot, catalogue))


def _past(
    names: tuple[str, ...], phases: frozenset[Phase], slot: Slot, catalogue: Catalogue, hosts: Sequence[HostFacts]
) -> Iterator[Said]:
    """Kernels of a list that no host, model and phase ever comes to."""
    where = ", ".join(phase for phase in PHASES if phase in phases)
    for at, name in enumerate(names):
        rows = [row for row in catalogue.rows.get((slot, name), ()) if row.offer.all_phases & phases]
        if (slot, name) in catalogue.rows and not rows:
            why = f" in {where}: it serves none of it" if where else ": by_phase has a list of its own for every phase"
            yield Said("fault", f"{name} is never reached{why}", f"Drop {name} from that list")
        before = [row for earlier in names[:at] for row in catalogue.rows.get((slot, earlier), ())]
        open_rows = [row for row in rows if hosts_of(row, hosts)]
        hidden = [
            next((wide.offer.kernel for wide in before if covers(wide.offer, row.offer, phases, installed=False)), None)
            for row in open_rows
        ]
        if open_rows and None not in hidden:
            earlier = ", ".join(dict.fromkeys(str(name) for name in hidden))
            text = f"{name} is never reached in {where}: {earlier}, listed before it, takes all it serves"
            yield Said("fault", text, f"List {name} first, or drop it")


def _foreign(row: AliasRow, catalogue: Catalogue) -> Iterator[Said]:
    """Kernels of other distributions behind an alias whose word does not count for them."""
    alias, ours = row.alias, row.plugin.distribution
    if ours in FIRST_PARTY_DISTRIBUTIONS:
        return
    names = dict.fromkeys(name for _, names in _lists(alias) for name in names)
    owners = {name: rows[0].plugin.distribution for name in names if (rows := catalogue.rows.get((alias.slot, name)))}
    foreign = [f"{name} of {owner}" for name, owner in owners.items() if owner != ours]
    if foreign:
        text = f"stands for {', '.join(foreign)}: it binds only where the operator says {ours}:{alias.key}"
        yield Said("note", text, "List kernels of this distribution alone")


def _deprecated(alias: Alias, instead: str, catalogue: Catalogue) -> Iterator[Said]:
    if not _is_known(instead, alias.slot, catalogue):
        fix = _did_you_mean(instead, alias.slot, catalogue)
        yield Said("fault", f"is deprecated for {instead!r}, which does not exist", fix)
        return
    next_row = catalogue.aliases.get((alias.slot, instead))
    if next_row is not None and next_row.alias.deprecated is not None:
        text = f"is deprecated for {instead!r}, which is deprecated itself"
        yield Said("fault", text, f"Name {next_row.alias.deprecated!r} where that is the key to use")


def _is_known(name: str, slot: Slot, catalogue: Catalogue) -> bool:
    key = (slot, name)
    known = key in catalogue.rows or key in catalogue.aliases or key in catalogue.conflicts
    return known or name in FIRST_PARTY or catalogue.failure_of(name) is not None


def _did_you_mean(name: str, slot: Slot, catalogue: Catalogue) -> str:
    match = near(name, sorted({*catalogue.keys(slot), *FIRST_PARTY} - {name}))
    return f"Did you mean {match!r}?" if match is not None else "Correct it, or install the distribution that has it"


def _way_back(slot: Slot, key: str, leads: Mapping[tuple[Slot, str], Sequence[str]]) -> tuple[str, ...]:
    """The shortest way from a key back to itself, () without one."""
    paths: list[tuple[str, ...]] = [(key,)]
    seen: set[str] = set()
    while paths:
        path = paths.pop(0)
        for name in leads.get((slot, path[-1]), ()):
            if name == key:
                return path
            if name not in seen:
                seen.add(name)
                paths.append((*path, name))
    return ()


def _edges(circle: tuple[Slot, tuple[str, ...]]) -> Iterator[tuple[Slot, str, str]]:
    slot, keys = circle
    for at, key in enumerate(keys):
        yield slot, key, keys[(at + 1) % len(keys)]
