"""Seventh step of the flow: one phase's verdicts → the kernel that binds, by key or by rank.

In: the questions of a phase and either a requested key or nothing. Out: a `Choice`. A key is an ordered list of
kernels: the first whose machine, model and phase facts fit binds; if only its installation is missing, that is the
answer and nothing further is tried. Nothing here falls back in silence: what is passed over becomes a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backstamp.declarations import Phase, Slot
from backstamp.evaluation import Candidate, evaluate, judge
from backstamp.hostfit import INSTALLATION, HostCatalogue, HostRow
from backstamp.launch import Request
from backstamp.measurements import Measurements
from backstamp.plan import GroupPlan, PhasePlan, Verdict, Warn
from backstamp.questions import Asked
from backstamp.refusals import (
    conflicting_key,
    failed_key,
    no_kernel,
    refused_key,
    unknown_key,
)

__all__ = ["Choice", "Part", "Table", "bind_key", "phase_plan", "rank", "table_of"]


class Part(NamedTuple):
    """The row one question's layers were given."""

    asked: Asked
    row: HostRow


class Table(NamedTuple):
    """Every kernel's answer to the questions of one phase of one component, joined."""

    phase: Phase
    slot: Slot
    asked: tuple[Asked, ...]
    candidates: Mapping[str, Candidate]
    parts: Mapping[str, tuple[Part, ...]]

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every verdict, by kernel name."""
        return tuple(candidate.verdict for _, candidate in sorted(self.candidates.items()))

    def accepted(self) -> list[str]:
        """The kernels that serve every question."""
        return [kernel for kernel, candidate in self.candidates.items() if candidate.refusal is None]


class Choice(NamedTuple):
    """What was chosen for one phase, the rows of each group of layers, and what there is to say about it."""

    kernel: str
    parts: tuple[Part, ...]
    source: str
    warnings: tuple[Warn, ...]
    passed_over: tuple[Verdict, ...]


def table_of(host: HostCatalogue, phase: Phase, slot: Slot, asked: tuple[Asked, ...]) -> Table:
    """Judge every kernel on every question; a kernel is accepted where all of its answers are."""
    first = evaluate(host, asked[0].question)
    parts: dict[str, tuple[Part, ...]] = {
        name: (Part(asked[0], it.row),) for name, it in first.items() if it.row is not None and it.refusal is None
    }
    if len(asked) == 1:
        return Table(phase, slot, asked, first, parts)
    joined = dict(first)
    for other in asked[1:]:
        for name, rows in host.kernels[slot].items():
            if joined[name].refusal is not None:
                continue
            answer = judge(name, rows, other.question)
            if answer.refusal is None and answer.row is not None:
                parts[name] = (*parts[name], Part(other, answer.row))
            else:
                joined[name] = answer
                parts.pop(name, None)
    return Table(phase, slot, asked, joined, parts)


def bind_key(host: HostCatalogue, table: Table, key: str, who: str, source: str) -> Choice:
    """Bind a requested key.

    Raises:
        UnknownKey, NotInstalled: nobody declares the key. PluginFailed: its plugin did not load, cause chained.
        AliasConflict: two distributions claim it. Refused: it exists and cannot serve this, with every reason.
    """
    kernels, warnings = _kernels_of(host, table, key, who)
    passed: list[Verdict] = []
    for kernel in kernels:
        candidate = table.candidates.get(kernel)
        if candidate is None:
            failure = host.catalogue.failure_of(kernel)
            if failure is not None:
                raise failed_key(who, kernel, failure)
            passed.append(
                Verdict(kernel, False, "not_installed", "plugin", f"a plugin that has {kernel}", "none installed")
            )
            continue
        if candidate.refusal is None:
            lost = [
                Warn("lost", f"{who}: {kernel} binds; passed over {item.kernel}, no installed plugin has it")
                for item in passed
                if item.code == "not_installed"
            ]
            return Choice(kernel, table.parts[kernel], source, (*warnings, *lost), tuple(passed))
        passed.append(candidate.verdict)
        if candidate.refusal.code in INSTALLATION:
            break
    raise refused_key(host, table, key, who, tuple(passed))


def rank(
    host: HostCatalogue,
    table: Table,
    who: str,
    *,
    measurements: Measurements | None = None,
    fits: Mapping[str, bool] | None = None,
    policy_allow: frozenset[str] = frozenset(),
    policy_deny: frozenset[str] = frozenset(),
) -> Choice:
    """Choose by rank: this host's measurement where both sides have one, else priority, ties by name.

    Approximate and interpreted rows are never picked; distributions outside a given allow list rank below all inside.
    `fits` rules out kernels whose page size or layout cannot join what is already chosen.

    Raises:
        NoKernel: nothing accepts, with every reason.
    """
    ranked: list[tuple[tuple[float, float, str], str]] = []
    for kernel in table.accepted():
        row = table.parts[kernel][0].row
        if row.interpreted or row.offer.accuracy != "exact" or row.plugin.distribution in policy_deny:
            continue
        if fits is not None and not fits.get(kernel, True):
            continue
        time = measurements.time_of(table.slot, table.phase, kernel) if measurements is not None else None
        outside = bool(policy_allow) and row.plugin.distribution not in policy_allow
        order = (float(outside), time if time is not None else float("inf"), -row.offer.priority, kernel)
        ranked.append((order, kernel))  # type: ignore[arg-type]
    if not ranked:
        raise no_kernel(host, table, who)
    kernel = min(ranked)[1]
    measured = measurements is not None and measurements.time_of(table.slot, table.phase, kernel) is not None
    return Choice(kernel, table.parts[kernel], "auto (measured)" if measured else "auto", (), ())


def phase_plan(
    table: Table, choice: Choice, request: Request | None, flag: str, parts: tuple[Part, ...] | None = None
) -> PhasePlan:
    """One phase's row of the plan; `flag` is what would set it where nobody asked."""
    main = next(part.row for part in choice.parts if part.row.offer.kernel == choice.kernel)
    return PhasePlan(
        table.phase,
        request.value if request is not None else None,
        request.setting if request is not None else flag,
        choice.kernel,
        main.plugin,
        main.library,
        choice.source,
        tuple(_group_plan(part) for part in (choice.parts if parts is None else parts)),
        table.verdicts,
    )


