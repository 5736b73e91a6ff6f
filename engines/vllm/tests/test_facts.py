"""What the resolver is asked for a config of vLLM's, and what no kernel is handed yet."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config

from backstamp.errors import BadInput, Refused
from backstamp_vllm import backend
from backstamp_vllm.facts import is_same_dtype, question_of
from backstamp_vllm.names import offer_names
from tests.models import config as config_of


@pytest.mark.parametrize(
    ("part", "field", "value", "needed"),
    [
        ("cache_config", "cache_dtype", "fp8", "a cache in the model's own dtype"),
        ("cache_config", "cache_dtype", "bfloat16", "a cache in the model's own dtype"),
        ("parallel_config", "decode_context_parallel_size", 2, "one rank a sequence"),
        ("parallel_config", "prefill_context_parallel_size", 2, "one rank a prompt"),
        ("attention_config", "use_non_causal", True, "causal attention"),
        ("attention_config", "backend_per_kind", {"sliding_window": None}, "one backend for all layers"),
        ("model_config", "is_mm_prefix_lm", True, "a causal prefix"),
        ("model_config.model_arch_config", "rswa_window", 64, "a window or none"),
    ],
)
def test_what_is_not_carried_to_a_kernel_is_refused(
    part: str, field: str, value: object, needed: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may not promise what the adapter drops; vLLM on a GPU gets the same as a reason."""
    monkeypatch.setattr(attrgetter(part)(config), field, value)
    with pytest.raises(Refused, match=needed):
        question_of(config, "torch_native")
    with set_current_vllm_config(config):
        (reason,) = backend.class_of("TORCH_NATIVE").validate_configuration()
    assert needed in reason


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"decode_backend": "x"}, "got decode_backend"),
        (7, "needs a JSON object, got 7"),
        (
            {"attention_backend": "x"},
            "needs each request once.*, got attention_backend again",
        ),
        *(({field: 64}, f"vLLM's own flags, got {field}") for field in ("page_size", "tp_size", "dcp_size")),
        ({"kv_cache_dtype": "fp8_e4m3"}, "vLLM's own flags, got kv_cache_dtype"),
        ({"speculative_algorithm": "eagle"}, "vLLM's own flags, got speculative_algorithm"),
    ],
    ids=["unknown-field", "no-object", "twice", "page-size", "tp", "dcp", "kv-dtype", "drafts"],
)
def test_an_additional_config_that_is_no_request_is_refused(asked: object, said: str, config: VllmConfig) -> None:
    """What is asked there is read as strictly as a flag."""
    config.additional_config = {"backstamp": asked}
    with pytest.raises(BadInput, match=said):
        question_of(config, "torch_native")


LINEAR = {"backstamp": {"linear_attn_backend": "torch_native"}}
HYBRID, MAMBA = config_of("hybrid"), config_of("falcon_h1")
NO_ATTENTION = {**HYBRID, "num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}


@pytest.mark.parametrize(
    ("model", "extra", "said"),
    [
        (config_of("mla"), {}, "needs layers of vLLM's Attention, got layers of family mla"),
        (config_of("dsa"), {}, "needs layers of vLLM's Attention, got layers of family sparse_mla"),
        (config_of("whisper"), {}, "needs decoder layers, got encoder or cross-attention layers"),
        (MAMBA, LINEAR, "needs gated delta nets, got linear layers of family mamba2"),
        (NO_ATTENTION, {}, "needs attention layers, got a model without any"),
    ],
    ids=["mla", "sparse", "cross", "mamba", "no-attention"],
)
def test_a_model_whose_layers_are_not_carried_is_refused(
    model: dict[str, object], extra: dict[str, object], said: str, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what its config says, before weights load."""
    monkeypatch.setattr(config.model_config, "hf_config", SimpleNamespace(to_dict=model.copy))
    config.additional_config = extra
    with pytest.raises(Refused, match=said):
        question_of(config, "torch_native")


def test_recurrent_layers_are_vllms_until_they_are_asked_for(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hybrid model's facts are of attention alone without a linear key; a mamba's may stay vLLM's."""
    for asked, extra, families in ((MAMBA, {}, {"mha"}), (HYBRID, {}, {"mha"}), (HYBRID, LINEAR, {"mha", "gdn"})):
        monkeypatch.setattr(config.model_config, "hf_config", SimpleNamespace(to_dict=asked.copy))
        config.additional_config = extra
        assert {group.facts.family for group in question_of(config, "torch_native").model.groups} == families


def test_speculation_is_refused(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hands verify rows over."""
    monkeypatch.setattr(config, "speculative_config", SimpleNamespace(method="ngram"))
    with pytest.raises(Refused, match="needs a launch without speculation, got a speculative config"):
        question_of(config, "torch_native")


@pytest.mark.parametrize(
    ("asked", "dtype", "same"),
    [
        ("auto", torch.float32, True),
        ("bfloat16", torch.bfloat16, True),
        ("float16", torch.float16, True),
        ("float16", torch.bfloat16, False),
        ("fp8", torch.bfloat16, False),
    ],
)
def test_a_cache_may_be_asked_for_in_the_models_own_dtype(
    asked: str, dtype: torch.dtype, same: bool, config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name too: `--kv-cache-dtype bfloat16` of a bfloat16 model asks for nothing else."""
    monkeypatch.setattr(config.model_config, "dtype", dtype)
    monkeypatch.setattr(config.cache_config, "cache_dtype", asked)
    assert is_same_dtype(asked, dtype) is same
    offer_names()
    with set_current_vllm_config(config):
        assert backend.class_of("TORCH_NATIVE").supports_kv_cache_dtype(asked) is same
    if same:
        assert question_of(config, "torch_native").launch.kv_cache_dtype == "auto"


def test_a_launch_is_what_vllms_flags_say(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages where the operator chose them or the cache has settled them, chunks, ranks and determinism."""
    launch, engine, _ = question_of(config, "torch_native")
    assert (launch.page_size, launch.chunked_prefill_size, launch.tp_size, launch.deterministic) == (
        None,
        config.scheduler_config.max_num_batched_tokens,
        1,
        False,
    )
    assert engine.prefix_cache
    assert question_of(config, "torch_native", 32).launch.page_size == 32
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setattr(config.cache_config, "user_specified_block_size", True)
    monkeypatch.setattr(config.cache_config, "block_size", 64)
    monkeypatch.setattr(config.cache_config, "enable_prefix_caching", False)
    monkeypatch.setattr(config.scheduler_config, "enable_chunked_prefill", False)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 2)
    launch, engine, _ = question_of(config, "torch_native")
    assert (launch.page_size, launch.chunked_prefill_size, launch.tp_size, launch.deterministic) == (64, None, 2, True)
    assert not engine.prefix_cache
