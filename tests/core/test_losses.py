"""What a choice costs, and which accepted kernel would not cost it."""

from __future__ import annotations

from dataclasses import replace

from backstamp.engine import EngineFacts
from backstamp.launch import Requests, make_launch
from backstamp.plan_rows import Loss
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel, plan_of, times_of
from tests.scenes import DENSE, model_with, plan_with, texts_of

FULL = EngineFacts(graph="any")
ASKED = Requests(attention_backend="k")


def test_a_kernel_measured_slower_is_priced_with_the_faster_one() -> None:
    """In the phases that were measured, and not where the fastest runs."""
    offers = [kernel("k"), kernel("fast")]
    record = times_of(offers, {("decode", "k"): 30.0, ("decode", "fast"): 20.0})
    assert plan_of(offers, ASKED, measurements=record).losses == (
        Loss("time", "decode", "k", "1.50 times the measured time of fast", "fast"),
    )
    assert plan_of(offers, Requests(attention_backend="fast"), measurements=record).losses == ()


def test_a_kernel_nobody_measured_is_not_priced() -> None:
    """No number, no ratio."""
    offers = [kernel("k"), kernel("fast")]
    assert plan_of(offers, ASKED, measurements=times_of(offers, {("decode", "fast"): 20.0})).losses == ()


def test_the_conditions_that_lower_a_graph_are_all_named() -> None:
    """Those that hold and reach the level it has; the others are no reason."""
    under = {"spec": "single", "graph": "single", "prefix_cache": "uniform", "dcp": "never"}
    offer = kernel("k", graph="any", graph_under=under)
    plan = plan_with([offer], Requests(speculative_algorithm="EAGLE"), engine=FULL)
    assert {loss.cost for loss in plan.losses} == {"CUDA graph any -> single under graph and spec"}


def test_a_declared_level_needs_no_condition() -> None:
    """A kernel that never claimed more lost nothing to a condition."""
    offer = kernel("k", graph="single", graph_under={"prefix_cache": "single"})
    assert {loss.cost for loss in plan_with([offer], engine=FULL).losses} == {"CUDA graph any -> single"}


def test_a_graph_lost_altogether_is_a_warning_and_a_weaker_one_is_not() -> None:
    """One line a phase, with what would keep it or that nothing would."""
    plan = plan_with([kernel("k", graph="never")], engine=FULL)
    assert texts_of(plan, "graph_off") == ["decode: k runs without a CUDA graph; no kernel here would keep it"]
    kept = plan_with([kernel("k", graph="never"), kernel("g", graph="any")], ASKED, engine=FULL)
    assert texts_of(kept, "graph_off") == ["decode: k runs without a CUDA graph; g would keep it"]
    assert texts_of(plan_with([kernel("k", graph="single")], engine=FULL), "graph_off") == []


def test_an_engine_that_wants_less_loses_less() -> None:
    """The loss is against what is wanted."""
    assert plan_with([kernel("k", graph="single")], engine=EngineFacts(graph="single")).losses == ()


WIDE = replace(DENSE, head_dim=256, v_head_dim=256, window_left=1023)
WIDER = replace(DENSE, head_dim=512, v_head_dim=512)
UNLIKE = model_with((25, WIDE), (5, WIDER), name="unlike")
PER_LAYER = Policy(layers="per_layer")


def test_an_alternative_must_serve_every_layer_the_losing_kernel_runs() -> None:
    """One that refuses some of them is none, whatever it would keep for the others."""
    fa2 = kernel("fa2", head_dims=(256,), graph="any", accuracy="exact", priority=90)
    slow = kernel("slow", head_dims=(256, 512), graph="single", accuracy="rough")
    launch = make_launch(Requests(attention_backend="slow"), policy=PER_LAYER)
    engine = EngineFacts(graph="uniform")
    record = times_of([fa2, slow], {("decode", "slow"): 30.0, ("decode", "fa2"): 20.0}, model=UNLIKE)
    catalogue = catalogue_of(fake_plugin("p", [fa2, slow]))
    found = resolve(launch, engine, UNLIKE, described_host("h100"), catalogue, record).losses
    assert {(loss.code, loss.alternative) for loss in found} == {("graph", ""), ("accuracy", "")}


def test_the_loss_is_that_of_the_kernel_that_runs_the_layers() -> None:
    """Not of the one that stands for the phase; an alternative serves those layers alone."""
    fa2 = kernel("fa2", head_dims=(512,), graph="any", priority=90)
    slow = kernel("slow", head_dims=(256,), graph="single", priority=80)
    other = kernel("other", head_dims=(256,), graph="any", priority=10)
    plan = plan_with([fa2, slow, other], model=UNLIKE, policy=PER_LAYER, engine=EngineFacts(graph="uniform"))
    assert plan.phase("decode").kernel == "fa2"
    assert plan.losses == (Loss("graph", "decode", "slow", "CUDA graph uniform -> single", "other"),)


def test_a_verify_phase_that_follows_layer_by_layer_is_held_to_all_of_them() -> None:
    """Its alternatives serve the whole question."""
    fa2 = kernel("fa2", head_dims=(256,), graph="any", priority=90)
    slow = kernel("slow", head_dims=(256, 512), graph="single")
    asked = Requests(attention_backend="slow", speculative_algorithm="EAGLE")
    plan = plan_with([fa2, slow], asked, model=UNLIKE, policy=PER_LAYER, engine=EngineFacts(graph="uniform"))
    assert {(loss.phase, loss.alternative) for loss in plan.losses} == {("decode", ""), ("verify", "")}
