"""Real configs → layer facts: family, heads, dims, windows, sinks and softcap of every layer."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest

from backstamp.errors import BadModel
from backstamp.model import LayerFacts, ModelFacts, default_model, group_layers, model_from_config
from tests.models import FOLDER, config


def changed(name: str, *gone: str, **fields: object) -> ModelFacts:
    """A config of the test data without some fields and with others."""
    kept = {field: value for field, value in config(name).items() if field not in gone}
    return model_from_config({**kept, **fields})


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
        "deepseek_v4 (bf16): 2 x csa 64/1 heads, head dim 512, window 128, sinks fp32; "
        "21 x csa 64/1 heads, head dim 512, window 128, sinks fp32, top 512, 1/4; "
        "20 x csa 64/1 heads, head dim 512, window 128, sinks fp32, 1/128"
    )


def test_a_composite_model_is_described_component_by_component() -> None:
    """Still one line: the main model unnamed, the others by name, and what is not known of it."""
    assert model_from_config(config("llama4")).describe() == (
        "llama4 (bf16): 36 x mha 40/8 heads, head dim 128, chunks of 8192; 12 x mha 40/8 heads, head dim 128"
        " | vision: 34 x mha 16/16 heads, head dim 88, encoder"
    )
    assert model_from_config(config("mllama")).describe().count(" | ") == 2
    assert ": 8 x mha 32/8 heads, head dim 128, cross |" in model_from_config(config("mllama")).describe()
    assert model_from_config(config("qwen3_omni")).describe().endswith(" | not read: talker, code2wav")


def test_the_main_component_leads_whatever_layer_comes_first() -> None:
    """A decoder whose first layer is cross-attention is still a model, not a component."""
    own = LayerFacts(family="mha", num_qo_heads=8, num_kv_heads=8, head_dim=64, v_head_dim=64)
    other = replace(own, causal=False, attn_type="cross", component="cross_attention")
    groups = group_layers([(other,), (own,), (other, own)])
    assert [(group.component, group.layers) for group in groups] == [("main", (1, 2)), ("cross_attention", (0, 2))]


def test_towers_and_cross_attention_make_no_hybrid() -> None:
    """A recurrent language model with a vision tower has no attention of its own to share a cache with."""
    recurrent = LayerFacts(family="mamba2", num_qo_heads=1, num_kv_heads=8, head_dim=64, v_head_dim=64)
    tower = model_from_config(config("gemma3")).groups[-1]
    model = ModelFacts(
        name="m", architecture="", dtype="bf16", layers=((recurrent,),), groups=(*group_layers([(recurrent,)]), tower)
    )
    assert (model.is_hybrid, model.main_family, model.attention_groups) == (False, None, ())
    assert model.components == ("main", "vision")
    assert model_from_config(config("qwen3_5")).is_hybrid


TEXT = {name: config(name)["text_config"] for name in ("llama4", "mllama")}
CHUNKED = (["chunked_attention"] * 3 + ["full_attention"]) * 12

LISTED_OTHERWISE = {
    "qwen3-next-interval": ("hybrid", {"full_attention_interval": 4}),
    "gemma2-by-type": ("softcap", {}),
    "gpt-oss-by-type": ("sinks", {}),
    "gemma2-by-pattern": ("softcap", {"model_type": "other", "sliding_window_pattern": 2}),
    "exaone-letters": ("softcap", {"model_type": "other", "sliding_window_pattern": "LG"}),
    "minimax-numbers": ("minimax", {"attn_type_list": ([0] * 7 + [1]) * 10}),
    "deepseek-v4-ratios": ("dsv4", {"compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0]}),
    "lfm2-indices": ("lfm2", {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
    "lfm2-legacy-words": ("lfm2", {"layers_block_type": ["conv", "conv", "attention", "conv", "conv", "attention",
        "conv", "conv", "attention", "conv", "attention", "conv", "attention", "conv", "attention", "conv"]}),
    "v32-by-index-topk": ("dsa", {}),
    "llama4-marks": ("llama4", {"text_config": {**TEXT["llama4"], "no_rope_layers": [1, 1, 1, 0] * 12}}),
    "llama4-words": ("llama4", {"text_config": {**TEXT["llama4"], "layer_types": CHUNKED}}),
    "llama4-interval": ("llama4", {"text_config": {**TEXT["llama4"], "no_rope_layer_interval": 4}}),
    "legacy-sparse-word": ("dsa", {"layer_types": ["deepseek_sparse_attention"] * 61}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), LISTED_OTHERWISE.values(), ids=LISTED_OTHERWISE)
def test_older_ways_to_list_layers_say_the_same(name: str, fields: dict[str, object]) -> None:
    """A checkpoint saved before transformers had `layer_types` is the same model."""
    assert changed(name, "layer_types", **fields).layers == model_from_config(config(name)).layers


def test_a_chunk_is_no_window() -> None:
    """It does not slide: a kernel with windows alone would let a chunk's first token see the chunk before."""
    chunked, full, _ = model_from_config(config("llama4")).groups
    assert (chunked.facts.chunk_tokens, chunked.facts.window_left, chunked.facts.causal) == (8192, -1, True)
    assert (full.facts.chunk_tokens, full.layers[:2]) == (0, (3, 7))
    whole = changed("llama4", text_config={**TEXT["llama4"], "attention_chunk_size": None})
    assert [group.facts.chunk_tokens for group in whole.groups if group.component == "main"] == [0]


