"""One form for each way to ask what a backend is: a comparison with its names, and an `if`.

In: one node of a tree. Out: the node that asks the same in the plain form, in the same place, or the node itself. Parts
that need no other form are shared with the tree, never changed.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator

__all__ = ["plain_form", "walk_plain"]


def walk_plain(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below one, each in its plain form."""
    waiting = [node]
    while waiting:
        form = plain_form(waiting.pop())
        yield form
        waiting += ast.iter_child_nodes(form)


def plain_form(node: ast.AST) -> ast.AST:
    """The plain form of a `match`, of `any` and `all`, of a lookup in a dict that is written out, of `(x or "") in`."""
    form: ast.AST | None = None
    if isinstance(node, ast.Match):
        form = _of_match(node)
    elif isinstance(node, ast.Compare):
        form = _of_default(node)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("any", "all"):
        form = _of_every(node, node.func.id)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get":
        form = _of_lookup(node, node.func.value)
    return node if form is None else ast.fix_missing_locations(ast.copy_location(form, node))


def _of_match(node: ast.Match) -> ast.AST:
    """`match x: case "a": ...` is `if x == "a": ...`."""
    rest: list[ast.stmt] = []
    for case in reversed(node.cases):
        test = _of_pattern(case.pattern, node.subject)
        if case.guard is not None:
            test = ast.BoolOp(ast.And(), [test, case.guard])
        rest = [ast.copy_location(ast.If(test, case.body, rest), node)]
    return rest[0]


def _of_pattern(pattern: ast.pattern, subject: ast.expr) -> ast.expr:
    if isinstance(pattern, ast.MatchAs):
        return ast.Constant(True) if pattern.pattern is None else _of_pattern(pattern.pattern, subject)
    if isinstance(pattern, ast.MatchOr):
        return ast.BoolOp(ast.Or(), [_of_pattern(part, subject) for part in pattern.patterns])
    if isinstance(pattern, ast.MatchValue):
        return ast.copy_location(ast.Compare(subject, [ast.Eq()], [pattern.value]), pattern)
    if isinstance(pattern, ast.MatchSingleton):
        return ast.copy_location(ast.Compare(subject, [ast.Is()], [ast.Constant(pattern.value)]), pattern)
    if isinstance(pattern, ast.MatchClass):
        return ast.Call(ast.Name("isinstance", ast.Load()), [subject, pattern.cls], [])
    # what else it may be is not followed
    return ast.Constant(...)


def _of_default(node: ast.Compare) -> ast.AST | None:
    """`(x or "") in names` is `x in names`, where the names hold no empty one."""
    left, names = node.left, node.comparators[0]
    if not isinstance(left, ast.BoolOp) or not isinstance(left.op, ast.Or) or len(left.values) != 2:
        return None
    empty = [part for part in (left.values[1], *ast.walk(names)) if isinstance(part, ast.Constant) and part.value == ""]
    return ast.Compare(left.values[0], node.ops, node.comparators) if empty == [left.values[1]] else None


def _of_every(node: ast.Call, name: str) -> ast.AST | None:
    """`any(x == y for y in names)` is `x in names`; `all(y != "a" for y in (p, d))` is `p != "a" and d != "a"`."""
    given = node.args[0] if len(node.args) == 1 else None
    if not isinstance(given, ast.GeneratorExp | ast.ListComp) or len(given.generators) != 1:
        return None
    loop, asked = given.generators[0], given.elt
    if not isinstance(loop.target, ast.Name) or loop.ifs or loop.is_async:
        return None
    each = loop.target.id
    if isinstance(asked, ast.Compare) and len(asked.ops) == 1:
        left, right = asked.left, asked.comparators[0]
        others = [side for side in (left, right) if not (isinstance(side, ast.Name) and side.id == each)]
        of = ast.Eq if name == "any" else ast.NotEq
        if len(others) == 1 and isinstance(asked.ops[0], of):
            return ast.Compare(others[0], [ast.In() if name == "any" else ast.NotIn()], [loop.iter])
    if isinstance(loop.iter, ast.Tuple | ast.List) and loop.iter.elts:
        return ast.BoolOp(ast.Or() if name == "any" else ast.And(), [
            _Put(each, item).visit(copy.deepcopy(asked)) for item in loop.iter.elts
        ])  # fmt: skip
    return None


class _Put(ast.NodeTransformer):
    """One expression in place of a name."""

    def __init__(self, name: str, item: ast.expr) -> None:
        self.name, self.item = name, item

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.item if node.id == self.name else node


def _of_lookup(node: ast.Call, table: ast.expr) -> ast.AST | None:
    """`{"a": False}.get(x, True)` is `False if x == "a" else True`."""
    if not isinstance(table, ast.Dict) or not node.args or node.keywords:
        return None
    answer: ast.expr = node.args[1] if len(node.args) > 1 else ast.Constant(False)
    for key, value in reversed(list(zip(table.keys, table.values, strict=True))):
        if key is None:
            return None
        test = ast.copy_location(ast.Compare(node.args[0], [ast.Eq()], [key]), node)
        answer = ast.IfExp(test, value, answer)
    return answer if table.keys else None
