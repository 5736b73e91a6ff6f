"""What an entry class builds: whether its layers, however deep, ask a gate's question.

In: a class statement and marker functions, such as sglang's `get_num_fused_shared_experts`. Out: the markers that the
class's code calls, or that of its bases, of the classes it names to build and of the functions it calls. A class named
only to ask something of it (`Target.hook(...)`), to test a type, or in an annotation, is not built.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from backstamp.entry_classes.facts import ClassRef
from backstamp.entry_classes.names import Names
from backstamp.entry_classes.tree import Module, Tree

__all__ = ["Reach"]

_ASKS_TYPES: Final = frozenset({"isinstance", "issubclass", "super", "cast"})


@dataclass(eq=False)
class Reach:
    """What code leads to, in one tree on one platform."""

    tree: Tree
    platform: str
    markers: frozenset[str]
    _steps: dict[ClassRef, tuple[frozenset[str], tuple[ClassRef, ...]]] = field(default_factory=dict)

    @cached_property
    def names(self) -> Names:
        """What names stand for, as far as the folder goes: a gate's question is asked in model code."""
        return Names(self.tree, self.platform, inside=self.tree.folder is not None)

    def markers_of(self, start: ClassRef) -> frozenset[str]:
        """The markers that a class leads to."""
        found: set[str] = set()
        seen = {start}
        todo = [start]
        while todo:
            markers, following = self._step(todo.pop())
            found |= markers
            todo += [item for item in following if item not in seen]
            seen |= set(following)
        return frozenset(found)

    def _step(self, ref: ClassRef) -> tuple[frozenset[str], tuple[ClassRef, ...]]:
        """The markers one class or function calls itself, and what it builds or calls."""
        if ref not in self._steps:
            module = self.tree.module(Path(ref.file))
            self._steps[ref] = self._look(module, ref.name) if module is not None else (frozenset(), ())
        return self._steps[ref]

    def _look(self, module: Module, name: str) -> tuple[frozenset[str], tuple[ClassRef, ...]]:
        words = _words(module, name)
        markers = frozenset(self.markers & {word.lstrip(".") for word in words})
        known = self.names.known(module)
        following = [self.names.resolve(module, word) for word in sorted(words - markers) if word in known]
        return markers, tuple(item for item in following if isinstance(item, ClassRef))


def _words(module: Module, name: str) -> frozenset[str]:
    """The names in one statement, gathered once for every platform."""
    if name not in module.words:
        node = module.statements_of.get(name)
        module.words[name] = frozenset(_named(node)) if node is not None else frozenset()
    return module.words[name]


def _named(node: ast.AST) -> Iterator[str]:
    """The names that code builds, calls or hands on."""
    if isinstance(node, ast.Name):
        yield node.id
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        # asked of a class, or found in a module: the dot keeps it apart from names
        yield f".{node.attr}"
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKS_TYPES:
        return
    skipped = ("annotation", "returns") if not isinstance(node, ast.AnnAssign) else ("annotation", "target")
    for name, value in ast.iter_fields(node):
        if name in skipped:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _named(child)
