"""Case 40, sglang #14842, #9140, #18758 and flashinfer #3263: SM120 is not SM100, and archs are declared by phase."""

from __future__ import annotations

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, MLA, SPEC, model_of, plan_on
from tests.resolving import kernel, kernels

B = ("10.0", "10.3")
DENSE = fake_plugin(
    "dense", [kernel("trtllm_mha", archs=B, priority=90), kernel("flashinfer", archs=("9.0", "10.0", "12.0"))]
)
LATENT = fake_plugin(
    "latent",
    [
        kernel("m", archs=(*B, "12.0"), phases=frozenset({"decode"}), priority=90, **MLA),
        kernel("m", archs=B, phases=frozenset({"prefill", "verify"}), priority=90, **MLA),
        kernel("flashinfer", archs=("12.0",), **MLA),
    ],
)


def test_auto_on_sm120_never_takes_a_kernel_of_sm100() -> None:
    """sglang #14842: both are called Blackwell, and only one has the images."""
    assert kernels(plan_on("rtx5090", DENSE, requests=SPEC)) | {} == {
        "prefill": "flashinfer", "decode": "flashinfer", "verify": "flashinfer",
        "draft_decode": None, "draft_extend": None,
    }  # fmt: skip
    assert kernels(plan_on("b200", DENSE))["decode"] == "trtllm_mha"
    assert kernels(plan_on("gb300", DENSE))["decode"] == "trtllm_mha"


@pytest.mark.parametrize(
    ("requests", "role"),
    [
        pytest.param({"attention_backend": "trtllm_mha"}, "target", id="base"),
        pytest.param({"prefill_attention_backend": "trtllm_mha"}, "target", id="prefill"),
        pytest.param({"verify_attention_backend": "trtllm_mha"}, "target", id="verify"),
        pytest.param({"draft_attention_backend": "trtllm_mha"}, "draft", id="draft"),
    ],
)
def test_asked_for_on_sm120_it_says_what_it_needs_and_what_this_is(requests: dict[str, str], role: str) -> None:
    """sglang #9140: needs SM100 or SM103, this host is SM120; in any phase, before anything is built."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    with pytest.raises(Refused) as caught:
        plan_on("rtx5090", DENSE, requests=asked, role=role)
    assert caught.value.needed == "SM100 (10.0), SM103 (10.3)"
    assert "SM120 (12.0)" in caught.value.found
    assert caught.value.verdicts[0].code == "arch"


def test_a_kernel_with_other_archs_for_prefill_is_allowed_for_decode_alone() -> None:
    """flashinfer #3263: on SM120 M decodes, and is refused for prefill."""
    model = model_of("mla")
    plan = plan_on("rtx5090", LATENT, requests=Requests(decode_attention_backend="m"), model=model)
    assert (kernels(plan)["decode"], kernels(plan)["prefill"]) == ("m", "flashinfer")
    for flag in ("prefill_attention_backend", "attention_backend"):
        with pytest.raises(Refused) as caught:
            plan_on("rtx5090", LATENT, requests=Requests(**{flag: "m"}), model=model)
        # its decode archs are no answer to a prefill request
        assert caught.value.needed == "SM100 (10.0), SM103 (10.3) for prefill"
        assert "SM120 (12.0)" in caught.value.found
    assert kernels(plan_on("b200", LATENT, requests=Requests(attention_backend="m"), model=model))["prefill"] == "m"


def test_auto_splits_the_halves_where_the_archs_do() -> None:
    """sglang #18758: nobody asked, and prefill does not follow decode into a kernel without images."""
    plan = plan_on("rtx5090", LATENT, requests=SPEC, model=model_of("mla"))
    assert [kernels(plan)[phase] for phase in ("prefill", "decode", "verify")] == ["flashinfer", "m", "flashinfer"]


def test_a_draft_gets_each_phase_by_the_same_archs() -> None:
    """The relative: draft decode follows decode's archs, draft extend follows prefill's."""
    plan = plan_on("rtx5090", LATENT, requests=SPEC, model=model_of("mla"), role="draft")
    assert (kernels(plan)["draft_decode"], kernels(plan)["draft_extend"]) == ("m", "flashinfer")


def test_linear_kernels_have_exact_archs_too() -> None:
    """The relative in the linear slot: a gated delta net of SM100 is no kernel of SM120."""
    plugin = fake_plugin(
        "g",
        [
            kernel("flashinfer", archs=B, priority=90, **GDN),
            kernel("triton", archs=("8.0",), forward_archs="any", **GDN),
            kernel("full", archs=("any",), head_dims=(256,)),
        ],
    )
    model = model_of("hybrid")
    plans = {host: plan_on(host, plugin, model=model).linear for host in ("b200", "rtx5090")}
    assert {host: linear.prefill.kernel for host, linear in plans.items() if linear is not None} == {
        "b200": "flashinfer",
        "rtx5090": "triton",
    }
    with pytest.raises(Refused, match="SM120"):
        plan_on("rtx5090", plugin, requests=Requests(linear_attn_backend="flashinfer"), model=model)
