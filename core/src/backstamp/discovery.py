"""Third step of the flow: installed distributions → each plugin's declarations, and every failure with its cause.

In: the entry points of the group `backstamp.plugins` along a search path, and the plugins of this process. Out: a
`Discovery`. A wheel's `backstamp.json` is read as data, located without importing its package; only where it is absent
(an editable install) is `plugin.py` imported and validated by pluggy. One plugin never breaks another, and no cause is
lost: `KeyboardInterrupt` passes, everything else is kept on a `Failure`.

.. versionadded:: 0.1
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from backstamp import API_VERSION
from backstamp.contract import contract_of, note_of, upgrade
from backstamp.declared import JSON_NAME, Declared, carried_text, declared_from_json
from backstamp.installed import GROUP, Entry, Installed, entries_of, list_installed
from backstamp.loading import import_plugin
from backstamp.ownership import Owners
from backstamp.plan_rows import PluginRef
from backstamp.text import canonical, plain

if TYPE_CHECKING:
    from importlib_metadata import Distribution

    from backstamp.registration import Registered

__all__ = [
    "GROUP",
    "JSON_NAME",
    "Discovery",
    "Failure",
    "Found",
    "check_entry",
    "discover",
    "distributions_of",
    "import_plugin",
    "read_again",
    "unmatched",
]

#: A plugin module is a table of a few hundred rows; what is larger is not read for its names.
_SOURCE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plugin whose declarations were read.

    `packages` are the top-level packages its factories may lie in; `origin` says how it was read and from where, and
    `contract` by which version of the plugin contract.
    """

    plugin: PluginRef
    declared: Declared
    packages: frozenset[str]
    module: str
    origin: str
    contract: str = API_VERSION


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
    """Everything found along one search path; `notes` are facts `backstamp doctor` prints (shadowed, skipped).

    `parent_only` are names that a parent process registered by hand and this process did not.
    """

    found: tuple[Found, ...]
    failures: tuple[Failure, ...]
    notes: tuple[str, ...] = ()
    parent_only: frozenset[str] = frozenset()


class HasPlugins(Protocol):
    """A `Discovery` or a `Catalogue`."""

    @property
    def found(self) -> tuple[Found, ...]: ...

    @property
    def failures(self) -> tuple[Failure, ...]: ...


def discover(path: Sequence[str] | None = None) -> Discovery:
    """Find every plugin along `path` (default `sys.path`), and those of this process, in order of plugin name.

    Two metadata folders of one distribution count once, the first on the path wins. A distribution found through the
    current directory is noted and not loaded.
    """
    from backstamp.registration import registered, registered_elsewhere

    listing = list_installed(path)
    notes = list(listing.notes)
    owners = Owners(listing.everything)
    outcomes: list[Found | Failure] = [_of_this_process(item) for item in registered()]
    for installed in listing.plugins:
        for entry in entries_of(installed, notes):
            outcomes.append(_read(installed, entry, owners, notes))
    found = tuple(sorted((item for item in outcomes if isinstance(item, Found)), key=lambda item: item.plugin))
    failures = tuple(sorted((item for item in outcomes if isinstance(item, Failure)), key=lambda item: item.plugin))
    notes += _shared_names((*found, *failures))
    return Discovery(
        found=found, failures=failures, notes=tuple(dict.fromkeys(notes)), parent_only=registered_elsewhere()
    )


def check_entry(installed: Installed, entry: Entry, owners: Owners, who: str) -> tuple[str, frozenset[str]]:
    """The contract version a plugin is read by and the packages that are its own, before anything of it is imported.

    Raises:
        ImportError: another contract, none, or a module in another distribution's package. ValueError: the entry or a
        requirement cannot be read.
    """
    if entry.fault:
        raise ValueError(entry.fault)
    contract = contract_of(installed.requires, who)
    return contract, owners.packages_of(installed, entry.target.partition(":")[0])


