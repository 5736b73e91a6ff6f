"""Draft configs: what a draft head needs of its target, told by its architecture and its fields."""

from __future__ import annotations

import pytest

from backstamp.errors import BadModel
from backstamp.model import DraftFacts, ModelFacts, model_from_config
from tests.models import config


def draft(name: str, **fields: object) -> ModelFacts:
    """A config of the test data turned into a draft's."""
    return model_from_config({**config(name), **fields})


DRAFTS: dict[str, tuple[str, dict[str, object], DraftFacts]] = {
    "eagle": ("mha", {"architectures": ["LlamaForCausalLMEagle"]}, DraftFacts()),
    "eagle3": ("mha", {"architectures": ["LlamaForCausalLMEagle3"]}, DraftFacts(aux_hidden_states=3)),
    "eagle3-vllm-name": ("mha", {"architectures": ["Eagle3LlamaForCausalLM"]}, DraftFacts(aux_hidden_states=3)),
    "eagle3-four-states": (
        "mha",
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 9, 17, 30]},
        DraftFacts(aux_hidden_states=4),
    ),
    "eagle3-states-in-eagle-config": (
        "mha",
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        DraftFacts(aux_hidden_states=2),
    ),
    "eagle3-without-states": (
        "mha",
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": False}},
        DraftFacts(),
    ),
    "eagle3-authors-checkpoint": ("mha", {"draft_vocab_size": 32000}, DraftFacts(aux_hidden_states=3)),
    "draft-vocabulary-of-another-algorithm": (
        "mha",
        {"draft_vocab_size": 32000, "speculators_model_type": "eagle"},
        DraftFacts(),
    ),
    "dspark": (
        "qwen3",
        {"architectures": ["Qwen3DSparkModel"], "dspark_target_layer_ids": [33, 34, 35]},
        DraftFacts(aux_hidden_states=3, non_causal=True),
    ),
    "dflash": (
        "qwen3",
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}},
        DraftFacts(aux_hidden_states=5, non_causal=True),
    ),
    "mtp": ("hybrid", {"architectures": ["Qwen3NextMTP"], "num_nextn_predict_layers": 1}, DraftFacts()),
    "gemma4-assistant": (
        "gemma4",
        {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"},
        DraftFacts(shares_kv=True),
    ),
    "convolutions-among-its-layers": (
        "lfm2",
        {"architectures": ["Lfm2ForCausalLMEagle"]},
        DraftFacts(conv_sidecar=True),
    ),
}


@pytest.mark.parametrize(("name", "fields", "expected"), DRAFTS.values(), ids=DRAFTS)
def test_a_draft_says_what_it_needs_of_its_target(name: str, fields: dict[str, object], expected: DraftFacts) -> None:
    """sglang #21272: an algorithm that does not fit the draft's architecture must be told, not accepted at length 1."""
    assert draft(name, **fields).draft == expected


@pytest.mark.parametrize("name", ["mha", "mla", "dsv4", "lfm2"])
def test_a_target_is_no_draft(name: str) -> None:
    """Next-token layers kept beside a target's own (`num_nextn_predict_layers`) do not make it one."""
    assert model_from_config(config(name)).draft is None


WINDOWED = {
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 2048,
}


@pytest.mark.parametrize(
    ("fields", "causal"),
    [
        ({"dflash_config": {"target_layer_ids": [1]}}, [True, False]),
        ({"dflash_config": {"causal": False}}, [False, False]),
        ({"dflash_config": {"causal": True}}, [True, True]),
        ({"dflash_config": {"causal": True}, "is_causal": False}, [False, False]),
        ({"dflash_config": {}, "is_causal": True}, [True, True]),
    ],
    ids=["unsaid", "none", "all", "outer-word-wins", "outer-word"],
)
def test_a_block_draft_sees_its_whole_block_where_it_does_not_slide(
    fields: dict[str, object], causal: list[bool]
) -> None:
    """DFlash: layers with a window are causal unless the config says so of all or of none."""
    model = draft("qwen3", architectures=["DFlashDraftModel"], **{**WINDOWED, **fields})
    assert [(group.facts.causal, group.facts.window_left) for group in model.groups] == [
        (causal[0], 2047),
        (causal[1], -1),
    ]
    assert {group.facts.attn_type for group in model.groups} == {"decoder"}
    assert model.draft is not None
    assert model.draft.non_causal is not all(causal)


