"""Timing through built backends: what is timed, at which shape, with its answer checked first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from backstamp.catalogue import Catalogue, build_catalogue
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.errors import BadHost, BadInput, NoDevice
from backstamp.host import HostFacts, this_host
from backstamp.launch import Requests, make_launch
from backstamp.measurements import Load, Machine, Measurements, Workload
from backstamp.model import model_from_config
from backstamp.resolution import resolve
from backstamp.sampled_truth import wrong_samples
from backstamp.testing.batches import SMALL_LAYER, make_batch, make_tree
from backstamp.testing.dists import cpu_offer
from backstamp.testing.fakes import catalogue_of, fake_plugin
from backstamp.testing.hosts import described_host
from backstamp.testing.reference import reference_attention
from backstamp.timers import time_on_cpu, timer_for
from backstamp.tune import Tuned, tune
from backstamp_cpu.native import TorchNative
from tests.models import config

LOAD = Workload(prefill=Load(1, 24), decode=Load(3, 20), verify=Load(2, 24))


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    """What is installed here."""
    return build_catalogue(discover())


def figures(*microseconds: float) -> Callable[[Callable[[], object]], float]:
    """A timer that runs the call and answers the next of these figures, over and over."""
    left: list[float] = []

    def timer(run: Callable[[], object]) -> float:
        run()
        left.extend(microseconds if not left else ())
        return left.pop(0)

    return timer


def tuned(catalogue: Catalogue, model: str = "mha", **more: object) -> list[Tuned]:
    """Tune a shipped config on this CPU with fixed figures."""
    launch = more.pop("launch", make_launch(Requests()))
    more.setdefault("timer", figures(30.0, 20.0))
    facts = model_from_config(config(model))
    return tune(launch, EngineFacts(), facts, this_host("cpu"), catalogue, workload=LOAD, **more)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, int]]:
    """Phase, rows, tokens and readable tokens of each `forward` of torch_native."""
    calls: list[tuple[str, int, int, int]] = []
    real = TorchNative.forward

    def forward(self, q, kv, layer, state, **more):
        batch = state.batch
        calls.append((batch.phase, batch.num_rows, batch.num_tokens, batch.max_kv_len))
        return real(self, q, kv, layer, state, **more)

    monkeypatch.setattr(TorchNative, "forward", forward)
    return calls


def test_what_was_timed_decides_and_the_plan_shows_both_figures(catalogue: Catalogue) -> None:
    """The record of a real run ranks the next resolve: here the lower priority was the faster."""
    rows = tuned(catalogue)
    assert [(row.work.phase, row.kernel, row.status) for row in rows] == [
        ("prefill", "torch_native", "timed"),
        ("prefill", "flex_attention", "timed"),
        ("decode", "torch_native", "timed"),
        ("decode", "flex_attention", "timed"),
    ]
    host = this_host("cpu")
    times = Measurements(machine=Machine.of(host), rows=tuple(row.timed for row in rows if row.timed), workload=LOAD)
    model = model_from_config(config("mha"))
    plan = resolve(make_launch(Requests()), EngineFacts(), model, host, catalogue, times)
    assert [(row.phase, row.kernel, row.source) for row in plan.running] == [
        ("prefill", "flex_attention", "auto (measured)"),
        ("decode", "flex_attention", "auto (measured)"),
    ]
    figures_told = [
        (row.kernel, row.microseconds, row.by_priority, row.by_priority_microseconds) for row in plan.timings
    ]
    assert figures_told == [("flex_attention", 20.0, "torch_native", 30.0)] * 2
    assert not [warning for warning in plan.warnings if warning.code == "unmeasured"]


def test_a_kernel_is_timed_at_the_size_of_its_bucket(
    catalogue: Catalogue, seen: list[tuple[str, int, int, int]]
) -> None:
    """Two loads of one class must be comparable: 3 rows of 20 tokens are timed as 4 of 32."""
    tuned(catalogue, launch=make_launch(Requests(speculative_algorithm="EAGLE")), kernels=["torch_native"])
    assert set(seen) == {("prefill", 1, 32, 32), ("decode", 4, 4, 32), ("verify", 2, 8, 32)}


def test_each_kind_of_layer_is_timed_with_the_heads_one_rank_has(catalogue: Catalogue) -> None:
    """Windows and head dims are classes of their own; two ranks have half the heads."""
    rows = tuned(catalogue, "gemma4", launch=make_launch(Requests(tp_size=2)), kernels=["torch_native"])
    assert {row.status for row in rows} == {"timed"}
    assert {row.work.layer for row in rows} == {
        "mha 4/1 heads, head dim 256, window 512",
        "mha 4/1 heads, head dim 512",
    }


def test_a_kernel_whose_answer_is_off_is_told_and_not_timed(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast wrong kernel must never win."""
    real = TorchNative.forward

    def forward(self, q, kv, layer, state, *, out=None, **more):
        answer = real(self, q, kv, layer, state, out=out, **more)
        answer[-1] += 0.5
        return answer

    monkeypatch.setattr(TorchNative, "forward", forward)
    rows = {(row.work.phase, row.kernel): row for row in tuned(catalogue)}
    for phase in ("prefill", "decode"):
        row = rows[phase, "torch_native"]
        assert (row.status, row.timed) == ("wrong", None)
        assert row.reason.startswith("output is off by")
        assert rows[phase, "flex_attention"].status == "timed"


