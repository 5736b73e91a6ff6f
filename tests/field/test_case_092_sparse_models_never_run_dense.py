"""Case 92, vllm #30214 and #30227: model facts decide before a host's default; a sparse model never runs dense MLA."""

from __future__ import annotations

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import MLA, SPARSE, SPEC, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel

PLUGIN = fake_plugin(
    "p",
    [
        kernel("cutlass_mla", archs=("10.0",), priority=99, **MLA),
        kernel("flashmla_sparse", archs=("9.0", "10.0"), priority=10, **SPARSE),
    ],
)
SPARSE_MODEL, DENSE_MODEL = model_of("dsa"), model_of("mla")
FLAGS = [
    ("attention_backend", "target"),
    ("prefill_attention_backend", "target"),
    ("decode_attention_backend", "target"),
    ("verify_attention_backend", "target"),
    ("draft_attention_backend", "draft"),
]


@pytest.mark.parametrize("model", ["dsa", "glm_moe_dsa"])
@pytest.mark.parametrize("role", ["target", "draft"])
def test_auto_on_a_sparse_model_takes_the_sparse_kernel(model: str, role: str) -> None:
    """vllm #30214: on SM100 the dense default outranks it, and is no candidate at all."""
    plan = plan_on("b200", PLUGIN, requests=SPEC, model=model_of(model), role=role)
    assert set().union(*stamps_of(built_from(plan, PLUGIN)).values()) == {"flashmla_sparse"}


@pytest.mark.parametrize("role", ["target", "draft"])
def test_the_same_host_with_a_dense_model_takes_the_dense_kernel(role: str) -> None:
    """vllm #30227: the mirror; the sparse kernel does not serve dense MLA either."""
    plan = plan_on("b200", PLUGIN, requests=SPEC, model=DENSE_MODEL, role=role)
    assert {row.kernel for row in plan.running} == {"cutlass_mla"}
    with pytest.raises(Refused, match="sparse"):
        plan_on("b200", PLUGIN, requests=Requests(attention_backend="flashmla_sparse"), model=DENSE_MODEL)


@pytest.mark.parametrize(("flag", "role"), FLAGS)
def test_the_dense_kernel_asked_for_on_a_sparse_model_is_an_error(flag: str, role: str) -> None:
    """vllm #30214: refused because the model is sparse, in any flag; nothing runs dense in silence."""
    asked = Requests(speculative_algorithm="EAGLE", **{flag: "cutlass_mla"})
    with pytest.raises(Refused) as caught:
        plan_on("b200", PLUGIN, requests=asked, model=SPARSE_MODEL, role=role)
    assert "sparse" in caught.value.message
    assert caught.value.verdicts[0].code == "family"


def test_another_host_follows_the_model_too() -> None:
    """SM90 has the sparse kernel and no dense one: the dense model is an error there, the sparse one runs."""
    assert plan_on("h100", PLUGIN, model=SPARSE_MODEL).phase("decode").kernel == "flashmla_sparse"
    with pytest.raises(NoKernel) as caught:
        plan_on("h100", PLUGIN, model=DENSE_MODEL)
    assert "cutlass_mla: needs SM100 (10.0), got SM90 (9.0)" in caught.value.considered


def test_compressed_sparse_attention_is_a_third_family() -> None:
    """The relative: DeepSeek V4 runs on neither."""
    for name in ("cutlass_mla", "flashmla_sparse"):
        with pytest.raises(Refused, match="csa"):
            plan_on("b200", PLUGIN, requests=Requests(attention_backend=name), model=model_of("dsv4"))
