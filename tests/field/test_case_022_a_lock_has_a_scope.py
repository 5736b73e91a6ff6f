"""Case 22, vllm #42069 and #40382: a lock on a family's target binds its draft only where they share a cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import FamilyDefault
from backstamp.errors import NoKernel, Refused, StrictViolation
from backstamp.launch import Requests
from backstamp.model import DraftFacts
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with, texts_of

TRITON = kernel("triton", head_dims=(128, 256), priority=40)
FLEX = kernel(
    "flex", head_dims=tuple(range(64, 257, 64)), features=frozenset({"non_causal"}), mask_format="none", priority=30
)
OTHER = kernel("other", head_dims=(128, 256), priority=90)
LOCK = fake_plugin(
    "vllm",
    family_defaults=[FamilyDefault(model_type="gemma", kernels=("triton",), allowed=frozenset({"triton"}))],
    distribution="backstamp-vllm",
)
ALL = (TRITON, FLEX, OTHER, LOCK)
WIDE = replace(DENSE, head_dim=256, v_head_dim=256)
TARGET = model_with((4, WIDE), name="gemma")
SPEC = Requests(speculative_algorithm="DFLASH", speculative_num_steps=3)


def draft(causal: bool, shares: bool, name: str = "gemma_draft"):  # type: ignore[no-untyped-def]
    """A draft of head dim 256."""
    facts = DraftFacts(shares_kv=shares, non_causal=not causal)
    return model_with((1, replace(WIDE, causal=causal)), name=name, draft=facts)


@pytest.fixture(scope="module")
def target():  # type: ignore[no-untyped-def]
    """The locked target's plan."""
    return plan_with(ALL, SPEC, model=TARGET)


@pytest.mark.parametrize("name", ["gemma_draft", "gemma"])
def test_a_separate_draft_is_out_of_the_locks_scope(target, name: str) -> None:  # type: ignore[no-untyped-def]
    """vllm #42069: target triton, non-causal draft flex, even where the draft's config has the target's model type."""
    assert {row.kernel for row in target.running} == {"triton"}
    plan = plan_with(ALL, SPEC, model=draft(causal=False, shares=False, name=name), role="draft", target=target)
    assert {row.kernel for row in plan.running} == {"flex"}


def test_what_the_operator_asked_of_the_target_is_no_lock_either() -> None:
    """vllm #40382: the inherited request is a preference, and the plan says that it was left; strict refuses."""
    asked = replace(SPEC, attention_backend="triton")
    model = draft(causal=False, shares=False)
    plan = plan_with(ALL, asked, model=model, role="draft")
    assert {(row.kernel, row.source) for row in plan.running} == {("flex", "inherited -> auto")}
    assert len(texts_of(plan, "inherited")) == len(plan.running)
    with pytest.raises(StrictViolation, match="'triton' cannot serve this draft"):
        plan_with(ALL, asked, model=model, role="draft", policy=Policy(strict=True))


def test_a_draft_that_shares_the_targets_cache_is_locked_with_it(target) -> None:  # type: ignore[no-untyped-def]
    """vllm #42069: causal and sharing, it runs triton though other ranks higher; asked otherwise, it is refused."""
    model = draft(causal=True, shares=True)
    plan = plan_with(ALL, SPEC, model=model, role="draft", target=target)
    assert {row.kernel for row in plan.running} == {"triton"}
    with pytest.raises(Refused, match=r"family gemma, whose KV cache this draft shares, allows \(triton\), got other"):
        plan_with(ALL, replace(SPEC, draft_attention_backend="other"), model=model, role="draft", target=target)


def test_a_sharing_draft_the_lock_leaves_nothing_for_is_an_error(target) -> None:  # type: ignore[no-untyped-def]
    """vllm #40382: non-causal and sharing, the lock is a reason of its own in the list, never quietly dropped."""
    model = draft(causal=False, shares=True)
    with pytest.raises(NoKernel) as caught:
        plan_with(ALL, SPEC, model=model, role="draft", target=target)
    assert "flex: needs a kernel that family gemma, whose KV cache this draft shares, allows" in caught.value.considered
    assert "triton: needs a kernel that declares non_causal" in caught.value.considered


def test_a_host_without_a_non_causal_kernel_is_an_error_with_every_reason() -> None:
    """vllm #42069: one reason per candidate."""
    with pytest.raises(NoKernel) as caught:
        plan_with((TRITON, OTHER, LOCK), SPEC, model=draft(causal=False, shares=False), role="draft")
    for name in ("triton", "other"):
        assert f"{name}: needs a kernel that declares non_causal" in caught.value.considered


def test_head_dims_bound_the_non_causal_kernel() -> None:
    """Its limit is 256; a wider draft has nobody."""
    wider = model_with((1, replace(WIDE, head_dim=512, v_head_dim=512, causal=False)), draft=DraftFacts())
    with pytest.raises(NoKernel, match="flex: needs head dim 64, 128, 192, 256, got 512"):
        plan_with(ALL, SPEC, model=wider, role="draft")


def test_a_lock_declared_for_the_draft_binds_the_draft_alone() -> None:
    """The other role: the target of the same family is free."""
    rule = FamilyDefault(model_type="gemma", kernels=("flex",), allowed=frozenset({"flex"}), role="draft")
    lock = fake_plugin("vllm", family_defaults=[rule], distribution="backstamp-vllm")
    model = draft(causal=False, shares=False, name="gemma")
    assert plan_with((TRITON, FLEX, OTHER, lock), SPEC, model=model, role="draft").phase("prefill").source == "family"
    assert plan_with((TRITON, FLEX, OTHER, lock), SPEC, model=TARGET).phase("prefill").kernel == "other"
