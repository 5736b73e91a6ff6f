"""Checkpoints quantised with their cache: what they fix, in one name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstamp.errors import BadModel
from backstamp.model import load_model, model_from_config
from tests.models import config

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
QUARK = {
    "quant_method": "quark",
    "export": {"kv_cache_group": ["*k_proj", "*v_proj"]},
    "layer_quant_config": {"*v_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}, "*o_proj": {}},
}
SAID = {
    "compressed-tensors": ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8}, "e4m3fn"),
    "compressed-tensors-without": ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
    "modelopt-scheme": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": FP8}, "e4m3fn"),
    "modelopt-algorithm": ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "e4m3fn"),
    "modelopt-nested": ({"producer": {}, "quantization": {"kv_cache_quant_algo": "FP8"}}, "e4m3fn"),
    "modelopt-without": ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, None),
    "modelopt-4-bit-cache": ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4"),
    "integers": ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
    "quark": (QUARK, "e4m3fn"),
    "quark-without": ({**QUARK, "export": {"kv_cache_group": []}}, None),
    "fp8-weights": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
    "mxfp4-weights": ({"quant_method": "mxfp4"}, None),
}


@pytest.mark.parametrize(("said", "dtype"), SAID.values(), ids=SAID)
def test_a_checkpoint_says_what_its_cache_holds(said: dict[str, object], dtype: str | None) -> None:
    """Quantised weights alone fix nothing, and a cache of another kind is not taken for FP8."""
    assert model_from_config({**config("mha"), "quantization_config": said}).kv_cache_dtype == dtype


def test_a_composite_may_quantise_its_language_model_alone() -> None:
    """The whole's word first, then the part's, at any depth."""
    said = {"quantization_config": {"kv_cache_scheme": FP8}}
    llama, omni = config("llama4"), config("qwen3_omni")
    inner = {**llama["text_config"], **said}
    assert model_from_config({**llama, **said}).kv_cache_dtype == "e4m3fn"
    assert model_from_config({**llama, "text_config": inner}).kv_cache_dtype == "e4m3fn"
    thinker = {**omni["thinker_config"], "text_config": {**omni["thinker_config"]["text_config"], **said}}
    assert model_from_config({**omni, "thinker_config": thinker}).kv_cache_dtype == "e4m3fn"


def test_older_checkpoints_call_it_compression() -> None:
    """`compression_config` of compressed-tensors before transformers took it."""
    assert model_from_config({**config("mha"), "compression_config": {"kv_cache_scheme": FP8}}).kv_cache_dtype


def test_a_file_beside_the_config_says_it_where_the_config_does_not(tmp_path: Path) -> None:
    """ModelOpt's hf_quant_config.json; the config's own word wins, and a config of another name stands alone."""
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside), "utf-8")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("mha")), "utf-8")
    assert [load_model(at).kv_cache_dtype for at in (tmp_path, path)] == ["e4m3fn", "e4m3fn"]
    path.write_text(json.dumps({**config("mha"), "quantization_config": {"quant_method": "fp8"}}), "utf-8")
    assert load_model(path).kv_cache_dtype is None
    other = tmp_path / "other.json"
    other.write_text(json.dumps(config("mha")), "utf-8")
    assert load_model(other).kv_cache_dtype is None


def test_a_malformed_file_beside_the_config_is_one_clear_line(tmp_path: Path) -> None:
    """What it would have said about the cache is not guessed."""
    (tmp_path / "config.json").write_text(json.dumps(config("mha")), "utf-8")
    (tmp_path / "hf_quant_config.json").write_text("{", "utf-8")
    with pytest.raises(BadModel, match="malformed"):
        load_model(tmp_path)
