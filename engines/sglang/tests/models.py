"""Small seeded models with real weights: a model whose weights are near zero answers the same whatever attention does.

In: a folder. Out: checkpoints that SGLang loads like any other, and what Transformers answers from one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers import Qwen3ForCausalLM as Qwen3

__all__ = ["VOCAB", "WINDOW", "reference", "write_hybrid", "write_models", "write_sinks", "write_softcap"]

VOCAB = 256
#: Shorter than every prompt but a few.
WINDOW = 32
#: Wider than a fresh model's, so that greedy tokens differ from row to row and hang on attention.
_SPREAD = 0.1
#: SGLang gives Gemma tied embeddings whatever the config says; as wide as that, each token would answer itself.
_EMBEDDED = 0.1
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": _SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_models(folder: Path) -> dict[str, Path]:
    """Write each model once; answers their folders by name."""
    full = Qwen3Config(num_hidden_layers=3, tie_word_embeddings=False, **_SHAPE)
    kinds = ["sliding_attention", "full_attention"] * 2
    windowed = Gemma3TextConfig(
        num_hidden_layers=4, layer_types=kinds, sliding_window=WINDOW, query_pre_attn_scalar=32, **_SHAPE
    )
    return {
        "full": _write(Qwen3, full, folder / "full"),
        "window": _write(Gemma3ForCausalLM, windowed, folder / "window", _EMBEDDED),
    }


def write_hybrid(folder: Path) -> Path:
    """Write a model of gated delta nets beside full attention."""
    hybrid = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention"] * 2,
        # SGLang's word for the same
        full_attention_interval=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        tie_word_embeddings=False,
        **_SHAPE,
    )
    return _write(Qwen3NextForCausalLM, hybrid, folder / "hybrid")


def write_softcap(folder: Path) -> Path:
    """Write a model whose logits are capped far below what they reach, in windows and without."""
    capped = Gemma2Config(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=2.0,
        # SGLang's word for the activation, and none of its caps after the last layer
        hidden_act="gelu_pytorch_tanh",
        final_logit_softcapping=None,
        **_SHAPE,
    )
    return _write(Gemma2ForCausalLM, capped, folder / "softcap", _EMBEDDED)


def write_sinks(folder: Path) -> Path:
    """Write a model with a sink a head, in windows and without; SGLang keeps sinks in bfloat16."""
    config = GptOssConfig(
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **{**_SHAPE, "intermediate_size": 128},
    )
    torch.manual_seed(0)
    model = GptOssForCausalLM(config).float()
    for layer in model.model.layers:
        sinks = layer.self_attn.sinks
        sinks.data = (2 + torch.randn_like(sinks)).bfloat16().float()
    model.save_pretrained(folder / "sinks")
    return folder / "sinks"


def reference(model: Path, asked: list[list[int]]) -> list[tuple[int, ...]]:
    """Transformers' greedy tokens, one prompt at a time."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    for tokens in asked:
        prompt = torch.tensor([tokens])
        answer = loaded.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
        answers.append(tuple(answer[0, len(tokens) :].tolist()))
    return answers


def _write(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path, embedded: float = 1.0) -> Path:
    torch.manual_seed(0)
    model = kind(config).float()
    model.get_input_embeddings().weight.data.mul_(embedded)
    model.save_pretrained(folder)
    return folder
