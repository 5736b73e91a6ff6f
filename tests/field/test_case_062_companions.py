"""Case 62, vllm #49804, sglang #10891, #6160, NeMo Export-Deploy #679: packages that must match are held together."""

from __future__ import annotations

import pytest

from backstamp.construction import RunnerShape, build
from backstamp.declarations import Role
from backstamp.engine import EngineFacts
from backstamp.errors import Refused
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.policy import Policy
from backstamp.resolution import resolve
from backstamp.stamp import read_stamp
from backstamp.testing.fakes import catalogue_of, fake_plugin, recording_factory
from backstamp.testing.hosts import described_host
from tests.resolving import kernel
from tests.sites import ask

FLASHINFER = kernel("flashinfer", requires=("flashinfer-python>=0.6",), companions=("flashinfer-cubin",), priority=80)
CATALOGUE = catalogue_of(fake_plugin("p", [FLASHINFER, kernel("triton")]))
UNLIKE = {"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.13"}
ALIKE = {"flashinfer-python": "0.6.14", "flashinfer-cubin": "0.6.14"}


def test_unlike_companions_rule_the_kernel_out_and_the_rest_resolves() -> None:
    """vllm #49804: auto takes triton, and the verdict holds the reason."""
    plan = ask(CATALOGUE, host="h100", libraries=UNLIKE)
    assert plan.phase("prefill").kernel == "triton"
    (verdict,) = [item for item in plan.phase("prefill").verdicts if item.kernel == "flashinfer"]
    assert verdict.code == "companion"
    assert "0.6.14" in verdict.message
    assert "0.6.13" in verdict.message


def test_companions_that_match_change_nothing() -> None:
    """sglang #6160: the check is about the pair, not about its presence."""
    assert ask(CATALOGUE, host="h100", libraries=ALIKE).phase("prefill").kernel == "flashinfer"
    assert ask(CATALOGUE, host="h100", libraries={"flashinfer-python": "0.6.14"}).phase("decode").kernel == "flashinfer"


@pytest.mark.parametrize(
    "flag",
    ["attention_backend", "prefill_attention_backend", "decode_attention_backend", "draft_attention_backend"],
)
def test_it_fires_through_whichever_flag_names_the_kernel(flag: str) -> None:
    """sglang #10891: a split half or the draft flag is a request like any other."""
    role: Role = "draft" if flag.startswith("draft") else "target"
    launch = make_launch(Requests(**{flag: "flashinfer"}, speculative_algorithm="STANDALONE"), role=role)
    host = described_host("h100", libraries=UNLIKE)
    with pytest.raises(Refused) as caught:
        resolve(launch, EngineFacts(), default_model(), host, CATALOGUE, role=role)
    assert "0.6.14" in caught.value.needed
    assert "0.6.13" in caught.value.found
    assert "flashinfer" in caught.value.who


def test_the_bypass_is_allowed_and_on_the_stamp() -> None:
    """NeMo Export-Deploy #679: the operator may know better, and every object says that he did."""
    policy = Policy(bypass=frozenset({"companion"}))
    plan = ask(CATALOGUE, "flashinfer", host="h100", libraries=UNLIKE, policy=policy)
    built = build(plan, RunnerShape(), CATALOGUE, load=recording_factory)
    stamp = read_stamp(built.objects["decode", 0])
    assert stamp.kernel == "flashinfer"
    assert stamp.skipped == ("companion",)
