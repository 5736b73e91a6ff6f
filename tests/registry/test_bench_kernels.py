"""`bench/kernels.py` from one end to the other, on a CPU with small shapes: built, held, timed, recorded and drawn."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.host import this_host
from backstamp_cpu.linear import TorchNativeLinear
from backstamp_cpu.native import TorchNative
from tests.bench_modules import BENCH, bench_modules
from tests.children import ordinary_environment


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on an ordinary machine."""
    command = [sys.executable, str(BENCH / "kernels.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=ordinary_environment())


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory):
    """What a run of all works leaves, what a second one makes of it, and what that one said."""
    path = tmp_path_factory.mktemp("bench") / "cpu.json"
    path.write_text(json.dumps({"checks": ["kept"]}), "utf-8")
    every = run("--tiny", "--kernels", "torch_native", "fla", "flash_mla", "--output", str(path))
    assert every.returncode == 0, every.stderr
    first = json.loads(path.read_text("utf-8"))
    flex = ("--kernels", "flex_attention", "torch_native", "--rounds", "2")
    again = run("--tiny", "--only", "decode", *flex, "--output", str(path))
    assert again.returncode == 0, again.stderr
    return first, json.loads(path.read_text("utf-8")), again.stdout


def test_every_small_shape_is_measured_or_says_why_not(record) -> None:
    """Both halves of a record together name every shape that is listed."""
    with bench_modules("shape_list") as (listed,):
        shapes = {(shape.work, shape.label) for shape in listed.TINY}
    timed = {(row["work"], row["shape"]) for row in record[0]["results"]}
    assert timed | {(row["work"], row["shape"]) for row in record[0]["not_run"]} == shapes
    # no kernel of sparse attention runs on a CPU
    assert {work for work, _ in shapes - timed} == {"sparse_mla_prefill", "sparse_mla_decode"}


def test_a_row_has_what_the_format_says(record) -> None:
    """Readers of a record are others than its writer."""
    for row in record[0]["results"]:
        assert (row["kernel"], row["library"], row["direct"], row["run"]) == ("torch_native", "torch", False, 1)
        assert 0 < row["rel_error"] < 1e-2
        assert row["us"] > 0
        # nothing here records a graph
        assert row["timed"] == "eager"
        assert {"work", "shape", "tflops", "tbps", "ratio_to_best", "ratio_to_peer", "bound", "share"} <= set(row)
    assert set(record[0]["limits"]) == {"copy_tbps", "bf16_tflops"}
    assert {"host", "device", "arch", "versions", "runs"} <= set(record[0])


def test_libraries_that_are_not_installed_are_told(record) -> None:
    """Called directly, they are listed all the same."""
    reasons = {row["kernel"]: row["reason"] for row in record[0]["not_run"] if "kernel" in row}
    assert "fla" in reasons["fla chunk"]
    assert "flash_mla" in reasons["flash_mla sparse"]


def test_a_second_run_is_added_to_the_record(record) -> None:
    """Its shapes are its own, the others' rows and the checks stay."""
    first, second, said = record
    assert second["checks"] == ["kept"]
    assert [(entry["run"], entry["rounds"]) for entry in second["runs"]] == [(1, 1), (2, 2)]
    of = {(row["work"], row["kernel"]): row["run"] for row in second["results"]}
    assert of["decode", "flex_attention"] == of["decode", "torch_native"] == 2
    assert of["prefill", "torch_native"] == 1
    assert len(second["results"]) == len(first["results"]) + 2
    assert {row["ratio_to_best"] for row in second["results"] if row["run"] == 1} == {None}
    assert 1.0 in {row["ratio_to_best"] for row in second["results"] if row["run"] == 2}
    assert max(map(len, said.splitlines())) <= 80


def test_a_record_is_drawn_without_measuring(record, tmp_path: Path) -> None:
    """One picture of each work that has ratios, and the roof; each as SVG and PNG."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (requirements/bench.txt)")
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps(record[1]), "utf-8")
    drawn = run("--plot", str(tmp_path / "plots"), "--output", str(path))
    assert drawn.returncode == 0, drawn.stderr
    names = {f"{name}.{form}" for name in ("roofline", "ratios-decode") for form in ("svg", "png")}
    assert {at.name for at in (tmp_path / "plots").iterdir()} == names
    assert {Path(line).name for line in drawn.stdout.splitlines()} == names
    heads = {at.suffix: at.read_bytes()[:5] for at in (tmp_path / "plots").iterdir()}
    assert heads == {".svg": b"<?xml", ".png": b"\x89PNG\r"}
    again = run("--plot", str(tmp_path / "again"), "--output", str(path))
    assert again.returncode == 0
    for form in ("roofline.svg", "ratios-decode.svg"):
        assert (tmp_path / "plots" / form).read_bytes() == (tmp_path / "again" / form).read_bytes()


def test_without_a_record_nothing_is_drawn(tmp_path: Path) -> None:
    """It says what it needs."""
    drawn = run("--plot", str(tmp_path), "--output", str(tmp_path / "none.json"))
    assert drawn.returncode == 2
    assert "needs --output, a record with results" in drawn.stderr


def test_the_list_names_the_shapes_of_a_work() -> None:
    """And measures nothing."""
    listed = run("--list", "--only", "kda_decode", "gdn_decode", "--shapes", "b1", "b32")
    assert [line.split()[:3] for line in listed.stdout.splitlines()[1:]] == [
        [work, f"b{rows}", "t1"] for work in ("kda_decode", "gdn_decode") for rows in (128, 1, 32)
    ]


SCRIPT = """
import json, os, sys, time
request = json.loads(sys.argv[1])
def say(**told): print(json.dumps(told), flush=True)
if {lost!r} == "start": sys.exit("no device")
say(limits={{"copy_tbps": 1.0, "bf16_tflops": 1.0}}, versions={{}}, host="h", device="cpu", arch="a")
for at in request["shapes"]:
    for kernel in ("a", "b", "c"):
        if at == request["shapes"][0] and kernel in request["without"]: continue
        say(begin=kernel)
        if kernel in request["stalled"].get("prefill", {{}}): continue
        if (at, kernel) == (1, "b") and {lost!r} == "dies": os._exit(7)
        if (at, kernel) == (1, "b") and {lost!r} == "hangs": time.sleep(600)
        if at == 1 and {lost!r} == "data": os._exit(9)
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


@pytest.mark.parametrize(("lost", "seconds", "words"), [("dies", 60.0, "exit 7"), ("hangs", 3.0, "took over 3 s")])
def test_a_kernel_that_takes_its_process_costs_its_own_figure(
    measure_all, lost: str, seconds: float, words: str
) -> None:
    """The others of its shape, and the shapes after it, are measured by another process; none twice."""
    shapes, run = measure_all(lost, seconds)
    told = [(row["shape"], row["kernel"]) for row in run.results]
    if lost == "hangs":
        # the script leaves alone what stalled at a prefill, as it is told to
        told.append(("2", "b"))
    assert sorted(told) == sorted((str(at), of) for at in range(3) for of in "abc" if (at, of) != (1, "b"))
    (row,) = run.not_run
    assert (row["shape"], row["kernel"], row["status"]) == (shapes[1].label, "b", "failed")
    assert words in row["reason"]


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


def test_a_wrong_kernel_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast and wrong is no figure."""
    real = TorchNative.forward

    def forward(self, *tensors, **named):
        answer = real(self, *tensors, **named)
        answer[-1] *= 1.5
        return answer

    monkeypatch.setattr(TorchNative, "forward", forward)
    with bench_modules("measuring", "built", "shape_list") as (measuring, built, listed):
        shape = next(of for of in listed.TINY if of.work == "prefill")
        here = here_of(built)
        told = list(measuring.measure(shape, here, ["torch_native"]))
        assert [list(line) for line in told] == [["begin"], ["missing"]]
        assert told[1]["missing"]["status"] == "wrong"
        assert "relative error 5.0e-01" in told[1]["missing"]["reason"]


@pytest.mark.parametrize(
    ("work", "kernel"), [("decode", TorchNative), ("gdn_decode", TorchNativeLinear)], ids=["mha", "gdn"]
)
def test_a_kernel_that_writes_nothing_is_told_and_not_timed(work: str, kernel: type, monkeypatch) -> None:
    """Memory that another kernel just left may hold the right answer: nothing of it is there when a kernel is asked."""
    blank: list[bool] = []

    def forward(self, *given, out=None, **more):
        blank.append(bool(out.isnan().all()))
        return out

    with bench_modules("measuring", "built", "shape_list") as (measuring, built, listed):
        monkeypatch.setattr(kernel, "forward", forward)
        shape = next(of for of in listed.TINY if of.work == work)
        *_, told = measuring.measure(shape, here_of(built), ["torch_native"])
        assert told["missing"]["status"] == "wrong"
        assert all(blank)


def here_of(built):
    """This machine's CPU."""
    return built.Here(this_host("cpu"), build_catalogue(discover()))


def test_a_kernel_that_stalled_elsewhere_is_told_and_has_no_turn() -> None:
    """A compile that took all its time would take it again at every shape."""
    with bench_modules("measuring", "built", "shape_list") as (measuring, built, listed):
        stalled = {"torch_native": "took over 30 s, at another"}
        told = list(measuring.measure(listed.TINY[0], here_of(built), ["torch_native"], stalled=stalled))
        assert [line["missing"]["reason"] for line in told] == ["took over 30 s, at another"]


def test_what_is_skipped_is_not_told() -> None:
    """As if nobody had asked."""
    with bench_modules("measuring", "built", "shape_list") as (measuring, built, listed):
        shape = next(of for of in listed.TINY if of.work == "mla_decode")
        told = list(measuring.measure(shape, here_of(built), skipped=["torch_native", "flash_mla", "flashinfer"]))
        assert [line["missing"]["kernel"] for line in told if "missing" in line] == ["intel_amx"]


def test_a_reference_is_not_timed_where_it_would_take_minutes() -> None:
    """It takes tokens one by one, and says so."""
    with bench_modules("measuring", "built", "shapes") as (measuring, built, shapes):
        shape = shapes.Shape("gdn_prefill", ((1025, 1025),), heads=(1, 1), dims=(16, 16))
        _, told = measuring.measure(shape, here_of(built), ["torch_native"])
        assert told["missing"]["status"] == "refused"
        assert "at most 1024 tokens of a reference" in told["missing"]["reason"]


def test_a_kernel_that_loses_the_device_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran after it would fail for its sake."""
    with bench_modules("measuring", "built", "shape_list") as (measuring, built, listed):
        here = here_of(built)

        def lose(step):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(measuring, "candidates", lambda shape, here: [built.Candidate("bad", False, lose)] * 2)
        lines = measuring.measure(listed.TINY[0], here, ["bad"])
        assert [list(line) for line in itertools.islice(lines, 2)] == [["begin"], ["missing"]]
        with pytest.raises(measuring.DeviceLost):
            next(lines)


@pytest.mark.parametrize(
    ("kernel", "asked", "is_it"),
    [
        ("flashinfer", [], True),
        ("flashinfer decode, tensor cores", ["flashinfer"], True),
        ("dsa, Triton inside", ["dsa"], True),
        ("fa3-fwd, contiguous KV", ["fa3"], False),
        ("fa3", ["triton", "fa3"], True),
    ],
)
def test_a_name_asks_for_a_kernel_and_its_library(kernel: str, asked: list[str], is_it: bool) -> None:
    """Whole words, so that fa3 is not fa3-fwd."""
    with bench_modules("measuring") as (measuring,):
        assert measuring.is_asked(kernel, asked) is is_it
