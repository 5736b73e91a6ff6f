"""Seventh step of the flow: one phase's verdicts → the kernel that binds, by key or by rank.

In: the questions of a phase and either a requested key or nothing. Out: a `Choice`. A key is an ordered list of
kernels: the first whose machine, model and phase facts fit binds; if only its installation is missing, that is the
answer and nothing further is tried. Nothing here falls back in silence: what is passed over becomes a warning.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from backstamp.compiled import HostCatalogue
from backstamp.declarations import Phase, Slot
from backstamp.evaluation import Answer, PhaseNeeds, evaluate, evaluate_phase
from backstamp.hostfit import INSTALLATION, HostRow
from backstamp.index import bits_of
from backstamp.launch import Policy, Request
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

__all__ = ["Choice", "Part", "Table", "ask", "bind_key", "phase_plan", "rank", "table_of"]


class Part(NamedTuple):
    """The row one question's layers were given."""

    asked: Asked
    row: HostRow


class Table(NamedTuple):
    """Every kernel's answer to the questions of one phase of one component, joined: accepted where all answers are."""

    phase: Phase
    slot: Slot
    asked: tuple[Asked, ...]
    answers: tuple[Answer, ...]
    verdicts: Mapping[str, Verdict]

    def by_rank(self, among: int = -1) -> Iterator[str]:
        """The kernels that serve every question, by their best row among those of a mask, best first."""
        first = self.answers[0]
        before = ""
        for at in bits_of(first.rows & among):
            kernel = first.slot_index.rows[at].offer.kernel
            if kernel != before and self.verdicts[kernel].accepted:
                yield kernel
            before = kernel

    def accepted(self) -> list[str]:
        """The kernels that serve every question, best first, each once."""
        return list(dict.fromkeys(self.by_rank()))

    def parts(self, kernel: str, among: int = -1) -> tuple[Part, ...]:
        """The accepting row of a kernel for each question, among the rows of a mask."""
        rows = [(asked, answer.row_of(kernel, among)) for asked, answer in zip(self.asked, self.answers, strict=True)]
        return tuple([Part(asked, row) for asked, row in rows if row is not None])


class Choice(NamedTuple):
    """What was chosen for one phase, the rows of each group of layers, and what there is to say about it."""

    kernel: str
    parts: tuple[Part, ...]
    source: str
    warnings: tuple[Warn, ...]
    passed_over: tuple[Verdict, ...]


def ask(host: HostCatalogue, slot: Slot, asked: tuple[Asked, ...]) -> tuple[Answer, ...]:
    """Put the questions of a slot to every kernel, once for all phases."""
    index = host.slots[slot]
    return tuple([evaluate(index, item.question) for item in asked])


def table_of(slot: Slot, asked: tuple[Asked, ...], common: tuple[Answer, ...], needs: PhaseNeeds) -> Table:
    """Put one phase's needs to what the questions left."""
    answers = tuple([evaluate_phase(answer, needs) for answer in common])
    verdicts = answers[0].verdicts()
    for answer in answers[1:]:
        # a kernel must serve every question; its first refusal is its verdict
        for name, verdict in answer.verdicts().items():
            if verdicts[name].accepted:
                verdicts[name] = verdict
    return Table(needs.phase, slot, asked, answers, verdicts)


def bind_key(host: HostCatalogue, table: Table, key: str, who: str, source: str) -> Choice:
    """Bind a requested key.

    Raises:
        UnknownKey, NotInstalled: nobody declares the key. PluginFailed: its plugin did not load, cause chained.
        AliasConflict: two distributions claim it. Refused: it exists and cannot serve this, with every reason.
    """
    kernels, warnings = _kernels_of(host, table, key, who)
    passed: list[Verdict] = []
    for kernel in kernels:
        verdict = table.verdicts.get(kernel)
        if verdict is None:
            conflict = host.catalogue.conflicts.get((table.slot, kernel))
            if conflict is not None:
                raise conflicting_key(who, conflict)
            failure = host.catalogue.failure_of(kernel)
            if failure is not None:
                raise failed_key(who, kernel, failure)
            passed.append(
                Verdict(kernel, False, "not_installed", "plugin", f"a plugin that has {kernel}", "none installed")
            )
            continue
        if verdict.accepted:
            lost = [
                Warn("lost", f"{who}: {kernel} binds; passed over {item.kernel}, no installed plugin has it")
                for item in passed
                if item.code == "not_installed"
            ]
            return Choice(kernel, table.parts(kernel), source, (*warnings, *lost), tuple(passed))
        passed.append(verdict)
        if verdict.code in INSTALLATION:
            break
    raise refused_key(host, table, key, who, tuple(passed))


