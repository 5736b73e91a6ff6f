"""Third step of the flow: installed distributions → each plugin's declarations, and every failure with its cause.

In: the entry points of the group `backstamp.plugins` along a search path. Out: a `Discovery`. A wheel's
`backstamp.json` is read as data, located without importing its package; only where it is absent (an editable install)
is `plugin.py` imported and validated by pluggy. One plugin never breaks another, and no cause is lost:
`KeyboardInterrupt` passes, everything else is kept on a `Failure`.

.. versionadded:: 0.1
"""

from __future__ import annotations

import configparser
import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import importlib_metadata

from backstamp.declarations import Alias, EntryPair, FamilyDefault, FeatureDefault, Offer, RetiredSetting
from backstamp.declared import Declared, declared_from_json
from backstamp.plan import PluginRef
from backstamp.text import plain

if TYPE_CHECKING:
    from importlib_metadata import Distribution

__all__ = ["GROUP", "Discovery", "Failure", "Found", "discover", "import_plugin"]

GROUP = "backstamp.plugins"
JSON_NAME = "backstamp.json"
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plugin whose declarations were read.

    `packages` are the top-level packages its factories may lie in; `origin` says how it was read and from where.
    """

    plugin: PluginRef
    declared: Declared
    packages: frozenset[str]
    module: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A plugin that did not load: who, its first cause as one line, and the exception itself.

    `names` are the keys it is known to own: its entry name and what its source can be seen to declare.
    """

    plugin: PluginRef
    entry: str
    cause: str
    error: BaseException | None
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """Everything found along one search path; `notes` are facts `backstamp doctor` prints (shadowed, skipped)."""

    found: tuple[Found, ...]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...] = ()
    parent_only: frozenset[str] = frozenset()


def discover(path: Sequence[str] | None = None) -> Discovery:
    """Find every plugin along `path` (default `sys.path`), in order of plugin name.

    Two metadata folders of one distribution count once, the first on the path wins. A distribution found through the
    current directory is noted and not loaded.
    """
    found: list[Found] = []
    failures: list[Failure] = []
    notes: list[str] = []
    seen: dict[str, str] = {}
    for distribution, text in _with_plugins(path, notes):
        name, version = _identity(distribution)
        where = _root(distribution)
        canonical = name.lower().replace("_", "-").replace(".", "-")
        # before it is counted: a folder somebody stands in must not hide the installed distribution either
        if _is_current_directory(where):
            notes.append(f"{name}: found through the current directory {where}, not loaded; install it to use it")
            continue
        if canonical in seen:
            notes.append(f"{name}: found again under {where}; {seen[canonical]} comes first and is used")
            continue
        seen[canonical] = where
        for entry, target in _entries(text):
            plugin = PluginRef(entry, name, version)
            outcome = _read(plugin, target, distribution)
            if isinstance(outcome, Found):
                found.append(outcome)
            else:
                failures.append(outcome)
    return Discovery(
        found=tuple(sorted(found, key=lambda item: item.plugin)),
        failures=tuple(sorted(failures, key=lambda item: item.plugin)),
        notes=tuple(notes),
    )


def import_plugin(target: str) -> Declared:
    """Import a plugin module, let pluggy register and validate it, and ask its hooks.

    Raises whatever the plugin raises; pluggy's `PluginValidationError` where a hook is unknown or takes arguments the
    contract does not have; `AttributeError` where `module:attr` names nothing.
    """
    import pluggy

    from backstamp import hookspecs

    module_name, _, attribute = target.partition(":")
    # what a plugin prints at import must not land in somebody's JSON
    with contextlib.redirect_stdout(sys.stderr):
        plugin: object = importlib.import_module(module_name.strip())
    for part in attribute.strip().split(".") if attribute else ():
        plugin = getattr(plugin, part)
    manager = pluggy.PluginManager("backstamp")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise AttributeError(f"{target} implements no Backstamp hook; decorate backstamp_offers with hookimpl")
    hook = manager.hook
    return Declared(
        offers=_rows(Offer, hook.backstamp_offers()),
        aliases=_rows(Alias, hook.backstamp_aliases()),
        entry_classes=_rows(EntryPair, hook.backstamp_entry_classes()),
        retired_settings=_rows(RetiredSetting, hook.backstamp_retired_settings()),
        family_defaults=_rows(FamilyDefault, hook.backstamp_family_defaults()),
        feature_defaults=_rows(FeatureDefault, hook.backstamp_feature_defaults()),
    )


def _rows(kind: type[Row], answers: Iterable[Iterable[object]]) -> tuple[Row, ...]:
    rows: list[Row] = []
    for row in (row for answer in answers for row in answer):
        if not isinstance(row, kind):
            raise TypeError(f"a hook must answer {kind.__name__} rows, got {type(row).__name__}")
        rows.append(row)
    return tuple(rows)


