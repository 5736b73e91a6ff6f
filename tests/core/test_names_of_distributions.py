"""A distribution's name is compared as packaging compares it: My_Dist and my-dist are one."""

from __future__ import annotations

import pytest

from backstamp.engine import EngineFacts
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel

OURS = fake_plugin("ours", [kernel("same"), kernel("ours", priority=10)], distribution="My_Dist.Kernels")
THEIRS = fake_plugin("theirs", [kernel("same"), kernel("theirs", priority=90)], distribution="other")


def plan_with(policy: Policy, key: str | None = None) -> Plan:
    """Resolve between two distributions, one of them with a name of many spellings."""
    launch = make_launch(Requests(attention_backend=key), policy=policy)
    return resolve(launch, EngineFacts(), default_model(), described_host("h100"), catalogue_of(OURS, THEIRS))


@pytest.mark.parametrize("name", ["My_Dist.Kernels", "my-dist-kernels", "MY.DIST_KERNELS"])
def test_every_spelling_of_a_distribution_is_the_distribution(name: str) -> None:
    """In allow and deny lists, in keys, and where the policy says whose a contested name is."""
    allowed = plan_with(Policy(allow=frozenset({name})))
    assert allowed.phase("decode").kernel == "ours"
    assert "unmatched" not in {warning.code for warning in allowed.warnings}
    assert plan_with(Policy(deny=frozenset({name}))).phase("decode").kernel == "theirs"
    for plan in (
        plan_with(Policy(), f"{name}:same"),
        plan_with(Policy(), f"{name}:ours"),
        plan_with(Policy(duplicates=frozenset({f"{name}:same"})), "same"),
    ):
        assert plan.phase("decode").plugin.distribution == "My_Dist.Kernels"
