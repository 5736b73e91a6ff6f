"""Entry classes of this process: classes themselves, and what an engine's registry lists.

In: a class, or the name of an engine that is importable. Out: the same `EntryClass` and `Listed` that reading source
gives. Asking a registry imports the engine; nothing else here does.

.. versionadded:: 0.2
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from backstamp.entry_classes.engines import Engine
from backstamp.entry_classes.facts import EntryClass, Listed

__all__ = ["ask_registry", "live_class"]


def live_class(kind: type, hooks: Iterable[str]) -> EntryClass:
    """A class as a loader would ask it: a hook counts where the class has something under its name."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        file, line = inspect.getsourcefile(kind) or "", inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        # made by code, or its file is gone
        file, line = "", 0
    has = frozenset(hook for hook in hooks if getattr(kind, hook, None) is not None)
    return EntryClass(name=name, archs=(name, kind.__name__), file=file, line=line, hooks=has)


def ask_registry(engine: Engine) -> tuple[Listed, ...]:
    """Every row of an engine's `ModelRegistry`, with what plugins added; the engine is imported.

    Raises whatever importing the engine raises.
    """
    registry = importlib.import_module(engine.registry).ModelRegistry
    return tuple(_rows(cast("Mapping[str, object]", registry.models)))


def _rows(models: Mapping[str, object]) -> Iterator[Listed]:
    for arch, item in models.items():
        # vLLM keeps what is not imported yet as (module_name, class_name), and what is as model_cls
        kind = getattr(item, "model_cls", item)
        if isinstance(kind, type):
            yield Listed((arch,), kind.__module__, kind.__qualname__)
        elif hasattr(item, "module_name") and hasattr(item, "class_name"):
            yield Listed((arch,), str(item.module_name), str(item.class_name))
