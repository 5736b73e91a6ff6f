"""Case 64, flashinfer #3044 and transformers #43060: an unreadable version is a reason, never an exception."""

from __future__ import annotations

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, host_of, model_of, plan_on
from tests.resolving import kernel, kernels

PLUGIN = fake_plugin(
    "p",
    [
        kernel("flashinfer", requires=("flashinfer-python>=0.6",), priority=90),
        kernel("cubin", requires=("torch>=2",), companions=("flashinfer-python",), priority=80),
        kernel("triton"),
    ],
)
UNREADABLE = [
    pytest.param("N/A", id="n-a"),
    pytest.param("0.0.0+unknown", id="0.0.0-unknown"),
    pytest.param("unknown", id="unknown"),
    pytest.param("", id="empty"),
    pytest.param("None", id="the-word-none"),
    pytest.param("0.0.0", id="0.0.0"),
]


@pytest.mark.parametrize("version", UNREADABLE)
def test_a_kernel_on_an_unreadable_version_is_unavailable_and_others_are_fine(version: str) -> None:
    """flashinfer #3044: the check answers with a reason of its own, and the plan goes on."""
    host = host_of("h100", libraries=(("flashinfer-python", version), ("torch", "2.13.0")))
    plan = plan_on(host, PLUGIN)
    assert kernels(plan)["decode"] == "triton"
    (verdict,) = [item for item in plan.phase("decode").verdicts if item.kernel == "flashinfer"]
    assert verdict.code == "library_unknown"
    assert "version" in verdict.have


@pytest.mark.parametrize("version", UNREADABLE)
@pytest.mark.parametrize(
    ("requests", "role"),
    [
        pytest.param({"attention_backend": "flashinfer"}, "target", id="base"),
        pytest.param({"decode_attention_backend": "flashinfer"}, "target", id="decode"),
        pytest.param({"draft_attention_backend": "flashinfer"}, "draft", id="draft"),
    ],
)
def test_asked_for_it_is_refused_with_that_reason(version: str, requests: dict[str, str], role: str) -> None:
    """transformers #43060: an error of ours, which says what is unknown; not one out of the version parser."""
    host = host_of("h100", libraries=(("flashinfer-python", version), ("torch", "2.13.0")))
    with pytest.raises(Refused) as caught:
        plan_on(host, PLUGIN, requests=Requests(speculative_algorithm="EAGLE", **requests), role=role)
    assert caught.value.verdicts[0].code == "library_unknown"
    assert caught.value.needed == "flashinfer-python>=0.6"


@pytest.mark.parametrize("version", UNREADABLE)
def test_an_operator_may_vouch_for_it(version: str) -> None:
    """The bypass for unknown versions lets the kernel run, and the plan says which check was skipped."""
    host = host_of("h100", libraries=(("flashinfer-python", version), ("torch", "2.13.0")))
    policy = Policy(bypass=frozenset({"library_unknown"}))
    plan = plan_on(host, PLUGIN, requests=Requests(attention_backend="flashinfer"), policy=policy)
    assert (kernels(plan)["decode"], plan.bypassed) == ("flashinfer", ("library_unknown",))


@pytest.mark.parametrize("version", UNREADABLE)
def test_an_unreadable_companion_is_not_taken_for_a_match(version: str) -> None:
    """The relative: the companion's version is the unreadable one."""
    host = host_of("h100", libraries=(("flashinfer-python", version), ("torch", "2.13.0")))
    verdicts = {item.kernel: item for item in plan_on(host, PLUGIN).phase("decode").verdicts}
    assert verdicts["cubin"].code == "companion"


@pytest.mark.parametrize("version", UNREADABLE)
def test_a_linear_kernel_is_unavailable_alike(version: str) -> None:
    """The relative in the linear slot."""
    linear = [kernel("flashinfer", requires=("flashinfer-python>=0.6",), priority=90, **GDN), kernel("triton", **GDN)]
    plugin = fake_plugin("g", [*linear, kernel("full", head_dims=(256,))])
    host = host_of("h100", libraries=(("flashinfer-python", version),))
    plan = plan_on(host, plugin, model=model_of("hybrid"))
    assert plan.linear is not None
    assert plan.linear.decode.kernel == "triton"
