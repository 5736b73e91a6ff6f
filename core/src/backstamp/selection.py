"""Seventh step of the flow: one phase's verdicts → the kernel a key binds.

In: the questions of a phase and a requested key. Out: a `Choice`. A key is an ordered list of kernels: the first whose
machine, model and phase facts fit binds; if only its installation is missing, that is the answer and nothing further
is tried. Nothing here falls back in silence: what is passed over becomes a warning. Where nobody asked,
`backstamp.rank` chooses.

.. versionadded:: 0.1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from backstamp.declarations import Phase, Slot
from backstamp.errors import BackstampError, ConflictingRequest
from backstamp.evaluation import Answer, PhaseNeeds, Reasons, all_reasons, evaluate, evaluate_phase, installed_reasons
from backstamp.facts import Facts
from backstamp.hostfit import INSTALLATION, HostRow
from backstamp.index import bits_of
from backstamp.keys import absent, kernels_of
from backstamp.launch import Request
from backstamp.plan_rows import GroupPlan, PhasePlan, Verdict, Warn
from backstamp.questions import Asked
from backstamp.refusals import conflicting_key, failed_key, refused_key
from backstamp.row_masks import sink_needs

__all__ = [
    "Choice",
    "Decision",
    "Kind",
    "Part",
    "Table",
    "ask",
    "bind_key",
    "bind_request",
    "by_rows",
    "phase_plan",
    "table_of",
    "unlike_settings",
]


class Part(NamedTuple):
    """The row one question's layers were given; `source` says who decided where that is not the phase's own."""

    asked: Asked
    row: HostRow
    source: str = ""


class Table(NamedTuple):
    """Every kernel's answer to the questions of one phase of one component, joined: accepted where all answers are."""

    phase: Phase
    slot: Slot
    needs: PhaseNeeds
    asked: tuple[Asked, ...]
    answers: tuple[Answer, ...]
    verdicts: Mapping[str, Verdict]

    def by_rank(self, among: int = -1) -> Iterator[str]:
        """The kernels that serve every question, by their best row among those of a mask, best first."""
        first = self.answers[0]
        before = ""
        for at in bits_of(first.rows & among):
            kernel = first.slot_index.rows[at].name
            if kernel != before and self.verdicts[kernel].accepted:
                yield kernel
            before = kernel

    def has_accepted(self) -> bool:
        """Whether any kernel serves every question."""
        return next(self.by_rank(), None) is not None

    def accepted(self) -> list[str]:
        """The kernels that serve every question, best first, each once."""
        return list(dict.fromkeys(self.by_rank()))

    def reasons(self) -> dict[str, Reasons]:
        """All that keeps each kernel from serving, over every question."""
        joined: dict[str, Reasons] = {}
        for answer in self.answers:
            for name, found in all_reasons(answer, self.needs).items():
                before = joined[name].verdicts if name in joined else ()
                joined[name] = Reasons(found.row, tuple(dict.fromkeys((*before, *found.verdicts))))
        return joined

    def installed_reasons(self, kernel: str) -> list[Reasons]:
        """Of a kernel every row whose library is there, and what keeps it from serving, over every question."""
        return [
            found
            for answer in self.answers
            for found in installed_reasons(answer, self.needs, kernel)
            if found.verdicts
        ]

    def parts(self, kernel: str, among: int = -1) -> tuple[Part, ...]:
        """The best accepting row of a kernel for each question, among the rows of a mask."""
        rows = [(asked, answer.row_of(kernel, among)) for asked, answer in zip(self.asked, self.answers, strict=True)]
        return tuple([Part(asked, row) for asked, row in rows if row is not None])

    def all_parts(self, kernel: str, among: int = -1) -> Iterator[tuple[Part, ...]]:
        """Every way a kernel's accepting rows serve the questions, best first."""
        rows = [
            [Part(asked, row) for row in answer.rows_of(kernel, among)]
            for asked, answer in zip(self.asked, self.answers, strict=True)
        ]
        return itertools.product(*rows)


#: How a kernel came to a phase: somebody asked, it follows a half, it is the target's, the family's wish, or nobody's.
Kind = Literal["asked", "follows", "inherited", "family", "auto"]


class Choice(NamedTuple):
    """What was chosen for one phase, the rows of each group of layers, and what there is to say about it.

    `kind` is what rules ask about; `source` says it in the plan's words.
    """

    kernel: str
    parts: tuple[Part, ...]
    kind: Kind
    source: str
    warnings: tuple[Warn, ...] = ()
    passed_over: tuple[Verdict, ...] = ()

    @property
    def free(self) -> bool:
        """Whether nobody asked for it, so that another may take its place."""
        return self.kind in ("family", "auto")


class Decision(NamedTuple):
    """What one component of one slot was given in one phase, and the table it was chosen from."""

    phase: Phase
    table: Table
    choice: Choice


def ask(facts: Facts, slot: Slot, asked: tuple[Asked, ...]) -> tuple[Answer, ...]:
    """Put the questions of a slot to every kernel, once for all phases."""
    index = facts.host.slots[slot]
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
    return Table(needs.phase, slot, needs, asked, answers, verdicts)


