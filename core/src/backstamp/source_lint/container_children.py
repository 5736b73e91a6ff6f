"""A rule for source: a container of draft steps exposes them as `attn_backends`, or its children are never stamped.

In: what every module says of its classes. Out: a finding for each class that is a container and sets the list neither
itself nor through a class it inherits from. A class is a container where it says so by one of three: its name
(`...MultiStep...Backend`, `...DraftSteps`), a list of backends it makes, one a step, or a list `attn_backends` it reads
from itself.

Source: the draft decode containers of SGLang 0.5.23, which a factory stamps with `for child in backend.attn_backends`.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from backstamp.findings import Finding
from backstamp.source_lint.source import Source, inside, last_name, words_of

__all__ = ["FIX", "RULE", "WHY", "ClassFacts", "classes_of", "container_children"]

RULE: Final = "container-children"
WHY: Final = "children are stamped through attn_backends; a container without it leaves its steps without a stamp"
FIX: Final = "Expose the list of per-step backends as attn_backends, in step order"

_LIST: Final = "attn_backends"
_READS: Final = "it reads self.attn_backends"
_NAME: Final = re.compile(r"multi_?steps?.*backend$|draft_?steps$", re.IGNORECASE)
_STEPS: Final = re.compile(r"(^|_)(num_)?steps?($|_)", re.IGNORECASE)
_BACKEND: Final = re.compile(r"backend", re.IGNORECASE)
#: A class with one of these is called as a backend is: by this contract, or by SGLang's.
_CALLED: Final = frozenset({"plan", "forward", "init_forward_metadata"})
#: Bases from elsewhere that are known to set no list of steps.
_PLAIN: Final = frozenset({"object", "ABC", "Protocol", "Generic", "Module", "NamedTuple", "Enum", "TypedDict"})


class ClassFacts(NamedTuple):
    """What one class says of its steps.

    Attributes:
        bases: the last words of their names, an `import ... as` undone.
        sets: it sets `attn_backends`. why: why it is a container; empty where it is none.
    """

    file: str
    line: int
    place: str
    name: str
    bases: tuple[str, ...]
    sets: bool
    why: str


def classes_of(source: Source) -> Iterator[ClassFacts]:
    """Every class of a module."""
    if not source.of(ast.ClassDef):
        return
    renamed = {name.asname: name.name for node in source.of(ast.ImportFrom) for name in node.names if name.asname}
    sets, reads, made = _setting(source), _reading(source), _making(source)
    for node in source.of(ast.ClassDef):
        # a test of a container bears its name and holds no steps
        if node.name.startswith("Test"):
            continue
        bases = tuple(renamed.get(base, base) for base in map(last_name, node.bases))
        why = _READS if node in reads else ""
        if node in made and _is_called(node):
            why = f"it makes {made[node]}, one a step"
        if _NAME.search(node.name) and not {"Protocol", "Enum", "TypedDict", "NamedTuple"} & set(bases):
            why = "by its name"
        yield ClassFacts(source.file, node.lineno, source.place(node), node.name, bases, node in sets, why)


def container_children(classes: Iterable[ClassFacts]) -> Iterator[Finding]:
    """Every container of all modules together that has no children to stamp."""
    every = list(classes)
    by_name: dict[str, list[ClassFacts]] = {}
    for facts in every:
        by_name.setdefault(facts.name, []).append(facts)
    lent = {base for facts in every if facts.sets for base in facts.bases}
    for facts in every:
        # a mixin, or an abstract base, may leave the list to those that inherit from it
        left = facts.name in lent and (facts.why == _READS or "ABC" in facts.bases)
        if facts.sets or not facts.why or left:
            continue
        sets, unknown = _inherited(facts, by_name)
        if sets:
            continue
        text = f"needs attn_backends, got a container ({facts.why}) that sets none"
        fix = FIX
        if unknown:
            text += f", unless {', '.join(unknown)} does, which was not read"
            fix = f"Check the whole tree, or: {FIX[0].lower()}{FIX[1:]}"
        yield Finding("note" if unknown else "fault", RULE, facts.place, text, fix, facts.file, facts.line)


def _inherited(facts: ClassFacts, by_name: Mapping[str, list[ClassFacts]]) -> tuple[bool, tuple[str, ...]]:
    """Whether a class it inherits from sets the list, and the bases that nobody has read.

    Classes are known by their last name alone: of two with one name, either may be the base.
    """
    waiting, seen, unknown = list(facts.bases), set(), []
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = by_name.get(name, ())
        if any(base.sets for base in found):
            return True, ()
        if not found and name not in _PLAIN:
            unknown.append(name or "a computed base")
        waiting += [base for one in found for base in one.bases]
    return False, tuple(sorted(unknown))


def _setting(source: Source) -> set[ast.ClassDef | None]:
    """Classes that have the list: as an attribute of themselves, as a field or property, or by `setattr`."""
    found: set[ast.AST] = set()
    for attribute in source.of(ast.Attribute):
        if attribute.attr == _LIST and isinstance(attribute.ctx, ast.Store) and _of_self(attribute):
            found.add(attribute)
    for call in source.of(ast.Call):
        if last_name(call.func) in ("setattr", "__setattr__") and _LIST in map(source.text, call.args):
            found.add(call)
    for name in source.of(ast.Name):
        statement = source.parents.get(name)
        of_class = isinstance(source.parents.get(statement), ast.ClassDef) if statement is not None else False
        # `attn_backends = None` in the class says that there is none yet
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            continue
        if name.id == _LIST and isinstance(name.ctx, ast.Store) and of_class:
            found.add(name)
    for function in source.of(ast.FunctionDef):
        if function.name == _LIST and isinstance(source.parents.get(function), ast.ClassDef):
            found.add(function)
    return {source.class_around(node) for node in found}


def _reading(source: Source) -> set[ast.ClassDef | None]:
    """Classes that read the list from themselves."""
    reads = (node for node in source.of(ast.Attribute) if node.attr == _LIST and _of_self(node))
    return {source.class_around(node) for node in reads}


def _is_called(kind: ast.ClassDef) -> bool:
    """Whether a class is called as a backend is: by its name, or by what it defines."""
    methods = {node.name for node in kind.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return bool(_BACKEND.search(kind.name)) or not methods.isdisjoint(_CALLED)


def _making(source: Source) -> dict[ast.ClassDef | None, str]:
    """Classes that make a list of backends over steps, with the list, `self.x`."""
    found: dict[ast.ClassDef | None, str] = {}
    for target in _lists(source):
        if _of_self(target):
            found[source.class_around(target)] = words_of(target)
        elif isinstance(target, ast.Name):
            # a list that is kept under a local name first
            around = source.function_around(target)
            for node in inside(around) if around is not None else ():
                if isinstance(node, ast.Assign) and last_name(node.value) == target.id:
                    kept = (words_of(one) for one in node.targets if _of_self(one))
                    found |= {source.class_around(node): words for words in kept}
    return found


def _lists(source: Source) -> Iterator[ast.expr]:
    """Where a list of backends, one a step, is put: in one expression, or in a loop by `append` or by index."""
    comprehensions: list[ast.ListComp | ast.GeneratorExp] = [*source.of(ast.ListComp), *source.of(ast.GeneratorExp)]
    for node in comprehensions:
        if _over_steps(node.generators[0].iter) and _makes_backend(node.elt):
            at = source.parents[node]
            # list(... for ...) and ModuleList([...]) too
            at = source.parents[at] if isinstance(at, ast.Call) else at
            yield from (
                at.targets if isinstance(at, ast.Assign) else [at.target] if isinstance(at, ast.AnnAssign) else []
            )
    for loop in source.of(ast.For):
        for part in ast.walk(loop) if _over_steps(loop.iter) else ():
            if isinstance(part, ast.Assign) and _makes_backend(part.value):
                yield from (target.value for target in part.targets if isinstance(target, ast.Subscript))
            elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "append":
                yield from (part.func.value for given in part.args if _makes_backend(given))


def _of_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and last_name(node.value) in ("self", "cls")


def _over_steps(node: ast.expr) -> bool:
    """Whether a loop runs over steps, or over a count that does not say of what: `range(n)`, `range(n - 1)`."""
    names = [last_name(part) for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    return any(map(_STEPS.search, names)) or (names[:1] == ["range"] and set(names[1:]) in ({"n"}, {"num"}, {"count"}))


def _makes_backend(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and bool(_BACKEND.search(last_name(node.func)))
