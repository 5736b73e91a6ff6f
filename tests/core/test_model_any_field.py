"""Every field of every config of the test data, malformed one at a time: facts or one clear line, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from backstamp.errors import BadModel
from backstamp.model import ModelFacts, model_from_config
from tests.models import FOLDER, config

MALFORMED = (None, -1, 0, 1.5, True, 10**12, "x", [], [1], ["x"], {}, {"a": 1})
#: Of these a wrong value must be told wherever it stands, not read past.
TELLING = {
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_heads",
    "attention_heads", "d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "depth",
    "kv_lora_rank", "qk_rope_head_dim", "index_topk", "linear_num_value_heads", "mamba_d_state", "conv_L_cache",
}  # fmt: skip
Path = tuple[str, ...]


def paths(part: Mapping[str, object], above: Path = ()) -> Iterator[Path]:
    """Every field, nested ones too."""
    for name, value in part.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from paths(value, (*above, name))


def put(part: dict[str, object], path: Path, value: object) -> dict[str, object]:
    """The config with one field changed."""
    name, *rest = path
    return {**part, name: put(part[name], tuple(rest), value) if rest else value}


def outcome(whole: dict[str, object]) -> tuple[ModelFacts | None, list[str]]:
    """The facts and what is not known of the model, or no facts and the error's line."""
    try:
        model = model_from_config(whole)
    except BadModel as error:
        return None, [error.message]
    return model, [part.reason for part in model.unread]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
def test_one_malformed_field_is_facts_or_one_clear_line(name: str) -> None:
    """No exception but `BadModel`, one line each; and what facts there are describe layers that exist."""
    whole = config(name)
    for path in paths(whole):
        for value in MALFORMED:
            model, lines = outcome(put(whole, path, value))
            assert not any("\n" in line for line in lines), (path, value)
            assert model is None or is_sound(model), (path, value)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.json")))
@pytest.mark.parametrize("value", [-1, "x", [1], True], ids=["negative", "text", "list", "flag"])
def test_a_malformed_count_or_width_that_is_read_is_told_with_its_name(name: str, value: object) -> None:
    """By the error where it is the language model's, by the reason a tower is not read where it is a tower's."""
    whole = config(name)
    for path in paths(whole):
        # a field whose other values change nothing is no fact of this model
        if path[-1] in TELLING and outcome(put(whole, path, 1)) != outcome(whole):
            _, lines = outcome(put(whole, path, value))
            assert any(f"field {path[-1]}: needs" in line for line in lines), (path, lines)


def is_sound(model: ModelFacts) -> bool:
    """Whether its groups have layers, and its heads and dims are counts."""
    counts = [
        min(len(group.layers), facts.num_qo_heads, facts.num_kv_heads, facts.head_dim, facts.v_head_dim)
        for group in model.groups
        for facts in [group.facts]
    ]
    return model.components[0] == "main" and min(counts) > 0 and "\n" not in model.describe()
