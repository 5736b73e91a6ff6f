"""Case 30, vllm #30869: registering one key never replaces another, and two owners of one key are a conflict."""

from __future__ import annotations

import pytest

from backstamp.declarations import Alias
from backstamp.discovery import Found
from backstamp.errors import AliasConflict, UnknownKey
from backstamp.launch import Requests
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.building import GDN, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel

KEYS = ("custom", "torch_sdpa")
BASE = fake_plugin("base", [kernel("base")])


def asked(key: str, *plugins: Found) -> str:
    """The kernel a key is stamped as."""
    plan = plan_on("h100", *plugins, requests=Requests(attention_backend=key))
    (stamp,) = stamps_of(built_from(plan, *plugins))["decode"]
    return stamp


def test_registering_one_empty_key_leaves_the_other_empty() -> None:
    """vllm #30869: both keys start with nothing; a plugin brings custom and torch_sdpa is as unknown as before."""
    for key in KEYS:
        with pytest.raises(UnknownKey):
            asked(key, BASE)
    custom = fake_plugin("mine", [kernel("custom")])
    assert asked("custom", BASE, custom) == "custom"
    with pytest.raises(UnknownKey) as caught:
        asked("torch_sdpa", BASE, custom)
    assert "'torch_sdpa'" in caught.value.who


@pytest.mark.parametrize("with_aliases", [False, True], ids=["kernels", "aliases"])
def test_two_keys_with_equal_declarations_are_two_keys(with_aliases: bool) -> None:
    """Equal values are not one member: each key leads to its own kernel, whichever plugin came first."""
    names = [f"{key}_kernel" for key in KEYS] if with_aliases else list(KEYS)
    plugins = [
        fake_plugin(
            f"p{at}", [kernel(name)], [Alias(key=KEYS[at], kernels=(name,))] if with_aliases else [], version="1.0"
        )
        for at, name in enumerate(names)
    ]
    for order in (plugins, plugins[::-1]):
        assert [asked(key, *order) for key in KEYS] == names


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(fake_plugin("two", [kernel("custom", priority=99)]), id="kernel-against-kernel"),
        pytest.param(
            fake_plugin("two", [kernel("k")], [Alias(key="custom", kernels=("k",))]), id="alias-against-kernel"
        ),
    ],
)
def test_two_distributions_that_register_one_key_are_a_conflict(other: Found) -> None:
    """The key is poisoned and both owners are named; every other key still resolves."""
    one = fake_plugin("one", [kernel("custom"), kernel("torch_sdpa")])
    with pytest.raises(AliasConflict) as caught:
        asked("custom", one, other)
    assert "fake-one" in caught.value.found
    assert "fake-two" in caught.value.found
    assert asked("torch_sdpa", one, other) == "torch_sdpa"
    assert ("attention", "custom") in catalogue_of(other, one).conflicts


def test_a_key_of_the_other_slot_is_another_key() -> None:
    """Names never collide across slots: a linear custom leaves the attention one alone."""
    wide = {"head_dims": (256,)}
    one, two = fake_plugin("one", [kernel("custom", **wide)]), fake_plugin("two", [kernel("custom", **GDN)])
    plan = plan_on("h100", one, two, model=model_of("hybrid"))
    assert plan.phase("decode").plugin == one.plugin
    assert plan.linear is not None
    assert plan.linear.decode.plugin == two.plugin
