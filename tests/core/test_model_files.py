"""The configs of the test data, one by one: every fact of every released model they are the config of."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from backstamp.model import DraftFacts, LayerFacts, model_from_config
from tests.models import FOLDER, config

UNSET = asdict(LayerFacts(family="mha", num_qo_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1))
#: Said as pairs.
PAIRS = {"num_qo_heads", "num_kv_heads", "head_dim", "v_head_dim"}

Facts = dict[str, object]


def shown(facts: LayerFacts) -> Facts:
    """The facts that say something, heads and dims as pairs."""
    said = {name: value for name, value in asdict(facts).items() if value != UNSET[name] or name == "family"}
    return {
        "heads": (facts.num_qo_heads, facts.num_kv_heads),
        "dims": (facts.head_dim, facts.v_head_dim),
        **{name: value for name, value in said.items() if name not in PAIRS},
    }


def mha(heads: tuple[int, int], dim: int, **more: object) -> Facts:
    """A plain attention layer."""
    return {"family": "mha", "heads": heads, "dims": (dim, dim), **more}


def mla(heads: int, family: str = "mla", nope: int = 128, value: int = 128, **more: object) -> Facts:
    """A latent attention layer: 512 latent, 64 rotary."""
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "ragged_dims": (nope + 64, value)}
    return {"family": family, "heads": (heads, 1), "dims": (576, 512), **ranks, **more}


def tower(component: str, heads: int, dim: int) -> Facts:
    """Layers of a tower, all alike."""
    return mha((heads, heads), dim, component=component, attn_type="encoder", causal=False)


def cross(heads: tuple[int, int], dim: int) -> Facts:
    """Cross-attention of a decoder."""
    return mha(heads, dim, component="cross_attention", attn_type="cross", causal=False)


def indexer(topk: int, heads: int) -> Facts:
    """What selects keys; every released one is 128 wide."""
    return {"index_topk": topk, "index_heads": heads, "index_head_dim": 128}


def linear(family: str, heads: tuple[int, int], dims: tuple[int, int], taps: int) -> Facts:
    """A linear mixer with a convolution."""
    return {"family": family, "heads": heads, "dims": dims, "conv_kernel": taps}


V4 = {"family": "csa", "heads": (64, 1), "dims": (512, 512), "window_left": 127, "sinks": "fp32"}
LIGHTNING = [(70, {"family": "lightning", "heads": (64, 64), "dims": (128, 128)}), (10, mha((64, 8), 128))]

#: Layers of each kind, in order. Read off the released configs and their modeling files.
EXPECTED: dict[str, list[tuple[int, Facts]]] = {
    # Llama 3.1 8B
    "mha": [(32, mha((32, 8), 128))],
    # DeepSeek V3, V3.2, V4 Flash, V2
    "mla": [(61, mla(128))],
    "dsa": [(61, mla(128, "sparse_mla", **indexer(2048, 64)))],
    "dsv4": [(2, V4), (21, {**V4, **indexer(512, 64), "compress_rate": 4}), (20, {**V4, "compress_rate": 128})],
    "deepseek_v2": [(60, mla(128))],
    # GLM-5
    "glm_moe_dsa": [(78, mla(64, "sparse_mla", nope=192, value=256, **indexer(2048, 32)))],
    # Qwen3-Next 80B-A3B; its query projection is twice as wide for a gate, its attention is not
    "hybrid": [(36, linear("gdn", (16, 32), (128, 128), 4)), (12, mha((16, 2), 256))],
    # Kimi Linear 48B-A3B; its rotary part is kept and not rotated
    "kda": [(20, linear("kda", (32, 32), (128, 128), 4)), (7, mla(32))],
    # gpt-oss-120b: sinks in the model's own dtype, on both kinds of layers
    "sinks": [(18, mha((64, 8), 64, window_left=127, sinks="bf16")), (18, mha((64, 8), 64, sinks="bf16"))],
    # Gemma 2 2B caps its logits, Gemma 3 4B does not
    "softcap": [(13, mha((8, 4), 256, window_left=4095, softcap=50.0)), (13, mha((8, 4), 256, softcap=50.0))],
    "gemma3": [(29, mha((8, 4), 256, window_left=1023)), (5, mha((8, 4), 256)), (27, tower("vision", 16, 72))],
    # Gemma 3n E4B, Gemma 4 E4B without its towers, Gemma 4 E2B
    "gemma3n": [(28, mha((8, 2), 256, window_left=511)), (7, mha((8, 2), 256))],
    "gemma4": [(35, mha((8, 2), 256, window_left=511)), (7, mha((8, 2), 512))],
    "gemma4_multimodal": [
        (28, mha((8, 1), 256, window_left=511)),
        (7, mha((8, 1), 512)),
        (16, tower("vision", 12, 64)),
    ],
    # Mistral 7B v0.1, Mixtral 8x7B, Mistral Small 3.1, Pixtral 12B
    "mistral": [(32, mha((32, 8), 128, window_left=4095))],
    "mixtral": [(32, mha((32, 8), 128))],
    "mistral3": [(40, mha((32, 8), 128)), (24, tower("vision", 16, 64))],
    "pixtral": [(40, mha((32, 8), 128)), (24, tower("vision", 16, 64))],
    # Qwen2 7B, the windows of its configuration class, Qwen3 8B, 30B-A3B, Qwen3.5 9B
    "qwen2": [(28, mha((28, 4), 128))],
    "qwen2_sliding": [(28, mha((32, 8), 128)), (4, mha((32, 8), 128, window_left=4095))],
    "qwen3": [(36, mha((32, 8), 128))],
    "qwen3_moe": [(48, mha((32, 4), 128))],
    "qwen3_5": [
        (24, linear("gdn", (16, 32), (128, 128), 4)),
        (8, mha((16, 4), 256)),
        (27, tower("vision", 16, 72)),
    ],
    # Qwen2-VL 7B, Qwen2.5-VL 7B, Qwen3-VL 8B, Qwen2-Audio 7B, Qwen3-Omni 30B-A3B
    "qwen2_vl": [(28, mha((28, 4), 128)), (32, tower("vision", 16, 80))],
    "qwen2_5_vl": [(28, mha((28, 4), 128)), (32, tower("vision", 16, 80))],
    "qwen3_vl": [(36, mha((32, 8), 128)), (27, tower("vision", 16, 72))],
    "qwen2_audio": [(32, mha((32, 32), 128)), (32, tower("audio", 20, 64))],
    "qwen3_omni": [(48, mha((32, 4), 128)), (27, tower("vision", 16, 72)), (32, tower("audio", 20, 64))],
    # LLaVA 1.5 7B, Llama 3.2 11B Vision, Llama 4 Scout
    "llava": [(32, mha((32, 32), 128)), (24, tower("vision", 16, 64))],
    "mllama": [(32, mha((32, 8), 128)), (8, cross((32, 8), 128)), (40, tower("vision", 16, 80))],
    "llama4": [(36, mha((40, 8), 128, chunk_tokens=8192)), (12, mha((40, 8), 128)), (34, tower("vision", 16, 88))],
    # Whisper large-v3
    "whisper": [(32, mha((20, 20), 64)), (32, cross((20, 20), 64)), (32, tower("audio", 20, 64))],
    # LFM2 1.2B, Nemotron Nano 9B v2, Falcon-H1 7B
    "lfm2": [(10, linear("short_conv", (1, 1), (2048, 2048), 3)), (6, mha((32, 8), 64))],
    "nemotron_h": [(27, linear("mamba2", (8, 128), (128, 80), 4)), (4, mha((40, 8), 128))],
    "falcon_h1": [(44, mha((12, 2), 128)), (44, linear("mamba2", (1, 24), (256, 128), 4))],
    # MiniMax Text-01 as transformers has it, M1 as released, M2
    "minimax": LIGHTNING,
    "minimax_m1": LIGHTNING,
    "minimax_m2": [(62, mha((48, 8), 128))],
    # Phi-1.5, Phi-3 mini 4k
    "phi": [(24, mha((32, 32), 64))],
    "phi3": [(32, mha((32, 32), 96, window_left=2046))],
    # drafts: EAGLE and EAGLE-3 of Llama 3 8B, DeepSeek V3's next-token layer, DFlash of Qwen3 8B, Gemma 4 E2B's
    "draft_eagle": [(1, mha((32, 8), 128))],
    "draft_eagle3": [(1, mha((32, 8), 128))],
    "draft_nextn": [(1, mla(128))],
    "draft_dflash": [(5, mha((32, 8), 128, causal=False))],
    "draft_gemma4_assistant": [(3, mha((4, 1), 256, window_left=511)), (1, mha((4, 1), 512))],
}

DRAFTS = {
    "draft_eagle": DraftFacts(),
    "draft_eagle3": DraftFacts(aux_hidden_states=3),
    "draft_nextn": DraftFacts(),
    "draft_dflash": DraftFacts(aux_hidden_states=5, non_causal=True),
    "draft_gemma4_assistant": DraftFacts(shares_kv=True),
}
NOT_BF16 = {"llava": "fp16", "whisper": "fp16"}
UNREAD = {
    "gemma3n": ("vision", "audio"),
    "gemma4_multimodal": ("audio",),
    "qwen3_omni": ("talker", "code2wav"),
}
#: What the issue names, by the files that hold it.
NAMED = {
    "llama", "qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3", "deepseek_v32", "deepseek_v4", "gpt_oss", "gemma3",
    "kimi_linear", "glm_moe_dsa", "lfm2", "nemotron_h", "falcon_h1", "minimax", "minimax_m1", "minimax_m2",
}  # fmt: skip


def test_every_config_of_the_test_data_is_expected() -> None:
    """A config nobody says anything about would test nothing."""
    assert {path.stem for path in FOLDER.glob("*.json")} == set(EXPECTED)


def test_every_family_the_resolver_must_know_is_among_them() -> None:
    """Told by `model_type`, whatever the file is called."""
    assert {model_from_config(config(name)).name for name in EXPECTED} >= NAMED


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_are_what_the_released_model_is(name: str) -> None:
    """Families, heads, dims and features, the main model first; then what is not in the layers."""
    model = model_from_config(config(name))
    assert [(len(group.layers), shown(group.facts)) for group in model.groups] == EXPECTED[name]
    assert model.dtype == NOT_BF16.get(name, "bf16")
    assert model.draft == DRAFTS.get(name)
    assert tuple(part.component for part in model.unread) == UNREAD.get(name, ())
    assert model.kv_cache_dtype is None


@pytest.mark.parametrize("name", EXPECTED)
def test_groups_hold_every_mixer_of_every_layer_once(name: str) -> None:
    """`layers` and the groups of the main model's numbering are two readings of one model; towers count from 0."""
    model = model_from_config(config(name))
    decoder = [group for group in model.groups if group.component in ("main", "cross_attention")]
    from_groups = sorted((at, group.component, group.facts.family) for group in decoder for at in group.layers)
    from_layers = [(at, facts.component, facts.family) for at, layer in enumerate(model.layers) for facts in layer]
    assert from_groups == sorted(from_layers)
    assert all(group.layers == tuple(sorted(group.layers)) for group in model.groups)
    towers = [group for group in model.groups if group not in decoder]
    assert all(group.layers == tuple(range(len(group.layers))) for group in towers)
    assert all(group.component == group.facts.component for group in model.groups)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_main_model_comes_first(name: str) -> None:
    """Then its cross-attention, then vision, then audio."""
    order = ("main", "cross_attention", "vision", "audio")
    components = model_from_config(config(name)).components
    assert components == tuple(component for component in order if component in components)
    assert components[0] == "main"
