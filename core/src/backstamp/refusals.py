"""How a refusal of a key reads: the five parts, made from the verdicts of one phase.

In: the table of verdicts and what was asked. Out: an exception ready to raise. It decides nothing; selection did.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from backstamp.catalogue import AliasRow, Conflict
from backstamp.compiled import HostCatalogue
from backstamp.discovery import Failure
from backstamp.errors import (
    AliasConflict,
    BackstampError,
    ForeignAlias,
    NoKernel,
    NotInstalled,
    PluginFailed,
    Refused,
    UnknownKey,
)
from backstamp.first_party import FIRST_PARTY
from backstamp.hostfit import arch_words
from backstamp.plan_rows import PluginRef, Verdict
from backstamp.text import near, plain

if TYPE_CHECKING:
    from backstamp.facts import Facts
    from backstamp.selection import Table

__all__ = ["conflicting_key", "failed_key", "foreign_alias", "host_words", "no_kernel", "refused_key", "unknown_key"]


#: The first-party distribution that serves each attention family; linear families have one of their own.
_SERVES: Final = {"mha": "backstamp-cpu", "mla": "backstamp-cpu", "sparse_mla": "backstamp-dsa", "csa": "backstamp-dsa"}


def host_words(host: HostCatalogue) -> str:
    """A host as a refusal names it: "h100: cuda SM90 (9.0)"."""
    facts = host.host
    return f"{facts.name}: {facts.device} {arch_words(facts.arch, facts.device)}"


def refused_key(host: HostCatalogue, table: Table, key: str, who: str, passed: Sequence[Verdict]) -> BackstampError:
    """A key that exists and cannot serve this phase here."""
    told = _most_telling(passed)
    owner = host.catalogue.owner(told.kernel, table.slot)
    plugin = f" (plugin {owner.name}, {owner.distribution} {owner.version})" if owner is not None else ""
    others = [f"{item.kernel}: {item.message}" for item in passed if item is not told]
    also = [f"{told.kernel} also {text}" for text in _beyond(table, told)]
    considered = "; ".join([*also, *_installed(table, told), *(others or ["no other kernel stands behind this key"])])
    if told.code == "not_installed":
        return _not_installed(host, table, key, who, passed)
    if told.code == "phase" and table.phase in ("prefill", "decode"):
        fix = f"It serves one half only: set that half with its split flag and leave {table.phase} to another key"
    elif told.code in ("library_missing", "library_version", "library_unknown"):
        fix = f"Install {told.wanted}"
    elif told.code == "companion":
        fix = f"Install {told.wanted}, or pass --bypass companion"
    else:
        fix = ""
    return Refused(
        f"{who} {key!r}{plugin}",
        needed=told.wanted,
        found=f"{told.have} (host {host_words(host)})",
        considered=considered,
        fix=". ".join(part for part in (fix, _resolving(table)) if part),
        verdicts=passed,
    )


def _beyond(table: Table, told: Verdict) -> list[str]:
    """What else keeps a refused kernel from serving, beside the reason that is told."""
    found = table.reasons().get(told.kernel)
    return [item.message for item in found.verdicts if item.code != told.code] if found is not None else []


def _installed(table: Table, told: Verdict) -> list[str]:
    """Where a library is missing: the kernel's other libraries that are there, and why they do not serve."""
    if told.code not in ("library_missing", "library_version", "library_unknown"):
        return []
    found = [
        f"{told.kernel} over {of.row.library.distribution} {of.row.library.version}, which is installed, "
        f"{' and '.join(item.message for item in of.verdicts)}"
        for of in table.installed_reasons(told.kernel)
        if of.row.library is not None and told not in of.verdicts
    ]
    return list(dict.fromkeys(found))


def no_kernel(facts: Facts, table: Table, who: str) -> BackstampError:
    """Nothing installed serves a phase: every reason of every candidate, and the one that came nearest."""
    host, question = facts.host, table.asked[0].question
    dims = ", ".join(f"{qk}/{v}" for qk, v in sorted(question.dims))
    told = table.reasons()
    reasons = {name: of.verdicts for name, of in told.items()}
    lines = [f"{name}: {' and '.join(verdict.message for verdict in of)}" for name, of in reasons.items() if of]
    lines += [f"{name}: {_NOT_AUTO}" for name, of in reasons.items() if not of]
    lines += [f"plugin {item.plugin.name} failed: {item.cause}" for item in host.catalogue.failures]
    lines += [
        f"{item.name}: claimed by {' and '.join(item.distributions)}" for item in host.catalogue.conflicts.values()
    ]
    article = "an" if table.slot == "attention" else "a"
    home = _SERVES.get(question.family, "backstamp-linear-attn")
    nearest = min(((of.distance, name) for name, of in told.items() if of.verdicts), default=None)
    near_by = (
        f"Nearest: {nearest[1]}, refused only for its {_and(reasons[nearest[1]])}. " if nearest is not None else ""
    )
    return NoKernel(
        who,
        needed=f"{article} {table.slot} kernel for {question.family}, head dim {dims}, {question.dtype}",
        found=f"no installed kernel that serves it (host {host_words(host)})",
        considered="; ".join(lines) or f"no plugin has a {table.slot} kernel",
        fix=f"{near_by}Install a plugin that serves it; {home} is the first-party one",
        verdicts=tuple(item for name, of in reasons.items() for item in (of or (table.verdicts[name],))),
    )


