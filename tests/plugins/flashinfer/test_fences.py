"""A wrapper's pinned memory is not written while the device may still read it."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from tests.libraries.fake import Call, FakeLibrary
from tests.plugins.flashinfer.library import DECODE, MLA, PREFILL
from tests.plugins.flashinfer.steps import LATENT, LAYER, MIXED, ONE, build, draw, forward, held


def recording_fence(library: FakeLibrary) -> type:
    """A fence that notes among the library's calls when it is passed and set."""

    class Recorder:
        def __init__(self, device: torch.device) -> None:
            self.name = f"fence {sum(call.path.startswith('new') for call in library.calls)}"
            library.calls.append(Call(f"new {self.name}", {}))

        def mark(self) -> None:
            library.calls.append(Call(f"mark {self.name}", {}))

        def wait(self) -> None:
            library.calls.append(Call(f"wait {self.name}", {}))

    return Recorder


def noted(library: FakeLibrary, plan: str) -> list[str]:
    """Plans and fences, in order."""
    words = ("wait", "mark", plan)
    return [call.path.replace(plan, "plan") for call in library.calls if call.path.startswith(words)]


def test_a_wrapper_is_planned_again_only_after_its_last_copy(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two states in flight have a fence each; the first wrapper comes back with its own."""
    monkeypatch.setattr(importlib.import_module("backstamp_flashinfer.wrappers"), "Fence", recording_fence(library))
    step = draw(MIXED)
    backend = build(step)
    one, two = backend.plan(step.batch), backend.plan(step.batch)
    del one
    three = backend.plan(step.batch)
    expected = [f"{word} fence {at}" for at in (0, 1, 0) for word in ("wait", "plan", "mark")]
    assert noted(library, f"{PREFILL}.plan") == ["plan" if word.startswith("plan") else word for word in expected]
    assert two is not three


def test_a_wrapper_is_let_go_only_after_its_last_copy(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pinned memory may be handed out again at once. A dropped step waits for nothing: `plan` does, later."""
    wrappers = importlib.import_module("backstamp_flashinfer.wrappers")
    monkeypatch.setattr(wrappers, "Fence", recording_fence(library))
    monkeypatch.setattr(wrappers, "IDLE_WRAPPERS", 0)
    step = draw(MIXED)
    backend = build(step)
    one, two = backend.plan(step.batch), backend.plan(step.batch)
    library.calls.clear()
    del one, two
    assert noted(library, f"{PREFILL}.plan") == []
    kept = backend.plan(step.batch)
    assert noted(library, f"{PREFILL}.plan") == ["wait fence 0", "plan", "mark fence 0", "wait fence 1"]
    assert kept.plans


def test_a_state_planned_again_gives_back_what_it_had(library: FakeLibrary) -> None:
    """A wrapper that nobody keeps is freed under its last copy; and an old plan would answer for a layer's new step."""
    step, shorter = draw(MIXED), draw(((2, 30), (8, 8)))
    backend = build(step, layers=(LAYER, replace(LAYER, layer_id=1, window_left=6)))
    state = None
    for made in (step, shorter, step):
        state = backend.plan(made.batch, state=state)
        held(forward(backend, made, state), made)
    assert len(library.called(f"{PREFILL}.__init__")) == 1
    assert len(library.called(f"{PREFILL}.plan")) == 3


def test_a_step_dropped_while_idle_wrappers_are_looked_through_is_kept_apart(library: FakeLibrary) -> None:
    """The garbage collector may end one at any allocation, in the middle of that loop."""
    step = draw(MIXED)
    backend = build(step)
    kept = [backend.plan(step.batch) for _ in range(4)]
    del kept[:2]

    class Dropping:
        """A route that equals none, and drops a step when it is compared."""

        def __eq__(self, other: object) -> bool:
            kept.clear()
            return False

        __hash__ = None  # type: ignore[assignment]

    pool = backend._pool
    pool.trim()
    for idle in pool._idle:
        idle.route = Dropping()
    assert backend.plan(step.batch).plans
    assert not kept


def test_forward_waits_only_where_a_kind_was_left_out(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of one kind are planned in `plan`; of several, each kind by its first layer."""
    monkeypatch.setattr(importlib.import_module("backstamp_flashinfer.wrappers"), "Fence", recording_fence(library))
    step = draw(ONE, phase="decode")
    other = replace(step, layer=replace(LAYER, layer_id=1, window_left=6))
    for layers, capture, waits in (
        ((LAYER,), False, 0),
        ((LAYER, other.layer), True, 0),
        ((LAYER, other.layer), False, 2),
    ):
        backend = build(step, layers=layers)
        state = backend.plan(step.batch, capture=capture)
        library.calls.clear()
        for run in [step, other, step, other] if len(layers) > 1 else [step, step]:
            forward(backend, run, state)
        assert len([word for word in noted(library, f"{DECODE}.plan") if word.startswith("wait")]) == waits


def test_mla_plans_one_after_another(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library makes its pinned memory anew for every plan, and gives up the last."""
    module = importlib.import_module("backstamp_flashinfer.mla")
    monkeypatch.setattr(module, "Fence", recording_fence(library))
    step = draw(MIXED, LATENT)
    backend = build(step)
    for _ in range(2):
        backend.plan(step.batch)
    assert noted(library, f"{MLA}.plan") == ["wait fence 0", "plan", "mark fence 0"] * 2