def test_a_kernel_that_writes_nothing_is_wrong(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that another kernel just left may hold the right answer: nothing of it is there when a kernel is asked."""
    blank: list[bool] = []

    def forward(self, q, kv, layer, state, *, out=None, **more):
        blank.append(bool(out.isnan().all()))
        return out

    monkeypatch.setattr(TorchNative, "forward", forward)
    rows = {row.work.phase: row for row in tuned(catalogue, kernels=["torch_native"])}
    assert {phase: (row.status, "not finite" in row.reason) for phase, row in rows.items()} == {
        "prefill": ("wrong", True),
        "decode": ("wrong", True),
    }
    assert blank == [True, True]


def test_a_kernel_whose_answer_is_off_never_runs_under_the_timer(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time that nobody reads is minutes lost, and one that somebody reads is worse."""
    timed: list[str] = []
    monkeypatch.setattr(TorchNative, "forward", lambda self, *given, out=None, **more: out)

    def timer(run: Callable[[], object]) -> float:
        timed.append("one")
        return 1.0

    rows = tuned(catalogue, timer=timer)
    assert len(timed) == sum(row.status == "timed" for row in rows) == 2


@pytest.mark.parametrize("cause", [RuntimeError("no image for this device"), SystemExit("no image for this device")])
def test_a_kernel_that_cannot_run_is_told_and_the_others_are_timed(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, cause: BaseException
) -> None:
    """It accepts the work; that it fails, or would end the process, is a finding."""

    def forward(self, *given, **more):
        raise cause

    monkeypatch.setattr(TorchNative, "forward", forward)
    rows = tuned(catalogue)
    assert {(row.kernel, row.status) for row in rows} == {("torch_native", "failed"), ("flex_attention", "timed")}
    reason = f"{type(cause).__name__}: no image for this device"
    assert {row.reason for row in rows if row.status == "failed"} == {reason}


def test_whoever_stops_a_run_stops_it(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no finding about a kernel."""

    def forward(self, *given, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(TorchNative, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        tuned(catalogue)


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_native fails in decode as a kernel on a GPU does."""
    real = TorchNative.forward

    def forward(self, q, kv, layer, state, **more):
        if state.batch.phase == "decode":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return real(self, q, kv, layer, state, **more)

    monkeypatch.setattr(TorchNative, "forward", forward)


@pytest.mark.usefixtures("lossy")
def test_nothing_is_timed_after_a_kernel_that_lost_the_device(
    catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran after it would fail for its sake: neither other kernels, nor other phases, nor other kinds of layer."""
    monkeypatch.setattr(import_module("backstamp.tune"), "_answers", lambda device: False)
    launch = make_launch(Requests(speculative_algorithm="EAGLE"))
    *timed, lost = tuned(catalogue, "gemma4", launch=launch)
    assert [(row.work.phase, row.kernel, row.status) for row in timed] == [
        ("prefill", "torch_native", "timed"),
        ("prefill", "flex_attention", "timed"),
    ]
    assert (lost.work.phase, lost.kernel, lost.status) == ("decode", "torch_native", "failed")
    assert "illegal memory access was encountered; the device is lost to this process" in lost.reason
    assert "--kernel times the others" in lost.reason


@pytest.mark.usefixtures("lossy")
def test_an_error_that_the_device_survives_stops_nothing(catalogue: Catalogue) -> None:
    """A library without an image for this chip fails in the same words, and the next kernel runs."""
    *_, failed, after = tuned(catalogue)
    assert (failed.kernel, failed.status) == ("torch_native", "failed")
    assert failed.reason.endswith("illegal memory access was encountered")
    assert (after.kernel, after.status) == ("flex_attention", "timed")


@pytest.mark.parametrize(("device", "answers"), [("cpu", True), ("cuda:99", False)])
def test_a_device_is_lost_where_nothing_is_computed_on_it(device: str, answers: bool) -> None:
    """One that is not there stands for one that is gone."""
    assert import_module("backstamp.tune")._answers(device) is answers


def test_a_named_kernel_that_is_refused_is_told_with_the_reason(catalogue: Catalogue) -> None:
    """The refusal a launch would get."""
    (row, _) = tuned(catalogue, kernels=["fa3"])
    assert (row.status, row.timed) == ("skipped", None)
    assert "needs" in row.reason
    assert "got" in row.reason


def test_what_the_launch_asks_for_by_key_is_left_aside(catalogue: Catalogue) -> None:
    """The kernels are what is compared: a launch that may not resolve here, or asks for one, has times of all."""
    asked = Requests(attention_backend="fa3", component_backends={"encoder": "fa3"})
    rows = tuned(catalogue, launch=make_launch(asked))
    assert [(row.kernel, row.status) for row in rows] == [("torch_native", "timed"), ("flex_attention", "timed")] * 2


def test_a_kernel_that_reads_a_selection_of_keys_is_not_timed() -> None:
    """Random keys would be another selection than a model makes, and another time."""
    offer = replace(cpu_offer("k", "fake"), family="sparse_mla")
    rows = tuned(catalogue_of(fake_plugin("p", [offer])), "dsa")
    assert {(row.status, row.reason) for row in rows} == {
        ("skipped", "the selection of keys it reads is the engine's own to make")
    }


def test_a_kernel_whose_named_row_is_not_autos_is_not_timed_in_its_place() -> None:
    """Asked for by name its approximate row runs; auto would take the exact one, whose time that is not."""
    rough, exact = (replace(cpu_offer("k", "fake"), accuracy=accuracy) for accuracy in ("int8", "exact"))
    installed = catalogue_of(fake_plugin("p", [rough, exact]))
    (row, _) = tuned(installed, kernels=["k"])
    assert (row.status, row.reason) == ("skipped", "asked for, it runs another of its rows than auto would take")


@pytest.mark.parametrize("answer", [0.0, float("nan"), float("inf")])
def test_a_timer_that_answers_no_time_gives_none(catalogue: Catalogue, answer: float) -> None:
    """The record takes times above 0 alone, and would not read back."""
    rows = tuned(catalogue, timer=lambda run: answer, kernels=["torch_native"])
    assert {row.status for row in rows} == {"failed"}


@pytest.mark.parametrize("host", [described_host("h100"), replace(this_host("cpu"), device_name="another CPU")])
def test_another_machine_is_not_timed(catalogue: Catalogue, host: HostFacts) -> None:
    """Times are of the machine the kernels ran on; a described one is refused before anything is built."""
    with pytest.raises((BadHost, NoDevice), match="this machine"):
        tune(make_launch(Requests()), EngineFacts(), model_from_config(config("mha")), host, catalogue, workload=LOAD)


def test_only_devices_that_have_a_timer_are_timed() -> None:
    """Others say so before anything is built."""
    with pytest.raises(BadInput, match="cuda, rocm or cpu"):
        timer_for("npu")


def test_the_cpu_timer_answers_the_median_and_leaves_the_first_call_out() -> None:
    """One call that compiles, and one the machine was busy in, say nothing about the kernel."""
    now, calls = [0.0], []
    lasts = iter([99.0, 0.1, 0.1, 5.0, 0.1, 0.1])

    def run() -> None:
        calls.append(now[0])
        now[0] += next(lasts)

    assert time_on_cpu(run, lambda: now[0]) == pytest.approx(0.1e6)
    assert len(calls) == 6


@pytest.mark.parametrize("form", ["page_table", "csr", "indirect"])
@pytest.mark.parametrize("token", [0, 7, 32, 39, 40, 42, 43, 82])
def test_a_sampled_token_that_is_off_is_found_in_every_index_form(form: str, token: int) -> None:
    """The first and last tokens of the first, middle and last rows; a window and a prefix are part of the truth."""
    layer = replace(SMALL_LAYER, window_left=9)
    step = make_batch([40, 3, 40], [56, 9, 40], layer=layer, index_form=form)
    out = reference_attention(step.q, step.kv, layer, step.batch)[0].float()
    assert wrong_samples(out, step, "fp32", "exact") == ""
    out[token, 1] += 0.01
    assert "output is off" in wrong_samples(out, step, "fp32", "exact")
    out[token, 1] = float("nan")
    assert "not finite" in wrong_samples(out, step, "fp32", "exact")


def test_a_tree_is_sampled_whole() -> None:
    """Its mask is the rows' own, and cannot be cut."""
    tree = make_tree([5, 5, 5], [20, 30, 40], "qlen")
    step = make_batch([5, 5, 5], [20, 30, 40], phase="verify", tree=tree)
    out = reference_attention(step.q, step.kv, SMALL_LAYER, step.batch)[0].float()
    assert wrong_samples(out, step, "fp32", "exact") == ""
    out[12, 0] += 0.01
    assert "row 2, query 2" in wrong_samples(out, step, "fp32", "exact")
    assert torch.isfinite(out).all()
