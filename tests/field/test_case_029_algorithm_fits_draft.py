"""Case 29, sglang #21272: an algorithm that does not hand over what the draft consumes is refused before loading."""

from __future__ import annotations

import pytest

from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from backstamp.model import DraftFacts
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with

THREE = model_with((1, DENSE), name="draft3", draft=DraftFacts(aux_hidden_states=3))
NONE = model_with((1, DENSE), name="draft0", draft=DraftFacts())


@pytest.mark.parametrize("algorithm", ["EAGLE", "eagle", "MTP", "STANDALONE"])
def test_a_draft_that_needs_hidden_states_the_algorithm_lacks_is_refused(algorithm: str) -> None:
    """sglang #21272: the error names the draft, what it needs, what the algorithm supplies, and what to use."""
    with pytest.raises(ConflictingRequest) as caught:
        plan_with([kernel("a")], Requests(speculative_algorithm=algorithm), model=THREE, role="draft")
    assert "draft3" in caught.value.who
    assert caught.value.needed == "3 auxiliary hidden states of the target"
    assert caught.value.found == f"{algorithm.upper()}, which supplies 0"
    assert "EAGLE3" in caught.value.fix


def test_whoever_named_the_algorithm() -> None:
    """An embedder's algorithm is held to the same."""
    with pytest.raises(ConflictingRequest, match="supplies 0"):
        plan_with([kernel("a")], embedder=Requests(speculative_algorithm="EAGLE"), model=THREE, role="draft")


@pytest.mark.parametrize("model", [THREE, NONE])
def test_the_algorithm_made_for_it_is_accepted(model: object) -> None:
    """EAGLE3 hands them over, and a draft without the need is served as well."""
    plan = plan_with([kernel("a")], Requests(speculative_algorithm="EAGLE3"), model=model, role="draft")
    assert plan.phase("draft_extend").kernel == "a"


def test_a_draft_without_the_need_is_accepted() -> None:
    """sglang #21272: EAGLE with a draft that feeds on the last hidden state."""
    plan = plan_with([kernel("a")], Requests(speculative_algorithm="EAGLE"), model=NONE, role="draft")
    assert plan.phase("draft_extend").kernel == "a"
