"""Which top-level packages are a distribution's own, so that no plugin builds with another's code.

In: the metadata of every distribution along a path. Out: for one plugin, the packages its factories may lie in. What
was installed (`RECORD`) counts before what is merely claimed (`top_level.txt`, an entry point); a package that another
distribution has the better claim to is not its own. It reads text and imports nothing.

.. versionadded:: 0.2
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from backstamp.installed import Installed, folder_of, label, stem_of
from backstamp.text import canonical

if TYPE_CHECKING:
    from importlib_metadata import Distribution

__all__ = ["Owners"]

#: How good a claim to a package is: files below it, its name in an editable install, the package itself.
_BELOW: Final = 1
_NAMED: Final = 2
_ITSELF: Final = 3


class Owners:
    """The claims of every distribution along one path, read when first asked for."""

    def __init__(self, everything: Sequence[Distribution]) -> None:
        self._everything = everything
        self._texts: list[tuple[str, str, str]] | None = None

    def packages_of(self, installed: Installed, module: str) -> frozenset[str]:
        """The top-level packages of a distribution whose plugin is `module`.

        Raises:
            ImportError: the plugin module itself lies in somebody else's package, who is named.
        """
        top = module.partition(".")[0]
        claims = _claims(_text(installed.distribution, "RECORD"), _text(installed.distribution, "top_level.txt"))
        # an editable install may say nothing of its modules: then its entry point speaks for its package
        claims = claims or {top: _NAMED}
        better = {package: self._better(canonical(installed.name), package, claims[package]) for package in claims}
        if top not in claims or better[top] is not None:
            owner = (better[top] if top in claims else self._better("", top, 0)) or "not one it installed"
            own = ", ".join(sorted(package for package in claims if better[package] is None)) or "none"
            raise ImportError(
                f"needs its plugin module in a package of its own ({label(own)}), got {module}: {top} is {owner}"
            )
        return frozenset(package for package in claims if better[package] is None)

    def _better(self, name: str, package: str, claim: int) -> str | None:
        """Whose package it rather is, in words; None where this distribution may call it its own."""
        if package in sys.stdlib_module_names or (package == "backstamp" and name != "backstamp"):
            return "core's own" if package == "backstamp" else "of Python itself"
        # what a wheel installed under its own name needs no comparing
        named_after = canonical(package) == name
        if (claim == _ITSELF and named_after) or (claim == _BELOW and _is_namespace(package)):
            return None
        for other, record, top_level in self._all_texts():
            if other == name or (package not in record and package not in top_level):
                continue
            theirs = _claims(record, top_level).get(package, 0)
            if theirs > claim or (theirs == claim > _BELOW and not named_after):
                return f"of {label(other)}"
        return None

    def _all_texts(self) -> list[tuple[str, str, str]]:
        if self._texts is None:
            self._texts = [
                (canonical(stem_of(folder_of(item))), _text(item, "RECORD"), _text(item, "top_level.txt"))
                for item in self._everything
            ]
        return self._texts


def _claims(record: str, top_level: str) -> dict[str, int]:
    """Each top-level package a distribution's metadata speaks of, with how good its claim is."""
    claims: dict[str, int] = {}
    for line in record.splitlines():
        path = line.rpartition(",")[0].rpartition(",")[0].strip('"')
        top, slash, below = path.partition("/")
        if top in ("", "..", ".", "__pycache__") or top.endswith((".dist-info", ".data", ".egg-info")):
            continue
        if slash:
            claim = _ITSELF if below.partition(".")[0] == "__init__" else _BELOW
            claims[top] = max(claim, claims.get(top, 0))
        elif top.endswith((".py", ".so", ".pyd")) and not top.startswith("__editable__"):
            claims[top.partition(".")[0]] = _ITSELF
    return claims or dict.fromkeys(top_level.split(), _NAMED)


def _is_namespace(package: str) -> bool:
    """Whether a package is one that several distributions share by design; finding it runs none of its code."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is None and spec.submodule_search_locations is not None


def _text(distribution: Distribution, name: str) -> str:
    try:
        return distribution.read_text(name) or ""
    except (OSError, ValueError):
        return ""
