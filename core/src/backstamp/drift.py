"""What changed between two locks, and which plugin version changed it.

In: two `Lock`s, old and new. Out: one `Drift` for each thing that changed of each host, model and phase: kernel,
plugin, library, layers, page size, layouts, losses, warnings, refusals. It resolves nothing: why is read from the
versions and verdicts the two records carry.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from backstamp.lock import Lock, LockEntry, lock_to_json
from backstamp.plan import Plan
from backstamp.plan_rows import LibraryRef, PhasePlan, PluginRef

__all__ = ["Drift", "check_lock"]

_NONE: Final = "-"
#: Compared by phase, as lists, or not at all: names, and what is made of the rest.
_NOT_PLAN_WIDE: Final = frozenset(
    {"schema", "host", "role", "phases", "linear", "losses", "warnings", "timings", "digest"}
)


class Drift(NamedTuple):
    """One thing that changed.

    `phase` is "" where it is of the whole plan, `host`, `model` and `role` are "" where it is of the whole lock;
    `because` lists the versions that changed, `reason` the verdict that lost a kernel its place.
    """

    host: str
    model: str
    role: str
    phase: str
    field: str
    before: str
    after: str
    because: tuple[str, ...] = ()
    reason: str = ""

    def as_json(self) -> dict[str, object]:
        """The change for tools."""
        return {**self._asdict(), "because": list(self.because)}


def check_lock(lock: Lock, now: Lock) -> tuple[Drift, ...]:
    """Everything that is not as it was locked, in order of host, model, role and phase; empty when nothing changed."""
    drifts = list(_launch_drifts(lock, now))
    old = {entry.key: entry for entry in lock.entries}
    new = {entry.key: entry for entry in now.entries}
    causes = _Causes(lock, now)
    for key in sorted({*old, *new}):
        drifts += _entry_drifts(old.get(key), new.get(key), causes)
    return tuple(drifts)


class _Causes:
    """The versions that changed between two locks."""

    def __init__(self, old: Lock, new: Lock) -> None:
        self.plugins = _changes(dict(old.plugins), dict(new.plugins))
        self.core = _changes({"backstamp": old.backstamp}, {"backstamp": new.backstamp})
        before, after = _libraries(old), _libraries(new)
        # a lock knows the libraries its plans name, so one that only one lock names need not have come or gone
        both = {at: (before[at], after[at]) for at in before if at in after and before[at] != after[at]}
        self.libraries = {at: f"library {at[1]} {was} -> {is_now}" for at, (was, is_now) in both.items()}

    def of(self, host: str, rows: Iterable[PhasePlan | None]) -> tuple[str, ...]:
        """What changed of the plugins and libraries these phases name, else of any plugin, else of the core."""
        named: list[str | None] = []
        for row in rows:
            for plugin, library in _refs(row):
                named.append(self.plugins.get(plugin.distribution))
                named.append(self.libraries.get((host, library.distribution)) if library is not None else None)
        known = dict.fromkeys(change for change in named if change is not None)
        return tuple(known) or tuple(self.plugins.values()) or tuple(self.core.values())


def _changes(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, str]:
    changes = {}
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before is None:
            changes[name] = f"{name} {after} came"
        elif after is None:
            changes[name] = f"{name} {before} went"
        elif before != after:
            changes[name] = f"{name} {before} -> {after}"
    return changes


def _libraries(lock: Lock) -> dict[tuple[str, str], str]:
    """The version of each library that a host's plans name, by host and library."""
    return {
        (entry.host, library.distribution): _library(library)
        for entry in lock.entries
        for row in _rows(entry.plan).values()
        for _, library in _refs(row)
        if library is not None
    }


def _refs(row: PhasePlan | None) -> Iterator[tuple[PluginRef, LibraryRef | None]]:
    for group in row.groups if row is not None else ():
        yield group.plugin, group.library


def _rows(plan: Plan | None) -> dict[str, PhasePlan]:
    """Every phase of a plan, those of the linear slot under names of their own."""
    if plan is None:
        return {}
    rows: dict[str, PhasePlan] = {row.phase: row for row in plan.phases}
    if plan.linear is not None:
        rows |= {f"linear {row.phase}": row for row in plan.linear.rows}
    return rows


def _launch_drifts(old: Lock, new: Lock) -> Iterator[Drift]:
    """What was asked for, and the files that were read, before any host or model."""
    before, after = lock_to_json(old), lock_to_json(new)
    for part in ("launch", "configs"):
        for field, was, is_now in _unlike(part, _flat(before[part]), _flat(after[part])):
            # sixteen digits of a digest say that a file changed as well as sixty-four
            short = (was[:16], is_now[:16]) if part == "configs" else (was, is_now)
            yield Drift("", "", "", "", field, *short)


