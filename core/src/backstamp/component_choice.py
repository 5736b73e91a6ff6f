"""Which kernel each component beside the main one gets: vision and audio encoders, cross-attention.

In: one phase and the questions of those components. Out: their decisions. A request scoped to a
component binds; the launch's own request is a preference there: where it cannot serve, the component's declared
default does, else its best kernel, and the plan says so.

Source: TensorRT-LLM #17698, SGLang #35743 and #34389, transformers #40062.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backstamp.auto_choice import auto_choices
from backstamp.declarations import Half, Phase
from backstamp.errors import ConflictingRequest, NotInstalled, Refused
from backstamp.facts import Facts
from backstamp.launch import SOURCES, Request
from backstamp.per_layer import choose_per_layer
from backstamp.plan_rows import Warn
from backstamp.questions import Asked, needs_of
from backstamp.rank import Fits
from backstamp.refusals import no_kernel
from backstamp.selection import Choice, Decision, Table, ask, bind_key, bind_request, by_rows, table_of

__all__ = ["check_components", "choose_components", "main_component"]


def main_component(asked: Sequence[Asked]) -> str:
    """The component whose kernel stands for the plan: "main", or the first where none is called that."""
    names = [item.component for item in asked]
    return "main" if "main" in names else names[0]


def check_components(facts: Facts, components: Sequence[str]) -> None:
    """Refuse a request scoped to a component that is not there, or to the main one beside a split flag that differs.

    A draft has components of its own: what a launch asks of its target's is no fault of the draft.

    Raises:
        ConflictingRequest: the component and those that are there are named, or both requests.
    """
    scoped, flag = facts.launch.components.get("draft"), facts.launch.keys.get("draft_attention_backend")
    if scoped is not None and flag is not None and scoped.source == flag.source and scoped.value != flag.value:
        raise ConflictingRequest(
            f"{scoped.setting}={scoped.value}",
            needed="one request for the draft",
            found=f"{flag.setting} {flag.value} beside it",
            fix="Leave one of them out",
        )
    if facts.role == "draft" or not facts.launch.components:
        return
    main = facts.launch.components.get(components[0])
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        other = facts.launch.keys.get(name)
        if main is not None and other is not None and other.source == main.source and other.value != main.value:
            raise ConflictingRequest(
                f"{main.setting}={main.value}",
                needed=f"one request for component {components[0]}",
                found=f"{other.setting} {other.value} beside it",
                fix="Leave one of them out; --component-backend speaks of the components beside the main one too",
            )
    for name, request in facts.launch.components.items():
        # the draft is a runner of its own
        if name not in (*components, "draft"):
            raise ConflictingRequest(
                f"{request.setting}={request.value}",
                needed=f"a component of {facts.model.name} that {facts.engine.name} hands over",
                found=f"{name!r}; there are {', '.join(dict.fromkeys(components))}",
                fix="Name one of those, or leave it out",
            )


def choose_components(facts: Facts, phase: Phase, others: Sequence[Asked], fits: Fits | None) -> tuple[Decision, ...]:
    """Choose for every component that runs in this phase; an encoder runs once, with prefill."""
    decisions: list[Decision] = []
    for item in others:
        if not item.question.cached and phase != "prefill":
            continue
        table = table_of(
            "attention",
            (item,),
            ask(facts, "attention", (item,)),
            needs_of(phase, "attention", facts, item.question.cached),
        )
        table, choice = _choose_layers(facts, phase, table, fits if item.question.cached else None)
        parts = tuple([part._replace(source=choice.source) for part in choice.parts])
        decisions.append(Decision(phase, table, choice._replace(parts=parts)))
    return tuple(decisions)


def _choose_layers(facts: Facts, phase: Phase, table: Table, fits: Fits | None) -> tuple[Table, Choice]:
    """One kernel for all layers of a component, or the best for each, as the policy says."""
    (item,) = table.asked
    layers, scoped = facts.launch.policy.layers, facts.launch.components.get(item.component)
    apart = layers == "per_layer" or (layers == "auto" and scoped is None and not table.has_accepted())
    if not apart or len(item.groups) < 2:
        return table, _choose(facts, phase, table, fits)
    ways = choose_per_layer(facts, table, lambda at: _choices(facts, phase, at), fits, binding=scoped is not None)
    way = next(ways, None)
    if way is None:
        raise no_kernel(facts, table, f"attention backend of component {item.component} (per_layer)")
    return way


def _choose(facts: Facts, phase: Phase, table: Table, fits: Fits | None) -> Choice:
    """The first choice that fits; one that binds is taken as it is, and what it disagrees with is told later."""
    component = table.asked[0].component
    binds = _binds(facts, phase, component)
    for choice in _choices(facts, phase, table):
        if fits is None or fits(choice.parts) or binds:
            return choice
    raise no_kernel(facts, table, f"attention backend of component {component} (auto)")


def _choices(facts: Facts, phase: Phase, table: Table) -> Iterator[Choice]:
    """Every way to serve one component in one phase, best first."""
    component = table.asked[0].component
    who = f"attention backend of component {component}"
    scoped = facts.launch.components.get(component)
    wish = _wish(facts, phase)
    if scoped is not None and _binds(facts, phase, component):
        yield from by_rows(table, bind_request(facts, table, scoped, who))
        return
    why = "its cache is not that of the main component"
    if wish is not None:
        try:
            # a deprecated key was told for the main component
            wished = bind_key(facts, table, wish.value, who, wish.source)._replace(warnings=())
            yield from by_rows(table, wished)
        except (Refused, NotInstalled) as refusal:
            why = f"needs {refusal.needed}, got {refusal.found}"
    # a weaker source's own word for this component comes before nobody's
    others = auto_choices(facts, table, f"{who} (auto)")
    if scoped is not None:
        others = by_rows(table, bind_request(facts, table, scoped, who))
    for choice in others:
        if wish is None:
            yield choice
        else:
            text = f"component {component}: {wish.value!r} cannot serve it, {choice.kernel} does; {why}"
            yield choice._replace(warnings=(*choice.warnings, Warn("changed", text)))


def _binds(facts: Facts, phase: Phase, component: str) -> bool:
    """Whether a request is scoped to a component, by a source no weaker than the one whose wish holds for all."""
    scoped, wish = facts.launch.components.get(component), _wish(facts, phase)
    return scoped is not None and (wish is None or SOURCES.index(scoped.source) <= SOURCES.index(wish.source))


def _wish(facts: Facts, phase: Phase) -> Request | None:
    """What the launch asks of the phase at hand, a preference here."""
    verifies_by_decode = phase == "verify" and facts.launch.speculative_attention_mode == "decode"
    half: Half = "decode" if phase == "decode" or verifies_by_decode else "prefill"
    return facts.launch.own(phase, facts.role) or (facts.launch.half(half) if facts.role == "target" else None)
