"""Case 29, sglang #21272: an algorithm that does not hand over what the draft consumes is refused before loading."""

from __future__ import annotations

import pytest

from backstamp.cli.options import Flags
from backstamp.engine import EngineFacts
from backstamp.errors import ConflictingRequest
from backstamp.launch import Requests
from backstamp.model import DraftFacts
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel
from tests.scenes import DENSE, model_with, plan_with, texts_of

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


@pytest.mark.parametrize("algorithm", ["deepseek_mtp", "qwen3-next-mtp", "FROZEN_KV_MTP", "medusa", "suffix", "ngram"])
def test_every_known_algorithm_that_supplies_none_is_refused(algorithm: str) -> None:
    """Variants of MTP are named after models; they feed on the last hidden state alone."""
    with pytest.raises(ConflictingRequest, match="which supplies 0"):
        plan_with([kernel("a")], Requests(speculative_algorithm=algorithm), model=THREE, role="draft")


@pytest.mark.parametrize("algorithm", ["EAGLE3", "dflash"])
def test_an_algorithm_that_supplies_them_needs_no_word(algorithm: str) -> None:
    """Accepted, and nothing in doubt."""
    plan = plan_with([kernel("a")], Requests(speculative_algorithm=algorithm), model=THREE, role="draft")
    assert texts_of(plan, "unknown_algorithm") == []


@pytest.mark.parametrize("algorithm", ["EAGLE2", "my\x1b[31mown"])
def test_an_algorithm_nobody_knows_is_told_with_those_that_are_known(algorithm: str) -> None:
    """It may supply them: no refusal, and no silence. A draft without the need asks nothing of it."""
    plan = plan_with([kernel("a")], Requests(speculative_algorithm=algorithm), model=THREE, role="draft")
    (text,) = texts_of(plan, "unknown_algorithm")
    assert "DFLASH, DRAFT_MODEL, EAGLE, EAGLE3" in text
    assert "3 auxiliary hidden states" in text
    assert "\x1b" not in text
    for role, model in (("draft", NONE), ("target", THREE)):
        quiet = plan_with([kernel("a")], Requests(speculative_algorithm=algorithm), model=model, role=role)  # type: ignore[arg-type]
        assert texts_of(quiet, "unknown_algorithm") == []


def test_a_flag_nobody_typed_is_not_blamed() -> None:
    """The command line assumes an algorithm for a draft model: the refusal says that it was assumed."""
    launch = Flags(draft_model="draft.json", role="draft").launch()
    with pytest.raises(ConflictingRequest) as caught:
        resolve(
            launch,
            EngineFacts(),
            THREE,
            described_host("h100"),
            catalogue_of(fake_plugin("p", [kernel("a")])),
            role="draft",
        )
    assert "--speculative-algorithm" not in caught.value.who
    found = "STANDALONE, which supplies 0; no algorithm was named by --speculative-algorithm, STANDALONE is assumed"
    assert caught.value.found == found
    named = Flags(draft_model="draft.json", speculative_algorithm="EAGLE3").launch()
    assert (named.speculative_algorithm, named.source_of("speculative_algorithm")) == ("EAGLE3", "operator")


def test_a_sharing_draft_without_its_targets_plan_says_what_is_not_held() -> None:
    """It is in the scope of its target's locks and layout, which nobody knows then."""
    sharing = model_with((1, DENSE), name="sharing", draft=DraftFacts(shares_kv=True))
    (text,) = texts_of(plan_with([kernel("a")], model=sharing, role="draft"), "lost")
    assert "the target's locks and layout are not held" in text
    target = plan_with([kernel("a")])
    assert texts_of(plan_with([kernel("a")], model=sharing, role="draft", target=target), "lost") == []
    assert texts_of(plan_with([kernel("a")], model=NONE, role="draft"), "lost") == []
