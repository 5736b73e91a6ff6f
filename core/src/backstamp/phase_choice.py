"""Which kernel each attention phase of a runner gets, and how phases follow one another.

In: the `Facts` of one resolve. Out: a `Choice` and a `PhasePlan` for every phase the runner runs. Asked-for phases come
first, verify follows a half, a draft inherits from its target's half; each rule says so in the plan's `source`.

.. versionadded:: 0.1
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from backstamp.component_choice import choose_components, main_component
from backstamp.declarations import Half, Phase
from backstamp.errors import ConflictingRequest, NotInstalled, Refused
from backstamp.evaluation import Answer
from backstamp.facts import Facts
from backstamp.launch import Request
from backstamp.per_layer import choose_per_layer
from backstamp.plan import PhasePlan, Verdict, Warn
from backstamp.questions import Asked, needs_of, questions_for, running_phases
from backstamp.rank import Fits, in_order, rank
from backstamp.refusals import refused_key
from backstamp.selection import Choice, Part, Table, ask, bind_key, phase_plan, table_of
from backstamp.settle import agree

__all__ = ["HYBRID_KEY", "PhaseWork"]

#: `auto` of a hybrid model's full-attention layers is this key's list.
HYBRID_KEY: Final = "hybrid_linear_attn"
#: The kernel whose sub-settings are `dsa_prefill_backend` and `dsa_decode_backend`.
SPARSE_KEY: Final = "dsa"
SLOT: Final = "attention"
#: Decode first, because its page size matters most.
_PAGE_ORDER: Final[tuple[Phase, ...]] = ("decode", "draft_decode", "prefill", "verify", "draft_extend")


@dataclass(slots=True)
class PhaseWork:
    """The phases of one runner, decided in an order that lets later ones follow earlier ones.

    `avoided` are (phase, kernel) pairs that `auto` must pass over, because with them a later phase found nothing.
    """

    facts: Facts
    avoided: frozenset[tuple[Phase, str]] = frozenset()
    chosen: dict[Phase, tuple[Table, Choice]] = field(default_factory=dict)
    components: dict[Phase, tuple[Part, ...]] = field(default_factory=dict)
    plans: dict[Phase, PhasePlan] = field(default_factory=dict)
    warnings: list[Warn] = field(default_factory=list)
    main: tuple[Asked, ...] = ()
    others: tuple[Asked, ...] = ()
    common: tuple[Answer, ...] = ()
    failed: tuple[Verdict, ...] = ()

    def __post_init__(self) -> None:
        asked = questions_for(SLOT, self.facts)
        if not asked:
            who = f"model {self.facts.model.name}"
            raise ConflictingRequest(who, needed="at least one attention layer", found="linear layers only")
        main = main_component(asked)
        self.main = tuple([item for item in asked if item.component == main])
        self.others = tuple([item for item in asked if item.component != main])
        self.common = ask(self.facts, SLOT, self.main)
        self.failed = tuple(
            Verdict(
                at.plugin.name, False, "failed", "plugin", f"{at.plugin.distribution} to load", at.cause, at.plugin.name
            )
            for at in self.facts.host.catalogue.failures
        )

    def order(self) -> list[Phase]:
        """Asked-for phases first, so that `auto` joins them; verify last, because it may follow a half."""
        launch, role = self.facts.launch, self.facts.role
        phases = running_phases(launch, role)
        if not launch.keys:
            return list(phases)
        return sorted(phases, key=lambda phase: (launch.own(phase, role) is None, phase == "verify"))

    def parts(self, phases: tuple[Phase, ...] = _PAGE_ORDER) -> list[Part]:
        """What was chosen so far for these phases, of every layer that has a KV cache."""
        return [part for at in phases if at in self.chosen for part in (*self.chosen[at][1].parts, *self._cached(at))]

    def decide(self, phase: Phase) -> None:
        """Choose one phase's kernels and write its row of the plan."""
        request, table, choice = self._choose(phase)
        self.chosen[phase] = (table, choice)
        self.warnings += choice.warnings
        parts = choice.parts
        if self.others:
            self.components[phase], warnings = choose_components(self.facts, phase, self.others, self._fits())
            self.warnings += warnings
            parts += self.components[phase]
        flag = "--draft-attention-backend" if self.facts.role == "draft" else f"--{phase}-attention-backend"
        self.plans[phase] = phase_plan(table, choice, request, flag, parts, self.failed)

    def _choose(self, phase: Phase) -> tuple[Request | None, Table, Choice]:
        table = self._table(phase, self.main, self.common)
        who = f"{phase.replace('_', ' ')} attention backend"
        request = self._own(phase)
        if request is not None:
            return request, *self._bind(request, table, who)
        if phase == "verify":
            return None, table, self._verify_follows(table, who)
        if self.facts.role == "draft":
            return self._inherit(phase, table, who)
        return None, *self._auto(table, who)

    def _own(self, phase: Phase) -> Request | None:
        """The request that binds a phase; sub-settings of the sparse kernel ask for their parent on a sparse model."""
        launch = self.facts.launch
        request = launch.own(phase, self.facts.role)
        if request is None and self.facts.role == "target" and phase in ("prefill", "decode"):
            sub = launch.sub_settings("dsa_") if any(item.question.family == "sparse_mla" for item in self.main) else ()
            return Request(SPARSE_KEY, sub[0].source, sub[0].setting) if sub else None
        return request

    def _bind(self, request: Request, table: Table, who: str) -> tuple[Table, Choice]:
        """Bind what was asked for; a refusal names what the launch asks for beside it."""
        try:
            if self._is_per_layer():
                return choose_per_layer(
                    self.facts, table, lambda at, fits: bind_key(self.facts, at, request.value, who, request.source)
                )
            return table, bind_key(self.facts, table, request.value, who, request.source)
        except Refused as refusal:
            halves = {half: self.facts.launch.half(half) for half in ("prefill", "decode")}
            beside = [f"{half} asks for {at.value}" for half, at in halves.items() if at is not None and at != request]
            raise refusal.beside(beside) from refusal.__cause__

    def _verify_follows(self, table: Table, who: str) -> Choice:
        """An explicit mode binds to its half; unset is prefill, and decode where prefill's rows refuse verify."""
        mode = self.facts.launch.speculative_attention_mode
        if mode is not None:
            half: Half = "decode" if mode == "decode" else "prefill"
            return self._by_half(half, table, f"{who} (--speculative-attention-mode {mode})", f"mode {mode}")
        try:
            return self._by_half("prefill", table, f"{who} (default)", "default")
        except Refused as refusal:
            try:
                return self._by_half("decode", table, f"{who} (default)", "default -> decode")
            except Refused as second:
                raise second.beside([f"the prefill half: {refusal.needed}, got {refusal.found}"]) from refusal

    def _by_half(self, half: Half, table: Table, who: str, source: str) -> Choice:
        """The kernels one half runs, layers by layers, asked to serve this phase too; never another behind its key."""
        chosen = self.chosen[half][1]
        parts: list[Part] = []
        for part in chosen.parts:
            asked = (part.asked,)
            of_part = table if asked == table.asked else self._table(table.phase, asked, ask(self.facts, SLOT, asked))
            found = of_part.parts(part.row.name)
            if not found:
                raise refused_key(self.facts.host, of_part, part.row.name, who, (of_part.verdicts[part.row.name],))
            parts += found
        return Choice(chosen.kernel, tuple(parts), source, (), ())

    def _inherit(self, phase: Phase, table: Table, who: str) -> tuple[Request | None, Table, Choice]:
        """An unset draft prefers what its target's half asked for or resolved to."""
        half = self._inherited_half(phase)
        request = self.facts.launch.half(half)
        key = request.value if request is not None else self._target_kernel(half)
        if key is None:
            return None, *self._auto(table, who)
        try:
            return request, table, bind_key(self.facts, table, key, f"{who} (inherited)", "inherited")
        except (Refused, NotInstalled) as refusal:
            table, choice = self._auto(table, who)
            text = f"{phase}: the target's {key!r} cannot serve this draft, {choice.kernel} does; {refusal.needed}"
            warning = Warn("inherited", f"{text}, got {refusal.found}")
            return request, table, choice._replace(source="inherited -> auto", warnings=(*choice.warnings, warning))

    def _target_kernel(self, half: Half) -> str | None:
        if self.facts.target is None:
            return None
        row = self.facts.target.phase(half)
        contested = (SLOT, row.kernel) in self.facts.host.catalogue.conflicts
        return f"{row.plugin.distribution}:{row.kernel}" if contested and row.plugin is not None else row.kernel

    def _inherited_half(self, phase: Phase) -> Half:
        if phase == "draft_decode":
            return "decode"
        follows_decode = phase == "draft_extend" and self.facts.launch.speculative_attention_mode == "decode"
        return "decode" if follows_decode else "prefill"

    def _auto(self, table: Table, who: str) -> tuple[Table, Choice]:
        """The family's wish, the hybrid list, or the best by rank; layer by layer where the policy says so."""
        who = f"{who} (auto)"
        uniform = self.facts.launch.policy.layers == "uniform"
        if self._is_per_layer() or (not uniform and not table.has_accepted() and self._unlike() > 1):
            return choose_per_layer(self.facts, table, lambda at, fits: self._pick(at, who, fits), self._fits())
        return table, self._pick(table, who, self._fits())

    def _pick(self, table: Table, who: str, fits: Fits | None) -> Choice:
        rule = self.facts.rule(table.asked[0].component)
        if rule.kernels:
            choice = in_order(self.facts, table, rule.kernels, who, "family", fits)
            if choice is not None:
                return choice
        hybrid = self.facts.host.catalogue.aliases.get((SLOT, HYBRID_KEY))
        if hybrid is not None and self.facts.model.is_hybrid:
            choice = in_order(self.facts, table, hybrid.alias.for_phase(table.phase), who, "auto", fits)
            if choice is not None:
                return choice
        avoided = [kernel for phase, kernel in self.avoided if phase == table.phase]
        return rank(self.facts, table, who, fits, avoided)

    def _fits(self) -> Fits | None:
        """Whether parts can share a cache with everything chosen so far; None while nothing is."""
        so_far = [part.row for part in self.parts()]
        if not so_far:
            return None
        engine = self.facts.engine
        return lambda parts: agree([*so_far, *(part.row for part in parts)], engine)

    def _unlike(self) -> int:
        return sum(len(asked.groups) for asked in self.main)

    def _is_per_layer(self) -> bool:
        return self.facts.launch.policy.layers == "per_layer" and self._unlike() > 1

    def _table(self, phase: Phase, asked: tuple[Asked, ...], common: tuple[Answer, ...]) -> Table:
        return table_of(SLOT, asked, common, needs_of(phase, SLOT, self.facts, asked[0].cached))

    def _cached(self, phase: Phase) -> list[Part]:
        return [part for part in self.components.get(phase, ()) if part.asked.cached]
