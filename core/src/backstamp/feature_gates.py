"""Optimisations that are on by default on their own archs, and what was asked about each.

In: what plugins declare on by default, the launch and the host. Out: a `FeaturePlan` each: on or off, who decided, why.

Source: SGLang #31578, where a release switched one on for hosts that could not run it.

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.declarations import FeatureDefault
from backstamp.errors import BadInput, ConflictingRequest
from backstamp.facts import Facts
from backstamp.first_party import is_trusted
from backstamp.host import HostFacts
from backstamp.hostfit import arch_words, archs_fit
from backstamp.plan_rows import FeaturePlan
from backstamp.text import near

__all__ = ["gate_features"]


def gate_features(facts: Facts) -> tuple[FeaturePlan, ...]:
    """Every declared feature, in name order.

    Raises:
        BadInput: a feature nobody declares. ConflictingRequest: one asked for on an arch outside its list.
    """
    declared, asked = facts.host.catalogue.defaults.features, facts.launch.features
    if not declared and not asked:
        return ()
    for name in asked:
        if name not in declared:
            match = near(name, list(declared))
            fix = f"Did you mean {match!r}?" if match is not None else "Leave it out"
            raise BadInput(
                f"--feature {name}",
                needed=f"one of {', '.join(declared) or 'those a plugin declares; none does'}",
                found=repr(name),
                fix=fix,
            )
    return tuple([_gate(facts, name, default, owner) for name, (default, owner) in sorted(declared.items())])


def _gate(facts: Facts, name: str, default: FeatureDefault, distribution: str) -> FeaturePlan:
    """One feature: on only where every host of the job has an arch of its list."""
    archs = ", ".join(arch_words(arch, default.device) for arch in default.archs)
    hosts = (facts.host.host, *facts.host.beside)
    unfit = next((host for host in hosts if not _fits(default, host)), None)
    have = f"{unfit.device} {arch_words(unfit.arch, unfit.device)} (host {unfit.name})" if unfit is not None else ""
    trusted = is_trusted(distribution, facts.launch.policy)
    on, source = facts.launch.features.get(name, (unfit is None and trusted, "default"))
    if on and unfit is not None:
        fix = "Leave it out: it is off there"
        raise ConflictingRequest(f"--feature {name}=on", needed=f"{default.device} {archs}", found=have, fix=fix)
    reason = f"needs {archs}, got {have}" if unfit is not None else f"runs on {archs}"
    if unfit is None and not on and source == "default":
        reason = f"{distribution} is not allowed to switch it on; ask with --feature {name}=on"
    return FeaturePlan(name, on, source, reason)


def _fits(default: FeatureDefault, host: HostFacts) -> bool:
    return default.device in ("any", host.device) and archs_fit(default.archs, host.arch)
