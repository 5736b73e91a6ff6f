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
