"""`backstamp warm`: each phase of a plan is built and run once here, and one that cannot run is told."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from backstamp.attention import RawGates
from backstamp.catalogue import build_catalogue
from backstamp.cli.app import app
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import NoDevice
from backstamp.host import this_host
from backstamp.launch import Requests, make_launch
from backstamp.made_steps import cannot
from backstamp.model import model_from_config
from backstamp.plan_rows import GroupPlan
from backstamp.resolution import resolve
from backstamp.testing.hosts import described_host
from backstamp.warm import Warmed, warm
from backstamp_cpu.linear import TorchNativeLinear
from backstamp_cpu.native import TorchNative
from tests.models import FOLDER, config
from tests.plans import samples
from tests.resolving import kernel


def warmed(model: str, role: str = "target", **requests: object) -> list[Warmed]:
    """Warm one runner of a shipped config on this CPU."""
    facts, catalogue = model_from_config(config(model)), build_catalogue(discover())
    asked = Requests(attention_backend="torch_native", **requests)
    plan = resolve(make_launch(asked, role=role), EngineFacts(), facts, this_host("cpu"), catalogue, role=role)
    return warm(plan, facts, catalogue)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What every forward of `torch_native` was run for: the phase and the layer."""
    seen: list[tuple[str, object]] = []
    real = TorchNative.forward

    def forward(self, q, kv, layer, state, **more):
        seen.append((state.batch.phase, layer))
        return real(self, q, kv, layer, state, **more)

    monkeypatch.setattr(TorchNative, "forward", forward)
    return seen


@pytest.mark.parametrize("model", ["mha", "mla", "sinks", "softcap", "gemma3"])
def test_each_phase_of_a_target_runs_once_for_each_kind_of_layer(model: str, ran) -> None:
    """Windows, sinks and softcaps are compiled in, so every kind of layer has its turn."""
    done = warmed(model, speculative_algorithm="EAGLE", speculative_topk=2)
    assert list(dict.fromkeys(row.phase for row in done)) == ["prefill", "decode", "verify"]
    assert all(not row.reason and row.kernel == "torch_native" and row.seconds > 0 for row in done)
    main = {group.layers[0] for group in model_from_config(config(model)).attention_groups}
    for phase in ("prefill", "decode", "verify"):
        assert {layer.layer_id for at, layer in ran if at == phase and layer.component == "main"} == main
    towers = {layer.component for _, layer in ran} - {"main"}
    assert towers == ({"vision"} if model == "gemma3" else set())


@pytest.mark.parametrize("model", ["mllama", "whisper"])
def test_layers_that_look_across_are_warmed_without_the_causal_rule(model: str, ran) -> None:
    """They see all of another sequence; over a causal step they would be refused."""
    done = warmed(model)
    assert all(not row.reason for row in done), [row.reason for row in done]
    assert {layer.attn_type for _, layer in ran} >= {"decoder", "cross"}


