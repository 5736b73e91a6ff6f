"""First step of reading source: dotted names to files, and files to syntax.

In: a folder of model modules, or the packages installed here. Out: `Module`s, each read once: its syntax tree, and its
classes as griffe's static visitor sees them. Nothing is imported or inspected (what griffe calls
`allow_inspection=False`). A file that does not parse is kept as a `Trouble`, never passed over.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from backstamp.entry_classes.facts import Trouble
from backstamp.errors import BadInput, NotInstalled
from backstamp.source_lint.linting import python_files
from backstamp.text import plain

if TYPE_CHECKING:
    import griffe

__all__ = ["Module", "Tree", "garbage_waits", "need_griffe"]


@contextmanager
def garbage_waits() -> Iterator[None]:
    """Without collections: syntax trees are millions of objects that all live on, and each collection walks them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def need_griffe() -> None:
    """Say which extra is missing before anything is read.

    Raises:
        NotInstalled: griffe is not importable.
    """
    try:
        import griffe  # noqa: F401
    except ImportError as cause:
        needed, fix = "griffe, to read classes without importing them", "pip install 'backstamp[parity]'"
        raise NotInstalled("backstamp parity", needed=needed, found=str(cause), fix=fix) from cause


@dataclass(frozen=True)
class Module:
    """One source file: its text and its syntax tree."""

    path: Path
    text: str
    syntax: ast.Module

    @cached_property
    def classes(self) -> dict[str, griffe.Class]:
        """Its top-level classes; of two with one name, in two branches, the later."""
        import griffe

        with warnings.catch_warnings():
            # an escape sequence in somebody else's string is not this check's business
            warnings.simplefilter("ignore")
            read = griffe.visit(self.path.stem, filepath=self.path, code=self.text)
        return {name: item for name, item in read.members.items() if isinstance(item, griffe.Class)}

    def class_named(self, dotted: str) -> griffe.Class | None:
        """A class, also one inside another, as `Outer.Inner`."""
        import griffe

        head, *rest = dotted.split(".")
        found = self.classes.get(head)
        for name in rest:
            inner = found.members.get(name) if found is not None else None
            found = inner if isinstance(inner, griffe.Class) else None
        return found

    @cached_property
    def class_statements(self) -> dict[tuple[str, int], ast.ClassDef]:
        """Every class statement, by its name and the line it, or its first decorator, stands at."""
        found = [node for node in ast.walk(self.syntax) if isinstance(node, ast.ClassDef)]
        return {
            (node.name, line): node
            for node in found
            for line in (node.lineno, *(item.lineno for item in node.decorator_list[:1]))
        }

    @cached_property
    def statements_of(self) -> dict[str, ast.ClassDef | ast.FunctionDef]:
        """Its classes and functions as syntax, by name, branches of the top level included."""
        found: dict[str, ast.ClassDef | ast.FunctionDef] = {}
        todo: list[ast.AST] = [self.syntax]
        while todo:
            for child in ast.iter_child_nodes(todo.pop()):
                if isinstance(child, ast.ClassDef | ast.FunctionDef):
                    found[child.name] = child
                elif isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
                    todo.append(child)
        return found

    @cached_property
    def words(self) -> dict[str, frozenset[str]]:
        """What each of those statements names to build, call or hand on; filled by whoever asks."""
        return {}


