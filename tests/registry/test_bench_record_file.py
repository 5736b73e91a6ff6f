"""The file of a bench's record: whose it is, several writers at once, and what is no record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backstamp.errors import BadInput
from tests.bench_modules import BENCH, bench_modules
from tests.children import ordinary_environment

LIMITS = {"copy_tbps": 4.0, "bf16_tflops": 600.0}
ABOUT = {"limits": LIMITS, "versions": {"torch": "2.11"}, "host": "a GPU", "device": "cuda", "arch": "9.0"}
ROW = {"work": "decode", "shape": "one", "kernel": "a", "library": "a", "direct": False}
ROW |= {"us": 50.0, "tflops": 1.0, "tbps": 1.0, "rel_error": 2e-3}


@pytest.fixture(scope="module")
def bench():
    """The modules: record_file, records, recording."""
    with bench_modules("record_file", "records", "recording") as modules:
        yield modules


@pytest.fixture
def owner(bench):
    """The machine of `ABOUT`."""
    return bench[0].Owner("a GPU", "cuda", "9.0")


def record_of(**changes: object) -> dict[str, object]:
    """A record of one run with one row."""
    run = {"run": 1, "rounds": 1, "limits": LIMITS, "versions": {}}
    return {**ABOUT, "runs": [run], "results": [{**ROW, "run": 1}], "not_run": [], **changes}


def test_a_file_is_written_whole(bench, owner, tmp_path: Path) -> None:
    """Folders are made, and nothing but the lock is left beside it."""
    path = tmp_path / "deep" / "gpu.json"
    assert bench[0].read(path) == {}
    written = bench[0].update(path, owner, lambda before: {**before, "results": []})
    assert json.loads(path.read_text("utf-8")) == bench[0].read(path) == written
    assert written == {"host": "a GPU", "device": "cuda", "arch": "9.0", "results": []}
    assert sorted(at.name for at in path.parent.iterdir()) == ["gpu.json", "gpu.json.lock"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"host": "another"}, "needs the record of this machine, host 'a GPU', got that of host 'another'"),
        ({"device": "rocm"}, "device 'cuda', got that of device 'rocm'"),
        ({"tiny": True}, "needs a record of figures, got a record of --tiny"),
    ],
    ids=["host", "device", "tiny"],
)
def test_the_record_of_another_is_left_as_it_was(bench, owner, tmp_path: Path, there, words: str) -> None:
    """Asked before anything is measured, and again as it is written: another bench may have made it meanwhile."""
    path = tmp_path / "gpu.json"
    text = json.dumps(record_of(**there))
    path.write_text(text, "utf-8")
    for change in (None, lambda before: {"results": []}):
        with pytest.raises(BadInput) as refused:
            bench[0].update(path, owner, change)
        assert words in str(refused.value)
        assert str(path) in str(refused.value)
    assert path.read_text("utf-8") == text


def test_small_shapes_are_not_written_beside_figures(bench, owner, tmp_path: Path) -> None:
    """Whatever is in the record; one that is made for them is marked."""
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"checks": []}), "utf-8")
    tiny = owner._replace(tiny=True)
    with pytest.raises(BadInput, match="needs a record of --tiny, got a record of figures"):
        bench[0].update(path, tiny)
    made = bench[0].update(tmp_path / "tiny.json", tiny, lambda before: before)
    assert made["tiny"] is True
    assert bench[0].update(tmp_path / "tiny.json", tiny) == made


@pytest.mark.parametrize(
    "script",
    [
        ("kernels.py", "--tiny", "--only", "decode", "--kernels", "torch_native"),
        ("kernels.py", "--check", "aiter"),
        ("kernels.py", "--plot", "plots"),
        ("dispatch.py", "--kernels", "torch_native"),
    ],
    ids=["time", "check", "plot", "dispatch"],
)
def test_a_wrong_record_is_one_line_before_anything_starts(tmp_path: Path, script: tuple[str, ...]) -> None:
    """No traceback, and the file is as it was."""
    path = tmp_path / "cpu.json"
    path.write_text('{"results":[{"work":"decode"}]}', "utf-8")
    command = [sys.executable, str(BENCH / script[0]), *script[1:], "--output", str(path)]
    child = subprocess.run(command, capture_output=True, text=True, env=ordinary_environment(), cwd=tmp_path)
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr.splitlines() == [
        f"bench/{script[0]}: bench record {path}, field results[0].shape: needs a value, got no such field."
    ]
    assert path.read_text("utf-8") == '{"results":[{"work":"decode"}]}'


def test_no_check_begins_beside_the_record_of_another(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    """Its lines could not be kept."""
    path = tmp_path / "cpu.json"
    path.write_text('{"host": "another"}', "utf-8")
    with bench_modules("kernels") as (kernels,):
        monkeypatch.setattr(kernels, "check_all", lambda *asked: pytest.fail("a check began"))
        monkeypatch.setattr(sys, "argv", ["kernels.py", "--output", str(path), "--check"])
        assert kernels.main() == 2
    assert "got that of host 'another'" in capsys.readouterr().err


@pytest.mark.parametrize("script", ["kernels.py", "dispatch.py"])
def test_a_run_refuses_the_record_of_another_machine(tmp_path: Path, script: str) -> None:
    """From one end to the other, in one line."""
    path = tmp_path / "cpu.json"
    text = json.dumps({"host": "another", "tiny": script == "kernels.py"})
    path.write_text(text, "utf-8")
    more = ["--tiny"] if script == "kernels.py" else []
    command = [sys.executable, str(BENCH / script), *more, "--kernels", "torch_native", "--output", str(path)]
    child = subprocess.run(command, capture_output=True, text=True, env=ordinary_environment())
    assert (child.returncode, child.stdout) == (2, "")
    (line,) = child.stderr.splitlines()
    assert "got that of host 'another'" in line
    assert path.read_text("utf-8") == text


RUN = record_of()["runs"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"results": [', "needs readable JSON"),
        ("[]", "needs a JSON object, got []"),
        (json.dumps(record_of(runs={})), "field runs: needs a list"),
        (json.dumps(record_of(runs=[{**RUN, "limits": {"copy_tbps": 0, "bf16_tflops": 1}}])), "copy_tbps: needs"),
        (json.dumps(record_of(runs=[{**RUN, "run": 2}])), "results[0].run: needs the number of one of its runs"),
        (json.dumps(record_of(results=[{**ROW, "run": 1, "us": 0}])), "results[0].us: needs a time above 0"),
        (json.dumps({"results": [ROW], "versions": {}}), "field limits: needs a value"),
        (json.dumps(record_of(not_run=[{"work": "decode", "shape": "one"}])), "not_run[0].reason"),
        (json.dumps(record_of(checks=[1])), "field checks[0]: needs a JSON object, got 1"),
        (json.dumps(record_of(dispatch=[{}])), "dispatch[0].work"),
        (json.dumps(record_of(tiny="no")), "field tiny: needs true or false"),
        (json.dumps(record_of(host=3)), "field host: needs a string"),
        (json.dumps(record_of(versions=[])), "field versions: needs a JSON object"),
    ],
)
def test_what_is_no_record_says_what_it_lacks(bench, tmp_path: Path, text: str, words: str) -> None:
    """By the field, so that it can be mended."""
    path = tmp_path / "gpu.json"
    path.write_text(text, "utf-8")
    with pytest.raises(BadInput) as refused:
        bench[0].read(path)
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_the_records_of_the_repository_are_read(bench) -> None:
    """Those of before too."""
    for path in (BENCH / "results").glob("*.json"):
        assert bench[0].read(path) == json.loads(path.read_text("utf-8"))


def test_a_record_that_cannot_be_written_is_told_before_a_run(bench, owner, tmp_path: Path) -> None:
    """Minutes of measuring would be lost."""
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(BadInput, match="needs a file that can be written"):
        bench[0].update(tmp_path / "file" / "gpu.json", owner)


WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from record_file import Owner, update
owner = Owner("a GPU", "cuda", "9.0")
for at in range(40):
    line = {"work": sys.argv[3], "shape": str(at), "kernel": "k"}
    update(Path(sys.argv[2]), owner, lambda before: {**before, "dispatch": [*before.get("dispatch", ()), line]})
"""


