"""Case 1, vllm #50292 and sglang #1380: a retired setting is told, and mapped where it still means something."""

from __future__ import annotations

import pytest

from backstamp.declarations import RetiredSetting
from backstamp.errors import StrictViolation
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import CUDA, SM86, plan_with, texts_of

FA2, TRITON = kernel("fa2", archs=CUDA, priority=60), kernel("triton", archs=CUDA)
OLD = RetiredSetting(name="OLD", replacement="--attention-backend")
DISABLE = RetiredSetting(
    name="disable_flashinfer", replacement="--attention-backend triton", values={"True": "triton", "1": "triton"}
)
HALF = RetiredSetting(
    name="OLD_DECODE",
    replacement="--decode-attention-backend",
    values={"triton": "triton"},
    request="decode_attention_backend",
)
ENGINE = fake_plugin("vllm", retired_settings=[OLD, DISABLE, HALF], distribution="backstamp-vllm")
ALL = (FA2, TRITON, ENGINE)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_retired_setting_changes_nothing_and_is_told(role: str) -> None:
    """vllm #50292: OLD=triton resolves as if unset, and the plan names OLD, the ignored value and what to set."""
    plan = plan_with(ALL, settings={"OLD": "triton"}, host=SM86, role=role)
    assert plan.phase("prefill").kernel == "fa2"
    (text,) = texts_of(plan, "retired")
    assert "OLD=triton" in text
    assert "ignored" in text
    assert "--attention-backend" in text


def test_strict_mode_refuses_a_retired_setting() -> None:
    """vllm #50292: strict turns the warning into an error that says the same."""
    with pytest.raises(StrictViolation, match=r"OLD=triton.*--attention-backend"):
        plan_with(ALL, settings={"OLD": "triton"}, host=SM86, policy=Policy(strict=True))


@pytest.mark.parametrize("value", ["True", "1"])
def test_a_retired_flag_with_a_mapping_still_asks(value: str) -> None:
    """sglang #1380: disable_flashinfer=True is triton, asked for by the operator, with a deprecation warning."""
    plan = plan_with(ALL, settings={"disable_flashinfer": value}, host=SM86)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("triton", "operator")
    (text,) = texts_of(plan, "deprecated")
    assert "disable_flashinfer" in text
    assert "--attention-backend triton" in text


def test_a_retired_split_flag_asks_for_its_half_only() -> None:
    """The same kind, one half: the other half stays with auto."""
    plan = plan_with(ALL, settings={"OLD_DECODE": "triton"}, host=SM86)
    assert (plan.phase("prefill").kernel, plan.phase("decode").kernel) == ("fa2", "triton")


def test_a_mapped_value_yields_to_the_operators_own_flag_and_says_so() -> None:
    """sglang #1380: two words of one operator; the flag that exists wins, the other is told as ignored."""
    asked = Requests(attention_backend="fa2")
    plan = plan_with(ALL, asked, settings={"disable_flashinfer": "True"}, host=SM86)
    assert plan.phase("decode").kernel == "fa2"
    assert "ignored beside --attention-backend fa2" in texts_of(plan, "retired")[0]


def test_a_mapped_value_outranks_the_embedder() -> None:
    """A retired flag is still the operator speaking."""
    embedder = Requests(attention_backend="fa2")
    plan = plan_with(ALL, embedder=embedder, settings={"disable_flashinfer": "True"}, host=SM86)
    assert plan.phase("decode").kernel == "triton"


@pytest.mark.parametrize("setting", ["OLD", "disable_flashinfer"])
def test_no_retired_setting_is_accepted_without_effect_and_without_a_word(setting: str) -> None:
    """vllm #50292: whatever its value, the plan names the setting."""
    plan = plan_with(ALL, settings={setting: "False"}, host=SM86)
    assert any(setting in warning.text for warning in plan.warnings)


def test_a_setting_nobody_retired_is_left_alone() -> None:
    """Environments are full of other people's names."""
    assert plan_with(ALL, settings={"PATH": "x"}, host=SM86).warnings == plan_with(ALL, host=SM86).warnings


def test_a_third_party_cannot_map_a_setting_to_a_kernel() -> None:
    """Installing is not consenting: its tombstone is told, its mapping is not followed unless allowed."""
    stranger = fake_plugin("acme", retired_settings=[DISABLE])
    plan = plan_with((FA2, TRITON, stranger), settings={"disable_flashinfer": "True"}, host=SM86)
    assert plan.phase("decode").kernel == "fa2"
    assert "disable_flashinfer=True" in texts_of(plan, "retired")[0]
    allowed = Policy(allow=frozenset({"fake-acme", "fake-p"}))
    trusted = plan_with((FA2, TRITON, stranger), settings={"disable_flashinfer": "True"}, host=SM86, policy=allowed)
    assert trusted.phase("decode").kernel == "triton"
