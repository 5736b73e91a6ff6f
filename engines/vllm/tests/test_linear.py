"""Hybrid models: gated delta nets on the resolved linear kernel, their states in vLLM's own cache.

vLLM's own op for the CPU is for bfloat16 alone. In float32 tokens are held to Transformers' model of the same weights,
and in bfloat16 each layer's outputs to that op.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import MambaSpec

from backstamp.errors import Refused
from backstamp_vllm.facts import question_of
from backstamp_vllm.linear import BackstampGatedDeltaNet, check_layers
from backstamp_vllm.linear_step import LinearMetadataBuilder
from engines.vllm.tests.acme import install_acme
from engines.vllm.tests.models import write_hybrid
from engines.vllm.tests.serve_once import NUM_PROMPTS, prompts
from engines.vllm.tests.serving import Served, serve
from engines.vllm.tests.test_refusals import assert_refused

NATIVE = {"backstamp": {"linear_attn_backend": "torch_native"}}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose states are not square: a swapped pair would not fit."""
    return write_hybrid(tmp_path_factory.mktemp("hybrid"), 32, 16)


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the only head dims that vLLM's op for the CPU takes."""
    return write_hybrid(tmp_path_factory.mktemp("square"), 64, 64)


def is_greedy(folder: Path, served: Served) -> list[bool]:
    """For each prompt, whether Transformers' model would have gone on in the same way at every token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for prompt, tokens in zip(prompts(256), served.tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        answers.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(tokens))
    return answers


def test_a_linear_key_serves_a_hybrid_model(hybrid: Path, tmp_path: Path) -> None:
    """Chunks, cached prefixes and decode: the tokens are greedy's, both slots are stamped in the worker and logged."""
    served = serve(tmp_path, hybrid, attention_backend="torch_native", additional_config=NATIVE)
    assert len(served.tokens) == NUM_PROMPTS, served.log[-4000:]
    assert sum(cached > 0 for cached in served.cached) >= 4
    assert len(set(served.tokens)) > NUM_PROMPTS // 2
    assert all(is_greedy(hybrid, served))
    slots = [half["slot"] for halves in (served.stamps or {}).values() for half in halves.values()]
    assert slots == ["linear", "linear"] * 3 + ["attention", "attention"]
    assert served.kernels("decode") == ["torch_native"] * 4
    assert (served.touched or {})["replaced"] == ["QwenGatedDeltaNetAttention"]
    assert "linear layers: decode torch_native (backstamp-cpu 0.1.0, operator)" in served.log
    assert "states in order vk" in served.log


def test_a_third_party_rule_answers_as_vllms_own_op(square: Path, tmp_path: Path) -> None:
    """A kernel with states in the other order, driven in the worker through fresh, mixed and decode steps."""
    served = drive(square, tmp_path, "acme_rule")
    assert {half["plugin"]["distribution"] for half in rules(served)} == {"acme-recurrent"}
    assert "states in order kv" in served.log
    assert len(served.distances) == 3
    assert max(served.distances) < 0.03


def test_a_rule_of_zeros_is_seen(square: Path, tmp_path: Path) -> None:
    """Each step is as far from vLLM's own as its outputs are from nothing."""
    served = drive(square, tmp_path, "acme_rule_zeros")
    assert min(served.distances) == 1.0


def test_a_rule_that_forgets_is_seen(square: Path, tmp_path: Path) -> None:
    """Fresh rows need no state; what follows them does."""
    fresh, *later = drive(square, tmp_path, "acme_rule_forgets").distances
    assert fresh < 0.03
    assert min(later) > 0.1


def drive(model: Path, folder: Path, rule: str) -> Served:
    """Serve a linear kernel of the third party, and drive its layers."""
    asked = {"backstamp": {"linear_attn_backend": rule}}
    served = serve(
        folder,
        model,
        site=install_acme(folder),
        drive_linear=True,
        dtype="bfloat16",
        attention_backend="torch_native",
        additional_config=asked,
    )
    assert served.distances, served.log[-4000:]
    assert {half["kernel"] for half in rules(served)} == {rule}
    return served


