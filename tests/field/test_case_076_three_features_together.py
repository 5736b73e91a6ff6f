"""Case 76, vllm #45425: three features that break together are declared together, and no two of them are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.launch import Requests
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, GDN, model_with, plan_with

LSE = frozenset({"lse", "window"})
LOWERED = kernel("k", features=LSE, graph="any", graph_under={"spec+dcp": "single"})
BARRED = kernel("k", features=LSE, graph="any", excludes=frozenset({"spec+dcp+graph"}))
SPEC, DCP = {"speculative_algorithm": "EAGLE"}, {"dcp_size": 4}
FULL, NONE = EngineFacts(graph="any"), EngineFacts(graph="never")


def test_all_three_lower_the_graph_and_name_the_reason() -> None:
    """vllm #45425: never a full graph, and the loss says under what."""
    plan = plan_with([LOWERED], Requests(**SPEC, **DCP), engine=FULL)
    assert plan.graph == "single"
    assert {loss.cost for loss in plan.losses} == {"CUDA graph any -> single under spec+dcp"}


@pytest.mark.parametrize("offer", [LOWERED, BARRED])
@pytest.mark.parametrize("asked", [SPEC, DCP, {}])
def test_without_speculation_or_without_context_parallelism_the_graph_is_full(
    offer: object, asked: dict[str, object]
) -> None:
    """Each pair alone is fine."""
    plan = plan_with([offer], Requests(**asked), engine=FULL)
    assert (plan.graph, plan.losses) == ("any", ())


@pytest.mark.parametrize("offer", [LOWERED, BARRED])
def test_without_graphs_the_pair_is_fine(offer: object) -> None:
    """The third of the three dropped."""
    plan = plan_with([offer], Requests(**SPEC, **DCP), engine=NONE)
    assert (plan.phase("decode").kernel, plan.losses) == ("k", ())


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_kernel_that_excludes_the_three_is_refused_by_them(role: str) -> None:
    """vllm #45425, the other way to declare it: the error names the combination, for the draft too."""
    flag = "draft_attention_backend" if role == "draft" else "attention_backend"
    with pytest.raises(Refused, match=r"needs a launch without spec\+dcp\+graph"):
        plan_with([BARRED], Requests(**SPEC, **DCP, **{flag: "k"}), engine=FULL, role=role)


def test_the_linear_slot_is_held_to_its_combinations() -> None:
    """The same kind in the other slot."""
    model = model_with((3, GATED), (1, DENSE))
    linear = kernel("lin", features=LSE, graph="any", graph_under={"spec+dcp": "single"}, **GDN)
    attention = replace(LOWERED, graph_under={})
    plan = plan_with([attention, linear], Requests(**SPEC, **DCP), model=model, engine=FULL)
    assert plan.graph == "single"
    assert {loss.kernel for loss in plan.losses} == {"lin"}
