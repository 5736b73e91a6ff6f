"""`backstamp tune`: times real kernels on this CPU, keeps them, and `resolve` ranks by what it kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from backstamp.cli.app import app
from backstamp.errors import BackstampError, BadInput
from backstamp.host import this_host
from backstamp.measurements import Machine
from backstamp.tune_record import add_times, default_place, read_times
from backstamp_cpu.native import TorchNative
from tests.models import FOLDER

LOADS = ("--workload", "prefill=1x8", "--workload", "decode=2x8")
HERE = ("--device", "cpu", "--model", str(FOLDER / "mha.json"), *LOADS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> Result:
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
