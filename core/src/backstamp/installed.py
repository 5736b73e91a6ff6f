"""Before any plugin is read: which installed distributions have plugins, and what their metadata folders say.

In: a search path. Out: one `Installed` a distribution, the entries it names, and a note for every folder that was
passed over (seen twice, shadowed, half removed, in the current directory). It reads metadata and imports nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import importlib_metadata

from backstamp.text import canonical, plain

if TYPE_CHECKING:
    from importlib_metadata import Distribution

__all__ = [
    "GROUP",
    "Entry",
    "Installed",
    "Listing",
    "entries_of",
    "folder_of",
    "label",
    "list_installed",
    "stem_of",
]

#: Entry-point group that plugins register in.
GROUP: Final = "backstamp.plugins"
UNKNOWN: Final = "unknown"
_LABEL_CHARACTERS: Final = 100
#: What an entry point's value may be, as the packaging specification has it; extras are read and not used.
_TARGET: Final = re.compile(r"(?P<module>[\w.]+)\s*(?::\s*(?P<attr>[\w.]+)\s*)?(?:\[[^\]]*\]\s*)?")


class Entry(NamedTuple):
    """One entry point: its name, its target `module` or `module:attr`, why it cannot be read, if so, and its name as
    it is written."""

    name: str
    target: str
    fault: str = ""
    written: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """One distribution with plugins; `folder` is its metadata, `root` the real folder its packages lie in."""

    distribution: Distribution
    name: str
    version: str
    folder: str
    root: str
    text: str
    requires: tuple[str, ...]
    whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What lies along a path: distributions with plugins, every distribution that may own packages, and notes."""

    plugins: tuple[Installed, ...]
    everything: tuple[Distribution, ...]
    notes: tuple[str, ...]


def list_installed(path: Sequence[str] | None = None) -> Listing:
    """Every distribution with plugins along `path` (default `sys.path`), once each.

    The first whole metadata folder of a name is used. A folder without metadata gives way to a whole one wherever
    that lies, and what is found through the current directory is noted, not listed.
    """
    notes: list[str] = []
    everything: list[Distribution] = []
    local: list[tuple[str, str]] = []
    candidates: list[Installed] = []
    for distribution, text in _with_texts(path, notes):
        if GROUP not in text:
            everything.append(distribution)
            continue
        folder = folder_of(distribution)
        if Path(folder).name.startswith("~"):
            notes.append(plain(f"{folder}: left behind by an interrupted uninstall, not read; delete it"))
            continue
        installed = _installed(distribution, folder, text, notes)
        if not os.path.isabs(folder) or _is_current_directory(installed.root):
            local.append((installed.name, installed.root))
            continue
        everything.append(distribution)
        candidates.append(installed)
    plugins = _one_each(candidates, notes)
    for installed in plugins.values():
        notes += _shadowed(installed, path)
    for name, where in local:
        used = plugins.get(canonical(name))
        remedy = f"{used.folder} is used" if used is not None else "install it to use it"
        notes.append(plain(f"{name}: found through the current directory {where}, not loaded; {remedy}"))
    return Listing(plugins=tuple(plugins.values()), everything=tuple(everything), notes=tuple(notes))


def entries_of(installed: Installed, notes: list[str]) -> tuple[Entry, ...]:
    """The entries of the group `backstamp.plugins`, one for each name.

    A name is a label: runs of characters that are neither letters, digits nor "_" become one "_", and a name of which
    nothing is left is skipped; either is noted. Two entries of one name with different targets are a fault of that
    name.
    """
    entries: dict[str, Entry] = {}
    for raw, value in _pairs(installed.text):
        name = re.sub(r"\W+", "_", raw)[:_LABEL_CHARACTERS]
        who = f"{installed.name}: entry {raw!r}"
        if not name.strip("_"):
            notes.append(plain(f"{who} = {value!r} has no usable name, skipped"))
            continue
        if name != raw:
            notes.append(plain(f"{who} is read as {name!r}: names are letters, digits and '_'"))
        match = _TARGET.fullmatch(value)
        target = ":".join(filter(None, match.groups())) if match else plain(value)
        fault = "" if match else f"entry point {name!r} = {plain(value)!r} is not readable"
        other = entries.get(name)
        if other is None:
            entries[name] = Entry(name, target, fault, raw)
        elif other.target != target:
            entries[name] = other._replace(fault=f"two entries of this name: {other.target} and {target}")
        else:
            notes.append(plain(f"{who} is listed twice, with one target"))
    return tuple(entries.values())


def label(text: str) -> str:
    """A name or version that a stranger chose, made printable and short."""
    return plain(text)[:_LABEL_CHARACTERS] or UNKNOWN


