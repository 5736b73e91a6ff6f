"""Which kernel each attention phase of a runner gets, and how phases follow one another.

In: the `Facts` of one resolve. Out: for every phase the runner runs its options, best first, and of those taken a
`PhasePlan`. Asked-for phases come first, verify follows a half, a draft inherits from its target's half; each rule
says so in the plan's `source`. `backstamp.choosing` takes one option a phase so that all of them share one cache.

.. versionadded:: 0.1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from backstamp.auto_choice import auto_choices
from backstamp.component_choice import choose_components, main_component
from backstamp.declarations import PHASES, Half, Phase
from backstamp.errors import BackstampError, ConflictingRequest, NotInstalled, Refused
from backstamp.evaluation import Answer
from backstamp.facts import Facts
from backstamp.inheriting import inherited, inherited_half, target_kernels
from backstamp.launch import Request, flag_of, outranks, stronger
from backstamp.per_layer import Choices, by_layers
from backstamp.plan_rows import PhasePlan, Verdict, Warn
from backstamp.questions import Asked, needs_of, questions_for, running_phases
from backstamp.rank import Fits, not_picked, pickable
from backstamp.refusals import refused_key
from backstamp.selection import (
    Choice,
    Decision,
    Part,
    Table,
    ask,
    bind_request,
    by_rows,
    phase_plan,
    table_of,
    unlike_settings,
)
from backstamp.settle import share_a_cache

__all__ = ["SPARSE_KEY", "Option", "PhaseWork"]

#: The kernel whose sub-settings are `dsa_prefill_backend` and `dsa_decode_backend`.
SPARSE_KEY: Final = "dsa"
SLOT: Final = "attention"
#: Decode first, because its page size matters most.
_PAGE_ORDER: Final[tuple[Phase, ...]] = ("decode", "draft_decode", "prefill", "verify", "draft_extend")


class Option(NamedTuple):
    """One way to serve a phase: who asked for it, the table it was read from, and the choice."""

    request: Request | None
    table: Table
    choice: Choice


@dataclass(slots=True)
class PhaseWork:
    """The phases of one runner, taken in an order that lets later ones follow earlier ones.

    `greedy` takes first options as they come, to tell what they disagree on where nothing fits together.
    """

    facts: Facts
    greedy: bool = False
    chosen: dict[Phase, tuple[Table, Choice]] = field(default_factory=dict)
    components: dict[Phase, tuple[Decision, ...]] = field(default_factory=dict)
    plans: dict[Phase, PhasePlan] = field(default_factory=dict)
    warned: dict[Phase, tuple[Warn, ...]] = field(default_factory=dict)
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

    def decisions(self) -> list[Decision]:
        """What was decided for every phase and component, in phase order, the main component first."""
        found: list[Decision] = []
        for phase in PHASES:
            if phase in self.chosen:
                found += [Decision(phase, *self.chosen[phase]), *self.components.get(phase, ())]
        return found

    def take(self, phase: Phase, option: Option, *, first: Option | None = None) -> None:
        """Take one option of a phase and write its row of the plan; `first` is what ranks before it, if not taken.

        Raises:
            NoKernel: a component beside the main one finds no kernel that shares the cache.
        """
        request, table, choice = option
        self.chosen[phase] = (table, choice)
        parts, warnings = choice.parts, choice.warnings
        if first is not None and first.choice.kernel != choice.kernel:
            text = f"{first.choice.kernel} comes first, but what it leaves to the other phases cannot share its cache"
            warnings += (Warn("passed_over", f"{phase}: {text}; {choice.kernel} runs"),)
        if self.others:
            self.components[phase] = choose_components(self.facts, phase, self.others, self._fits())
            for decision in self.components[phase]:
                parts, warnings = parts + decision.choice.parts, warnings + decision.choice.warnings
        self.warned[phase] = warnings
        flag = flag_of(phase, self.facts.role)
        self.plans[phase] = phase_plan(table, choice, request, flag, parts, self.failed)

    def drop(self, phase: Phase) -> None:
        """Take back what was taken of a phase."""
        for of in (self.chosen, self.components, self.plans, self.warned):
            of.pop(phase, None)

    def fits(self, option: Option) -> bool:
        """Whether an option can share a cache with everything taken so far."""
        parts = option.choice.parts
        return share_a_cache([*self.parts(), *parts], self.facts.cache) and not any(map(unlike_settings, parts))

    def options(self, phase: Phase) -> Iterator[Option]:
        """Every way to serve a phase, best first, whether or not it fits what is taken.

        Raises:
            BackstampError: nothing serves, with every reason.
        """
        table = self._table(phase, self.main, self.common)
        # a draft has a prefill of its own
        draft = "draft " if self.facts.role == "draft" and not phase.startswith("draft") else ""
        who = f"{draft}{phase.replace('_', ' ')} attention backend"
        request = self._own(phase)
        if request is not None:
            yield from self._bind(request, table, who)
        elif phase == "verify":
            yield from self._verify_follows(table, who)
        elif self.facts.role == "draft":
            yield from self._inherit(phase, table, who)
        else:
            yield from self._auto(table, who)

    def _own(self, phase: Phase) -> Request | None:
        """The request that binds a phase; sub-settings of the sparse kernel ask for their parent on a sparse model."""
        launch = self.facts.launch
        if self.facts.role == "draft":
            return stronger(launch.own(phase, "draft"), launch.components.get("draft"))
        if phase not in ("prefill", "decode"):
            request, mode = launch.own(phase, "target"), launch.sources.get("speculative_attention_mode")
            # a weaker source's verify does not undo a stronger one's mode
            return request if mode is None or request is None or not outranks(mode, request.source) else None
        request = launch.half_of("decode" if phase == "decode" else "prefill", self.main[0].component)
        if request is None:
            sub = launch.sub_settings("dsa_") if any(item.question.family == "sparse_mla" for item in self.main) else ()
            return Request(SPARSE_KEY, sub[0].source, sub[0].setting) if sub else None
        return request

    def _bind(self, request: Request, table: Table, who: str) -> Iterator[Option]:
        """What was asked for, by each of its rows that serve; a refusal names what the launch asks for beside it."""
        choices = partial(self._asked, request=request, who=who)
        try:
            yield from (Option(request, *way) for way in self._by_layers(table, choices))
        except BackstampError as refusal:
            halves = {half: self.facts.launch.half(half) for half in ("prefill", "decode")}
            beside = [f"{half} asks for {at.value}" for half, at in halves.items() if at is not None and at != request]
            raise refusal.of("", beside) from refusal.__cause__

    def _asked(self, table: Table, request: Request, who: str) -> Iterator[Choice]:
        """The choices a request comes to: one kernel, by each of its rows that serve."""
        return by_rows(table, bind_request(self.facts, table, request, who))

    def _verify_follows(self, table: Table, who: str) -> Iterator[Option]:
        """An explicit mode binds to its half; unset is prefill, and decode where prefill's rows refuse verify."""
        mode = self.facts.launch.speculative_attention_mode
        if mode is not None:
            half: Half = "decode" if mode == "decode" else "prefill"
            who = f"{who} (--speculative-attention-mode {mode})"
            yield from (Option(None, table, choice) for choice in self._by_half(half, table, who, f"mode {mode}"))
            return
        refusals: list[Refused] = []
        halves: tuple[tuple[Half, str], ...] = (("prefill", "default"), ("decode", "default -> decode"))
        for half, source in halves:
            try:
                yield from (Option(None, table, way) for way in self._by_half(half, table, f"{who} (default)", source))
            except Refused as refusal:
                refusals.append(refusal)
        if len(refusals) == len(halves):
            first, second = refusals
            raise second.of("", [f"the prefill half: {first.needed}, got {first.found}"]) from first

    def _by_half(self, half: Half, table: Table, who: str, source: str) -> Iterator[Choice]:
        """The kernels one half runs, layers by layers, asked to serve this phase too; never another behind its key."""
        chosen = self.chosen[half][1]
        found: list[list[tuple[Part, ...]]] = []
        for part in chosen.parts:
            asked = (part.asked,)
            of_part = table if asked == table.asked else self._table(table.phase, asked, ask(self.facts, SLOT, asked))
            # nobody asked for verify itself: an approximate row serves only behind a kernel that was asked for
            exact = pickable(self.facts, of_part)
            ways = list(of_part.all_parts(part.row.name, exact))
            ways += [] if chosen.free else list(of_part.all_parts(part.row.name, ~exact))
            if not ways:
                verdict = of_part.verdicts[part.row.name]
                raise refused_key(self.facts, of_part, part.row.name, who, (not_picked(verdict, part.row),))
            found.append(ways)
        joined = (tuple(part for way in ways for part in way) for ways in itertools.product(*found))
        return (Choice(chosen.kernel, parts, "follows", source) for parts in joined)

    def _inherit(self, phase: Phase, table: Table, who: str) -> Iterator[Option]:
        """An unset draft prefers what its target's half asked for or resolved to."""
        half = inherited_half(self.facts, phase)
        request = self.facts.launch.half_of(half, self.main[0].component)
        keys = (request.value,) if request is not None else target_kernels(self.facts, half)
        if not keys:
            yield from self._auto(table, who)
            return
        why = "no row of it may be taken here, or its cache is not that of the draft's other phases"
        try:
            choices = partial(inherited, self.facts, keys=keys, asked=request is not None, who=f"{who} (inherited)")
            yield from (Option(request, *way) for way in self._by_layers(table, choices))
        except (Refused, NotInstalled) as refusal:
            why = f"needs {refusal.needed}, got {refusal.found}"
        for _, of, choice in self._auto(table, who):
            text = f"{phase}: the target's {keys[0]!r} cannot serve this draft, {choice.kernel} does; {why}"
            warning = Warn("inherited", text)
            own = choice._replace(source="inherited -> auto", warnings=(*choice.warnings, warning))
            yield Option(request, of, own)

    def _auto(self, table: Table, who: str) -> Iterator[Option]:
        """The family's wish, the hybrid list, or the best by rank; layer by layer where the policy says so."""
        choices = partial(auto_choices, self.facts, who=f"{who} (auto)")
        yield from (Option(None, *way) for way in self._by_layers(table, choices))

    def _by_layers(self, table: Table, choices: Choices) -> Iterator[tuple[Table, Choice]]:
        return by_layers(self.facts, table, choices, self._fits(), binding=self.greedy)

    def _fits(self) -> Fits | None:
        """Whether parts can share a cache with everything chosen so far; None while nothing is."""
        so_far = self.parts()
        if not so_far or self.greedy:
            return None
        return lambda parts: share_a_cache([*so_far, *parts], self.facts.cache)

    def _table(self, phase: Phase, asked: tuple[Asked, ...], common: tuple[Answer, ...]) -> Table:
        return table_of(SLOT, asked, common, needs_of(phase, SLOT, self.facts, asked[0].question.cached))

    def _cached(self, phase: Phase) -> list[Part]:
        if not self.others:
            return []
        parts = [part for decision in self.components.get(phase, ()) for part in decision.choice.parts]
        return [part for part in parts if part.asked.question.cached]
