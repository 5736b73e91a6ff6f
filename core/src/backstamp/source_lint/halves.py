"""Whether a read of the base field is the fallback of a half, as a pair is made: the half first, and the base for none.

In: a read in one module. Out: yes or no. In an expression (`half or base`, `half if half is not None else base`,
`get(half, base)`), and in statements (`if half is None: half = base`). A choice by anything else, as by the phase, or
the base first, is no fallback.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from backstamp.source_lint.source import Source, inside, last_name

__all__ = ["halves_of", "is_fallback"]


def halves_of(field: str) -> frozenset[str]:
    """The names of the two halves of a field."""
    return frozenset({f"prefill_{field}", f"decode_{field}"})


def is_fallback(source: Source, node: ast.AST, field: str) -> bool:
    """Whether a read stands beside a half, as a pair is made; `half is None and base is None` asks about both."""
    at, parent = node, source.parents.get(node)
    while parent is not None and _inner(parent) is at:
        at, parent = parent, source.parents.get(parent)
    if isinstance(parent, ast.Assign | ast.AnnAssign | ast.Return) and at is node:
        return _is_in_branch(source, parent, field)
    beside: Sequence[ast.expr] = ()
    if isinstance(parent, ast.BoolOp):
        # a value that stands first wins; a question may stand anywhere
        first = [item is at for item in parent.values].index(True)
        beside = parent.values[:first] if at is node else parent.values
    elif isinstance(parent, ast.IfExp) and at is not parent.test and _asks_for_none(source, parent.test, field):
        beside = (parent.body, parent.orelse)
    elif isinstance(parent, ast.Call) and last_name(parent.func) in ("get", "getattr") and at in parent.args[1:]:
        beside = (parent,)
    return any(_is_half(source, item, field) for item in beside if item is not at)


def _is_in_branch(source: Source, statement: ast.stmt, field: str) -> bool:
    """Whether a statement runs where a half is none: `if half is None: ...`, or the other branch of `if half: ...`."""
    parent = source.parents.get(statement)
    if not isinstance(parent, ast.If):
        return False
    test, turned = parent.test, False
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, turned = test.operand, not turned
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is):
        turned = not turned
    return statement in (parent.body if turned else parent.orelse) and _is_half(source, test, field)


def _asks_for_none(source: Source, test: ast.expr, field: str) -> bool:
    """Whether a test is whether something is None, or whether a half is set; of the base itself it is a read."""
    return (isinstance(test, ast.Compare) and _inner(test) is not None) or _is_half(source, test, field)


def _inner(node: ast.AST) -> ast.expr | None:
    """What is asked about by `not x`, `x is None` or `(name := x)`; None for other expressions."""
    if isinstance(node, ast.UnaryOp):
        return node.operand
    if isinstance(node, ast.NamedExpr):
        return node.value
    asks = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)
    return node.left if asks else None  # type: ignore[attr-defined]


def _is_half(source: Source, node: ast.expr, field: str, follow: bool = True) -> bool:
    """Whether an expression is a half: by its name, looked up by it, or a local name that is given one."""
    inner = _inner(node)
    if inner is not None:
        return _is_half(source, inner, field, follow)
    if isinstance(node, ast.Name) and follow:
        scope = source.function_around(node)
        for one in inside(scope) if scope is not None else source.tree.body:
            names = map(last_name, one.targets) if isinstance(one, ast.Assign) else ()
            if node.id in names and _is_half(source, one.value, field, follow=False):  # type: ignore[attr-defined]
                return True
    keys = node.args if isinstance(node, ast.Call) else [node.slice] if isinstance(node, ast.Subscript) else []
    # f"{half}_field" is a half whichever it is
    ends = [key.values[-1] for key in keys if isinstance(key, ast.JoinedStr) and key.values]
    named = {last_name(node), *map(source.text, keys), *(f"prefill{source.text(end)}" for end in ends)}
    return not named.isdisjoint(halves_of(field))
