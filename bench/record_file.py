"""The file of a machine's record: read whole or refused, and only ever brought up to date.

In: a path, whose record it is, and what changes in it. Out: the record as it is now. A record of another machine, or
of small shapes where there are figures, is never written into. Several benches may write at once: each reads the file
again under a lock, and a reader sees it before or after. It measures nothing. The lock needs POSIX.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from backstamp.errors import BadInput
from backstamp.host import HostFacts
from backstamp.json_fields import JsonFields

__all__ = ["Owner", "read", "update"]

_WORDS: Final = ("work", "shape", "kernel", "library")
_NUMBERS: Final = ("us", "tflops", "tbps", "rel_error")
_LIMITS: Final = ("copy_tbps", "bf16_tflops")


class Owner(NamedTuple):
    """Whose record it is: a machine, and whether its shapes are the small ones, whose times are no figures."""

    host: str
    device: str
    arch: str
    tiny: bool = False

    @classmethod
    def of(cls, host: HostFacts, tiny: bool = False) -> Owner:
        """This machine."""
        return cls(host.device_name or f"{host.arch} CPU", host.device, host.arch, tiny)

    def as_json(self) -> dict[str, object]:
        """The fields that name it in the record."""
        machine: dict[str, object] = {"host": self.host, "device": self.device, "arch": self.arch}
        return machine | ({"tiny": True} if self.tiny else {})


def read(path: Path | None) -> dict[str, Any]:
    """The record as it is, empty where there is none.

    Raises:
        BadInput: the file cannot be read, or is no record.
    """
    if path is None or not path.exists():
        return {}
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as cause:
        raise BadInput(_who(path), needed="a readable file", found=cause.strerror or str(cause)) from cause
    except (ValueError, RecursionError) as cause:
        raise BadInput(_who(path), needed="readable JSON", found=str(cause)) from cause
    _hold(JsonFields(record, _who(path), BadInput))
    return dict(record)


def update(
    path: Path, owner: Owner, change: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """Read the record, change it and write it, with no other bench in between; without `change` nothing is written.

    Raises:
        BadInput: as `read`; or it is another's record, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            before = read(path)
            _hold_owner(path, before, owner)
            if change is None:
                return before
            record = {**owner.as_json(), **change(before)}
            _write(path, record)
            return record
    except OSError as cause:
        found = cause.strerror or str(cause)
        raise BadInput(_who(path), needed="a file that can be written", found=found) from cause


def _who(path: Path) -> str:
    return f"bench record {path}"


def _hold_owner(path: Path, record: Mapping[str, Any], owner: Owner) -> None:
    """Refuse the record of another; a field that is not there yet is nobody's."""
    fix = "Give another --output FILE"
    for name in ("host", "device"):
        ours = getattr(owner, name)
        if record.get(name, ours) != ours:
            found = f"that of {name} {record[name]!r}"
            raise BadInput(_who(path), needed=f"the record of this machine, {name} {ours!r}", found=found, fix=fix)
    kinds = {True: "a record of --tiny", False: "a record of figures"}
    if record and record.get("tiny", False) != owner.tiny:
        raise BadInput(_who(path), needed=kinds[owner.tiny], found=kinds[not owner.tiny], fix=fix)


def _hold(record: JsonFields) -> None:
    """Refuse what a run could not add to: whatever of a record is there must be whole."""
    for name in ("host", "device", "arch"):
        if record.has(name):
            record.text(name)
    if record.has("tiny"):
        record.flag("tiny")
    told = record.has("runs")
    runs = {_held_run(entry) for entry in record.parts("runs")} if told else set()
    results = record.parts("results") if record.has("results") else ()
    for row in results:
        _hold_row(row)
        if told and row.whole("run") not in runs:
            raise row.bad("run", "the number of one of its runs", str(row.whole("run")))
    if results and not told:
        # a record of before runs were told apart is one run
        _hold_machine(record)
    elif record.has("versions"):
        record.part("versions")
    for name, words in (("not_run", ("work", "shape", "reason")), ("dispatch", _WORDS[:3]), ("checks", ("kernel",))):
        for row in record.parts(name) if record.has(name) else ():
            for word in words:
                row.text(word)


def _held_run(entry: JsonFields) -> int:
    _hold_machine(entry)
    entry.whole("rounds", 1)
    return entry.whole("run")


def _hold_machine(fields: JsonFields) -> None:
    fields.part("versions")
    limits = fields.part("limits")
    for name in _LIMITS:
        if limits.number(name) <= 0:
            raise limits.bad(name, "a number above 0", str(limits.number(name)))


def _hold_row(row: JsonFields) -> None:
    for word in _WORDS:
        row.text(word)
    for name in _NUMBERS:
        row.number(name)
    if row.number("us") <= 0:
        raise row.bad("us", "a time above 0", str(row.number("us")))


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock beside a record; the record itself is exchanged whole, so a lock on it would hold a file gone."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path.with_name(path.name + ".lock"), "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, record: Mapping[str, Any]) -> None:
    """Exchange the file for a new one, at once: a run that is stopped leaves the last one."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(record, indent=1) + "\n")
        # a record is for others to read, as any file that is committed
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
