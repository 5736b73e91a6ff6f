"""A new plugin: a complete project of one naive kernel, written into a folder.

In: the name of a distribution that does not exist yet, and where to write it. Out: the files that were written. What
lies in `template/` is a plugin itself, named acme-attention: writing it is copying it under another name. Nothing that
is there already is touched, and nothing is written before every refusal has been made.

.. versionadded:: 0.2
"""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.errors import BadInput
from backstamp.first_party import FIRST_PARTY, FIRST_PARTY_DISTRIBUTIONS
from backstamp.text import canonical, plain

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["NewPlugin", "write_plugin_project"]

#: The template's distribution and package; every other name in it is made of these two.
_DISTRIBUTION, _PACKAGE = "acme-attention", "acme_attention"
#: A name of packaging's. Source: Core metadata specification, field Name
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9._-]*[a-z0-9])?", re.IGNORECASE)
#: Kernels are named after the package, and a kernel's name has at most 100 characters.
_MOST_CHARACTERS: Final = 80
#: What a folder's name begins with whose file must not be hidden from those who build a wheel of it.
_DOT: Final = "dot-"


class NewPlugin(NamedTuple):
    """What was written: the distribution, its package, which is its key too, and its files relative to `folder`."""

    distribution: str
    package: str
    folder: Path
    files: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The project for tools."""
        return {
            "distribution": self.distribution,
            "package": self.package,
            "folder": str(self.folder),
            "files": list(self.files),
        }


def write_plugin_project(name: str, folder: Path | None = None) -> NewPlugin:
    """Write a project named `name` into a folder, ./NAME by default.

    Raises:
        BadInput: a name that is none, or that is taken; a folder that is not empty, or that cannot be written to.
    """
    distribution = canonical(name)
    package = distribution.replace("-", "_")
    _check_name(name, package)
    _check_free(distribution, package)
    target = folder if folder is not None else Path(distribution)
    _check_folder(target)
    texts = {_renamed(path, package, distribution): _renamed(text, package, distribution) for path, text in _template()}
    try:
        for path, text in texts.items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    except OSError as cause:
        who = f"new {plain(name)}"
        raise BadInput(who, needed="a folder that can be written to", found=plain(str(cause))) from cause
    return NewPlugin(distribution, package, target, tuple(sorted(texts)))


def _check_name(name: str, package: str) -> None:
    if not _NAME.fullmatch(name):
        needed = "a distribution's name: letters, digits and single . _ - between them"
        raise _refused(name, needed, plain(repr(name)))
    if not package.isidentifier() or keyword.iskeyword(package):
        raise _refused(name, "a name whose package Python can import", package)
    if len(package) > _MOST_CHARACTERS:
        raise _refused(name, f"at most {_MOST_CHARACTERS} characters", str(len(package)))


def _check_free(distribution: str, package: str) -> None:
    """Nobody owns the names the plugin would claim: its distribution's, its package's, its key."""
    own = {package, f"{package}_naive"}
    if distribution == "backstamp" or distribution in FIRST_PARTY_DISTRIBUTIONS:
        raise _refused(distribution, "a name of your own", f"{distribution}, which is Backstamp's")
    for key in sorted(own & set(FIRST_PARTY)):
        raise _refused(distribution, "a key of your own", f"{key}, which is {FIRST_PARTY[key]}'s")
    version = _installed_version(distribution)
    if version is not None:
        raise _refused(distribution, "a name that is free", f"{distribution} {version}, which is installed")
    catalogue = build_catalogue(discover())
    for key in sorted(own & {*catalogue.keys("attention"), *catalogue.keys("linear")}):
        raise _refused(distribution, "a key that is free", f"{key}, which an installed plugin has")
    if package in sys.stdlib_module_names or _is_taken(package):
        raise _refused(distribution, "a package that is free", f"{package}, which can be imported already")


def _installed_version(distribution: str) -> str | None:
    import importlib_metadata

    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def _is_taken(package: str) -> bool:
    """Whether somebody's code is imported by this name; a folder that happens to be called so is none."""
    # finding a top-level package runs none of its code
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _check_folder(target: Path) -> None:
    try:
        free = not target.exists() or (target.is_dir() and not any(target.iterdir()))
    except OSError as cause:
        raise BadInput("new --path", needed="a folder that can be read", found=plain(str(cause))) from cause
    if not free:
        found = f"{target}, which is {'not empty' if target.is_dir() else 'a file'}"
        raise BadInput("new --path", needed="a new or an empty folder", found=plain(found), fix="Name another: --path")


def _template() -> Iterator[tuple[str, str]]:
    """Every file of the template, by its path in the project."""
    waiting: list[tuple[str, Traversable]] = [("", resources.files("backstamp") / "template")]
    while waiting:
        at, item = waiting.pop()
        if item.is_file():
            yield at, item.read_text("utf-8")
        elif item.name != "__pycache__":
            named = ((child.name.replace(_DOT, ".", 1), child) for child in item.iterdir())
            waiting += [(f"{at}/{name}" if at else name, child) for name, child in named]


def _renamed(text: str, package: str, distribution: str) -> str:
    return text.replace(_PACKAGE, package).replace(_DISTRIBUTION, distribution)


def _refused(name: str, needed: str, found: str) -> BadInput:
    return BadInput(f"new {plain(name)}", needed=needed, found=found, fix="Choose another name")