def rank(
    host: HostCatalogue,
    table: Table,
    who: str,
    policy: Policy,
    measurements: Measurements | None = None,
    fits: Callable[[tuple[Part, ...]], bool] | None = None,
) -> Choice:
    """Choose by rank: this host's measurements first where there are any, then priority, ties by name.

    Approximate and interpreted rows are never picked; distributions outside a given allow list rank below all inside.
    `fits` rules out rows whose page size or layout cannot join what is already chosen.

    Raises:
        NoKernel: nothing accepts, with every reason.
    """
    for kernel in _ranked(table, policy, measurements):
        parts = table.parts(kernel, table.answers[0].slot_index.pickable)
        if len(parts) == len(table.asked) and (fits is None or fits(parts)):
            timed = measurements is not None and measurements.time_of(table.slot, table.phase, kernel) is not None
            return Choice(kernel, parts, "auto (measured)" if timed else "auto", (), ())
    raise no_kernel(host, table, who)


def _ranked(table: Table, policy: Policy, measurements: Measurements | None) -> Iterable[str]:
    """Accepted kernels best first; `accepted` is in priority order already, and sorting keeps that order in ties."""
    if measurements is None and not policy.allow and not policy.deny:
        return table.by_rank(table.answers[0].slot_index.pickable)
    names = table.accepted()
    owners = {name: table.answers[0].row_of(name) for name in names}
    distributions = {name: row.plugin.distribution for name, row in owners.items() if row is not None}

    def order(name: str) -> tuple[bool, float]:
        time = measurements.time_of(table.slot, table.phase, name) if measurements is not None else None
        outside = bool(policy.allow) and distributions[name] not in policy.allow
        return outside, time if time is not None else float("inf")

    return sorted((name for name in names if distributions[name] not in policy.deny), key=order)


def phase_plan(
    table: Table, choice: Choice, request: Request | None, flag: str, parts: tuple[Part, ...] | None = None
) -> PhasePlan:
    """One phase's row of the plan; `flag` is what would set it where nobody asked."""
    main = choice.parts[0].row
    if main.offer.kernel != choice.kernel:
        main = next(part.row for part in choice.parts if part.row.offer.kernel == choice.kernel)
    return PhasePlan(
        table.phase,
        request.value if request is not None else None,
        request.setting if request is not None else flag,
        choice.kernel,
        main.plugin,
        main.library,
        choice.source,
        tuple([_group_plan(part) for part in (choice.parts if parts is None else parts)]),
        tuple(table.verdicts.values()),
    )


def _group_plan(part: Part) -> GroupPlan:
    groups, row = part.asked.groups, part.row
    if len(groups) == 1:
        layers = groups[0].layers
    else:
        layers = tuple(sorted(layer for group in groups for layer in group.layers))
    return GroupPlan(
        part.asked.component, part.asked.question.family, layers, row.offer.kernel, row.plugin, row.library, row.index
    )


def _kernels_of(host: HostCatalogue, table: Table, key: str, who: str) -> tuple[tuple[str, ...], tuple[Warn, ...]]:
    """The ordered kernels a key stands for in this phase, and what to warn about the key itself."""
    catalogue = host.catalogue
    distribution, colon, bare = key.rpartition(":")
    name = (table.slot, bare)
    if name in catalogue.conflicts:
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
