"""What holds of every resolve, whatever plugins declare and operators ask: hypothesis makes both."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from backstamp.declarations import GRAPH_LEVELS, Alias, FamilyDefault, FeatureDefault, Offer, PageSizes
from backstamp.discovery import Found
from backstamp.engine import EngineFacts
from backstamp.errors import AliasConflict, BackstampError, Refused
from backstamp.launch import Requests, make_launch
from backstamp.model import ModelFacts, default_model, model_from_config
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.models import config
from tests.resolving import kernel

MODELS = [default_model(), *(model_from_config(config(name)) for name in ("sinks", "gemma4", "softcap", "mla"))]
NAMES = ("a", "b", "c", "d")
PHASE_SETS = [frozenset({"prefill", "decode", "verify"}), frozenset({"prefill"}), frozenset({"decode", "verify"})]
FEATURE_SETS = [frozenset(), frozenset({"window", "sinks"}), frozenset({"window", "softcap", "sinks"})]


def a_set(*words: str) -> st.SearchStrategy[frozenset[str]]:
    """Any subset of words, most often none."""
    return st.one_of(st.just(frozenset()), st.sets(st.sampled_from(words)).map(frozenset))


offers = st.builds(
    kernel,
    st.sampled_from(NAMES),
    priority=st.sampled_from([10, 50, 90]),
    family=st.sampled_from(["mha", "mha", "mla"]),
    archs=st.sampled_from([("9.0",), ("10.0",), ("8.0", "9.0", "10.0")]),
    phases=st.sampled_from(PHASE_SETS),
    features=st.sampled_from(FEATURE_SETS),
    head_dims=st.sampled_from([(64, 128), (128,), (256, 512), ("any",)]),
    page_sizes=st.sampled_from(
        [
            PageSizes(preferred=16, multiple_of=1),
            PageSizes(preferred=64, exact=(64,)),
            PageSizes(preferred=16, exact=(16, 32)),
        ]
    ),
    layouts=st.sampled_from([("rows",), ("rows", "packed"), ("packed",)]),
    prefix=st.sampled_from([True, True, False]),
    graph=st.sampled_from(GRAPH_LEVELS),
    accuracy=st.sampled_from(["exact", "exact", "fp8_math"]),
    excludes=a_set("spec", "tp", "window+spec"),
    requires=st.sampled_from([(), ("lib>=1",)]),
)  # fmt: skip
engines = st.builds(
    EngineFacts,
    graph=st.sampled_from(GRAPH_LEVELS),
    layouts=st.sampled_from([frozenset({"rows"}), frozenset({"rows", "packed"})]),
    prefix_cache=st.booleans(),
)
policies = st.builds(Policy, layers=st.sampled_from(["auto", "uniform"]), keep_graph=st.booleans())
extras = st.fixed_dictionaries({}, optional={"speculative_algorithm": st.just("EAGLE"), "tp_size": st.just(2)})


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Found], ModelFacts, EngineFacts, Policy, dict[str, object]]:
    """Plugins of their own kernels each, a model, an engine, a policy and what the launch asks beside its keys."""
    rows = draw(st.lists(offers, min_size=1, max_size=8))
    plugins = [fake_plugin(f"p{name}", [row for row in rows if row.kernel == name]) for name in NAMES]
    plugins = [plugin for plugin in plugins if plugin.declared.offers]
    return plugins, draw(st.sampled_from(MODELS)), draw(engines), draw(policies), draw(extras)


World = tuple[Sequence[Found], ModelFacts, EngineFacts, Policy, dict[str, object]]


def plan_in(world: World, **keys: str) -> Plan:
    """Resolve a target on SM90 with lib 1.0 installed."""
    plugins, model, engine, policy, more = world
    host = described_host("h100", libraries={"lib": "1.0"})
    return resolve(make_launch(Requests(**more, **keys), policy=policy), engine, model, host, catalogue_of(*plugins))


def plan_or_none(world: World, **keys: str) -> Plan | None:
    """A plan, or None where nothing serves."""
    try:
        return plan_in(world, **keys)
    except BackstampError:
        return None


quick = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@quick
@given(worlds())
def test_what_auto_picks_is_accepted_when_asked_for(world: World) -> None:
    """Case 43: auto and an explicit request read one table."""
    plan = plan_or_none(world)
    assume(plan is not None and not any("per_layer" in row.source for row in plan.running))
    picked = {f"{half}_attention_backend": plan.phase(half).kernel for half in ("prefill", "decode")}
    asked = plan_in(world, **picked)
    assert [row.kernel for row in asked.phases[:2]] == [row.kernel for row in plan.phases[:2]]
    for row in plan.running:
        assert {verdict.kernel: verdict.accepted for verdict in row.verdicts}[row.kernel]


@quick
@given(worlds(), st.sampled_from(NAMES), st.sampled_from(["prefill", "decode"]))
def test_what_is_refused_when_asked_for_is_never_picked_by_auto(world: World, name: str, half: str) -> None:
    """Case 43, the other way round."""
    plan = plan_or_none(world)
    assume(plan is not None and not any("per_layer" in row.source for row in plan.running))
    try:
        plan_in(world, **{f"{half}_attention_backend": name})
    except Refused:
        assert plan.phase(half).kernel != name
        assert name not in {group.kernel for group in plan.phase(half).groups}
    except BackstampError:
        pass


@quick
@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_plugins_never_matters(world: World, random: object) -> None:
    """Discovery order is a file system's whim."""
    shuffled = list(world[0])
    random.shuffle(shuffled)
    ours, theirs = plan_or_none(world), plan_or_none((shuffled, *world[1:]))
    assert (ours is None) == (theirs is None)
    if ours is not None:
        assert json.dumps(ours.as_json()) == json.dumps(theirs.as_json())


