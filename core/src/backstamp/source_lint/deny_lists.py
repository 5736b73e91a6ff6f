"""Whether a function says yes by default: no to some names of a backend, and yes to whatever is none of them.

In: the body of a function and one expression in it that names a backend. Out: yes or no to that. It runs nothing: what
it cannot follow (a loop, a handler, another call) may be either. A function that asks about None itself has made up its
mind, whichever way.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

from backstamp.source_lint.plain_forms import plain_form, walk_plain
from backstamp.source_lint.source import Source, last_name

__all__ = ["is_none", "is_word", "yes_by_default"]

#: A body with more statements that branch is not followed: each may double the ways through.
_MOST_BRANCHES: Final = 12


def yes_by_default(source: Source, body: Sequence[ast.stmt] | ast.expr, subject: ast.expr, *, given: bool) -> bool:
    """Whether a body (of a lambda: its expression) refuses a name it compares the subject with, but not None.

    `given` says that the subject is handed in: if the body gives it another value, nothing is known from there on.
    """
    statements = body if isinstance(body, Sequence) else [ast.Return(body)]
    branches = sum(isinstance(node, ast.If | ast.With) for one in statements for node in walk_plain(one))
    asked = _Asked(source, ast.unparse(subject), given)
    words = {word for one in statements for word in asked.words(one)}
    if branches > _MOST_BRANCHES or "" in words:
        return False
    refused = (asked.statements(statements, word) is False for word in words)
    return asked.statements(statements, "") is not False and any(refused)


class _Asked:
    """What is answered about one subject; a value is the words of a literal or constant, and "" is None."""

    def __init__(self, source: Source, subject: str, given: bool) -> None:
        self.source, self.subject, self.given = source, subject, given
        self.followed: set[str] = set()

    def words(self, statement: ast.stmt) -> Iterator[str]:
        """The values a statement compares the subject with; "" where it asks about None, or whether it is true."""
        for node in walk_plain(statement):
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                yield from self._compared(node) or ()
            tested = (
                node.values if isinstance(node, ast.BoolOp)
                else [node.operand] if isinstance(node, ast.UnaryOp)
                else [node.test] if isinstance(node, ast.If | ast.IfExp | ast.Assert | ast.While)
                else node.args if isinstance(node, ast.Call) and last_name(node.func) in ("bool", "isinstance")
                else ()
            )  # fmt: skip
            if any(self._is_subject(item) for item in tested):
                yield ""

    def statements(self, body: Sequence[ast.stmt], value: str) -> bool | None:
        """The answer of the first statement that returns; the end of a body answers no, as None is no yes."""
        for at, statement in enumerate(body):
            rest = body[at + 1 :]
            if isinstance(statement, ast.Return):
                return self.expression(statement.value, value) if statement.value is not None else False
            if isinstance(statement, ast.Raise):
                return False
            if isinstance(statement, ast.Assert):
                return _choose(self.expression(statement.test, value), self.statements(rest, value), False)
            if not self._matters(statement):
                continue
            if isinstance(statement, ast.With):
                return self.statements([*statement.body, *rest], value)
            branching = plain_form(statement)
            if not isinstance(branching, ast.If):
                return None
            yes, no = ([*branch, *rest] for branch in (branching.body, branching.orelse))
            test = self.expression(branching.test, value)
            return _choose(test, self.statements(yes, value), self.statements(no, value))
        return False

    def _matters(self, statement: ast.stmt) -> bool:
        """Whether a statement may answer, or give a subject that was handed in another value."""
        for node in ast.walk(statement):
            if isinstance(node, ast.Return | ast.Raise):
                return True
            stored = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            if self.given and stored and self._is_subject(node):
                return True
        return False

    def expression(self, node: ast.AST, value: str) -> bool | None:
        """Yes, no, or None where other things decide."""
        node = plain_form(node)
        if isinstance(node, ast.NamedExpr):
            return self.expression(node.value, value)
        if isinstance(node, ast.Name):
            return self._kept(node, value)
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, bool) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return _choose(self.expression(node.operand, value), False, True)
        if isinstance(node, ast.BoolOp):
            answer, *others = (self.expression(item, value) for item in node.values)
            for other in others:
                answer = _choose(answer, other, False) if isinstance(node.op, ast.And) else _choose(answer, True, other)
            return answer
        if isinstance(node, ast.IfExp):
            yes, no = (self.expression(branch, value) for branch in (node.body, node.orelse))
            return _choose(self.expression(node.test, value), yes, no)
        if isinstance(node, ast.Call) and last_name(node.func) == "bool" and len(node.args) == 1:
            return self.expression(node.args[0], value)
        words = self._compared(node) if isinstance(node, ast.Compare) and len(node.ops) == 1 else None
        if words is None:
            return None
        return (value in words) != isinstance(node.ops[0], ast.NotEq | ast.NotIn | ast.IsNot)  # type: ignore[attr-defined]

    def _kept(self, node: ast.Name, value: str) -> bool | None:
        """The answer that was kept under a name, where it was kept once."""
        kept = self.source.named(node)
        if kept is None or node.id in self.followed:
            return None
        self.followed.add(node.id)
        answer = self.expression(kept, value)
        self.followed.remove(node.id)
        return answer

    def _compared(self, node: ast.Compare) -> frozenset[str] | None:
        """The values the subject is compared with; None where something else is, or the values cannot be read."""
        left, right = node.left, node.comparators[0]
        left = left.value if isinstance(left, ast.NamedExpr) else left
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            return self._listed(right) if self._is_subject(left) else None
        if not isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot):
            return None
        if self._is_subject(right):
            left, right = right, left
        readable = self._is_subject(left) and (is_word(right) or is_none(right))
        return frozenset({_value(right)}) if readable else None

    def _listed(self, node: ast.expr) -> frozenset[str] | None:
        if isinstance(node, ast.Name):
            # a list that another module keeps stands for itself
            node = self.source.named(node) or node
        if isinstance(node, ast.Call) and last_name(node.func) in ("frozenset", "set", "tuple", "list") and node.args:
            node = node.args[0]
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            readable = all(is_word(item) or is_none(item) for item in node.elts)
            return frozenset(map(_value, node.elts)) if readable else None
        return frozenset({_value(node)}) if is_word(node) else None

    def _is_subject(self, node: ast.AST) -> bool:
        named = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
        return named and ast.unparse(node) == self.subject


def is_word(node: ast.expr) -> bool:
    """Whether an expression is one fixed value: a text, a CONSTANT, a member of an enumeration."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.Name | ast.Attribute) and last_name(node).isupper()


def is_none(node: ast.expr | None) -> bool:
    """Whether an expression is None itself."""
    return isinstance(node, ast.Constant) and node.value is None


def _value(node: ast.expr) -> str:
    return "" if is_none(node) else ast.unparse(node)


def _choose(test: bool | None, yes: bool | None, no: bool | None) -> bool | None:
    if test is None:
        return yes if yes == no else None
    return yes if test else no
