"""The demo's model keeps what attention sees of a real config, and refuses what it cannot be."""

from __future__ import annotations

import pytest
import torch

from backstamp.errors import BadModel
from backstamp.testing.decoder import Decoder, DecoderConfig
from tests.greedy import MODELS, decoder

LLAMA, GPT_OSS, GEMMA2 = (MODELS[name] for name in ("llama", "gpt-oss", "gemma2"))


def test_a_scaled_config_keeps_what_attention_sees() -> None:
    """Head dim, heads ratio, sinks, window kinds and rotary base are the model's own; sizes are not."""
    config = DecoderConfig.from_config(GPT_OSS, layers=3)
    assert (config.num_qo_heads, config.num_kv_heads, config.head_dim) == (16, 2, 64)
    assert config.windows == (23, -1, 23)
    assert (config.sinks, config.softcap, config.rope_theta, config.scale) == (True, 0.0, 150000.0, 0.125)
    gemma = DecoderConfig.from_config({**GEMMA2, "query_pre_attn_scalar": 144})
    assert (gemma.softcap, gemma.scale) == (10.0, pytest.approx(1 / 12))


def test_a_kind_of_layer_that_comes_late_is_kept() -> None:
    """Five sliding layers for one full layer still give a full layer when four are kept."""
    types = [*["sliding_attention"] * 5, "full_attention"] * 3
    config = DecoderConfig.from_config({**GEMMA2, "layer_types": types}, layers=4)
    assert config.windows == (23, 23, 23, -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kv_lora_rank": 512}, r"needs multi-head attention, got kv_lora_rank 512", id="mla"),
        pytest.param({"layer_types": ["linear_attention"]}, "got linear_attention", id="linear"),
        pytest.param({"num_attention_heads": None}, "'num_attention_heads' of 1 or more, got None", id="missing"),
        pytest.param({"num_attention_heads": "8"}, "got '8'", id="text"),
        pytest.param({"num_key_value_heads": 3}, "got 8 and 3", id="ratio"),
        pytest.param({"head_dim": 33}, "even head_dim", id="odd"),
        pytest.param({"rms_norm_eps": float("nan")}, "finite number 'rms_norm_eps'", id="nan"),
    ],
)
def test_a_config_the_decoder_can_not_be_is_refused(change: dict[str, object], message: str) -> None:
    """Malformed facts and other attention families give one clear line."""
    with pytest.raises(BadModel, match=message):
        DecoderConfig.from_config({**LLAMA, **change})


@pytest.mark.parametrize("layers", [0, 3])
def test_a_draft_has_some_of_the_targets_layers(layers: int) -> None:
    """A draft of no layer, or of more than there are, is refused."""
    with pytest.raises(BadModel, match="needs 1 to 2 draft layers"):
        Decoder.draft_of(decoder("llama"), layers)


def test_weights_depend_on_the_seed_alone() -> None:
    """The same seed gives the same model, in any dtype; another seed another model."""
    config = decoder("llama").config
    first, again, other = Decoder(config, 3), Decoder(config, 3, dtype=torch.float16), Decoder(config, 4)
    assert torch.equal(first.layers[1].q.half(), again.layers[1].q)
    assert not torch.equal(first.layers[1].q, other.layers[1].q)
