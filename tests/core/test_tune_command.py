"""`backstamp tune`: times real kernels on this CPU, keeps them, and `resolve` ranks by what it kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backstamp.cli.app import app
from backstamp.errors import BackstampError, BadInput
from backstamp.host import this_host
from backstamp.measurements import Machine
from backstamp.records import write_record
from backstamp.tune_record import TuneRecord, add_times, default_place, read_times
from backstamp_cpu.native import TorchNative
from tests.children import ordinary_environment
from tests.models import FOLDER

LOADS = ("--workload", "prefill=1x8", "--workload", "decode=2x8")
HERE = ("--device", "cpu", "--model", str(FOLDER / "mha.json"), *LOADS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str):
    """One command line."""
    return CliRunner().invoke(app, list(arguments))


def place() -> Path:
    """This machine's record."""
    return default_place(Machine.of(this_host("cpu")))


def set_times(**microseconds: float) -> None:
    """Give the kernels of the record these times, in every class."""
    record = read_times(place())
    rows = [row._replace(microseconds=microseconds[row.kernel]) for row in record.rows]
    add_times(place(), record.machine, rows, replace=True)


def test_what_was_tuned_ranks_the_next_resolve(cache: Path) -> None:
    """From one end to the other, with real kernels; which is faster is the machine's to say, so figures are set."""
    answer = run("tune", *HERE, "--json")
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    assert told["record"] == str(place())
    assert place().is_relative_to(cache)
    assert [(row["work"]["phase"], row["kernel"], row["status"]) for row in told["tuned"]] == [
        (phase, kernel, "timed") for phase in ("prefill", "decode") for kernel in ("torch_native", "flex_attention")
    ]
    assert all(row["microseconds"] > 0 and row["before"] is None for row in told["tuned"])
    shown = json.loads(run("tune", "--show", "--device", "cpu", "--json").stdout)
    assert shown == read_times(place()).as_json()
    times = {(row["work"]["phase"], row["kernel"]): row["microseconds"] for row in shown["rows"]}
    plan = json.loads(run("resolve", *HERE, "--measurements", "tuned", "--json").stdout)
    for timing in plan["timings"]:
        fastest = min(times[timing["phase"], name] for name in ("torch_native", "flex_attention"))
        assert timing["microseconds"] == fastest == times[timing["phase"], timing["kernel"]]
    assert {plan["phases"][phase]["source"] for phase in ("prefill", "decode")} == {"auto (measured)"}

    set_times(torch_native=30.0, flex_attention=20.0)
    said = run("resolve", *HERE, "--measurements", "tuned").stdout
    assert "measured: decode flex_attention 20.0 us a layer; priority would take" in said
    assert "torch_native, 30.0 us" in said
    stories = json.loads(run("explain", *HERE, "--measurements", str(place()), "--json").stdout)["phases"]
    assert [story["kernel"] for story in stories[:2]] == ["flex_attention"] * 2
    built = json.loads(run("build", "--fake", *HERE, "--measurements", "tuned", "--json").stdout)
    assert built["phases"]["decode"]["kernel"] == "flex_attention"
    # a file in a cache changes no plan that did not name it
    plain = json.loads(run("resolve", "--device", "cpu", "--model", str(FOLDER / "mha.json"), "--json").stdout)
    assert plain["phases"]["decode"]["kernel"] == "torch_native"

    checked = run("tune", "--check", *HERE)
    assert checked.exit_code == 1
    assert "priority-order" in run("tune", "--check", *HERE, "--json").stdout
    set_times(torch_native=20.0, flex_attention=30.0)
    assert run("tune", "--check", *HERE).exit_code == 0


def test_a_second_run_keeps_what_is_there_and_says_so() -> None:
    """Until it is told to replace it."""
    only = ("--kernel", "torch_native")
    assert run("tune", *HERE, *only).exit_code == 0
    set_times(torch_native=1e9)
    again = run("tune", *HERE, *only)
    assert again.exit_code == 0
    assert "that one stays" in " ".join(again.stdout.split())
    assert {row.microseconds for row in read_times(place()).rows} == {1e9}
    told = json.loads(run("tune", *HERE, *only, "--replace", "--json").stdout)
    assert {row["before"] for row in told["tuned"]} == {1e9}
    assert told["conflicts"] == 0
    assert all(row.microseconds < 1e9 for row in read_times(place()).rows)


