"""Real configs → layer facts: family, heads, dims, windows, sinks and softcap of every layer."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict

import pytest

from backstamp.model import LayerFacts, ModelFacts, default_model, model_from_config
from tests.models import FOLDER, config

UNSET = asdict(LayerFacts(family="mha", num_qo_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1))


def shown(facts: LayerFacts) -> dict[str, object]:
    """The facts that say something, heads and dims as pairs."""
    said = {name: value for name, value in asdict(facts).items() if value != UNSET[name] or name == "family"}
    return {
        "heads": (facts.num_qo_heads, facts.num_kv_heads),
        "dims": (facts.head_dim, facts.v_head_dim),
        **{name: value for name, value in said.items() if "head" not in name or name == "qk_rope_head_dim"},
    }


def mha(heads: tuple[int, int], dim: int, **more: object) -> dict[str, object]:
    """A plain attention layer."""
    return {"family": "mha", "heads": heads, "dims": (dim, dim), **more}


def mla(heads: int, family: str = "mla", nope: int = 128, value: int = 128, **more: object) -> dict[str, object]:
    """A latent attention layer: 512 latent, 64 rotary."""
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "ragged_dims": (nope + 64, value)}
    return {"family": family, "heads": (heads, 1), "dims": (576, 512), **ranks, **more}


V4 = {"family": "csa", "heads": (64, 1), "dims": (512, 512), "window_left": 127, "sinks": "fp32"}

#: Layers of each kind, in order of first appearance. Read off the released configs and their modeling files.
EXPECTED: dict[str, list[tuple[int, dict[str, object]]]] = {
    "mha": [(32, mha((32, 8), 128))],
    "mla": [(61, mla(128))],
    "dsa": [(61, mla(128, "sparse_mla", index_topk=2048))],
    "dsv4": [(23, {**V4, "compress_rate": 128}), (20, {**V4, "index_topk": 512, "compress_rate": 4})],
    "hybrid": [
        (36, {"family": "gdn", "heads": (16, 32), "dims": (128, 128), "conv_kernel": 4}),
        (12, mha((16, 2), 256)),
    ],
    "kda": [(21, {"family": "kda", "heads": (32, 32), "dims": (128, 128), "conv_kernel": 4}), (6, mla(32))],
    "sinks": [(18, mha((64, 8), 64, window_left=127, sinks="bf16")), (18, mha((64, 8), 64, sinks="bf16"))],
    "softcap": [(13, mha((8, 4), 256, window_left=4095, softcap=50.0)), (13, mha((8, 4), 256, softcap=50.0))],
    "mistral": [(32, mha((32, 8), 128, window_left=4095))],
    "mixtral": [(32, mha((32, 8), 128))],
    "qwen2": [(28, mha((28, 4), 128))],
    "qwen2_sliding": [(28, mha((32, 8), 128)), (4, mha((32, 8), 128, window_left=4095))],
    "qwen3": [(32, mha((32, 8), 128))],
    "qwen3_moe": [(48, mha((32, 4), 128))],
    "qwen3_5": [
        (24, {"family": "gdn", "heads": (16, 32), "dims": (128, 128), "conv_kernel": 4}),
        (8, mha((16, 4), 256)),
    ],
    "deepseek_v2": [(32, mla(32))],
    "glm_moe_dsa": [(78, mla(64, "sparse_mla", nope=192, value=256, index_topk=2048))],
    "gemma3": [(22, mha((8, 4), 256, window_left=4095)), (4, mha((8, 4), 256))],
    "gemma4": [(25, mha((8, 4), 256, window_left=511)), (5, mha((8, 4), 512))],
    "lfm2": [
        (10, {"family": "short_conv", "heads": (1, 1), "dims": (2048, 2048), "conv_kernel": 3}),
        (6, mha((32, 8), 64)),
    ],
    "nemotron_h": [
        (27, {"family": "mamba2", "heads": (8, 128), "dims": (128, 64), "conv_kernel": 4}),
        (4, mha((32, 8), 128)),
    ],
    "falcon_h1": [
        (32, mha((32, 8), 128)),
        (32, {"family": "mamba2", "heads": (1, 128), "dims": (256, 8), "conv_kernel": 4}),
    ],
    "minimax": [(16, mha((32, 8), 128)), (16, {"family": "lightning", "heads": (32, 32), "dims": (128, 128)})],
    "phi": [(24, mha((32, 32), 64))],
    "phi3": [(32, mha((32, 32), 96, window_left=2046))],
}


def changed(name: str, *gone: str, **fields: object) -> ModelFacts:
    """A config of the test data without some fields and with others."""
    kept = {field: value for field, value in config(name).items() if field not in gone}
    return model_from_config({**kept, **fields})


def test_every_config_of_the_test_data_is_expected() -> None:
    """A config nobody says anything about would test nothing."""
    assert {path.stem for path in FOLDER.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_are_what_the_released_model_is(name: str) -> None:
    """Families, heads, dims and features, in order of first appearance."""
    model = model_from_config(config(name))
    assert [(len(group.layers), shown(group.facts)) for group in model.groups] == EXPECTED[name]
    assert model.dtype == "bf16"
    assert model.draft is None


@pytest.mark.parametrize("name", EXPECTED)
def test_groups_hold_every_mixer_of_every_layer_once(name: str) -> None:
    """`layers` and `groups` are two readings of one model."""
    model = model_from_config(config(name))
    from_groups = sorted((at, group.facts.family) for group in model.groups for at in group.layers)
    assert from_groups == sorted((at, facts.family) for at, layer in enumerate(model.layers) for facts in layer)
    assert all(group.layers == tuple(sorted(group.layers)) for group in model.groups)


def test_a_parallel_layer_has_both_of_its_mixers() -> None:
    """Falcon-H1 runs attention and Mamba-2 side by side in each of its layers."""
    layers = model_from_config(config("falcon_h1")).layers
    assert {tuple(facts.family for facts in layer) for layer in layers} == {("mha", "mamba2")}


def test_a_layer_that_is_an_mlp_alone_has_no_mixer() -> None:
    """Nemotron-H counts its MLPs as layers: attention keeps the index it has in the model."""
    model = model_from_config(config("nemotron_h"))
    assert (len(model.layers), model.layers[1]) == (56, ())
    assert model.attention_groups[0].layers == (14, 21, 30, 39)


@pytest.mark.parametrize(
    ("name", "hybrid", "family"),
    [("mha", False, "mha"), ("hybrid", True, "mha"), ("kda", True, "mla"), ("dsa", False, "sparse_mla")],
)
def test_a_hybrid_has_attention_and_linear_mixers(name: str, hybrid: bool, family: str) -> None:
    """The main family is that of the attention, whichever comes first."""
    model = model_from_config(config(name))
    assert (model.is_hybrid, model.main_family) == (hybrid, family)
    assert bool(model.linear_groups) == hybrid
    assert model.attention_groups + model.linear_groups != ()


def test_a_model_is_described_in_one_line() -> None:
    """What `backstamp explain` prints of a model."""
    assert default_model().describe() == "llama (bf16): 32 x mha 32/8 heads, head dim 128"
    assert model_from_config(config("dsv4")).describe() == (
        "deepseek_v4 (bf16): 23 x csa 64/1 heads, head dim 512, window 128, sinks fp32, 1/128; "
        "20 x csa 64/1 heads, head dim 512, window 128, sinks fp32, top 512, 1/4"
    )


LISTED_OTHERWISE = {
    "qwen3-next-interval": ("hybrid", {"full_attention_interval": 4}),
    "gemma2-by-type": ("softcap", {}),
    "gpt-oss-by-type": ("sinks", {}),
    "gemma2-by-pattern": ("softcap", {"model_type": "other", "sliding_window_pattern": 2}),
    "exaone-letters": ("softcap", {"model_type": "other", "sliding_window_pattern": "LG"}),
    "minimax-numbers": ("minimax", {"attn_type_list": [1, 0] * 16}),
    "deepseek-v4-ratios": ("dsv4", {"compress_ratios": [128, 128] + [128, 4] * 20 + [128, 0]}),
    "lfm2-indices": ("lfm2", {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
    "lfm2-legacy-words": ("lfm2", {"layers_block_type": ["conv", "conv", "attention", "conv", "conv", "attention",
        "conv", "conv", "attention", "conv", "attention", "conv", "attention", "conv", "attention", "conv"]}),
    "v32-by-index-topk": ("dsa", {}),
    "legacy-sparse-word": ("dsa", {"layer_types": ["deepseek_sparse_attention"] * 61}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), LISTED_OTHERWISE.values(), ids=LISTED_OTHERWISE)
def test_older_ways_to_list_layers_say_the_same(name: str, fields: dict[str, object]) -> None:
    """A checkpoint saved before transformers had `layer_types` is the same model."""
    assert changed(name, "layer_types", **fields).layers == model_from_config(config(name)).layers


def test_nemotron_letters_and_words_say_the_same() -> None:
    """`hybrid_override_pattern` of the checkpoint is what transformers spells out."""
    words = config("nemotron_h")["layers_block_type"]
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    pattern = "".join(letters[word] for word in words)
    other = changed("nemotron_h", "layers_block_type", hybrid_override_pattern=pattern, num_hidden_layers=56)
    assert other.layers == model_from_config(config("nemotron_h")).layers


def test_kimi_linear_lists_count_layers_from_one() -> None:
    """The released config's `linear_attn_config` against transformers' own fields."""
    full = [5, 9, 13, 17, 21, 25]
    nested = {
        "full_attn_layers": full,
        "kda_layers": [at for at in range(1, 28) if at not in full],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }
    gone = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    assert changed("kda", *gone, linear_attn_config=nested).layers == model_from_config(config("kda")).layers


def test_a_window_that_is_switched_off_is_no_window() -> None:
    """Qwen writes `sliding_window` and `use_sliding_window: false` into one config."""
    assert config("qwen2_sliding")["sliding_window"] == 4096
    for gone in ((), ("layer_types",)):
        (group,) = changed("qwen2_sliding", *gone, use_sliding_window=False).groups
        assert (group.facts.window_left, len(group.layers)) == (-1, 32)


def test_the_first_layers_of_qwen_keep_full_attention() -> None:
    """`max_window_layers` says from which layer on the window holds."""
    assert changed("qwen2_sliding", "layer_types").layers == model_from_config(config("qwen2_sliding")).layers


def test_a_nested_config_is_read_with_what_the_outer_one_says_for_it() -> None:
    """google/gemma-3-4b-it: dtype outside, and the heads of its class left out."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "intermediate_size": 10240,
    }
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    model = model_from_config({**outer, "text_config": text})
    assert [(len(group.layers), shown(group.facts)) for group in model.groups] == [
        (29, mha((8, 4), 256, window_left=1023)),
        (5, mha((8, 4), 256)),
    ]
    assert (model.name, model.architecture, model.dtype) == ("gemma3", "Gemma3ForConditionalGeneration", "bf16")


