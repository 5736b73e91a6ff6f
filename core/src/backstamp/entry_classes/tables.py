"""Which classes of a tree are entry classes: the lists that engines keep in source.

In: the modules of a folder. Out: a `Listed` for each row, and a `Trouble` for each that names nothing that can be read.
Three forms are known: `EntryClass = X` or `[X, Y]` in a model module (SGLang); tables named `..._MODELS` of
`"Arch": ("module", "Class")` (vLLM); `ModelRegistry.register_model("Arch", "module:Class")`, a vLLM plugin's own.

Source: sglang 0.5.23 srt/models/registry.py:100; vllm 0.33.0 vllm/model_executor/models/registry.py:73, :655.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from backstamp.entry_classes.assigned import elements
from backstamp.entry_classes.engines import ENGINES, Engine
from backstamp.entry_classes.facts import Listed
from backstamp.entry_classes.names import Names
from backstamp.entry_classes.tree import Module, Tree

__all__ = ["Table", "join", "list_classes"]

_TABLE: Final = re.compile(r"\w*_MODELS")
_OF_DRAFTS: Final = re.compile("SPECULATIVE|DRAFT")


class Table(NamedTuple):
    """The entry classes that a tree lists, and the engine whose form most of them are listed in."""

    rows: tuple[Listed, ...]
    engines: tuple[Engine, ...]


def list_classes(tree: Tree, names: Names) -> Table:
    """Every row of the lists that a folder's modules keep."""
    forms: dict[str, list[Listed]] = {"sglang": [], "vllm": []}
    for module in tree.read:
        forms["sglang"] += _of_modules(module, names)
        forms["vllm"] += _of_tables(module, tree)
    # one engine's model may carry a line of the other's over
    most = max(forms, key=lambda name: len(forms[name]))
    return Table((*forms["sglang"], *forms["vllm"]), (ENGINES[most],) if forms[most] else ())


def join(rows: Iterable[Listed]) -> tuple[Listed, ...]:
    """One row for each class, with every name that stands for it; a draft where one of them says so."""
    joined: dict[tuple[str, str], Listed] = {}
    for row in rows:
        key = (row.module, row.name)
        known = joined.get(key)
        archs = row.archs if known is None else tuple(dict.fromkeys((*known.archs, *row.archs)))
        draft = row.draft or (known.draft if known is not None else row.draft)
        joined[key] = row._replace(archs=archs, draft=draft)
    count = Counter(row.name for row in joined.values())
    # two classes of one name are told apart by what a config calls them
    return tuple(row._replace(label=row.name if count[row.name] == 1 else row.archs[0]) for row in joined.values())


def _of_modules(module: Module, names: Names) -> Iterator[Listed]:
    """`EntryClass` of a model module."""
    if "EntryClass" not in module.text:
        return
    for item in elements(ast.Name("EntryClass"), module, names):
        text = ast.unparse(item)
        if text == "EntryClass":
            # bound to one class; a module that only mentions or imports the name lists none of its own
            text = names.same_as(module, text)
        if not text:
            continue
        yield Listed((text.rpartition(".")[2],), str(module.path), text)


def _of_tables(module: Module, tree: Tree) -> Iterator[Listed]:
    """Tables of (module, class) by architecture, and registrations."""
    for statement in module.syntax.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name) and _TABLE.fullmatch(target.id):
            draft = _OF_DRAFTS.search(target.id) is not None
            for key, value in zip(statement.value.keys, statement.value.values, strict=True):
                yield from _row(key, value, draft, module, tree)
    calls = ast.walk(module.syntax) if "register_model" in module.text else ()
    for node in calls:
        if isinstance(node, ast.Call) and len(node.args) == 2 and ast.unparse(node.func).endswith("register_model"):
            yield from _registered(node.args[0], node.args[1], module)


def _row(key: ast.expr | None, value: ast.expr, draft: bool, module: Module, tree: Tree) -> Iterator[Listed]:
    words = [_text(key), *(_text(item) for item in (value.elts if isinstance(value, ast.Tuple) else ()))]
    if len(words) != 3 or not all(words):
        return
    arch, where, name = words
    # a bare module lies beside the table
    path = tree.find(where) if "." in where else tree.find(where, 1, module.path)
    yield Listed((arch,), str(path) if path is not None and path.is_file() else where, name, draft)


def _registered(arch: ast.expr, target: ast.expr, module: Module) -> Iterator[Listed]:
    name = _text(arch)
    where, colon, class_name = _text(target).partition(":")
    if name and colon:
        yield Listed((name,), where, class_name)
    elif name and isinstance(target, ast.Name):
        yield Listed((name,), str(module.path), target.id)


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
