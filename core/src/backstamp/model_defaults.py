"""What nested configs leave out because their class has it.

In: nothing. Out: tables by `model_type`. transformers writes a nested config as its difference from its class
(`PreTrainedConfig.to_diff_dict`), so a field that is missing there has the class's value, and one that is null has
none; a config that stands alone is written whole, and a field missing there is an error. Source of every value: the
configuration classes of transformers 5.24.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["NESTED_LANGUAGE", "NESTED_TOWER"]

_SEVEN_BILLION: Final[Mapping[str, object]] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}

#: Language models. Released so: LLaVA (llama, mistral), Qwen2-Audio (qwen2), google/gemma-3-4b-it, Llama 4.
NESTED_LANGUAGE: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": _SEVEN_BILLION,
    "qwen2": {**_SEVEN_BILLION, "num_key_value_heads": 32},
    "mistral": {**_SEVEN_BILLION, "num_key_value_heads": 8, "sliding_window": 4096},
    "gemma3_text": {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "llama4_text": {
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_chunk_size": 8192,
    },
    "mllama_text_model": {
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
}

_SMALL: Final[Mapping[str, object]] = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
_WHISPER: Final[Mapping[str, object]] = {"d_model": 1280, "encoder_attention_heads": 20, "encoder_layers": 32}

#: Towers, by kind as `backstamp.model_towers` names it.
NESTED_TOWER: Final[Mapping[str, Mapping[str, object]]] = {
    "siglip": _SMALL,
    "siglip2": _SMALL,
    "clip": _SMALL,
    "pixtral": {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
    "mllama": {"hidden_size": 1280, "attention_heads": 16, "num_hidden_layers": 32, "num_global_layers": 8},
    "llama4": {"hidden_size": 768, "num_attention_heads": 16, "num_hidden_layers": 34},
    "qwen2_vl": {"embed_dim": 1280, "num_heads": 16, "depth": 32},
    "qwen3_vl": {"hidden_size": 1152, "num_heads": 16, "depth": 27},
    "qwen3_vl_moe": {"hidden_size": 1152, "num_heads": 16, "depth": 27},
    "qwen2_audio": _WHISPER,
    "qwen2_5_omni_audio": _WHISPER,
    "qwen3_omni_moe_audio": _WHISPER,
}
