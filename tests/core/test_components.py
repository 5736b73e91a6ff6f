"""Components beside the main one: vision and audio encoders, cross-attention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import Alias, PageSizes
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest, UnknownKey
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, groups_of, model_with, plan_with, texts_of

VISION = replace(DENSE, attn_type="encoder", causal=False, component="vision", num_kv_heads=32)
CROSS = replace(DENSE, attn_type="cross", component="cross_attention")
MAIN, ENC = kernel("k", priority=60), kernel("enc", features=frozenset({"encoder"}), phases=frozenset({"prefill"}))
SEEING, CROSSING = model_with((2, DENSE), (2, VISION)), model_with((2, DENSE), (2, CROSS))


@pytest.mark.parametrize("speculative", [None, "EAGLE"])
def test_an_encoder_runs_once_with_prefill(speculative: str | None) -> None:
    """It keeps no cache, so no decode or verify is asked of its kernel."""
    plan = plan_with([MAIN, ENC], Requests(speculative_algorithm=speculative), model=SEEING)
    assert [len(row.groups) for row in plan.running] == [2, *[1] * (len(plan.running) - 1)]
    assert groups_of(plan)["vision"].kernel == "enc"


def test_an_encoder_shares_no_page_size_with_the_cache() -> None:
    """Without a cache there is nothing to agree on."""
    ragged = replace(ENC, kv_forms=frozenset({"ragged"}), page_sizes=PageSizes(preferred=7, exact=(7,)), layouts=("x",))
    plan = plan_with([MAIN, ragged], model=SEEING, engine=EngineFacts(layouts=frozenset({"rows", "x"})))
    assert (groups_of(plan)["vision"].kernel, plan.page_size) == ("enc", 16)


def test_unlike_layers_of_an_encoder_share_no_page_size_either() -> None:
    """Layer by layer, two kernels with pages of their own, and nothing cached to disagree about."""
    rows = [
        replace(ENC, kernel=f"enc{dim}", head_dims=(dim,), page_sizes=PageSizes(preferred=size, exact=(size,)))
        for dim, size in ((64, 7), (128, 11))
    ]
    towers = [(2, replace(VISION, head_dim=dim, v_head_dim=dim)) for dim in (64, 128)]
    plan = plan_with([MAIN, *rows], model=model_with((2, DENSE), *towers))
    assert [group.kernel for group in plan.phase("prefill").groups] == ["k", "enc64", "enc128"]


def test_a_component_with_a_cache_must_share_it() -> None:
    """A kernel with pages of its own is passed over, and is an error where nothing else serves."""
    odd = kernel(
        "odd",
        head_dims=(64,),
        features=frozenset({"cross"}),
        page_sizes=PageSizes(preferred=7, exact=(7,)),
        priority=90,
    )
    even = kernel("even", head_dims=(64,), features=frozenset({"cross"}), priority=1)
    model = model_with((2, DENSE), (2, replace(CROSS, head_dim=64, v_head_dim=64)))
    fixed = replace(MAIN, page_sizes=PageSizes(preferred=16, exact=(16,)))
    assert groups_of(plan_with([fixed, odd, even], model=model))["cross_attention"].kernel == "even"
    with pytest.raises(ConflictingRequest, match="k reads 16; odd reads 7"):
        plan_with([fixed, odd], model=model)


def test_an_unknown_key_is_unknown_in_any_scope() -> None:
    """A preference is left for a kernel that cannot serve, never for a word nobody knows."""
    with pytest.raises(UnknownKey, match="component vision"):
        plan_with([MAIN, ENC], Requests(component_backends={"vision": "encc"}), model=SEEING)


def test_a_deprecated_key_is_told_once_though_components_read_it_too() -> None:
    """One operator, one key, one warning."""
    both = kernel("both", features=frozenset({"encoder"}))
    plugin = fake_plugin("p", [both], [Alias(key="old", kernels=("both",), deprecated="both")])
    plan = plan_with([plugin], Requests(attention_backend="old"), model=SEEING)
    assert groups_of(plan)["vision"].kernel == "both"
    assert [text for text in texts_of(plan, "deprecated") if "component" in text] == []


def test_what_an_engine_keeps_to_itself_is_not_asked_about() -> None:
    """No kernel for it is needed, and asking for it by name is an error that lists what is there."""
    engine = EngineFacts(name="e", components=frozenset({"main"}))
    assert [group.component for group in plan_with([MAIN], model=SEEING, engine=engine).phase("prefill").groups] == [
        "main"
    ]
    with pytest.raises(ConflictingRequest, match="that e hands over, got 'vision'; there are main"):
        plan_with([MAIN], Requests(component_backends={"vision": "k"}), model=SEEING, engine=engine)


def test_a_draft_asks_its_components_for_the_drafts_kernel() -> None:
    """The target's flags are not wishes for a component of the draft."""
    offers = [replace(item, features=frozenset({"cross"})) for item in (MAIN, kernel("d"), kernel("t", priority=1))]
    asked = Requests(attention_backend="t", draft_attention_backend="d")
    plan = plan_with(offers, asked, model=CROSSING, role="draft")
    assert {group.kernel for row in plan.running for group in row.groups} == {"d"}
    unset = plan_with(offers, replace(asked, draft_attention_backend=None), model=CROSSING, role="draft")
    assert {(group.component, group.kernel) for row in unset.running for group in row.groups} == {
        ("main", "t"),
        ("cross_attention", "k"),
    }