def _group_plan(part: Part) -> GroupPlan:
    layers = tuple(sorted(layer for group in part.asked.groups for layer in group.layers))
    row = part.row
    return GroupPlan(
        part.asked.component, part.asked.question.family, layers, row.offer.kernel, row.plugin, row.library, row.index
    )


def _kernels_of(host: HostCatalogue, table: Table, key: str, who: str) -> tuple[tuple[str, ...], tuple[Warn, ...]]:
    """The ordered kernels a key stands for in this phase, and what to warn about the key itself."""
    catalogue = host.catalogue
    distribution, colon, bare = key.rpartition(":")
    name = (table.slot, bare)
    if name in catalogue.conflicts and not colon:
        raise conflicting_key(who, catalogue.conflicts[name])
    owner = catalogue.owner(bare, table.slot)
    if owner is None or (colon and owner.distribution != distribution):
        failure = catalogue.failure_of(bare)
        if failure is not None:
            raise failed_key(who, bare, failure)
        raise unknown_key(host, table, key, who)
    alias = catalogue.aliases.get(name)
    if alias is None:
        return (bare,), ()
    warnings: tuple[Warn, ...] = ()
    if alias.alias.deprecated is not None:
        warnings = (Warn("deprecated", f"{who}: {bare!r} is deprecated, use {alias.alias.deprecated!r}"),)
    kernels = alias.alias.for_phase(table.phase)
    if not kernels:
        raise refused_key(
            host,
            table,
            key,
            who,
            (Verdict(bare, False, "phase", "by_phase", f"a key for {table.phase}", "none listed"),),
        )
    return kernels, warnings
