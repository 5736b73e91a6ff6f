"""Small seeded models of each architecture, and what they generate: the peers' side of every equality.

In: an architecture's name. Out: a model in float32 on the CPU whose tokens depend on every attention fact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

__all__ = [
    "ARCHITECTURES",
    "NEW_TOKENS",
    "config_of",
    "generate",
    "one_token_at_a_time",
    "padded_prompts",
    "small_draft",
    "small_model",
]

NEW_TOKENS = 24
WINDOW = 8
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # tied, a token would mostly answer itself
    "tie_word_embeddings": False,
}
_ALTERNATE = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True, slots=True)
class Architecture:
    """A config class, a model class and what the config says beside the sizes."""

    config: type[PretrainedConfig]
    model: type[PreTrainedModel]
    beside: dict[str, object] = field(default_factory=dict)


_YARN = {"rope_type": "default", "rope_theta": 10000.0}
ARCHITECTURES = {
    "llama": Architecture(LlamaConfig, LlamaForCausalLM),
    "qwen3": Architecture(Qwen3Config, Qwen3ForCausalLM),
    # logits of these weights reach about 3: a cap of 2 shows
    "gemma2": Architecture(Gemma2Config, Gemma2ForCausalLM, {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0}),
    "gemma3": Architecture(Gemma3TextConfig, Gemma3ForCausalLM, {"sliding_window": WINDOW, "layer_types": _ALTERNATE}),
    "qwen3_next": Architecture(
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "gpt_oss": Architecture(
        GptOssConfig,
        GptOssForCausalLM,
        {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
    ),
}


def config_of(name: str, **changes: object) -> PretrainedConfig:
    """A fresh config."""
    architecture = ARCHITECTURES[name]
    return architecture.config(**{**_SIZES, **architecture.beside, **changes})


def small_model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A model whose weights depend on the seed alone, in `eager`, which every architecture has."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name].model(config_of(name, **changes)).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() > 1:
                # wide enough that a token's neighbours decide it, narrow enough that no expert's activation saturates
                weight.normal_(0.0, 0.02 if "embed" in key else 0.2, generator=draw)
            elif key.endswith("sinks"):
                weight.uniform_(0.5, 2.0, generator=draw)
    model.set_attn_implementation("eager")
    return model


def small_draft(name: str) -> PreTrainedModel:
    """A model of half the layers, which drafts for the whole one."""
    kinds = ARCHITECTURES[name].beside.get("layer_types")
    return small_model(name, num_hidden_layers=2, **({"layer_types": kinds[:2]} if kinds else {}))


def padded_prompts(seed: int = 3, rows: int = 3, length: int = 12) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask: a whole row, then rows with 5, 2, 9, ... pads."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 128, (rows, length), generator=draw)
    pads = torch.tensor([0, 5, 2, 9, 11, 1])[:rows]
    mask = (torch.arange(length)[None, :] >= pads[:, None]).long()
    return ids.masked_fill(mask == 0, 0), mask


def generate(
    model: PreTrainedModel, prompts: tuple[Tensor, Tensor] | None = None, **options: object
) -> list[list[int]]:
    """Greedy tokens, prompts left out."""
    ids, mask = prompts if prompts is not None else padded_prompts()
    found = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
    return found[:, ids.shape[1] :].tolist()


def one_token_at_a_time(model: PreTrainedModel, ids: Tensor) -> Iterator[list[int]]:
    """Greedy tokens of unpadded rows, a forward at a time, so that callers can take models in turns."""
    cache = None
    for _ in range(NEW_TOKENS):
        with torch.inference_mode():
            answer = model(ids, cache=cache, use_cache=True)
        ids, cache = answer.logits[:, -1:].argmax(-1), answer.cache
        yield ids[:, 0].tolist()
