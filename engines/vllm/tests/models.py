"""Small seeded models with real weights: a model whose weights are near zero answers the same whatever attention does.

In: a folder. Out: checkpoints that vLLM loads like any other, and a launch of one.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
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
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

__all__ = ["VOCAB", "WINDOW", "prefill_config", "write_hybrid", "write_latent", "write_models"]

VOCAB = 256
#: Shorter than every prompt but a few.
WINDOW = 32
#: Wider than a fresh model's, so that greedy tokens differ from row to row and hang on attention.
_SPREAD = 0.1
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": _SPREAD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def write_models(folder: Path) -> dict[str, Path]:
    """Write each model once; answers their folders by name."""
    full = Qwen3Config(num_hidden_layers=3, **_SHAPE)
    layers = {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
    }
    windowed = Gemma3TextConfig(query_pre_attn_scalar=32, **layers, **_SHAPE)
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    sinks = GptOssConfig(num_local_experts=4, num_experts_per_tok=2, rope_parameters=yarn, **layers, **_SHAPE)
    # of the size of these logits, so that it bends them; vLLM ties this model's head, whatever its config says
    tied = {**_SHAPE, "tie_word_embeddings": True}
    softcap = Gemma2Config(query_pre_attn_scalar=32, attn_logit_softcapping=1.0, **layers, **tied)
    return {
        "full": _write(Qwen3, full, folder / "full"),
        "window": _write(Gemma3ForCausalLM, windowed, folder / "win"),
        "sinks": _write(GptOssForCausalLM, sinks, folder / "sinks"),
        "softcap": _write(Gemma2ForCausalLM, softcap, folder / "softcap"),
    }


def write_hybrid(folder: Path, key_dim: int, value_dim: int) -> Path:
    """Write a Qwen3-Next of three gated delta nets, with two key heads and four value heads, and an attention layer."""
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=4,
        # vLLM's class wants experts in one layer
        mlp_only_layers=[0, 1, 2],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **_SHAPE,
    )
    return _write(Qwen3NextForCausalLM, config, folder / "hybrid")


def write_latent(folder: Path) -> Path:
    """Write a DeepSeek-V2 without experts; vLLM's decode for the CPU is for a latent of 512 and a rotary part of 64.

    Its positions are YaRN's: vLLM 0.32.0 rotates plain ones in place on the CPU, wrongly for queries that lie apart.
    """
    config = DeepseekV2Config(
        num_hidden_layers=3,
        first_k_dense_replace=3,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=48,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        **{**_SHAPE, "num_key_value_heads": 4, "head_dim": 64},
    )
    return _write(DeepseekV2ForCausalLM, config, folder / "latent")


def prefill_config(folder: Path, key: str) -> VllmConfig:
    """vLLM's config of a launch that asks for a key of MLA prefill."""
    asked = EngineArgs(
        model=str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=256,
        attention_config={"mla_prefill_backend": key},
    )
    return asked.create_engine_config()


def _write(kind: type[PreTrainedModel], config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = kind(config).float()
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            # a fresh gated delta net forgets within a token or two: these states last some twenty
            torch.nn.init.constant_(weight, -3.0)
        elif config.tie_word_embeddings and name.endswith("embed_tokens.weight"):
            # else a tied head answers with the token that was asked
            torch.nn.init.normal_(weight, std=_SPREAD / 10)
    model.save_pretrained(folder)
    return folder