def _with_plugins(path: Sequence[str] | None, notes: list[str]) -> Iterable[tuple[Distribution, str]]:
    found = importlib_metadata.distributions() if path is None else importlib_metadata.distributions(path=list(path))
    for distribution in found:
        try:
            text = distribution.read_text("entry_points.txt")
        except (OSError, ValueError) as cause:
            notes.append(
                plain(f"{_folder(cast('Distribution', distribution))}: entry_points.txt is unreadable: {cause}")
            )
            continue
        # most installed distributions are no plugins: look at the text before parsing anything
        if text and GROUP in text:
            yield cast("Distribution", distribution), text


def _identity(distribution: Distribution) -> tuple[str, str]:
    """Name and version; a metadata file that lacks them (empty, cut short) is named by its folder, version unknown."""
    stem, _, version = _folder(distribution).rpartition(".")[0].partition("-")
    try:
        return str(distribution.metadata["Name"] or stem), distribution.version or "unknown"
    # importlib_metadata raises KeyError, or a FileNotFoundError of its own, depending on its version
    except (KeyError, OSError, ValueError, TypeError):
        return stem or "unnamed", version or "unknown"


def _folder(distribution: Distribution) -> str:
    # private, and the only way to the folder's name where the metadata itself cannot be read
    return Path(str(getattr(distribution, "_path", "unnamed.dist-info"))).name


def _entries(text: str) -> list[tuple[str, str]]:
    parser = configparser.ConfigParser(delimiters="=", interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        parser.read_string(text)
    except configparser.Error as cause:
        return [("unreadable", f"!{cause}")]
    return parser.items(GROUP) if parser.has_section(GROUP) else []


def _read(plugin: PluginRef, target: str, distribution: Distribution) -> Found | Failure:
    module = target.partition(":")[0].strip()
    folder = module.rpartition(".")[0].replace(".", "/")
    try:
        if not plugin.name.strip() or target.startswith("!"):
            raise ValueError(f"entry point {plugin.name!r} = {target!r} is not readable")
        _check_contract(distribution)
        carried = Path(str(distribution.locate_file(f"{folder}/{JSON_NAME}")))
        if folder and carried.is_file():
            declared = declared_from_json(carried.read_text("utf-8"), f"plugin {plugin.name} ({plugin.distribution})")
            origin = f"data {carried}"
        else:
            declared = import_plugin(target)
            origin = f"module {getattr(sys.modules[module], '__file__', module)}"
        packages = frozenset({module.partition(".")[0], *(distribution.read_text("top_level.txt") or "").split()})
        return Found(plugin=plugin, declared=declared, packages=packages, module=target, origin=origin)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise SystemExit, or anything else, and must not take others down
        cause = plain(f"{type(error).__name__}: {error}")
        names = frozenset({plugin.name}) | _seen_in_source(module, distribution)
        return Failure(plugin=plugin, entry=target, cause=cause, error=error, names=names)


def _check_contract(distribution: Distribution) -> None:
    """Refuse a plugin whose own requirement on backstamp excludes this contract version."""
    from packaging.requirements import Requirement

    from backstamp import API_VERSION

    for text in distribution.requires or ():
        if not text.lower().startswith("backstamp"):
            continue
        requirement = Requirement(text)
        if requirement.name.lower() == "backstamp" and (requirement.marker is None or requirement.marker.evaluate()):
            if not requirement.specifier.contains(f"{API_VERSION}.0", prereleases=True):
                raise ImportError(f"needs contract backstamp{requirement.specifier}, this core has {API_VERSION}")
            return
    raise ImportError("declares no contract: its metadata needs `Requires-Dist: backstamp` with a range")


def _seen_in_source(module: str, distribution: Distribution) -> frozenset[str]:
    """Kernel and alias names written as literals in a plugin module that does not load, read without running it."""
    import ast
    import importlib.util

    try:
        parts = module.split(".")
        located = Path(str(distribution.locate_file("/".join(parts) + ".py")))
        if not located.is_file():
            # finding the top-level package runs none of its code; importing a parent package would
            spec = importlib.util.find_spec(parts[0])
            if spec is None or spec.origin is None:
                return frozenset()
            located = Path(spec.origin)
            if len(parts) > 1:
                located = located.parent.joinpath(*parts[1:]).with_suffix(".py")
        tree = ast.parse(located.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, ImportError):
        return frozenset()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("kernel", "key") and isinstance(node.value, ast.Constant):
            names.add(str(node.value.value))
    return frozenset(names)


def _root(distribution: Distribution) -> str:
    return str(Path(str(distribution.locate_file(""))).resolve())


def _is_current_directory(root: str) -> bool:
    # an installed tree is never the bare current directory: site folders end in site-packages or dist-packages
    here = os.path.realpath(os.getcwd())
    return root == here and not root.endswith(("site-packages", "dist-packages"))
