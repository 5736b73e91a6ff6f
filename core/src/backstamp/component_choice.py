"""Which kernel each component beside the main one gets: vision and audio encoders, cross-attention.

In: one phase and the questions of those components. Out: their parts and what there is to warn. A request scoped to a
component binds; the launch's own request is a preference there: where it cannot serve, the component's declared
default does, else its best kernel, and the plan says so.

Source: TensorRT-LLM #17698, SGLang #35743 and #34389, transformers #40062.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Sequence

from backstamp.declarations import Half, Phase
from backstamp.errors import BackstampError, ConflictingRequest, NotInstalled, Refused
from backstamp.facts import Facts
from backstamp.launch import Request
from backstamp.plan import Warn
from backstamp.questions import Asked, needs_of
from backstamp.rank import Fits, first_fit, in_order, rank
from backstamp.selection import Choice, Part, Table, ask, bind_key, table_of

__all__ = ["check_components", "choose_components", "main_component"]


def main_component(asked: Sequence[Asked]) -> str:
    """The component whose kernel stands for the plan: "main", or the first where none is called that."""
    names = [item.component for item in asked]
    return "main" if "main" in names else names[0]


def check_components(facts: Facts, components: Sequence[str]) -> None:
    """Refuse a request scoped to a component that is not there.

    Raises:
        ConflictingRequest: the component and those that are there are named.
    """
    for name, request in facts.launch.components.items():
        if components and name == components[0]:
            raise ConflictingRequest(
                f"{request.setting}={request.value}",
                needed="a component beside the main one",
                found=f"{name}, which the launch's own flags speak about",
                fix=f"Use --attention-backend {request.value}, or one of its split flags",
            )
        if name not in components:
            raise ConflictingRequest(
                f"{request.setting}={request.value}",
                needed=f"a component of {facts.model.name} that {facts.engine.name} hands over",
                found=f"{name!r}; there are {', '.join(dict.fromkeys(components))}",
                fix="Name one of those, or leave it out",
            )


def choose_components(
    facts: Facts, phase: Phase, others: Sequence[Asked], fits: Fits | None
) -> tuple[tuple[Part, ...], tuple[Warn, ...]]:
    """Choose for every component that runs in this phase; an encoder runs once, with prefill."""
    parts: list[Part] = []
    warnings: list[Warn] = []
    for item in others:
        if not item.question.cached and phase != "prefill":
            continue
        table = table_of(
            "attention",
            (item,),
            ask(facts, "attention", (item,)),
            needs_of(phase, "attention", facts, item.question.cached),
        )
        choice = _choose(facts, phase, table, fits if item.question.cached else None)
        parts += [part._replace(source=choice.source) for part in choice.parts]
        warnings += choice.warnings
    return tuple(parts), tuple(warnings)


def _choose(facts: Facts, phase: Phase, table: Table, fits: Fits | None) -> Choice:
    component = table.asked[0].component
    who = f"attention backend of component {component}"
    scoped = facts.launch.components.get(component)
    if scoped is not None:
        try:
            return bind_key(facts, table, scoped.value, who, scoped.source)
        except BackstampError as refusal:
            raise refusal.of(scoped.setting) from refusal.__cause__
    wish = _wish(facts, phase)
    if wish is None:
        return _auto(facts, table, who, fits)
    try:
        choice = bind_key(facts, table, wish.value, who, wish.source)
    except (Refused, NotInstalled) as refusal:
        choice = _auto(facts, table, who, fits)
        text = f"component {component}: {wish.value!r} cannot serve it, {choice.kernel} does"
        warning = Warn("changed", f"{text}; needs {refusal.needed}, got {refusal.found}")
        return choice._replace(warnings=(*choice.warnings, warning))
    # a deprecated key was told for the main component
    return choice._replace(warnings=())


def _wish(facts: Facts, phase: Phase) -> Request | None:
    """What the launch asks of the phase at hand, a preference here."""
    half: Half = "decode" if phase == "decode" else "prefill"
    return facts.launch.own(phase, facts.role) or (facts.launch.half(half) if facts.role == "target" else None)


def _auto(facts: Facts, table: Table, who: str, fits: Fits | None) -> Choice:
    rule = facts.rule(table.asked[0].component)
    choice = first_fit(in_order(facts, table, rule.kernels, who, "family"), fits) if rule.kernels else None
    return choice if choice is not None else rank(facts, table, f"{who} (auto)", fits)
