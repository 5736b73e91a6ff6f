"""Case 48, vLLM #14195: no device was found and nobody said why; planning works anywhere, building says why."""

from __future__ import annotations

import pytest

from backstamp.construction import RunnerShape, build
from backstamp.device_nodes import device_nodes
from backstamp.errors import NoDevice, NotInstalled, Refused
from backstamp.launch import Requests
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel, plan_of

OFFERS = [kernel("k")]
ASCEND = kernel("ascend", device="npu", archs=("ascend910b",))


def test_a_plan_for_a_described_host_works_here_and_its_build_does_not() -> None:
    """A runner on the CPU is no H100; the message names the host the plan is for."""
    plan = plan_of(OFFERS)
    assert plan.phase("decode").kernel == "k"
    with pytest.raises(NoDevice, match="needs a cuda device, got a runner on 'cpu'") as caught:
        build(plan, RunnerShape(), catalogue_of(fake_plugin("p", OFFERS)))
    assert "h100" in caught.value.who


@pytest.mark.skipif(device_nodes("npu")[0], reason="needs a machine without an Ascend NPU")
def test_a_runner_that_claims_a_device_needs_one() -> None:
    """The device nodes that were looked for are the reason."""
    plan = plan_of([ASCEND], host="ascend910b")
    with pytest.raises(NoDevice, match="got no device: none of /dev/davinci_manager"):
        build(plan, RunnerShape(device="npu:0"), catalogue_of(fake_plugin("p", [ASCEND])))


def test_installed_without_its_device_is_not_absent() -> None:
    """An installed plugin is named with its version and needs an NPU; one that is not installed is another error."""
    with pytest.raises(Refused, match=r"plugin p, fake-p 1\.0.*needs npu, got cuda"):
        plan_of([*OFFERS, ASCEND], Requests(attention_backend="ascend"))
    with pytest.raises(NotInstalled, match="pip install backstamp-ascend"):
        plan_of(OFFERS, Requests(attention_backend="ascend"))
