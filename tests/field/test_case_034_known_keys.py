"""Case 34, vllm-ascend #4197: what a plugin registers is a key; a mistyped one is answered with its near match."""

from __future__ import annotations

import pytest

from backstamp.errors import UnknownKey
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.sites import ask

CATALOGUE = catalogue_of(
    fake_plugin("ascend", [kernel("ascend", device="npu", archs=("ascend910b",))], distribution="ascend-kernels"),
    fake_plugin("plain", [kernel("plain")], distribution="plain-kernels"),
)


def test_a_plugins_key_is_accepted() -> None:
    """vllm-ascend #4197: there is no closed list of names in core."""
    assert ask(CATALOGUE, "ascend", host="ascend910b").phase("prefill").kernel == "ascend"


def test_a_mistyped_key_lists_the_known_ones_with_their_owners_and_the_near_match() -> None:
    """vllm-ascend #4197: the error holds all that is needed to mend the flag."""
    with pytest.raises(UnknownKey) as caught:
        ask(CATALOGUE, "ascned", host="ascend910b")
    assert "ascend (ascend-kernels)" in caught.value.needed
    assert "plain (plain-kernels)" in caught.value.needed
    assert "'ascend'" in caught.value.fix
