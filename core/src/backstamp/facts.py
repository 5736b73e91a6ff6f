"""Everything one resolve reads, gathered once: the launch as it stands and what the others add to it.

In: the resolver's arguments. Out: `Facts`, with retired settings already turned into requests or warnings, the family
rules of each component and the canonical KV dtype.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backstamp.compiled import HostCatalogue
from backstamp.declarations import Role
from backstamp.draft_needs import draft_doubts
from backstamp.engine import EngineFacts
from backstamp.family_rules import NO_RULE, FamilyRule, Rules, rules_of
from backstamp.feature_gates import unheard_features
from backstamp.kv_dtypes import kv_dtype_of
from backstamp.launch import Launch
from backstamp.measurements import Machine, Measurements
from backstamp.model import ModelFacts
from backstamp.plan import Plan
from backstamp.plan_rows import Warn
from backstamp.retired import without_retired
from backstamp.text import plain

__all__ = ["Facts", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One resolve's arguments, ready to be asked about.

    `measurements` are None where they were taken on another machine; `warnings` are about the launch itself. `cache` is
    what the engine offers a KV cache: narrowed to its target's layout and page size for a draft that shares it.
    """

    host: HostCatalogue
    launch: Launch
    engine: EngineFacts
    cache: EngineFacts
    model: ModelFacts
    measurements: Measurements | None
    role: Role
    target: Plan | None
    kv_dtype: str
    rules: Rules
    warnings: tuple[Warn, ...]

    def rule(self, component: str) -> FamilyRule:
        """What the model's family says about a component."""
        return self.rules.get(component, NO_RULE)


def gather(
    host: HostCatalogue,
    launch: Launch,
    engine: EngineFacts,
    model: ModelFacts,
    measurements: Measurements | None = None,
    role: Role = "target",
    target: Plan | None = None,
) -> Facts:
    """Gather the facts of one resolve.

    Raises:
        BadInput: a KV dtype no kernel and no convention knows.
    """
    launch, retired = without_retired(launch, host.catalogue)
    rules, ruled = rules_of(host.catalogue, model, role, launch.policy, target)
    foreign = measurements.machine.unlike(Machine.of(host.host)) if measurements is not None else ""
    words = plain(f"the times are another machine's, and ignored: {foreign}")
    ignored = (Warn("unmeasured", words),) if foreign else ()
    unheard, doubts = unheard_features(host.catalogue, launch.policy), draft_doubts(launch, model, role, target)
    return Facts(
        host=host,
        launch=launch,
        engine=engine,
        cache=_cache_of(engine, model, target),
        model=model,
        measurements=None if foreign else measurements,
        role=role,
        target=target,
        kv_dtype=kv_dtype_of(launch, model, host.host, host.catalogue),
        rules=rules,
        warnings=retired + ruled + unheard + doubts + ignored,
    )


def _cache_of(engine: EngineFacts, model: ModelFacts, target: Plan | None) -> EngineFacts:
    if target is None or model.draft is None or not model.draft.shares_kv:
        return engine
    layout = dict(target.layouts)["attention"]
    return replace(engine, layouts=frozenset({layout}), page_size=target.page_size)
