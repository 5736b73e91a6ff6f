"""What the factories of a module answer: read from its `return`s, without importing a kernel library.

In: one module. Out: for a function every name it answers, followed through functions of the module to the names handed
to `Built` or in a tuple; and where a name is computed, or comes from elsewhere, that it cannot be told, and where.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple, TypeAlias

from backstamp.source_lint.source import Function, Source, inside, last_name, words_of

__all__ = ["Answer", "Leaves", "assigned"]

AnyFunction: TypeAlias = Function | ast.Lambda


class Answer(NamedTuple):
    """One name that is answered, and the words it stands in; None where it cannot be told."""

    kernel: str | None
    line: int
    words: str


class Leaves:
    """The leaves of one module: every `Built` it makes, and what its functions answer."""

    def __init__(self, source: Source) -> None:
        self.source = source

    @cached_property
    def functions(self) -> dict[str, AnyFunction]:
        """The functions at the top of the module, by the names of factories; lambdas with a name too."""
        found: dict[str, AnyFunction] = {}
        waiting: list[ast.stmt] = list(self.source.tree.body)
        while waiting:
            node = waiting.pop(0)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name] = node
            elif isinstance(node, ast.If | ast.Try):
                # one of two, by what is installed
                waiting += [*node.body, *node.orelse, *(node.finalbody if isinstance(node, ast.Try) else ())]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                found |= {last_name(target): node.value for target in node.targets}
        return found

    @cached_property
    def names_of_built(self) -> frozenset[str]:
        """The names by which the module knows `Built`."""
        imported = [name for node in self.source.of(ast.ImportFrom) for name in node.names if name.name == "Built"]
        known = {name.asname or name.name for name in imported}
        return frozenset(known | {name for name, value in self.source.constants.items() if last_name(value) in known})

    def built(self) -> Iterator[Answer]:
        """The name in every `Built` of the module, wherever it is made."""
        for call in self.source.of(ast.Call):
            yield from self.made_by(call)

    def made_by(self, call: ast.Call) -> Iterator[Answer]:
        """The names a call may make a `Built` of; nothing for any other call."""
        given = self._kernel_of(call)
        if given is not None:
            yield from self.names(given, call)

    def names(self, given: ast.expr, whole: ast.expr | ast.stmt) -> Iterator[Answer]:
        """The names an expression for a kernel may be, as part of a whole."""
        yield from (Answer(text, whole.lineno, words_of(whole)) for text in self._texts(given))

    def _texts(self, given: ast.expr, follow: bool = True) -> Iterator[str | None]:
        """Every string an expression may be, by a choice or by what a local name is given; None for what is none."""
        if isinstance(given, ast.IfExp):
            for branch in (given.body, given.orelse):
                yield from self._texts(branch, follow)
            return
        text = self.source.text(given, follow)
        bound = _bound(self.source.function_around(given), given.id) if isinstance(given, ast.Name) and follow else []
        if text is not None or not bound:
            yield text
            return
        for value in bound:
            yield from self._texts(value, follow=False) if value is not None else (None,)

    def answers(self, function: str) -> tuple[Answer, ...]:
        """Every name a function at the top of the module answers."""
        return tuple(dict.fromkeys(self._answers(function, {function})))

    def _answers(self, name: str, seen: set[str]) -> Iterator[Answer]:
        function = self.functions[name]
        if isinstance(function, ast.Lambda):
            yield from self._value(function.body, function.body, seen)
            return
        for node in inside(function):
            if isinstance(node, ast.Return):
                yield from self._value(node.value, node, seen)

    def _value(self, value: ast.expr | None, at: ast.expr | ast.stmt, seen: set[str]) -> Iterator[Answer]:
        """What one returned expression answers."""
        if isinstance(value, ast.Await | ast.NamedExpr):
            yield from self._value(value.value, at, seen)
        elif isinstance(value, ast.IfExp):
            for branch in (value.body, value.orelse):
                yield from self._value(branch, at, seen)
        elif isinstance(value, ast.Tuple) and len(value.elts) in (2, 3):
            yield from self.names(value.elts[0], value)
        elif isinstance(value, ast.Call) and self._kernel_of(value) is not None:
            yield from self.made_by(value)
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in self.functions:
            if value.func.id not in seen:
                yield from self._answers(value.func.id, seen | {value.func.id})
        else:
            bound = _bound(self.source.function_around(value), value.id) if isinstance(value, ast.Name) else []
            if bound and None not in bound and f"={last_name(value)}" not in seen:
                for one in bound:
                    yield from self._value(one, at, seen | {f"={last_name(value)}"})
                return
            yield Answer(None, at.lineno, words_of(at))

    def _kernel_of(self, call: ast.Call) -> ast.expr | None:
        """The expression for the kernel in a call that makes a `Built`; None for other calls."""
        function = call.func
        arguments: list[ast.expr] = []
        for argument in call.args:
            # Built(*("fa3", backend)) hands over what is written there
            written = isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
            arguments += argument.value.elts if written else [argument]  # type: ignore[attr-defined]
        if last_name(function) == "partial" and arguments and self._is_built(arguments[0]):
            function, arguments = arguments[0], arguments[1:]
        elif isinstance(function, ast.Attribute) and function.attr == "_make" and self._is_built(function.value):
            listed = arguments[0] if arguments else None
            return listed.elts[0] if isinstance(listed, ast.Tuple | ast.List) and listed.elts else call
        if not self._is_built(function):
            return None
        given = arguments[:1]
        for item in call.keywords:
            if item.arg == "kernel":
                given.append(item.value)
            elif item.arg is None and isinstance(item.value, ast.Dict):
                pairs = zip(item.value.keys, item.value.values, strict=True)
                given += [value for key, value in pairs if self.source.text(key) == "kernel"]
        return given[0] if len(given) == 1 else call

    def _is_built(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Attribute):
            return function.attr == "Built"
        return isinstance(function, ast.Name) and function.id in self.names_of_built


def assigned(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with its value, also where both are written as tuples: `a, b = 1, 2`."""
    for target in node.targets:
        listed = isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List)
        starred = any(isinstance(part, ast.Starred) for part in ast.iter_child_nodes(target))
        if listed and not starred and len(target.elts) == len(node.value.elts):  # type: ignore[attr-defined]
            yield from zip(target.elts, node.value.elts, strict=True)  # type: ignore[attr-defined]
        else:
            yield target, node.value


def _bound(function: AnyFunction | None, name: str) -> list[ast.expr | None]:
    """What a name is bound to in a function; None for a binding that is no plain one, as a parameter's."""
    if function is None:
        return []
    given = function.args
    every = (*given.posonlyargs, *given.args, *given.kwonlyargs)
    bound: list[ast.expr | None] = [None for argument in every if argument.arg == name]
    plain: dict[ast.AST, ast.expr | None] = {}
    stored: list[ast.AST] = []
    for node in inside(function):
        if isinstance(node, ast.Assign):
            plain |= dict(assigned(node))
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            plain[node.target] = node.value
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            stored.append(node)
    return bound + [plain.get(node) for node in stored]
