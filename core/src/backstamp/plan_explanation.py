"""Why each of the five phases runs what it runs, the flag that would change it, and what came nearest to serving.

In: the resolver's arguments. Out: one `PhaseStory` a phase, those of the linear slot apart. It holds no rule of its
own: the choices are the resolver's, the reasons the evaluator's.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from backstamp.compiled import HostCatalogue
from backstamp.declarations import PHASES, Phase, Role
from backstamp.engine import EngineFacts
from backstamp.facts import gather
from backstamp.launch import Launch, flag_of
from backstamp.linear_slot import resolve_linear
from backstamp.measurements import Measurements
from backstamp.model import ModelFacts
from backstamp.phase_choice import PhaseWork
from backstamp.plan import Plan
from backstamp.plan_rows import Verdict
from backstamp.resolution import decide
from backstamp.selection import Table

__all__ = ["Explanation", "PhaseStory", "explain_plan"]

_DRAFT_PHASES: Final = frozenset({"draft_decode", "draft_extend"})
#: What each source means, in words; a source that is none of these says itself.
_BECAUSE: Final[Mapping[str, str]] = {
    "auto": "best by rank among those that serve",
    "auto (measured)": "fastest measured on this host",
    "auto (per_layer)": "best for each group of unlike layers",
    "family": "the model family's wish",
    "embedder": "the embedding framework asked",
    "default": "unset: follows prefill",
    "default -> decode": "unset: prefill's kernel cannot verify, decode's can",
    "inherited": "unset: the target's",
    "inherited -> auto": "the target's cannot serve this draft; best by rank",
}


_LINEAR_DEFAULT: Final = "unset: follows decode where that is flashinfer, else triton"


class PhaseStory(NamedTuple):
    """One phase: the kernel (None: not run), why, the flag that sets it, and the refused kernel that fails least."""

    phase: Phase
    kernel: str | None
    reason: str
    setting: str
    nearest: str
    lacks: tuple[Verdict, ...]

    def as_json(self) -> dict[str, object]:
        """The story for tools."""
        nearest = {"kernel": self.nearest, "lacks": [verdict.as_json() for verdict in self.lacks]}
        return {
            "phase": self.phase,
            "kernel": self.kernel,
            "reason": self.reason,
            "setting": self.setting,
            "nearest_refused": nearest if self.nearest else None,
        }


class Explanation(NamedTuple):
    """The five stories, the plans they tell of (the target's, and the draft's where one proposes tokens), and a story
    for each phase of the target's linear slot that runs."""

    phases: tuple[PhaseStory, ...]
    plans: tuple[Plan, ...]
    linear: tuple[PhaseStory, ...]


def explain_plan(
    host: HostCatalogue,
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    draft: ModelFacts | None = None,
    measurements: Measurements | None = None,
) -> Explanation:
    """Resolve a target, and its draft where one proposes tokens, and tell all five phases.

    Raises:
        BackstampError: as the resolver: an error explains itself.
    """
    plan, work = decide(gather(host, launch, engine, model, measurements))
    works: dict[Role, PhaseWork] = {"target": work}
    plans: tuple[Plan, ...] = (plan,)
    if launch.speculative:
        drafted = draft if draft is not None else model
        draft_plan, works["draft"] = decide(gather(host, launch, engine, drafted, measurements, "draft", plan))
        plans += (draft_plan,)
    return Explanation(tuple(_story(phase, works) for phase in PHASES), plans, _linear_stories(plan, work))


def _story(phase: Phase, works: Mapping[Role, PhaseWork]) -> PhaseStory:
    role: Role = "draft" if phase in _DRAFT_PHASES else "target"
    flag = flag_of(phase, role)
    if role not in works or phase not in works[role].plans:
        speculative = "draft" in works
        reason = "not run: the draft takes a single step" if speculative else "not run: nothing drafts"
        setting = "--speculative-num-steps" if speculative else "--speculative-algorithm"
        return PhaseStory(phase, None, reason, setting, "", ())
    work = works[role]
    row, (table, _) = work.plans[phase], work.chosen[phase]
    nearest, lacks = _nearest_refused(table)
    return PhaseStory(phase, row.kernel, _because(row.source, row.requested, row.setting), flag, nearest, lacks)


def _linear_stories(plan: Plan, work: PhaseWork) -> tuple[PhaseStory, ...]:
    tables = {decision.phase: decision.table for decision in resolve_linear(work.facts, work.failed).decisions}
    stories: list[PhaseStory] = []
    for row in plan.running_linear:
        nearest, lacks = _nearest_refused(tables[row.phase])
        # what an unset verify of this slot follows is not prefill
        because = _LINEAR_DEFAULT if row.source == "default" else _because(row.source, row.requested, row.setting)
        flag = f"--linear-attn-{row.phase}-backend"
        stories.append(PhaseStory(row.phase, row.kernel, because, flag, nearest, lacks))
    return tuple(stories)


def _because(source: str, requested: str | None, setting: str) -> str:
    if source == "operator":
        return f"asked for as {requested} ({setting})"
    return _BECAUSE.get(source, source)


def _nearest_refused(table: Table) -> tuple[str, tuple[Verdict, ...]]:
    """The refused kernel that fails least, by everything it fails."""
    refused = [
        (reasons.distance, name, reasons.verdicts)
        for name, reasons in table.reasons().items()
        if not table.verdicts[name].accepted and reasons.verdicts
    ]
    _, name, verdicts = min(refused, default=((False, 0), "", ()), key=lambda item: item[:2])
    return name, verdicts
