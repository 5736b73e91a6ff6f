"""What nested configs leave out because their class has it.

In: nothing. Out: tables by `model_type`. transformers writes a nested config as its difference from its class
(`PreTrainedConfig.to_diff_dict`), so a field that is missing there has the class's value, and one that is null has
none; a config that stands alone is written whole, and a field missing there is an error. Without these a nested
Qwen3 4B would have heads of 2560 / 32, and a nested Gemma 2 no softcap. Source of every value: the configuration
classes of transformers 5.24.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["NESTED_LANGUAGE", "NESTED_TOWER"]

_Defaults = Mapping[str, object]


def _decoder(
    width: int, layers: int, heads: int, kv_heads: int, head_dim: int | None = None, **more: object
) -> _Defaults:
    """The fields of a decoder's class; a head dim the class computes is left to the reader."""
    own = {} if head_dim is None else {"head_dim": head_dim}
    counts = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"hidden_size": width, **counts, **own, **more}


def _encoder(width: int, heads: int, layers: int, **more: object) -> _Defaults:
    return {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": layers, **more}


def _patches(width: int, heads: int, layers: int) -> _Defaults:
    """A tower in Qwen-VL's words."""
    return {"hidden_size": width, "num_heads": heads, "depth": layers}


def _sound(width: int, heads: int, layers: int) -> _Defaults:
    """A tower in Whisper's words."""
    return {"d_model": width, "encoder_attention_heads": heads, "encoder_layers": layers}


#: Language models, by `model_type`. Llama's and Cohere's key-value heads are as many as their heads where unsaid.
NESTED_LANGUAGE: Final[Mapping[str, _Defaults]] = {
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32},
    "mistral": _decoder(4096, 32, 32, 8, sliding_window=4096),
    "qwen2": _decoder(4096, 32, 32, 32, use_sliding_window=False),
    "qwen3": _decoder(4096, 32, 32, 32, 128, use_sliding_window=False),
    "qwen2_5_omni_text": _decoder(3584, 28, 28, 4, use_sliding_window=False),
    "qwen3_vl_text": _decoder(4096, 32, 32, 32, 128),
    "gemma": _decoder(3072, 28, 16, 16, 256),
    "gemma2": _decoder(2304, 26, 8, 4, 256, sliding_window=4096, attn_logit_softcapping=50.0),
    "gemma3_text": _decoder(2304, 26, 8, 4, 256, sliding_window=4096),
    "gemma3n_text": _decoder(2048, 35, 8, 2, 256, sliding_window=512),
    "gemma4_text": _decoder(2304, 30, 8, 4, 256, sliding_window=512),
    "cohere2": {"hidden_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 64, "sliding_window": 4096},
    "gpt_oss": _decoder(2880, 36, 64, 8, 64, sliding_window=128),
    "llama4_text": _decoder(5120, 48, 40, 8, 128, attention_chunk_size=8192),
    "mllama_text_model": _decoder(4096, 40, 32, 8, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]),
}

#: Towers, by kind as `backstamp.model_towers` names it.
NESTED_TOWER: Final[Mapping[str, _Defaults]] = {
    "siglip": _encoder(768, 12, 12),
    "siglip2": _encoder(768, 12, 12),
    "clip": _encoder(768, 12, 12),
    "idefics2": _encoder(768, 12, 12),
    "idefics3": _encoder(1152, 16, 12),
    "smolvlm": _encoder(1152, 16, 12),
    "paddleocr_vl": _encoder(1152, 16, 27),
    "kimi_k25": _encoder(1152, 16, 27),
    "pixtral": _encoder(1024, 16, 24),
    "internvl": _encoder(1024, 16, 24),
    "aimv2": _encoder(1024, 8, 24),
    "llama4": _encoder(768, 16, 34),
    "gemma4": _encoder(768, 12, 16, num_key_value_heads=12, head_dim=64),
    "mllama": {"hidden_size": 1280, "attention_heads": 16, "num_hidden_layers": 32, "num_global_layers": 8},
    "qwen2_vl": {"embed_dim": 1280, "num_heads": 16, "depth": 32},
    "qwen2_5_vl": _patches(3584, 16, 32),
    "qwen2_5_omni": _patches(3584, 16, 32),
    "qwen3_vl": _patches(1152, 16, 27),
    "qwen3_vl_moe": _patches(1152, 16, 27),
    "qwen3_omni_moe": _patches(1152, 16, 27),
    "qwen3_5": _patches(1152, 16, 27),
    "qwen3_5_moe": _patches(1152, 16, 27),
    "glm4v": _patches(1536, 12, 24),
    "glm4v_moe": _patches(1536, 12, 24),
    "ernie4_5_vl_moe": _patches(1280, 16, 32),
    "whisper": _sound(384, 6, 4),
    "qwen2_audio": _sound(1280, 20, 32),
    "qwen2_5_omni_audio": _sound(1280, 20, 32),
    "qwen3_omni_moe_audio": _sound(1280, 20, 32),
    "voxtral": _encoder(1280, 20, 32),
    "audioflamingo3": _encoder(1280, 20, 32),
}
