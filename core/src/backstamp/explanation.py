"""What a key means on a host and for a model, phase by phase, with the resolver's own verdicts.

In: the resolver's facts and one key. Out: for each of the five phases what binds or why nothing does, and the flag
that sets it; and the alias x host x phase matrix made of the same answers. It holds no rule of its own.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from backstamp.catalogue import Catalogue
from backstamp.compiled import HostCatalogue, compile_for
from backstamp.component_choice import main_component
from backstamp.declarations import PHASES, Phase
from backstamp.engine import EngineFacts
from backstamp.errors import BackstampError, UnknownKey
from backstamp.facts import gather
from backstamp.host import HostFacts
from backstamp.launch import Launch, flag_of
from backstamp.model import ModelFacts
from backstamp.plan_rows import Verdict
from backstamp.questions import needs_of, questions_for
from backstamp.selection import ask, bind_key, table_of

__all__ = ["MatrixCell", "PhaseAnswer", "explain_key", "matrix"]


class PhaseAnswer(NamedTuple):
    """What a key comes to in one phase: the kernel that binds, or the refusal; `setting` is the flag that sets it."""

    phase: Phase
    kernel: str | None
    setting: str
    reason: str
    passed_over: tuple[Verdict, ...]

    def as_json(self) -> dict[str, object]:
        """The answer for tools."""
        return {
            "phase": self.phase,
            "kernel": self.kernel,
            "setting": self.setting,
            "reason": self.reason,
            "passed_over": [verdict.as_json() for verdict in self.passed_over],
        }


class MatrixCell(NamedTuple):
    """One alias on one host in one phase: the kernel that would bind, or None and the first reason."""

    alias: str
    host: str
    phase: Phase
    kernel: str | None
    code: str
    reason: str

    def as_json(self) -> dict[str, object]:
        """The cell for tools."""
        return self._asdict()


def explain_key(
    host: HostCatalogue, launch: Launch, engine: EngineFacts, model: ModelFacts, key: str
) -> tuple[PhaseAnswer, ...]:
    """What a key comes to in each phase.

    Raises:
        UnknownKey, NotInstalled, PluginFailed, AliasConflict: as the resolver would, because no phase can answer.
    """
    facts = gather(host, launch, engine, model)
    everything = questions_for("attention", facts)
    main = main_component(everything)
    asked = tuple(item for item in everything if item.component == main)
    common = ask(facts, "attention", asked)
    answers: list[PhaseAnswer] = []
    for phase in PHASES:
        setting = flag_of(phase, "draft" if phase.startswith("draft") else "target")
        table = table_of("attention", asked, common, needs_of(phase, "attention", facts, asked[0].question.cached))
        try:
            choice = bind_key(facts, table, key, f"{phase.replace('_', ' ')} attention backend", "operator")
        except BackstampError as refusal:
            # a key whose kernels were judged has an answer in every phase; a key nobody has, in none
            if not refusal.verdicts:
                raise
            answers.append(PhaseAnswer(phase, None, setting, refusal.message, refusal.verdicts))
        else:
            answers.append(PhaseAnswer(phase, choice.kernel, setting, "accepted", choice.passed_over))
    return tuple(answers)


def matrix(
    catalogue: Catalogue,
    hosts: Sequence[HostFacts],
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    keys: Sequence[str] = (),
) -> tuple[MatrixCell, ...]:
    """Every key on every host in every phase, in the order given; no keys means all of the attention slot.

    Raises:
        UnknownKey: a key nobody declares.
    """
    known = catalogue.keys("attention")
    for key in keys:
        if key not in known:
            found = ", ".join(known) or "none: no plugin is installed"
            raise UnknownKey(f"matrix key {key!r}", needed=f"one of {found}", found="an unknown key")
    cells: list[MatrixCell] = []
    for facts in hosts:
        host = compile_for(catalogue, facts)
        for key in keys or known:
            for answer in explain_key(host, launch, engine, model, key):
                refused = [verdict for verdict in answer.passed_over if not verdict.accepted]
                code = "accepted" if answer.kernel is not None else (refused[0].code if refused else "refused")
                reason = answer.reason if answer.kernel is not None or not refused else refused[0].message
                cells.append(MatrixCell(key, facts.name, answer.phase, answer.kernel, code, reason))
    return tuple(sorted(cells, key=lambda cell: (cell.alias, [h.name for h in hosts].index(cell.host))))
