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
    left, warnings = without_retired(launch, catalogue)
    assert left.keys == {}
    assert [warning.code for warning in warnings] == ["shadowed"]
    assert "backstamp-sglang and backstamp-vllm" in warnings[0].text
    assert any("backstamp-sglang and backstamp-vllm" in note for note in catalogue.notes)


def test_an_untrusted_tombstone_removes_no_trusted_one() -> None:
    """The trusted mapping is followed; another reading of the same value is told."""
    other = RetiredSetting(name="OLD", replacement="y", values={"1": "other"}, request="linear_attn_backend")
    trusted = fake_plugin("v", retired_settings=[SETTING], distribution="backstamp-vllm")
    catalogue = catalogue_of(fake_plugin("acme", retired_settings=[other]), trusted)
    launch, warnings = without_retired(launched({"OLD": "1"}), catalogue)
    request = launch.linear("decode")
    assert request is not None
    assert request.value == "k"
    assert [warning.code for warning in warnings] == ["untrusted", "deprecated"]
    assert "fake-acme reads OLD=1 as --linear-attn-backend other" in warnings[0].text
    same = fake_plugin("acme", retired_settings=[RetiredSetting(name="OLD", replacement="y")])
    assert [item.code for item in without_retired(launched({"OLD": "1"}), catalogue_of(same, trusted))[1]] == [
        "deprecated"
    ]


BASE = catalogue_of(
    fake_plugin(
        "v",
        retired_settings=[RetiredSetting(name="OLD", replacement="--attention-backend", values={"1": "k"})],
        distribution="backstamp-vllm",
    )
)


def test_a_mapped_value_that_every_split_flag_overrules_is_said_to_do_nothing() -> None:
    """Not "read as" a flag that decides nothing."""
    split = Requests(prefill_attention_backend="a", decode_attention_backend="b")
    launch, (warning,) = without_retired(launched({"OLD": "1"}, split), BASE)
    assert "attention_backend" not in launch.keys
    assert warning.code == "retired"
    beside = "ignored beside --prefill-attention-backend a and --decode-attention-backend b"
    assert f"OLD=1 is retired and {beside}" in warning.text


def test_a_mapped_value_still_decides_the_half_that_no_flag_names() -> None:
    """One split flag leaves the other half to it, and so do the split flags of an embedder."""
    half = Requests(prefill_attention_backend="a")
    launch, (warning,) = without_retired(launched({"OLD": "1"}, half), BASE)
    assert [request.value for request in launch.pair() if request is not None] == ["a", "k"]
    assert warning.code == "deprecated"
    both = Requests(prefill_attention_backend="a", decode_attention_backend="b")
    weaker = make_launch(Requests(), embedder=both, settings={"OLD": "1"})
    assert [item.code for item in without_retired(weaker, BASE)[1]] == ["deprecated"]


def test_a_linear_value_is_overruled_by_the_flags_of_the_phases_that_run() -> None:
    """Verify counts only where something drafts."""
    split = Requests(linear_attn_prefill_backend="a", linear_attn_decode_backend="b")
    assert [item.code for item in without_retired(launched({"OLD": "1"}, split), OURS)[1]] == ["retired"]
    drafting = Requests(linear_attn_prefill_backend="a", linear_attn_decode_backend="b", speculative_algorithm="EAGLE")
    assert [item.code for item in without_retired(launched({"OLD": "1"}, drafting), OURS)[1]] == ["deprecated"]


def test_a_mapped_value_beside_a_request_for_the_main_component_says_what_it_does_not_reach() -> None:
    """Other components may still follow it."""
    scoped = Requests(component_backends={"main": "a"})
    launch, (warning,) = without_retired(launched({"OLD": "1"}, scoped), BASE)
    assert warning.code == "retired"
    assert "does not reach component main beside --component-backend main=a" in warning.text
    assert launch.keys["attention_backend"].value == "k"
