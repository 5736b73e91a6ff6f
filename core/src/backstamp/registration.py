"""Plugins of this process alone: registered by hand, found by `discover` beside the installed ones.

In: a name and a module or object with hookimpls. Out: a plugin of the distribution `<this process>`, and its names in
the environment of child processes, so that a worker that did not register it can say so. Nothing but names is handed
to children: a worker that needs the kernels registers them itself, or the plugin ships as an entry point.

.. versionadded:: 0.2
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from backstamp.declared import Declared
from backstamp.errors import AlreadyRegistered, DeclarationError, UnknownKey
from backstamp.loading import declared_by
from backstamp.soundness import faults_of
from backstamp.text import plain

__all__ = ["IN_PROCESS", "VARIABLE", "Registered", "register", "registered", "registered_elsewhere", "unregister"]

#: The distribution of every in-process plugin; the brackets make it a name no package index can hold.
IN_PROCESS: Final = "<this process>"
#: Kernel names and keys that this process or its parents registered, comma separated, percent-encoded where needed.
VARIABLE: Final = "BACKSTAMP_IN_PROCESS"


class Registered(NamedTuple):
    """One plugin of this process: its name, where it lies, what it declares, and where its factories lie."""

    name: str
    module: str
    declared: Declared
    packages: frozenset[str]


_registered: dict[str, Registered] = {}
_exported: set[str] = set()


def register(name: str, plugin: object) -> None:
    """Register a plugin of this process, checked by pluggy and for soundness like an installed one.

    Its factories may lie in any module: whoever can call this can run code here anyway.

    Raises:
        AlreadyRegistered: the name is taken in this process. DeclarationError: a row does not hold together.
        PluginValidationError, AttributeError, TypeError: as `backstamp.loading.declared_by`.
    """
    module = _where(plugin)
    taken = _registered.get(name)
    if taken is not None:
        raise AlreadyRegistered(
            f"plugin {plain(name)!r}",
            needed="a name that is free in this process",
            found=f"{taken.module} registered under it, and now {module}",
            fix="Unregister the first, or give the second a name of its own",
        )
    if not re.fullmatch(r"[\w.-]+", name):
        raise DeclarationError(
            f"plugin {plain(name)!r}", needed="a name of letters, digits, '_', '-' and '.'", found=repr(plain(name))
        )
    declared = declared_by(plugin, module)
    factories = {offer.factory.partition(":")[0].partition(".")[0] for offer in declared.offers}
    packages = frozenset({module.partition(":")[0].partition(".")[0], "__main__", *factories})
    faults = faults_of(declared, packages)
    if faults:
        raise DeclarationError(
            f"plugin {name!r} ({module})", needed="declarations that hold together", found="; ".join(faults)
        )
    _registered[name] = Registered(name, module, declared, packages)
    _export()


def unregister(name: str) -> None:
    """Forget a plugin of this process; catalogues already built keep what they hold.

    Raises:
        UnknownKey: nothing is registered under the name.
    """
    if name not in _registered:
        known = ", ".join(sorted(_registered)) or "nothing is registered"
        raise UnknownKey(f"plugin {plain(name)!r}", needed=f"a registered name ({known})", found="an unknown one")
    del _registered[name]
    _export()


def registered() -> tuple[Registered, ...]:
    """The plugins of this process, in name order."""
    return tuple(_registered[name] for name in sorted(_registered))


def registered_elsewhere() -> frozenset[str]:
    """Names that a parent process registered and this one did not."""
    return _in_environment() - _names(_registered.values())


def _export() -> None:
    """Bring the environment up to date; what a parent exported stays."""
    global _exported
    inherited = _in_environment() - _exported
    # a name both registered leaves with its parent, not with this process
    own = _names(_registered.values())
    names = sorted(inherited | own)
    _exported = set(own - inherited)
    if names:
        os.environ[VARIABLE] = ",".join(quote(name, safe="", errors="replace") for name in names)
    else:
        os.environ.pop(VARIABLE, None)


def _names(plugins: Iterable[Registered]) -> frozenset[str]:
    rows = [item.declared for item in plugins]
    kernels = [offer.kernel for declared in rows for offer in declared.offers]
    return frozenset([*kernels, *(alias.key for declared in rows for alias in declared.aliases)])


def _in_environment() -> frozenset[str]:
    words = os.environ.get(VARIABLE, "").split(",")
    return frozenset(filter(None, (plain(unquote(word)) for word in words)))


def _where(plugin: object) -> str:
    """Where a module or object lies, as "module" or "module:name"."""
    kind = type(plugin)
    name = getattr(plugin, "__name__", None)
    if kind.__name__ == "module":
        return str(name)
    home = plugin if isinstance(plugin, type) else kind
    return f"{home.__module__}:{home.__qualname__}"
