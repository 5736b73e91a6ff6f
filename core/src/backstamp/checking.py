"""Whether declarations can be shipped: they import, are sound, `backstamp.json` says the same, the lint is quiet.

In: the modules of plugins, or none for every installed one, and the hosts to hold them against. Out: every `Flaw`, and
the same as outcomes, one a plugin. It imports the plugins it checks, and no kernel library.

.. versionadded:: 0.2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from backstamp.catalogue import build_catalogue
from backstamp.declared import Declared, declared_to_json
from backstamp.discovery import JSON_NAME, Discovery, Failure, Found, discover, import_plugin
from backstamp.errors import BadInput
from backstamp.findings import Finding, Outcome
from backstamp.host import HostFacts
from backstamp.lint import Flaw, lint
from backstamp.plan_rows import PluginRef
from backstamp.text import plain

__all__ = ["Checked", "check_installed", "check_modules"]


class Checked(NamedTuple):
    """What was checked, by plugin name, and every finding."""

    plugins: tuple[str, ...]
    flaws: tuple[Flaw, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One a plugin, with its findings."""
        return tuple(
            Outcome(
                check="declarations",
                name=f"plugin {name}",
                findings=tuple(
                    Finding(flaw.level, "declarations", f"{name}: {flaw.subject}", flaw.text, flaw.fix)
                    for flaw in self.flaws
                    if flaw.plugin == name
                ),
            )
            for name in self.plugins
        )


def check_modules(modules: Sequence[str], hosts: Sequence[HostFacts]) -> Checked:
    """Check these plugin modules among what else is installed, and tell what concerns them.

    Raises:
        BadInput: a module that does not exist.
    """
    installed = discover()
    taken = tuple(_freshly(module, installed) for module in dict.fromkeys(modules))
    return _check(installed, taken, hosts, others=False)


def check_installed(hosts: Sequence[HostFacts]) -> Checked:
    """Check every installed plugin, and all of them together."""
    installed = discover()
    taken = tuple(_freshly(found.module, installed) for found in installed.found)
    return _check(installed, taken, hosts, others=True)


def _check(
    installed: Discovery, taken: tuple[Found | Failure, ...], hosts: Sequence[HostFacts], *, others: bool
) -> Checked:
    fresh = {item.plugin for item in taken}
    catalogue = build_catalogue(
        Discovery(
            found=(
                *(item for item in installed.found if item.plugin not in fresh),
                *(item for item in taken if isinstance(item, Found)),
            ),
            failures=(
                *(item for item in installed.failures if item.plugin not in fresh),
                *(item for item in taken if isinstance(item, Failure)),
            ),
        )
    )
    carried = [flaw for item in taken if isinstance(item, Found) for flaw in _carried(item, must_be_there=not others)]
    names = {plugin.name for plugin in fresh}
    flaws = [flaw for flaw in lint(catalogue, hosts) if others or flaw.plugin in names]
    failed = {item.plugin.name for item in installed.failures} if others else set()
    return Checked(tuple(sorted(names | failed)), (*carried, *flaws))


def _freshly(module: str, installed: Discovery) -> Found | Failure:
    """A plugin as its module says it now, under the name it is installed by, if it is."""
    known = next((item for item in installed.found if item.module == module), None)
    failed = next((item for item in installed.failures if item.entry == module), None)
    top = module.partition(":")[0].partition(".")[0]
    plugin = known.plugin if known is not None else failed.plugin if failed is not None else PluginRef(top, top, "here")
    try:
        declared = import_plugin(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything at import, SystemExit included
        if isinstance(error, ModuleNotFoundError) and f"{module.partition(':')[0]}.".startswith(f"{error.name}."):
            needed, fix = "a plugin module that exists", "Name it as in its entry point, e.g. backstamp_cpu.plugin"
            raise BadInput(f"check {plain(module)}", needed=needed, found=plain(str(error)), fix=fix) from error
        cause = plain(f"{type(error).__name__}: {error}")
        return Failure(plugin=plugin, entry=module, cause=cause, error=error, names=frozenset({plugin.name}))
    if known is not None:
        return replace(known, declared=declared)
    return Found(plugin=plugin, declared=declared, packages=frozenset({top}), module=module, origin=f"module {module}")


def _carried(found: Found, *, must_be_there: bool) -> list[Flaw]:
    """Whether the file a wheel carries says what the module says."""
    module = found.module.partition(":")[0]
    path = Path(str(sys.modules[module].__file__)).with_name(JSON_NAME)
    fix = f"Write it with `backstamp declare {module}`"
    if not path.is_file():
        text = f"is not beside {module}: discovery runs plugin.py to read it"
        return [Flaw("fault" if must_be_there else "note", found.plugin.name, JSON_NAME, text, fix)]
    if not _says(path, found.declared):
        return [Flaw("fault", found.plugin.name, JSON_NAME, f"does not say what {module} says", fix)]
    return []


def _says(path: Path, declared: Declared) -> bool:
    try:
        return path.read_text("utf-8") == declared_to_json(declared)
    except (OSError, UnicodeDecodeError):
        return False
