"""Case 21, vLLM #54826 and #46770: one of two runner paths dropped an explicit draft backend."""

from __future__ import annotations

import pytest

from backstamp.construction import RunnerShape, build
from backstamp.errors import BuiltMismatch
from backstamp.launch import Requests
from backstamp.plan import Plan
from backstamp.testing.adapter_checks import SPECULATOR_FAMILIES, check_draft_is_consumed
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.resolving import kernel, plan_of

OFFERS = [kernel("triton"), kernel("flashinfer")]
ASKED = Requests(attention_backend="flashinfer", draft_attention_backend="triton", speculative_algorithm="EAGLE")


class Adapter:
    """Builds drafts as a runner path does; `drops` are families whose path forgets the draft's plan."""

    def __init__(self, *drops: str) -> None:
        self.drops = drops

    def build_draft(self, family: str, plan: Plan) -> object:
        """The draft of one family."""
        if family in self.drops:
            plan = plan_of(OFFERS, Requests(draft_attention_backend="flashinfer"), role="draft")
        backends = build(plan, RunnerShape(), catalogue_of(fake_plugin("p", OFFERS)), load=recording_factory)
        return backends.serving_attention_backend("draft_decode")


def draft_plan() -> Plan:
    """The draft of a target that runs flashinfer."""
    return plan_of(OFFERS, ASKED, role="draft", target=plan_of(OFFERS, ASKED))


def test_every_family_builds_the_draft_that_was_asked_for() -> None:
    """The target is flashinfer, the draft triton, in each speculator family."""
    assert plan_of(OFFERS, ASKED).phase("decode").kernel == "flashinfer"
    check_draft_is_consumed(Adapter(), draft_plan())


@pytest.mark.parametrize("family", SPECULATOR_FAMILIES)
def test_a_path_that_drops_the_request_fails_and_names_its_family(family: str) -> None:
    """Only the family whose path forgot is named."""
    with pytest.raises(BuiltMismatch, match=f"{family}: flashinfer") as caught:
        check_draft_is_consumed(Adapter(family), draft_plan())
    assert not [other for other in SPECULATOR_FAMILIES if other != family and other in caught.value.found]


def test_an_unstamped_draft_fails() -> None:
    """An object nobody stamped may be anything."""

    class Forgetful(Adapter):
        def build_draft(self, family: str, plan: Plan) -> object:
            return object()

    with pytest.raises(BuiltMismatch, match="without a stamp"):
        check_draft_is_consumed(Forgetful(), draft_plan())


OTHER = kernel("other", phases=frozenset({"prefill"}), draft_phases=frozenset({"draft_extend"}), priority=99)
LOOP = kernel("loop", phases=frozenset({"decode", "verify"}), draft_phases=frozenset({"draft_decode"}), priority=99)
BOTH = [OTHER, LOOP, kernel("x", priority=1)]


class ByPhase:
    """Builds each phase of a draft; with `one`, that kernel for all of them whatever the plan says."""

    def __init__(self, *leaves_out: str, one: str | None = None, bare: bool = False) -> None:
        self.leaves_out, self.one, self.bare = leaves_out, one, bare

    def build_draft(self, family: str, plan: Plan) -> object:
        """The draft of any family."""
        if self.one is not None:
            plan = plan_of(BOTH, Requests(draft_attention_backend=self.one), role="draft")
        backends = build(plan, RunnerShape(), catalogue_of(fake_plugin("p", BOTH)), load=recording_factory)
        if self.bare:
            return backends.serving_attention_backend("draft_extend")
        phases = [row.phase for row in plan.running if row.phase not in self.leaves_out]
        return {phase: backends.serving_attention_backend(phase) for phase in phases}


def two_kernels() -> Plan:
    """A draft whose loop is another kernel than its extend phase."""
    plan = plan_of(BOTH, Requests(), role="draft")
    assert (plan.phase("draft_extend").kernel, plan.phase("draft_decode").kernel) == ("other", "loop")
    return plan


def test_each_phase_of_a_draft_is_held_against_its_own_kernel() -> None:
    """What serves one phase of the plan does not serve the others."""
    check_draft_is_consumed(ByPhase(), two_kernels())
    with pytest.raises(BuiltMismatch, match=r"mtp: x of fake-p .*, runs draft_decode, planned as loop"):
        check_draft_is_consumed(ByPhase(one="x"), two_kernels())


def test_a_kernel_of_another_phase_is_no_draft_loop() -> None:
    """The plan has that kernel, for draft_extend; the loop runs another."""
    with pytest.raises(BuiltMismatch, match=r"mtp: other .*, built for prefill, draft_extend, runs draft_decode"):
        check_draft_is_consumed(ByPhase(bare=True), two_kernels())


def test_a_single_step_draft_is_its_extend_backend() -> None:
    """It has no loop to build."""
    plan = plan_of(BOTH, Requests(speculative_num_steps=1), role="draft")
    check_draft_is_consumed(ByPhase(bare=True), plan)


def test_a_phase_nobody_built_is_named() -> None:
    """An adapter that answers by phase answers for all of them."""
    with pytest.raises(BuiltMismatch, match="eagle: nothing for draft_decode"):
        check_draft_is_consumed(ByPhase("draft_decode"), two_kernels())


def test_a_container_that_hides_its_steps_fails() -> None:
    """It is told with the others, not raised in the middle of the check."""

    class Hidden:
        attn_backends = ()

    class Hiding(Adapter):
        def build_draft(self, family: str, plan: Plan) -> object:
            return Hidden()

    with pytest.raises(BuiltMismatch, match="dflash: Hidden for draft_decode: an empty tuple"):
        check_draft_is_consumed(Hiding(), draft_plan())


def test_an_object_of_another_phase_is_no_draft_loop() -> None:
    """The same kernel, but built to extend: each step of a loop holds its own plan state."""
    plan = plan_of(BOTH, Requests(draft_attention_backend="x"), role="draft")
    check_draft_is_consumed(ByPhase(), plan)
    with pytest.raises(BuiltMismatch, match=r"mtp: x .*, built for prefill, draft_extend, runs draft_decode"):
        check_draft_is_consumed(ByPhase(bare=True), plan)
