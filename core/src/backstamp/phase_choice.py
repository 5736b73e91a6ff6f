"""Which kernel each attention phase of a runner gets, and how phases follow one another.

In: the facts of one resolve. Out: a `Choice` and a `PhasePlan` for every phase the runner runs. Asked-for phases come
first, verify follows a half, a draft inherits from its target's half; each rule says so in the plan's `source`.

.. versionadded:: 0.1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from backstamp.compiled import HostCatalogue
from backstamp.declarations import Half, Phase, Role
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest, NoKernel, NotInstalled, Refused
from backstamp.evaluation import Answer
from backstamp.hostfit import HostRow
from backstamp.launch import Launch, Request
from backstamp.measurements import Measurements
from backstamp.model import ModelFacts
from backstamp.plan import PhasePlan, Plan, Warn
from backstamp.questions import Asked, needs_of, questions_for, running_phases
from backstamp.refusals import refused_key
from backstamp.selection import Choice, Part, Table, ask, bind_key, phase_plan, rank, table_of
from backstamp.settle import agree

__all__ = ["HYBRID_KEY", "PhaseWork"]

#: `auto` of a hybrid model's full-attention layers is this key's list.
HYBRID_KEY: Final = "hybrid_linear_attn"
SLOT: Final = "attention"
#: Decode first, because its page size matters most.
_PAGE_ORDER: Final[tuple[Phase, ...]] = ("decode", "draft_decode", "prefill", "verify", "draft_extend")


@dataclass(slots=True)
class PhaseWork:
    """The phases of one runner, decided in an order that lets later ones follow earlier ones."""

    host: HostCatalogue
    launch: Launch
    engine: EngineFacts
    model: ModelFacts
    measurements: Measurements | None
    role: Role
    target: Plan | None
    kv_dtype: str
    chosen: dict[Phase, tuple[Table, Choice]] = field(default_factory=dict)
    plans: dict[Phase, PhasePlan] = field(default_factory=dict)
    warnings: list[Warn] = field(default_factory=list)
    main: tuple[Asked, ...] = ()
    others: tuple[Asked, ...] = ()
    common: tuple[Answer, ...] = ()

    def __post_init__(self) -> None:
        asked = questions_for(SLOT, self.launch, self.engine, self.model, self.kv_dtype)
        if not asked:
            who = f"model {self.model.name}"
            raise ConflictingRequest(who, needed="at least one attention layer", found="linear layers only")
        self.main = tuple([item for item in asked if item.component == asked[0].component])
        self.others = tuple([item for item in asked if item.component != asked[0].component])
        self.common = ask(self.host, SLOT, self.main)

    def order(self) -> list[Phase]:
        """Asked-for phases first, so that `auto` joins them; verify last, because it may follow a half."""
        phases = running_phases(self.launch, self.role)
        if not self.launch.keys:
            return list(phases)
        return sorted(phases, key=lambda phase: (self.launch.own(phase, self.role) is None, phase == "verify"))

    def rows(self, phases: tuple[Phase, ...] = _PAGE_ORDER) -> list[HostRow]:
        """The rows chosen so far for these phases."""
        return [part.row for at in phases if at in self.chosen for part in self.chosen[at][1].parts]

    def decide(self, phase: Phase) -> None:
        """Choose one phase's kernels and write its row of the plan."""
        table = self._table(phase, self.main, self.common)
        request, choice = self._choose(phase, table)
        self.chosen[phase] = (table, choice)
        self.warnings += choice.warnings
        parts = choice.parts + self._other_components(phase) if self.others else choice.parts
        flag = "--draft-attention-backend" if self.role == "draft" else f"--{phase}-attention-backend"
        self.plans[phase] = phase_plan(table, choice, request, flag, parts)

    def _choose(self, phase: Phase, table: Table) -> tuple[Request | None, Choice]:
        who = f"{phase.replace('_', ' ')} attention backend"
        request = self.launch.own(phase, self.role)
        if request is not None:
            return request, bind_key(self.host, table, request.value, who, request.source)
        if phase == "verify":
            return None, self._verify_follows(table, who)
        if self.role == "draft":
            return self._inherit(phase, table, who)
        return None, self._auto(table, who)

    def _verify_follows(self, table: Table, who: str) -> Choice:
        """An explicit mode binds to its half; unset is prefill, and decode where prefill's rows refuse verify."""
        mode = self.launch.speculative_attention_mode
        if mode is not None:
            half: Half = "decode" if mode == "decode" else "prefill"
            return self._by_half(half, table, f"{who} (--speculative-attention-mode {mode})", f"mode {mode}")
        try:
            return self._by_half("prefill", table, f"{who} (default)", "default")
        except Refused:
            return self._by_half("decode", table, f"{who} (default)", "default -> decode")

    def _by_half(self, half: Half, table: Table, who: str, source: str) -> Choice:
        """The kernels one half runs, layers by layers, asked to serve this phase too; never another behind its key."""
        chosen = self.chosen[half][1]
        parts: list[Part] = []
        for part in chosen.parts:
            asked = (part.asked,)
            of_part = table if asked == table.asked else self._table(table.phase, asked, ask(self.host, SLOT, asked))
            found = of_part.parts(part.row.offer.kernel)
            if not found:
                kernel = part.row.offer.kernel
                raise refused_key(self.host, of_part, kernel, who, (of_part.verdicts[kernel],))
            parts += found
        return Choice(chosen.kernel, tuple(parts), source, (), ())

    def _inherit(self, phase: Phase, table: Table, who: str) -> tuple[Request | None, Choice]:
        """An unset draft prefers what its target's half asked for or resolved to."""
        half = self._inherited_half(phase)
        request = self.launch.half(half)
        key = request.value if request is not None else None
        if key is None and self.target is not None:
            key = self.target.phase(half).kernel
        if key is None:
            return None, self._auto(table, who)
        try:
            return request, bind_key(self.host, table, key, f"{who} (inherited)", "inherited")
        except (Refused, NotInstalled) as refusal:
            choice = self._auto(table, who)
            text = f"{phase}: the target's {key!r} cannot serve this draft, {choice.kernel} does; {refusal.needed}"
            warning = Warn("inherited", f"{text}, got {refusal.found}")
            return request, choice._replace(source="inherited -> auto", warnings=(*choice.warnings, warning))

    def _inherited_half(self, phase: Phase) -> Half:
        if phase == "draft_decode":
            return "decode"
        follows_decode = phase == "draft_extend" and self.launch.speculative_attention_mode == "decode"
        return "decode" if follows_decode else "prefill"

    def _auto(self, table: Table, who: str) -> Choice:
        who = f"{who} (auto)"
        if (SLOT, HYBRID_KEY) in self.host.catalogue.aliases and self.model.is_hybrid:
            return bind_key(self.host, table, HYBRID_KEY, who, "auto")
        policy = self.launch.policy
        if len(table.asked[0].groups) + len(table.asked) > 2 and policy.layers != "uniform" and not table.accepted():
            choice = self._per_layer(table, who)
            if choice is not None:
                return choice
        so_far = self.rows()
        fits = None if not so_far else lambda parts: agree([*so_far, *(part.row for part in parts)], self.engine)
        return rank(self.host, table, who, policy, self.measurements, fits)

    def _per_layer(self, table: Table, who: str) -> Choice | None:
        """The best kernel for each group of like layers, where no kernel serves them all."""
        policy = self.launch.policy
        groups = [group for asked in table.asked for group in asked.groups]
        if len(groups) < 2:
            return None
        parts: list[Part] = []
        kernels: list[tuple[bool, str]] = []
        for group in groups:
            asked = questions_for(SLOT, self.launch, self.engine, self.model, self.kv_dtype, (group,))
            of_group = self._table(table.phase, asked, ask(self.host, SLOT, asked))
            choice = rank(self.host, of_group, who, policy, self.measurements)
            parts += choice.parts
            kernels.append((group.facts.window_left >= 0, choice.kernel))
        warning = Warn("per_layer", f"{table.phase}: no kernel serves all layers, each group has its own")
        return Choice(min(kernels, key=lambda item: item[0])[1], tuple(parts), "auto (per_layer)", (warning,), ())

    def _table(self, phase: Phase, asked: tuple[Asked, ...], common: tuple[Answer, ...]) -> Table:
        return table_of(SLOT, asked, common, needs_of(phase, SLOT, self.launch, self.engine))

    def _other_components(self, phase: Phase) -> tuple[Part, ...]:
        """Components beside the main one take the base request as a preference, else their own best kernel."""
        parts: list[Part] = []
        for item in self.others:
            table = self._table(phase, (item,), ask(self.host, SLOT, (item,)))
            who = f"{phase.replace('_', ' ')} attention backend of component {item.component}"
            request = self.launch.half("decode" if phase == "decode" else "prefill")
            try:
                if request is None:
                    raise NoKernel(who, needed="a request", found="none")
                choice = bind_key(self.host, table, request.value, who, request.source)
            except (Refused, NotInstalled, NoKernel):
                choice = rank(self.host, table, who, self.launch.policy, self.measurements)
                if request is not None:
                    text = f"{who}: {request.value!r} cannot serve it, {choice.kernel} does"
                    self.warnings.append(Warn("changed", text))
            parts += choice.parts
        return tuple(parts)
