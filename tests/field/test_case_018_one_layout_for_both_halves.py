"""Case 18, vllm #48162 and #48029: prefill and decode share one KV cache, so their layouts must agree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from backstamp.declarations import Offer
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from tests.resolving import kernel, kernels, plan_of

ENGINE = EngineFacts(layouts=frozenset({"hnd", "nhd"}))
HALVES = Requests(prefill_attention_backend="pre", decode_attention_backend="dec")


def pair(prefill: Sequence[str], decode: Sequence[str]) -> list[Offer]:
    """Two kernels and the layouts they read, best first."""
    return [kernel("pre", layouts=tuple(prefill)), kernel("dec", layouts=tuple(decode))]


@pytest.mark.parametrize(
    "requests",
    [
        pytest.param(HALVES, id="both-split"),
        pytest.param(Requests(attention_backend="pre", decode_attention_backend="dec"), id="base-and-split"),
        pytest.param(
            Requests(attention_backend="pre", verify_attention_backend="dec", speculative_algorithm="EAGLE"),
            id="verify",
        ),
    ],
)
def test_two_hard_layouts_are_an_error_naming_both(requests: Requests) -> None:
    """(a) vllm #48162: HND against NHD is refused before anything is built, whichever phases disagree."""
    with pytest.raises(ConflictingRequest) as caught:
        plan_of(pair(["hnd"], ["nhd"]), requests, engine=ENGINE)
    for word in ("pre reads hnd", "dec reads nhd", "share a cache"):
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("prefill", "decode", "layout"),
    [
        pytest.param(["hnd"], ["nhd", "hnd"], "hnd", id="hard-prefill"),
        pytest.param(["nhd", "hnd"], ["hnd"], "hnd", id="hard-decode"),
        pytest.param(["nhd"], ["hnd", "nhd"], "nhd", id="hard-prefill-nhd"),
    ],
)
def test_one_hard_layout_is_used_for_both(prefill: list[str], decode: list[str], layout: str) -> None:
    """(b) vllm #48162: the flexible kernel follows the hard one, and both run."""
    plan = plan_of(pair(prefill, decode), HALVES, engine=ENGINE)
    assert dict(plan.layouts)["attention"] == layout
    assert (kernels(plan)["prefill"], kernels(plan)["decode"]) == ("pre", "dec")


def test_two_flexible_layouts_take_the_default() -> None:
    """(c) vllm #48162: where both read both, the cache has the layout decode ranks best."""
    plan = plan_of(pair(["nhd", "hnd"], ["nhd", "hnd"]), HALVES, engine=ENGINE)
    assert dict(plan.layouts)["attention"] == "nhd"
    plan = plan_of(pair(["nhd", "hnd"], ["hnd", "nhd"]), HALVES, engine=ENGINE)
    assert dict(plan.layouts)["attention"] == "hnd"


def test_the_unset_half_joins_the_layout_of_the_asked_one() -> None:
    """vllm #48029: `auto` never picks a kernel that reads the shared cache in another order."""
    offers = [kernel("fast", layouts=("nhd",), priority=90), *pair(["hnd"], ["hnd", "nhd"])]
    plan = plan_of(offers, Requests(prefill_attention_backend="pre"), engine=ENGINE)
    assert kernels(plan)["decode"] == "dec"


def test_the_layout_is_part_of_the_plan_and_of_its_digest() -> None:
    """Two plans with the same kernels and another layout are not the same decision."""
    plans = [
        plan_of(pair(["nhd", "hnd"], ["nhd", "hnd"]), HALVES, engine=EngineFacts(layouts=frozenset({layout})))
        for layout in ("hnd", "nhd")
    ]
    assert [plan.as_json()["layouts"] for plan in plans] == [{"attention": "hnd"}, {"attention": "nhd"}]
    assert plans[0].digest != plans[1].digest
