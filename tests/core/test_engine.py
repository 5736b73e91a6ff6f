"""Engine facts: what an adapter states in code and in a file is held to one set of rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backstamp.engine import EngineFacts, load_engine
from backstamp.errors import BadInput

WRONG = [
    pytest.param("graph", "full", "one of never, single, uniform, varlen, any", id="graph"),
    pytest.param("graph", None, "one of never", id="no-graph"),
    pytest.param("graph", [], "one of never", id="graph-list"),
    pytest.param("layouts", "rows", "a list of words", id="layouts-word"),
    pytest.param("inputs", None, "a list of words", id="no-inputs"),
    pytest.param("components", "main", "a list of words", id="components-word"),
    pytest.param("replay_hook", 1, "true or false", id="number-as-flag"),
    pytest.param("prefix_cache", "yes", "true or false", id="word-as-flag"),
    pytest.param("page_size", "16", "a whole number >= 1 or null", id="page-word"),
    pytest.param("page_size", 16.5, "a whole number >= 1 or null", id="page-half"),
    pytest.param("page_size", True, "a whole number >= 1 or null", id="page-flag"),
    pytest.param("page_size", 0, "a whole number >= 1 or null", id="page-of-none"),
    pytest.param("name", 5, "a word", id="name"),
]


@pytest.mark.parametrize(("field", "value", "needed"), WRONG)
def test_nonsense_names_its_field(tmp_path: Path, field: str, value: object, needed: str) -> None:
    """From code and from a file alike; an unknown graph level has no place among the others."""
    with pytest.raises(BadInput, match=f"engine facts, field {field}") as caught:
        EngineFacts(**{field: value})
    assert caught.value.needed.startswith(needed)
    assert caught.value.found == repr(value)
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({field: value}), "utf-8")
    with pytest.raises(BadInput, match=rf"engine file .*engine\.json, field {field}") as caught:
        load_engine(str(path))
    assert caught.value.needed.startswith(needed)


@pytest.mark.parametrize("words", [[5], [["rows"]], [None]], ids=["number", "list", "none"])
def test_a_list_of_other_things_is_no_list_of_words(tmp_path: Path, words: list[object]) -> None:
    """A file may hold anything."""
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"layouts": words}), "utf-8")
    with pytest.raises(BadInput, match="field layouts: needs a list of words"):
        load_engine(str(path))


def test_a_file_says_what_code_says(tmp_path: Path) -> None:
    """Lists become sets, and what is left out keeps its default."""
    said = {"layouts": ["HND", "NHD"], "graph": "uniform", "page_size": 16, "components": None, "replay_hook": False}
    path = tmp_path / "engine.json"
    path.write_text(json.dumps(said), "utf-8")
    layouts = frozenset({"HND", "NHD"})
    assert load_engine(str(path)) == EngineFacts(layouts=layouts, graph="uniform", page_size=16, replay_hook=False)
