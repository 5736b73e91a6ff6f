"""Case 19, sglang #20298, #21969, #23490 and vllm #39126: a dense draft never inherits its target's MLA kernel."""

from __future__ import annotations

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.model import default_model
from backstamp.testing.fakes import fake_plugin
from tests.building import MLA, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel, kernels

PLUGIN = fake_plugin(
    "p",
    [
        kernel("trtllm_mla", archs=("10.0", "10.3"), priority=90, **MLA),
        kernel("trtllm_mha", archs=("10.0", "10.3"), priority=80),
        kernel("flashinfer", archs=("9.0", "10.0"), priority=60),
        kernel("flashinfer", archs=("9.0", "10.0"), priority=60, **MLA),
    ],
)
LATENT, DENSE = model_of("mla"), default_model()
EAGLE3 = Requests(speculative_algorithm="EAGLE3", speculative_num_steps=3)
DRAFT_PHASES = ("prefill", "draft_decode", "draft_extend")


def test_a_dense_draft_of_an_mla_target_is_resolved_on_its_own_facts() -> None:
    """sglang #20298: target trtllm_mla by auto, the draft an MHA kernel in every phase, and both build as planned."""
    target = plan_on("b200", PLUGIN, requests=EAGLE3, model=LATENT)
    assert (target.phase("decode").kernel, target.phase("decode").source) == ("trtllm_mla", "auto")
    draft = plan_on("b200", PLUGIN, requests=EAGLE3, model=DENSE, role="draft", target=target)
    assert [draft.phase(phase).kernel for phase in DRAFT_PHASES] == ["trtllm_mha"] * 3
    assert stamps_of(built_from(draft, PLUGIN)) == {phase: {"trtllm_mha"} for phase in DRAFT_PHASES}
    assert set(stamps_of(built_from(target, PLUGIN))["verify"]) == {"trtllm_mla"}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({"attention_backend": "trtllm_mla"}, id="base"),
        pytest.param({"decode_attention_backend": "trtllm_mla"}, id="decode-half"),
        pytest.param({"prefill_attention_backend": "trtllm_mla"}, id="prefill-half"),
    ],
)
def test_what_the_operator_asked_of_the_target_never_crashes_a_draft_that_cannot_run_it(asked: dict[str, str]) -> None:
    """sglang #23490: the target's flag is a preference for an unset draft, and the plan says it was left."""
    requests = Requests(speculative_algorithm="EAGLE3", **asked)
    target = plan_on("b200", PLUGIN, requests=requests, model=LATENT)
    draft = plan_on("b200", PLUGIN, requests=requests, model=DENSE, role="draft", target=target)
    assert {draft.phase(phase).kernel for phase in DRAFT_PHASES} == {"trtllm_mha"}
    assert any(warning.code == "inherited" and "trtllm_mla" in warning.text for warning in draft.warnings)


def test_an_explicit_mla_draft_kernel_is_refused_for_a_dense_draft() -> None:
    """vllm #39126: asked for, it is an error that names the model it needs, before anything is built."""
    requests = Requests(speculative_algorithm="EAGLE3", draft_attention_backend="trtllm_mla")
    with pytest.raises(Refused) as caught:
        plan_on("b200", PLUGIN, requests=requests, model=DENSE, role="draft")
    assert "needs an MLA model, got mha" in caught.value.message
    assert "'trtllm_mla'" in caught.value.who


def test_an_mla_draft_of_an_mla_target_runs_the_targets_kernel() -> None:
    """sglang #21969: where the draft can, it runs what its target runs, in all phases of both."""
    target = plan_on("b200", PLUGIN, requests=EAGLE3, model=LATENT)
    draft = plan_on("b200", PLUGIN, requests=EAGLE3, model=LATENT, role="draft", target=target)
    ran = {kernel for plan in (target, draft) for kernel in kernels(plan).values() if kernel is not None}
    assert ran == {"trtllm_mla"}


def test_an_mla_draft_of_a_dense_target_is_resolved_on_its_own_facts_too() -> None:
    """The mirror of sglang #20298: the target's MHA kernel is not forced on a latent draft."""
    target = plan_on("b200", PLUGIN, requests=EAGLE3, model=DENSE)
    draft = plan_on("b200", PLUGIN, requests=EAGLE3, model=LATENT, role="draft", target=target)
    assert kernels(target)["decode"] == "trtllm_mha"
    assert {draft.phase(phase).kernel for phase in DRAFT_PHASES} == {"trtllm_mla"}


def test_another_host_gives_the_draft_another_kernel() -> None:
    """SM90 has no trtllm kernel: target and draft each get what is declared there."""
    target = plan_on("h100", PLUGIN, requests=EAGLE3, model=LATENT)
    draft = plan_on("h100", PLUGIN, requests=EAGLE3, model=DENSE, role="draft", target=target)
    assert {draft.phase(phase).kernel for phase in DRAFT_PHASES} == {"flashinfer"}
    assert draft.phase("draft_decode").source == "inherited"
