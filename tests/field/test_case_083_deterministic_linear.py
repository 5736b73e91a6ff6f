"""Case 83, sglang #35632, #34859 and vllm #45819: deterministic mode picks no batch-sensitive linear kernel."""

from __future__ import annotations

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.plan import LinearPlan
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, KDA, MLA, model_of, plan_on
from tests.resolving import kernel

SAME = {"deterministic": True, "alignment_tokens": 1}
FULL = [
    kernel("full", head_dims=(256,), **SAME),
    kernel("full", **MLA, **SAME),
]
ROWS = [
    *(kernel("flashinfer", priority=90, **family) for family in (GDN, KDA)),
    *(kernel("triton", deterministic=True, **family) for family in (GDN, KDA)),
]
PLUGIN = fake_plugin("p", [*FULL, *ROWS])
MODELS = [pytest.param("hybrid", id="gdn"), pytest.param("kda", id="kda")]


def linear_of(model: str, deterministic: bool, **requests: str) -> LinearPlan:
    """The linear slot on SM90."""
    asked = Requests(deterministic=deterministic, speculative_algorithm="EAGLE", **requests)
    linear = plan_on("h100", PLUGIN, requests=asked, model=model_of(model)).linear
    assert linear is not None
    return linear


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_the_mode_decides_between_them(model: str, phase: str) -> None:
    """sglang #35632: mode on, triton, in prefill as in every other phase; mode off, flashinfer."""
    assert getattr(linear_of(model, True), phase).kernel == "triton"
    assert getattr(linear_of(model, False), phase).kernel == "flashinfer"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "flag",
    ["linear_attn_backend", "linear_attn_prefill_backend", "linear_attn_decode_backend", "linear_attn_verify_backend"],
)
def test_an_explicit_batch_sensitive_kernel_is_an_error_in_this_mode(model: str, flag: str) -> None:
    """sglang #34859: asked for in any flag; nothing is swapped in silence. Off, it binds."""
    with pytest.raises(Refused) as caught:
        linear_of(model, True, **{flag: "flashinfer"})
    assert caught.value.verdicts[0].code == "deterministic"
    assert "'flashinfer'" in caught.value.who
    assert linear_of(model, False, **{flag: "flashinfer"})


def test_the_plan_says_why_the_faster_one_is_passed_over() -> None:
    """vllm #45819: the verdict is in the plan."""
    verdicts = {item.kernel: item for item in linear_of("hybrid", True).prefill.verdicts}
    assert verdicts["flashinfer"].code == "deterministic"


def test_attention_is_held_to_the_same_mode() -> None:
    """The relative in the attention slot: a kernel that is silent about determinism is refused in this mode."""
    plugin = fake_plugin("p", [kernel("fast", priority=90), kernel("same_bits", **SAME)])
    for on, name in ((True, "same_bits"), (False, "fast")):
        plan = plan_on("h100", plugin, requests=Requests(deterministic=on))
        assert {row.kernel for row in plan.running} == {name}
    with pytest.raises(NoKernel, match="deterministic"):
        plan_on("h100", fake_plugin("p", [kernel("fast")]), requests=Requests(deterministic=True))
