"""What a class body binds, and what a module gives the class later: `A.hook = f`, `setattr(A, "hook", f)`, in a loop.

In: a module's statements on one platform. Out: (class name, attribute, whether it is something) in order. Only what
stands at the top level is seen: what a function call does to a class is not.

Source: sglang 0.5.23 srt/models/qwen3_5.py:3010, which assigns its fusion gate to four classes in such a loop.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from backstamp.entry_classes.names import Names
from backstamp.entry_classes.platforms import statements
from backstamp.entry_classes.tree import Module

__all__ = ["Assigned", "assigned_in", "bound_in", "elements"]

#: The methods that give one side of a dict.
_SIDES: Final = frozenset({"keys", "values"})


class Assigned(NamedTuple):
    """An attribute given to a class from outside; `present` is false for None, and None for one that is deleted.

    An empty `owner` or `attribute` is one that could not be read.
    """

    owner: str
    attribute: str
    present: bool | None
    line: int


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
    body: Iterable[ast.stmt], loop: Mapping[str, ast.expr | None], module: Module, names: Names
) -> Iterator[Assigned]:
    """`loop` is what the variables of the loops around stand for; None for what could not be read."""
    for statement in body:
        if isinstance(statement, ast.For):
            for round_ in _rounds(statement, module, names):
                inner = statements(statement.body, names.platform)
                yield from _assigned(inner, {**loop, **round_}, module, names)
            continue
        for target, attribute, present in _gifts(statement):
            word = _word(attribute, loop) if isinstance(attribute, ast.expr) else attribute
            yield Assigned(_word(target, loop), word, present, statement.lineno)


def _gifts(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.expr | str, bool | None]]:
    """What one statement gives or takes: of whom, which attribute, and whether it is something."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Attribute):
                yield target.value, target.attr, _is_something(statement.value)
    elif isinstance(statement, ast.Delete):
        for target in statement.targets:
            if isinstance(target, ast.Attribute):
                yield target.value, target.attr, None
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        asked = call.func.id if isinstance(call.func, ast.Name) else ""
        if asked == "setattr" and len(call.args) == 3:
            yield call.args[0], call.args[1], _is_something(call.args[2])
        elif asked == "delattr" and len(call.args) == 2:
            yield call.args[0], call.args[1], None


def _rounds(loop: ast.For, module: Module, names: Names) -> Iterator[dict[str, ast.expr | None]]:
    """What a loop's variables stand for in each of its rounds; one round of unknowns where that cannot be read."""
    unknown: dict[str, ast.expr | None] = {
        node.id: None for node in ast.walk(loop.target) if isinstance(node, ast.Name)
    }
    rows = _rows(loop.iter, module, names)
    if rows is None:
        yield unknown
    for row in rows or ():
        if isinstance(loop.target, ast.Name):
            yield {loop.target.id: row}
        elif (
            isinstance(loop.target, ast.Tuple)
            and isinstance(row, ast.Tuple | ast.List)
            and len(row.elts) == len(loop.target.elts)
            and not any(isinstance(item, ast.Starred) for item in (*row.elts, *loop.target.elts))
        ):
            pairs = zip(loop.target.elts, row.elts, strict=True)
            yield {**unknown, **{target.id: item for target, item in pairs if isinstance(target, ast.Name)}}
        else:
            yield unknown


def _rows(expression: ast.expr, module: Module, names: Names) -> Sequence[ast.expr] | None:
    """What a loop goes over: a list, a dict or its items, `zip` of lists; None where it cannot be read."""
    call = expression if isinstance(expression, ast.Call) and not expression.keywords else None
    if call is not None and isinstance(call.func, ast.Name) and call.func.id == "zip":
        columns = [_rows(item, module, names) for item in call.args]
        known = [column for column in columns if column is not None]
        return [ast.Tuple(list(row)) for row in zip(*known, strict=False)] if len(known) == len(columns) else None
    if call is not None and isinstance(call.func, ast.Attribute) and not call.args:
        held = _dict(call.func.value, module, names)
        if held is not None and call.func.attr == "items":
            return [ast.Tuple([key, value]) for key, value in held]
        return [pair[call.func.attr == "values"] for pair in held] if held and call.func.attr in _SIDES else None
    if (held := _dict(expression, module, names)) is not None:
        return [key for key, _ in held]
    found = elements(expression, module, names)
    # what is its own element was not taken apart
    return None if any(item is expression for item in found) else found


def _dict(expression: ast.expr, module: Module, names: Names) -> list[tuple[ast.expr, ast.expr]] | None:
    held = names.list_of(module, expression.id) if isinstance(expression, ast.Name) else expression
    if not isinstance(held, ast.Dict):
        return None
    rows = [(key, value) for key, value in zip(held.keys, held.values, strict=True) if key is not None]
    return rows if len(rows) == len(held.keys) else None


def _word(expression: ast.expr, loop: Mapping[str, ast.expr | None]) -> str:
    """The name, or the string, that an expression stands for inside the loops around it; empty where none is read."""
    if isinstance(expression, ast.Name) and expression.id in loop:
        held = loop[expression.id]
        return _word(held, {}) if held is not None else ""
    if isinstance(expression, ast.Constant):
        return expression.value if isinstance(expression.value, str) else ""
    return ast.unparse(expression) if isinstance(expression, ast.Name | ast.Attribute) else ""


def _names(target: ast.AST, name: str) -> bool:
    """Whether a target, or what stands in a loop, binds a name."""
    return any(
        isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store | ast.Del)
        for node in ast.walk(target)
    )


def _is_something(value: ast.expr) -> bool:
    return not (isinstance(value, ast.Constant) and value.value is None)
