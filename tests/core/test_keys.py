"""What a key stands for, and whose word that is."""

from __future__ import annotations

import pytest

from backstamp.declarations import Alias
from backstamp.errors import AliasConflict, ForeignAlias, NotInstalled, Refused, UnknownKey
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import plan_with, texts_of

OWNER = fake_plugin("owner", [kernel("k", priority=10), kernel("best", priority=90)])
FOREIGN = Alias(key="theirs", kernels=("k",))
STRANGER = fake_plugin("acme", [kernel("own")], [FOREIGN])
LEFT = fake_plugin("left", [kernel("same", priority=60)])
RIGHT = fake_plugin("right", [kernel("same", priority=70)])


def ask(key: str, *plugins: object, policy: Policy | None = None) -> Plan:
    """Ask for a key."""
    return plan_with(plugins, Requests(attention_backend=key), policy=policy)  # type: ignore[arg-type]


def test_an_alias_of_another_distributions_kernel_is_refused() -> None:
    """Installing is not consenting: the error names both distributions and how to accept it."""
    with pytest.raises(ForeignAlias) as caught:
        ask("theirs", OWNER, STRANGER)
    assert "k of fake-owner" in caught.value.found
    assert "fake-acme" in caught.value.who
    assert "fake-acme:theirs" in caught.value.fix


def test_the_operator_accepts_it_by_naming_the_distribution() -> None:
    """`distribution:key` is the operator's own word."""
    assert ask("fake-acme:theirs", OWNER, STRANGER).phase("decode").kernel == "k"


def test_the_operator_accepts_it_by_allowing_the_distribution() -> None:
    """So is --allow."""
    policy = Policy(allow=frozenset({"fake-acme"}))
    assert ask("theirs", OWNER, STRANGER, policy=policy).phase("decode").kernel == "k"


def test_a_first_party_alias_may_stand_for_anybodys_kernel() -> None:
    """hybrid_linear_attn lists kernels of many plugins."""
    ours = fake_plugin("linear", [kernel("own")], [FOREIGN], distribution="backstamp-linear-attn")
    assert ask("theirs", OWNER, ours).phase("decode").kernel == "k"


def test_an_alias_of_kernels_nobody_has_is_not_foreign() -> None:
    """An absent kernel has no owner to speak for it."""
    with pytest.raises(NotInstalled, match="'theirs'"):
        ask("theirs", STRANGER)


def test_the_wrong_distribution_before_a_key_is_unknown() -> None:
    """The error says whose it is."""
    with pytest.raises(UnknownKey, match="k is fake-owner's"):
        ask("fake-acme:k", OWNER, STRANGER)


def test_a_contested_name_alone_is_a_conflict() -> None:
    """Both owners are named; every other key still resolves."""
    with pytest.raises(AliasConflict, match="fake-left, fake-right"):
        ask("same", LEFT, RIGHT, OWNER)
    assert ask("k", LEFT, RIGHT, OWNER).phase("decode").kernel == "k"


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_contested_name_with_its_distribution_binds_that_side(side: str) -> None:
    """The stamp's name is the bare one; the plugin says which."""
    row = ask(f"fake-{side}:same", LEFT, RIGHT).phase("decode")
    assert row.kernel == "same"
    assert row.plugin is not None
    assert row.plugin.distribution == f"fake-{side}"


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_policy_may_choose_a_side_once_for_all(side: str) -> None:
    """--duplicate: the bare name means that side, no warning is left, and auto may take it."""
    policy = Policy(duplicates=frozenset({f"fake-{side}:same"}))
    plan = ask("same", LEFT, RIGHT, policy=policy)
    assert plan.phase("decode").plugin is not None
    assert plan.phase("decode").plugin.distribution == f"fake-{side}"
    assert texts_of(plan, "shadowed") == []
    auto = plan_with([LEFT, RIGHT], policy=policy)
    assert auto.phase("decode").plugin == plan.phase("decode").plugin


def test_a_contested_kernel_behind_an_alias_is_its_own_distributions() -> None:
    """An alias means the kernel its own distribution ships."""
    with_alias = fake_plugin("left", [kernel("same")], [Alias(key="mine", kernels=("same",))])
    row = ask("mine", with_alias, RIGHT).phase("decode")
    assert row.plugin is not None
    assert row.plugin.distribution == "fake-left"


def test_a_key_without_a_list_for_this_phase_is_refused() -> None:
    """by_phase may leave a phase out; the error names it."""
    half = fake_plugin("p", [kernel("a")], [Alias(key="half", kernels=(), by_phase={"decode": ("a",)})])
    with pytest.raises(Refused, match="a key for prefill"):
        ask("half", half)
