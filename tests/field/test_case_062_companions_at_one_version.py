"""Case 62, vllm #49804, sglang #10891, #6160, Export-Deploy #679: companions at one version, or bypassed and said."""

from __future__ import annotations

import pytest

from backstamp.errors import BadInput, Refused
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.stamp import read_stamp, steps_of
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, built_from, host_of, model_of, plan_on
from tests.resolving import kernel, kernels

LIBRARY = {"requires": ("flashinfer-python>=0.6",), "companions": ("flashinfer-cubin",)}
PLUGIN = fake_plugin("p", [kernel("flashinfer", priority=90, **LIBRARY), kernel("triton")])
APART = host_of("h100", libraries=(("flashinfer-cubin", "0.6.13"), ("flashinfer-python", "0.6.14")))
TOGETHER = host_of("h100", libraries=(("flashinfer-cubin", "0.6.14"), ("flashinfer-python", "0.6.14+cu130")))
BYPASS = Policy(bypass=frozenset({"companion"}))
ASKED = [
    pytest.param({"attention_backend": "flashinfer"}, "target", id="base"),
    pytest.param({"prefill_attention_backend": "flashinfer"}, "target", id="prefill-half"),
    pytest.param({"decode_attention_backend": "flashinfer"}, "target", id="decode-half"),
    pytest.param({"verify_attention_backend": "flashinfer"}, "target", id="verify"),
    pytest.param({"draft_attention_backend": "flashinfer"}, "draft", id="draft-flag"),
]


def test_kernels_of_companions_apart_are_unavailable_and_the_rest_resolves() -> None:
    """vllm #49804: 0.6.14 beside 0.6.13 refuses flashinfer with that reason; triton still runs."""
    plan = plan_on(APART, PLUGIN)
    assert kernels(plan)["decode"] == "triton"
    (verdict,) = [item for item in plan.phase("decode").verdicts if item.kernel == "flashinfer"]
    assert (verdict.code, verdict.have) == ("companion", "flashinfer-cubin 0.6.13")
    assert "0.6.14" in verdict.wanted


@pytest.mark.parametrize(("requests", "role"), ASKED)
def test_asked_for_in_any_flag_it_is_an_error_with_both_versions(requests: dict[str, str], role: str) -> None:
    """sglang #10891: the check fires equally for the base, a split half, verify and the draft."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    with pytest.raises(Refused) as caught:
        plan_on(APART, PLUGIN, requests=asked, role=role)
    assert "flashinfer-cubin 0.6.14 beside flashinfer-python 0.6.14" in caught.value.needed
    assert "flashinfer-cubin 0.6.13" in caught.value.found
    assert "--bypass companion" in caught.value.fix
    assert plan_on(TOGETHER, PLUGIN, requests=asked, role=role).running


@pytest.mark.parametrize(("requests", "role"), ASKED)
def test_the_bypass_is_recorded_in_the_stamp(requests: dict[str, str], role: str) -> None:
    """sglang #6160: allowed when the operator says so, and every object and step carries what was skipped."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    plan = plan_on(APART, PLUGIN, requests=asked, role=role, policy=BYPASS)
    assert plan.bypassed == ("companion",)
    objects = list(built_from(plan, PLUGIN).objects.values())
    stamps = [read_stamp(item) for built in objects for item in (built, *_steps(built))]
    flashinfer = [stamp for stamp in stamps if stamp.kernel == "flashinfer"]
    assert flashinfer
    assert {stamp.skipped for stamp in flashinfer} == {("companion",)}
    assert flashinfer[0].as_json(flashinfer[0].phases[0])["skipped"] == ["companion"]


def _steps(built: object) -> list[object]:
    return list(steps_of(built)) if hasattr(built, "attn_backends") else []


def test_nothing_is_recorded_where_nothing_was_bypassed() -> None:
    """The stamp of an ordinary build has no skipped check."""
    plan = plan_on(TOGETHER, PLUGIN, requests=Requests(attention_backend="flashinfer"))
    (stamp,) = {read_stamp(built) for built in built_from(plan, PLUGIN).objects.values()}
    assert (stamp.skipped, stamp.library) == ((), ("flashinfer-python", "0.6.14+cu130"))


def test_a_bypass_skips_its_own_check_and_no_other() -> None:
    """A missing library is not a version; the machine's checks have no switch at all."""
    alone = host_of("h100", libraries=(("flashinfer-cubin", "0.6.13"),))
    asked = Requests(attention_backend="flashinfer")
    with pytest.raises(Refused, match="not installed"):
        plan_on(alone, PLUGIN, requests=asked, policy=BYPASS)
    with pytest.raises(BadInput, match="--bypass"):
        Policy(bypass=frozenset({"arch"}))


def test_a_linear_kernel_with_companions_apart_is_unavailable_too() -> None:
    """The relative in the linear slot: refused when asked for, passed over by auto."""
    plugin = fake_plugin(
        "g",
        [
            kernel("flashinfer", priority=90, **LIBRARY, **GDN),
            kernel("triton", **GDN),
            kernel("full", head_dims=(256,)),
        ],
    )
    model = model_of("hybrid")
    linear = plan_on(APART, plugin, model=model).linear
    assert linear is not None
    assert linear.decode.kernel == "triton"
    with pytest.raises(Refused, match=r"0\.6\.13"):
        plan_on(APART, plugin, model=model, requests=Requests(linear_attn_prefill_backend="flashinfer"))
