"""Case 23, vllm #48167: a graph level claimed from the causal path is not claimed for a non-causal draft."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.engine import EngineFacts
from backstamp.launch import Requests
from backstamp.policy import Policy
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with, texts_of

NON_CAUSAL = frozenset({"non_causal"})
K = kernel("K", features=NON_CAUSAL, graph="any", graph_under={"non_causal": "never"}, priority=90)
GRAPHED = kernel("graphed", features=NON_CAUSAL, graph="any", priority=10)
FULL = EngineFacts(graph="any")
BLOCK, CAUSAL = model_with((1, replace(DENSE, causal=False))), model_with((1, DENSE))
STEPS = [pytest.param(1, id="one-step"), pytest.param(3, id="three-steps")]


def spec(steps: int, **asked: str) -> Requests:
    """A speculative launch with so many draft steps."""
    return Requests(speculative_algorithm="DFLASH", speculative_num_steps=steps, **asked)


@pytest.mark.parametrize("steps", STEPS)
def test_the_same_kernel_loses_its_graph_with_a_warning(steps: int) -> None:
    """vllm #48167: a non-causal draft on K has no graph, and the plan warns with the reason and the other kernel."""
    plan = plan_with([K, GRAPHED], spec(steps), model=BLOCK, role="draft", engine=FULL)
    assert {row.kernel for row in plan.running} == {"K"}
    assert plan.graph == "never"
    texts = texts_of(plan, "graph_off")
    assert texts
    assert all("K" in text and "non_causal" in text and "graphed" in text for text in texts)


@pytest.mark.parametrize("steps", STEPS)
def test_asked_to_keep_the_graph_auto_takes_another_kernel(steps: int) -> None:
    """vllm #48167: the policy ranks kernels with graph support first, and nothing is lost."""
    policy = Policy(keep_graph=True)
    plan = plan_with([K, GRAPHED], spec(steps), model=BLOCK, role="draft", engine=FULL, policy=policy)
    assert plan.graph == "any"
    assert plan.phase("draft_extend").kernel == "graphed"
    assert (plan.losses, texts_of(plan, "graph_off")) == ((), [])


@pytest.mark.parametrize("steps", STEPS)
def test_explicitly_asked_for_it_never_keeps_a_full_graph(steps: int) -> None:
    """vllm #48167: full graph with this kernel is the fault itself."""
    plan = plan_with([K], spec(steps, draft_attention_backend="K"), model=BLOCK, role="draft", engine=FULL)
    assert plan.graph == "never"
    assert texts_of(plan, "graph_off")


@pytest.mark.parametrize(("role", "model"), [("draft", CAUSAL), ("target", CAUSAL)])
def test_the_causal_path_keeps_what_it_claims(role: str, model: object) -> None:
    """The weaker level holds under its condition alone."""
    plan = plan_with([K], spec(3), model=model, role=role, engine=FULL)
    assert (plan.graph, plan.losses, texts_of(plan, "graph_off")) == ("any", (), [])


def test_an_engine_without_graphs_is_told_nothing() -> None:
    """Nothing wanted, nothing lost."""
    plan = plan_with([K], spec(3), model=BLOCK, role="draft")
    assert (plan.graph, plan.losses, texts_of(plan, "graph_off")) == ("never", (), [])
