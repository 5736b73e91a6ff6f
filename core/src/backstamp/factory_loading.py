"""A row of the catalogue → its factory, imported; with it its plugin, when the declarations came from data.

In: one accepted row. Out: a callable. It imports that row's plugin and factory module, and no other's.

.. versionadded:: 0.1
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

from backstamp.catalogue import Catalogue, Row
from backstamp.errors import DeclarationError, FactoryImportFailed
from backstamp.factories import BuildRequest, Built
from backstamp.stamp import said

__all__ = ["Factory", "load_factory"]

Factory = Callable[[BuildRequest], Built]


def load_factory(row: Row, catalogue: Catalogue) -> Factory:
    """Import a row's factory, and its plugin module if the declarations came from data.

    Raises:
        FactoryImportFailed: the module or the callable is missing, or its import raises; the cause is chained.
        DeclarationError: `backstamp.json` no longer says what plugin.py says.
    """
    module_name, _, name = row.offer.factory.partition(":")
    who = f"kernel {row.offer.kernel!r} (plugin {row.plugin.name}, {row.plugin.distribution} {row.plugin.version})"
    try:
        _validate_plugin(row, catalogue)
        factory = getattr(importlib.import_module(module_name), name)
    except (KeyboardInterrupt, DeclarationError):
        raise
    except BaseException as cause:  # a plugin or a kernel library may raise anything at import, SystemExit included
        raise FactoryImportFailed(
            who,
            needed=f"factory {row.offer.factory} to import",
            found=said(cause),
            fix="Reinstall the plugin and its kernel library, or report it to the plugin's author",
        ) from cause
    if not callable(factory):
        raise FactoryImportFailed(who, needed=f"{row.offer.factory} to be callable", found=type(factory).__name__)
    loaded: Factory = factory
    return loaded


def _validate_plugin(row: Row, catalogue: Catalogue) -> None:
    from backstamp.discovery import read_again

    for found in catalogue.found:
        if found.plugin == row.plugin and found.origin.startswith("data "):
            if read_again(found) != found.declared:
                raise DeclarationError(
                    f"plugin {row.plugin.name} ({row.plugin.distribution} {row.plugin.version})",
                    needed="backstamp.json to say what plugin.py says",
                    found="two different declarations",
                    fix="Write backstamp.json anew with `backstamp declare` and reinstall",
                )
            return