def test_cross_attention_layers_are_layers_of_the_main_numbering() -> None:
    """Llama 3.2 Vision: layer 3 attends to the image alone, layer 4 to the text."""
    model = model_from_config(config("mllama"))
    assert [facts.component for at in (2, 3, 4) for facts in model.layers[at]] == ["main", "cross_attention", "main"]
    assert [group.layers for group in model.groups if group.facts.attn_type == "cross"] == [
        (3, 8, 13, 18, 23, 28, 33, 38)
    ]
    (only, _) = changed("mllama", text_config={**TEXT["mllama"], "cross_attention_layers": []}).groups
    assert (only.component, len(only.layers)) == ("main", 40)


def test_a_decoder_layer_of_whisper_has_both_of_its_mixers() -> None:
    """Its own tokens first, then the sound; both count with the decoder's layers."""
    model = model_from_config({**config("whisper"), "decoder_layers": 4})
    assert [[facts.attn_type for facts in layer] for layer in model.layers] == [["decoder", "cross"]] * 4
    assert [len(group.layers) for group in model.groups] == [4, 4, 32]
    assert (model.max_position, model.main_family, model.is_hybrid) == (448, "mha", False)


@pytest.mark.parametrize(
    ("name", "fields"),
    [("qwen3", {"is_causal": False}), ("mha", {"use_bidirectional_attention": True}), ("mha", {"model_type": "bert"})],
    ids=["embedding", "gemma-embedding", "bert"],
)
def test_a_language_model_that_is_an_encoder_says_so(name: str, fields: dict[str, object]) -> None:
    """Nothing is cached and every token sees every other; it is the main component all the same."""
    (group,) = changed(name, **fields).groups
    assert (group.component, group.facts.attn_type, group.facts.causal) == ("main", "encoder", False)


def test_bert_as_a_decoder_is_a_decoder() -> None:
    """`is_decoder` alone makes it causal."""
    (group,) = changed("mha", model_type="bert", is_decoder=True).groups
    assert (group.facts.attn_type, group.facts.causal) == ("decoder", True)


def test_nemotron_letters_and_words_say_the_same() -> None:
    """`hybrid_override_pattern` of the checkpoint is what transformers spells out."""
    words = config("nemotron_h")["layers_block_type"]
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    pattern = "".join(letters[word] for word in words)
    other = changed("nemotron_h", "layers_block_type", hybrid_override_pattern=pattern, num_hidden_layers=56)
    assert other.layers == model_from_config(config("nemotron_h")).layers


def test_kimi_linear_lists_count_layers_from_one() -> None:
    """The released config's `linear_attn_config` against transformers' own fields."""
    full = [4, 8, 12, 16, 20, 24, 27]
    nested = {
        "full_attn_layers": full,
        "kda_layers": [at for at in range(1, 28) if at not in full],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    }
    gone = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
    assert changed("kda", *gone, linear_attn_config=nested).layers == model_from_config(config("kda")).layers


@pytest.mark.parametrize("nested", [True, False])
def test_the_bound_of_a_kimi_decay_is_a_fact_of_the_layer(nested: bool) -> None:
    """Kimi K3 has `gate_lower_bound` in its `linear_attn_config`, GLM 5 Next `linear_lower_bound` beside its heads."""
    full = [4, 8, 12, 16, 20, 24, 27]
    part = {"full_attn_layers": full, "kda_layers": [at for at in range(1, 28) if at not in full], "head_dim": 128}
    part |= {"num_heads": 32, "short_conv_kernel_size": 4}

    def bounds(value: object) -> set[float | None]:
        if nested:
            gone = ("layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim")
            model = changed("kda", *gone, linear_attn_config={**part, "gate_lower_bound": value})
        else:
            model = changed("kda", linear_lower_bound=value)
        return {group.facts.gate_lower_bound for group in model.groups if group.facts.family == "kda"}

    assert bounds(-5) == {-5.0}
    assert bounds(None) == {None}
    for wrong in (0, 5.0, True, "low", float("nan")):
        with pytest.raises(BadModel, match="lower_bound"):
            bounds(wrong)


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
    assert [(len(group.layers), group.facts.num_kv_heads, group.facts.window_left) for group in model.groups] == [
        (29, 4, 1023),
        (5, 4, -1),
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


def test_a_part_says_its_dtype_before_the_whole() -> None:
    """`dtype` stands in `text_config`, outside it, or both; null is unsaid."""
    text = config("gemma3")["text_config"]
    assert changed("gemma3", "dtype", text_config={**text, "dtype": "float16"}).dtype == "fp16"
    assert changed("gemma3", dtype="bfloat16", text_config={**text, "dtype": "float16"}).dtype == "fp16"
    assert changed("gemma3", dtype="float16", text_config={**text, "dtype": None}).dtype == "fp16"


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
