"""The file a machine's times are kept in: added to, never overwritten in silence, whole for every reader."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from backstamp.errors import BadInput, UnsafeRecord
from backstamp.host import this_host
from backstamp.measurements import Machine, Measurements, Timed, WorkClass
from backstamp.plan_rows import LibraryRef
from backstamp.testing.hosts import described_host
from backstamp.tune_record import add_times, default_place, load_measurements, read_times, times_from_json

HOST = described_host("h100")
MACHINE = Machine.of(HOST)
WORK = WorkClass("attention", "decode", "mha 32/8 heads, head dim 128", "bf16", "same", 0, 1, False, 32, 4096)


def timed(kernel: str, microseconds: float, **changes: object) -> Timed:
    """A time of one kernel in one class."""
    row = Timed(WORK, kernel, 0, "fake-p", "1.0", LibraryRef("triton", "3.7.0"), 16, microseconds)
    return row._replace(**changes)


def test_what_was_added_is_read_back(tmp_path: Path) -> None:
    """Rows of every shape, in one order whatever the order they came in."""
    rows = [timed("b", 2.5), timed("a", 3.0, library=None), timed("a", 4.0, version="2.0")]
    place = tmp_path / "deep" / "times.json"
    assert [kept.before for kept in add_times(place, MACHINE, rows)] == [None, None, None]
    assert set(read_times(place).rows) == set(rows)
    other = tmp_path / "other.json"
    add_times(other, MACHINE, rows[::-1])
    assert other.read_bytes() == place.read_bytes()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600


def test_a_time_that_is_there_stays_and_the_new_one_is_told_as_a_conflict(tmp_path: Path) -> None:
    """Nothing is overwritten in silence; with `replace` it gives way and is told too."""
    place = tmp_path / "times.json"
    add_times(place, MACHINE, [timed("a", 3.0)])
    (kept,) = add_times(place, MACHINE, [timed("a", 9.0)])
    assert (kept.before, kept.conflicts(False), kept.conflicts(True)) == (3.0, True, False)
    assert [row.microseconds for row in read_times(place).rows] == [3.0]
    (kept,) = add_times(place, MACHINE, [timed("a", 9.0)], replace=True)
    assert kept.before == 3.0
    assert [row.microseconds for row in read_times(place).rows] == [9.0]


def test_a_time_at_another_page_size_is_a_time_of_the_same_thing(tmp_path: Path) -> None:
    """A resolve asks for no page size: two figures side by side would leave the first to be answered for ever."""
    place = tmp_path / "times.json"
    add_times(place, MACHINE, [timed("a", 3.0)])
    (kept,) = add_times(place, MACHINE, [timed("a", 9.0, page_size=64)])
    assert (kept.before, kept.conflicts(False)) == (3.0, True)
    assert read_times(place).rows == (timed("a", 3.0),)
    add_times(place, MACHINE, [timed("a", 9.0, page_size=64)], replace=True)
    record = read_times(place)
    assert record.rows == (timed("a", 9.0, page_size=64),)
    times = Measurements(machine=record.machine, rows=record.rows)
    assert times.time_of(WORK, "a", 0, ("fake-p", "1.0"), LibraryRef("triton", "3.7.0")) == 9.0


@pytest.mark.parametrize("folder", ["", ".", "..", "deep"])
def test_a_folder_is_no_place_for_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """It is told as such, and nothing is left in it or beside it."""
    (tmp_path / "here" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match="needs the path of a file, got a folder"):
        add_times(folder, MACHINE, [timed("a", 3.0)])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_row_of_another_version_is_another_row(tmp_path: Path) -> None:
    """An upgrade leaves the old times where a downgrade finds them."""
    place = tmp_path / "times.json"
    rows = [timed("a", 3.0), timed("a", 2.0, version="1.1"), timed("a", 1.0, library=LibraryRef("triton", "3.8.0"))]
    for row in rows:
        add_times(place, MACHINE, [row])
    record = read_times(place)
    times = Measurements(machine=record.machine, rows=record.rows)
    found = [times.time_of(WORK, "a", 0, (row.distribution, row.version), row.library) for row in rows]
    assert found == [3.0, 2.0, 1.0]
    assert times.time_of(WORK, "a", 0, ("fake-p", "9.9"), rows[0].library) is None
    assert times.time_of(WORK, "a", 1, ("fake-p", "1.0"), rows[0].library) is None
    assert times.time_of(WORK._replace(rows=64), "a", 0, ("fake-p", "1.0"), rows[0].library) is None


def test_another_machines_record_is_not_added_to(tmp_path: Path) -> None:
    """Its times would rank kernels here; the file is left as it was."""
    place = tmp_path / "times.json"
    add_times(place, MACHINE, [timed("a", 3.0)])
    before = place.read_bytes()
    driven = Machine.of(replace(HOST, runtimes=(*HOST.runtimes, ("driver", "999.1"))))
    with pytest.raises(BadInput, match="another machine's \\(runtimes") as caught:
        add_times(place, driven, [timed("a", 1.0)], replace=True)
    assert "driver 999.1 here" in caught.value.found
    assert place.read_bytes() == before


_WRITER = """
import sys
from pathlib import Path
from tests.core.test_tune_record import MACHINE, timed
from backstamp.tune_record import add_times
for at in range(20):
    add_times(Path(sys.argv[1]), MACHINE, [timed(f"{sys.argv[2]}{at}", 1.0), timed("shared", float(sys.argv[3]))])
