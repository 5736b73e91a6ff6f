"""vLLM's two ways to list entry classes: tables named `..._MODELS`, and `ModelRegistry.register_model`.

In: a module. Out: a `Listed` for each row, and the statement or call itself where a row cannot be read. A name in
`..._MODELS` is a table only where a row of it is ("module", "Class"): versions and addresses are kept under such names
too. It evaluates nothing.

Source: vllm 0.33.0 vllm/model_executor/models/registry.py:73, :655.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from backstamp.entry_classes.engines import PLATFORMS
from backstamp.entry_classes.facts import Listed
from backstamp.entry_classes.platforms import statements
from backstamp.entry_classes.tree import Module, Tree

__all__ = ["rows_of_tables"]

_TABLE: Final = re.compile(r"\w*_MODELS")
_OF_DRAFTS: Final = re.compile("SPECULATIVE|DRAFT")


def rows_of_tables(module: Module, tree: Tree) -> Iterator[Listed | ast.stmt | ast.expr]:
    """The rows of every table in a module, and its registrations."""
    given = dict.fromkeys(
        pair for platform in PLATFORMS for pair in _given_to_tables(module, platform) if "_MODELS" in module.text
    )
    tables = {name for name, value in given if _is_table(value)}
    for name, value in given:
        if name in tables:
            draft = _OF_DRAFTS.search(name) is not None
            yield from _rows(value, draft, module, tree, tables)
    calls = ast.walk(module.syntax) if "register_model" in module.text else ()
    for node in calls:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_model"):
            yield from _registered(node, module)


def _given_to_tables(module: Module, platform: str) -> Iterator[tuple[str, ast.expr]]:
    """Names of tables with what each is bound to, or is given later."""
    for statement in statements(module.syntax.body, platform):
        call = statement.value if isinstance(statement, ast.Expr) else None
        target: ast.expr | None = None
        value: ast.expr | None = None
        if isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Subscript):
                value = ast.copy_location(ast.Dict([target.slice], [value]), value)
                target = target.value
        elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
            target, value = statement.target, statement.value
        elif isinstance(statement, ast.For):
            # filled row by row: the place stands for what it is filled with
            filled = (node for node in ast.walk(statement) if isinstance(node, ast.Subscript))
            value = next((node for node in filled if isinstance(node.ctx, ast.Store)), None)
            target = value.value if isinstance(value, ast.Subscript) else None
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            target, value = call.func.value, call.args[0] if len(call.args) == 1 and not call.keywords else call
        if isinstance(target, ast.Name) and value is not None and _TABLE.fullmatch(target.id):
            yield target.id, value


def _is_table(value: ast.expr) -> bool:
    """Whether a value has, or makes, a row of ("module", "Class")."""
    if isinstance(value, ast.DictComp):
        return isinstance(value.value, ast.Tuple) and len(value.value.elts) == 2
    if isinstance(value, ast.BinOp):
        return _is_table(value.left) or _is_table(value.right)
    return isinstance(value, ast.Dict) and any(all(_words(*row)) for row in zip(value.keys, value.values, strict=True))


def _rows(
    value: ast.expr, draft: bool, module: Module, tree: Tree, tables: set[str]
) -> Iterator[Listed | ast.stmt | ast.expr]:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        yield from _rows(value.left, draft, module, tree, tables)
        yield from _rows(value.right, draft, module, tree, tables)
    elif isinstance(value, ast.Dict):
        for key, item in zip(value.keys, value.values, strict=True):
            words = _words(key, item)
            if all(words):
                arch, where, name = words
                # a bare module lies beside the table
                path = tree.find(where) if "." in where else tree.find(where, 1, module.path)
                yield Listed((arch,), str(path) if path is not None and path.is_file() else where, name, draft)
            elif key is None:
                yield from _rows(item, draft, module, tree, tables)
            else:
                yield item
    elif not _is_of(tables, value):
        yield value


def _is_of(tables: set[str], value: ast.expr) -> bool:
    """Whether a value is another table, or some of its rows as they are, and so lists nothing that is new."""
    if isinstance(value, ast.DictComp) and len(value.generators) == 1:
        (chosen,) = value.generators
        row = ast.unparse(ast.Tuple([value.key, value.value]))
        return row == ast.unparse(chosen.target) and ast.unparse(chosen.iter) in {f"{name}.items()" for name in tables}
    return isinstance(value, ast.Name) and value.id in tables


def _words(key: ast.expr | None, value: ast.expr) -> tuple[str, str, str]:
    """Architecture, module and class of a row; empty where it is not of that form."""
    items = [_text(item) for item in value.elts] if isinstance(value, ast.Tuple) else []
    return (_text(key), items[0], items[1]) if len(items) == 2 else ("", "", "")


def _registered(call: ast.Call, module: Module) -> Iterator[Listed | ast.expr]:
    named = {item.arg: item.value for item in call.keywords}
    given = [*call.args, *(named[word] for word in ("model_arch", "model_cls") if word in named)]
    if len(given) == 2:
        name = _text(given[0])
        where, colon, class_name = _text(given[1]).partition(":")
        if name and colon:
            yield Listed((name,), where, class_name)
            return
        if name and isinstance(given[1], ast.Name):
            yield Listed((name,), str(module.path), given[1].id)
            return
    # another's method of that name lists nothing
    if ast.unparse(call.func).endswith("ModelRegistry.register_model"):
        yield call


def _text(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