def _and(verdicts: Sequence[Verdict]) -> str:
    return " and ".join(dict.fromkeys(verdict.code for verdict in verdicts))


_NOT_AUTO: Final = (
    "serves it when asked for; auto takes no interpreted, approximate or denied row, nor one that cannot share "
    "the page size or layout already chosen"
)


def foreign_alias(who: str, row: AliasRow, foreign: Mapping[str, PluginRef]) -> BackstampError:
    """An alias of one distribution that stands for kernels of another."""
    owned = ", ".join(f"{kernel} of {owner.distribution}" for kernel, owner in foreign.items())
    named = f"{row.plugin.distribution}:{row.alias.key}"
    return ForeignAlias(
        f"{who} {row.alias.key!r} (plugin {row.plugin.name}, {row.plugin.distribution} {row.plugin.version})",
        needed="an alias of its own distribution's kernels, or the operator's word for another",
        found=f"it stands for {owned}",
        fix=f"Ask for {named} to accept it, or for the kernel itself",
    )


def unknown_key(host: HostCatalogue, table: Table, key: str, who: str) -> BackstampError:
    """Nobody declares this key here."""
    catalogue = host.catalogue
    other_slot = [slot for slot in ("attention", "linear") if slot != table.slot and catalogue.owner(key, slot)]
    if key in FIRST_PARTY and not other_slot:
        return _not_installed(host, table, key, who, ())
    keys, bare = catalogue.keys(table.slot), key.rpartition(":")[2]
    owned = []
    for name in keys:
        owner = catalogue.owner(name, table.slot)
        owned.append(f"{name} ({owner.distribution})" if owner else name)
    match = near(bare, sorted({*keys, *FIRST_PARTY})) if bare not in _UNSET else None
    found = f"the unknown key {plain(key)!r}"
    if other_slot:
        found += f", which exists in the {other_slot[0]} slot"
    failed = "; ".join(f"plugin {item.plugin.name} failed: {item.cause}" for item in catalogue.failures)
    owner = catalogue.owner(bare, table.slot)
    if bare in catalogue.parent_only:
        return UnknownKey(
            f"{who} {plain(key)!r}",
            needed=f"one of {', '.join(owned) or 'no keys: no plugin is installed'}",
            found=f"{plain(bare)}, which was registered only in the parent process",
            considered=failed,
            fix="Ship it as an entry point, or register it in this process too",
        )
    if owner is not None:
        found += f": {bare} is {owner.distribution}'s"
    where = f" (in {FIRST_PARTY[match]}, not installed)" if match is not None and match not in keys else ""
    return UnknownKey(
        f"{who} {plain(key)!r}",
        needed=f"one of {', '.join(owned) or 'no keys: no plugin is installed'}",
        found=found,
        considered=failed,
        fix=f"Did you mean {match!r}{where}?" if match is not None else _hint(table, bare),
    )


#: What people write for no request at all.
_UNSET: Final = frozenset({"auto", "none", "default", ""})


def _hint(table: Table, bare: str) -> str:
    return "Leave the flag out to resolve by auto" if bare in _UNSET else _resolving(table)


def failed_key(who: str, key: str, failure: Failure) -> BackstampError:
    """The key's plugin did not load; its first cause is chained."""
    error = PluginFailed(
        f"{who} {plain(key)!r}",
        needed=f"plugin {failure.plugin.name} ({failure.plugin.distribution} {failure.plugin.version}) to load",
        found=failure.cause,
        fix="Run `backstamp doctor`, then mend or uninstall that distribution",
    )
    error.__cause__ = failure.error
    return error


def conflicting_key(who: str, conflict: Conflict) -> BackstampError:
    """Two distributions claim this key."""
    return AliasConflict(
        f"{who} {conflict.name!r}",
        needed="one distribution that owns the name",
        found=f"{len(conflict.distributions)}: {', '.join(conflict.distributions)}",
        fix="Uninstall one of them; every other key still resolves",
    )


def _not_installed(host: HostCatalogue, table: Table, key: str, who: str, passed: Sequence[Verdict]) -> BackstampError:
    names = [item.kernel for item in passed if item.code == "not_installed"] or [key]
    homes = sorted({FIRST_PARTY[name] for name in names if name in FIRST_PARTY})
    others = [f"{item.kernel}: {item.message}" for item in passed if item.code != "not_installed"]
    install = f"pip install {' '.join(homes)}" if homes else "Install the distribution that declares it"
    return NotInstalled(
        f"{who} {plain(key)!r}",
        needed=f"a plugin that has {', '.join(names)}" + (f" ({', '.join(homes)})" if homes else ""),
        found=f"none installed (host {host_words(host)})",
        considered="; ".join(others),
        fix=f"{install}. {_resolving(table)}",
        verdicts=passed,
    )


def _most_telling(passed: Sequence[Verdict]) -> Verdict:
    """The refusal an operator can act on: an installation first, then the first kernel of the list."""
    for verdict in reversed(passed):
        if verdict.code in ("library_missing", "library_version", "library_unknown", "companion"):
            return verdict
    return next((item for item in passed if item.code != "not_installed"), passed[0])


def _resolving(table: Table) -> str:
    accepted = ", ".join(sorted(table.accepted()))
    return f"Keys that resolve for {table.phase} here: {accepted or 'none'}"
