"""`bench/kernels.py` from one end to the other, on a CPU with small shapes: built, held, timed, recorded and drawn."""

from __future__ import annotations

import itertools
import json
import math
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
    path.write_text(json.dumps({"tiny": True, "checks": [{"kernel": "kept"}]}), "utf-8")
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


def test_a_recurrent_step_is_told_beside_a_copy(record) -> None:
    """What reads states and writes them back has the time of as many bytes copied, and no other work does."""
    results = record[0]["results"]
    beside = {row["work"] for row in results if row.get("copy_us", 0) > 0}
    assert beside == {"gdn_decode", "kda_decode"}
    assert all("copy_us" in row for row in results if row["work"] in beside)


def test_libraries_that_are_not_installed_are_told(record) -> None:
    """Called directly, they are listed all the same."""
    reasons = {row["kernel"]: row["reason"] for row in record[0]["not_run"] if "kernel" in row}
    assert "fla" in reasons["fla chunk"]
    assert "flash_mla" in reasons["flash_mla sparse"]


def test_a_second_run_is_added_to_the_record(record) -> None:
    """Its shapes are its own, the others' rows and the checks stay."""
    first, second, said = record
    assert second["checks"] == [{"kernel": "kept"}]
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


def test_shapes_and_checks_are_told_as_json() -> None:
    """For programs."""
    listed = json.loads(run("--list", "--json", "--only", "kda_decode", "--shapes", "b32").stdout)
    assert [(row["work"], row["shape"]) for row in listed] == [("kda_decode", "b32 t1")]
    assert listed[0]["flops"] > 0
    assert listed[0]["bytes"] > 0
    checked = run("--check", "aiter", "--json")
    assert {line["status"] for line in json.loads(checked.stdout)} == {"refused"}
    assert checked.returncode == 0


@pytest.mark.parametrize(("status", "code"), [("refused", 0), ("failed", 1), ("wrong", 1)])
def test_a_timing_run_fails_where_a_kernel_was_wrong_or_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, code: int
) -> None:
    """A refusal is as declared."""
    about = {"limits": {"copy_tbps": 1.0, "bf16_tflops": 1.0}, "versions": {}}
    with bench_modules("kernels", "records") as (kernels, records):
        row = {"work": "decode", "shape": "s", "kernel": "k", "status": status, "reason": "because"}
        monkeypatch.setattr(kernels, "measure_all", lambda *shapes, **asked: iter([records.Run(about, [], [row])]))
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--tiny"])
        assert kernels.main() == code
    assert "k: because" in capsys.readouterr().out


def test_a_kernel_nobody_knows_is_not_checked() -> None:
    """A typing error would pass for kernels that all refused."""
    child = run("--check", "torch_native", "tritno")
    assert (child.returncode, child.stdout) == (2, "")
    assert "--check: needs kernels of the catalogue" in child.stderr
    assert child.stderr.rstrip().endswith("got tritno.")


def test_without_a_gpu_nothing_is_timed() -> None:
    """A CPU's times of shapes like these would take a day."""
    environment = ordinary_environment() | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCH / "kernels.py"), "--shapes", "of no name"]
    child = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (child.returncode, child.stdout) == (2, "")
    assert "needs a CUDA or ROCm GPU to time, got none" in child.stderr


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


@pytest.mark.parametrize(("off", "right"), [(1e-2, True), (1.1e-2, False), (math.inf, False), (math.nan, False)])
def test_only_an_error_within_the_bound_is_right(off: float, right: bool) -> None:
    """What is no number is none."""
    with bench_modules("measuring", "shape_list", "steps") as (measuring, listed, steps):
        step = steps.attention_step(listed.TINY[0], "cpu")
        if right:
            assert measuring._checked(None, None, off, step, True).error == off
        else:
            with pytest.raises(measuring.Wrong, match="more than 1e-02"):
                measuring._checked(None, None, off, step, True)


def test_a_call_is_recorded_unless_it_is_asked_for_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches are timed then."""
    with bench_modules("measuring", "built", "shape_list", "steps") as (measuring, built, listed, steps):
        step = steps.attention_step(listed.TINY[0], "cpu")
        ready = built.Ready(lambda: step.q, "library")
        monkeypatch.setattr(measuring, "captured", lambda run: [run])
        assert measuring._checked(None, ready, 0.0, step, False).run == [ready.run]
        eager = measuring._checked(None, ready, 0.0, step, True)
        assert (eager.replay, eager.run) == (None, ready.run)


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
