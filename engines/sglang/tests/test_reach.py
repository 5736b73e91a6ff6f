"""What this adapter does not carry to a kernel is refused before anything is resolved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

from backstamp.errors import Refused
from backstamp.model import group_layers, model_from_config
from backstamp_sglang import reach
from backstamp_sglang.facts import question_of
from backstamp_sglang.reach import check_reach
from engines.sglang.tests.launches import KEY, arguments


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "a cache in the model's own dtype"),
        ({"enable_two_batch_overlap": True}, "one stream of steps"),
        ({"decode_attention_backend": "torch_native"}, "both halves from Backstamp, got torch_native"),
        ({"speculative_algorithm": "NGRAM"}, "a draft of EAGLE, EAGLE3, STANDALONE, got NGRAM"),
        ({"enable_multi_layer_eagle": True}, "one draft model, run in a loop"),
        ({"speculative_adaptive": True}, "one number of draft steps"),
        ({"speculative_draft_window_size": 64}, "a draft that sees all its tokens"),
        ({"speculative_draft_kv_cache_dtype": "fp8_e4m3"}, "one dtype for both caches"),
        ({"dcp_size": 2}, "one rank a sequence"),
        ({"enable_unified_memory": True}, "a cache of one model"),
        ({"enable_page_major_kv_layout": True}, "a cache of plain rows"),
        ({"attn_cp_size": 2}, "one rank a prompt"),
        ({"enable_mis": True}, "one item a request"),
        ({"enable_pdmux": True}, "one stream of steps, got prefill and decode"),
        ({"dllm_algorithm": "LowConfidence"}, "causal attention, got a diffusion"),
        ({"speculative_draft_sink_size": 4}, "a draft that sees all its tokens"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_carried_to_a_kernel_is_refused(asked: dict[str, object], needed: str, model: Path) -> None:
    """A plan may not promise what the adapter drops."""
    server = arguments(model, **asked)
    with pytest.raises(Refused, match=needed):
        question_of(server, model_config_of(server))


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({}, "gated delta nets, got recurrent layers"),
        (
            {"linear_attn_backend": "triton", "linear_attn_decode_backend": KEY},
            "both linear halves, got triton, backst",
        ),
        ({"speculative_algorithm": "EAGLE"}, "a launch without speculation beside linear kernels"),
        ({"linear_attn_backend": "triton", "linear_attn_verify_backend": KEY}, "SGLang's own linear verify"),
        (
            {"mamba_radix_cache_strategy": "extra_buffer"},
            "no_buffer --disable-overlap-schedule, got extra",
        ),
        ({"attention_backend": "torch_native"}, "both halves from Backstamp"),
    ],
    ids=["no-recurrence", "half", "speculation", "verify", "tracked", "attention"],
)
def test_linear_kernels_are_refused_where_they_would_not_run(
    asked: dict[str, object], needed: str, model: Path, hybrid: Path
) -> None:
    """Each is a request of ours that SGLang would answer by a kernel of its own, or not at all."""
    server = arguments(model if not asked else hybrid, **{"linear_attn_backend": KEY, **asked})
    with pytest.raises(Refused, match=needed.replace("halves, got", "halves from Backstamp, got")):
        question_of(server, model_config_of(server))


def test_images_seen_both_ways_are_refused(model: Path) -> None:
    """SGLang's Gemma gives that mask to its Triton backend alone."""
    server = arguments(model)
    config = model_config_of(server)
    config.hf_config.architectures = ["Gemma3ForConditionalGeneration"]
    with pytest.raises(Refused, match="a causal prefix, got Gemma3ForConditionalGeneration"):
        question_of(server, config)
    config.hf_config.architectures = ["Gemma3ForCausalLM"]
    question_of(server, config)


@pytest.mark.parametrize("architecture", ["Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration"])
def test_images_of_later_gemmas_are_refused_too(architecture: str, model: Path) -> None:
    """The same mask, of the same backend alone."""
    server = arguments(model)
    config = model_config_of(server)
    config.hf_config.architectures = [architecture]
    with pytest.raises(Refused, match="a causal prefix"):
        question_of(server, config)


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({"family": "mla"}, "layers of keys and values, got layers of family mla"),
        ({"family": "sparse_mla"}, "layers of keys and values"),
        ({"family": "csa"}, "layers of keys and values"),
        ({"attn_type": "encoder"}, "decoder layers, got encoder"),
    ],
    ids=["mla", "sparse-mla", "csa", "encoder"],
)
def test_layers_that_sglang_calls_otherwise_are_refused(changed: dict[str, str], needed: str, model: Path) -> None:
    """Other tensors, or no cache: a kernel would be handed what it was not planned for."""
    server = arguments(model)
    facts = model_from_config(model_config_of(server).hf_config.to_dict(), "a model")
    layers = tuple(tuple(replace(mixer, **changed) for mixer in mixers) for mixers in facts.layers)
    other = replace(facts, layers=layers, groups=group_layers(layers))
    with pytest.raises(Refused, match=needed):
        check_reach(resolved_view(server), model_config_of(server), other, "target")


def test_a_model_without_attention_is_refused(model: Path) -> None:
    """There is nothing to serve, and SGLang would take another backend in silence."""
    server = arguments(model)
    facts = model_from_config(model_config_of(server).hf_config.to_dict(), "a model")
    with pytest.raises(Refused, match="attention layers, got a model without any"):
        check_reach(resolved_view(server), model_config_of(server), replace(facts, layers=(), groups=()), "target")


def test_an_encoder_beside_a_decoder_is_refused(model: Path) -> None:
    """SGLang's cross-attention has a cache of its own."""
    server = arguments(model)
    config = model_config_of(server)
    config.is_encoder_decoder = True
    with pytest.raises(Refused, match="decoder layers, got encoder or cross-attention layers"):
        question_of(server, config)


def test_a_draft_of_ours_side_by_side_in_pages_is_refused(model: Path) -> None:
    """Beside a target of its own, SGLang would load first."""
    asked = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 2}
    ours = {"attention_backend": "triton", "speculative_draft_attention_backend": KEY, **asked}
    server = arguments(model, **ours, page_size=16)
    with pytest.raises(Refused, match="pages of one token for drafts side by side, got --page-size 16"):
        question_of(server, model_config_of(server), "draft")
    question_of(arguments(model, **ours, page_size=1), model_config_of(server), "draft")
    question_of(
        arguments(model, **{**ours, "speculative_eagle_topk": 1}, page_size=16), model_config_of(server), "draft"
    )


def test_hybrid_models_are_refused_on_blackwell_alone(
    hybrid: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asserts its own names there, once weights are loaded."""
    blackwell = SimpleNamespace(is_blackwell=True)
    monkeypatch.setattr(reach, "get_platform", lambda: blackwell)
    server = arguments(hybrid)
    with pytest.raises(Refused, match="a GPU before Blackwell"):
        question_of(server, model_config_of(server))
    question_of(arguments(model), model_config_of(arguments(model)))