def read_again(found: Found) -> Declared:
    """What a plugin's module says now, read by the contract version it was found with; it is imported.

    Raises whatever `import_plugin` raises.
    """
    return upgrade(import_plugin(found.module), found.contract)


def distributions_of(plugins: HasPlugins) -> tuple[str, ...]:
    """The distributions whose plugins were found, failed ones too, in order."""
    found = {item.plugin.distribution for item in plugins.found}
    return tuple(sorted(found | {item.plugin.distribution for item in plugins.failures}))


def unmatched(plugins: HasPlugins, names: Iterable[str]) -> tuple[str, ...]:
    """The names of an allow or deny list that no distribution found here has, in order, as they were written.

    Source: vllm #43987, where an allow list named a plugin that discovery had never found.
    """
    known = {canonical(name) for name in distributions_of(plugins)}
    return tuple(sorted({name for name in names if canonical(name.strip()) not in known}))


def _of_this_process(item: Registered) -> Found:
    from backstamp.registration import IN_PROCESS

    plugin = PluginRef(item.name, IN_PROCESS, "unversioned")
    return Found(
        plugin=plugin, declared=item.declared, packages=item.packages, module=item.module, origin="this process"
    )


def _read(installed: Installed, entry: Entry, owners: Owners, notes: list[str]) -> Found | Failure:
    plugin = PluginRef(entry.name, installed.name, installed.version)
    who = f"plugin {plugin.name} ({plugin.distribution} {plugin.version})"
    module = entry.target.partition(":")[0]
    try:
        contract, packages = check_entry(installed, entry, owners, who)
        declared, origin = _declarations(installed, entry.target, who)
        note = note_of(who, contract)
        if note is not None:
            notes.append(note)
        return Found(
            plugin=plugin,
            declared=upgrade(declared, contract),
            packages=packages,
            module=entry.target,
            origin=origin,
            contract=contract,
        )
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise SystemExit, or anything else, and must not take others down
        seen = frozenset() if entry.fault else _seen_in_source(module, installed.distribution)
        names = frozenset({plugin.name, entry.written}) | seen
        return Failure(plugin=plugin, entry=entry.target, cause=_cause(error), error=error, names=names)


def _declarations(installed: Installed, target: str, who: str) -> tuple[Declared, str]:
    """What a plugin declares, from the JSON it carries or, where there is none, from its module; and which."""
    module = target.partition(":")[0]
    folder = module.rpartition(".")[0].replace(".", "/")
    carried = Path(str(installed.distribution.locate_file(f"{folder}/{JSON_NAME}")))
    text = carried_text(carried, installed.root, who) if folder else None
    if text is not None:
        return declared_from_json(text, who), f"data {carried}"
    declared = import_plugin(target)
    return declared, f"module {getattr(sys.modules[module], '__file__', module)}"


def _cause(error: BaseException) -> str:
    """An exception as one line; one whose own text raises is named by its type."""
    try:
        return plain(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        raise
    except BaseException:
        return plain(f"{type(error).__name__}, which cannot say why")


def _shared_names(outcomes: Iterable[Found | Failure]) -> list[str]:
    """A note for every plugin name that two distributions use: allowed, and a source of confusion."""
    owners: dict[str, dict[str, None]] = {}
    for item in outcomes:
        owners.setdefault(item.plugin.name, {})[item.plugin.distribution] = None
    return [f"plugin name {name!r} is used by {' and '.join(used)}" for name, used in owners.items() if len(used) > 1]


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
        if not located.is_file() or located.stat().st_size > _SOURCE_BYTES:
            return frozenset()
        tree = ast.parse(located.read_text("utf-8"))
    except (OSError, SyntaxError, ValueError, ImportError, RecursionError, MemoryError):
        return frozenset()
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("kernel", "key") and isinstance(node.value, ast.Constant):
            names.add(str(node.value.value))
    return frozenset(names)
