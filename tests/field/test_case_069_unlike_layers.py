"""Case 69, vllm #38891, #48114, #38887 and #52433: unlike layers, head dims bound to archs, a policy for each wish."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import FamilyDefault
from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.stamp import read_stamp
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import CUDA, DENSE, SM86, built_with, model_with, plan_with, texts_of

FEATURES = frozenset({"window"})
FA2 = kernel("fa2", archs=CUDA, head_dims=(64, 128, 256), features=FEATURES, priority=90)
FLASHINFER = kernel("flashinfer", archs=CUDA, head_dims=(64, 128, 256), features=FEATURES, priority=80)
WIDE = replace(FLASHINFER, archs=("10.0",), head_dims=(512,))
TRITON = kernel("triton", archs=CUDA, head_dims=("any",), features=FEATURES, priority=10)
ALL = [FA2, FLASHINFER, WIDE, TRITON]
SLIDING = replace(DENSE, head_dim=256, v_head_dim=256, window_left=511)
FULL = replace(DENSE, head_dim=512, v_head_dim=512)
MODEL = model_with((25, SLIDING), (5, FULL))
PER_LAYER, UNIFORM = Policy(layers="per_layer"), Policy(layers="uniform")


def counts(plan: Plan, phase: str = "prefill") -> dict[str, int]:
    """How many layers each kernel runs in a phase."""
    found: dict[str, int] = {}
    for group in plan.phase(phase).groups:
        found[group.kernel] = found.get(group.kernel, 0) + len(group.layers)
    return found


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_per_layer_gives_each_layer_the_best_that_serves_it(phase: str) -> None:
    """vllm #38891: 25 x fa2 and 5 x triton on SM86, in every phase, and the plan says so."""
    plan = plan_with(ALL, Requests(speculative_algorithm="EAGLE"), host=SM86, model=MODEL, policy=PER_LAYER)
    assert counts(plan, phase) == {"fa2": 25, "triton": 5}
    assert f"{phase}: unlike layers run 25 x fa2, 5 x triton" in [*texts_of(plan, "per_layer"), *_followed(phase)]


def _followed(phase: str) -> list[str]:
    # verify follows prefill's layers, which were told already
    return [f"{phase}: unlike layers run 25 x fa2, 5 x triton"] if phase == "verify" else []


def test_per_layer_objects_are_stamped_each_with_its_own() -> None:
    """vllm #38891: what is built is what was planned, layer by layer."""
    plan = plan_with(ALL, host=SM86, model=MODEL, policy=PER_LAYER)
    backends = built_with(ALL, plan, MODEL)
    built = [backends.serving_attention_backend("decode", at) for at in (0, 1)]
    assert [(read_stamp(item).kernel, len(item.request.layers)) for item in built] == [("fa2", 25), ("triton", 5)]


@pytest.mark.parametrize("policy", [UNIFORM, Policy()])
def test_uniform_gives_all_layers_one_kernel(policy: Policy) -> None:
    """vllm #48114: 30 x triton, also by default, because one kernel can."""
    assert counts(plan_with(ALL, host=SM86, model=MODEL, policy=policy)) == {"triton": 30}


@pytest.mark.parametrize("policy", [PER_LAYER, UNIFORM])
@pytest.mark.parametrize("host", [SM86, "h100", "gb300", "rtx5090"])
def test_a_head_dim_belongs_to_the_archs_of_its_own_row(policy: Policy, host: object) -> None:
    """vllm #38887: flashinfer's 512 is an SM100 row; elsewhere asking for it is refused, auto never takes it."""
    plan = plan_with(ALL, host=host, model=MODEL, policy=policy)
    assert "flashinfer" not in counts(plan)
    with pytest.raises(Refused, match=r"needs SM100.*for head dim 256, 512|needs SM100.*for head dim 512"):
        plan_with(ALL, Requests(attention_backend="flashinfer"), host=host, model=MODEL, policy=policy)


def test_on_its_arch_the_wide_row_serves() -> None:
    """vllm #52433: SM100 takes flashinfer for the wide layers, and for all of them when asked, layer by layer."""
    assert counts(plan_with(ALL, host="b200", model=MODEL, policy=PER_LAYER)) == {"fa2": 25, "flashinfer": 5}
    asked = Requests(attention_backend="flashinfer")
    assert counts(plan_with(ALL, asked, host="b200", model=MODEL, policy=PER_LAYER)) == {"flashinfer": 30}


def test_a_familys_wish_is_kept_layer_by_layer() -> None:
    """The family prefers fa2, then triton: each layer gets the first that serves it."""
    rule = FamilyDefault(model_type="made_up", kernels=("fa2", "triton"))
    engine = fake_plugin("vllm", family_defaults=[rule], distribution="backstamp-vllm")
    plan = plan_with([*ALL, engine], host="b200", model=MODEL, policy=PER_LAYER)
    assert counts(plan) == {"fa2": 25, "triton": 5}
    assert {group.source for group in plan.phase("decode").groups} == {"family (per_layer)"}


def test_a_second_component_is_decided_layer_by_layer_too() -> None:
    """The policy is about unlike layers of one component, whichever it is."""
    cross = {"attn_type": "cross", "component": "cross_attention"}
    model = model_with((2, FULL), (25, replace(SLIDING, **cross)), (5, replace(FULL, **cross)))
    offers = [replace(item, features=FEATURES | {"cross"}) for item in ALL]
    plan = plan_with(offers, host=SM86, model=model, policy=PER_LAYER)
    of_cross = [(group.kernel, len(group.layers)) for group in plan.phase("decode").groups[1:]]
    assert of_cross == [("fa2", 25), ("triton", 5)]
    assert "decode, component cross_attention: unlike layers run 25 x fa2, 5 x triton" in texts_of(plan, "per_layer")


def test_uniform_without_one_kernel_for_all_is_an_error_with_every_reason() -> None:
    """Nobody serves both: uniform refuses, per_layer is for that."""
    only = [FA2, kernel("wide", archs=CUDA, head_dims=(512,))]
    with pytest.raises(NoKernel, match="fa2: needs head dim 64, 128, 256, got 512"):
        plan_with(only, host=SM86, model=MODEL, policy=UNIFORM)
    assert counts(plan_with(only, host=SM86, model=MODEL)) == {"fa2": 25, "wide": 5}
