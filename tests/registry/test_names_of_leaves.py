"""No factory of a first-party plugin answers an alias: read from its source, without importing a kernel library.

What a factory answers is followed through its `return`s to the names handed to `Built`. Each has to be a literal: one
that is computed, or an answer of another form, could not be held here, and so is a fault. What the objects say when
they are built is in test_golden_aliases.py.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from backstamp.catalogue import build_catalogue
from backstamp.discovery import discover
from backstamp.first_party import FIRST_PARTY_DISTRIBUTIONS

CATALOGUE = build_catalogue(discover())
ROWS = [row for rows in CATALOGUE.rows.values() for row in rows if row.plugin.distribution in FIRST_PARTY_DISTRIBUTIONS]
FACTORIES = sorted({row.offer.factory for row in ROWS})
PACKAGES = sorted({factory.partition(".")[0] for factory in FACTORIES})
#: Keys that only name other kernels; a key may also be the name of the first of its kernels.
ALIASES = {at.alias.key for at in CATALOGUE.aliases.values() if at.alias.key not in at.alias.kernels}


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed module: its own functions, and the names by which it knows `Built`."""

    tree: ast.Module

    @property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def is_built(self, function: ast.expr) -> bool:
        """Whether an expression that is called is `Built`, by any name it was imported under."""
        if isinstance(function, ast.Attribute):
            return function.attr == "Built"
        imports = [node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom)]
        known = {name.asname or name.name for node in imports for name in node.names if name.name == "Built"}
        return isinstance(function, ast.Name) and function.id in known

    def leaves(self) -> list[str]:
        """The name in every call of `Built`."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self.is_built(node.func)]
        return [_literal(call) for call in calls]

    def answers(self, function: str) -> set[str]:
        """The names one function answers, itself or through functions of its module; `line N: ...` where it is none."""
        found = set()
        for node in _returns(self.functions[function]):
            value = node.value
            if isinstance(value, ast.Call) and self.is_built(value.func):
                found.add(_literal(value))
            elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self.functions:
                found |= self.answers(value.func.id)
            else:
                found.add(f"line {node.lineno}: {ast.unparse(node)}")
        return found


def _literal(call: ast.Call) -> str:
    given = [*call.args[:1], *(item.value for item in call.keywords if item.arg == "kernel")]
    if len(given) == 1 and isinstance(given[0], ast.Constant) and isinstance(given[0].value, str):
        return given[0].value
    return f"line {call.lineno}: {ast.unparse(call)}"


def _returns(function: ast.FunctionDef) -> Iterator[ast.Return]:
    """A function's own returns, not those of functions inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def source_of(module: str) -> Source:
    """One module of a plugin, which is found and not imported."""
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Source(ast.parse(Path(spec.origin).with_name(f"{rest}.py").read_text("utf-8")))


def test_the_keys_that_are_never_stamps_are_known() -> None:
    """Every other alias is the name of one of its own kernels."""
    assert sorted(ALIASES) == ["hybrid_linear_attn", "nsa"]
    assert not ALIASES & {row.offer.kernel for row in ROWS}


@pytest.mark.parametrize("factory", FACTORIES)
def test_a_factory_answers_the_kernel_it_is_declared_for(factory: str) -> None:
    """And nothing else, whichever way it returns."""
    module, _, name = factory.partition(":")
    assert source_of(module).answers(name) == {row.offer.kernel for row in ROWS if row.offer.factory == factory}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_leaf_of_a_plugin_names_a_kernel_the_plugin_declares(package: str) -> None:
    """In all its modules: a leaf no declared factory leads to yet is held as well."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    modules = [path.stem for path in Path(spec.origin).parent.glob("*.py") if path.stem != "plugin"]
    leaves = [leaf for module in modules for leaf in source_of(f"{package}.{module}").leaves()]
    assert leaves
    assert set(leaves) == {row.offer.kernel for row in ROWS if row.offer.factory.startswith(f"{package}.")}
    assert not set(leaves) & ALIASES


MADE_UP = """
from backstamp.factories import Built as Made

def build(request):
    def inner():
        return 1
    if request.layers:
        return Made("nsa", inner)
    return _rest(request)

def _rest(request):
    if request.dtype:
        return Made(request.kernel, None)
    if request.layout:
        return ("dsa", None)
    return Made(kernel="dsa", backend=None)
"""


def test_the_reader_sees_every_way_to_answer() -> None:
    """An alias, a name that is computed, an answer that is no `Built`, and one by keyword."""
    source = Source(ast.parse(MADE_UP))
    computed = "line 13: Made(request.kernel, None)"
    assert source.answers("build") == {"nsa", computed, "line 15: return ('dsa', None)", "dsa"}
    assert sorted(source.leaves()) == ["dsa", computed, "nsa"]
