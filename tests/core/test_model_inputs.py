"""Configs that cannot be read: one clear line that names the field, what it must be and what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstamp.errors import BadModel
from backstamp.model import load_model, model_from_config
from tests.models import config

GONE = object()

#: name: (config, changed fields, field the error names, what it needs, what it got)
BAD: dict[str, tuple[str, dict[str, object], str, str, str]] = {
    "no-model-type": ("mha", {"model_type": GONE}, "model_type", "a model type", "no such field"),
    "no-heads": ("mha", {"num_attention_heads": GONE}, "num_attention_heads", "num_attention_heads", "no such field"),
    "no-layers": ("mha", {"num_hidden_layers": GONE}, "num_hidden_layers", "num_hidden_layers", "no such field"),
    "zero-heads": ("mha", {"num_attention_heads": 0}, "num_attention_heads", "whole number >= 1", "0"),
    "negative-layers": ("mha", {"num_hidden_layers": -1}, "num_hidden_layers", "whole number >= 1", "-1"),
    "too-many-layers": ("mha", {"num_hidden_layers": 10_001}, "num_hidden_layers", "at most", "10001"),
    "heads-as-text": ("mha", {"num_attention_heads": "32"}, "num_attention_heads", "whole number", "'32'"),
    "heads-as-bool": ("mha", {"num_attention_heads": True}, "num_attention_heads", "whole number", "True"),
    "heads-as-list": ("mha", {"num_key_value_heads": [8]}, "num_key_value_heads", "whole number", "[8]"),
    "kv-heads-do-not-divide": ("mha", {"num_key_value_heads": 5}, "num_key_value_heads", "divisor of the 32", "5"),
    "width-does-not-divide": ("phi", {"hidden_size": 2050}, "hidden_size", "multiple of the 32 heads", "2050"),
    "mamba-groups-do-not-divide": ("nemotron_h", {"n_groups": 7}, "mamba_n_groups", "divisor of the 128", "7"),
    "gdn-heads-do-not-divide": ("hybrid", {"linear_num_key_heads": 5}, "linear_num_value_heads", "of the 5 key", "32"),
    "unknown-dtype": ("mha", {"dtype": "int8"}, "dtype", "bfloat16", "'int8'"),
    "dtype-as-number": ("mha", {"dtype": 16}, "dtype", "a word", "16"),
    "softcap-nan": ("softcap", {"attn_logit_softcapping": float("nan")}, "attn_logit_softcapping", "finite", "nan"),
    "softcap-negative": ("softcap", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping", ">= 0", "-1.0"),
    "window-zero": ("mistral", {"sliding_window": 0}, "sliding_window", "whole number >= 1", "0"),
    "window-missing": ("sinks", {"sliding_window": GONE}, "sliding_window", "sliding_window", "no such field"),
    "window-switch-as-text": ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window", "true or false", "'no'"),
    "list-too-short": ("sinks", {"num_hidden_layers": 35}, "layer_types", "each of 35 layers", "36 entries"),
    "list-of-numbers": ("sinks", {"layer_types": [1] * 36}, "layer_types", "list of words", "[1, 1"),
    "list-is-text": ("sinks", {"layer_types": "full_attention"}, "layer_types", "list of words", "'full_attention'"),
    "pattern-letter": (
        "nemotron_h",
        {"layers_block_type": GONE, "hybrid_override_pattern": "M-X"},
        "hybrid_override_pattern",
        "letters among M * E -",
        "'X' for layer 2",
    ),
    "window-letters": (
        "softcap",
        {"layer_types": GONE, "sliding_window_pattern": "LX"},
        "sliding_window_pattern",
        "letters L and G",
        "'LX'",
    ),
    "ratio": ("dsv4", {"layer_types": GONE, "compress_ratios": [7] * 43}, "compress_ratios", "0, 4 or 128", "[7]"),
    "index-beyond": ("lfm2", {"layer_types": GONE, "full_attn_idxs": [2, 99]}, "full_attn_idxs", "below 16", "[99]"),
    "linear-without-a-list": ("minimax", {"layer_types": GONE}, "layer_types", "linear_attn_alpha_factor", "no such"),
    "kimi-lists-overlap": (
        "kda",
        {"layer_types": GONE, "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}},
        "full_attn_layers",
        "each of layers 1 to 27",
        "another set",
    ),
    "unknown-recurrence": ("mha", {"layer_types": ["mamba"] * 32}, "layer_types", "mamba2 (mamba_num_heads)", "llama"),
    "indexer-without-latent": (
        "mha",
        {"layer_types": ["indexed_attention"] * 32, "index_topk": 64},
        "kv_lora_rank",
        "latent cache",
        "no such field",
    ),
    "window-on-both-sides": (
        "softcap",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention",
        "one side",
        "both sides",
    ),
    "no-rope-dim": ("mla", {"qk_rope_head_dim": GONE}, "qk_rope_head_dim", "qk_rope_head_dim", "no such field"),
    "nested-is-a-list": ("gemma3", {"text_config": [1]}, "text_config", "nested config", "[1]"),
    "nested-is-null": ("gemma3", {"text_config": None}, "text_config", "nested config", "null"),
    "nested-is-text": ("gemma3", {"text_config": "llama"}, "text_config", "nested config", "'llama'"),
    "thinker-is-null": ("qwen3_omni", {"thinker_config": None}, "thinker_config", "nested config", "null"),
    "thinker-without-a-model": (
        "qwen3_omni",
        {"thinker_config": {"text_config": None}},
        "text_config",
        "nested config",
        "null",
    ),
    "window-as-list": ("mistral", {"sliding_window": [4096]}, "sliding_window", "whole number >= 1", "[4096]"),
    "heads-as-fraction": ("mha", {"num_attention_heads": 32.0}, "num_attention_heads", "whole number", "32.0"),
    "negative-head-dim": ("mha", {"head_dim": -128}, "head_dim", "whole number >= 1", "-128"),
    "negative-rank": ("mla", {"kv_lora_rank": -1}, "kv_lora_rank", "whole number >= 1", "-1"),
    "index-without-width": ("dsa", {"index_head_dim": GONE}, "index_head_dim", "index_head_dim", "no such field"),
    "index-heads-as-list": ("dsv4", {"index_n_heads": [64]}, "index_n_heads", "whole number", "[64]"),
    "cross-beyond": (
        "mllama",
        {"text_config": {**config("mllama")["text_config"], "cross_attention_layers": [40]}},
        "cross_attention_layers",
        "below 40",
        "[40]",
    ),
    "chunks-as-text": (
        "llama4",
        {"text_config": {**config("llama4")["text_config"], "attention_chunk_size": "8k"}},
        "attention_chunk_size",
        "whole number",
        "'8k'",
    ),
    "marks-too-few": (
        "llama4",
        {"text_config": {**config("llama4")["text_config"], "no_rope_layers": [1, 0]}},
        "no_rope_layers",
        "each of 48 layers",
        "2 entries",
    ),
    "whisper-width": ("whisper", {"d_model": 1281}, "d_model", "multiple of the 20 heads", "1281"),
    "whisper-without-decoder": ("whisper", {"decoder_layers": 0}, "decoder_layers", "whole number >= 1", "0"),
    "whisper-too-deep": ("whisper", {"encoder_layers": 10**9}, "encoder_layers", "at most", "1000000000"),
    "encoder-with-a-window": ("mistral", {"is_causal": False}, "is_causal", "one side", "both sides"),
    "cache-scheme-as-text": (
        "mha",
        {"quantization_config": {"kv_cache_scheme": "fp8"}},
        "kv_cache_scheme",
        "an object",
        "'fp8'",
    ),
    "cache-bits-as-text": (
        "mha",
        {"quantization_config": {"kv_cache_scheme": {"num_bits": "8", "type": "float"}}},
        "num_bits",
        "whole number",
        "'8'",
    ),
    "quantization-as-text": ("mha", {"quantization_config": "fp8"}, "quantization_config", "an object", "'fp8'"),
}  # fmt: skip


def broken(name: str, fields: dict[str, object]) -> dict[str, object]:
    """A config with fields changed or gone."""
    return {field: value for field, value in {**config(name), **fields}.items() if value is not GONE}


@pytest.mark.parametrize(("name", "fields", "field", "needed", "found"), BAD.values(), ids=BAD)
def test_a_bad_field_is_named_with_what_it_must_be(
    name: str, fields: dict[str, object], field: str, needed: str, found: str
) -> None:
    """Who, needed and got, in one line; nothing is guessed in their place."""
    with pytest.raises(BadModel) as caught:
        model_from_config(broken(name, fields))
    assert caught.value.who.endswith(f"field {field}")
    assert needed in caught.value.needed
    assert found in caught.value.found
    assert "\n" not in caught.value.message


def test_an_unknown_layer_type_is_named_beside_those_known() -> None:
    """A layer nobody knows is not taken for full attention."""
    words = ["full_attention"] * 31 + ["minimax_m3_sparse"]
    with pytest.raises(BadModel) as caught:
        model_from_config({**config("mha"), "layer_types": words})
    assert caught.value.found == "'minimax_m3_sparse' for layer 31"
    assert {"full_attention", "linear_attention", "conv"} <= set(caught.value.needed.replace(",", "").split())


@pytest.mark.parametrize(
    ("name", "fields", "found"),
    [
        ("nemotron_h", {"layers_block_type": []}, "none in 0 layers"),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 3}, "none in 3 layers"),
        (
            "mllama",
            {"text_config": {**config("mllama")["text_config"], "cross_attention_layers": list(range(40))}},
            "40",
        ),
    ],
    ids=["empty-list", "mlps-alone", "cross-attention-alone"],
)
def test_a_model_without_a_mixer_of_its_own_is_refused(name: str, fields: dict[str, object], found: str) -> None:
    """There would be nothing to resolve, and no main component to lead."""
    with pytest.raises(BadModel) as caught:
        model_from_config(broken(name, fields))
    assert "mixer of the main model" in caught.value.needed
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "bloom"}, "alibi"),
        ({"alibi": True}, "alibi"),
        ({"is_encoder_decoder": True}, "cross-attention"),
        ({"model_type": "openai_privacy_filter"}, "both sides"),
        ({"block_configs": [{}]}, "block_configs"),
        ({"model_type": "mimo_v2_flash"}, "head counts of their own"),
        ({"sparse_attention_config": {"sparse_block_size": 128}}, "blocks an indexer picks"),
    ],
    ids=["bloom", "falcon-alibi", "encoder-decoder", "privacy-filter", "nemotron-nas", "mimo", "minimax-m3"],
)
def test_a_model_these_facts_cannot_say_is_refused(fields: dict[str, object], said: str) -> None:
    """Rounding to plain attention would be wrong and silent."""
    with pytest.raises(BadModel) as caught:
        model_from_config({**config("mha"), **fields})
    assert said in caught.value.found


@pytest.mark.parametrize(
    ("text", "needed", "found"),
    [
        ("{", "JSON", "malformed"),
        ("", "JSON", "malformed"),
        ("[1, 2]", "a JSON object", "list"),
        ("null", "a JSON object", "NoneType"),
        ("[" * 200_000, "JSON", "malformed"),
    ],
    ids=["cut", "empty", "list", "null", "nested-too-deep"],
)
def test_a_malformed_file_is_one_clear_line(tmp_path: Path, text: str, needed: str, found: str) -> None:
    """`--model FILE` of a bad file names the file."""
    path = tmp_path / "config.json"
    path.write_text(text, "utf-8")
    with pytest.raises(BadModel) as caught:
        load_model(path)
    assert (caught.value.needed, str(path) in caught.value.who) == (needed, True)
    assert found in caught.value.found
    assert "\n" not in caught.value.message


def test_bytes_that_are_no_text_are_one_clear_line(tmp_path: Path) -> None:
    """A weight file named where a config is due."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(BadModel) as caught:
        load_model(path)
    assert caught.value.needed == "JSON"


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    """The cause is the system's own word for it."""
    with pytest.raises(BadModel) as caught:
        load_model(tmp_path / "none.json")
    assert caught.value.found == "No such file or directory"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


def test_a_folder_stands_for_the_config_in_it(tmp_path: Path) -> None:
    """A checkpoint's folder is what people have at hand."""
    (tmp_path / "config.json").write_text(json.dumps(config("mha")), "utf-8")
    assert load_model(tmp_path) == model_from_config(config("mha"))
