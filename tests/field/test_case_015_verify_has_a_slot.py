"""Case 15, sglang #32317, #9981 and #9330: verify is a phase of its own, and where it comes from is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.stamp import read_stamp
from tests.resolving import kernel
from tests.scenes import CUDA, LATENT, MLA, built_with, model_with, plan_with, texts_of

FLASHINFER = kernel("flashinfer", archs=CUDA, inputs=frozenset({"host_lens"}), **MLA)
TRTLLM = kernel("trtllm_mla", archs=("10.0", "10.3"), **MLA)
MODEL = model_with((8, LATENT))
SPLIT = Requests(
    prefill_attention_backend="flashinfer", decode_attention_backend="trtllm_mla", speculative_algorithm="EAGLE"
)
EXPLICIT = replace(SPLIT, verify_attention_backend="trtllm_mla")


def test_an_explicit_verify_kernel_is_the_verify_kernel() -> None:
    """sglang #32317 (a): its own slot, source operator, and no sync warning."""
    plan = plan_with([FLASHINFER, TRTLLM], EXPLICIT, host="b200", model=MODEL)
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == ("trtllm_mla", "operator")
    assert texts_of(plan, "host_sync") == []


def test_unset_is_the_documented_default_and_its_cost_is_told() -> None:
    """sglang #9981 (b): the prefill kernel, source default, with the sync each step it brings."""
    plan = plan_with([FLASHINFER, TRTLLM], SPLIT, host="b200", model=MODEL)
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == ("flashinfer", "default")
    (text,) = texts_of(plan, "host_sync")
    assert "verify: flashinfer" in text
    assert "each step" in text


@pytest.mark.parametrize(("mode", "wanted"), [("prefill", "flashinfer"), ("decode", "trtllm_mla")])
def test_a_mode_names_a_half_and_its_cost_is_told_too(mode: str, wanted: str) -> None:
    """sglang #32317: a mode switch names a phase, not a kernel, so the kernel it leads to is shown with its sync."""
    asked = replace(SPLIT, speculative_attention_mode=mode)
    plan = plan_with([FLASHINFER, TRTLLM], asked, host="b200", model=MODEL)
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == (wanted, f"mode {mode}")
    assert bool(texts_of(plan, "host_sync")) == (wanted == "flashinfer")


def test_an_input_needed_in_one_phase_alone_is_a_sync_there_alone() -> None:
    """Declared for prefill only, lengths on the host cost nothing in verify."""
    once = kernel("flashinfer", archs=CUDA, phase_inputs={"prefill": frozenset({"host_lens"})}, **MLA)
    assert texts_of(plan_with([once, TRTLLM], SPLIT, host="b200", model=MODEL), "host_sync") == []
    verify = replace(once, phase_inputs={"verify": frozenset({"host_lens"})})
    assert len(texts_of(plan_with([verify, TRTLLM], SPLIT, host="b200", model=MODEL), "host_sync")) == 1


def test_a_draft_loop_that_inherits_a_sync_is_told_of_it() -> None:
    """The same kind in the draft role: the loop's kernel came from the target's half, nobody named it for the draft."""
    asked = Requests(attention_backend="flashinfer", speculative_algorithm="EAGLE", speculative_num_steps=3)
    plan = plan_with([FLASHINFER, TRTLLM], asked, host="b200", model=MODEL, role="draft")
    assert plan.phase("draft_decode").source == "inherited"
    assert [text.partition(":")[0] for text in texts_of(plan, "host_sync")] == ["draft_decode"]


def test_a_sync_that_was_asked_for_by_name_is_no_news() -> None:
    """sglang #32317: who names the kernel for verify has chosen its cost."""
    asked = replace(SPLIT, verify_attention_backend="flashinfer")
    assert texts_of(plan_with([FLASHINFER, TRTLLM], asked, host="b200", model=MODEL), "host_sync") == []


def test_a_phase_that_follows_a_half_shares_its_object() -> None:
    """sglang #32317 (c): that another rule decided is no reason to build the same kernel twice."""
    plan = plan_with([FLASHINFER, TRTLLM], SPLIT, host="b200", model=MODEL)
    backends = built_with([FLASHINFER, TRTLLM], plan, MODEL)
    built = backends.serving_attention_backend("verify")
    assert built is backends.serving_attention_backend("prefill")
    assert read_stamp(built).sources == (("prefill", "operator"), ("verify", "default"))


def test_a_kernel_named_in_two_slots_is_built_once() -> None:
    """sglang #32317 (c): decode and verify share one object, whose stamp knows both phases."""
    plan = plan_with([FLASHINFER, TRTLLM], EXPLICIT, host="b200", model=MODEL)
    backends = built_with([FLASHINFER, TRTLLM], plan, MODEL)
    assert backends.serving_attention_backend("verify") is backends.serving_attention_backend("decode")
    assert backends.serving_attention_backend("verify") is not backends.serving_attention_backend("prefill")
    assert read_stamp(backends.serving_attention_backend("verify")).phases == ("decode", "verify")


def test_a_pair_without_a_verify_phase_is_refused_at_config_time() -> None:
    """sglang #9330 (d): both halves' reasons, before anything is built; without speculation the pair is fine."""
    halves = [replace(item, phases=frozenset({"prefill", "decode"})) for item in (FLASHINFER, TRTLLM)]
    with pytest.raises(Refused) as caught:
        plan_with(halves, SPLIT, host="b200", model=MODEL)
    assert "a kernel for verify" in caught.value.needed
    assert "trtllm_mla" in caught.value.message
    assert "the prefill half" in caught.value.considered
    plan_with(halves, replace(SPLIT, speculative_algorithm=None), host="b200", model=MODEL)


def test_a_prefill_kernel_that_cannot_verify_hands_over_to_decode_and_shows_it() -> None:
    """sglang #9981: the second half of the documented default."""
    half = replace(FLASHINFER, phases=frozenset({"prefill", "decode"}))
    plan = plan_with([half, TRTLLM], SPLIT, host="b200", model=MODEL)
    assert (plan.phase("verify").kernel, plan.phase("verify").source) == ("trtllm_mla", "default -> decode")