def test_gemma4_checkpoints_name_the_head_dim_of_their_full_layers() -> None:
    """`global_head_dim` of the checkpoint is `per_layer_config` of transformers."""
    text = {field: value for field, value in config("gemma4")["text_config"].items() if field != "per_layer_config"}
    model = changed("gemma4", "text_config", text_config={**text, "global_head_dim": 512})
    assert model.layers == model_from_config(config("gemma4")).layers


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 8}, 8),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({}, 32),
    ],
    ids=["falcon-7b", "falcon-40b", "chatglm", "unsaid"],
)
def test_grouped_heads_are_found_under_older_names(fields: dict[str, object], kv_heads: int) -> None:
    """A shared head that is said another way must not become 32 heads."""
    assert changed("mha", "num_key_value_heads", **fields).groups[0].facts.num_kv_heads == kv_heads


def test_a_missing_head_dim_is_the_width_divided_among_the_heads() -> None:
    """Phi has none: 2048 over 32 heads."""
    assert "head_dim" not in config("phi")
    assert model_from_config(config("phi")).groups[0].facts.head_dim == 64


@pytest.mark.parametrize(
    ("written", "canonical"),
    [("bfloat16", "bf16"), ("torch.float16", "fp16"), ("half", "fp16"), ("float32", "fp32"), ("bf16", "bf16")],
)
def test_dtypes_have_one_name(written: str, canonical: str) -> None:
    """fp16, bf16 and fp32, however a config writes them."""
    assert changed("mha", "dtype", torch_dtype=written).dtype == canonical


def test_a_config_that_does_not_say_its_dtype_is_served_in_bf16() -> None:
    """Config classes leave it out until a model is saved; engines serve such a config in bf16."""
    unsaid = {field: value for field, value in config("mha").items() if field != "dtype"}
    assert model_from_config(unsaid).dtype == "bf16"


def test_the_engine_may_settle_the_dtype() -> None:
    """What a model is loaded as beats what it was saved as, sinks included."""
    model = model_from_config(config("sinks"), dtype="float16")
    assert (model.dtype, model.groups[0].facts.sinks) == ("fp16", "fp16")


def test_facts_are_frozen_hashable_and_survive_a_process_border() -> None:
    """A plan's inputs may be compared, kept as keys and sent to workers."""
    model = model_from_config(config("kda"))
    assert hash(model) == hash(pickle.loads(pickle.dumps(model)))
    with pytest.raises(FrozenInstanceError):
        model.groups[0].facts.head_dim = 1


def test_reading_a_model_imports_no_transformers_and_no_torch() -> None:
    """Any config is read on any machine."""
    code = (
        "import sys; from backstamp.model import load_model; load_model(sys.argv[1]);"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code, str(FOLDER / "dsv4.json")], capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == "[]"