def folder_of(distribution: Distribution) -> str:
    """The metadata folder's path as the search path spells it."""
    # private, and the only way to the folder where the metadata itself cannot be read
    return str(getattr(distribution, "_path", "/unnamed.dist-info"))


def _with_texts(path: Sequence[str] | None, notes: list[str]) -> Iterable[tuple[Distribution, str]]:
    """Every metadata folder once, with its entry points ("" for none): lib64 is often a link to lib."""
    seen: set[str] = set()
    for distribution in _along(path):
        try:
            text = distribution.read_text("entry_points.txt") or ""
        except (OSError, ValueError) as cause:
            notes.append(plain(f"{folder_of(distribution)}: entry_points.txt is unreadable: {cause}"))
            continue
        # most installed distributions are no plugins: nothing more is asked of those
        if GROUP in text:
            real = os.path.realpath(folder_of(distribution))
            if real in seen:
                continue
            seen.add(real)
        yield distribution, text


def _installed(distribution: Distribution, folder: str, text: str, notes: list[str]) -> Installed:
    name, version, requires, whole = _metadata(distribution, folder)
    stem = stem_of(folder)
    if folder.endswith(".dist-info") and canonical(name) != canonical(stem):
        # a folder is named by the installer, its content by whoever wrote the wheel
        notes.append(plain(f"{folder}: its metadata claims the name {label(name)!r}; it is read as {label(stem)!r}"))
        name = stem
    root = str(Path(str(distribution.locate_file(""))).resolve())
    return Installed(
        distribution=distribution,
        name=label(name),
        version=label(version),
        folder=folder,
        root=root,
        text=text,
        requires=requires,
        whole=whole,
    )


def _metadata(distribution: Distribution, folder: str) -> tuple[str, str, tuple[str, ...], bool]:
    """Name, version, requirements, and whether the file has them; where it is empty or cut short, the folder's name
    speaks, and a version nobody tells is unknown."""
    stem, _, version = Path(folder).name.rpartition(".")[0].partition("-")
    try:
        # parsed once: each property of a distribution would read the file again
        text = distribution.metadata
        requires = text.get_all("Requires-Dist") or distribution.requires or ()
        whole = "Name" in text
        return str(text.get("Name", stem)), str(text.get("Version", UNKNOWN)), tuple(requires), whole
    # importlib_metadata raises a FileNotFoundError of its own, depending on its version
    except (KeyError, OSError, ValueError, TypeError, AttributeError):
        return stem or "unnamed", version or UNKNOWN, (), False


def _shadowed(installed: Installed, path: Sequence[str] | None) -> list[str]:
    """A note where metadata without plugins, of the same name, comes before the folder that is used.

    Source: vllm #43987, where a stale egg-info hid a plugin's new metadata.
    """
    for other in _along(path, installed.name):
        folder = folder_of(other)
        if folder == installed.folder:
            break
        if GROUP not in _entry_points(other):
            text = f"{installed.name}: {folder} comes first and names no plugin (stale metadata); read from"
            return [plain(f"{text} {installed.folder}")]
    return []


def _along(path: Sequence[str] | None, name: str | None = None) -> Iterable[Distribution]:
    context: dict[str, object] = {} if name is None else {"name": name}
    if path is not None:
        context["path"] = list(path)
    return cast("Iterable[Distribution]", importlib_metadata.distributions(**context))


def _entry_points(distribution: Distribution) -> str:
    try:
        return distribution.read_text("entry_points.txt") or ""
    except (OSError, ValueError):
        return ""


def _one_each(candidates: list[Installed], notes: list[str]) -> dict[str, Installed]:
    """The first of every name, whole folders before half-removed ones."""
    chosen: dict[str, Installed] = {}
    for installed in sorted(candidates, key=lambda item: not item.whole):
        used = chosen.setdefault(canonical(installed.name), installed)
        if used is not installed:
            notes.append(plain(f"{installed.name}: found again in {installed.folder}; {used.folder} is used"))
    return chosen


def _pairs(text: str) -> list[tuple[str, str]]:
    """The lines `name = value` of the group; a line without "=" is a name without a value."""
    pairs: list[tuple[str, str]] = []
    section = ""
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == GROUP and line and line[0] not in "#;":
            name, _, value = line.partition("=")
            pairs.append((name.strip(), value.strip()))
    return pairs


def stem_of(folder: str) -> str:
    """The distribution's name as its metadata folder spells it, without dots and runs; hundreds are asked."""
    name = folder.rpartition(os.sep)[2].rpartition(".")[0].partition("-")[0]
    return name.lower().replace("_", "-").replace(".", "-")


def _is_current_directory(root: str) -> bool:
    """Whether a folder is only importable because somebody stands in it; site folders are, wherever one stands."""
    if root != os.path.realpath(os.getcwd()):
        return False
    sites = {os.path.realpath(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return root not in sites