def by_rows(table: Table, choice: Choice, among: int = -1) -> Iterator[Choice]:
    """A choice by each way the rows of its kernel serve, among the rows of a mask, best first."""
    return (choice._replace(parts=parts) for parts in table.all_parts(choice.parts[0].row.name, among))


def unlike_settings(part: Part) -> bool:
    """Whether a kernel would have to compile one value in for layers that have several."""
    if "softcap" not in part.row.offer.build_settings:
        return False
    return len({group.facts.softcap for group in part.asked.groups}) > 1


def bind_request(facts: Facts, table: Table, request: Request, who: str) -> Choice:
    """Bind what was asked for; a refusal names the flag.

    Raises:
        BackstampError: as `bind_key`.
    """
    try:
        return bind_key(facts, table, request.value, who, request.source)
    except BackstampError as refusal:
        raise refusal.of(request.setting) from refusal.__cause__


def bind_key(facts: Facts, table: Table, key: str, who: str, source: str, kind: Kind = "asked") -> Choice:
    """Bind a requested key.

    Raises:
        UnknownKey, NotInstalled: nobody declares the key. PluginFailed: its plugin did not load, cause chained.
        AliasConflict: two distributions claim it. ForeignAlias: it stands for another distribution's kernel.
        Refused: it exists and cannot serve this, with every reason.
    """
    kernels, warnings = kernels_of(facts, table, key, who)
    passed: list[Verdict] = []
    for kernel in kernels:
        verdict = table.verdicts.get(kernel)
        if verdict is None:
            passed.append(_missing(facts, table, kernel, who))
            continue
        if verdict.accepted:
            lost = [
                Warn("lost", f"{who}: {kernel} binds; passed over {item.kernel}, no installed plugin has it")
                for item in passed
                if item.code == "not_installed"
            ]
            parts = table.parts(kernel)
            return Choice(parts[0].row.offer.kernel, parts, kind, source, (*warnings, *lost), tuple(passed))
        passed.append(verdict)
        if verdict.code in INSTALLATION:
            break
    raise refused_key(facts, table, key, who, tuple(passed))


def _missing(facts: Facts, table: Table, kernel: str, who: str) -> Verdict:
    """The verdict of a kernel no loaded plugin has; raises where one should have it."""
    verdict = absent(facts, table.slot, kernel)
    catalogue = facts.host.catalogue
    if verdict.code == "conflict":
        raise conflicting_key(who, catalogue.conflicts[table.slot, kernel])
    failure = catalogue.failure_of(kernel)
    if failure is not None:
        raise failed_key(who, kernel, failure)
    return verdict


def phase_plan(
    table: Table,
    choice: Choice,
    request: Request | None,
    flag: str,
    parts: tuple[Part, ...] | None = None,
    failed: tuple[Verdict, ...] = (),
) -> PhasePlan:
    """One phase's row of the plan; `flag` is what would set it where nobody asked, `failed` are the verdicts of plugins
    that did not load."""
    main = choice.parts[0].row
    if main.offer.kernel != choice.kernel:
        main = next(part.row for part in choice.parts if part.row.offer.kernel == choice.kernel)
    return PhasePlan(
        phase=table.phase,
        requested=request.value if request is not None else None,
        setting=request.setting if request is not None else flag,
        kernel=choice.kernel,
        plugin=main.plugin,
        library=main.library,
        source=choice.source,
        groups=tuple([_group_plan(part, choice.source) for part in (choice.parts if parts is None else parts)]),
        verdicts=(*table.verdicts.values(), *failed),
    )


def _group_plan(part: Part, source: str) -> GroupPlan:
    groups, row = part.asked.groups, part.row
    layers = groups[0].layers if len(groups) == 1 else tuple(sorted(at for group in groups for at in group.layers))
    return GroupPlan(
        component=part.asked.component,
        family=part.asked.question.family,
        layers=layers,
        kernel=row.offer.kernel,
        plugin=row.plugin,
        library=row.library,
        row=row.index,
        source=part.source or source,
        cached=part.asked.question.cached,
        settings=_settings(part),
        skipped=row.skipped(part.asked.question.bypass) if row.installations else (),
        alignment_tokens=row.offer.alignment_tokens,
        sinks=sink_needs(row.offer, part.asked.question),
    )


def _settings(part: Part) -> tuple[tuple[str, float], ...]:
    """What the kernel compiles in for these layers, as their model says it.

    Raises:
        ConflictingRequest: layers of one object with unlike values.
    """
    if "softcap" not in part.row.offer.build_settings:
        return ()
    softcaps = sorted({group.facts.softcap for group in part.asked.groups})
    if unlike_settings(part):
        raise ConflictingRequest(
            f"kernel {part.row.offer.kernel!r}, component {part.asked.component}",
            needed="one softcap for all layers, because it is compiled in",
            found=" and ".join(f"{softcap:g}" for softcap in softcaps),
            fix="Resolve layer by layer: Policy(layers='per_layer')",
        )
    return (("softcap", softcaps[0]),) if softcaps[0] else ()
