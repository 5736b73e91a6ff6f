"""Where entry classes come from: a folder, an installed engine, or what installed plugins declare.

In: what the operator pointed at. Out: a `Gathered`: the tree to read them from, the rows that list them, the engines
whose rules apply, and the pairs that somebody declared. A folder and plugins are read without importing what is read;
an engine's models are read from source too, and its registry is asked, which imports it, for what plugins added.

.. versionadded:: 0.2
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backstamp.discovery import discover, distributions_of
from backstamp.entry_classes.engines import ENGINES, PLATFORMS, Engine
from backstamp.entry_classes.facts import Listed, Trouble
from backstamp.entry_classes.live import ask_registry
from backstamp.entry_classes.names import Names
from backstamp.entry_classes.tables import join, list_classes
from backstamp.entry_classes.tree import Tree, need_griffe
from backstamp.errors import BadInput
from backstamp.text import canonical, near, plain

__all__ = ["Gathered", "from_engine", "from_folder", "from_plugins", "row_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What there is to compare.

    Attributes:
        subject: what was pointed at, as reports say it. rows: every entry class, once.
        declared: draft → targets, by `EntryPair`s. notes: what is worth knowing and no fault.
    """

    subject: str
    tree: Tree
    rows: tuple[Listed, ...]
    engines: tuple[Engine, ...]
    declared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    troubles: tuple[Trouble, ...] = ()
    notes: tuple[Trouble, ...] = ()


def from_folder(folder: Path, *, beside: Path | None = None) -> Gathered:
    """The entry classes that the modules of a folder list.

    Findings show paths relative to the folder, or to `beside` where the folder lies under it.

    Raises:
        BadInput: no such folder, or no Python file in it. NotInstalled: griffe is missing.
    """
    need_griffe()
    tree = Tree.of_folder(folder, beside)
    table = list_classes(tree, Names(tree, PLATFORMS[0]))
    rows = join(table.rows)
    return Gathered(subject=str(folder), tree=tree, rows=rows, engines=table.engines, troubles=table.troubles)


def from_engine(name: str) -> Gathered:
    """The entry classes of an installed engine: those its model folder lists, and those its live registry adds.

    Raises:
        BadInput: an engine that is not known, or not installed. NotInstalled: griffe is missing.
    """
    if name not in ENGINES:
        raise BadInput("--engine", needed=f"one of {', '.join(ENGINES)}", found=name)
    need_griffe()
    engine = ENGINES[name]
    # finding a top-level package imports nothing
    spec = importlib.util.find_spec(engine.package)
    places = [Path(place) / engine.models for place in (spec.submodule_search_locations or ())] if spec else []
    folder = next((place for place in places if place.is_dir()), None)
    if folder is None:
        found = "no package of that name" if spec is None else f"a package without {engine.models}"
        fix = "Install it here, or unpack its wheel and point --source at its model folder"
        raise BadInput(f"--engine {name}", needed=f"{name}, installed", found=found, fix=fix)
    tree = Tree.of_folder(folder)
    # a registry may list classes of other packages, which lie wherever they are installed
    tree.installed = True
    table = list_classes(tree, Names(tree, PLATFORMS[0]))
    listed = list(table.rows)
    notes: list[Trouble] = []
    try:
        known = {arch for row in listed for arch in row.archs}
        listed += [row for row in ask_registry(engine) if not known & {*row.archs}]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # importing an engine may raise anything
        text = plain(f"was not asked for what plugins added: {type(error).__name__}: {error}")
        notes.append(Trouble("live-registry", engine.registry, text))
    rows = join(listed)
    return Gathered(subject=name, tree=tree, rows=rows, engines=(engine,), troubles=table.troubles, notes=tuple(notes))


def from_plugins(distribution: str | None = None) -> Gathered:
    """The classes of every `EntryPair` that installed plugins declare, or one distribution's.

    Raises:
        BadInput: no plugin of that distribution is installed. NotInstalled: griffe is missing.
    """
    need_griffe()
    found = discover()
    known = distributions_of(found)
    if distribution is not None and canonical(distribution) not in {canonical(name) for name in known}:
        close = near(distribution, list(known))
        fix = f"Did you mean {close}?" if close else "Install it here"
        needed = f"a distribution with a plugin: {', '.join(known) or 'none is installed'}"
        raise BadInput("backstamp parity", needed=needed, found=distribution, fix=fix)

    def asked(name: str) -> bool:
        return distribution is None or canonical(name) == canonical(distribution)

    pairs = [pair for item in found.found if asked(item.plugin.distribution) for pair in item.declared.entry_classes]
    troubles = [
        Trouble("unread-plugin", item.plugin.distribution, f"needs declarations that can be read, got {item.cause}")
        for item in found.failures
        if asked(item.plugin.distribution)
    ]
    rows: list[Listed] = []
    declared: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        rows += [row_of(pair.draft, draft=True), row_of(pair.target, draft=False)]
        declared[pair.draft] = (*declared.get(pair.draft, ()), pair.target)
    return Gathered(
        subject=distribution or "installed plugins",
        tree=Tree(installed=True),
        rows=tuple(row._replace(label=row.archs[0]) for row in join(rows)),
        engines=tuple(ENGINES.values()),
        declared=declared,
        troubles=tuple(troubles),
    )


def row_of(path: str, *, draft: bool | None = None) -> Listed:
    """A row for "module:Class"."""
    module, _, name = path.partition(":")
    return Listed((path,), module, name, draft, path)