_TALKER = """
import ctypes, os
from backstamp.cli import main
from backstamp_cpu.native import TorchNative
real = TorchNative.forward
def forward(self, *given, **more):
    print("from Python")
    os.write(1, b"on the descriptor\\n")
    ctypes.CDLL(None).puts(b"held back by C")
    return real(self, *given, **more)
TorchNative.forward = forward
main()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: the C library of this process by its handle")
def test_what_a_kernel_prints_is_not_in_the_json() -> None:
    """Compilers and libraries talk while kernels are built: in Python, on the descriptor, through C's own buffer."""
    environment = ordinary_environment()
    # with it, Python takes C's buffer away
    environment.pop("PYTHONUNBUFFERED", None)
    program = [sys.executable, "-c", _TALKER, "tune", *HERE, "--kernel", "torch_native", "--json"]
    child = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    assert [row["status"] for row in json.loads(child.stdout)["tuned"]] == ["timed", "timed"]
    for words in ("from Python", "on the descriptor", "held back by C"):
        assert words in child.stderr


def test_a_kernel_that_is_named_twice_is_timed_once() -> None:
    """The second time would only be a conflict with the first."""
    only = ("--kernel", "torch_native")
    told = json.loads(run("tune", *HERE, *only, *only, "--json").stdout)
    assert [row["work"]["phase"] for row in told["tuned"]] == ["prefill", "decode"]


def test_a_check_of_another_machines_record_says_so() -> None:
    """That no time decided is what follows from it."""
    machine = Machine.of(this_host("cpu"))._replace(torch="0.0")
    place().parent.mkdir(parents=True)
    write_record(place(), json.dumps(TuneRecord(machine=machine).as_json()))
    checked = run("tune", "--check", *HERE)
    assert checked.exit_code == 1
    said = " ".join(checked.stdout.split())
    assert "the times are another machine's, and ignored: torch 0.0 there" in said


def test_a_wrong_or_a_refused_kernel_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was named and has no time, and one whose answer is off: exit 1, and no row of it."""
    refused = run("tune", *HERE, "--kernel", "fa3")
    assert refused.exit_code == 1
    assert "skipped" in refused.stdout
    assert not place().exists()
    real = TorchNative.forward

    def forward(self, *given, **more):
        return real(self, *given, **more).add_(1.0)

    monkeypatch.setattr(TorchNative, "forward", forward)
    wrong = run("tune", *HERE)
    assert wrong.exit_code == 1
    assert "torch_native wrong" in wrong.stdout
    assert {row.kernel for row in read_times(place()).rows} == {"flex_attention"}


def test_a_record_that_cannot_be_added_to_is_told_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after minutes: nothing runs."""
    ran: list[str] = []

    def forward(self, *given, **more):
        ran.append("forward")

    monkeypatch.setattr(TorchNative, "forward", forward)
    foreign = tmp_path / "foreign.json"
    foreign.write_text("{}", "utf-8")
    answer = run("tune", *HERE, "-o", str(foreign))
    assert isinstance(answer.exception, BadInput)
    assert foreign.read_text("utf-8") == "{}"
    assert ran == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tune", "--show", "--check"), "--show or --check"),
        (("tune", "--report", "junit"), "--check, which makes a report"),
        (("tune", "--check", "--replace"), "where kernels are timed"),
        (("tune", "--show", "--replace"), "where kernels are timed"),
        (("tune", "--check", "--kernel", "torch_native"), "where kernels are timed"),
        (("tune", "--show", "--kernel", "torch_native"), "where kernels are timed"),
        (("tune", "--device", "cpu", "-o", ""), "the path of a file, got a folder"),
        (("tune", "--device", "cpu", "-o", "."), "the path of a file, got a folder"),
        (("tune", "--show", "--device", "cpu"), "a readable file"),
        (("resolve", "--device", "cpu", "--measurements", "tuned"), "this machine's record"),
        (("resolve", "--device", "cpu", "--measurements", "none.json"), "a readable file"),
        (("resolve", "--device", "cpu", "--workload", "decode=1x1"), "--measurements, whose times it chooses"),
        (("resolve", "--device", "cpu", "--measurements", "x", "--workload", "decode=1"), "ROWSxTOKENS"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, tuple) else None,
)
def test_what_makes_no_sense_is_an_error_of_usage(arguments: tuple[str, ...], words: str) -> None:
    """An explicit request binds: a record that was named and is not there is refused."""
    answer = run(*arguments)
    assert isinstance(answer.exception, BackstampError)
    assert words in str(answer.exception)
