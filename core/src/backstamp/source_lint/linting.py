"""The whole check: every Python file below a path is read once, and each rule says what it found.

In: a path, and what the caller knows of names. Out: one `Report`, an outcome a rule. Files that the list allows are
left out; an entry of the list that nothing needs is a fault itself. Where there is no Python file, nothing ran.

.. versionadded:: 0.2
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from backstamp.errors import BadInput
from backstamp.findings import Finding, Outcome, Report
from backstamp.source_lint import alias_leaf, allow_list, base_field, container_children, none_is_yes
from backstamp.source_lint.source import UNREADABLE, Source, read_source, unreadable
from backstamp.text import plain

__all__ = ["BASE_FIELDS", "RULES", "WHAT_TO_KNOW", "lint_source"]

BASE_FIELDS: Final = ("attention_backend",)
#: Every rule by name, with why it is one and what to do about a finding.
WHAT_TO_KNOW: Final[dict[str, tuple[str, str]]] = {
    UNREADABLE: ("no rule can look at a file that is no Python", "Correct it, or list it with its reason"),
    **{rule.RULE: (rule.WHY, rule.FIX) for rule in (base_field, alias_leaf, container_children, none_is_yes)},
    allow_list.RULE: ("the list of exceptions only shrinks", "Drop what nothing needs"),
}
#: The rules a list may name.
RULES: Final = tuple(name for name in WHAT_TO_KNOW if name != allow_list.RULE)


def lint_source(
    path: str | Path,
    *,
    fields: Sequence[str] = BASE_FIELDS,
    aliases: frozenset[str] = frozenset(),
    config: str | Path | None = None,
) -> Report:
    """Check the source at a path, a folder or one file.

    Args:
        fields: names of the base field, as this engine calls it. aliases: keys that are never kernels.
        config: the list of exceptions; else `backstamp-lint.toml` at the path or above it, within its repository.

    Raises:
        BadInput: the path or the list is not there, or a field or an alias is no name.
    """
    place = Path(os.path.abspath(path))
    _check_arguments(place, fields, aliases)
    found = Path(os.path.abspath(config)) if config is not None else allow_list.find_list(place)
    folder = place if place.is_dir() else place.parent
    root = found.parent if found is not None and folder.is_relative_to(found.parent) else folder
    allowed = allow_list.read_list(found, _name(found, root), RULES) if found is not None else None
    started = time.perf_counter()
    run = _Run(root, fields, aliases)
    with _no_collection():
        for file in python_files(place):
            run.read(file)
        run.finish()
    return _report(str(path), run, allowed, time.perf_counter() - started)


def python_files(place: Path) -> Iterator[Path]:
    """Every Python file below a folder in order, or the one file; no hidden folder, cache or virtual environment."""
    if not place.is_dir():
        yield place
        return
    for folder, folders, files in os.walk(place):
        here = Path(folder)
        passed = _NOT_SOURCE | (_BUILT if any(name in files for name in _PROJECT) else frozenset())
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in passed
                            and not (here / name / "pyvenv.cfg").is_file())  # fmt: skip
        # a pipe or a link to nothing is no source
        yield from (here / name for name in sorted(files) if name.endswith(".py") and (here / name).is_file())


_NOT_SOURCE: Final = frozenset({"__pycache__", "node_modules"})
#: What building leaves beside a project's own file: copies of its source.
_BUILT: Final = frozenset({"build", "dist"})
_PROJECT: Final = ("pyproject.toml", "setup.py")


class _Run:
    """One pass over the files: what was read, what was found, and what only all files together can tell."""

    def __init__(self, root: Path, fields: Sequence[str], aliases: frozenset[str]) -> None:
        self.root, self.fields, self.aliases = root, fields, aliases
        self.files: dict[str, Path] = {}
        self.findings: list[Finding] = []
        self.classes: list[container_children.ClassFacts] = []
        self.declared: set[str] = set()

    def read(self, path: Path) -> None:
        """Look at one file."""
        file = _name(path, self.root)
        self.files[file] = path
        source = _source(path, file)
        if isinstance(source, Finding):
            self.findings.append(source)
            return
        try:
            # all of a file or none of it
            found = [*self._look(source)]
            classes, declared = [*container_children.classes_of(source)], {*alias_leaf.declared_in(source)}
        except RecursionError:
            self.findings.append(unreadable(file, "expressions nested too deeply"))
            return
        self.findings += found
        self.classes += classes
        self.declared |= declared

    def _look(self, source: Source) -> Iterator[Finding]:
        for field in self.fields:
            yield from base_field.base_field(source, field)
            yield from none_is_yes.none_is_yes(source, field)
        yield from alias_leaf.alias_leaf(source, self.aliases)

    def finish(self) -> None:
        """What all files together tell: classes with their bases, and factories that offers declare elsewhere."""
        self.findings += container_children.container_children(self.classes)
        functions: dict[str, list[str]] = {}
        for factory in sorted(self.declared):
            module, _, function = factory.partition(":")
            functions.setdefault(module.replace(".", "/"), []).append(function)
        for file, path in self.files.items():
            module = file.removesuffix(".py").removesuffix("/__init__")
            names = next((names for end, names in functions.items() if f"/{module}".endswith(f"/{end}")), [])
            source = _source(path, file) if names else None
            if isinstance(source, Source):
                self.findings += alias_leaf.untold(source, names)


def _report(subject: str, run: _Run, allowed: allow_list.AllowList | None, seconds: float) -> Report:
    every = sorted(dict.fromkeys(run.findings), key=lambda item: (item.file, item.line))
    may = {entry[:2] for entry in allowed.entries} if allowed is not None else set()
    reason = "" if run.files else "needs Python files, got none"
    outcomes = []
    for rule in RULES:
        kept = tuple(item for item in every if item.rule == rule and (item.rule, item.file) not in may)
        took = seconds if rule == UNREADABLE else 0.0
        outcomes.append(Outcome(check="source", name=rule, findings=kept, reason=reason, seconds=took))
    if allowed is not None:
        broken = {(item.rule, item.file) for item in every}
        dark = {file for rule, file in broken if rule == UNREADABLE}
        # of a file that no rule could look at, an entry may still be true
        looked_at = {(rule, file) for file in run.files for rule in RULES if rule == UNREADABLE or file not in dark}
        faults = (*allowed.faults, *allow_list.stale(allowed, looked_at - broken))
        outcomes.append(Outcome(check="source", name=allow_list.RULE, findings=faults, reason=reason))
    rules = {rule: f"{why[0].upper()}{why[1:]}. {fix}." for rule, (why, fix) in WHAT_TO_KNOW.items()}
    return Report(tool="backstamp lint", subject=plain(subject), outcomes=tuple(outcomes), rules=rules)


def _source(path: Path, file: str) -> Source | Finding:
    try:
        return read_source(file, path.read_bytes())
    except OSError as error:
        return unreadable(file, error.strerror or str(error))


def _name(path: Path, root: Path) -> str:
    """A path as findings write it: below the root, with forward slashes, and printable."""
    name = os.path.relpath(path, root).replace(os.sep, "/")
    return name.encode("utf-8", "backslashreplace").decode()


def _check_arguments(place: Path, fields: Sequence[str], aliases: frozenset[str]) -> None:
    if not place.exists():
        raise BadInput("lint", needed="a folder or a Python file", found=plain(str(place)), fix="Check the path")
    wrong = next((field for field in fields if not field.isidentifier()), None)
    if wrong is not None or not fields:
        raise BadInput("--field", needed="the name of a field", found=repr(wrong or ""))
    if not all(alias.strip() for alias in aliases):
        raise BadInput("--alias", needed="the name of an alias", found="an empty one")


@contextmanager
def _no_collection() -> Iterator[None]:
    """Trees go when the last name for them goes; looking for circles among millions of nodes costs a third more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