"""


def test_two_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each row of both is there, the shared one as whoever came first left it, and a reader never sees half a file."""
    place = tmp_path / "times.json"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    add_times(place, MACHINE, [timed("first", 1.0)])
    writers = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(place), name, time], env=environment, cwd=root)
        for name, time in (("left", "5.0"), ("right", "6.0"))
    ]
    while any(writer.poll() is None for writer in writers):
        assert read_times(place).rows
    assert [writer.returncode for writer in writers] == [0, 0]
    found = {row.kernel: row.microseconds for row in read_times(place).rows}
    assert set(found) == {"first", "shared", *(f"{name}{at}" for name in ("left", "right") for at in range(20))}
    assert found["shared"] in (5.0, 6.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["times.json", "times.json.lock"]


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX: files with an owner and a mode")
def test_a_record_that_others_may_write_is_neither_read_nor_added_to(tmp_path: Path) -> None:
    """Whoever writes it chooses kernels."""
    place = tmp_path / "times.json"
    add_times(place, MACHINE, [timed("a", 3.0)])
    place.chmod(0o666)
    for use in (lambda: load_measurements(HOST, place), lambda: add_times(place, MACHINE, [timed("b", 1.0)])):
        with pytest.raises(UnsafeRecord, match="a record that others may write is ignored"):
            use()


def test_a_write_that_fails_leaves_the_record_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, for example."""
    place = tmp_path / "times.json"
    add_times(place, MACHINE, [timed("a", 3.0)])
    before = place.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        add_times(place, MACHINE, [timed("b", 1.0)])
    assert place.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["times.json", "times.json.lock"]


def written() -> dict[str, object]:
    """The JSON of a record of one row."""
    place_free = {"schema": 1, "machine": {**MACHINE._asdict(), "runtimes": dict(MACHINE.runtimes)}}
    row = timed("a", 3.0)
    row_json = {**row._asdict(), "work": row.work._asdict(), "library": row.library.as_json()}
    return json.loads(json.dumps({**place_free, "rows": [row_json]}))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("schema",), 2, "schema"),
        (("rows", 0, "microseconds"), "fast", "rows[0].microseconds"),
        (("rows", 0, "microseconds"), 0, "rows[0].microseconds"),
        (("rows", 0, "microseconds"), -1.0, "rows[0].microseconds"),
        (("rows", 0, "work", "phase"), "dream", "rows[0].work.phase"),
        (("rows", 0, "import"), "os:system", "rows[0].import"),
        (("rows", 0, "library", "import"), "os:system", "rows[0].library.import"),
        (("machine", "torch"), None, "machine.torch"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else str(value),
)
def test_a_record_that_is_not_one_is_one_error_that_names_the_field(
    path: tuple[str | int, ...], value: object, field: str
) -> None:
    """It is read whole or refused; it names no import."""
    data = written()
    assert times_from_json(data).rows == (timed("a", 3.0),)
    at = data
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    with pytest.raises(BadInput) as caught:
        times_from_json(data)
    assert caught.value.who == f"tune record, field {field}"


def test_a_row_twice_is_refused() -> None:
    """Two times of one thing would be one by chance."""
    data = written()
    data["rows"].append({**data["rows"][0], "microseconds": 9.0})
    with pytest.raises(BadInput, match="one twice"):
        times_from_json(data)


def test_a_file_that_is_cut_off_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A corrupted record is told, never replaced by a new one."""
    place = tmp_path / "times.json"
    add_times(place, MACHINE, [timed("a", 3.0)])
    place.write_bytes(place.read_bytes()[:100])
    for use in (lambda: read_times(place), lambda: add_times(place, MACHINE, [timed("b", 1.0)], replace=True)):
        with pytest.raises(BadInput, match="readable JSON"):
            use()
    assert len(place.read_bytes()) == 100


def test_the_default_place_is_one_file_a_machine_in_the_users_cache(tmp_path: Path) -> None:
    """Another driver is another machine; a relative XDG_CACHE_HOME is ignored, as its specification says."""
    here = default_place(MACHINE, {"XDG_CACHE_HOME": str(tmp_path)})
    assert here == tmp_path / "backstamp" / "tune" / f"{MACHINE.key}.json"
    assert default_place(MACHINE, {"XDG_CACHE_HOME": "caches"}).is_relative_to(Path.home() / ".cache")
    driven = Machine.of(replace(HOST, runtimes=(("driver", "999.1"),)))
    assert default_place(driven, {"XDG_CACHE_HOME": str(tmp_path)}) != here
    assert default_place(MACHINE._replace(torch="9.9"), {"XDG_CACHE_HOME": str(tmp_path)}) != here


def test_a_cpu_with_other_cores_is_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of two cores must not rank by what sixty-four were measured at."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    two = Machine.of(this_host("cpu"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(64)}, raising=False)
    many = Machine.of(this_host("cpu"))
    assert two.unlike(many).startswith("runtimes cpus 2")
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    assert default_place(two, cache) != default_place(many, cache)


def test_nothing_in_the_default_place_is_no_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the declared priority is used; a file that was named must be there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_measurements(HOST) is None
    add_times(default_place(MACHINE), MACHINE, [timed("a", 3.0)])
    found = load_measurements(HOST)
    assert found is not None
    assert found.rows == (timed("a", 3.0),)
    with pytest.raises(BadInput, match="No such file"):
        load_measurements(HOST, tmp_path / "none.json")
