"""Case 75, vllm #49547 and #49550: what a choice costs is in the plan, with the kernel that would not cost it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.engine import EngineFacts
from backstamp.launch import Requests
from backstamp.plan_rows import Loss
from backstamp.policy import Policy
from tests.resolving import kernel
from tests.scenes import CUDA, DENSE, GATED, GDN, model_with, plan_with

K = kernel("K", archs=CUDA, graph="single", priority=90)
F = kernel("F", archs=CUDA, graph="uniform", priority=10)
UNIFORM = EngineFacts(graph="uniform")
SPEC = Requests(speculative_algorithm="EAGLE")


def test_an_explicit_kernel_is_served_and_its_cost_is_listed() -> None:
    """vllm #49547: SM121 with speculation; the graph is downgraded, and F is named for every phase that is captured."""
    plan = plan_with([K, F], replace(SPEC, attention_backend="K"), host="gb10", engine=UNIFORM)
    assert {row.kernel for row in plan.running} == {"K"}
    assert plan.graph == "single"
    assert plan.losses == tuple(
        Loss("graph", phase, "K", "CUDA graph uniform -> single", "F") for phase in ("decode", "verify")
    )
    assert plan.as_json()["losses"] == [loss.as_json() for loss in plan.losses]


def test_auto_asked_to_keep_the_graph_takes_the_kernel_that_keeps_it() -> None:
    """vllm #49550: F though K ranks higher, and nothing is lost."""
    plan = plan_with([K, F], SPEC, host="gb10", engine=UNIFORM, policy=Policy(keep_graph=True))
    assert {plan.phase(phase).kernel for phase in ("decode", "verify")} == {"F"}
    assert (plan.graph, plan.losses) == ("uniform", ())


def test_auto_by_rank_lists_the_loss_too() -> None:
    """Without the policy K wins, and the plan prices it all the same."""
    plan = plan_with([K, F], SPEC, host="gb10", engine=UNIFORM)
    assert {loss.alternative for loss in plan.losses} == {"F"}


def test_a_split_choice_loses_in_its_own_phase_alone() -> None:
    """Prefill is not captured: K there costs nothing."""
    asked = Requests(prefill_attention_backend="K", decode_attention_backend="F")
    plan = plan_with([K, F], asked, host="gb10", engine=UNIFORM)
    assert (plan.graph, plan.losses) == ("uniform", ())


@pytest.mark.parametrize("steps", [1, 3])
def test_a_draft_is_priced_as_well(steps: int) -> None:
    """The draft role: its loop and its extend are captured."""
    asked = replace(SPEC, draft_attention_backend="K", speculative_num_steps=steps)
    plan = plan_with([K, F], asked, host="gb10", engine=UNIFORM, role="draft")
    assert plan.graph == "single"
    assert {loss.phase for loss in plan.losses} == {row.phase for row in plan.running} - {"prefill"}


def test_no_other_kernel_is_named_where_none_would_keep_it() -> None:
    """An honest empty alternative."""
    plan = plan_with([K], host="gb10", engine=UNIFORM)
    assert {loss.alternative for loss in plan.losses} == {""}


def test_a_linear_kernel_is_captured_like_any_other() -> None:
    """The linear slot: a recurrent kernel without graphs takes the model's graph, and the plan says which would not."""
    model = model_with((3, GATED), (1, DENSE))
    slow = kernel("slow", graph="never", archs=CUDA, priority=90, **GDN)
    good = kernel("good", graph="uniform", archs=CUDA, priority=10, **GDN)
    plan = plan_with([F, slow, good], host="gb10", model=model, engine=UNIFORM)
    assert plan.graph == "never"
    assert Loss("graph", "decode", "slow", "CUDA graph uniform -> never", "good") in plan.losses
    kept = plan_with([F, slow, good], host="gb10", model=model, engine=UNIFORM, policy=Policy(keep_graph=True))
    assert (kept.graph, kept.losses) == ("uniform", ())


def test_a_component_with_a_cache_is_captured_too() -> None:
    """Cross-attention decodes in the same graph."""
    cross = replace(DENSE, attn_type="cross", component="cross_attention")
    plain = kernel("plain", archs=CUDA, graph="never", features=frozenset({"cross"}))
    plan = plan_with([F, plain], host="gb10", model=model_with((4, DENSE), (2, cross)), engine=UNIFORM)
    assert plan.graph == "never"
    assert ("decode", "plain") in {(loss.phase, loss.kernel) for loss in plan.losses}
