"""Case 8, Qwen3-ASR #201, transformers #40062 and #39423: a setting reaches every sub-model, or says which not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.engine import EngineFacts
from backstamp.errors import BuiltMismatch, ConflictingRequest, StrictViolation, Unstamped
from backstamp.factories import Built
from backstamp.launch import Requests
from backstamp.model import UnreadPart
from backstamp.policy import Policy
from backstamp.stamp import read_stamp, verify_consumed
from backstamp.testing.fakes import RecordingBackend, catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, built_with, groups_of, model_with, plan_with, texts_of

FEATURES = frozenset({"encoder"})
EAGER = kernel("eager", features=FEATURES, priority=1)
FAST = kernel("fast", features=FEATURES, priority=90)
VISION = replace(DENSE, attn_type="encoder", causal=False, component="vision", num_kv_heads=32)
AUDIO = replace(VISION, component="audio", num_qo_heads=16, num_kv_heads=16)
MODEL = model_with((4, DENSE), (3, VISION), (2, AUDIO))
ASKED = Requests(attention_backend="eager")
COMPONENTS = ("main", "vision", "audio")


def test_one_setting_reaches_all_three_components() -> None:
    """transformers #40062: text, vision and audio are planned, built and stamped eager, though fast ranks higher."""
    plan = plan_with([EAGER, FAST], ASKED, model=MODEL)
    backends = built_with([EAGER, FAST], plan, MODEL)
    stamps = [read_stamp(backends.serving_attention_backend("prefill", at)).kernel for at in range(3)]
    assert stamps == ["eager"] * 3
    assert {name: group.source for name, group in groups_of(plan).items()} == dict.fromkeys(COMPONENTS, "operator")
    assert [group.component for group in plan.phase("decode").groups] == ["main"]


def test_two_settings_can_be_compared() -> None:
    """Qwen3-ASR #201: with another request every component runs another kernel, so a comparison compares."""
    plan = plan_with([EAGER, FAST], model=MODEL)
    assert {group.kernel for group in groups_of(plan).values()} == {"fast"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_that_never_consumed_its_request_is_named_after_the_build(component: str) -> None:
    """transformers #39423: no object, an object without a stamp, or one stamped otherwise is an error naming it."""
    at = COMPONENTS.index(component)
    plan = plan_with([EAGER, FAST], ASKED, model=MODEL)
    objects = dict(built_with([EAGER, FAST], plan, MODEL).objects)
    other = built_with([EAGER, FAST], plan_with([EAGER, FAST], model=MODEL), MODEL).objects["prefill", at]
    verify_consumed(RunnerBackends(plan, objects))
    with pytest.raises(BuiltMismatch, match=f"component {component}.*needs eager.*got fast"):
        verify_consumed(RunnerBackends(plan, {**objects, ("prefill", at): other}))
    with pytest.raises(BuiltMismatch, match=f"component {component}.*none was built"):
        verify_consumed(RunnerBackends(plan, {key: item for key, item in objects.items() if key != ("prefill", at)}))
    with pytest.raises(Unstamped):
        verify_consumed(RunnerBackends(plan, {**objects, ("prefill", at): object()}))


def test_the_build_itself_holds_every_component_against_its_request() -> None:
    """Qwen3-ASR #201: a factory that builds nothing for the audio layers stops the build."""
    plan = plan_with([EAGER], ASKED, model=MODEL)

    def deaf(row: object, catalogue: object) -> object:
        return lambda request: Built("eager", None if len(request.layers) == 2 else RecordingBackend(request), {})

    backends = built_with([EAGER], plan, MODEL)
    specs = [layer for at in range(3) for layer in backends.serving_attention_backend("prefill", at).request.layers]
    with pytest.raises(BuiltMismatch, match="component audio"):
        build(plan, RunnerShape(layers=specs), catalogue_of(fake_plugin("p", [EAGER])), load=deaf)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_request_scoped_to_one_component_reaches_that_one_alone(component: str) -> None:
    """transformers #40062, narrower: the main component can be named like any other."""
    plan = plan_with([EAGER, FAST], Requests(component_backends={component: "eager"}), model=MODEL)
    assert {name: group.kernel for name, group in groups_of(plan).items()} == {
        name: "eager" if name == component else "fast" for name in COMPONENTS
    }
    assert groups_of(plan)[component].source == "operator"


def test_the_main_component_asked_for_twice_is_a_conflict() -> None:
    """Two flags for one thing: neither is dropped in silence."""
    asked = Requests(component_backends={"main": "eager"}, decode_attention_backend="fast")
    with pytest.raises(ConflictingRequest, match=r"--component-backend main.*--decode-attention-backend fast"):
        plan_with([EAGER, FAST], asked, model=MODEL)


def test_a_component_that_is_not_there_is_refused() -> None:
    """A misspelled scope is an error that lists the components."""
    with pytest.raises(ConflictingRequest, match=r"'visoin'; there are main, vision, audio"):
        plan_with([EAGER], Requests(component_backends={"visoin": "eager"}), model=MODEL)


def test_a_request_scoped_to_a_component_of_the_target_does_not_stop_its_draft() -> None:
    """One launch, two runners: the text-only draft of a vision model has no vision component to name."""
    asked = Requests(component_backends={"vision": "eager"})
    assert plan_with([EAGER, FAST], asked, role="draft").phase("draft_decode").kernel == "fast"


def test_a_setting_an_engine_keeps_from_a_component_is_told() -> None:
    """Qwen3-ASR #201: what the engine does not hand over the request does not reach, and strict refuses that."""
    engine = EngineFacts(components=frozenset({"main"}))
    plan = plan_with([EAGER, FAST], ASKED, model=MODEL, engine=engine)
    assert [("vision" in text, "audio" in text) for text in texts_of(plan, "lost")] == [(True, True)]
    assert texts_of(plan_with([EAGER, FAST], model=MODEL, engine=engine), "lost") == []
    with pytest.raises(StrictViolation, match="vision"):
        plan_with([EAGER, FAST], ASKED, model=MODEL, engine=engine, policy=Policy(strict=True))


def test_a_part_nobody_could_read_is_kept_from_the_setting_too() -> None:
    """Qwen3-ASR #201: a tower whose facts are unknown is as unreached as one whose facts are known."""
    engine = EngineFacts(components=frozenset({"main"}))
    model = replace(model_with((4, DENSE)), unread=(UnreadPart("audio", "an unknown tower"),))
    assert "audio" in texts_of(plan_with([EAGER], ASKED, model=model, engine=engine), "lost")[0]
