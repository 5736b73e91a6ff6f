"""Second step of reading source: what a name at a module's top level stands for, through imports and re-exports.

In: a module and a dotted name in it. Out: the class statement it ends at, or the dotted name of what could not be read.
It follows `import`, `from ... import A as B`, `A = B`, `import *` and what a module's own `__getattr__` imports, over
modules, on one platform; it stops at a cycle.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from backstamp.entry_classes.facts import ClassRef
from backstamp.entry_classes.platforms import holds, statements
from backstamp.entry_classes.tree import Module, Tree

__all__ = ["Names", "Unread", "added_by", "is_foundation"]

#: What a class may stand on that answers no loader: the language, and the framework's own modules.
_FOUNDATIONS: Final = frozenset({*sys.stdlib_module_names, "builtins", "torch", "typing_extensions"})


class Unread(NamedTuple):
    """A name whose class statement was not found: `dotted` says what it was seen to be."""

    dotted: str


def is_foundation(unread: Unread) -> bool:
    """Whether what was not read answers no loader anyway."""
    return unread.dotted.partition(".")[0] in _FOUNDATIONS


class _Import(NamedTuple):
    """`from module import name`; an empty name is the module itself."""

    module: str
    level: int
    name: str


class _Same(NamedTuple):
    """`A = B.C`."""

    text: str


@dataclass
class _Scope:
    """What names are bound to last; `before` is what a class statement of the same name took the place of."""

    bound: dict[str, _Import | _Same | str] = field(default_factory=dict)
    before: dict[str, _Import | _Same | str] = field(default_factory=dict)
    lists: dict[str, ast.expr] = field(default_factory=dict)
    stars: list[_Import] = field(default_factory=list)


@dataclass
class Names:
    """The names of a tree's modules on one platform; `inside` keeps to the folder and reads no other module."""

    tree: Tree
    platform: str
    inside: bool = False
    _scopes: dict[Path, _Scope] = field(default_factory=dict)

    def resolve(self, module: Module, dotted: str) -> ClassRef | Unread:
        """The class, or function, statement a dotted name in a module stands for."""
        return self._resolve(module, dotted, set())

    def base_of(self, module: Module, ref: ClassRef, dotted: str) -> ClassRef | Unread:
        """The class that a base of `ref` stands for: `class A(A)` stands on the A that was there before."""
        outer = ref.name.rpartition(".")[0]
        if outer and module.class_named(f"{outer}.{dotted}") is not None:
            # inside a class its own names come first
            return ClassRef(ref.file, f"{outer}.{dotted}")
        found = self.resolve(module, dotted)
        before = self._scope(module).before.get(dotted)
        if found != ref or before is None or isinstance(before, str):
            return found
        if isinstance(before, _Same):
            return self.resolve(module, before.text)
        return self._follow(before, module, "", set())

    def resolve_in(self, dotted_module: str, name: str) -> ClassRef | Unread:
        """The class that a module, by its dotted name, binds a name to."""
        return self._follow(_Import(dotted_module, 0, name), None, "", set())

    def list_of(self, module: Module, name: str) -> ast.expr | None:
        """The list, tuple or other expression a name was last bound to, where it is no class or import."""
        return self._scope(module).lists.get(name)

    def known(self, module: Module) -> Container[str]:
        """The names a module's top level binds to something that `resolve` can follow."""
        return self._scope(module).bound

    def imported_as(self, module: Module, name: str) -> str:
        """The name that an import gives another to; empty where it keeps its own, or none does."""
        bound = self._scope(module).bound.get(name)
        return bound.name if isinstance(bound, _Import) and bound.name != name else ""

    def _resolve(self, module: Module, dotted: str, seen: set[tuple[Path, str]]) -> ClassRef | Unread:
        if (module.path, dotted) in seen:
            return Unread(f"{dotted} (a cycle of imports)")
        seen.add((module.path, dotted))
        head, _, rest = dotted.partition(".")
        scope = self._scope(module)
        bound = scope.bound.get(head)
        if isinstance(bound, str):
            there = not rest or module.class_named(dotted) is not None
            return ClassRef(str(module.path), dotted) if there else Unread(dotted)
        if isinstance(bound, _Same):
            return self._resolve(module, f"{bound.text}.{rest}" if rest else bound.text, seen)
        if bound is not None:
            return self._follow(bound, module, rest, seen)
        for star in scope.stars:
            found = self._follow(star._replace(name=head), module, rest, seen)
            if isinstance(found, ClassRef):
                return found
        if not rest and hasattr(builtins, head):
            return Unread(f"builtins.{head}")
        return Unread(dotted)

    def _follow(
        self, item: _Import, importer: Module | None, rest: str, seen: set[tuple[Path, str]]
    ) -> ClassRef | Unread:
        """Where an import leads: an attribute of the module, or a module below it."""
        words = [word for word in (item.name, *rest.split(".")) if word]
        whole = Unread(".".join(word for word in ("." * item.level + item.module, *words) if word))
        module_name = item.module
        while words:
            path = self.tree.find(module_name, item.level, importer.path if importer is not None else None)
            if path is None:
                return whole
            readable = path.is_file() and (not self.inside or path in self.tree.modules)
            module = self.tree.module(path) if readable else None
            if module is not None:
                found = self._resolve(module, ".".join(words), seen)
                if isinstance(found, ClassRef) or is_foundation(found):
                    return found
            module_name = f"{module_name}.{words.pop(0)}".lstrip(".")
        return whole

    def _scope(self, module: Module) -> _Scope:
        if module.path not in self._scopes:
            self._scopes[module.path] = self._make_scope(module)
        return self._scopes[module.path]

    def _make_scope(self, module: Module) -> _Scope:
        body = module.syntax.body
        scope = _scope_of(statements(body, self.platform), self.platform)
        for statement in body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__":
                # what a module imports when it is asked, and what it says to type checkers that it has
                for late in (
                    statements(statement.body, self.platform),
                    statements(body, self.platform, checking=True),
                ):
                    scope.bound = {**_scope_of(late, self.platform).bound, **scope.bound}
        return scope


