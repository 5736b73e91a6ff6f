"""What a model's family wishes and allows, for each component of one runner.

In: the family defaults plugins declare, the model, the role and the policy. Out: one `FamilyRule` a component. A
distribution that is neither first-party nor allowed by the operator speaks for its own kernels only: what else it
declares is left out, with a warning.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.defaults import FamilyKey
from backstamp.first_party import is_trusted
from backstamp.plan_rows import Warn

if TYPE_CHECKING:
    from backstamp.catalogue import Catalogue
    from backstamp.declarations import Role
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
    default, distribution = catalogue.defaults.families[key]
    who = f"family {key.model_type}" + (f" ({key.component})" if key.component != "main" else "")
    if is_trusted(distribution, policy):
        return FamilyRule(default.kernels, default.allowed, who)
    own = [kernel for kernel in default.kernels if _owns(catalogue, distribution, kernel)]
    dropped = [kernel for kernel in default.kernels if kernel not in own]
    if dropped or default.allowed is not None:
        left_out = [f"prefers {', '.join(dropped)}"] if dropped else []
        left_out += [f"allows {', '.join(sorted(default.allowed))} only"] if default.allowed is not None else []
        text = f"{distribution} says that {who} {' and '.join(left_out)}; it speaks for its own kernels only"
        warnings.append(Warn("untrusted", f"{text}, unless allowed with --allow {distribution}"))
    return FamilyRule(tuple(own), None, who)


def _owns(catalogue: Catalogue, distribution: str, kernel: str) -> bool:
    rows = catalogue.rows.get(("attention", kernel), ()) or catalogue.rows.get(("linear", kernel), ())
    return any(row.plugin.distribution == distribution for row in rows)
