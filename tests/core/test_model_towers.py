"""Towers of composite configs: read where they are plain attention, named with a reason where they are not."""

from __future__ import annotations

import pytest

from backstamp.errors import BadModel
from backstamp.model import LayerGroup, ModelFacts, model_from_config
from tests.models import config

GONE = object()


def with_tower(name: str, part: str, **fields: object) -> ModelFacts:
    """A config of the test data with fields of one tower changed or gone."""
    whole = config(name)
    tower = {field: value for field, value in {**whole[part], **fields}.items() if value is not GONE}
    return model_from_config({**whole, part: tower})


def only(model: ModelFacts, component: str) -> LayerGroup:
    """The one group of a component."""
    (group,) = [group for group in model.groups if group.component == component]
    return group


def test_a_windowed_encoder_is_no_sliding_window() -> None:
    """Qwen2.5-VL: blocks of patches are rows of their own, so its windowed and full layers are one kernel's."""
    assert config("qwen2_5_vl")["vision_config"]["window_size"] == 112
    tower = only(model_from_config(config("qwen2_5_vl")), "vision")
    assert (len(tower.layers), tower.facts.window_left, tower.facts.chunk_tokens) == (32, -1, 0)
    assert (tower.facts.attn_type, tower.facts.causal) == ("encoder", False)


def test_the_width_of_qwen2_vl_is_its_own_not_the_language_models() -> None:
    """Its `hidden_size` is what it hands on: 3584 over 16 heads would be a head dim no kernel has."""
    assert config("qwen2_vl")["vision_config"]["hidden_size"] == 3584
    assert only(model_from_config(config("qwen2_vl")), "vision").facts.head_dim == 80


@pytest.mark.parametrize("said", [GONE, "qwen2_5_vl", "qwen2_5_vl_vision"], ids=["unsaid", "the-whole's", "its-own"])
def test_a_tower_is_known_by_its_own_type_or_the_models(said: object) -> None:
    """Checkpoints of three ages name one tower three ways."""
    model = with_tower("qwen2_5_vl", "vision_config", model_type=said)
    assert (only(model, "vision").facts.num_qo_heads, model.unread) == (16, ())


def test_a_nested_config_leaves_out_what_its_class_has() -> None:
    """Pixtral's tower says its head dim alone; so does what transformers wrote of any nested config."""
    assert "num_attention_heads" not in config("pixtral")["vision_config"]
    assert only(model_from_config(config("pixtral")), "vision") == only(model_from_config(config("mistral3")), "vision")
    assert "num_attention_heads" not in config("llava")["text_config"]


def nested(**text: object) -> ModelFacts:
    """A composite whose language model is saved as its difference from its class."""
    return model_from_config({"model_type": "llava", "text_config": text})


def test_a_nested_gemma2_keeps_the_softcap_its_class_has() -> None:
    """PaliGemma 2 writes its width and little else: heads of 2304 / 8 without a softcap would answer wrongly."""
    groups = nested(model_type="gemma2", num_hidden_layers=26).groups
    assert [(group.facts.softcap, group.facts.head_dim, group.facts.window_left) for group in groups] == [
        (50.0, 256, 4095),
        (50.0, 256, -1),
    ]
    (uncapped, _) = nested(model_type="gemma2", attn_logit_softcapping=None).groups
    assert uncapped.facts.softcap == 0.0


def test_a_nested_qwen_has_the_head_dim_and_the_switch_of_its_class() -> None:
    """Qwen3 4B is 2560 wide with heads of 128; its window is switched off by a field its class drops."""
    fields = {"hidden_size": 2560, "num_hidden_layers": 36, "num_key_value_heads": 8, "sliding_window": 4096}
    (group,) = nested(model_type="qwen3", **fields).groups
    assert (group.facts.head_dim, group.facts.window_left, len(group.layers)) == (128, -1, 36)


def test_a_field_that_is_null_is_not_left_out() -> None:
    """Mistral's class has a window, and LLaVA's Mistral says that it has none."""
    (group,) = nested(model_type="mistral", sliding_window=None).groups
    assert (group.facts.window_left, group.facts.num_kv_heads) == (-1, 8)
    (sliding,) = nested(model_type="mistral").groups
    assert sliding.facts.window_left == 4095


