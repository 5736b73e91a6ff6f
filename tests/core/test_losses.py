"""What a choice costs, and which accepted kernel would not cost it."""

from __future__ import annotations

from backstamp.engine import EngineFacts
from backstamp.launch import Requests
from backstamp.measurements import Measurements
from backstamp.plan_rows import Loss
from tests.resolving import kernel, plan_of
from tests.scenes import plan_with, texts_of

FULL = EngineFacts(graph="any")
ASKED = Requests(attention_backend="k")


def test_a_kernel_measured_slower_is_priced_with_the_faster_one() -> None:
    """In the phases that were measured, and not where the fastest runs."""
    rows = (("attention", "decode", "k", 30.0), ("attention", "decode", "fast", 20.0))
    offers = [kernel("k"), kernel("fast")]
    record = Measurements(host="h100", microseconds=rows)
    assert plan_of(offers, ASKED, measurements=record).losses == (
        Loss("time", "decode", "k", "1.50 times the measured time of fast", "fast"),
    )
    assert plan_of(offers, Requests(attention_backend="fast"), measurements=record).losses == ()


def test_a_kernel_nobody_measured_is_not_priced() -> None:
    """No number, no ratio."""
    rows = (("attention", "decode", "fast", 20.0),)
    record = Measurements(host="h100", microseconds=rows)
    assert plan_of([kernel("k"), kernel("fast")], ASKED, measurements=record).losses == ()


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
