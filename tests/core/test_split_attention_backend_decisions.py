"""Every decision that depends on the attention backends, asked of launches that set one half, both, or a draft's.

Incident: SGLang #34264, where seven decisions read a base field nobody had set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from backstamp import decisions
from backstamp.construction import RunnerBackends
from backstamp.decisions import (
    Decision,
    any_phase_runs,
    both_halves_run,
    deterministic_prefill,
    floor_applies,
    half_kernel,
    half_runs,
    pair,
    runs_chunked_prefix_cache,
    runs_interleaved_rope_kernel,
    runs_last_location_kernel,
    runs_overlap_positions_kernel,
    runs_request_writer_kernel,
    serving,
    stored_sinks,
    takes_backend_inputs,
)
from backstamp.errors import Unresolved, Unstamped
from backstamp.launch import Requests
from backstamp.model import model_from_config
from backstamp.testing.fakes import RecordingBackend
from tests.models import config
from tests.resolving import kernel, plan_of
from tests.scenes import DENSE, model_with
from tests.splits import LAUNCHES, OFFERS, OTHER, SPEC, built, name_of

PREFILLS = {"base", "prefill-only", "mixed", "base-and-decode"}
ASK_PREFILL = [runs_chunked_prefix_cache, runs_overlap_positions_kernel, runs_request_writer_kernel]
ASK_BOTH = [runs_interleaved_rope_kernel, runs_last_location_kernel]


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("ask", ASK_PREFILL, ids=name_of)
def test_a_question_of_prefill_asks_prefill_alone(ask: Callable[..., Decision], launch: str) -> None:
    """A prefill-only launch does not lose the feature, a decode-only launch does not get it, a mixed one keeps it."""
    plan = plan_of(OFFERS, LAUNCHES[launch])
    for of in (plan, built(plan)):
        answer = ask(of, {"mine"})
        assert bool(answer) is (launch in PREFILLS)
        assert answer.reason == f"prefill half is {'mine' if launch in PREFILLS else 'other'}"


@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("ask", ASK_BOTH, ids=name_of)
def test_a_question_of_both_halves_asks_both(ask: Callable[..., Decision], launch: str) -> None:
    """One half of another kernel is a no that names the half; kernels that are beside both are a yes."""
    plan = plan_of(OFFERS, LAUNCHES[launch])
    for of in (plan, built(plan)):
        answer = ask(of, {"mine"})
        assert bool(answer) is (launch == "base")
        if not answer:
            assert answer.reason == f"{'decode' if launch in PREFILLS else 'prefill'} half is other"
        assert ask(of, {"mine", "other"})


@pytest.mark.parametrize("ask", ASK_PREFILL, ids=name_of)
def test_a_draft_answers_with_its_own_prefill(ask: Callable[..., Decision]) -> None:
    """The target's halves are another kernel's, and the other way round."""
    asked = Requests(attention_backend="other", draft_attention_backend="mine", **SPEC)
    target = plan_of(OFFERS, asked)
    draft = plan_of(OFFERS, asked, role="draft", target=target)
    assert (bool(ask(target, {"mine"})), bool(ask(draft, {"mine"}))) == (False, True)
    assert (pair(target), pair(draft)) == (("other", "other"), ("mine", "mine"))
    assert both_halves_run(draft, {"mine"})


def test_last_locations_ask_a_verify_kernel_of_its_own() -> None:
    """Verify tokens are served by neither half where the operator asked for verify itself."""
    halves = {"attention_backend": "mine", **SPEC}
    own = plan_of(OFFERS, Requests(verify_attention_backend="other", **halves))
    answer = runs_last_location_kernel(own, {"mine"})
    assert (answer.yes, answer.reason) == (False, "verify is other")
    assert runs_last_location_kernel(own, {"mine", "other"})
    follows = runs_last_location_kernel(plan_of(OFFERS, Requests(**halves)), {"mine"})
    assert (follows.yes, follows.reason) == (True, "prefill half is mine and decode half is mine and verify is mine")


def test_a_tower_of_another_kernel_takes_no_feature_from_the_decoder() -> None:
    """A half is what serves the main model; a guard on a kernel sees the tower too."""
    tower = replace(DENSE, component="vision", attn_type="encoder", causal=False)
    model = model_with((4, DENSE), (2, tower))
    offers = [OTHER, kernel("towers", features=frozenset({"encoder"}), priority=1)]
    plan = plan_of(offers, model=model)
    assert {group.kernel for group in plan.phase("prefill").groups} == {"other", "towers"}
    assert half_runs(plan, "prefill", {"other"})
    assert any_phase_runs(plan, "towers")


def test_every_layer_of_the_main_model_counts() -> None:
    """Unlike layers of unlike kernels: a half is those of both."""
    offers = [
        kernel("narrow", head_dims=(256,), features=frozenset({"window", "softcap"})),
        kernel("wide", head_dims=(512,), features=frozenset({"softcap"})),
    ]
    plan = plan_of(offers, model=model_from_config(config("gemma4")))
    for known, other in (("narrow", "wide"), ("wide", "narrow")):
        answer = half_runs(plan, "prefill", {known})
        assert (answer.yes, answer.reason) == (False, f"prefill half is {other}")
    assert half_runs(plan, "prefill", {"narrow", "wide"})


@dataclass(frozen=True)
class Nothing:
    """How to ask a function about a plan, and about kernels if it takes any."""

    about: Callable[[object], object]
    kernels: Callable[[object], object] | None = None


PLAN = plan_of(OFFERS, Requests(**SPEC))
ASKED_ABOUT_NOTHING = {
    any_phase_runs: Nothing(lambda of: any_phase_runs(of, "mine"), lambda names: any_phase_runs(PLAN, names)),
    both_halves_run: Nothing(lambda of: both_halves_run(of, {"mine"}), lambda names: both_halves_run(PLAN, names)),
    deterministic_prefill: Nothing(deterministic_prefill),
    floor_applies: Nothing(lambda of: floor_applies([of], "x"), lambda names: floor_applies([PLAN], names)),
    half_kernel: Nothing(lambda of: half_kernel(of, "decode")),
    half_runs: Nothing(lambda of: half_runs(of, "decode", {"mine"}), lambda names: half_runs(PLAN, "decode", names)),
    pair: Nothing(pair),
    serving: Nothing(lambda of: serving(of, "extend")),
    stored_sinks: Nothing(stored_sinks),
    takes_backend_inputs: Nothing(
        lambda of: takes_backend_inputs(of, "extend", {"mine"}), lambda names: takes_backend_inputs(PLAN, "idle", names)
    ),
    **{
        ask: Nothing(lambda of, ask=ask: ask(of, {"mine"}), lambda names, ask=ask: ask(PLAN, names))
        for ask in (*ASK_PREFILL, *ASK_BOTH)
    },
}


def test_every_public_question_is_asked_about_nothing_below() -> None:
    """A decision that is added is added to the table, and so to the tests."""
    public = {getattr(decisions, name) for name in decisions.__all__}
    assert {item for item in public if inspect.isfunction(item)} == ASKED_ABOUT_NOTHING.keys()


@pytest.mark.parametrize("nothing", [None, "", "mine", (), Requests(attention_backend="mine")], ids=repr)
@pytest.mark.parametrize("ask", ASKED_ABOUT_NOTHING, ids=name_of)
def test_asking_about_no_plan_is_an_error(ask: Callable[..., object], nothing: object) -> None:
    """Neither yes nor no: a launch nobody resolved, and a field nobody set, are no backends."""
    with pytest.raises(Unresolved, match="no backend given"):
        ASKED_ABOUT_NOTHING[ask].about(nothing)


@pytest.mark.parametrize("nothing", [None, "", (), frozenset(), {""}, {None}], ids=repr)
@pytest.mark.parametrize("ask", [ask for ask, how in ASKED_ABOUT_NOTHING.items() if how.kernels], ids=name_of)
def test_asking_about_no_kernel_is_an_error(ask: Callable[..., object], nothing: object) -> None:
    """What nothing supports is no yes: "does nothing support Triton?" is an error."""
    how = ASKED_ABOUT_NOTHING[ask].kernels
    assert how is not None
    with pytest.raises(Unresolved, match="no backend given"):
        how(nothing)


def test_a_name_is_not_taken_for_a_list_of_letters() -> None:
    """`in` on a string would answer yes for a part of a name."""
    with pytest.raises(Unresolved, match="no backend given"):
        half_runs(PLAN, "prefill", "other, mine")


def test_no_runner_has_no_floor() -> None:
    """A floor asked of nobody is no "does not apply"."""
    for of in ((), [], None):
        with pytest.raises(Unresolved, match="no backend given"):
            floor_applies(of, "flashinfer-python")


def test_one_runner_has_a_floor_too() -> None:
    """A plan or a runner that is no list is one runner, and not a page of its fields."""
    library = replace(kernel("mine"), requires=("flashinfer-python>=0.6",))
    plan = plan_of([library], Requests(attention_backend="mine"))
    for of in (plan, built(plan, [library])):
        answer = floor_applies(of, "flashinfer-python")
        assert answer == floor_applies([of], "flashinfer-python")
        assert answer


def test_an_error_never_prints_a_whole_plan() -> None:
    """A plan in the wrong place is a short line."""
    asks = (
        lambda: floor_applies([PLAN], ""),
        lambda: floor_applies({"target": PLAN}, "flashinfer-python"),
        lambda: half_runs([PLAN], "prefill", {"mine"}),
        lambda: half_runs(PLAN, "prefill", [PLAN]),
    )
    for ask in asks:
        with pytest.raises(Unresolved, match="no backend given") as refused:
            ask()
        assert len(refused.value.found) < 120


def test_a_half_that_is_never_run_is_an_error() -> None:
    """A draft of one step has no decode half."""
    draft = plan_of(OFFERS, Requests(speculative_algorithm="EAGLE", speculative_num_steps=1), role="draft")
    for ask in ASK_BOTH:
        with pytest.raises(Unresolved, match="draft decode half: needs a kernel"):
            ask(draft, {"other"})
    assert runs_request_writer_kernel(draft, {"other"})


@pytest.mark.parametrize("ask", [ask for ask in ASKED_ABOUT_NOTHING if ask is not stored_sinks], ids=name_of)
def test_a_runner_answers_by_its_stamps(ask: Callable[..., object]) -> None:
    """An object swapped in after start is no longer what the plan says: an error, not the plan's answer."""
    offers = [kernel("aligned", deterministic=True, alignment_tokens=16)]
    plan = plan_of(offers, Requests(**SPEC))
    backends = built(plan, offers)
    ASKED_ABOUT_NOTHING[ask].about(backends)
    request = backends.objects["decode", 0].request
    objects = {**backends.objects, ("decode", 0): RecordingBackend(request)}
    with pytest.raises(Unstamped):
        ASKED_ABOUT_NOTHING[ask].about(RunnerBackends(plan, objects))
