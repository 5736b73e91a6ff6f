"""Which kernel a phase gets where nobody asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.engine import EngineFacts
from backstamp.errors import BadInput, NoKernel, StrictViolation
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel, plan_of, times_of
from tests.scenes import plan_with, texts_of

INSIDE = fake_plugin("inside", [kernel("inside", priority=10)])
OUTSIDE = fake_plugin("outside", [kernel("outside", priority=90)])
ALLOW = Policy(allow=frozenset({"fake-inside"}))


def decode(plan: Plan) -> str | None:
    """The decode kernel."""
    return plan.phase("decode").kernel


def test_priority_ranks_and_names_break_ties() -> None:
    """The order plugins were found in says nothing."""
    offers = [kernel("b"), kernel("a"), kernel("low", priority=1)]
    assert decode(plan_with(offers)) == decode(plan_with(offers[::-1])) == "a"
    assert decode(plan_with([*offers, kernel("z", priority=51)])) == "z"


def test_a_distribution_outside_the_allow_list_ranks_below_all_inside() -> None:
    """And the plan says that it would have won."""
    plan = plan_with([INSIDE, OUTSIDE], policy=ALLOW)
    assert decode(plan) == "inside"
    assert texts_of(plan, "outside") == [
        f"{phase}: outside (fake-outside) would have won; outside the allow list" for phase in ("prefill", "decode")
    ]


def test_a_kernel_inside_that_wins_by_itself_needs_no_warning() -> None:
    """Nothing outside came before it."""
    low = fake_plugin("outside", [kernel("outside", priority=1)])
    assert texts_of(plan_with([INSIDE, low], policy=ALLOW), "outside") == []


def test_outside_serves_where_nothing_inside_does() -> None:
    """Below is not barred: an allow list orders, a deny list bars."""
    assert decode(plan_with([OUTSIDE], policy=ALLOW)) == "outside"


def test_a_denied_distribution_is_never_picked_and_may_be_asked_for() -> None:
    """The operator's explicit word is stronger than the operator's list."""
    deny = Policy(deny=frozenset({"fake-outside"}))
    assert decode(plan_with([INSIDE, OUTSIDE], policy=deny)) == "inside"
    with pytest.raises(NoKernel, match="outside"):
        plan_with([OUTSIDE], policy=deny)
    assert decode(plan_with([INSIDE, OUTSIDE], Requests(attention_backend="outside"), policy=deny)) == "outside"


def test_a_denied_kernel_would_not_have_won() -> None:
    """Both lists: what is barred is not told as outranked."""
    policy = Policy(allow=frozenset({"fake-inside"}), deny=frozenset({"fake-outside"}))
    assert texts_of(plan_with([INSIDE, OUTSIDE], policy=policy), "outside") == []


@pytest.mark.parametrize("field", ["allow", "deny"])
def test_a_name_in_a_list_that_nobody_has_is_told(field: str) -> None:
    """A misspelled list is not a list; strict refuses it."""
    names = frozenset({"fake-insied"})
    plan = plan_with([INSIDE], policy=Policy(**{field: names}))
    (text,) = texts_of(plan, "unmatched")
    assert text.startswith(f"--{field} fake-insied")
    assert "fake-inside" in text
    with pytest.raises(StrictViolation, match="fake-insied"):
        plan_with([INSIDE], policy=Policy(strict=True, **{field: names}))


def test_one_distribution_in_both_lists_is_refused() -> None:
    """A contradiction is an error where it is written."""
    with pytest.raises(BadInput, match="fake-inside in both"):
        Policy(allow=frozenset({"fake-inside"}), deny=frozenset({"fake-inside"}))


def test_a_contested_kernel_is_never_picked() -> None:
    """Nobody's name wins nothing; the plan says who claims it."""
    sides = [fake_plugin(name, [kernel("same", priority=90)]) for name in ("left", "right")]
    plan = plan_with([*sides, INSIDE])
    assert decode(plan) == "inside"
    assert texts_of(plan, "shadowed") == ["same: claimed by fake-left and fake-right, so nobody has it"]


@pytest.mark.parametrize(("keep", "wanted"), [(False, "fast"), (True, "kept")])
def test_keeping_the_graph_outranks_priority_only_where_asked(keep: bool, wanted: str) -> None:
    """The policy is off by default."""
    offers = [kernel("fast", priority=90), kernel("kept", graph="any", priority=1)]
    assert decode(plan_with(offers, engine=EngineFacts(graph="any"), policy=Policy(keep_graph=keep))) == wanted


def test_measurements_of_this_host_outrank_priority() -> None:
    """Measured kernels come first, fastest first, and the source says so; another host's record is not read."""
    offers = [kernel("high", graph="any", priority=90), kernel("slow"), kernel("quick", priority=1)]
    record = times_of(offers, {("decode", "quick"): 5.0, ("decode", "slow"): 9.0})
    plan = plan_of(offers, measurements=record)
    assert (decode(plan), plan.phase("decode").source) == ("quick", "auto (measured)")
    assert (plan.phase("prefill").kernel, plan.phase("prefill").source) == ("high", "auto")
    other = plan_of(offers, measurements=replace(record, machine=record.machine._replace(device_name="another")))
    assert decode(other) == "high"
    assert texts_of(other, "unmeasured") == [
        "the times are another machine's, and ignored: device_name another there, NVIDIA H100 80GB HBM3 here"
    ]
    # a graph counts before time only where the policy says so
    captured = EngineFacts(graph="any")
    assert decode(plan_of(offers, measurements=record, engine=captured)) == "quick"
    kept = plan_of(offers, measurements=record, engine=captured, policy=Policy(keep_graph=True))
    assert decode(kept) == "high"


def test_an_approximate_kernel_is_taken_only_when_asked_for() -> None:
    """And its loss names the exact one."""
    offers = [kernel("rough", accuracy="int8", priority=90), kernel("exact")]
    assert decode(plan_with(offers)) == "exact"
    plan = plan_with(offers, Requests(attention_backend="rough"))
    assert {(loss.code, loss.alternative) for loss in plan.losses} == {("accuracy", "exact")}
