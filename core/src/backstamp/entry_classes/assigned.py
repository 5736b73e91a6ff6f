"""What a class body binds, and what a module gives the class later: `A.hook = f`, `setattr(A, "hook", f)`, in a loop.

In: a module's statements on one platform. Out: (class name, attribute, whether it is something) in order. Only what
stands at the top level is seen: what a function call does to a class is not.

Source: sglang 0.5.23 srt/models/qwen3_5.py:3010, which assigns its fusion gate to four classes in such a loop.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from backstamp.entry_classes.names import Names
from backstamp.entry_classes.platforms import statements
from backstamp.entry_classes.tree import Module

__all__ = ["Assigned", "assigned_in", "bound_in", "elements"]


class Assigned(NamedTuple):
    """An attribute given to a class from outside; `present` is false for None, and None for one that is deleted."""

    owner: str
    attribute: str
    present: bool | None


def assigned_in(module: Module, names: Names) -> Iterator[Assigned]:
    """Every attribute that a module's top level gives a class, by the class's name there."""
    body = statements(module.syntax.body, names.platform)
    return _assigned(body, {}, module, names)


def bound_in(body: Sequence[ast.stmt], name: str, platform: str) -> bool | None:
    """What a class body binds a name to last: something, None, or nothing at all (also: what it deleted again)."""
    said: bool | None = None
    for statement in statements(body, platform):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            said = True if statement.name == name else said
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            held = {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
            said = True if name in held else said
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None and _names(statement.target, name):
                said = _is_something(statement.value)
        elif isinstance(statement, ast.Delete):
            said = None if any(_names(target, name) for target in statement.targets) else said
        elif isinstance(statement, ast.Assign) and any(_names(target, name) for target in statement.targets):
            said = _is_something(statement.value)
        elif isinstance(statement, ast.For) and _names(statement, name):
            said = True
    return said


def elements(expression: ast.expr | None, module: Module, names: Names, depth: int = 0) -> tuple[ast.expr, ...]:
    """What a list, a tuple, a sum of them, or a name bound to one holds; any other expression is its own element."""
    if isinstance(expression, ast.List | ast.Tuple | ast.Set):
        return tuple(one for item in expression.elts for one in _spread(item, module, names, depth))
    if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.Add):
        left = elements(expression.left, module, names, depth)
        return (*left, *elements(expression.right, module, names, depth))
    # a list may be named after another; one that names itself ends somewhere
    if isinstance(expression, ast.Name) and depth < 8:
        held = names.list_of(module, expression.id)
        if isinstance(held, ast.List | ast.Tuple | ast.Set | ast.BinOp):
            return elements(held, module, names, depth + 1)
    return () if expression is None else (expression,)


def _spread(item: ast.expr, module: Module, names: Names, depth: int) -> tuple[ast.expr, ...]:
    return elements(item.value, module, names, depth + 1) if isinstance(item, ast.Starred) else (item,)


def _assigned(
    body: Iterable[ast.stmt], loop: dict[str, tuple[ast.expr, ...]], module: Module, names: Names
) -> Iterator[Assigned]:
    for statement in body:
        if isinstance(statement, ast.For) and isinstance(statement.target, ast.Name):
            held = {**loop, statement.target.id: elements(statement.iter, module, names)}
            yield from _assigned(statements(statement.body, names.platform), held, module, names)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Attribute):
                    for owner in _words(target.value, loop):
                        yield Assigned(owner, target.attr, _is_something(statement.value))
        elif isinstance(statement, ast.Delete):
            for target in statement.targets:
                if isinstance(target, ast.Attribute):
                    for owner in _words(target.value, loop):
                        yield Assigned(owner, target.attr, None)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            if isinstance(call.func, ast.Name) and call.func.id == "setattr" and len(call.args) == 3:
                for owner in _words(call.args[0], loop):
                    for attribute in _words(call.args[1], loop):
                        yield Assigned(owner, attribute, _is_something(call.args[2]))


def _words(expression: ast.expr, loop: dict[str, tuple[ast.expr, ...]]) -> tuple[str, ...]:
    """The names, or the strings, that an expression stands for inside the loops around it."""
    if isinstance(expression, ast.Constant):
        return (expression.value,) if isinstance(expression.value, str) else ()
    if isinstance(expression, ast.Name) and expression.id in loop:
        return tuple(word for item in loop[expression.id] for word in _words(item, {}))
    return (ast.unparse(expression),) if isinstance(expression, ast.Name | ast.Attribute) else ()


def _names(target: ast.AST, name: str) -> bool:
    """Whether a target, or what stands in a loop, binds a name."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store | ast.Del)
        for node in ast.walk(target)
    )


def _is_something(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value is None)
