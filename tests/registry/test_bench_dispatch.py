"""`bench/dispatch.py` on a CPU: the library's own call is the same work, and what is told of the two."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import Refused
from backstamp.host import this_host
from tests.bench_modules import BENCH, bench_modules
from tests.children import ordinary_environment


@pytest.fixture(scope="module")
def bench():
    """The modules: dispatch, direct_calls, built, steps, shapes."""
    with bench_modules("dispatch", "direct_calls", "built", "steps", "shapes") as modules:
        yield modules


@pytest.fixture(scope="module")
def serving(bench):
    """torch_native over a small decode step: (serving, step)."""
    _, _, built, steps, shapes = bench
    shape = shapes.Shape("decode", ((1, 40),) * 3, 16, heads=(4, 2), dims=(16, 16))
    step = steps.attention_step(shape, "cpu")
    return built.serve("torch_native", step, built.Here(this_host("cpu"), build_catalogue(discover()))), step


def test_the_direct_call_does_what_the_backend_does(bench, serving) -> None:
    """Else the difference of their times would be of other work."""
    backend, step = serving
    wanted = backend.forward(backend.plan()).clone()
    backend.out.fill_(float("nan"))
    direct = bench[1].direct_call(backend, "torch_native", step)
    backend.out.fill_(float("nan"))
    direct.run()
    assert torch.equal(backend.out, wanted)
    assert direct.what == "gather and SDPA"
    assert bench[1].direct_plan(backend) is None


def test_operators_of_others_are_recorded_and_repeated(bench) -> None:
    """torch's own are not a library's call."""
    seen: list[int] = []

    @torch.library.custom_op("backstamp_bench_test::note", mutates_args=("x",))
    def note(x: torch.Tensor, by: int) -> None:
        seen.append(by)
        x.add_(by)

    x = torch.zeros(3)

    def run() -> None:
        note(x * 1, 2)
        note(x, by=5)

    calls = bench[1]._recorded_operators(run)
    assert seen == [2, 5]
    for call in calls:
        call()
    assert seen == [2, 5, 2, 5]
    assert x.tolist() == [10.0] * 3


def test_methods_of_a_library_are_recorded_and_repeated(bench) -> None:
    """With the same object and arguments; what one does inside is a part of it, and the class is left as it was."""
    seen: list[tuple[str, int]] = []

    class Wrapper:
        def __init__(self, name: str) -> None:
            self.name = name

        def plan(self, by: int) -> None:
            seen.append((self.name, by))
            if by:
                self.plan(0)

    plan = Wrapper.plan
    one, other = Wrapper("one"), Wrapper("other")

    def run() -> None:
        one.plan(2)
        other.plan(by=5)

    calls = bench[1].recorded(run, [(Wrapper, "plan")])
    first = seen.copy()
    assert first == [("one", 2), ("one", 0), ("other", 5), ("other", 0)]
    assert Wrapper.plan is plan
    for call in calls:
        call()
    assert seen == first * 2
    with pytest.raises(ZeroDivisionError):
        bench[1].recorded(lambda: 1 / 0, [(Wrapper, "plan")])
    assert Wrapper.plan is plan


def test_both_take_turns_and_as_many_calls(bench) -> None:
    """What the machine does meanwhile meets both."""
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in ("ours", "theirs")}
    times = bench[0].host_us(runs, calls=2, turns=3)
    # one before each turn that is not counted
    assert order == ["ours"] * 3 + ["theirs"] * 3 + ["ours"] * 3 + ["theirs"] * 3 + ["ours"] * 3 + ["theirs"] * 3
    assert set(times) == {"ours", "theirs"}


def test_the_figures_are_a_part_of_the_record(tmp_path: Path) -> None:
    """What else is in it stays, and a kernel measured again has one line."""
    path = tmp_path / "cpu.json"
    old = {"work": "decode", "shape": "b2 q1 kv16 page16", "kernel": "torch_native", "forward_us": 1.0}
    path.write_text(json.dumps({"checks": [{"kernel": "k"}], "dispatch": [old, old | {"kernel": "gone"}]}), "utf-8")
    command = [sys.executable, str(BENCH / "dispatch.py"), "--kernels", "torch_native", "--output", str(path)]
    child = subprocess.run(command, capture_output=True, text=True, env=ordinary_environment())
    assert child.returncode == 0, child.stderr
    record = json.loads(path.read_text("utf-8"))
    assert record["checks"] == [{"kernel": "k"}]
    told = {(row["work"], row["kernel"]): row for row in record["dispatch"]}
    assert set(told) == {("decode", "torch_native"), ("decode", "gone"), ("gdn_decode", "torch_native")}
    assert len(record["dispatch"]) == 3
    row = told["decode", "torch_native"]
    assert row["library"] == "torch"
    assert row["forward_over_us"] == pytest.approx(row["forward_us"] - row["direct_us"], abs=0.02)
    assert row["plan_over_us"] == row["plan_us"]
    # nothing here knows the recurrence's own call
    assert "direct_us" not in told["gdn_decode", "torch_native"]
    assert "decode              torch_native" in child.stdout


@pytest.mark.parametrize(
    ("script", "flags", "told"),
    [
        ("dispatch.py", ["--kernels", "nosuch"], "no kernel of nosuch runs here"),
        (
            "kernels.py",
            ["--tiny", "--only", "decode", "--kernels", "nosuch"],
            "no kernel asked for has a row for decode",
        ),
        ("kernels.py", ["--tiny", "--seconds", "-5"], "--seconds: needs a number above 0"),
        ("kernels.py", ["--tiny", "--rounds", "0"], "--rounds: needs a number of at least 1"),
    ],
)
def test_what_begins_nothing_exits_2_and_says_why(script: str, flags: list[str], told: str) -> None:
    """In a line, not in a traceback, and never as a run that went well."""
    command = [sys.executable, str(BENCH / script), *flags]
    child = subprocess.run(command, capture_output=True, text=True, env=ordinary_environment())
    assert (child.returncode, "Traceback" in child.stderr) == (2, False)
    assert told in child.stderr


@pytest.fixture
def candidates(bench, monkeypatch: pytest.MonkeyPatch):
    """A kernel that fails as told at `serve`, then torch_native: (dispatch, here, a small shape)."""
    dispatch, _, built, _, _ = bench
    here = built.Here(this_host("cpu"), build_catalogue(discover()))

    def fail(cause: Exception):
        real = dispatch.serve
        every = [built.Candidate(kernel, False, lambda step: None) for kernel in ("bad", "torch_native")]
        monkeypatch.setattr(dispatch, "candidates", lambda shape, here: every)

        def serve(kernel, *more):
            if kernel == "bad":
                raise cause
            return real(kernel, *more)

        monkeypatch.setattr(dispatch, "serve", serve)
        return dispatch, here, dispatch.TINY[0]

    return fail


@pytest.mark.parametrize("cause", [ValueError("no such page"), RuntimeError("broken"), AssertionError("stamp")])
def test_a_kernel_that_fails_is_a_row(candidates, capsys: pytest.CaptureFixture[str], cause: Exception) -> None:
    """And the run is told as failed; the next kernel has its turn."""
    dispatch, here, shape = candidates(cause)
    failed, timed = dispatch.measure(shape, here)
    assert (failed["kernel"], failed["status"]) == ("bad", "failed")
    assert failed["reason"] == f"{type(cause).__name__}: {cause}"
    assert dispatch._line(failed).endswith(f"failed: {failed['reason']}")
    assert (timed["kernel"], "status" in timed) == ("torch_native", False)
    assert [dispatch._is_bad(row) for row in (failed, timed)] == [True, False]


def test_a_refusal_is_told_and_is_no_failure(candidates, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no row."""
    dispatch, here, shape = candidates(Refused("kernel 'bad'", needed="SM90", found="a CPU"))
    assert [row["kernel"] for row in dispatch.measure(shape, here)] == ["torch_native"]
    assert "bad: needs SM90, got a CPU" in capsys.readouterr().err


