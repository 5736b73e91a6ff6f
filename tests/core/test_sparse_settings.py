"""What is asked of the sparse kernel's insides, at resolve: values a row knows, and drafts seeded from draft extend."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from backstamp.construction import RunnerShape, build
from backstamp.draft import DraftBackendFactory
from backstamp.errors import BadInput, ConflictingRequest
from backstamp.launch import Requests
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from tests.children import COMMAND, ordinary_environment
from tests.resolving import kernel
from tests.scenes import DENSE, SPARSE, SPARSE_MLA, model_with, plan_with

KNOWN = {"dsa_decode_backend": frozenset({"ours", "theirs"})}
FEATURES = frozenset({"indices", "topk", "tree_mask"})
DSA = kernel("dsa", sub_settings=KNOWN, **SPARSE_MLA | {"features": FEATURES})
PLUGIN = fake_plugin("p", [DSA, kernel("dense")])
MODEL = model_with((4, SPARSE), name="sparse")
SEED = Requests(seed_dsa_topk_from_draft_extend=True, speculative_algorithm="EAGLE", speculative_num_steps=3)


def test_a_value_the_row_knows_is_taken() -> None:
    """It is in the plan, for the kernel to read."""
    plan = plan_with([PLUGIN], Requests(dsa_decode_backend="theirs"), model=MODEL)
    assert plan.sub_settings == (("dsa_decode_backend", "theirs"),)


def test_a_value_the_row_does_not_know_is_refused_with_those_it_does() -> None:
    """Before anything is built: the flag, the kernel and its plugin are named."""
    with pytest.raises(BadInput) as caught:
        plan_with([PLUGIN], Requests(dsa_decode_backend="trtllm"), model=MODEL)
    assert "--dsa-decode-backend" in caught.value.who
    assert "'dsa' (plugin p)" in caught.value.who
    assert caught.value.needed == "one of ours, theirs"
    assert "'trtllm'" in caught.value.found


def test_a_setting_the_row_does_not_name_is_left_to_its_factory() -> None:
    """A row that declares no values refuses none here."""
    asked = Requests(dsa_prefill_backend="anything")
    assert plan_with([PLUGIN], asked, model=MODEL).sub_settings == (("dsa_prefill_backend", "anything"),)


def test_a_seed_reaches_the_drafts_kernel_and_not_the_targets() -> None:
    """The draft loop takes it; the target chooses keys at every step as ever."""
    draft = plan_with([PLUGIN], replace(SEED, speculative_topk=1), model=MODEL, role="draft")
    assert draft.sub_settings == (("seed_dsa_topk_from_draft_extend", "true"),)
    assert plan_with([PLUGIN], SEED, model=MODEL).sub_settings == ()
    factory = DraftBackendFactory(build(draft, RunnerShape(), catalogue_of(PLUGIN), load=recording_factory))
    backend = factory.create_draft_extend_backend()
    assert backend.request.sub_settings == {"seed_dsa_topk_from_draft_extend": "true"}


@pytest.mark.parametrize(
    ("changes", "role", "model", "found"),
    [
        pytest.param({"speculative_algorithm": None, "speculative_num_steps": None}, "target", MODEL,
                     "without speculation", id="no-draft"),
        pytest.param({"speculative_topk": 4}, "target", MODEL, "4 branches", id="branches"),
        pytest.param({"speculative_topk": 4}, "draft", MODEL, "4 branches", id="branches-draft"),
        pytest.param({}, "draft", model_with((1, DENSE)), "served by dense", id="dense-draft"),
    ],
)  # fmt: skip
def test_a_seed_that_nobody_takes_is_a_conflict(
    changes: dict[str, object], role: str, model: object, found: str
) -> None:
    """Never ignored: there is no draft, a draft of branches, or a draft of another kernel."""
    with pytest.raises(ConflictingRequest, match=found) as caught:
        plan_with([PLUGIN], replace(SEED, **changes), model=model, role=role)
    assert "--seed-dsa-topk-from-draft-extend" in caught.value.who
    assert caught.value.fix == "Leave --seed-dsa-topk-from-draft-extend out"


def test_a_seed_switched_off_is_unset() -> None:
    """`False` asks for nothing."""
    off = replace(SEED, seed_dsa_topk_from_draft_extend=False)
    assert plan_with([PLUGIN], off, model=MODEL, role="draft").sub_settings == ()


def test_the_command_line_has_the_flag() -> None:
    """It is refused there with the same words."""
    command = [sys.executable, "-c", COMMAND, "resolve", "--host", "h100"]
    environment = ordinary_environment() | {"COLUMNS": "200", "NO_COLOR": "1"}
    child = subprocess.run(
        [*command, "--seed-dsa-topk-from-draft-extend"], capture_output=True, text=True, env=environment, check=False
    )
    assert child.returncode != 0
    assert "--seed-dsa-topk-from-draft-extend: needs a draft of one branch a step" in child.stderr