@quick
@given(worlds())
def test_a_plan_is_byte_stable_and_comes_back_equal_from_a_pickle(world: World) -> None:
    """The same facts give the same bytes; a worker receives what was sent."""
    plan = plan_or_none(world)
    assume(plan is not None)
    assert json.dumps(plan.as_json()) == json.dumps(plan_in(world).as_json())
    back = pickle.loads(pickle.dumps(plan))
    assert back == plan
    assert back.digest == plan.digest


@st.composite
def intruders(draw: st.DrawFn) -> Found:
    """A plugin nobody asked for, with names of its own and opinions about everybody else's."""
    rows = [
        replace(row, kernel=f"new_{row.kernel}", priority=100) for row in draw(st.lists(offers, min_size=1, max_size=3))
    ]
    return fake_plugin(
        "intruder",
        rows,
        [Alias(key="new_alias", kernels=draw(st.sampled_from([("a", "new_a"), ("b",), ("new_a",)])))],
        family_defaults=[
            FamilyDefault(
                model_type=draw(st.sampled_from([model.name for model in MODELS])),
                kernels=("new_a",),
                allowed=draw(st.sampled_from([None, frozenset({"new_a"})])),
            )
        ],
        feature_defaults=[FeatureDefault(feature="new_feature", archs=("9.0",))],
    )


@quick
@given(worlds(), intruders())
def test_adding_a_plugin_never_changes_an_explicit_plan(world: World, intruder: Found) -> None:
    """Installing is not consenting: what was asked for still runs, whatever the newcomer says about it."""
    plan = plan_or_none(world)
    assume(plan is not None and not any("per_layer" in row.source for row in plan.running))
    keys = {f"{half}_attention_backend": plan.phase(half).kernel for half in ("prefill", "decode")}
    before = plan_in(world, **keys)
    after = plan_in(([*world[0], intruder], *world[1:]), **keys)
    assert after.digest == before.digest
    assert [row.source for row in after.phases] == [row.source for row in before.phases]


@quick
@given(worlds(), offers)
def test_claiming_a_name_that_is_asked_for_is_an_error(world: World, stolen: Offer) -> None:
    """The one way a plugin can touch an explicit plan is told, and naming the distribution settles it."""
    plan = plan_or_none(world)
    assume(plan is not None)
    assume(all(row.kernel == plan.phase("prefill").kernel for row in plan.running))
    name = plan.phase("prefill").kernel
    thief = fake_plugin("thief", [replace(stolen, kernel=name)])
    robbed = ([*world[0], thief], *world[1:])
    with pytest.raises(AliasConflict, match=f"fake-p{name}, fake-thief"):
        plan_in(robbed, attention_backend=name)
    assume(not any("per_layer" in row.source for row in plan.running))
    mine = plan_in(robbed, attention_backend=f"fake-p{name}:{name}")
    assert mine.phase("prefill").plugin == plan.phase("prefill").plugin
