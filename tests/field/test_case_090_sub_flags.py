"""Case 90, InferenceX #1011: sub-flags of the sparse kernel need their parent in force, and say so where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.construction import RunnerShape, build
from backstamp.declarations import Alias
from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.resolving import kernel
from tests.scenes import DENSE, MLA, SPARSE, SPARSE_MLA, model_with, plan_with

DSA = kernel("dsa", priority=40, **SPARSE_MLA)
FLASHINFER = kernel("flashinfer", priority=90)
SPARSE_FLASHINFER = kernel("flashinfer", priority=90, **SPARSE_MLA)
NSA = Alias(key="nsa", kernels=("dsa",), deprecated="dsa")
ALL = fake_plugin("p", [DSA, FLASHINFER, kernel("latent", **MLA)], [NSA])
SUB = Requests(dsa_prefill_backend="trtllm", dsa_decode_backend="trtllm")
MODEL = model_with((4, SPARSE), name="sparse")
ONE = [pytest.param({"dsa_prefill_backend": None}, id="decode-only"), pytest.param({}, id="both")]


@pytest.mark.parametrize("sub", ONE)
def test_a_dense_model_with_sub_flags_is_an_error(sub: dict[str, None]) -> None:
    """InferenceX #1011: the flags are unused, and the kernel in force is named."""
    with pytest.raises(ConflictingRequest) as caught:
        plan_with([ALL], replace(SUB, **sub))
    assert "--dsa-decode-backend" in caught.value.who
    assert "served by flashinfer" in caught.value.found


@pytest.mark.parametrize("sub", ONE)
def test_a_sparse_model_with_sub_flags_has_the_parent(sub: dict[str, None]) -> None:
    """InferenceX #1011: parent unset is parent dsa in both halves, though another kernel ranks higher."""
    plan = plan_with([DSA, SPARSE_FLASHINFER], replace(SUB, **sub), model=MODEL)
    assert {(row.kernel, row.source) for row in plan.running} == {("dsa", "operator")}
    assert plan_with([DSA, SPARSE_FLASHINFER], model=MODEL).phase("decode").kernel == "flashinfer"


@pytest.mark.parametrize("flag", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
@pytest.mark.parametrize("other", [SPARSE_FLASHINFER, FLASHINFER], ids=["could-serve", "could-not"])
def test_another_parent_beside_sub_flags_is_a_conflict(flag: str, other: object) -> None:
    """InferenceX #1011: both settings are named, whether or not the other kernel could have served the model."""
    with pytest.raises(ConflictingRequest) as caught:
        plan_with([DSA, other], replace(SUB, **{flag: "flashinfer"}), model=MODEL)
    assert "--dsa-prefill-backend" in caught.value.message
    assert "flashinfer" in caught.value.found


@pytest.mark.parametrize("parent", ["dsa", "nsa"])
def test_the_parent_by_any_of_its_keys_is_the_parent(parent: str) -> None:
    """An alias of dsa is dsa."""
    plan = plan_with([ALL], replace(SUB, attention_backend=parent), model=MODEL)
    assert {row.kernel for row in plan.running} == {"dsa"}


def test_the_embedders_parent_is_a_conflict_too() -> None:
    """Whoever set the parent, sub-flags are not dropped."""
    with pytest.raises(ConflictingRequest):
        plan_with([DSA, SPARSE_FLASHINFER], SUB, embedder=Requests(attention_backend="flashinfer"), model=MODEL)


def test_sub_flags_of_the_target_do_not_stop_a_dense_draft() -> None:
    """One launch, two runners: the flags are about the sparse target."""
    asked = replace(SUB, speculative_algorithm="EAGLE3")
    assert plan_with([ALL], asked, model=model_with((1, DENSE)), role="draft").phase("prefill").kernel == "flashinfer"


def test_linear_sub_flags_on_a_model_without_linear_layers_are_an_error() -> None:
    """The same kind in the linear slot."""
    with pytest.raises(ConflictingRequest, match=r"--linear-attn-decode-backend.*linear-attention layers"):
        plan_with([ALL], Requests(linear_attn_decode_backend="triton"))


def test_what_was_asked_reaches_the_kernel_and_no_other() -> None:
    """InferenceX #1011: a sub-flag that nobody reads is a flag that was ignored."""
    plan = plan_with([ALL], SUB, model=MODEL)
    asked = {"dsa_decode_backend": "trtllm", "dsa_prefill_backend": "trtllm"}
    assert dict(plan.sub_settings) == asked
    built = build(plan, RunnerShape(), catalogue_of(ALL), load=recording_factory)
    assert built.serving_attention_backend("decode").request.sub_settings == asked
    other = replace(plan, sub_settings=(("flashmla_x", "y"),))
    built = build(other, RunnerShape(), catalogue_of(ALL), load=recording_factory)
    assert built.serving_attention_backend("decode").request.sub_settings == {}
