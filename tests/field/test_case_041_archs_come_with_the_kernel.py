"""Case 41, vllm #46055: a new arch is an upgrade of the plugin alone; no gate in core or engine knows archs."""

from __future__ import annotations

import pytest

from backstamp.discovery import Found
from backstamp.errors import NoKernel, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import fake_plugin
from tests.building import GDN, SPEC, built_from, model_of, plan_on
from tests.resolving import kernel

OLD, NEW = ("9.0", "10.0"), ("9.0", "10.0", "12.1")
OTHER = fake_plugin("other", [kernel("triton", archs=("12.1",), priority=1)])


def plugin(version: str, archs: tuple[str, ...]) -> Found:
    """One plugin at one version."""
    return fake_plugin("mine", [kernel("mine", archs=archs)], version=version)


def test_the_old_plugin_is_refused_by_its_arch_and_the_new_one_is_chosen() -> None:
    """vllm #46055: SM121 with 1.0 is refused, reason arch; 1.1 is chosen and stamped with its version."""
    asked = Requests(attention_backend="mine")
    with pytest.raises(Refused) as caught:
        plan_on("gb10", plugin("1.0", OLD), OTHER, requests=asked)
    assert caught.value.verdicts[0].code == "arch"
    assert "SM121 (12.1)" in caught.value.found
    plan = plan_on("gb10", plugin("1.1", NEW), OTHER, requests=asked)
    assert plan.phase("decode").plugin == ("mine", "fake-mine", "1.1")


def test_auto_takes_it_after_the_upgrade_and_only_then() -> None:
    """The same plan before and after, nothing else changed: the verdict turns and so does the choice."""
    before = plan_on("gb10", plugin("1.0", OLD), OTHER)
    after = plan_on("gb10", plugin("1.1", NEW), OTHER)
    assert [plan.phase("prefill").kernel for plan in (before, after)] == ["triton", "mine"]
    verdicts = {item.kernel: item.code for item in before.phase("prefill").verdicts}
    assert verdicts["mine"] == "arch"
    backends = built_from(after, plugin("1.1", NEW), OTHER)
    assert backends.attention_backends() == ("mine", "mine")


def test_with_nothing_else_the_old_plugin_is_the_reason_in_the_error() -> None:
    """Auto without a candidate names the plugin's archs and this one."""
    with pytest.raises(NoKernel) as caught:
        plan_on("gb10", plugin("1.0", OLD))
    assert "mine: needs SM90 (9.0), SM100 (10.0), got SM121 (12.1)" in caught.value.considered


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_draft_is_gated_by_the_same_declaration(role: str) -> None:
    """The relative: no second table for drafts."""
    for version, archs, name in (("1.0", OLD, "triton"), ("1.1", NEW, "mine")):
        plan = plan_on("gb10", plugin(version, archs), OTHER, requests=SPEC, role=role)
        assert {row.kernel for row in plan.running} == {name}


def test_a_linear_kernel_is_gated_by_its_own_declaration() -> None:
    """The relative in the linear slot."""
    attention = fake_plugin("full", [kernel("full", archs=("any",), head_dims=(256,))])
    for archs, name in ((OLD, "triton"), (NEW, "mine")):
        mine = fake_plugin(
            "g", [kernel("mine", archs=archs, priority=90, **GDN), kernel("triton", archs=("any",), **GDN)]
        )
        linear = plan_on("gb10", attention, mine, model=model_of("hybrid")).linear
        assert linear is not None
        assert linear.decode.kernel == name
