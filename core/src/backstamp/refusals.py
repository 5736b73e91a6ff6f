"""How a refusal of a key reads: the five parts, made from the verdicts of one phase.

In: the table of verdicts and what was asked. Out: an exception ready to raise. It decides nothing; selection did.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from backstamp.catalogue import AliasRow, Catalogue, Conflict
from backstamp.compiled import HostCatalogue
from backstamp.declarations import Slot
from backstamp.discovery import Failure, distributions_of
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
from backstamp.evaluation import row_reasons
from backstamp.first_party import FIRST_PARTY
from backstamp.hostfit import arch_words
from backstamp.launch import flag_of
from backstamp.plan_rows import PluginRef, Verdict
from backstamp.text import near, plain

if TYPE_CHECKING:
    from backstamp.facts import Facts
    from backstamp.selection import Table

__all__ = ["conflicting_key", "failed_key", "foreign_alias", "host_words", "no_kernel", "refused_key", "unknown_key"]


_ANYWHERE: Final = ("backstamp-cpu", ("any",))
_GATED: Final = ("backstamp-linear-attn", ("cuda", "rocm"))
#: The first-party distributions to install for each family, and the devices each has a kernel of it for.
_SERVES: Final[Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]]] = {
    "mha": (_ANYWHERE,),
    "mla": (_ANYWHERE,),
    "sparse_mla": (("backstamp-dsa", ("cuda", "rocm")),),
    "csa": (("backstamp-dsa", ("cuda", "rocm", "npu")),),
    "gdn": (_GATED, _ANYWHERE),
    "kda": (_GATED, _ANYWHERE),
}
#: What sets the kernels of each slot.
_FLAGS: Final = {"attention": "--attention-backend", "linear": "--linear-attn-backend"}


def host_words(host: HostCatalogue) -> str:
    """A host as a refusal names it: "h100: cuda SM90 (9.0)"."""
    facts = host.host
    return f"{facts.name}: {facts.device} {arch_words(facts.arch, facts.device)}"


def refused_key(facts: Facts, table: Table, key: str, who: str, passed: Sequence[Verdict]) -> BackstampError:
    """A key that exists and cannot serve this phase here."""
    host = facts.host
    told = _most_telling(passed)
    owner = host.catalogue.owner(told.kernel, table.slot)
    plugin = f" (plugin {owner.name}, {owner.distribution} {owner.version})" if owner is not None else ""
    others = [f"{item.kernel}: {item.message}" for item in passed if item is not told]
    also = [f"{told.kernel} also {text}" for text in _beyond(table, told)]
    considered = "; ".join([*also, *_installed(table, told), *(others or ["no other kernel stands behind this key"])])
    if told.code == "not_installed":
        return _not_installed(host, table, key, who, passed)
    if told.code == "phase" and facts.role == "draft" and table.slot == "attention":
        fix = f"A draft has one flag for all its phases, {flag_of(table.phase, 'draft')}: name a key that serves each"
    elif told.code == "phase" and table.phase in ("prefill", "decode"):
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
        fix=". ".join(part for part in (fix, _layout(facts, table, [told.kernel]), _resolving(table)) if part),
        verdicts=passed,
    )


def _layout(facts: Facts, table: Table, kernels: Iterable[str]) -> str:
    """The first of these kernels that would serve from a KV layout the engine facts do not list, and where to list it;
    empty where none would."""
    for kernel in kernels:
        wanted: list[str] = []
        for answer in table.answers:
            rows = row_reasons(answer, table.needs, kernel)
            able = [of for of in rows if {verdict.code for verdict in of.verdicts} <= {"layout"}]
            if not able:
                break
            if all(of.verdicts for of in able):
                wanted.append(" or ".join(able[0].row.offer.layouts))
        else:
            # a layout the engine has, and a draft's target rules out, is no matter of facts
            if wanted and not facts.engine.layouts.intersection(wanted):
                where = "add it to their layouts (--engine FILE, or EngineFacts(layouts=...))"
                return f"{kernel} serves it from KV layout {wanted[0]}, which the engine facts do not list: {where}"
    return ""


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
    nearest = min(((of.distance, name) for name, of in told.items() if of.verdicts), default=None)
    near_by = f"Nearest: {nearest[1]}, refused only for its {_and(reasons[nearest[1]])}" if nearest is not None else ""
    there = nearest is not None and nearest[0][:2] == (False, False)
    absent = _absent(facts, table, question.family, there)
    fix = ". ".join(part for part in (near_by, _layout(facts, table, reasons), absent) if part)
    return NoKernel(
        who,
        needed=f"{article} {table.slot} kernel for {question.family}, head dim {dims}, {question.dtype}",
        found=f"no installed kernel that serves it (host {host_words(host)})",
        considered="; ".join(lines) or f"no plugin has a {table.slot} kernel",
        fix=fix,
        verdicts=tuple(item for name, of in reasons.items() for item in (of or (table.verdicts[name],))),
    )


def _absent(facts: Facts, table: Table, family: str, has_rows: bool) -> str:
    """What to install for a family of layers on this device, or that what is installed has no rows for it; empty where
    it has, for then what those were refused for is the thing to change."""
    device, there = facts.host.host.device, distributions_of(facts.host.catalogue)
    homes = [name for name, devices in _SERVES.get(family, ()) if device in devices or "any" in devices]
    missing = [name for name in homes if name not in there]
    broken = [item.plugin for item in facts.host.catalogue.failures if item.plugin.distribution in homes]
    if broken:
        return f"Run `backstamp doctor`: {broken[0].distribution}, the first-party one that serves it, did not load"
    if missing:
        return f"Install a plugin that serves it; {missing[0]} is the first-party one"
    return "" if has_rows else f"The installed plugins have no {table.slot} kernel for {family} on {device}"


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
    other_slot = _other_slots(catalogue, key, table.slot)
    if key in FIRST_PARTY and not other_slot:
        return _not_installed(host, table, key, who, ())
    keys, bare = catalogue.keys(table.slot), key.rpartition(":")[2]
    owned = []
    for name in keys:
        owner = catalogue.owner(name, table.slot)
        owned.append(f"{name} ({owner.distribution})" if owner else name)
    # a name of the other slot is no near match for one of this
    elsewhere = {name for name in FIRST_PARTY if name not in keys and _other_slots(catalogue, name, table.slot)}
    match = near(bare, sorted({*keys, *FIRST_PARTY} - elsewhere)) if bare not in _UNSET else None
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
    fix = f"Did you mean {match!r}{where}?" if match is not None else _hint(table, bare)
    if other_slot:
        fix = f"It is a key of the {other_slot[0]} slot, which {_FLAGS[other_slot[0]]} sets. {_resolving(table)}"
    return UnknownKey(
        f"{who} {plain(key)!r}",
        needed=f"one of {', '.join(owned) or 'no keys: no plugin is installed'}",
        found=found,
        considered=failed,
        fix=fix,
    )


def _other_slots(catalogue: Catalogue, key: str, slot: str) -> list[Slot]:
    slots: tuple[Slot, ...] = ("attention", "linear")
    return [other for other in slots if other != slot and catalogue.owner(key, other)]


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