def rules(served: Served) -> list[dict[str, object]]:
    """The stamps of the linear slot."""
    halves = [half for halves in (served.stamps or {}).values() for half in halves.values()]
    return [half for half in halves if half["slot"] == "linear"]


def test_another_backend_keeps_vllms_layer(square: Path, tmp_path: Path) -> None:
    """None of our names asked for: vLLM's own gated delta nets, no layer of ours registered, and a linear key that
    nobody reads told in the log."""
    served = serve(tmp_path, square, dtype="bfloat16", additional_config=NATIVE)
    assert len(served.tokens) == NUM_PROMPTS, served.log[-4000:]
    assert (served.touched or {})["replaced"] == []
    assert (served.touched or {})["modules"] == ["backstamp_vllm.names", "backstamp_vllm.unread"]
    assert served.stamps == {}
    assert "asked for {'linear_attn_backend': 'torch_native'} in --additional-config and runs nothing" in served.log


def test_without_a_linear_key_vllm_keeps_the_recurrence(square: Path, tmp_path: Path) -> None:
    """A Backstamp key of attention alone: its layers are ours, the gated delta nets run vLLM's own op."""
    served = serve(tmp_path, square, dtype="bfloat16", attention_backend="torch_native")
    assert len(served.tokens) == NUM_PROMPTS, served.log[-4000:]
    assert [half["slot"] for halves in (served.stamps or {}).values() for half in halves.values()] == ["attention"] * 2
    assert "linear layers" not in served.log


def test_an_unknown_linear_key_is_refused(hybrid: Path, tmp_path: Path) -> None:
    """Before weights load, with the flag and what there is."""
    asked = {"backstamp": {"linear_attn_decode_backend": "no_such_rule"}}
    served = serve(tmp_path, hybrid, attention_backend="torch_native", additional_config=asked)
    assert_refused(served, "UnknownKey", "'no_such_rule'", "--linear-attn-decode-backend")


def config_of(model: Path, **changes: object) -> VllmConfig:
    """vLLM's config of a launch that asks for a linear key."""
    asked = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 256, "additional_config": NATIVE}
    return EngineArgs(model=str(model), attention_backend="torch_native", **{**asked, **changes}).create_engine_config()


def test_a_linear_key_for_a_model_without_linear_layers_is_refused(models: dict[str, Path]) -> None:
    """What is asked for and cannot be served is no wish."""
    config = config_of(models["full"])
    with pytest.raises(Refused, match="needs linear layers, or no linear key, got a model without any"):
        question_of(config, "torch_native")


def test_states_in_between_are_refused(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel leaves the state at the end of its tokens; vLLM's mode `all` wants more of them."""
    config = config_of(hybrid)
    monkeypatch.setattr(config.cache_config, "mamba_cache_mode", "all")
    with pytest.raises(Refused, match="needs states at the ends of chunks, got mamba_cache_mode all"):
        question_of(config, "torch_native")


def test_no_step_is_captured(hybrid: Path) -> None:
    """vLLM captures what the least able builder allows; ours plans on the host."""
    support = LinearMetadataBuilder.get_cudagraph_support(config_of(hybrid), MambaSpec.__new__(MambaSpec))
    assert support is AttentionCGSupport.NEVER


def test_a_layer_that_vllm_made_before_is_refused(hybrid: Path) -> None:
    """A process that was forked never saw the request arrive: its layers are vLLM's, and say so."""
    config = config_of(hybrid)
    theirs = object.__new__(BackstampGatedDeltaNet.__mro__[1])
    config.compilation_config.static_forward_context["model.layers.0.linear_attn"] = theirs
    with pytest.raises(Refused, match=r"linear_attn: needs a gated delta net .* got vLLM's QwenGatedDeltaNetAttention"):
        check_layers(config)
    config.compilation_config.static_forward_context["model.layers.0.linear_attn"] = object.__new__(
        BackstampGatedDeltaNet
    )
    check_layers(config)
