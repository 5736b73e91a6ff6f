"""The file a machine's times are kept in: read whole or refused, and only ever added to.

In: a path, and new rows. Out: a `TuneRecord`, or what became of each new row. A time that is there stays, unless the
caller says that it is to be replaced; several processes may add at once, and a reader sees the file before or after,
never half of it. It times nothing. The lock beside the file needs POSIX; elsewhere two writers at once may lose rows.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, get_args

from backstamp.declarations import PHASES, Slot
from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.json_fields import JsonFields
from backstamp.measurements import DEFAULT_WORKLOAD, Machine, Measurements, Timed, WorkClass, Workload
from backstamp.plan_rows import LibraryRef
from backstamp.records import read_record
from backstamp.text import plain

__all__ = ["Kept", "TuneRecord", "add_times", "default_place", "load_measurements", "read_times", "times_from_json"]

RECORD_SCHEMA: Final = 1
_SLOTS: Final[tuple[Slot, ...]] = get_args(Slot)
_WHO: Final = "tune record"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRecord:
    """The times of one machine, each class, kernel, row and version once, in a fixed order."""

    machine: Machine
    rows: tuple[Timed, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The record for tools and for its file; key order is fixed."""
        return {
            "schema": RECORD_SCHEMA,
            "machine": self.machine.as_json(),
            "rows": [_row_as_json(row) for row in self.rows],
        }


class Kept(NamedTuple):
    """One new time and what the record says now: `before` is the time that was there, None where none was."""

    row: Timed
    before: float | None

    def conflicts(self, replaced: bool) -> bool:
        """Whether another time was there and is still what the record says."""
        return not replaced and self.before is not None and self.before != self.row.microseconds


def default_place(machine: Machine, environment: dict[str, str] | None = None) -> Path:
    """Where a machine's record lies if nobody says: one file a machine in this user's cache."""
    given = os.environ if environment is None else environment
    cache = given.get("XDG_CACHE_HOME", "")
    # the XDG base directory specification ignores a relative path
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    return root / "backstamp" / "tune" / f"{machine.key}.json"


def load_measurements(
    host: HostFacts, path: str | Path | None = None, workload: Workload = DEFAULT_WORKLOAD
) -> Measurements | None:
    """What `resolve` takes: this machine's record from its default place, None where there is none; or that of a file.

    A file of another machine is read too: the plan says that it is ignored, and why.

    Raises:
        BadInput: the file is missing or holds no record. UnsafeRecord: others may write it.
    """
    place = Path(path) if path is not None else default_place(Machine.of(host))
    if path is None and not place.exists():
        return None
    record = read_times(place)
    return Measurements(machine=record.machine, rows=record.rows, workload=workload)


def read_times(path: str | Path) -> TuneRecord:
    """The record of a file.

    Raises:
        BadInput, UnsafeRecord: as `load_measurements`.
    """
    return times_from_json(read_record(path, _WHO), f"{_WHO} {plain(str(path))}")


def add_times(path: str | Path, machine: Machine, rows: Iterable[Timed], *, replace: bool = False) -> tuple[Kept, ...]:
    """Add times to a record, which is made where it is missing; with `replace` a time that is there gives way.

    Without rows it writes nothing, and says whether rows could be added: to be asked before minutes of timing.

    Raises:
        BadInput: the file is another machine's record, or none, and is left as it was; or it cannot be written.
        UnsafeRecord: others may write it.
    """
    place = Path(path)
    try:
        if place.is_dir():
            raise BadInput(f"{_WHO} {plain(str(place))}", needed="the path of a file", found="a folder")
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone(place):
            return _add(place, machine, tuple(rows), replace)
    except OSError as cause:
        found = plain(cause.strerror or str(cause))
        raise BadInput(f"{_WHO} {plain(str(path))}", needed="a file that can be written", found=found) from cause


def times_from_json(data: object, who: str = _WHO) -> TuneRecord:
    """The record that was written as this JSON.

    Raises:
        BadInput: a field is missing, malformed or unknown, the schema is not ours, or a row is there twice.
    """
    fields = JsonFields(data, who, BadInput)
    fields.schema(RECORD_SCHEMA)
    fields.only(("schema", "machine", "rows"))
    machine = fields.part("machine").only(Machine._fields)
    runtimes = machine.part("runtimes")
    rows = tuple(_row(part) for part in fields.parts("rows"))
    if len({row.key for row in rows}) != len(rows):
        raise fields.bad("rows", "each class, kernel, row and version once", "one twice")
    return TuneRecord(
        machine=Machine(
            device=machine.word("device"),
            arch=machine.word("arch"),
            device_name=machine.text("device_name"),
            cpu_arch=machine.text("cpu_arch"),
            cpu_features=machine.text("cpu_features"),
            runtimes=tuple(sorted((name, runtimes.text(name)) for name in runtimes.names())),
            torch=machine.text("torch"),
            triton=machine.text("triton"),
        ),
        rows=rows,
    )


def _add(place: Path, machine: Machine, rows: Sequence[Timed], replace: bool) -> tuple[Kept, ...]:
    """Read, add and write, with nobody beside."""
    there = read_times(place) if place.exists() else TuneRecord(machine=machine)
    unlike = there.machine.unlike(machine)
    if unlike:
        raise BadInput(
            f"{_WHO} {plain(str(place))}",
            needed="a record of this machine, to add to it",
            found=f"another machine's ({unlike})",
            fix="Give another --output FILE, or take that one away",
        )
    known = {row.key: row for row in there.rows}
    kept = tuple(Kept(row, known[row.key].microseconds if row.key in known else None) for row in rows)
    for row in rows:
        if replace or row.key not in known:
            known[row.key] = row
    if rows:
        _write(place, TuneRecord(machine=machine, rows=tuple(sorted(known.values(), key=lambda row: str(row.key)))))
    return kept


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold the lock beside a record; the record itself is exchanged whole, so a lock on it would hold a file gone."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(place.with_name(place.name + ".lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(place: Path, record: TuneRecord) -> None:
    """Exchange the file for a new one, at once; only its owner may write either."""
    # a file that mkstemp makes is its owner's alone, whatever the umask
    descriptor, name = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(record.as_json(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _row_as_json(row: Timed) -> dict[str, object]:
    library = row.library.as_json() if row.library is not None else None
    return {**row._asdict(), "work": row.work._asdict(), "library": library}


def _row(fields: JsonFields) -> Timed:
    fields.only(Timed._fields)
    library = fields.part_or_none("library")
    if library is not None:
        library.only(LibraryRef._fields)
    time = fields.number("microseconds")
    if time <= 0:
        raise fields.bad("microseconds", "a time above 0", str(time))
    return Timed(
        work=_work(fields.part("work").only(WorkClass._fields)),
        kernel=fields.word("kernel"),
        row=fields.whole("row"),
        distribution=fields.word("distribution"),
        version=fields.word("version"),
        library=None if library is None else LibraryRef(library.word("distribution"), library.word_or_none("version")),
        page_size=fields.whole("page_size", least=1),
        microseconds=float(time),
    )


def _work(fields: JsonFields) -> WorkClass:
    return WorkClass(
        slot=fields.one_of("slot", _SLOTS),
        phase=fields.one_of("phase", PHASES),
        layer=fields.word("layer"),
        dtype=fields.word("dtype"),
        kv_dtype=fields.word("kv_dtype"),
        page_size=fields.whole("page_size"),
        q_len=fields.whole("q_len", least=1),
        tree=fields.flag("tree"),
        rows=fields.whole("rows", least=1),
        kv_len=fields.whole("kv_len"),
    )
