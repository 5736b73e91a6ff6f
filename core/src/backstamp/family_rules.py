"""What a model's family wishes and allows, for each component of one runner.

In: the family defaults plugins declare, the model, the role and the policy. Out: one `FamilyRule` a component. A
distribution that is neither first-party nor allowed by the operator speaks for its own kernels only, and not at all
where a trusted one speaks: what else it declares is left out, with a warning.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.defaults import FamilyKey, settle, undenied
from backstamp.plan_rows import Warn
from backstamp.text import plain, qualified

if TYPE_CHECKING:
    from backstamp.catalogue import Catalogue
    from backstamp.declarations import FamilyDefault, Role
    from backstamp.model import ModelFacts
    from backstamp.plan import Plan
    from backstamp.policy import Policy

__all__ = ["NO_RULE", "FamilyRule", "rules_of"]


class FamilyRule(NamedTuple):
    """The kernels a component prefers, in order, the only ones it allows (None: all), and who says so."""

    kernels: tuple[str, ...]
    allowed: frozenset[str] | None
    allowed_by: str


NO_RULE: Final = FamilyRule((), None, "")
Rules = Mapping[str, FamilyRule]


def rules_of(
    catalogue: Catalogue, model: ModelFacts, role: Role, policy: Policy, target: Plan | None
) -> tuple[Rules, tuple[Warn, ...]]:
    """The rule of each component that has one, and what was left out.

    A draft that shares its target's KV cache is in the scope of its target's locks.
    """
    families = catalogue.defaults.families
    if not families:
        return {}, ()
    rules: dict[str, FamilyRule] = {}
    warnings: list[Warn] = []
    for key in families:
        if key.model_type == model.name and key.role == role:
            rules[key.component] = _rule(catalogue, key, policy, warnings)
    shares = role == "draft" and target is not None and model.draft is not None and model.draft.shares_kv
    lock = FamilyKey(target.model, "main", "target") if shares and target is not None else None
    if lock is not None and lock in families:
        theirs = _rule(catalogue, lock, policy, warnings)
        ours = rules.get("main", NO_RULE)
        rules["main"] = _both(ours, theirs, f"{theirs.allowed_by}, whose KV cache this draft shares,")
    return rules, tuple(warnings)


def _both(ours: FamilyRule, theirs: FamilyRule, who: str) -> FamilyRule:
    """Our own preferences under the target's lock."""
    if theirs.allowed is None:
        return ours
    allowed = theirs.allowed if ours.allowed is None else theirs.allowed & ours.allowed
    return FamilyRule(tuple(kernel for kernel in ours.kernels if kernel in allowed), allowed, who)


def _rule(catalogue: Catalogue, key: FamilyKey, policy: Policy, warnings: list[Warn]) -> FamilyRule:
    said = undenied(catalogue.defaults.families[key], policy)
    if not said:
        return NO_RULE
    settled = settle(said, policy)
    who = f"family {key.model_type}" + (f" ({key.component})" if key.component != "main" else "")
    for default, distribution in settled.left_out:
        _own_of(catalogue, default, distribution, who, warnings)
    if settled.row is None:
        owners = " and ".join(settled.contradicted)
        warnings.append(Warn("shadowed", f"{who}: {owners} say different things about it, so neither counts"))
        return NO_RULE
    default = settled.row
    if settled.trusted:
        kernels, allowed = default.kernels, default.allowed
    else:
        kernels, allowed = _own_of(catalogue, default, settled.distribution, who, warnings), None
    for kernel in dict.fromkeys((*kernels, *sorted(allowed or ()))):
        why = _never_runs(catalogue, kernel, kernel in kernels)
        if why is not None:
            warnings.append(Warn("lost", plain(f"{settled.distribution} says that {who} {why}")))
    return FamilyRule(tuple([kernel for kernel in kernels if _never_runs(catalogue, kernel) is None]), allowed, who)


def _own_of(
    catalogue: Catalogue, default: FamilyDefault, distribution: str, who: str, warnings: list[Warn]
) -> tuple[str, ...]:
    """The distribution's own kernels among those it prefers; what it says of others' is told."""
    own = tuple([kernel for kernel in default.kernels if _owns(catalogue, distribution, kernel)])
    dropped = [kernel for kernel in default.kernels if kernel not in own]
    if dropped or default.allowed is not None:
        left_out = [f"prefers {', '.join(dropped)}"] if dropped else []
        left_out += [f"allows {', '.join(sorted(default.allowed))} only"] if default.allowed is not None else []
        text = f"{distribution} says that {who} {' and '.join(left_out)}; it speaks for its own kernels only"
        warnings.append(Warn("untrusted", f"{text}, unless allowed with --allow {distribution}"))
    return own


def _never_runs(catalogue: Catalogue, kernel: str, preferred: bool = True) -> str | None:
    """Why an entry of a family default has no effect here; that a set also allows what is not installed is no fault."""
    name = qualified(kernel)
    if ("attention", name) in catalogue.rows or ("attention", name) in catalogue.conflicts:
        return None
    verb = "prefers" if preferred else "allows"
    if ("linear", name) in catalogue.rows:
        return f"{verb} {kernel}, which serves linear layers, of which a family default says nothing"
    if not preferred or catalogue.failure_of(kernel) is not None:
        return None
    return f"prefers {kernel}, which no installed plugin has"


def _owns(catalogue: Catalogue, distribution: str, kernel: str) -> bool:
    rows = catalogue.rows.get(("attention", kernel), ()) or catalogue.rows.get(("linear", kernel), ())
    return any(row.plugin.distribution == distribution for row in rows)
