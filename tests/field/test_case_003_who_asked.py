"""Case 3, sglang #25547 and verl #2769: a default never overwrites what the operator asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.declarations import FamilyDefault
from backstamp.errors import Refused
from backstamp.launch import Requests
from backstamp.policy import Policy
from backstamp.testing.fakes import fake_plugin
from tests.resolving import kernel
from tests.scenes import CUDA, DENSE, GATED, GDN, model_with, plan_with, texts_of

KERNELS = (
    kernel("trtllm_mha", archs=("10.0",), priority=40),
    kernel("triton", archs=CUDA, priority=30),
    kernel("flashinfer", archs=CUDA, priority=90),
    kernel("fa3", archs=("9.0",), priority=80),
)
RULE = FamilyDefault(model_type="g", kernels=("trtllm_mha", "triton"), allowed=frozenset({"trtllm_mha", "triton"}))
ENGINE = fake_plugin("sglang", family_defaults=[RULE], distribution="backstamp-sglang")
ALL = (*KERNELS, ENGINE)
FAMILY, ORDINARY = model_with((4, DENSE), name="g"), model_with((4, DENSE), name="ordinary")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_operators_choice_beats_the_familys_wish(phase: str) -> None:
    """sglang #25547 (a): triton on SM100, and the plan says the operator asked."""
    plan = plan_with(ALL, Requests(attention_backend="triton"), host="b200", model=FAMILY)
    assert (plan.phase(phase).kernel, plan.phase(phase).source) == ("triton", "operator")


@pytest.mark.parametrize("flag", ["attention_backend", "decode_attention_backend", "verify_attention_backend"])
def test_a_kernel_outside_the_familys_set_is_refused_with_the_set(flag: str) -> None:
    """sglang #25547 (b): through whichever flag, the error names the family and what it allows."""
    asked = Requests(speculative_algorithm="EAGLE", **{flag: "flashinfer"})
    with pytest.raises(Refused, match=r"family g allows \(triton, trtllm_mha\), got flashinfer"):
        plan_with(ALL, asked, host="b200", model=FAMILY)


@pytest.mark.parametrize(("host", "wanted"), [("b200", "trtllm_mha"), ("h100", "triton"), ("rtx5090", "triton")])
def test_without_a_flag_the_family_decides_by_host(host: str, wanted: str) -> None:
    """sglang #25547 (c): its first kernel that fits the machine, source family, never a better-ranked outsider."""
    plan = plan_with(ALL, host=host, model=FAMILY)
    assert {(row.kernel, row.source) for row in plan.running} == {(wanted, "family")}


def test_the_operator_beats_the_embedder() -> None:
    """verl #2769 (d): embedder fa3 and operator flashinfer is flashinfer."""
    plan = plan_with(
        ALL, Requests(attention_backend="flashinfer"), embedder=Requests(attention_backend="fa3"), model=ORDINARY
    )
    assert {(row.kernel, row.source) for row in plan.running} == {("flashinfer", "operator")}


def test_the_embedder_beats_auto() -> None:
    """verl #2769 (d): nobody else asked, so fa3, source embedder, though flashinfer ranks higher."""
    plan = plan_with(ALL, embedder=Requests(attention_backend="fa3"), model=ORDINARY)
    assert {(row.kernel, row.source) for row in plan.running} == {("fa3", "embedder")}


def test_an_operators_base_flag_beats_an_embedders_split_flag() -> None:
    """verl #2769, split: who asked outranks how narrowly it was asked."""
    embedder = Requests(decode_attention_backend="fa3")
    plan = plan_with(ALL, Requests(attention_backend="flashinfer"), embedder=embedder, model=ORDINARY)
    assert plan.phase("decode").kernel == "flashinfer"


def test_the_embedder_is_held_to_the_familys_set_too() -> None:
    """An embedder outranks the family's wish, not its lock."""
    assert (
        plan_with(ALL, embedder=Requests(attention_backend="triton"), host="b200", model=FAMILY).phase("decode").source
        == "embedder"
    )
    with pytest.raises(Refused, match="family g allows"):
        plan_with(ALL, embedder=Requests(attention_backend="flashinfer"), host="b200", model=FAMILY)


def test_a_familys_set_of_attention_kernels_says_nothing_about_its_linear_kernels() -> None:
    """The scope of a lock is its slot: a hybrid model's recurrent layers keep their kernel."""
    hybrid = model_with((3, GATED), (1, DENSE), name="g")
    plan = plan_with((*ALL, kernel("gdn_kernel", **GDN)), host="h100", model=hybrid)
    assert plan.phase("decode").kernel == "triton"
    assert plan.linear is not None
    assert plan.linear.prefill.kernel == "gdn_kernel"


def test_a_third_party_speaks_for_its_own_kernels_only() -> None:
    """Installing is not consenting: what it says about others is left out and told, its own kernel it may wish."""
    own = fake_plugin(
        "acme", [kernel("acme", archs=CUDA, priority=1)],
        family_defaults=[replace(RULE, kernels=("triton", "acme"), allowed=frozenset({"triton", "acme"}))],
    )  # fmt: skip
    plan = plan_with((*KERNELS, own), host="h100", model=FAMILY)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("acme", "family")
    (text,) = texts_of(plan, "untrusted")
    assert "prefers triton" in text
    assert "allows acme, triton only" in text
    # its lock binds nobody
    asked = plan_with((*KERNELS, own), Requests(attention_backend="flashinfer"), host="h100", model=FAMILY)
    assert asked.phase("decode").kernel == "flashinfer"


def test_a_third_party_the_operator_allows_speaks_in_full() -> None:
    """--allow is the operator's word for it."""
    stranger = fake_plugin("acme", family_defaults=[RULE])
    policy = Policy(allow=frozenset({"fake-acme", "fake-p"}))
    plan = plan_with((*KERNELS, stranger), host="h100", model=FAMILY, policy=policy)
    assert (plan.phase("decode").kernel, plan.phase("decode").source) == ("triton", "family")
    assert texts_of(plan, "untrusted") == []
