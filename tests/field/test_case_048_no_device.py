"""Case 48, vllm #14195, #8885, #10653; kserve #4722; pytorch #180712: why there is no device is told, and a plugin
without its device is not a plugin that is missing."""

from __future__ import annotations

import json

import pytest

from backstamp.errors import NotInstalled, Refused
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.resolving import kernel
from tests.sites import ask, command

ASCEND = fake_plugin(
    "ascend",
    [kernel("ascend", device="npu", archs=("ascend910b",))],
    distribution="backstamp-ascend",
    version="4.5",
)


def test_inspecting_prints_one_line_for_each_probe() -> None:
    """vllm #14195: no probe's reason is hidden at debug level."""
    shown = command("hosts", "show")
    recorded = json.loads(command("hosts", "show", "--json").stdout)
    assert recorded["probes"]
    for name, _, reason in recorded["probes"]:
        assert reason
        assert [line for line in shown.stdout.splitlines() if line.startswith(f"probe {name}: ")], name
    assert f"{recorded['device']} {recorded['arch']}" in shown.stdout


def test_a_described_host_is_answered_on_any_machine() -> None:
    """pytorch #180712: planning for SM90 needs no SM90 here."""
    assert ask(catalogue_of(fake_plugin("p", [kernel("k")])), host="h100").phase("decode").kernel == "k"


def test_an_installed_plugin_without_its_device_is_told_apart_from_a_missing_one() -> None:
    """vllm #8885, kserve #4722: installed but needs an NPU is one error, not installed is another."""
    plain = fake_plugin("plain", [kernel("plain")])
    with pytest.raises(Refused) as installed:
        ask(catalogue_of(ASCEND, plain), "ascend", host="h100")
    assert "npu" in installed.value.needed
    assert "backstamp-ascend 4.5" in installed.value.who
    with pytest.raises(NotInstalled) as missing:
        ask(catalogue_of(plain), "ascend", host="h100")
    assert "backstamp-ascend" in missing.value.message
    assert "none installed" in missing.value.found
