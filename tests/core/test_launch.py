"""What was asked for, by whom, and how split and base fields answer for a half."""

from __future__ import annotations

import pytest

from backstamp.declarations import BACKEND_REQUESTS
from backstamp.errors import BadInput
from backstamp.launch import FLAGS, Requests, make_launch


def test_every_backend_request_is_known_to_declarations() -> None:
    """A tombstone maps to one of them; a request added here is added there."""
    assert {name for name in FLAGS if name.endswith("_backend")} == BACKEND_REQUESTS


def test_base_request_names_both_halves() -> None:
    """The base field is the fallback of each half."""
    prefill, decode = make_launch(Requests(attention_backend="fa3")).pair()
    assert (prefill.value, decode.value) == ("fa3", "fa3")
    assert prefill.setting == "--attention-backend"


def test_split_launch_leaves_the_unset_half_unset() -> None:
    """sglang #34264: one split field set leaves the other half to auto, never to a value nobody set."""
    prefill, decode = make_launch(Requests(prefill_attention_backend="fa3")).pair()
    assert prefill.value == "fa3"
    assert decode is None


def test_split_field_wins_over_base() -> None:
    """A split field binds its half, the base field the other."""
    prefill, decode = make_launch(Requests(attention_backend="triton", decode_attention_backend="fa3")).pair()
    assert (prefill.value, decode.value) == ("triton", "fa3")
    assert decode.setting == "--decode-attention-backend"


def test_operators_base_outranks_the_embedders_split() -> None:
    """sglang #25547: an embedding framework never overwrites the operator, whichever field it used."""
    launch = make_launch(Requests(attention_backend="flashinfer"), embedder=Requests(prefill_attention_backend="fa3"))
    prefill, decode = launch.pair()
    assert (prefill.value, prefill.source) == ("flashinfer", "operator")
    assert decode.source == "operator"


def test_embedder_is_heard_where_the_operator_is_silent() -> None:
    """The next source answers, and says that it did."""
    launch = make_launch(Requests(), embedder=Requests(attention_backend="fa3"), family=Requests(attention_backend="x"))
    assert launch.half("decode").source == "embedder"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 0),
        ("page_size", -16),
        ("tp_size", 0),
        ("dcp_size", -1),
        ("speculative_topk", 0),
        ("speculative_num_steps", -1),
        ("chunked_prefill_size", -2),
        ("speculative_attention_mode", "verify"),
        ("attention_backend", "  "),
        ("attention_backend", " triton"),
        ("draft_attention_backend", "triton\t"),
        ("attention_backend", 5),
        ("dsa_decode_backend", ["fa3"]),
        ("page_size", "16"),
        ("page_size", 16.5),
        ("page_size", True),
        ("speculative_num_steps", "3"),
        ("chunked_prefill_size", False),
        ("kv_cache_dtype", 5),
        ("kv_cache_dtype", ""),
        ("speculative_algorithm", ""),
        ("speculative_algorithm", True),
        ("speculative_attention_mode", 1),
        ("deterministic", "yes"),
        ("deterministic", 1),
        ("seed_dsa_topk_from_draft_extend", "true"),
        ("training", "no"),
        ("training", 0),
    ],
)
def test_nonsense_values_name_their_flag(field: str, value: object) -> None:
    """A number out of range or an empty key is refused with the flag, what it needs and what it got."""
    with pytest.raises(BadInput) as caught:
        Requests(**{field: value})
    assert caught.value.who == "--" + field.replace("_", "-")
    assert repr(value).strip("'") in caught.value.found or str(value) == caught.value.found


@pytest.mark.parametrize(
    ("field", "value", "who", "needed"),
    [
        pytest.param("component_backends", {"main": None}, "--component-backend main", "a key", id="no-key"),
        pytest.param("component_backends", {"main": " fa3"}, "--component-backend main", "without blanks", id="blanks"),
        pytest.param("component_backends", {"": "fa3"}, "--component-backend NAME", "a key", id="no-name"),
        pytest.param("component_backends", {5: "fa3"}, "--component-backend NAME", "a key", id="number"),
        pytest.param("component_backends", "main=fa3", "--component-backend", "values by name", id="word"),
        pytest.param("features", {"f": "on"}, "--feature f", "true or false", id="feature-word"),
        pytest.param("features", {"f": 1}, "--feature f", "true or false", id="feature-number"),
        pytest.param("features", {"f": None}, "--feature f", "true or false", id="feature-none"),
        pytest.param("features", ["f"], "--feature", "values by name", id="feature-list"),
    ],
)
def test_nonsense_by_name_names_its_flag_and_name(field: str, value: object, who: str, needed: str) -> None:
    """What was asked of one component, or of one feature, is held to the same rules."""
    with pytest.raises(BadInput) as caught:
        Requests(**{field: value})
    assert caught.value.who == who
    assert needed in caught.value.needed


@pytest.mark.parametrize(
    ("arguments", "who", "needed"),
    [
        pytest.param({"role": "drfat"}, "make_launch, role", "target or draft", id="role"),
        pytest.param({"operator": None}, "make_launch, operator", "Requests", id="operator"),
        pytest.param({"embedder": {"page_size": 16}}, "make_launch, embedder", "Requests", id="embedder"),
        pytest.param({"family": "gemma"}, "make_launch, family", "Requests", id="family"),
        pytest.param({"policy": "strict"}, "make_launch, policy", "a Policy", id="policy"),
        pytest.param({"settings": {"OLD": 1}}, "make_launch, settings", "texts by name", id="setting"),
        pytest.param({"settings": ["OLD"]}, "make_launch, settings", "texts by name", id="settings"),
    ],
)
def test_what_makes_a_launch_is_of_its_class(arguments: dict[str, object], who: str, needed: str) -> None:
    """An unknown role would be asked about as neither target nor draft."""
    with pytest.raises(BadInput) as caught:
        make_launch(**{"operator": Requests(), **arguments})
    assert (caught.value.who, caught.value.needed) == (who, needed)


def test_draft_role_implies_speculation() -> None:
    """Asking about a draft without an algorithm still runs the draft's phases."""
    launch = make_launch(Requests(), role="draft")
    assert launch.speculative
    assert launch.speculative_num_steps > 1
