"""Reads and writes the files a decision may rest on: plans, locks, measurements.

In: a path. Out: the parsed JSON of a file that only its owner, or root, can have written. A record that others may
write is ignored: it is refused before it is read. It never unpickles, and follows no import path.

POSIX only: elsewhere a file has no owner and mode in this sense, and the check is left to the folder's permissions.

.. versionadded:: 0.2
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Final

from backstamp.errors import BadInput, UnsafeRecord
from backstamp.text import plain

__all__ = ["read_record", "write_record"]

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def read_record(path: str | Path, who: str) -> object:
    """The JSON of a record; `who` is what the file is to its reader, for example "lock".

    Raises:
        UnsafeRecord: group or others may write the file, or it belongs to another user than this one and root.
        BadInput: the file is missing, is no regular file, or is not JSON.
    """
    label = f"{who} {plain(str(path))}"
    try:
        # the open file is what is asked about and read, so that it cannot be exchanged in between; a named pipe
        # would otherwise block here
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as file:
            _check_owner(os.fstat(descriptor), label)
            return json.loads(file.read().decode("utf-8"), object_pairs_hook=_no_key_twice)
    except OSError as cause:
        found = plain(cause.strerror or str(cause))
        raise BadInput(label, needed="a readable file", found=found) from cause
    except (ValueError, RecursionError) as cause:
        if isinstance(cause, BadInput):
            raise
        raise BadInput(label, needed="readable JSON", found=plain(str(cause))) from cause


def write_record(path: str | Path, text: str) -> None:
    """Write a record that `read_record` takes, whatever the umask.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            state = os.fstat(file.fileno())
            if os.name == "posix" and stat.S_ISREG(state.st_mode) and state.st_mode & _OTHERS:
                os.fchmod(file.fileno(), stat.S_IMODE(state.st_mode) & ~_OTHERS)
            file.write(text)
    except OSError as cause:
        found = plain(cause.strerror or str(cause))
        raise BadInput(plain(str(path)), needed="a file that can be written", found=found) from cause


def _check_owner(state: os.stat_result, label: str) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise BadInput(label, needed="a regular file", found=stat.filemode(state.st_mode))
    if os.name != "posix":
        return
    if state.st_mode & _OTHERS:
        raise UnsafeRecord(
            label,
            needed="a file that only its owner may write: a record that others may write is ignored",
            found=f"mode {stat.filemode(state.st_mode)}",
            fix="Look at what it says, then `chmod go-w` it",
        )
    if state.st_uid not in (0, os.geteuid()):
        raise UnsafeRecord(
            label,
            needed="a file of this user or of root: a record that others may write is ignored",
            found=f"a file of user {state.st_uid}, read by user {os.geteuid()}",
            fix="Copy it to a file of your own after looking at what it says",
        )


def _no_key_twice(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) != len(pairs):
        twice = next(name for name, _ in pairs if [key for key, _ in pairs].count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return record
