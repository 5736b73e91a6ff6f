"""The demo is real: every phase by the plan's kernel, equal tokens, errors against float64, and red when broken."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.host import load_host, this_host
from backstamp.launch import Requests, make_launch
from backstamp.model import DEFAULT_CONFIG
from backstamp.policy import Policy
from backstamp.testing.demo import NEW_TOKENS, run_demo
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from tests.children import COMMAND, ordinary_environment
from tests.documents import install_documented_plugin
from tests.greedy import MODELS


def demo(*arguments: str, path: Path | None = None) -> tuple[int, dict[str, object]]:
    """Run `backstamp demo --json` in a child that is an ordinary machine; `path` is put on its module path."""
    program = [sys.executable, "-c", COMMAND, "demo", "--json", *arguments]
    child = subprocess.run(program, capture_output=True, text=True, env=ordinary_environment(path), check=False)
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


BROKEN = {
    "zeros": ("out[start:stop] = answer", "out[start:stop] = 0 * answer"),
    "no-causal-mask": ('.masked_fill(_future(logits), float("-inf"))', ""),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_demo_is_red_with_a_verify_kernel_that_is_wrong(fault: str, tmp_path: Path) -> None:
    """The plugin of docs/write-a-plugin.md, broken: outputs differ from plain decoding, and the demo exits 1."""
    sound, broken = BROKEN[fault]
    site = install_documented_plugin(tmp_path / "site-packages", lambda text: text.replace(sound, broken))
    flags = ("--verify-attention-backend", "acme_attention", "--speculative-topk", "1")
    status, report = demo(*flags, path=site)
    assert status == 1
    assert report["target"]["phases"]["verify"]["stamp"]["kernel"] == "acme_attention_naive"
    assert report["equal"] is False
    assert report["errors"]["target verify"] > 1e-2
    healthy = install_documented_plugin(tmp_path / "healthy" / "site-packages", lambda text: text)
    assert demo(*flags, path=healthy)[0] == 0


def test_progress_hears_of_every_token_of_every_way() -> None:
    """The counts a progress bar gets reach the tokens asked for: plain, chain and tree."""
    heard: dict[str, list[int]] = {}

    def progress(what: str, done: int, total: int) -> None:
        heard.setdefault(what, []).append(done)
        assert total == sum(NEW_TOKENS)

    launch = make_launch(Requests(speculative_algorithm="STANDALONE", speculative_topk=2))
    config = json.loads(files("backstamp").joinpath(DEFAULT_CONFIG).read_text("utf-8"))
    run_demo(launch, config, this_host("cpu"), build_catalogue(discover()), progress=progress)
    assert {name: counts[-1] for name, counts in heard.items()} == dict.fromkeys(("plain", "chain", "tree"), 192)
    assert all(len(counts) > max(NEW_TOKENS) / 4 and counts == sorted(counts) for counts in heard.values())


def test_the_demo_refuses_unlike_kernels_for_unlike_layers() -> None:
    """Its speculative engine has one backend a phase, and would run one kernel where the stamps name two."""
    features = (frozenset({"sinks"}), frozenset({"sinks", "window"}))
    offers = [
        replace(cpu_offer(f"kernel_{at}", "fake"), priority=90 - at, features=some) for at, some in enumerate(features)
    ]
    launch = make_launch(Requests(speculative_algorithm="STANDALONE"), policy=Policy(layers="per_layer"))
    with pytest.raises(BadInput, match="target prefill: needs one kernel for all layers, got kernel_0, kernel_1"):
        run_demo(launch, MODELS["gpt-oss"], load_host("epyc"), catalogue_of(fake_plugin("fake", offers)))
