"""What serves a forward mode, decided before anything is built, is what the dispatcher runs.

Incident: SGLang #34264, where a model assembled the decode half's inputs for extends of the prefill half.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from backstamp.decisions import (
    pair,
    serving,
    takes_backend_inputs,
)
from backstamp.declarations import PHASES
from backstamp.errors import BadInput
from backstamp.forward import FORWARD_MODES, check_entry
from backstamp.model import model_from_config
from backstamp.stamp import read_stamp
from tests.models import config
from tests.resolving import kernel, plan_of
from tests.scenes import DENSE, model_with
from tests.splits import LAUNCHES, OFFERS, SPEC, built

#: What a draft answers with its loop.
DECODING = ("decode", "idle", "draft_decode")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("mode", [None, "prefill", "decode"])
@pytest.mark.parametrize("verify", [None, "third"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_what_serves_a_mode_is_what_the_dispatcher_runs(
    launch: str, verify: str | None, mode: str | None, role: str, steps: int
) -> None:
    """Every forward mode and phase, every speculative_attention_mode, target and draft: one kernel, or one error."""
    asked = replace(
        LAUNCHES[launch],
        speculative_algorithm="EAGLE",
        speculative_num_steps=steps,
        verify_attention_backend=verify if role == "target" and mode is None else None,
        speculative_attention_mode=mode,
    )
    plan = plan_of(OFFERS, asked, role=role)
    backends = built(plan)
    served = {
        "target": {*FORWARD_MODES, "prefill", "verify"},
        "draft": {"extend", "mixed", "prefill", "draft_extend", *(DECODING if steps > 1 else ())},
    }[role]
    for word in (*FORWARD_MODES, *PHASES):
        try:
            runs = read_stamp(backends.serving_attention_backend(word)).kernel
        except BadInput:
            assert word not in served
            for of in (plan, backends):
                with pytest.raises(BadInput, match="a phase it runs"):
                    serving(of, word)
            continue
        assert word in served
        for of in (plan, backends):
            assert serving(of, word).kernel == runs
            assert takes_backend_inputs(of, word, {runs})
            assert not takes_backend_inputs(of, word, {"mine", "other", "third"} - {runs})


@pytest.mark.parametrize(
    ("mode", "extend", "decode", "verify"),
    [(None, "mine", "other", "mine"), ("prefill", "mine", "other", "mine"), ("decode", "mine", "other", "other")],
)
def test_a_forward_of_a_split_pair_goes_to_the_half_that_serves_it(
    mode: str | None, extend: str, decode: str, verify: str
) -> None:
    """Extend, mixed and a target's draft-extend to prefill, decode and idle to decode, verify to the half its mode
    names."""
    plan = plan_of(OFFERS, replace(LAUNCHES["mixed"], speculative_attention_mode=mode, **SPEC))
    served = {word: serving(plan, word).kernel for word in FORWARD_MODES}
    assert served == {
        "extend": extend,
        "mixed": extend,
        "decode": decode,
        "idle": decode,
        "target_verify": verify,
        "draft_extend": extend,
    }
    assert serving(plan, "target_verify").reason == f"target_verify runs verify: {verify} ({_source(mode)})"


def _source(mode: str | None) -> str:
    return "default" if mode is None else f"mode {mode}"


def test_a_draft_extend_is_served_by_its_own_phase() -> None:
    """Under mode decode the draft extends with the decode half's kernel, and prefills with the prefill half's."""
    asked = replace(LAUNCHES["mixed"], speculative_attention_mode="decode", **SPEC)
    draft = plan_of(OFFERS, asked, role="draft")
    assert [serving(draft, word).kernel for word in ("extend", "draft_extend", "draft_decode")] == [
        "mine",
        "other",
        "other",
    ]
    assert not takes_backend_inputs(draft, "draft_extend", {"mine"})


@pytest.mark.parametrize("word", DECODING)
def test_a_draft_decodes_in_its_loop(word: str) -> None:
    """Mission section 1: decode and idle run decode, and a draft runner answers with its own backend."""
    asked = replace(LAUNCHES["mixed"], draft_attention_backend="third", **SPEC)
    draft = plan_of(OFFERS, asked, role="draft")
    backends = built(draft)
    for of in (draft, backends):
        assert serving(of, word)[:2] == ("draft_decode", "third")
        assert pair(of) == ("third", "third")
    assert backends.serving_attention_backend(word) is backends.objects["draft_decode", 0]
    assert check_entry(backends.objects["draft_decode", 0], word).role == "draft"
    single = plan_of(OFFERS, replace(asked, speculative_num_steps=1), role="draft")
    for ask in (partial(serving, single), built(single).serving_attention_backend):
        with pytest.raises(BadInput, match=r"a phase it runs \(prefill, draft_extend\), got draft_decode"):
            ask(word)


def test_a_target_extends_a_draft_with_its_prefill_half() -> None:
    """Mission section 1: draft-extend runs the prefill branch of a plain pair, whatever verify follows."""
    for mode in (None, "prefill", "decode"):
        plan = plan_of(OFFERS, replace(LAUNCHES["mixed"], speculative_attention_mode=mode, **SPEC))
        backends = built(plan)
        for of in (plan, backends):
            assert serving(of, "draft_extend")[:2] == ("prefill", "mine")
        assert backends.serving_attention_backend("draft_extend") is backends.objects["prefill", 0]
        assert check_entry(backends.objects["prefill", 0], "draft_extend").kernel == "mine"


WIDTHS = [
    kernel("narrow", head_dims=(256,), features=frozenset({"window", "softcap"})),
    kernel("wide", head_dims=(512,), features=frozenset({"softcap"})),
]


def test_unlike_layers_are_not_answered_for_by_the_first() -> None:
    """Asked of no group, all layers of the main model answer: both kernels, or an error that names both."""
    plan = plan_of(WIDTHS, model=model_from_config(config("gemma4")))
    for known, other in (("narrow", "wide"), ("wide", "narrow")):
        answer = takes_backend_inputs(plan, "decode", {known})
        assert (answer.yes, answer.reason) == (False, f"decode runs decode: {other} (auto (per_layer))")
    assert takes_backend_inputs(plan, "decode", {"narrow", "wide"})
    named = [f"group {at}: {group.kernel}" for at, group in enumerate(plan.phase("decode").groups)]
    with pytest.raises(BadInput, match=f"needs one kernel, or the group asked about, got {', '.join(named)}"):
        serving(plan, "decode")


def test_a_tower_is_not_asked_for_the_main_model() -> None:
    """A tower of another kernel is no second answer, and is answered for by its own group."""
    tower = replace(DENSE, component="vision", attn_type="encoder", causal=False)
    offers = [*OFFERS, kernel("towers", features=frozenset({"encoder"}), priority=1)]
    plan = plan_of(offers, model=model_with((4, DENSE), (2, tower)))
    assert [serving(plan, "extend", group).kernel for group in (None, 0, 1)] == ["other", "other", "towers"]
    assert takes_backend_inputs(plan, "extend", {"other"})


def test_unlike_layers_are_served_group_by_group() -> None:
    """The group of a layer picks its kernel, as in the dispatcher; a group that is not there is an error."""
    offers = WIDTHS
    plan = plan_of(offers, model=model_from_config(config("gemma4")))
    backends = built(plan, offers)
    for at in (0, 1):
        runs = read_stamp(backends.serving_attention_backend("extend", at)).kernel
        assert serving(plan, "extend", at).kernel == runs
        assert takes_backend_inputs(plan, "extend", {runs}, at)
    assert serving(plan, "extend", 0).kernel != serving(plan, "extend", 1).kernel
    for at in (2, -1):
        with pytest.raises(BadInput, match=f"group {at}"):
            serving(plan, "extend", at)


@pytest.mark.parametrize("word", [None, "", "prefil"])
def test_asking_about_no_mode_is_an_error(word: str | None) -> None:
    """None is not a mode that decode serves."""
    plan = plan_of(OFFERS)
    for ask in (serving, partial(takes_backend_inputs, kernels={"mine"})):
        with pytest.raises(BadInput, match="forward mode"):
            ask(plan, word)
