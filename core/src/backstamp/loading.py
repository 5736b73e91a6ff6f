"""A plugin module or object → what it declares, registered and validated by pluggy.

In: an import string, or an object that is already here. Out: `Declared`, detached from the plugin's own objects. It
runs plugin code, so it is called only where no `backstamp.json` speaks for the plugin, or its kernel is built.

.. versionadded:: 0.2
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

from backstamp.declarations import Alias, EntryPair, FamilyDefault, FeatureDefault, Offer, RetiredSetting
from backstamp.declared import Declared

__all__ = ["declared_by", "import_plugin", "output_on_stderr"]

Row = TypeVar("Row")


def import_plugin(target: str) -> Declared:
    """Import a plugin module, let pluggy register and validate it, and ask its hooks.

    Raises whatever the plugin raises; pluggy's `PluginValidationError` where a hook is unknown or takes arguments the
    contract does not have; `AttributeError` where `module:attr` names nothing.
    """
    module_name, _, attribute = target.partition(":")
    with output_on_stderr():
        plugin: object = importlib.import_module(module_name.strip())
        for part in attribute.strip().split(".") if attribute else ():
            plugin = getattr(plugin, part)
        return declared_by(plugin, target)


def declared_by(plugin: object, who: str) -> Declared:
    """Everything a module or object with hookimpls declares.

    Raises:
        PluginValidationError: a hook is unknown or takes arguments the contract does not have. AttributeError: it
        implements no hook. TypeError: a hook answers other rows than its own.
    """
    import pluggy

    from backstamp import hookspecs

    manager = pluggy.PluginManager("backstamp")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise AttributeError(f"{who} implements no Backstamp hook; decorate backstamp_offers with hookimpl")
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
        # a subclass could answer one thing when it is checked and another when it is used
        if type(row) is not kind:
            raise TypeError(f"a hook must answer {kind.__name__} rows, got {type(row).__name__}")
        rows.append(_detached(row))
    return tuple(rows)


def _detached(row: Row) -> Row:
    """The row with mappings of its own: a plugin that is imported later cannot change what this one said."""
    if not is_dataclass(row) or isinstance(row, type):
        return row
    values = {item.name: getattr(row, item.name) for item in fields(row)}
    copies = {name: dict(value) for name, value in values.items() if isinstance(value, Mapping)}
    return replace(row, **copies) if copies else row


@contextlib.contextmanager
def output_on_stderr() -> Iterator[None]:
    """What a plugin or its kernel prints must not land in somebody's JSON, whether Python, a library or a child process
    writes it."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
