"""What an operator should read about a plan: each thing once, as a row (code, text).

In: the decisions and the facts behind them. Out: warnings in a fixed order. It decides nothing; strict mode reads
its codes.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from backstamp.declarations import Phase
from backstamp.discovery import distributions_of, unmatched
from backstamp.facts import Facts
from backstamp.linear_slot import LinearSlot
from backstamp.losses import graphs_off
from backstamp.phase_choice import PhaseWork
from backstamp.plan_rows import Warn
from backstamp.questions import slot_of
from backstamp.selection import Decision
from backstamp.text import plain, qualified

__all__ = ["STRICT_CODES", "warnings_of"]

#: Warnings that strict mode turns into errors: a choice was lost, changed or failed.
STRICT_CODES: Final = frozenset(
    {"failed", "lost", "changed", "inherited", "retired", "shadowed", "unused", "unmatched", "untrusted"}
)
#: Requests that mean something only where a draft proposes tokens.
_SPECULATIVE: Final = (
    "verify_attention_backend",
    "linear_attn_verify_backend",
    "draft_attention_backend",
    "speculative_attention_mode",
    "speculative_num_steps",
    "speculative_topk",
)
#: Phases whose `plan` runs once a step of generation, where a host sync is paid each time.
_STEPPED: Final[tuple[Phase, ...]] = ("verify", "draft_decode")


def warnings_of(work: PhaseWork, linear: LinearSlot, decisions: Sequence[Decision]) -> tuple[Warn, ...]:
    """Every warning of a plan, each once; `decisions` are those of both slots."""
    found = [*work.facts.warnings, *(warning for phase in work.warned.values() for warning in phase)]
    for decision in linear.decisions:
        found += decision.choice.warnings
    found += _about_plugins(work.facts, decisions)
    found += _about_requests(work.facts)
    found += _about_components(work.facts)
    found += _about_rows(work.facts, decisions)
    if work.facts.engine.graph != "never":
        found += graphs_off(work.facts, decisions)
    found += _about_host(work.facts)
    return tuple(dict.fromkeys(found))


def _about_plugins(facts: Facts, decisions: Sequence[Decision]) -> Iterator[Warn]:
    catalogue = facts.host.catalogue
    if catalogue.failures and any(decision.choice.free for decision in decisions):
        for item in catalogue.failures:
            who = f"plugin {item.plugin.name} ({item.plugin.distribution} {item.plugin.version})"
            yield Warn("failed", f"{who}: {item.cause}")
    if catalogue.conflicts and any(decision.choice.free for decision in decisions):
        chosen = facts.launch.policy.duplicates
        for conflict in catalogue.conflicts.values():
            if not any(qualified(f"{owner}:{conflict.name}") in chosen for owner in conflict.distributions):
                owners = " and ".join(conflict.distributions)
                yield Warn("shadowed", f"{conflict.name}: claimed by {owners}, so nobody has it")


def _about_requests(facts: Facts) -> Iterator[Warn]:
    launch = facts.launch
    if not launch.speculative:
        scoped = launch.components.get("draft")
        if scoped is not None:
            yield Warn("unused", f"{scoped.setting}={scoped.value}: nothing drafts")
        for name in _SPECULATIVE:
            if name in launch.keys:
                request = launch.keys[name]
                yield Warn("unused", f"{request.setting} {request.value}: nothing drafts")
            elif name in launch.sources:
                yield Warn("unused", f"--{name.replace('_', '-')} {getattr(launch, name)}: nothing drafts")
    policy = launch.policy
    for flag, names in (("--allow", policy.allow), ("--deny", policy.deny)):
        for name in () if not names else unmatched(facts.host.catalogue, names):
            found = ", ".join(distributions_of(facts.host.catalogue)) or "none"
            yield Warn("unmatched", plain(f"{flag} {name}: no such plugin distribution; found {found}"))
    sides = {side for _, side in (*facts.host.catalogue.rows, *facts.host.catalogue.aliases)}
    for side in sorted(policy.duplicates - sides):
        yield Warn("unmatched", plain(f"--duplicate {side}: no two distributions claim that name, or not this one"))


def _about_components(facts: Facts) -> Iterator[Warn]:
    """Components an engine keeps to itself never see what the launch asks of all."""
    served, launch = facts.engine.components, facts.launch
    if served is None or facts.role == "draft":
        return
    attention = [group.component for group in facts.model.groups if slot_of(group.facts.family) == "attention"]
    there = [*attention, *(part.component for part in facts.model.unread)]
    kept = [component for component in dict.fromkeys(there) if component not in served]
    asked = [request for request in launch.pair() if request is not None]
    if kept and asked:
        what = f"{asked[0].setting} {asked[0].value} does not reach {', '.join(kept)}"
        yield Warn("lost", f"{what}: {facts.engine.name} keeps their attention to itself")


def _about_rows(facts: Facts, decisions: Sequence[Decision]) -> Iterator[Warn]:
    rows = [part.row for decision in decisions for part in decision.choice.parts]
    if [row for row in rows if row.assumed]:
        for host in (facts.host.host, *facts.host.beside):
            if host.libraries is None:
                yield Warn("assumed", f"host {host.name} has no library list: libraries count as present")
    if [row for row in rows if row.interpreted]:
        yield Warn("interpreted", "Triton rows run in Triton's interpreter on the CPU: for tests, not for use")
    for phase, _, choice in decisions:
        for part in choice.parts:
            offer = part.row.offer
            if offer.reference and choice.free:
                yield Warn("slow_path", f"{offer.kernel} is a portable reference, slow; nothing faster serves here")
            needs_host = "host_lens" in offer.inputs | offer.phase_inputs.get(phase, frozenset())
            # nobody named this kernel for this phase
            if phase in _STEPPED and needs_host and choice.kind != "asked":
                yield Warn("host_sync", f"{phase}: {offer.kernel} needs lengths on the host, a sync each step")


def _about_host(facts: Facts) -> Iterator[Warn]:
    served = facts.engine.components
    for part in facts.model.unread:
        if served is None or part.component in served:
            text = f"{part.component}: these facts cannot describe it ({part.reason}); it is left to the engine"
            yield Warn("unread", plain(text))
    for host in (facts.host.host, *facts.host.beside):
        for probe in host.probes:
            if probe.name == "device order" and not probe.ok:
                yield Warn("device_order", plain(probe.reason))
