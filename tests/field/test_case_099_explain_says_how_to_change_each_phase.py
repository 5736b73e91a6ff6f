"""Case 99, vLLM #31787: nobody found how to set a backend per phase."""

from __future__ import annotations

import pytest

from backstamp.catalogue import Catalogue
from backstamp.compiled import compile_for
from backstamp.declarations import PHASES
from backstamp.engine import EngineFacts
from backstamp.launch import FLAGS, Requests, make_launch
from backstamp.model import default_model
from backstamp.plan_explanation import PhaseStory, explain_plan
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel

CATALOGUE = catalogue_of(
    fake_plugin(
        "p",
        [
            kernel("good", priority=90),
            kernel("near", archs=("10.0",)),
            kernel("far", archs=("10.0",), head_dims=(64,), dtypes=frozenset({"fp16"})),
            kernel("elsewhere", device="rocm", archs=("gfx942",)),
        ],
    )
)


def stories(requests: Requests, catalogue: Catalogue = CATALOGUE) -> dict[str, PhaseStory]:
    """The five stories by phase, for SM90."""
    host = compile_for(catalogue, described_host("h100"))
    return {
        item.phase: item for item in explain_plan(host, make_launch(requests), EngineFacts(), default_model()).phases
    }


@pytest.mark.parametrize(
    "requests", [Requests(), Requests(speculative_algorithm="EAGLE")], ids=["plain", "speculative"]
)
def test_five_phases_each_with_a_reason_and_a_real_flag(requests: Requests) -> None:
    """Every phase says why, and the flag that would change it exists."""
    told = stories(requests)
    assert tuple(told) == PHASES
    assert all(story.reason for story in told.values())
    assert {story.setting for story in told.values()} <= set(FLAGS.values())


def test_a_phase_that_is_not_run_says_so_and_what_would_run_it() -> None:
    """Nothing drafts, or the draft takes one step."""
    told = stories(Requests())
    assert (told["verify"].kernel, told["verify"].reason) == (None, "not run: nothing drafts")
    assert told["draft_decode"].setting == "--speculative-algorithm"
    single = stories(Requests(speculative_algorithm="EAGLE", speculative_num_steps=1))["draft_decode"]
    assert (single.reason, single.setting) == ("not run: the draft takes a single step", "--speculative-num-steps")


def test_the_flag_that_is_named_changes_the_phase() -> None:
    """What explain says is true: setting it binds that phase, and the story then says who asked."""
    other = catalogue_of(fake_plugin("p", [kernel("good", priority=90), kernel("other")]))
    for phase, field in (("decode", "decode_attention_backend"), ("draft_extend", "draft_attention_backend")):
        before = stories(Requests(speculative_algorithm="EAGLE"), other)[phase]
        assert (before.kernel, before.setting) == ("good", FLAGS[field])
        after = stories(Requests(speculative_algorithm="EAGLE", **{field: "other"}), other)[phase]
        assert (after.kernel, after.reason) == ("other", f"asked for as other ({FLAGS[field]})")


def test_the_nearest_refused_candidate_is_the_one_that_fails_least() -> None:
    """All its reasons are told; another kind of device is farther than any kernel of this one."""
    story = stories(Requests())["decode"]
    assert story.nearest == "near"
    assert [(item.code, item.message) for item in story.lacks] == [("arch", "needs SM100 (10.0), got SM90 (9.0)")]
