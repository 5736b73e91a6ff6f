"""The demo is real: every phase by the plan's kernel, equal tokens, errors against float64, and red when broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def demo(*arguments: str) -> tuple[int, dict[str, object]]:
    """Run `backstamp demo --json` in a child."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-c", "from backstamp.cli import main; main()", "demo", "--json", *arguments]
    child = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    return child.returncode, json.loads(child.stdout)


def test_the_demo_runs_all_five_phases_and_its_outputs_are_equal() -> None:
    """Plain, chain and tree give the same tokens; every phase of both runners was compared with float64."""
    status, report = demo()
    assert status == 0
    assert report["equal"] is True
    assert [generation["name"] for generation in report["generations"]] == ["plain", "chain", "tree"]
    assert all(generation["accept_length"] > 1 for generation in report["generations"][1:])
    phases = {"target prefill", "target decode", "target verify", "draft prefill", "draft draft_decode"}
    assert phases | {"draft draft_extend"} == set(report["errors"])
    assert max(report["errors"].values()) < 1e-5
    assert len(report["generations"][0]["tokens"]) >= 8


def test_the_demo_runs_each_phase_by_the_kernel_asked_for() -> None:
    """Flags choose backends, and the stamps read back say so."""
    status, report = demo("--prefill-attention-backend", "flex_attention", "--decode-attention-backend", "torch_native")
    assert status == 0
    phases = report["target"]["phases"]
    assert phases["prefill"]["stamp"]["kernel"] == "flex_attention"
    assert phases["decode"]["stamp"]["kernel"] == "torch_native"
    assert report["draft"]["phases"]["draft_decode"]["steps"] == ["torch_native"] * 2


@pytest.mark.parametrize("model", ["sinks", "softcap"])
def test_the_demo_serves_models_with_windows_sinks_and_softcap(model: str) -> None:
    """Features of real models are served, not dropped."""
    status, report = demo("--model", f"tests/data/models/{model}.json")
    assert status == 0
    assert report["equal"] is True


def test_the_demo_refuses_a_kernel_that_cannot_run_here() -> None:
    """Nothing falls back: a kernel for another machine is refused before any weight is made."""
    status, report = demo("--attention-backend", "triton", "--device", "cpu")
    assert status == 1
    assert report["error"]["code"] == "refused"
