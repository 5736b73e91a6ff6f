"""A backend swapped in after start is stamped, or refused where it is handed out (mission section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import backstamp
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.declarations import Phase
from backstamp.draft import DraftBackendFactory, DraftSteps
from backstamp.errors import BuiltMismatch, Unstamped
from backstamp.launch import Requests
from backstamp.stamp import copy_stamp
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, GDN, model_with, plan_with

PLUGIN = fake_plugin("p", [kernel("dense"), kernel("gate", **GDN)])
MODEL = model_with((3, GATED), (1, DENSE))
ASKED = Requests(speculative_algorithm="EAGLE")
Hand = Callable[[RunnerBackends], object]
HANDS: list[tuple[str, Phase, Phase, Hand]] = [
    ("target", "decode", "draft_extend", lambda of: of.serving_attention_backend("decode")),
    ("target", "prefill", "draft_decode", lambda of: of.serving_attention_backend("extend")),
    ("draft", "draft_decode", "draft_extend", lambda of: DraftBackendFactory(of).create_decode_backend()),
    ("draft", "draft_extend", "draft_decode", lambda of: DraftBackendFactory(of).create_draft_extend_backend()),
]


class Swapped:
    """What an engine put in the place of a built backend."""


def built(role: str = "target") -> RunnerBackends:
    """A hybrid runner of fakes."""
    plan = plan_with([PLUGIN], ASKED, model=MODEL, role=role)
    return build(plan, RunnerShape(), catalogue_of(PLUGIN), load=recording_factory)


def with_object(backends: RunnerBackends, phase: Phase, item: object) -> RunnerBackends:
    """The same with another object for one phase of attention."""
    return replace(backends, objects={**backends.objects, (phase, 0): item})


@pytest.mark.parametrize(("role", "phase", "other", "hand"), HANDS, ids=[hand[1] for hand in HANDS])
def test_what_is_handed_out_is_held_against_its_phase(role: str, phase: Phase, other: Phase, hand: Hand) -> None:
    """Unstamped, or stamped for another phase: refused; a wrapper with the stamp of what it wraps is taken."""
    backends, wrapper = built(role), Swapped()
    with pytest.raises(Unstamped, match="swapped in later"):
        hand(with_object(backends, phase, Swapped()))
    elsewhere = built("draft" if role == "target" else role).objects[other, 0]
    with pytest.raises(BuiltMismatch, match=f"needs a backend built for {phase}, got dense"):
        hand(with_object(backends, phase, elsewhere))
    copy_stamp(wrapper, backends.objects[phase, 0])
    assert hand(with_object(backends, phase, wrapper)) is wrapper


def test_a_runner_holds_what_it_hands_out_against_its_own_role() -> None:
    """A draft's loop in the place of a target's decode, and the other way round, is refused by the runner's role."""
    target, draft = built(), built("draft")
    loop, decode = draft.objects["draft_decode", 0], target.objects["decode", 0]
    with pytest.raises(BuiltMismatch, match="needs a backend built for decode, got dense"):
        with_object(target, "decode", loop).serving_attention_backend("decode")
    with pytest.raises(BuiltMismatch, match="needs a backend built for draft_decode, got dense"):
        with_object(draft, "draft_decode", decode).serving_attention_backend("decode")


def test_a_linear_backend_is_held_too() -> None:
    """In its own slot, by the half a draft follows."""
    backends = built()
    swapped = replace(backends, linear_objects={**backends.linear_objects, ("decode", 0): Swapped()})
    for mode in ("decode", "draft_decode"):
        with pytest.raises(Unstamped):
            swapped.serving_linear_backend(mode)
    assert swapped.serving_linear_backend("prefill") is backends.linear_objects["prefill", 0]


def test_a_step_swapped_in_a_container_is_refused() -> None:
    """The container keeps its stamp, its new step has none."""
    backends = built("draft")
    steps = DraftBackendFactory(backends).create_decode_backend()
    assert isinstance(steps, DraftSteps)
    steps.attn_backends[1] = Swapped()  # type: ignore[call-overload]
    with pytest.raises(Unstamped):
        DraftBackendFactory(backends).create_decode_backend()


def test_an_engine_that_keeps_backends_calls_the_check_itself() -> None:
    """It is among the names for engines, and answers the stamp."""
    backend = built().serving_attention_backend("decode")
    assert backstamp.check_entry(backend, "idle").kernel == "dense"
    with pytest.raises(Unstamped):
        backstamp.check_entry(Swapped(), "idle")
