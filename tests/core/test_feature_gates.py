"""Optimisations that are on by default on their own archs."""

from __future__ import annotations

import pytest

from backstamp.declarations import ANY, FeatureDefault
from backstamp.errors import BadInput
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import plan_with

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
    assert [item.feature for item in plan_with([kernel("k"), OURS, other]).features] == ["a"]
