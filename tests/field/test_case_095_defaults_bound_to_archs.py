"""Case 95, sglang #31578: what a release switches on by default is on where its archs are, and nowhere else."""

from __future__ import annotations

import pytest

from backstamp.declarations import FeatureDefault
from backstamp.errors import BadInput, ConflictingRequest
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.plan_rows import FeaturePlan
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import CUDA, SM86, plan_with

F = FeatureDefault(feature="f", archs=("9.0", "10.0"))
ENGINE = fake_plugin("sglang", feature_defaults=[F], distribution="backstamp-sglang")
ALL = (kernel("a", archs=(*CUDA, "gfx942")), ENGINE)
ON, OFF = Requests(features={"f": True}), Requests(features={"f": False})


def feature(plan: Plan) -> FeaturePlan:
    """The one declared feature."""
    (only,) = plan.features
    return only


@pytest.mark.parametrize("host", ["rtx5090", "gb10", "gb300", SM86], ids=["sm120", "sm121", "sm103", "sm86"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_outside_its_archs_it_is_off_with_the_reason(host: object, role: str) -> None:
    """sglang #31578: the host serves, the optimisation is off, and both archs are in the reason."""
    found = feature(plan_with(ALL, host=host, role=role))
    assert (found.on, found.source) == (False, "default")
    assert found.reason.startswith("needs cuda SM90 (9.0), SM100 (10.0), got cuda SM") or (
        "SM90 (9.0), SM100 (10.0), got cuda SM" in found.reason
    )


def test_asked_for_outside_its_archs_is_an_error() -> None:
    """sglang #31578: an explicit on is refused with what it needs and what this is."""
    with pytest.raises(ConflictingRequest, match=r"--feature f=on: needs cuda SM90.*SM100.*got cuda SM120"):
        plan_with(ALL, ON, host="rtx5090")
    with pytest.raises(ConflictingRequest):
        plan_with(ALL, embedder=ON, host="rtx5090")


@pytest.mark.parametrize("host", ["h100", "b200"])
def test_on_its_archs_it_is_on(host: str) -> None:
    """sglang #31578: SM90 and SM100, nobody asked."""
    found = feature(plan_with(ALL, host=host))
    assert (found.on, found.source) == (True, "default")


@pytest.mark.parametrize("host", ["h100", "rtx5090"])
def test_switched_off_it_is_off_anywhere(host: str) -> None:
    """The operator's off needs no arch, and the plan says who said it."""
    found = feature(plan_with(ALL, OFF, embedder=ON, host=host))
    assert (found.on, found.source) == (False, "operator")


def test_another_device_with_a_like_name_is_not_meant() -> None:
    """An arch is an arch of one device."""
    rocm = kernel("r", device="rocm", archs=("gfx942",))
    like = FeatureDefault(feature="f", archs=("9.0", "gfx942"))
    engine = fake_plugin("sglang", feature_defaults=[like], distribution="backstamp-sglang")
    assert not feature(plan_with((rocm, engine), host="mi300x")).on


def test_a_feature_nobody_declares_is_refused_with_the_nearest() -> None:
    """A misspelled switch is an error, never accepted without effect."""
    with pytest.raises(BadInput, match="'ff'"):
        plan_with(ALL, Requests(features={"ff": True}))


def test_a_third_party_switches_nothing_on_by_itself() -> None:
    """Installing is not consenting: off with the reason, on when asked for or allowed."""
    stranger = fake_plugin("acme", feature_defaults=[F])
    offers = (kernel("a"), stranger)
    assert not feature(plan_with(offers)).on
    assert "fake-acme is not allowed" in feature(plan_with(offers)).reason
    assert feature(plan_with(offers, ON)).on
    assert feature(plan_with(offers, policy=Policy(allow=frozenset({"fake-acme", "fake-p"})))).on