def test_a_config_that_stands_alone_leaves_nothing_out() -> None:
    """The same Gemma 2 as a whole model is a config somebody broke."""
    with pytest.raises(BadModel) as caught:
        model_from_config({"model_type": "gemma2", "num_hidden_layers": 26})
    assert caught.value.who.endswith("field num_attention_heads")


@pytest.mark.parametrize("named", ["vit_config", "vision_tower_config"])
def test_towers_are_found_under_the_names_configs_use(named: str) -> None:
    """`vision_config` is the most common of them, not the only one."""
    whole = config("qwen3_vl")
    moved = {field: value for field, value in whole.items() if field != "vision_config"}
    model = model_from_config({**moved, named: whole["vision_config"]})
    assert only(model, "vision") == only(model_from_config(whole), "vision")


def test_an_omni_model_has_its_thinkers_towers() -> None:
    """Vision before audio; the talker and its vocoder are models of their own, and said to be."""
    model = model_from_config(config("qwen3_omni"))
    assert model.components == ("main", "vision", "audio")
    assert [(part.component, "served apart" in part.reason) for part in model.unread] == [
        ("talker", True),
        ("code2wav", True),
    ]


def test_a_null_tower_is_no_tower() -> None:
    """A composite saved without one."""
    model = model_from_config({**config("gemma3"), "vision_config": None})
    assert (model.components, model.unread) == (("main",), ())


#: name: (fields of the tower, what the reason names, what it got)
UNREADABLE: dict[str, tuple[dict[str, object], str, str]] = {
    "unknown-kind": ({"model_type": "swin"}, "field model_type", "swin"),
    "heads-as-list": ({"num_attention_heads": [16]}, "field num_attention_heads", "[16]"),
    "negative-width": ({"hidden_size": -1152}, "field hidden_size", "-1152"),
    "width-does-not-divide": ({"hidden_size": 1153}, "field hidden_size", "1153"),
    "kv-heads-do-not-divide": ({"num_key_value_heads": 5}, "field num_key_value_heads", "5"),
    "depth-zero": ({"num_hidden_layers": 0}, "field num_hidden_layers", "0"),
    "too-deep": ({"num_hidden_layers": 10**9}, "at most 10000 layers", "1000000000"),
    "type-as-number": ({"model_type": 3}, "field model_type", "3"),
}


@pytest.mark.parametrize(("fields", "field", "found"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_tower_leaves_the_language_model_usable(
    fields: dict[str, object], field: str, found: str
) -> None:
    """It is not in the groups and not forgotten: its component and one line that names the field."""
    model = with_tower("gemma3", "vision_config", **fields)
    assert model.components == ("main",)
    assert model.layers == model_from_config(config("gemma3")).layers
    (part,) = model.unread
    assert part.component == "vision"
    assert "vision_config" in part.reason
    assert field in part.reason
    assert f"got {found}" in part.reason
    assert "\n" not in part.reason


@pytest.mark.parametrize("value", [[1], "siglip", 3], ids=["list", "text", "number"])
def test_a_tower_that_is_no_object_is_named(value: object) -> None:
    """The same as one with a wrong field."""
    model = model_from_config({**config("gemma3"), "vision_config": value})
    assert [part.component for part in model.unread] == ["vision"]
    assert "needs an object" in model.unread[0].reason


def test_a_part_that_attends_and_is_known_to_nobody_is_named() -> None:
    """A resampler between tower and language model is attention too; a projector is not."""
    parts = {"perceiver_config": {"attention": {"n_heads": 16}}, "projector_config": {"hidden_size": 1152}}
    model = model_from_config({**config("gemma3"), **parts})
    assert [part.component for part in model.unread] == ["perceiver"]


def test_a_language_model_that_stands_alone_has_no_other_parts() -> None:
    """Kimi Linear keeps the heads of its linear layers in an object of their own."""
    heads = {"num_heads": 32, "head_dim": 128}
    assert model_from_config({**config("mha"), "linear_attn_config": heads, "layer_types": WORDS}).unread == ()


WORDS = ["full_attention"] * 32
