"""How `bench/kernels.py` reads the processes that measure: what one tells, and what is left when it ends or stalls."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench_modules import bench_modules

SCRIPT = """
import json, os, sys, time
request = json.loads(sys.argv[1])
tell = open(int(sys.argv[2]), "w")
def say(**told): print(json.dumps(told), file=tell, flush=True)
if {lost!r} == "start": sys.exit("no device")
say(limits={{"copy_tbps": 1.0, "bf16_tflops": 1.0}}, versions={{}}, host="h", device="cpu", arch="a")
for at in request["shapes"]:
    for kernel in ("a", "b", "c"):
        if at == request["shapes"][0] and kernel in request["without"]: continue
        say(begin=kernel)
        if kernel in request["stalled"].get("prefill", {{}}): continue
        if (at, kernel) == (1, "b") and {lost!r} == "dies": os._exit(7)
        if (at, kernel) == (1, "b") and {lost!r} == "hangs": time.sleep(600)
        if (at, kernel) == (1, "b") and {lost!r} == "talks":
            for _ in range(60): print("still here", flush=True); time.sleep(0.1)
        if at == 1 and {lost!r} == "data": os._exit(9)
        if {lost!r} == "prints": print("{{'a': library}}"); print("no end", end="", flush=True)
        if (at, kernel) == (2, "c") and {lost!r} == "half": tell.write('{{"row": '); tell.flush(); os._exit(7)
        say(row={{"work": "w", "shape": str(at), "kernel": kernel}})
    say(end=at)
"""


@pytest.fixture
def measure_all(tmp_path: Path):
    """The last run of measuring three shapes by a script that loses its process."""
    with bench_modules("measure_runs", "shape_list") as (runs, listed):

        def measured(lost: str, seconds: float = 60.0, **more: float):
            script = tmp_path / "measuring.py"
            script.write_text(SCRIPT.format(lost=lost), "utf-8")
            shapes = listed.TINY[:3]
            every = list(runs.measure_all(shapes, [0, 1, 2], seconds=seconds, script=script, **more))
            return shapes, every[-1]

        yield measured


@pytest.mark.parametrize(
    ("lost", "seconds", "words"),
    [("dies", 60.0, "exit 7"), ("hangs", 3.0, "took over 3 s"), ("talks", 3.0, "took over 3 s")],
)
def test_a_kernel_that_takes_its_process_costs_its_own_figure(
    measure_all, lost: str, seconds: float, words: str
) -> None:
    """The others of its shape, and the shapes after it, are measured by another process; none twice."""
    shapes, run = measure_all(lost, seconds)
    told = [(row["shape"], row["kernel"]) for row in run.results]
    if seconds == 3.0:
        # the script leaves alone what stalled at a prefill, as it is told to
        told.append(("2", "b"))
    assert sorted(told) == sorted((str(at), of) for at in range(3) for of in "abc" if (at, of) != (1, "b"))
    (row,) = run.not_run
    assert (row["shape"], row["kernel"], row["status"]) == (shapes[1].label, "b", "failed")
    assert words in row["reason"]


def test_what_a_library_prints_is_no_line_of_ours(measure_all) -> None:
    """Not where it looks like one, nor where it ends no line."""
    _, run = measure_all("prints")
    assert [(row["shape"], row["kernel"]) for row in run.results] == [(str(at), of) for at in range(3) for of in "abc"]
    assert list(run.not_run) == []


def test_half_a_line_of_a_process_that_ended_is_none(measure_all) -> None:
    """The kernel is told as what ended it."""
    shapes, run = measure_all("half")
    (row,) = run.not_run
    assert (row["shape"], row["kernel"]) == (shapes[2].label, "c")
    assert "exit 7" in row["reason"]


def test_a_run_tells_its_commit(measure_all) -> None:
    """Where the bench is in a checkout."""
    with bench_modules("checkout") as (checkout,):
        assert {name: measure_all("")[1].about[name] for name in ("commit", "dirty")} == checkout.checkout()


def test_a_shape_that_kills_every_process_ends(measure_all) -> None:
    """Kernel after kernel is left out, and the next shape has its turn."""
    _, run = measure_all("data")
    assert [row["kernel"] for row in run.not_run] == ["a", "b", "c"]
    assert {row["shape"] for row in run.results} == {"0", "2"}


def test_a_run_ends_when_its_time_is_spent(measure_all) -> None:
    """What is left says so, and a process at work is stopped."""
    shapes, run = measure_all("hangs", budget=0.0)
    assert list(run.results) == []
    assert [(row["shape"], row["reason"]) for row in run.not_run] == [
        (shape.label, "the 0 s of the run were spent") for shape in shapes
    ]


def test_a_process_that_never_starts_is_told(measure_all) -> None:
    """There is nothing to measure with."""
    with pytest.raises(SystemExit, match="no device"):
        measure_all("start")
