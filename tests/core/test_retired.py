"""Settings that no longer exist: what is said, and what they still ask for."""

from __future__ import annotations

from backstamp.declarations import RetiredSetting
from backstamp.launch import Requests, make_launch
from backstamp.policy import Policy
from backstamp.retired import without_retired
from backstamp.testing.fakes import catalogue_of, fake_plugin

SETTING = RetiredSetting(
    name="OLD", replacement="--linear-attn-backend", values={"1": "k"}, request="linear_attn_backend"
)
OURS = catalogue_of(fake_plugin("v", retired_settings=[SETTING], distribution="backstamp-vllm"))


def launched(settings: dict[str, str], operator: Requests | None = None, policy: Policy | None = None):  # type: ignore[no-untyped-def]
    """A launch with settings found."""
    return make_launch(operator or Requests(), settings=settings, policy=policy)


def test_a_launch_without_settings_is_handed_back_as_it_is() -> None:
    """Nothing found, nothing copied."""
    launch = launched({})
    assert without_retired(launch, OURS) == (launch, ())
    assert without_retired(launch, OURS)[0] is launch


def test_a_mapped_value_becomes_the_request_it_names() -> None:
    """With the setting itself as the flag, so that a refusal says what to change."""
    launch, warnings = without_retired(launched({"OLD": "1"}), OURS)
    request = launch.linear("decode")
    assert request is not None
    assert (request.value, request.source, request.setting) == ("k", "operator", "OLD")
    assert [warning.code for warning in warnings] == ["deprecated"]


def test_the_same_key_asked_for_twice_is_one_request() -> None:
    """The flag that exists stays the one named, and the old one is still told."""
    launch, warnings = without_retired(launched({"OLD": "1"}, Requests(linear_attn_backend="k")), OURS)
    request = launch.linear("decode")
    assert request is not None
    assert request.setting == "--linear-attn-backend"
    assert [warning.code for warning in warnings] == ["deprecated"]


def test_settings_are_told_in_name_order() -> None:
    """The plan's bytes do not depend on the environment's order."""
    rows = [RetiredSetting(name=name, replacement="x") for name in ("B", "A")]
    catalogue = catalogue_of(fake_plugin("v", retired_settings=rows))
    texts = [warning.text for warning in without_retired(launched({"B": "1", "A": "2"}), catalogue)[1]]
    assert [text[:3] for text in texts] == ["A=2", "B=1"]


def test_a_value_is_told_without_control_characters() -> None:
    """An environment is not to be trusted with a terminal."""
    text = without_retired(launched({"OLD": "a\x1b[31m\n::error::"}), OURS)[1][0].text
    assert "\x1b" not in text
    assert "\n" not in text
    assert "::error::" not in text


def test_two_distributions_that_map_a_setting_differently_are_not_followed() -> None:
    """What two say differently is said by neither, and the catalogue notes both."""
    other = RetiredSetting(name="OLD", replacement="y", values={"1": "other"})
    found = [fake_plugin("s", retired_settings=[other], distribution="backstamp-sglang")]
    found.append(fake_plugin("v", retired_settings=[SETTING], distribution="backstamp-vllm"))
    catalogue = catalogue_of(*found)
    launch = launched({"OLD": "1"})
    assert without_retired(launch, catalogue)[0].keys == {}
    assert any("backstamp-sglang and backstamp-vllm" in note for note in catalogue.notes)