def test_a_request_scoped_to_main_is_inherited_by_the_draft() -> None:
    """What the target's main component was asked to run, its draft prefers too."""
    asked = Requests(component_backends={"main": "t"})
    plan = plan_with([MAIN, kernel("t", priority=1)], asked, role="draft")
    assert {(row.kernel, row.source) for row in plan.running} == {("t", "inherited")}


def test_a_wish_that_cannot_share_the_cache_is_left_with_the_reason() -> None:
    """A preference again: the component takes what shares the main component's pages, and the plan says why."""
    odd = kernel("odd", features=frozenset({"cross"}), head_dims=(64,), page_sizes=PageSizes(preferred=7, exact=(7,)))
    paged = PageSizes(preferred=16, exact=(16,))
    rows = [replace(odd, kernel="k"), replace(MAIN, page_sizes=paged), replace(odd, kernel="even", page_sizes=paged)]
    model = model_with((2, DENSE), (2, replace(CROSS, head_dim=64, v_head_dim=64)))
    plan = plan_with(rows, Requests(attention_backend="k"), model=model)
    assert groups_of(plan)["cross_attention"].kernel == "even"
    assert all("its cache is not that of the main component" in text for text in texts_of(plan, "changed"))
    with pytest.raises(ConflictingRequest, match=r"k reads 16.*k reads 7"):
        plan_with(rows, Requests(attention_backend="k", component_backends={"cross_attention": "k"}), model=model)


@pytest.mark.parametrize("field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_two_requests_for_the_main_component_are_a_conflict(field: str) -> None:
    """One of them would be lost; both are named, and of two sources the stronger holds."""
    asked = Requests(component_backends={"main": "k"}, **{field: "t"})
    rows = [MAIN, ENC, kernel("t")]
    with pytest.raises(ConflictingRequest, match="one request for component main") as caught:
        plan_with(rows, asked, model=SEEING)
    assert "t beside it" in caught.value.found
    stronger = Requests(component_backends={"main": "k"})
    plan = plan_with(rows, stronger, embedder=Requests(**{field: "t"}), model=SEEING)
    assert plan.phase("decode").kernel == "k"


def test_a_wish_that_is_not_installed_is_no_error_beside_the_main_component() -> None:
    """The embedder's kernel is not here, the operator's main component does not need it: the encoder has its own."""
    operator, embedder = Requests(component_backends={"main": "k"}), Requests(attention_backend="fa3")
    plan = plan_with([MAIN, ENC], operator, embedder=embedder, model=SEEING)
    assert groups_of(plan)["vision"].kernel == "enc"
    assert "'fa3' cannot serve it" in texts_of(plan, "changed")[0]