def test_nothing_runs_behind_a_lost_device(candidates, capsys: pytest.CaptureFixture[str]) -> None:
    """It would fail for another's sake; what was measured before is told."""
    dispatch, here, _ = candidates(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert [row["kernel"] for row in dispatch._measured(here, (), False)] == ["bad"]
    assert "nothing runs after it: RuntimeError: CUDA error" in capsys.readouterr().err


def test_what_was_measured_before_a_run_was_stopped_is_kept(candidates, monkeypatch, tmp_path: Path) -> None:
    """A run is long, and time on a device is dear: each line is in the record when the next one begins."""
    dispatch, _, shape = candidates(KeyboardInterrupt())
    every = dispatch.candidates(shape, None)[::-1]
    path = tmp_path / "cpu.json"
    monkeypatch.setattr(dispatch, "candidates", lambda shape, here: every)
    monkeypatch.setattr(dispatch, "TINY", (shape,))
    monkeypatch.setattr(dispatch, "this_host", lambda: this_host("cpu"))
    monkeypatch.setattr(sys, "argv", ["dispatch.py", "--output", str(path)])
    with pytest.raises(KeyboardInterrupt):
        dispatch.main()
    assert [row["kernel"] for row in json.loads(path.read_text("utf-8"))["dispatch"]] == ["torch_native"]


def test_a_run_with_a_failure_exits_1(candidates, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    """And the record has it, in place of the kernel's older figures."""
    dispatch, _, shape = candidates(RuntimeError("broken"))
    path = tmp_path / "cpu.json"
    old = {"work": shape.work, "shape": shape.label, "kernel": "bad", "forward_us": 1.0}
    path.write_text(json.dumps({"dispatch": [old, old | {"waits": {}}]}), "utf-8")
    monkeypatch.setattr(dispatch, "TINY", (shape,))
    monkeypatch.setattr(dispatch, "this_host", lambda: this_host("cpu"))
    monkeypatch.setattr(sys, "argv", ["dispatch.py", "--output", str(path)])
    assert dispatch.main() == 1
    record = json.loads(path.read_text("utf-8"))
    assert [(row["kernel"], row.get("status")) for row in record["dispatch"]] == [
        ("bad", "failed"),
        ("torch_native", None),
    ]
    assert record["host"]


@pytest.mark.parametrize(
    ("second", "replayed", "words", "bad"),
    [
        (0.0, 0.0, "same", False),
        (0.0, 1e-6, "numbers differ", True),
        (1e-4, 1e-3, "not deterministic, a replay within", False),
        (1e-4, 0.5, "not deterministic, and a replay differs by 5.0e-01, more than 1e-02", True),
        (1e-4, math.nan, "a replay differs by inf", True),
    ],
)
def test_a_replay_is_held_to_what_eager_calls_answer(
    bench, second: float, replayed: float, words: str, bad: bool
) -> None:
    """To the bit where those are the same, to a bound where they are not."""
    with bench_modules("dispatch_checks") as (checks,):
        first = torch.ones(3, 2, 8)
        told = checks.replay_words(first, first * (1 + second), first * (1 + replayed), 1e-2)
    assert words in told
    assert bench[0]._is_bad({"waits": {}, "replay": told}) is bad


def test_a_line_marks_what_is_over_its_target(bench) -> None:
    """A reader looks for the mark."""
    row = {"work": "decode", "kernel": "k", "forward_us": 9.0, "plan_us": 9.0, "plan_over_us": 9.0}
    within = row | {"direct": "d", "forward_over_us": 0.9}
    assert "!" not in bench[0]._line(row)
    assert "!" not in bench[0]._line(within)
    assert bench[0]._line(within | {"forward_over_us": 1.1}).count("!") == 1
    assert bench[0]._line(within | {"plan_over_us": 10.5}).count("!") == 1
    waits = {"work": "decode", "kernel": "k", "waits": {"plan": "called a synchronizing operation"}, "replay": "same"}
    assert bench[0]._line(waits).endswith("plan waits: called a synchronizing operation; replay: same")