def _entry_drifts(old: LockEntry | None, new: LockEntry | None, causes: _Causes) -> Iterator[Drift]:
    entry = new if new is not None else old
    assert entry is not None
    before, after = _rows(old.plan if old else None), _rows(new.plan if new else None)
    if old is None or new is None or old.plan is None or new.plan is None:
        was, is_now = _outcome(old), _outcome(new)
        if was != is_now:
            because = causes.of(entry.host, [*before.values(), *after.values()])
            yield Drift(*entry.key, "", "outcome", was, is_now, because)
        return
    for phase in dict.fromkeys([*before, *after]):
        yield from _phase_drifts(entry, phase, before.get(phase), after.get(phase), causes)
    because = causes.of(entry.host, [*before.values(), *after.values()])
    for field, was, is_now in _plan_wide(old.plan, new.plan):
        yield Drift(*entry.key, "", field, was, is_now, because)


def _outcome(entry: LockEntry | None) -> str:
    if entry is None:
        return "not in the lock"
    if entry.refusal is not None:
        return f"refused ({entry.refusal.code}): {entry.refusal.message}"
    return "resolved"


def _phase_drifts(
    entry: LockEntry, phase: str, old: PhasePlan | None, new: PhasePlan | None, causes: _Causes
) -> Iterator[Drift]:
    before, after = _phase_fields(old), _phase_fields(new)
    changed = [field for field in before if before[field] != after[field]]
    if "kernel" in changed:
        # another kernel is of another plugin, library and source as well: one row says it
        changed = ["kernel"]
    for field in changed:
        reason = _lost_by(old, new) if field == "kernel" else ""
        yield Drift(*entry.key, phase, field, before[field], after[field], causes.of(entry.host, [old, new]), reason)


def _phase_fields(row: PhasePlan | None) -> dict[str, str]:
    if row is None:
        return dict.fromkeys(("kernel", "plugin", "library", "layers", "source"), _NONE)
    groups = [f"{group.kernel} {_version(group.plugin)} {_library(group.library)}" for group in row.groups]
    counted = [f"{group.component} {group.family} x{len(group.layers)} {group.kernel}" for group in row.groups]
    return {
        "kernel": row.kernel or _NONE,
        "plugin": _version(row.plugin),
        "library": f"{row.library.distribution} {_library(row.library)}" if row.library is not None else _NONE,
        "layers": "; ".join(
            counted if len(set(groups)) < 2 else [f"{a} ({b})" for a, b in zip(counted, groups, strict=True)]
        ),
        "source": row.source,
    }


def _version(plugin: PluginRef | None) -> str:
    return f"{plugin.distribution} {plugin.version}" if plugin is not None else _NONE


def _library(library: LibraryRef | None) -> str:
    return _NONE if library is None else library.version or "(assumed)"


def _lost_by(old: PhasePlan | None, new: PhasePlan | None) -> str:
    """What the new record says against the old kernel, or said against the new one before."""
    if old is None or new is None:
        return ""
    for kernel, row, when in ((old.kernel, new, ""), (new.kernel, old, "before: ")):
        for verdict in row.verdicts:
            if verdict.kernel == kernel and not verdict.accepted:
                return f"{when}{kernel} {verdict.message}"
    if old.kernel is not None and old.kernel not in [verdict.kernel for verdict in new.verdicts]:
        return f"{old.kernel} is declared by no installed plugin" if new.verdicts else ""
    return ""


def _plan_wide(old: Plan, new: Plan) -> Iterator[tuple[str, str, str]]:
    before, after = old.as_json(), new.as_json()
    for name in before:
        if name not in _NOT_PLAN_WIDE:
            yield from _unlike(name, _flat(before[name]), _flat(after[name]))
    losses = [[f"{row.phase} {row.kernel}: {row.cost}" for row in plan.losses] for plan in (old, new)]
    warnings = [[f"{row.code}: {row.text}" for row in plan.warnings] for plan in (old, new)]
    for name, (was, is_now) in (("loss", losses), ("warning", warnings)):
        yield from ((name, text, _NONE) for text in was if text not in is_now)
        yield from ((name, _NONE, text) for text in is_now if text not in was)


def _unlike(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    for below in dict.fromkeys([*old, *new]):
        was, is_now = old.get(below, _NONE), new.get(below, _NONE)
        if was != is_now:
            yield (f"{name}.{below}" if below else name), was, is_now


def _flat(value: object, path: str = "") -> dict[str, str]:
    """The values of nested records by their dotted path."""
    if isinstance(value, Mapping):
        return {
            at: text
            for name, below in value.items()
            for at, text in _flat(below, f"{path}.{name}" if path else str(name)).items()
        }
    if isinstance(value, list):
        return {path: ", ".join(str(item) for item in value) or _NONE}
    return {path: _NONE if value is None else str(value)}
