"""The list of files that may break a rule, `backstamp-lint.toml`: each with its reason, and the list can only shrink.

In: the path that is linted, or the list's own. Out: the entries, a finding for each that is wrong in itself, and, once
the rules have run, for each that nothing needs any more. It never widens what it allows: one file, one rule.

.. versionadded:: 0.2
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from backstamp.errors import BadInput
from backstamp.findings import Finding

__all__ = ["LIST_NAME", "RULE", "AllowList", "Entry", "find_list", "read_list", "stale"]

LIST_NAME: Final = "backstamp-lint.toml"
RULE: Final = "allow-list"
_KEYS: Final = ("rule", "file", "reason")


class Entry(NamedTuple):
    """One file that may break one rule, and the line of its entry."""

    rule: str
    file: str
    line: int


class AllowList(NamedTuple):
    """A list as read: `path` as findings name it, sound entries, and what is wrong with the others."""

    path: str
    entries: tuple[Entry, ...]
    faults: tuple[Finding, ...]


def find_list(path: Path) -> Path | None:
    """The list in a folder or nearest above it, up to the root of its repository; in it alone, without a repository."""
    folder = path if path.is_dir() else path.parent
    folders = [folder, *folder.parents]
    root = next((at for at, parent in enumerate(folders) if (parent / ".git").exists()), 0)
    return next((found for parent in folders[: root + 1] if (found := parent / LIST_NAME).is_file()), None)


def read_list(path: Path, name: str, rules: Collection[str]) -> AllowList:
    """Every entry of a list; `name` is what its findings call it.

    Raises:
        BadInput: the file cannot be read, or Python 3.10 lacks the package that reads TOML.
    """
    loads = _loads()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise BadInput(f"list {path}", needed="a file that can be read", found=str(error)) from error
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
        table = loads(text)
    except ValueError as error:
        at = re.search(r"at line (\d+)", str(error))
        return AllowList(name, (), (_fault(name, int(at[1]) if at else 0, "TOML", str(error), "Correct it"),))
    faults = [_fault(name, 0, "[[allow]] tables alone", repr(key), "Drop it") for key in table if key != "allow"]
    listed = table.get("allow", [])
    if not isinstance(listed, list):
        return AllowList(
            name, (), (*faults, _fault(name, 0, "[[allow]], an array of tables", repr(listed), "Write it so"))
        )
    heads = [at for at, line in enumerate(text.split("\n"), 1) if re.match(r"\s*\[\[\s*allow\s*\]\]", line)]
    # entries written in line have no heads of their own
    lines = heads if len(heads) == len(listed) else [0] * len(listed)
    entries: list[Entry] = []
    for values, line in zip(listed, lines, strict=True):
        wrong = _wrong(values, path.parent, rules)
        if not wrong:
            entry = Entry(values["rule"], values["file"], line)
            same = [other for other in entries if other[:2] == entry[:2]]
            if not same:
                entries.append(entry)
                continue
            wrong = ("one entry for a rule and a file", f"a second for {entry.rule} in {entry.file}", "Drop one")
        faults.append(_fault(name, line, *wrong))
    return AllowList(name, tuple(entries), tuple(faults))


def _loads() -> Callable[[str], dict[str, object]]:
    """The reader of TOML."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]
        except ImportError as cause:
            needed = f"the package tomli, to read {LIST_NAME} with Python 3.10"
            raise BadInput("lint", needed=needed, found="none", fix="pip install 'backstamp[cli]'") from cause
    loads: Callable[[str], dict[str, object]] = tomllib.loads
    return loads


def _wrong(values: object, root: Path, rules: Collection[str]) -> tuple[str, str, str] | tuple[()]:
    """What is wrong with one entry by itself: needed, found, what to do."""
    if not isinstance(values, dict) or set(values) != set(_KEYS):
        found = ", ".join(map(str, values)) if isinstance(values, dict) else repr(values)
        return f"{', '.join(_KEYS)} and nothing else", found or "an empty table", "Write these three"
    rule, file, reason = (values[key] for key in _KEYS)
    if not all(isinstance(value, str) for value in (rule, file, reason)):
        return "text for each key", repr(next(v for v in (rule, file, reason) if not isinstance(v, str))), "Quote it"
    if rule not in rules:
        return f"a rule ({', '.join(rules)})", repr(rule), "Drop the entry, or correct the rule's name"
    if not reason.strip():
        return "the reason why the file may", "an empty one", "Say why, or correct the file and drop the entry"
    path = PurePosixPath(file)
    if "\\" in file or path.is_absolute() or ".." in path.parts or str(path) != file:
        return "the path of one file below this list's folder, with /", repr(file), "Write it as the finding does"
    if not (root / file).is_file():
        return "a file that is there", repr(file), "Drop the entry"
    return ()


def stale(found: AllowList, clean: Collection[tuple[str, str]]) -> Iterator[Finding]:
    """The entries that nothing needs: `clean` holds each rule with each file that was looked at and keeps it."""
    for entry in found.entries:
        if (entry.rule, entry.file) in clean:
            got = f"{entry.file}, which does not any more"
            yield _fault(found.path, entry.line, f"a file that breaks {entry.rule}", got, "Drop the entry")


def _fault(name: str, line: int, needed: str, found: str, fix: str) -> Finding:
    return Finding("fault", RULE, "the list", f"needs {needed}, got {found}", fix, name, line)
