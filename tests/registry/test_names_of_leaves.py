"""No factory of a first-party plugin answers an alias: read from its source, without importing a kernel library.

What a factory answers is followed through its `return`s to the names handed to `Built`. Each has to be a literal: one
that is computed, or comes from elsewhere, could not be held here, and so is a fault. The reader is the library's,
`backstamp.source_lint.leaves`. What the objects say when they are built is in test_golden_aliases.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.first_party import FIRST_PARTY_DISTRIBUTIONS
from backstamp.source_lint import aliases_of
from backstamp.source_lint.leaves import Answer, Leaves
from backstamp.source_lint.source import Source, read_source

CATALOGUE = build_catalogue(discover())
ROWS = [row for rows in CATALOGUE.rows.values() for row in rows if row.plugin.distribution in FIRST_PARTY_DISTRIBUTIONS]
FACTORIES = sorted({row.offer.factory for row in ROWS})
PACKAGES = sorted({factory.partition(".")[0] for factory in FACTORIES})
#: Keys that only name other kernels; a key may also be the name of the first of its kernels.
ALIASES = aliases_of(CATALOGUE)


def module_file(module: str) -> Path:
    """The file of a plugin's module, in whatever subpackage; it is found and not imported."""
    package, *rest = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def leaves_of(path: Path) -> Leaves:
    """What the module in a file answers."""
    source = read_source(path.name, path.read_bytes())
    assert isinstance(source, Source), source
    return Leaves(source)


def names(answers: Iterable[Answer]) -> set[str]:
    """The names that are answered; `line N: ...` for one that cannot be told."""
    return {answer.kernel or f"line {answer.line}: {answer.words}" for answer in answers}


def test_the_keys_that_are_never_stamps_are_known() -> None:
    """Every other alias is the name of one of its own kernels."""
    assert sorted(ALIASES) == ["hybrid_linear_attn", "nsa"]
    assert not ALIASES & {row.offer.kernel for row in ROWS}


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_answers_the_kernel_it_is_declared_for(factory: str) -> None:
    """And nothing else, whichever way it returns."""
    module, _, name = factory.partition(":")
    assert names(leaves_of(module_file(module)).answers(name)) == {
        row.offer.kernel for row in ROWS if row.offer.factory == factory
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_every_leaf_of_a_plugin_names_a_kernel_the_plugin_declares(package: str) -> None:
    """In all its modules: a leaf no declared factory leads to yet is held as well."""
    files = [path for path in module_file(package).parent.rglob("*.py") if path.name != "plugin.py"]
    found = names(leaf for path in files for leaf in leaves_of(path).built())
    assert found == {row.offer.kernel for row in ROWS if row.offer.factory.startswith(f"{package}.")}
    assert not found & ALIASES
