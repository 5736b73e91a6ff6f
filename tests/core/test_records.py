"""A record that others may write is ignored, and every other one is JSON or one clear error."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from backstamp.errors import BadInput, UnsafeRecord
from backstamp.records import read_record, write_record

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX: files with an owner and a mode")


def record(folder: Path, mode: int = 0o644, text: str = '{"a": [1, null]}') -> Path:
    """A file with this mode, whatever the umask."""
    path = folder / "record.json"
    path.write_text(text, "utf-8")
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o444, 0o755])
def test_a_record_only_its_owner_writes_is_read(tmp_path: Path, mode: int) -> None:
    """Whoever may read it."""
    assert read_record(record(tmp_path, mode), "lock") == {"a": [1, None]}


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666, 0o622])
def test_a_record_that_others_may_write_is_ignored(tmp_path: Path, mode: int) -> None:
    """By group or by all; the error says how to mend it."""
    path = record(tmp_path, mode, text="not even JSON")
    with pytest.raises(UnsafeRecord, match="a record that others may write is ignored") as caught:
        read_record(path, "lock")
    assert caught.value.who == f"lock {path}"
    assert caught.value.found == f"mode {stat.filemode(stat.S_IFREG | mode)}"
    assert "chmod go-w" in caught.value.fix


@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_record_of_another_user_is_ignored(tmp_path: Path) -> None:
    """Its owner may write it at any time."""
    path = record(tmp_path)
    os.chown(path, 4711, -1)
    with pytest.raises(UnsafeRecord, match="a file of user 4711") as caught:
        read_record(path, "lock")
    assert "a record that others may write is ignored" in caught.value.needed


def test_the_file_a_link_leads_to_is_what_counts(tmp_path: Path) -> None:
    """A link's own mode says nothing."""
    link = tmp_path / "link.json"
    link.symlink_to(record(tmp_path, 0o666))
    with pytest.raises(UnsafeRecord):
        read_record(link, "lock")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        ('{"a": 1, "a": 2}', "'a' is there twice"),
    ],
    ids=["empty", "cut", "deep", "twice"],
)
def test_what_is_no_json_is_one_clear_error(tmp_path: Path, text: str, word: str) -> None:
    """A key that is there twice would be read one way here and another way elsewhere."""
    with pytest.raises(BadInput, match="needs readable JSON") as caught:
        read_record(record(tmp_path, text=text), "plan")
    assert word in caught.value.found
    assert not isinstance(caught.value, UnsafeRecord)


def test_what_is_no_text_is_one_clear_error(tmp_path: Path) -> None:
    """A pickle, for example."""
    path = tmp_path / "plan.pkl"
    path.write_bytes(b"\x80\x04\x95\xff")
    path.chmod(0o600)
    with pytest.raises(BadInput, match="readable JSON"):
        read_record(path, "plan")


def test_what_is_no_file_is_one_clear_error(tmp_path: Path) -> None:
    """Missing, a folder, or a pipe nobody writes to, which must not block."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, word in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (pipe, "prw")):
        with pytest.raises(BadInput) as caught:
            read_record(path, "lock")
        assert word in caught.value.found


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_what_was_written_is_read_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """`backstamp lock` must take its own files."""
    path = tmp_path / "new.json"
    before = os.umask(umask)
    try:
        write_record(path, json.dumps({"b": 1}))
    finally:
        os.umask(before)
    assert read_record(path, "lock") == {"b": 1}


def test_writing_over_an_open_file_closes_it_to_others(tmp_path: Path) -> None:
    """What is said now is ours, and must stay so."""
    path = record(tmp_path, 0o666)
    write_record(path, "[]")
    assert read_record(path, "lock") == []


def test_a_file_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    """No such folder."""
    with pytest.raises(BadInput, match="a file that can be written, got No such file"):
        write_record(tmp_path / "no" / "lock.json", "{}")
