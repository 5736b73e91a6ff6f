"""Step 1 of linting source: a file becomes a tree, and the tree answers what every rule asks of it.

In: the bytes of one Python file. Out: a `Source`, or why the file cannot be read and where. It imports and runs nothing
of what it reads.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias, TypeVar, cast

from backstamp.findings import Finding
from backstamp.text import plain

__all__ = ["UNREADABLE", "Function", "Source", "inside", "last_name", "read_source", "unreadable", "words_of"]

#: The rule a file breaks that no rule can read.
UNREADABLE: Final = "unreadable"

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)


# no slots: what is asked for once is kept in the instance's dictionary
@dataclass(frozen=True, eq=False)
class Source:
    """One parsed module: `file` as findings name it, its nodes by their kind, and the node each of them stands in."""

    file: str
    tree: ast.Module
    nodes: Mapping[type[ast.AST], Sequence[ast.AST]]
    parents: Mapping[ast.AST, ast.AST]

    def of(self, kind: type[Node]) -> Sequence[Node]:
        """Every node of one kind."""
        return cast("Sequence[Node]", self.nodes.get(kind, ()))

    @cached_property
    def constants(self) -> Mapping[str, ast.expr]:
        """Names that are bound once in the module, at its top, with what they are bound to."""
        bound = Counter(node.id for node in self.of(ast.Name) if not isinstance(node.ctx, ast.Load))
        bound.update(node.arg for node in self.of(ast.arg))
        found = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if isinstance(target, ast.Name) and bound[target.id] == 1:
                    found[target.id] = node.value
        return found

    @cached_property
    def _locals(self) -> dict[ast.AST, Mapping[str, ast.expr]]:
        return {}

    def locals_of(self, function: Function | ast.Lambda) -> Mapping[str, ast.expr]:
        """The names a function gives a value once, with what it is."""
        if function not in self._locals:
            self._locals[function] = _bound_once(function)
        return self._locals[function]

    def named(self, node: ast.Name) -> ast.expr | None:
        """The one value of a name: what its function gives it, or else a constant of the module."""
        function = self.function_around(node)
        own = self.locals_of(function).get(node.id) if function is not None else None
        return self.constants.get(node.id) if own is None else own

    def text(self, node: ast.AST | None, follow: bool = True) -> str | None:
        """The string an expression is, through a name, a template and `+`; None where it is none."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            # one name deep: two may be each other's
            return self.text(self.named(node), follow=False) if follow else None
        parts: Sequence[ast.expr] = ()
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            parts = (node.left, node.right)
        texts = [self.text(part, follow) for part in parts]
        return "".join(text for text in texts if text is not None) if texts and None not in texts else None

    def items(self, node: ast.AST | None) -> tuple[str | None, ...] | None:
        """The strings in a literal tuple, list or set, also by its name; None for what is no string."""
        if isinstance(node, ast.Name):
            node = self.named(node)
        if isinstance(node, ast.Call) and last_name(node.func) in ("frozenset", "set", "tuple", "list") and node.args:
            node = node.args[0]
        return (
            tuple(self.text(item) for item in node.elts) if isinstance(node, ast.Tuple | ast.List | ast.Set) else None
        )

    def place(self, node: ast.AST) -> str:
        """The class and function a node stands in, dotted; "module" at its top."""
        names: list[str] = []
        at: ast.AST | None = node
        while at is not None:
            if isinstance(at, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.append(at.name)
            at = self.parents.get(at)
        return ".".join(reversed(names)) or "module"

    def function_around(self, node: ast.AST | None) -> Function | ast.Lambda | None:
        """The innermost function or lambda a node stands in, or is."""
        while node is not None and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            node = self.parents.get(node)
        return node

    def class_around(self, node: ast.AST | None) -> ast.ClassDef | None:
        """The innermost class a node stands in, or is."""
        while node is not None and not isinstance(node, ast.ClassDef):
            node = self.parents.get(node)
        return node


def read_source(file: str, data: bytes) -> Source | Finding:
    """The tree of a file, or the fault that it cannot be parsed; a byte order mark and an encoding line count."""
    try:
        # what a file's own strings and comparisons are warned about is not ours to tell
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
    except SyntaxError as error:
        return unreadable(file, error.msg or "a syntax error", error.lineno or 0)
    except (ValueError, LookupError) as error:
        return unreadable(file, str(error))
    except (RecursionError, MemoryError):
        return unreadable(file, "expressions nested too deeply")
    return Source(file, tree, *_index(tree))


def _index(tree: ast.Module) -> tuple[dict[type[ast.AST], list[ast.AST]], dict[ast.AST, ast.AST]]:
    """Every node by its kind, and the node it stands in; what is one object for all (`ctx`, operators) is left out."""
    nodes: defaultdict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    parents: dict[ast.AST, ast.AST] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        nodes[type(node)].append(node)
        for name in node._fields:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, _SHARED):
                    parents[child] = node
                    waiting.append(child)
    return nodes, parents


_SHARED: Final = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def unreadable(file: str, found: str, line: int = 0) -> Finding:
    """The fault of a file that no rule can look at."""
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    text = f"needs source that {version} can parse, got {plain(found)}"
    fix = "Correct it, run the check with a newer Python, or list the file with the reason it is no Python"
    return Finding("fault", UNREADABLE, "file", text, fix, file, max(line, 0))


def inside(function: ast.AST) -> Iterator[ast.AST]:
    """What a function's body holds, without the functions and classes inside it, in no order."""
    body = function.body if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else []
    waiting: list[ast.AST] = list(body) if isinstance(body, list) else [body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)


def _bound_once(function: Function | ast.Lambda) -> dict[str, ast.expr]:
    """The names a function binds once, by a plain assignment; a parameter is bound by who calls."""
    given = function.args
    bound = Counter(argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs))
    plain: dict[str, ast.expr] = {}
    for node in inside(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound[node.id] += 1
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            plain |= {target.id: node.value for target in targets if isinstance(target, ast.Name)}
    return {name: value for name, value in plain.items() if bound[name] == 1}


def last_name(node: ast.AST | None) -> str:
    """The last word of a dotted name, subscripts aside: `f` of `a.b.f` and of `f[int]`; empty for anything else."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def words_of(node: ast.AST) -> str:
    """An expression as one short line."""
    return plain(ast.unparse(node), most=100)
