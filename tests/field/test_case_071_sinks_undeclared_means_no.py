"""Case 71, vllm #40153 and #24794: a kernel that says nothing about sinks has none."""

from __future__ import annotations

import pytest

from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import SPEC, built_from, model_of, plan_on, stamps_of
from tests.resolving import kernel

SM120 = {"archs": ("12.0",)}
WINDOW = frozenset({"window"})
PLUGIN = fake_plugin(
    "p",
    [
        kernel("flash_attn", features=WINDOW | {"softcap"}, priority=90, **SM120),
        kernel("flashinfer", features=WINDOW | {"lse"}, priority=80, **SM120),
        kernel("triton", features=WINDOW | {"sinks"}, priority=10, **SM120),
    ],
)
#: Says nothing at all about features.
NEWPLUG = fake_plugin("new", [kernel("newplug", features=frozenset(), priority=99, **SM120)])
SINKS = model_of("sinks")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_auto_takes_the_one_kernel_that_declares_sinks(role: str) -> None:
    """vllm #40153: on SM120 triton, in every phase, whatever ranks above it; each other has its reason."""
    plan = plan_on("rtx5090", PLUGIN, NEWPLUG, requests=SPEC, model=SINKS, role=role)
    assert set().union(*stamps_of(built_from(plan, PLUGIN, NEWPLUG)).values()) == {"triton"}
    for row in plan.running:
        refused = {item.kernel: item for item in row.verdicts if not item.accepted}
        assert sorted(refused) == ["flash_attn", "flashinfer", "newplug"]
        for verdict in refused.values():
            assert (verdict.code, verdict.field) == ("feature", "features")
            assert "declares sinks" in verdict.wanted
        assert refused["newplug"].have == "no feature declared"


@pytest.mark.parametrize("kernel_name", ["flashinfer", "newplug"])
@pytest.mark.parametrize(
    ("flag", "role"),
    [
        ("attention_backend", "target"),
        ("prefill_attention_backend", "target"),
        ("decode_attention_backend", "target"),
        ("verify_attention_backend", "target"),
        ("draft_attention_backend", "draft"),
    ],
)
def test_a_kernel_without_sinks_is_refused_when_asked_for(kernel_name: str, flag: str, role: str) -> None:
    """vllm #24794: declared no and not declared are the same answer, in any flag."""
    asked = Requests(speculative_algorithm="EAGLE", **{flag: kernel_name})
    with pytest.raises(Refused, match="sinks"):
        plan_on("rtx5090", PLUGIN, NEWPLUG, requests=asked, model=SINKS, role=role)


def test_a_model_without_sinks_asks_nobody_about_them() -> None:
    """The same host, a Llama: the silent plugin is as good as any."""
    plan = plan_on("rtx5090", PLUGIN, NEWPLUG)
    assert plan.phase("decode").kernel == "newplug"


@pytest.mark.parametrize(
    ("model", "feature"),
    [pytest.param("softcap", "softcap", id="softcap"), pytest.param("mistral", "window", id="window")],
)
def test_every_other_feature_is_no_where_it_is_undeclared(model: str, feature: str) -> None:
    """The relatives: softcap and windows are never assumed either."""
    silent = fake_plugin("new", [kernel("newplug", features=frozenset(), head_dims=(64, 128, 256), **SM120)])
    with pytest.raises(NoKernel) as caught:
        plan_on("rtx5090", silent, model=model_of(model))
    assert f"newplug: needs a kernel that declares {feature}" in caught.value.considered


def test_a_phases_own_features_are_no_where_they_are_undeclared() -> None:
    """The relative by phase: a tree of tokens is verified only by a kernel that says it can."""
    with pytest.raises(Refused, match="tree_mask"):
        plan_on("rtx5090", PLUGIN, requests=Requests(speculative_algorithm="EAGLE", speculative_topk=2), model=SINKS)
