"""What an operator should read about a plan: each thing once, as a row (code, text).

In: the decided phases and the facts behind them. Out: warnings in a fixed order. It decides nothing; strict mode reads
its codes.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backstamp.declarations import Phase
from backstamp.discovery import distributions_of, unmatched
from backstamp.facts import Facts
from backstamp.hostfit import HostRow
from backstamp.phase_choice import PhaseWork
from backstamp.plan import Warn
from backstamp.text import plain, qualified

__all__ = ["STRICT_CODES", "warnings_of"]

#: Warnings that strict mode turns into errors: a choice was lost, changed or failed.
STRICT_CODES: Final = frozenset(
    {"failed", "lost", "changed", "inherited", "retired", "shadowed", "unused", "unmatched", "untrusted"}
)
#: Requests that mean something only where a draft proposes tokens.
_SPECULATIVE: Final = (
    "verify_attention_backend",
    "draft_attention_backend",
    "speculative_attention_mode",
    "speculative_num_steps",
    "speculative_topk",
)
#: Phases whose `plan` runs once a step of generation, where a host sync is paid each time.
_STEPPED: Final[tuple[Phase, ...]] = ("verify", "draft_decode")


def warnings_of(work: PhaseWork, linear: tuple[Warn, ...] = ()) -> tuple[Warn, ...]:
    """Every warning of a plan, each once; `linear` are those of the linear slot."""
    found = [*work.facts.warnings, *(warning for phase in work.warned.values() for warning in phase)]
    found += linear
    found += _about_plugins(work)
    found += _about_requests(work.facts)
    found += _about_rows(work)
    found += _about_host(work.facts)
    return tuple(dict.fromkeys(found))


def _about_plugins(work: PhaseWork) -> Iterator[Warn]:
    catalogue = work.facts.host.catalogue
    if catalogue.failures and any("auto" in plan.source for plan in work.plans.values()):
        for item in catalogue.failures:
            who = f"plugin {item.plugin.name} ({item.plugin.distribution} {item.plugin.version})"
            yield Warn("failed", f"{who}: {item.cause}")
    if catalogue.conflicts:
        chosen = work.facts.launch.policy.duplicates
        for conflict in catalogue.conflicts.values():
            if not any(qualified(f"{owner}:{conflict.name}") in chosen for owner in conflict.distributions):
                owners = " and ".join(conflict.distributions)
                yield Warn("shadowed", f"{conflict.name}: claimed by {owners}, so nobody has it")


def _about_requests(facts: Facts) -> Iterator[Warn]:
    launch = facts.launch
    if not launch.speculative:
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


def _about_rows(work: PhaseWork) -> Iterator[Warn]:
    rows: list[HostRow] = [part.row for phase in work.chosen for part in work.chosen[phase][1].parts]
    if [row for row in rows if row.assumed]:
        name = work.facts.host.host.name
        yield Warn("assumed", f"host {name} has no library list: libraries count as present")
    if [row for row in rows if row.interpreted]:
        yield Warn("interpreted", "Triton rows run in Triton's interpreter on the CPU: for tests, not for use")
    for phase, (_, choice) in work.chosen.items():
        for part in choice.parts:
            offer = part.row.offer
            if offer.reference and "auto" in choice.source:
                yield Warn("slow_path", f"{offer.kernel} is a portable reference, slow; nothing faster serves here")
            needs_host = "host_lens" in offer.inputs | offer.phase_inputs.get(phase, frozenset())
            if phase in _STEPPED and needs_host and choice.source in ("default", "default -> decode", "inherited"):
                yield Warn("host_sync", f"{phase}: {offer.kernel} needs lengths on the host, a sync each step")


def _about_host(facts: Facts) -> Iterator[Warn]:
    served = facts.engine.components
    for part in facts.model.unread:
        if served is None or part.component in served:
            text = f"{part.component}: these facts cannot describe it ({part.reason}); it is left to the engine"
            yield Warn("unread", plain(text))
    for probe in facts.host.host.probes:
        if probe.name == "device order" and not probe.ok:
            yield Warn("device_order", plain(probe.reason))
