"""Settings that no longer exist: told when found set, mapped where their value still means something.

In: a `Launch` with the settings found, and the tombstones plugins declare. Out: the launch with mapped requests in it,
and a warning for each. A retired setting is never accepted without effect and without a word.

Source: vLLM #50292, SGLang #1380.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from backstamp.first_party import is_trusted
from backstamp.launch import FLAGS, Launch, Request
from backstamp.plan_rows import Warn
from backstamp.text import plain

if TYPE_CHECKING:
    from backstamp.catalogue import Catalogue
    from backstamp.declarations import RetiredSetting

__all__ = ["without_retired"]


def without_retired(launch: Launch, catalogue: Catalogue) -> tuple[Launch, tuple[Warn, ...]]:
    """The launch with what retired settings still ask for, and what to say about each that is set.

    A mapped value asks as the operator would, and yields to a request the operator made by its own flag. Only a
    trusted distribution may map a setting to a key.
    """
    if not launch.settings or not catalogue.defaults.retired:
        return launch, ()
    warnings: list[Warn] = []
    keys = dict(launch.keys)
    for name, value in sorted(launch.settings.items()):
        if name not in catalogue.defaults.retired:
            continue
        setting, distribution = catalogue.defaults.retired[name]
        key = setting.values.get(value)
        if key is None or not is_trusted(distribution, launch.policy):
            warnings.append(Warn("retired", f"{_said(name, value)} is retired and ignored; use {setting.replacement}"))
            continue
        before = keys.get(setting.request)
        if before is not None and before.source == "operator" and before.value != key:
            text = f"{_said(name, value)} is retired and ignored beside {before.setting} {before.value}"
            warnings.append(Warn("retired", f"{text}; use {setting.replacement}"))
            continue
        if before is None or before.source != "operator":
            keys[setting.request] = Request(key, "operator", name)
        warnings.append(Warn("deprecated", _mapped(setting, value, key)))
    return replace(launch, keys=keys), tuple(warnings)


def _mapped(setting: RetiredSetting, value: str, key: str) -> str:
    flag = FLAGS.get(setting.request, setting.request)
    return f"{_said(setting.name, value)} is deprecated, read as {flag} {key}; use {setting.replacement}"


def _said(name: str, value: str) -> str:
    return f"{plain(name)}={plain(value)}"
