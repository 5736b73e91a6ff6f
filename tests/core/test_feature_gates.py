"""Optimisations that are on by default on their own archs."""

from __future__ import annotations

import pytest

from backstamp.declarations import ANY, FeatureDefault
from backstamp.errors import BadInput
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import plan_with, texts_of

ROWS = [FeatureDefault(feature="z", archs=("9.0",)), FeatureDefault(feature="a", archs=ANY, device="any")]
OURS = fake_plugin("v", feature_defaults=ROWS, distribution="backstamp-vllm")


def test_features_are_listed_in_name_order() -> None:
    """Whatever order they were declared in."""
    assert [item.feature for item in plan_with([kernel("k"), OURS]).features] == ["a", "z"]


def test_a_feature_of_any_device_is_on_everywhere() -> None:
    """An open list is written out."""
    amd = kernel("k", device="rocm", archs=("gfx942",))
    plan = plan_with([amd, OURS], host="mi300x")
    assert [(item.feature, item.on) for item in plan.features] == [("a", True), ("z", False)]


def test_a_feature_nobody_declares_is_refused() -> None:
    """With the nearest name, and what is declared."""
    rows = [ROWS[1], FeatureDefault(feature="fuse", archs=ANY)]
    fuse = fake_plugin("v", feature_defaults=rows, distribution="backstamp-vllm")
    with pytest.raises(BadInput, match=r"one of a, fuse.*Did you mean 'fuse'"):
        plan_with([kernel("k"), fuse], Requests(features={"fused": True}))
    with pytest.raises(BadInput, match="one of those a plugin declares; none does"):
        plan_with([kernel("k")], Requests(features={"fuse": False}))


def test_without_features_a_plan_has_none() -> None:
    """Nothing declared, nothing asked."""
    assert plan_with([kernel("k")]).features == ()


def test_a_feature_two_distributions_bound_differently_is_nobodys() -> None:
    """Neither counts, so asking for it is asking for an unknown one."""
    other = fake_plugin("s", feature_defaults=[FeatureDefault(feature="z", archs=ANY)], distribution="backstamp-sglang")
    plan = plan_with([kernel("k"), OURS, other])
    assert [item.feature for item in plan.features] == ["a"]
    (text,) = texts_of(plan, "shadowed")
    assert "feature z on cuda: backstamp-sglang and backstamp-vllm say different things" in text


def test_an_untrusted_row_removes_no_trusted_default() -> None:
    """On the same device or on another: it is left out and told, unless the operator allows it."""
    for device in ("cuda", "rocm"):
        row = FeatureDefault(feature="z", archs=ANY, device=device)  # type: ignore[arg-type]
        plugins = [kernel("k"), OURS, fake_plugin("acme", feature_defaults=[row])]
        plan = plan_with(plugins)
        assert ("z", True, "runs on SM90 (9.0)") in [(item.feature, item.on, item.reason) for item in plan.features]
        assert "fake-acme says otherwise where feature z runs" in texts_of(plan, "untrusted")[0]
    allowed = plan_with(plugins, policy=Policy(allow=frozenset({"fake-acme"})))
    assert texts_of(allowed, "untrusted") == []


def test_an_untrusted_row_like_a_trusted_one_needs_no_word() -> None:
    """It says nothing else."""
    plan = plan_with([kernel("k"), OURS, fake_plugin("acme", feature_defaults=[ROWS[0]])])
    assert [warning.code for warning in plan.warnings] == []


def test_one_plugin_may_speak_of_one_feature_on_two_devices() -> None:
    """It does not contradict itself; each host is held to the row of its own device."""
    rows = [FeatureDefault(feature="f", archs=("9.0",)), FeatureDefault(feature="f", archs=ANY, device="rocm")]
    both = fake_plugin("v", feature_defaults=rows, distribution="backstamp-vllm")
    amd = kernel("k", device="rocm", archs=("gfx942",))
    for host, on in (("h100", True), ("mi300x", True), ("b200", False)):
        plan = plan_with([kernel("k", archs=("9.0", "10.0")), amd, both], host=host)
        assert [(item.feature, item.on) for item in plan.features] == [("f", on)]
    assert plan.features[0].reason.startswith("needs cuda SM90 (9.0) or rocm any, got")
    assert texts_of(plan, "shadowed") == []


def test_a_row_about_a_device_stands_before_one_about_any() -> None:
    """The closer word counts."""
    rows = [FeatureDefault(feature="f", archs=("10.0",)), FeatureDefault(feature="f", archs=ANY, device="any")]
    plan = plan_with([kernel("k"), fake_plugin("v", feature_defaults=rows, distribution="backstamp-vllm")])
    assert [(item.feature, item.on) for item in plan.features] == [("f", False)]
