"""Case 38, vLLM #53834: the management library's device 0 was the display card, the runtime's the compute card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstamp.engine import EngineFacts
from backstamp.host import Accelerator, HostFacts, parse_host
from backstamp.launch import Requests, make_launch
from backstamp.model import default_model
from backstamp.plan import Plan
from backstamp.policy import Policy
from backstamp.probes import compare_orders
from backstamp.resolution import resolve
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from tests.resolving import kernel

RUNTIME = (Accelerator("cuda", 0, "10.3", "GB300"), Accelerator("cuda", 1, "12.0", "RTX 5090"))
MANAGEMENT = (Accelerator("cuda", 0, "12.0", "RTX 5090"), Accelerator("cuda", 1, "10.3", "GB300"))


def mixed_box(index: int, management: tuple[Accelerator, ...] = MANAGEMENT) -> HostFacts:
    """The box as probing answers it for one runtime device."""
    chosen = RUNTIME[index]
    return replace(
        described_host("gb300"),
        name="mixed box",
        arch=chosen.arch,
        device_name=chosen.name,
        device_index=index,
        origin="runtime",
        devices=RUNTIME,
        probes=(compare_orders(RUNTIME, management),),
    )


def plan_on(host: HostFacts) -> Plan:
    """Resolve between a kernel of each card."""
    offers = [kernel("datacenter", archs=("10.0", "10.3")), kernel("desktop", archs=("12.0",))]
    launch = make_launch(Requests(), policy=Policy(strict=True))
    return resolve(launch, EngineFacts(), default_model(), host, catalogue_of(fake_plugin("p", offers)))


@pytest.mark.parametrize(("index", "expected"), [(0, "datacenter"), (1, "desktop")])
def test_the_runtimes_order_decides(index: int, expected: str) -> None:
    """Runtime device 0 has SM103's kernels, whatever the management library calls device 0."""
    assert plan_on(mixed_box(index)).phase("decode").kernel == expected


def test_the_facts_carry_index_and_origin() -> None:
    """A recorded box says which device it speaks of and who numbered it."""
    host = mixed_box(1)
    again = parse_host(host.as_json(), "again")
    assert (again.device_index, again.origin, again.arch) == (1, "runtime", "12.0")


def test_the_disagreement_is_a_warning_that_names_both() -> None:
    """Like orders say nothing."""
    (warning,) = [item for item in plan_on(mixed_box(0)).warnings if item.code == "device_order"]
    assert "GB300 (10.3)" in warning.text
    assert "RTX 5090 (12.0)" in warning.text
    assert not [item for item in plan_on(mixed_box(0, RUNTIME)).warnings if item.code == "device_order"]
