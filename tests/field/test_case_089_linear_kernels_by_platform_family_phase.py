"""Case 89, sglang #40414 and #21388: an outside vendor supplies one linear kernel for a platform, family and phase."""

from __future__ import annotations

import pytest

from backstamp.declarations import Family
from backstamp.discovery import Found
from backstamp.launch import Requests
from backstamp.plan import LinearPlan
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, KDA, MLA, model_of, plan_on
from tests.resolving import kernel

ANYWHERE = {"device": "any", "archs": ("any",)}
BASE = fake_plugin(
    "base",
    [
        kernel("torch_native", head_dims=(256,), **ANYWHERE),
        kernel("torch_native", **ANYWHERE, **MLA),
        kernel("triton", **ANYWHERE, **GDN),
        kernel("triton", **ANYWHERE, **KDA),
    ],
)


def vendor(phase: str, family: Family = "kda") -> Found:
    """(npu, family, phase) and nothing else, ahead of what is there."""
    rows = {"kda": KDA, "gdn": GDN}[family]
    offer = kernel(
        "ascend_linear",
        device="npu",
        archs=("ascend910b",),
        phases=frozenset({phase}),
        draft_phases=frozenset(),
        priority=99,
        **rows,
    )
    return fake_plugin("vendor", [offer])


def linear_on(host: str, model: str, *plugins: Found, **requests: str) -> LinearPlan:
    """The linear slot of one model on one host."""
    asked = Requests(speculative_algorithm="EAGLE", **requests)
    linear = plan_on(host, BASE, *plugins, requests=asked, model=model_of(model)).linear
    assert linear is not None
    return linear


def names(linear: LinearPlan) -> dict[str, str | None]:
    """The kernel of each linear phase."""
    return {row.phase: row.kernel for row in (linear.prefill, linear.decode, linear.verify)}


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize(("family", "model"), [("kda", "kda"), ("gdn", "hybrid")])
def test_the_plugins_phase_is_its_own_and_the_others_are_as_before(phase: str, family: Family, model: str) -> None:
    """sglang #40414: NPU and KDA: decode from the plugin, prefill as before; and so for each family and phase."""
    before = names(linear_on("ascend910b", model))
    after = names(linear_on("ascend910b", model, vendor(phase, family)))
    assert before == {"prefill": "triton", "decode": "triton", "verify": "triton"}
    assert after == {**before, phase: "ascend_linear"}


def test_another_family_is_unaffected() -> None:
    """sglang #21388: the vendor's KDA kernel is no GDN kernel; the plan says why."""
    linear = linear_on("ascend910b", "hybrid", vendor("decode"))
    assert names(linear) == {"prefill": "triton", "decode": "triton", "verify": "triton"}
    assert [item.code for item in linear.decode.verdicts if item.kernel == "ascend_linear"] == ["family"]


@pytest.mark.parametrize("host", ["h100", "b200", "mi300x", "epyc"])
def test_another_platform_is_unaffected(host: str) -> None:
    """A CUDA host resolves what it resolved before, and so do the others."""
    linear = linear_on(host, "kda", vendor("decode"))
    assert names(linear) == names(linear_on(host, "kda"))
    assert [item.code for item in linear.decode.verdicts if item.kernel == "ascend_linear"] == ["device"]


def test_the_attention_of_the_model_is_unaffected() -> None:
    """The relative: a linear kernel is no candidate of the attention slot, whatever its name."""
    requests = Requests(speculative_algorithm="EAGLE")
    plans = [
        plan_on("ascend910b", BASE, *more, requests=requests, model=model_of("kda"))
        for more in ((), (vendor("decode"),))
    ]
    assert [row.kernel for row in plans[0].phases] == [row.kernel for row in plans[1].phases]
    assert {item.kernel for item in plans[1].phase("decode").verdicts} == {"torch_native"}


def test_it_is_asked_for_by_its_phase_flag() -> None:
    """The vendor's kernel is a key like any other; the base flag would need every phase."""
    linear = linear_on("ascend910b", "kda", vendor("decode"), linear_attn_decode_backend="ascend_linear")
    assert (linear.decode.kernel, linear.decode.source) == ("ascend_linear", "operator")
