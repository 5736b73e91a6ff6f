"""What a factory may answer: settings it compiled in, steps, and objects whose attributes can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from backstamp.attention import LayerSpec
from backstamp.catalogue import Catalogue, Row
from backstamp.construction import Factory, RunnerBackends, RunnerShape, build
from backstamp.errors import BuiltMismatch, FactoryFailed
from backstamp.factories import BuildRequest, Built
from backstamp.launch import Requests
from backstamp.model import default_model, group_layers
from backstamp.testing.fakes import RecordingBackend, catalogue_of, fake_plugin, recording_factory
from tests.building import built_from, plan_on
from tests.resolving import kernel
from tests.scenes import DENSE, built_with, model_with, plan_with

BOTH_FORMS = frozenset({"paged", "ragged"})
CAPPED = kernel("one", features=frozenset({"softcap"}), build_settings=frozenset({"softcap"}))


def answering(answer: Callable[[BuildRequest], object]) -> Callable[[Row, Catalogue], Factory]:
    """A loader whose every factory answers what `answer` makes of the request."""
    return lambda row, catalogue: answer  # type: ignore[return-value]


def built(answer: Callable[[BuildRequest], object], role: str = "target", softcap: float = 0.0) -> RunnerBackends:
    """A kernel with a compiled-in softcap, built by this factory."""
    layers = tuple((replace(facts, softcap=softcap),) for (facts,) in default_model().layers)
    model = replace(default_model(), layers=layers, groups=group_layers(layers))
    plugin = fake_plugin("p", [CAPPED])
    asked = Requests(speculative_num_steps=4) if role == "draft" else Requests()
    return built_from(plan_on("h100", plugin, requests=asked, role=role, model=model), plugin, load=answering(answer))


@pytest.mark.parametrize("settings", [None, "softcap", ["softcap"], 5], ids=["none", "word", "list", "number"])
def test_settings_that_are_no_mapping_are_refused(settings: object) -> None:
    """They are asked what was compiled in; an answer of another type is the factory's fault, and named."""
    with pytest.raises(BuiltMismatch, match=r"needs Built\.settings to be a mapping, got") as caught:
        built(lambda request: Built("one", RecordingBackend(request), settings))  # type: ignore[arg-type]
    assert caught.value.found == type(settings).__name__
    assert "plugin p" in caught.value.who


def test_a_feature_compiled_in_that_nobody_asked_for_is_refused() -> None:
    """A cap on a model without one changes every logit; 0 says that it is off."""
    with pytest.raises(BuiltMismatch, match=r"needs no softcap compiled in, got softcap 50\.0"):
        built(lambda request: Built("one", RecordingBackend(request), {"softcap": 50.0}))
    built(lambda request: Built("one", RecordingBackend(request), {"softcap": 0.0}))
    built(lambda request: Built("one", RecordingBackend(request), {"block_tokens": 64}))


@pytest.mark.parametrize("reported", [30.0, "50.0", True], ids=["another", "word", "flag"])
def test_a_feature_compiled_in_with_another_value_is_refused(reported: object) -> None:
    """What is compared is a number."""
    built(lambda request: Built("one", RecordingBackend(request), {"softcap": 50}), softcap=50.0)
    with pytest.raises(BuiltMismatch, match=r"needs softcap 50\.0 compiled in, got softcap"):
        built(lambda request: Built("one", RecordingBackend(request), {"softcap": reported}), softcap=50.0)


def test_a_switch_is_no_value_of_a_feature() -> None:
    """True counts as 1 to Python; a factory that says it was on has not said with what."""
    built(lambda request: Built("one", RecordingBackend(request), {"softcap": 1}), softcap=1.0)
    with pytest.raises(BuiltMismatch, match=r"needs softcap 1\.0 compiled in, got softcap bool"):
        built(lambda request: Built("one", RecordingBackend(request), {"softcap": True}), softcap=1.0)


def test_a_step_without_a_backend_is_told_by_its_place() -> None:
    """The factory is asked once a step and may not answer none for one of them."""
    answers = []

    def answer(request: BuildRequest) -> Built:
        answers.append(request.phases)
        missing = answers.count(("draft_decode",)) == 2
        return Built("one", None if missing else RecordingBackend(request))

    with pytest.raises(BuiltMismatch, match="needs a backend for each of 3 steps, got none for step 1"):
        built(answer, role="draft")


def test_a_backend_whose_forward_cannot_be_read_is_refused() -> None:
    """A class that answers for its attributes with code of its own may raise whatever it likes."""

    class Odd:
        @property
        def forward(self) -> object:
            raise RuntimeError("not now")

    with pytest.raises(BuiltMismatch, match="needs a backend whose forward can be read, got one that raised Runtime"):
        built(lambda request: Built("one", Odd()), role="draft")


def test_an_error_that_cannot_say_why_is_named_by_its_type() -> None:
    """The text of a factory's error is the factory's own code too."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    def answer(request: BuildRequest) -> Built:
        raise Mute

    with pytest.raises(FactoryFailed, match="got Mute"):
        built(answer)


def test_layers_go_to_the_component_they_say() -> None:
    """A tower's layers are numbered like the main model's: the number alone would hand over the wrong ones."""
    tower = replace(DENSE, component="audio", causal=False)
    model = model_with((2, DENSE), (2, tower))
    plugin = fake_plugin("p", [kernel("one", features=frozenset({"non_causal", "encoder"}), kv_forms=BOTH_FORMS)])
    plan = plan_with([plugin], model=model)
    backends = built_with([plugin], plan, model)
    requests = [backends.serving_attention_backend("prefill", at).request for at in (0, 1)]
    assert [{layer.component for layer in request.layers} for request in requests] == [{"main"}, {"audio"}]
    heads = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    unnamed = [LayerSpec(layer_id=at, scale=0.1, **heads) for at in range(4)]
    with pytest.raises(BuiltMismatch, match="of component audio in the runner, got none of that component"):
        build(plan, RunnerShape(layers=unnamed), catalogue_of(plugin), load=recording_factory)
