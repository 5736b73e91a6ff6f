"""Case 93, vllm #54059, #31936, #30644 and flashinfer #2166: no sparse path is an error that names the nearest."""

from __future__ import annotations

import pytest

from backstamp.declarations import ANY
from backstamp.errors import NoKernel, StrictViolation
from backstamp.launch import Requests
from backstamp.policy import Policy
from tests.resolving import kernel
from tests.scenes import CUDA, DENSE, MLA, SPARSE, SPARSE_MLA, model_with, plan_with, texts_of

FLASHMLA = kernel("flashmla_sparse", archs=("9.0", "10.0"), **SPARSE_MLA)
NARROW = kernel("narrow_sparse", archs=("9.0",), dtypes=frozenset({"fp16"}), **SPARSE_MLA)
LATENT = kernel("dense_mla", archs=CUDA, priority=99, **MLA)
DENSE_MHA = kernel("dense_mha", archs=CUDA, priority=99)
TILELANG = kernel("tilelang", archs=ANY, priority=1, reference=True, **SPARSE_MLA)
ALL = (FLASHMLA, NARROW, LATENT, DENSE_MHA)
MODEL = model_with((4, SPARSE), name="sparse")


@pytest.mark.parametrize("host", ["l40s", "rtx5090"])
def test_no_candidate_is_an_error_with_every_reason_and_the_nearest(host: str) -> None:
    """vllm #54059: on SM89 and SM120 each candidate says all it lacks; flashmla_sparse lacks the arch alone."""
    with pytest.raises(NoKernel) as caught:
        plan_with(ALL, host=host, model=MODEL)
    lines = dict(line.split(": ", 1) for line in caught.value.considered.split("; "))
    assert sorted(lines) == ["dense_mha", "dense_mla", "flashmla_sparse", "narrow_sparse"]
    assert lines["flashmla_sparse"].startswith("needs SM90")
    assert " and " not in lines["flashmla_sparse"]
    assert "fp16" in lines["narrow_sparse"]
    assert "SM90" in lines["narrow_sparse"]
    assert caught.value.fix.startswith("Nearest: flashmla_sparse, refused only for its arch.")


@pytest.mark.parametrize("host", ["l40s", "rtx5090", "h100"])
def test_a_sparse_model_never_runs_dense_in_silence(host: str) -> None:
    """vllm #31936: dense kernels rank far higher and are never taken."""
    plan = plan_with((*ALL, TILELANG), host=host, model=MODEL)
    assert {row.kernel for row in plan.running} <= {"flashmla_sparse", "tilelang"}


@pytest.mark.parametrize("host", ["l40s", "rtx5090"])
def test_an_installed_reference_is_chosen_with_a_notice(host: str) -> None:
    """flashinfer #2166: it serves where nothing else does, and the plan says that it is slow; strict accepts it."""
    plan = plan_with((*ALL, TILELANG), host=host, model=MODEL, policy=Policy(strict=True))
    assert {row.kernel for row in plan.running} == {"tilelang"}
    assert "tilelang is a portable reference, slow" in texts_of(plan, "slow_path")[0]


def test_where_a_real_kernel_serves_the_reference_is_left_alone() -> None:
    """vllm #30644: low priority, and no notice."""
    plan = plan_with((*ALL, TILELANG), host="h100", model=MODEL)
    assert plan.phase("decode").kernel == "flashmla_sparse"
    assert texts_of(plan, "slow_path") == []


def test_an_operator_who_asks_for_the_reference_is_not_lectured() -> None:
    """Asked for by name it is no surprise."""
    plan = plan_with((*ALL, TILELANG), Requests(attention_backend="tilelang"), host="h100", model=MODEL)
    assert texts_of(plan, "slow_path") == []


def test_a_sparse_draft_is_told_the_same() -> None:
    """The draft role: its loop runs the reference, with the notice."""
    asked = Requests(speculative_algorithm="MTP", speculative_num_steps=3)
    plan = plan_with((*ALL, TILELANG), asked, host="l40s", model=MODEL, role="draft")
    assert plan.phase("draft_decode").kernel == "tilelang"
    assert texts_of(plan, "slow_path")


def test_a_dense_draft_of_a_sparse_target_is_not_held_to_sparse_kernels() -> None:
    """Its own facts decide."""
    plan = plan_with((*ALL, TILELANG), host="l40s", model=model_with((1, DENSE)), role="draft")
    assert plan.phase("draft_extend").kernel == "dense_mha"


def test_strict_words_are_kept_for_choices() -> None:
    """A plan that lost nothing passes strict mode; one whose key was passed over does not."""
    with pytest.raises(StrictViolation):
        plan_with((*ALL, TILELANG), host="l40s", model=MODEL, policy=Policy(strict=True), settings=None,
                  requests=Requests(speculative_num_steps=3))  # fmt: skip
