"""Optimisations that are on by default on their own archs, and what was asked about each.

In: what plugins declare on by default, the launch and the host. Out: a `FeaturePlan` each: on or off, who decided, why.

Source: SGLang #31578, where a release switched one on for hosts that could not run it.

.. versionadded:: 0.2
"""

from __future__ import annotations

from backstamp.errors import BadInput, ConflictingRequest
from backstamp.facts import Facts
from backstamp.first_party import is_trusted
from backstamp.hostfit import arch_words, archs_fit
from backstamp.plan import FeaturePlan
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
    host = facts.host.host
    plans: list[FeaturePlan] = []
    for name, (default, distribution) in sorted(declared.items()):
        archs = ", ".join(arch_words(arch, default.device) for arch in default.archs)
        fits = default.device in ("any", host.device) and archs_fit(default.archs, host.arch)
        have = f"{host.device} {arch_words(host.arch, host.device)}"
        on, source = asked.get(name, (fits and is_trusted(distribution, facts.launch.policy), "default"))
        if on and not fits:
            raise ConflictingRequest(
                f"--feature {name}=on",
                needed=f"{default.device} {archs}",
                found=f"{have} (host {host.name})",
                fix="Leave it out: it is off here",
            )
        reason = f"runs on {archs}" if fits else f"needs {archs}, got {have}"
        if fits and not on and source == "default":
            reason = f"{distribution} is not allowed to switch it on; ask with --feature {name}=on"
        plans.append(FeaturePlan(name, on, source, reason))
    return tuple(plans)