def test_benches_at_once_lose_no_row(tmp_path: Path) -> None:
    """Each reads what the other wrote."""
    path = tmp_path / "gpu.json"
    command = [sys.executable, "-c", WRITER, str(BENCH), str(path)]
    writers = [subprocess.Popen([*command, name], env=ordinary_environment()) for name in ("one", "two", "three")]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    rows = [(row["work"], row["shape"]) for row in json.loads(path.read_text("utf-8"))["dispatch"]]
    assert sorted(rows) == sorted((name, str(at)) for name in ("one", "two", "three") for at in range(40))


@pytest.fixture
def recordings(bench, owner, tmp_path: Path):
    """Two runs at work on one record: (bench.records, first, second, path)."""
    path = tmp_path / "gpu.json"
    first, second = (bench[2].Recording(path, owner, [("decode", "one")]) for _ in range(2))
    return bench[1], first, second, path


def row(kernel: str, us: float) -> dict[str, object]:
    """A figure."""
    return {**ROW, "kernel": kernel, "us": us}


def test_two_runs_at_work_keep_their_numbers_and_rows(recordings) -> None:
    """The first goes on under its own number behind the second's."""
    records, first, second, path = recordings
    first.add(records.Run(ABOUT, [row("a", 50)], []))
    second.add(records.Run(ABOUT, [row("b", 40)], []))
    first.add(records.Run(ABOUT, [row("a", 50), row("c", 100)], []))
    record = json.loads(path.read_text("utf-8"))
    assert {at["kernel"]: (at["run"], at["ratio_to_best"]) for at in record["results"]} == {
        "a": (1, 1.0),
        "c": (1, 0.5),
        "b": (2, None),
    }
    assert [entry["run"] for entry in record["runs"]] == [1, 2]
    assert [at["kernel"] for at in records.of_run(first.record, first.number)] == ["a", "c"]


