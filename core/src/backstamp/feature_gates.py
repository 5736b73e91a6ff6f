"""Optimisations that are on by default on their own archs, and what was asked about each.

In: what plugins declare on by default, the launch and the host. Out: a `FeaturePlan` each: on or off, who decided, why;
and a warning for each row that does not count. A row speaks about one kind of device; where a trusted
distribution speaks about a feature, no untrusted one does.

Source: SGLang #31578, where a release switched one on for hosts that could not run it.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from backstamp.catalogue import Catalogue
from backstamp.declarations import FeatureDefault
from backstamp.defaults import settle, undenied
from backstamp.errors import BadInput, ConflictingRequest
from backstamp.host import HostFacts
from backstamp.hostfit import arch_words, archs_fit
from backstamp.plan_rows import FeaturePlan, Warn
from backstamp.policy import Policy
from backstamp.text import near

if TYPE_CHECKING:
    from backstamp.facts import Facts

__all__ = ["gate_features", "unheard_features"]

#: The rows of one feature that count, at most one a kind of device, each with who says it and whether it is trusted.
Rows = list[tuple[FeatureDefault, str, bool]]


def gate_features(facts: Facts) -> tuple[FeaturePlan, ...]:
    """Every declared feature, in name order.

    Raises:
        BadInput: a feature nobody declares. ConflictingRequest: one asked for on an arch outside its list.
    """
    catalogue, asked = facts.host.catalogue, facts.launch.features
    if not catalogue.defaults.features and not asked:
        return ()
    declared, _ = _counting(catalogue, facts.launch.policy)
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
    return tuple([_gate(facts, name, rows) for name, rows in sorted(declared.items())])


def unheard_features(catalogue: Catalogue, policy: Policy) -> tuple[Warn, ...]:
    """What is declared about features and does not count."""
    return tuple(_counting(catalogue, policy)[1]) if catalogue.defaults.features else ()


def _counting(catalogue: Catalogue, policy: Policy) -> tuple[Mapping[str, Rows], list[Warn]]:
    """The rows of each feature that count, and what there is to say about the others."""
    warnings: list[Warn] = []
    counting: dict[str, Rows] = {}
    strangers: dict[str, list[str]] = {}
    for key, said in catalogue.defaults.features.items():
        said = undenied(said, policy)
        if not said:
            continue
        settled, who = settle(said, policy), f"feature {key.feature} on {key.device}"
        strangers.setdefault(key.feature, []).extend(distribution for _, distribution in settled.left_out)
        if settled.row is not None:
            counting.setdefault(key.feature, []).append((settled.row, settled.distribution, settled.trusted))
        else:
            owners = " and ".join(settled.contradicted)
            warnings.append(Warn("shadowed", f"{who}: {owners} say different things about it, so neither counts"))
    for feature, rows in counting.items():
        if any(trusted for *_, trusted in rows):
            strangers[feature] += [distribution for _, distribution, trusted in rows if not trusted]
            counting[feature] = [row for row in rows if row[2]]
    for feature, names in strangers.items():
        for distribution in dict.fromkeys(names):
            text = f"{distribution} says otherwise where feature {feature} runs; it is left out"
            warnings.append(Warn("untrusted", f"{text}, unless allowed with --allow {distribution}"))
    return counting, warnings


def _gate(facts: Facts, name: str, rows: Rows) -> FeaturePlan:
    """One feature: on only where every host of the job has an arch of its lists."""
    archs = " or ".join(_words(row) if len(rows) == 1 else f"{row.device} {_words(row)}" for row, *_ in rows)
    hosts = (facts.host.host, *facts.host.beside)
    fitting = [next((row for row in _about(rows, host) if archs_fit(row[0].archs, host.arch)), None) for host in hosts]
    unfit = next((host for host, row in zip(hosts, fitting, strict=True) if row is None), None)
    have = f"{unfit.device} {arch_words(unfit.arch, unfit.device)} (host {unfit.name})" if unfit is not None else ""
    strangers = [row[1] for row in fitting if row is not None and not row[2]]
    on, source = facts.launch.features.get(name, (unfit is None and not strangers, "default"))
    if on and unfit is not None:
        needed = " or ".join(f"{row.device} {_words(row)}" for row, *_ in rows)
        fix = "Leave it out: it is off there"
        raise ConflictingRequest(f"--feature {name}=on", needed=needed, found=have, fix=fix)
    reason = f"needs {archs}, got {have}" if unfit is not None else f"runs on {archs}"
    if unfit is None and not on and source == "default":
        reason = f"{strangers[0]} is not allowed to switch it on; ask with --feature {name}=on"
    return FeaturePlan(name, on, source, reason)


def _words(default: FeatureDefault) -> str:
    return ", ".join(arch_words(arch, default.device) for arch in default.archs)


def _about(rows: Rows, host: HostFacts) -> Rows:
    """The rows that speak about a host's kind of device: one about that kind stands before one about any."""
    own = [row for row in rows if row[0].device == host.device]
    return own or [row for row in rows if row[0].device == "any"]
