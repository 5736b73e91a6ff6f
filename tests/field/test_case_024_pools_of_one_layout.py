"""Case 24, vllm #41657 and #46992: draft and target, or two kernels of one runner, read one KV tensor alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from backstamp.model import DraftFacts, default_model, group_layers
from backstamp.testing.fakes import fake_plugin
from tests.building import plan_on
from tests.resolving import kernel

#: The same page bytes (both read pages of 16 tokens of the same heads), in another index order.
PLUGIN = fake_plugin("p", [kernel("a", layouts=("l1",)), kernel("b", layouts=("l2",)), kernel("c", layouts=("l1",))])
ENGINE = EngineFacts(layouts=frozenset({"l1", "l2"}))
SHARING = replace(default_model(), draft=DraftFacts(shares_kv=True))
OWN = replace(default_model(), draft=DraftFacts(shares_kv=False))


def asked(draft: str) -> Requests:
    """Target a, an explicit draft."""
    return Requests(attention_backend="a", draft_attention_backend=draft, speculative_algorithm="EAGLE")


def test_a_draft_that_shares_the_pool_with_another_layout_is_an_error() -> None:
    """vllm #41657: equal page bytes are not enough; both kernels and both layouts are named."""
    target = plan_on("h100", PLUGIN, requests=asked("b"), engine=ENGINE)
    with pytest.raises(ConflictingRequest) as caught:
        plan_on("h100", PLUGIN, requests=asked("b"), model=SHARING, role="draft", engine=ENGINE, target=target)
    for word in ("l1 pages", "as a of the target", "l2 pages", "of b", "shares its target's KV cache"):
        assert word in caught.value.message


def test_a_draft_with_a_pool_of_its_own_marks_its_own_layout() -> None:
    """vllm #46992: two pools, two plans, each with the layout of its own cache."""
    target = plan_on("h100", PLUGIN, requests=asked("b"), engine=ENGINE)
    draft = plan_on("h100", PLUGIN, requests=asked("b"), model=OWN, role="draft", engine=ENGINE, target=target)
    assert dict(target.layouts)["attention"] == "l1"
    assert dict(draft.layouts)["attention"] == "l2"


def test_one_layout_may_share_one_pool() -> None:
    """Another kernel that reads the same layout joins the pool."""
    target = plan_on("h100", PLUGIN, requests=asked("c"), engine=ENGINE)
    draft = plan_on("h100", PLUGIN, requests=asked("c"), model=SHARING, role="draft", engine=ENGINE, target=target)
    assert (draft.phase("draft_decode").kernel, dict(draft.layouts)["attention"]) == ("c", "l1")


def test_the_same_layout_in_other_pages_is_no_shared_pool_either() -> None:
    """The relative: one index order, two page sizes."""
    small = replace(PLUGIN.declared.offers[0].page_sizes, preferred=64, exact=(64,), multiple_of=0)
    plugin = fake_plugin("p", [kernel("a", layouts=("l1",)), kernel("c", layouts=("l1",), page_sizes=small)])
    target = plan_on("h100", plugin, requests=asked("c"), engine=ENGINE)
    with pytest.raises(ConflictingRequest, match="pages of 16"):
        plan_on("h100", plugin, requests=asked("c"), model=SHARING, role="draft", engine=ENGINE, target=target)


def test_unlike_layers_of_one_runner_share_its_pool() -> None:
    """The relative inside one runner: A-layers and B-layers in two layouts are an error that says so of both."""
    facts = default_model().groups[0].facts
    layers = tuple((replace(facts, head_dim=dim, v_head_dim=dim),) for dim in (64, 128, 64, 128))
    model = replace(default_model(), layers=layers, groups=group_layers(layers))
    offers = [kernel("a", head_dims=(64,), layouts=("l1",)), kernel("b", head_dims=(128,), layouts=("l2",))]
    with pytest.raises(ConflictingRequest, match="a reads l1 and b reads l2"):
        plan_on("h100", fake_plugin("p", offers), model=model, engine=ENGINE)
    same = fake_plugin("p", [offers[0], replace(offers[1], layouts=("l2", "l1"))])
    plan = plan_on("h100", same, model=model, engine=ENGINE)
    assert [group.kernel for group in plan.phase("decode").groups] == ["a", "b"]
    assert dict(plan.layouts)["attention"] == "l1"


def test_a_draft_left_to_itself_joins_the_pool_it_shares() -> None:
    """Auto passes over a faster kernel that reads the shared pool in another order."""
    offers = [
        kernel("a", layouts=("l1",), draft_phases=frozenset()),
        kernel("fast", layouts=("l2",), priority=90),
        kernel("slow", layouts=("l1",), priority=1),
    ]
    plugin = fake_plugin("p", offers)
    requests = Requests(attention_backend="a", speculative_algorithm="EAGLE")
    target = plan_on("h100", plugin, requests=requests, engine=ENGINE)
    draft = plan_on("h100", plugin, requests=requests, model=SHARING, role="draft", engine=ENGINE, target=target)
    assert [draft.phase(phase).kernel for phase in ("draft_decode", "draft_extend")] == ["slow", "slow"]
    assert dict(draft.layouts)["attention"] == "l1"