@dataclass
class Tree:
    """The files that may be read: those of a folder and of the package it lies in, and, `installed`, every package
    that is installed here.
    """

    folder: Path | None = None
    installed: bool = False
    beside: Path | None = None
    modules: dict[Path, Module | None] = field(default_factory=dict)
    troubles: dict[Path, Trouble] = field(default_factory=dict)
    _tops: dict[str, Path | None] = field(default_factory=dict)
    _found: dict[tuple[str, int, Path | None], Path | None] = field(default_factory=dict)

    @classmethod
    def of_folder(cls, folder: Path, beside: Path | None = None) -> Tree:
        """Every module under a folder, read.

        Raises:
            BadInput: no such folder, or no Python file in it.
        """
        inside = folder.resolve()
        above = beside.resolve() if beside is not None else None
        tree = cls(folder=inside, beside=above if above is not None and inside.is_relative_to(above) else None)
        if not folder.is_dir():
            raise BadInput("--source", needed="a folder of Python files", found=f"{folder}, which is none")
        files = [path for path in sorted(python_files(tree.inside)) if not path.name.startswith("._")]
        if not files:
            raise BadInput("--source", needed="a folder of Python files", found=f"{folder}, which holds none")
        with garbage_waits():
            for path in files:
                tree.module(path)
        return tree

    @property
    def inside(self) -> Path:
        """The folder that is read whole."""
        assert self.folder is not None
        return self.folder

    @property
    def read(self) -> tuple[Module, ...]:
        """The modules of the folder that could be read, in order of their paths."""
        inside = [path for path in self.modules if self.folder is not None and path.is_relative_to(self.folder)]
        return tuple(module for path in sorted(inside) if (module := self.modules[path]) is not None)

    @cached_property
    def root(self) -> Path | None:
        """What absolute imports start from: above the outermost package the folder is seen to lie in, else itself."""
        if self.folder is None:
            return None
        above = {path.name: path for path in reversed([self.folder, *self.folder.parents]) if path.name}
        for module in self.read:
            for node in ast.walk(module.syntax):
                if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                    top, _, rest = node.module.partition(".")
                    if top in above and (not rest or located(above[top] / rest.partition(".")[0]) is not None):
                        return above[top].parent
        return self.folder

    def module(self, path: Path) -> Module | None:
        """A file, read once; None where it cannot be, which `troubles` says."""
        if path not in self.modules:
            self.modules[path] = self._read(path)
        return self.modules[path]

    def find(self, dotted: str, level: int = 0, importer: Path | None = None) -> Path | None:
        """The file of a module as an import names it; None where there is none among those that may be read."""
        start = importer.parent if level and importer is not None else None
        key = (dotted, level, start)
        if key not in self._found:
            self._found[key] = self._find(dotted, level, start)
        return self._found[key]

    def _find(self, dotted: str, level: int, start: Path | None) -> Path | None:
        parts = dotted.split(".") if dotted else []
        if start is not None:
            for _ in range(level - 1):
                start = start.parent
            return located(start.joinpath(*parts))
        if not parts:
            return None
        top = self._top(parts[0])
        return None if top is None else located(top.joinpath(*parts))

    def shown(self, path: Path) -> str:
        """A path as reports show it: relative to the folder that was asked for, or to the package it lies in."""
        starts = (self.beside, self.folder, self.root, *(top for top in self._tops.values() if top is not None))
        for start in starts:
            if start is not None and path.is_relative_to(start):
                return path.relative_to(start).as_posix()
        return path.as_posix()

    def _top(self, name: str) -> Path | None:
        """The folder a top-level package lies in; finding it runs none of its code."""
        if self.root is not None and located(self.root / name) is not None:
            return self.root
        if not self.installed:
            return None
        if name not in self._tops:
            self._tops[name] = _installed_at(name)
        return self._tops[name]

    def _read(self, path: Path) -> Module | None:
        try:
            # reads the byte order mark and the coding line as the interpreter does
            with tokenize.open(path) as stream:
                text = stream.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Module(path, text, ast.parse(text, str(path)))
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as cause:
            line = cause.lineno or 0 if isinstance(cause, SyntaxError) else 0
            text = plain(f"needs source that parses, got {type(cause).__name__}: {cause}")
            shown = self.shown(path) if self.folder is not None else path.name
            self.troubles[path] = Trouble("unread-source", shown, text, shown, line)
            return None


def located(stem: Path) -> Path | None:
    """The file of a module whose path without suffix this is; a package without `__init__.py` is its folder."""
    for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
        if path.is_file():
            return path
    return stem if stem.is_dir() else None


def _installed_at(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ())
    if places:
        return Path(places[0]).resolve().parent
    return Path(spec.origin).resolve().parent if spec.origin and spec.origin.endswith(".py") else None