@pytest.mark.parametrize(
    ("kind", "causal"), [("full_attention", False), ("sliding_attention", True)], ids=["by-use-swa", "by-type"]
)
def test_a_block_draft_may_slide_in_every_layer(kind: str, causal: bool) -> None:
    """`dflash_config.use_swa` gives every layer a window; only layers that are called sliding are causal by it."""
    fields = {"dflash_config": {"use_swa": True, "swa_window_size": 1024}, "layer_types": [kind] * 36}
    model = draft("qwen3", architectures=["DFlashDraftModel"], **fields)
    (group,) = model.groups
    assert (len(group.layers), group.facts.window_left, group.facts.causal) == (36, 1023, causal)
    assert model.draft == DraftFacts(non_causal=not causal)


def test_a_block_draft_that_slides_everywhere_and_says_two_kinds_is_refused() -> None:
    """Which of its layers are causal would be a guess."""
    with pytest.raises(BadModel) as caught:
        draft("qwen3", architectures=["DFlashDraftModel"], **{**WINDOWED, "dflash_config": {"use_swa": True}})
    assert caught.value.who.endswith("field layer_types")
    assert caught.value.found == "full_attention, sliding_attention"


def test_a_draft_of_a_composite_has_no_towers() -> None:
    """A draft cut from a vision model's config takes hidden states: the target ran the tower."""
    model = draft("qwen3_5", architectures=["Qwen3_5MTP"], num_nextn_predict_layers=1)
    assert (model.components, model.unread, len(model.layers)) == (("main",), (), 1)


@pytest.mark.parametrize(
    ("name", "architecture", "family", "window"),
    [
        ("mla", "DeepseekV3ForCausalLMNextN", "mla", -1),
        ("dsa", "DeepseekV3ForCausalLMNextN", "sparse_mla", -1),
        ("dsv4", "DeepseekV4ForCausalLMNextN", "csa", 127),
        ("hybrid", "Qwen3NextMTP", "mha", -1),
    ],
    ids=["deepseek-v3", "deepseek-v32", "deepseek-v4", "qwen3-next"],
)
def test_a_draft_cut_from_its_target_has_the_next_token_layers_alone(
    name: str, architecture: str, family: str, window: int
) -> None:
    """The target's config serves both: as a draft it has one layer, not sixty-one."""
    (layer,) = draft(name, architectures=[architecture], num_nextn_predict_layers=1).layers
    assert [(facts.family, facts.window_left, facts.compress_rate) for facts in layer] == [(family, window, 0)]


def test_minimax_counts_its_next_token_layers_as_modules() -> None:
    """`num_mtp_modules` of M2: three layers, not the target's sixty-two."""
    assert len(draft("minimax_m2", architectures=["MiniMaxM2MTP"]).layers) == 3


def test_nemotron_lists_the_layers_of_its_draft() -> None:
    """`mtp_layers_block_type`: attention, then an MLP, for each next-token layer."""
    fields = {"mtp_layers_block_type": ["full_attention", "moe"], "num_nextn_predict_layers": 2}
    layers = draft("nemotron_h", architectures=["NemotronHMTP"], **fields).layers
    assert [[facts.family for facts in layer] for layer in layers] == [["mha"], [], ["mha"], []]


def test_a_speculators_config_keeps_its_layer_beside_the_algorithm() -> None:
    """`speculators_model_type` and `transformer_layer_config`, without a model type of its own."""
    nested = {field: value for field, value in config("mha").items() if field != "architectures"}
    model = model_from_config(
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 32000,
            "transformer_layer_config": {**nested, "num_hidden_layers": 1},
        }
    )
    assert (model.name, len(model.layers)) == ("eagle3", 1)
    assert model.draft == DraftFacts(aux_hidden_states=3)