def test_of_two_figures_of_a_kernel_the_later_stands(recordings) -> None:
    """What the first run told before is not told again."""
    records, first, second, path = recordings
    failed = {**ROW, "status": "failed", "reason": "no", "kernel": "b"}
    first.add(records.Run(ABOUT, [row("a", 50)], [failed]))
    second.add(records.Run(ABOUT, [row("a", 40), row("b", 60)], []))
    first.add(records.Run(ABOUT, [row("a", 50), row("c", 100)], [failed]))
    told = {at["kernel"]: (at["run"], at["us"]) for at in json.loads(path.read_text("utf-8"))["results"]}
    assert told == {"a": (2, 40), "b": (2, 60), "c": (1, 100)}


def test_a_run_without_rows_yet_keeps_its_number(recordings) -> None:
    """Else a third would take it."""
    records, first, second, path = recordings
    first.add(records.Run(ABOUT, [row("a", 50)], []))
    second.add(records.Run(ABOUT, [], []))
    first.add(records.Run(ABOUT, [row("a", 50), row("c", 100)], []))
    assert [entry["run"] for entry in json.loads(path.read_text("utf-8"))["runs"]] == [1, 2]


def test_a_run_says_whether_it_goes_on_with_the_last(recordings) -> None:
    """Once, as it begins: its own rows are no other run."""
    records, first, second, _ = recordings
    first.add(records.Run(ABOUT, [row("a", 50)], []))
    second.add(records.Run(ABOUT, [row("b", 40)], [], join=True))
    second.add(records.Run(ABOUT, [row("b", 40), row("c", 100)], [], join=True))
    assert (first.number, first.joined, second.number, second.joined) == (1, False, 1, True)
    assert {at["kernel"]: at["ratio_to_best"] for at in second.record["results"]} == {"a": 0.8, "b": 1.0, "c": 0.4}


def test_without_a_file_a_run_is_told_whole(bench, owner) -> None:
    """What it told first stays."""
    recording = bench[2].Recording(None, owner, [])
    recording.add(bench[1].Run(ABOUT, [row("a", 50)], []))
    recording.add(bench[1].Run(ABOUT, [row("a", 50), row("b", 40)], []))
    assert {at["kernel"] for at in recording.record["results"]} == {"a", "b"}
    assert (recording.number, recording.record["host"]) == (1, "a GPU")