def _scope_of(body: Iterable[ast.stmt], platform: str) -> _Scope:
    scope = _Scope()
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef):
            if statement.name in scope.bound:
                scope.before[statement.name] = scope.bound[statement.name]
            scope.bound[statement.name] = statement.name
        elif isinstance(statement, ast.Import):
            for alias in statement.names:
                if alias.asname:
                    scope.bound[alias.asname] = _Import(alias.name, 0, "")
                else:
                    top = alias.name.partition(".")[0]
                    scope.bound[top] = _Import(top, 0, "")
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                item = _Import(statement.module or "", statement.level, alias.name)
                if alias.name == "*":
                    scope.stars.insert(0, item)
                else:
                    scope.bound[alias.asname or alias.name] = item
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    _bind(scope, target.id, _chosen(statement.value, platform))
        elif (added := added_by(statement)) is not None and (before := scope.lists.get(added[0])) is not None:
            scope.lists[added[0]] = ast.BinOp(before, ast.Add(), added[1])
    return scope


def added_by(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """The name of a list and what a statement adds to it: `A += B`, `A.append(b)`, `A.extend(B)`."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return (statement.target.id, statement.value) if isinstance(statement.op, ast.Add) else None
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or len(call.args) != 1 or not isinstance(call.func, ast.Attribute):
        return None
    if not isinstance(call.func.value, ast.Name) or call.func.attr not in ("append", "extend"):
        return None
    (given,) = call.args
    return call.func.value.id, ast.List([given]) if call.func.attr == "append" else given


def _chosen(value: ast.expr, platform: str) -> ast.expr:
    """What a conditional expression is on a platform, where its test can be told."""
    while isinstance(value, ast.IfExp) and (said := holds(value.test, platform)) is not None:
        value = value.body if said else value.orelse
    return value


def _bind(scope: _Scope, name: str, value: ast.expr) -> None:
    if isinstance(value, ast.Name | ast.Attribute):
        if ast.unparse(value) != name:
            scope.bound[name] = _Same(ast.unparse(value))
    elif not (isinstance(value, ast.Constant) and value.value is None):
        # a fallback of None does not take the place of a class
        scope.lists[name] = value
