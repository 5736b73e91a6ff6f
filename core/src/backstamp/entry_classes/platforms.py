"""Which branch of a module's `if` one platform takes: engines pick an implementation when a module is imported.

In: a test expression and a platform ("cuda", "rocm", "xpu", "npu", "cpu"). Out: true, false, or None where the test is
about something else. It evaluates nothing but the questions about platforms that engines spell `is_rocm()`,
`current_platform.is_rocm()` or `_is_hip`.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["holds", "statements"]

_ASKED: Final = {
    "is_cuda": {"cuda"},
    "is_rocm": {"rocm"},
    "is_hip": {"rocm"},
    "is_cuda_alike": {"cuda", "rocm"},
    "is_xpu": {"xpu"},
    "is_npu": {"npu"},
    "is_cpu": {"cpu"},
    "is_tpu": set[str](),
}


def holds(test: ast.expr, platform: str, checking: bool = False) -> bool | None:
    """Whether a test is true on a platform, None where that cannot be told; `checking` is what TYPE_CHECKING is."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = holds(test.operand, platform, checking)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        known = [holds(value, platform, checking) for value in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in known:
            return decisive
        return None if None in known else not decisive
    if isinstance(test, ast.Compare):
        return _device_type(test, platform)
    word = _last_word(test.func if isinstance(test, ast.Call) else test)
    if word == "TYPE_CHECKING":
        return checking
    asked = _ASKED.get(word.lstrip("_"))
    return None if asked is None else platform in asked


def statements(body: Sequence[ast.stmt], platform: str, checking: bool = False) -> Iterator[ast.stmt]:
    """The statements that run at import on a platform, in order, with what `if`, `try` and `with` hold.

    Where a branch cannot be told both are taken, the first one last, so that what it binds stands.
    """
    for statement in body:
        if isinstance(statement, ast.If):
            said = holds(statement.test, platform, checking)
            if said is not True:
                yield from statements(statement.orelse, platform, checking)
            if said is not False:
                yield from statements(statement.body, platform, checking)
        elif isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from statements(handler.body, platform, checking)
            for part in (statement.body, statement.orelse, statement.finalbody):
                yield from statements(part, platform, checking)
        elif isinstance(statement, ast.With):
            yield from statements(statement.body, platform, checking)
        else:
            yield statement


def _device_type(test: ast.Compare, platform: str) -> bool | None:
    """`current_platform.device_type == "tpu"`; a ROCm build calls its device "cuda"."""
    if len(test.ops) != 1 or _last_word(test.left) != "device_type":
        return None
    right = test.comparators[0]
    if not isinstance(right, ast.Constant) or not isinstance(test.ops[0], ast.Eq | ast.NotEq):
        return None
    same = right.value == {"rocm": "cuda"}.get(platform, platform)
    return same if isinstance(test.ops[0], ast.Eq) else not same


def _last_word(expression: ast.expr) -> str:
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""