def test_every_step_of_a_draft_loop_runs(ran) -> None:
    """Each holds its own state, and may compile its own."""
    done = warmed("mha", "draft", speculative_algorithm="EAGLE", speculative_num_steps=4)
    assert [row.phase for row in done] == ["prefill", "draft_decode", "draft_extend"]
    assert [phase for phase, _ in ran].count("draft_decode") == 3


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_the_linear_slot_is_warmed_too(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each phase of a gated delta net, verify in each of its forms; a tree only where one is drafted."""
    seen: list[tuple[str, str]] = []
    real = TorchNativeLinear.forward

    def forward(self, q, k, v, gates, layer, state, **more):
        tree = "" if state.batch.parents is None else " tree"
        seen.append((state.batch.phase, f"{type(gates).__name__} {state.form}{tree}"))
        return real(self, q, k, v, gates, layer, state, **more)

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)
    requests = {"linear_attn_backend": "torch_native", "speculative_algorithm": "EAGLE", "speculative_topk": topk}
    done = [row for row in warmed("hybrid", **requests) if row.slot == "linear"]
    assert [(row.phase, row.kernel, row.reason) for row in done] == [
        ("decode", "torch_native", ""),
        ("prefill", "torch_native", ""),
        ("verify", "torch_native", ""),
    ]
    assert all(row.seconds > 0 and row.layers == 36 for row in done)
    kept = [("verify", "RawGates slot_table"), ("verify", "RawGates intermediate")]
    tree = [("verify", "RawGates intermediate tree")] if topk > 1 else []
    assert seen == [("decode", "RawGates slots"), ("prefill", "ComputedGates slots"), *kept, *tree]


@pytest.mark.parametrize(
    ("slot", "family", "layout", "reason"),
    [
        ("linear", "mamba2", "rows", "states of a mamba2 layer are the engine's own to make"),
        ("linear", "gdn", "vk", ""),
        ("attention", "csa", "rows", "its compressed caches are the engine's own to make"),
        ("attention", "mla", "packed", "a cache of layout packed is the engine's own to make"),
        ("attention", "mla", "rows", ""),
    ],
)
def test_what_only_an_engine_can_make_is_told_and_not_tried(slot, family, layout, reason) -> None:
    """Random tensors cannot stand for every state and cache; the phase says why it was left cold."""
    group = samples()[GroupPlan][0]._replace(family=family)
    assert cannot(slot, group, kernel("one", layouts=(layout,))) == reason


@pytest.mark.parametrize("bound", [None, -5.0])
def test_kimi_delta_attention_is_warmed_with_the_gates_its_model_has(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel for bounded decays takes no others, and engines hand on all of them raw."""
    seen: set[tuple[str, type, float | None]] = set()
    real = TorchNativeLinear.forward

    def forward(self, q, k, v, gates, layer, state, **more):
        seen.add((state.batch.phase, type(gates), gates.lower_bound))
        return real(self, q, k, v, gates, layer, state, **more)

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)
    model = model_from_config({**config("kda"), "linear_lower_bound": bound})
    requests = {"attention_backend": "torch_native", "linear_attn_backend": "torch_native"}
    catalogue = build_catalogue(discover())
    plan = resolve(make_launch(Requests(**requests)), EngineFacts(), model, this_host("cpu"), catalogue)
    assert {row.reason for row in warm(plan, model, catalogue) if row.slot == "linear"} == {""}
    assert seen == {(phase, RawGates, bound) for phase in ("decode", "prefill", "verify")}


def test_a_linear_phase_that_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases of the other slot are warm all the same."""

    def forward(self, *tensors, **more):
        raise ModuleNotFoundError("No module named 'cutlass'")

    monkeypatch.setattr(TorchNativeLinear, "forward", forward)
    reasons = {(row.slot, row.phase): row.reason for row in warmed("hybrid", linear_attn_backend="torch_native")}
    said = "ModuleNotFoundError: No module named 'cutlass'"
    assert reasons == {
        ("attention", "prefill"): "",
        ("attention", "decode"): "",
        ("linear", "decode"): said,
        ("linear", "prefill"): said,
        ("linear", "verify"): said,
    }


def test_a_phase_that_cannot_run_is_told_and_the_others_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the command exits 1."""
    real = TorchNative.forward

    def forward(self, q, kv, layer, state, **more):
        if state.batch.phase == "prefill":
            raise RuntimeError("nvcc not found")
        return real(self, q, kv, layer, state, **more)

    monkeypatch.setattr(TorchNative, "forward", forward)
    reasons = {row.phase: row.reason for row in warmed("mha")}
    assert reasons == {"prefill": "RuntimeError: nvcc not found", "decode": ""}
    answer = CliRunner().invoke(app, ["warm", "--device", "cpu", "--attention-backend", "torch_native"])
    assert answer.exit_code == 1
    assert "prefill: torch_native RuntimeError: nvcc not found" in answer.output


def test_a_plan_of_another_machine_is_not_warmed() -> None:
    """It would compile for a device that is not here."""
    facts, catalogue = model_from_config(config("mha")), build_catalogue(discover())
    plan = resolve(make_launch(Requests()), EngineFacts(), facts, described_host("h100"), catalogue)
    with pytest.raises(NoDevice, match="cuda"):
        warm(plan, facts, catalogue)


def test_the_command_says_it_as_json() -> None:
    """One row a phase, with the digest of the plan that is warm now."""
    answer = CliRunner().invoke(app, ["warm", "--device", "cpu", "--model", str(FOLDER / "sinks.json"), "--json"])
    assert answer.exit_code == 0
    told = json.loads(answer.stdout)
    assert [row["phase"] for row in told["warmed"]] == ["prefill", "decode"]
    assert len(told["digest"]) == 64
