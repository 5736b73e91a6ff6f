"""Case 88, sglang #22107, #29472 and #31474: a linear kernel serves the phases and features it declares, no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import Alias
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.plan_rows import PhasePlan, Verdict
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import DENSE, GATED, model_with, plan_with, texts_of

KDA = {"slot": "linear", "family": "kda"}
CULA = kernel("cula", phases=frozenset({"prefill"}), priority=90, **KDA)
FLASHKDA = kernel("flashkda", phases=frozenset({"prefill"}), priority=80, **KDA)
TRITON = kernel("triton", priority=10, features=frozenset({"tracked_states"}), **KDA)
ALL = (kernel("dense"), CULA, FLASHKDA, TRITON)
MODEL = model_with((3, replace(GATED, family="kda", num_qo_heads=32)), (1, DENSE))


def row(plan: Plan, phase: str) -> PhasePlan:
    """One phase of the linear slot."""
    assert plan.linear is not None
    return {"prefill": plan.linear.prefill, "decode": plan.linear.decode, "verify": plan.linear.verify}[phase]


def verdict(plan: Plan, phase: str, name: str) -> Verdict:
    """What one linear kernel was told in a phase."""
    return next(item for item in row(plan, phase).verdicts if item.kernel == name)


@pytest.mark.parametrize("phase", ["decode", "verify"])
def test_the_phases_a_kernel_lacks_go_elsewhere_with_the_reason(phase: str) -> None:
    """sglang #22107: linear-prefill=cula, decode unset: triton decodes, and cula's row says it has prefill only."""
    plan = plan_with(ALL, Requests(linear_attn_prefill_backend="cula"), model=MODEL)
    assert (row(plan, "prefill").kernel, row(plan, "prefill").source) == ("cula", "operator")
    assert row(plan, phase).kernel == "triton"
    told = verdict(plan, phase, "cula")
    assert (told.accepted, told.code) == (False, "phase")
    assert told.message.startswith(f"needs a kernel for {phase}, got ")


@pytest.mark.parametrize("flag", ["linear_attn_decode_backend", "linear_attn_verify_backend", "linear_attn_backend"])
def test_asking_for_a_phase_it_does_not_offer_is_an_error(flag: str) -> None:
    """sglang #29472: decode=cula is refused; so is a base flag, which names every phase."""
    with pytest.raises(Refused, match=r"'cula'.*needs a kernel for (decode|verify)"):
        plan_with(ALL, Requests(**{flag: "cula"}), model=MODEL)


def test_a_kernel_without_tracked_states_is_passed_over_where_they_are_needed() -> None:
    """sglang #31474: triton for that phase, with the reason in the plan; without the need the better kernel stays."""
    offers = (kernel("dense"), FLASHKDA, TRITON)
    assert row(plan_with(offers, model=MODEL), "prefill").kernel == "flashkda"
    plan = plan_with(offers, model=MODEL, engine=EngineFacts(tracked_states=True))
    assert row(plan, "prefill").kernel == "triton"
    assert verdict(plan, "prefill", "flashkda").wanted == "a kernel that declares tracked_states"


def test_asked_for_it_is_refused_not_replaced() -> None:
    """sglang #31474, explicit: an explicit request never falls back."""
    asked = Requests(linear_attn_prefill_backend="flashkda")
    with pytest.raises(Refused, match="a kernel that declares tracked_states"):
        plan_with(ALL, asked, model=MODEL, engine=EngineFacts(tracked_states=True))


def test_attention_layers_are_not_asked_for_tracked_states() -> None:
    """The need is the linear slot's own."""
    plan = plan_with((kernel("dense"), TRITON), model=MODEL, engine=EngineFacts(tracked_states=True))
    assert plan.phase("prefill").kernel == "dense"


def test_warnings_of_the_linear_slot_reach_the_plan() -> None:
    """A deprecated key, a reference kernel and an assumed library are told in this slot as in the other."""
    rows = [kernel("dense"), replace(TRITON, reference=True), replace(CULA, requires=("cula>=1",), priority=5)]
    alias = Alias(key="old", kernels=("cula",), deprecated="cula", slot="linear")
    plugin = fake_plugin("p", rows, [alias])
    plan = plan_with([plugin], Requests(linear_attn_prefill_backend="old"), model=MODEL)
    assert "'old' is deprecated, use 'cula'" in texts_of(plan, "deprecated")[0]
    assert "triton is a portable reference" in texts_of(plan, "slow_path")[0]
    assert texts_of(plan, "assumed")


def test_linear_flags_of_the_target_do_not_stop_its_draft() -> None:
    """One launch, two runners: a draft without linear layers is no reason to refuse the target's flags."""
    asked = Requests(linear_attn_prefill_backend="cula", speculative_algorithm="EAGLE")
    assert plan_with(ALL, asked, role="draft").phase("draft_extend").kernel == "dense"
