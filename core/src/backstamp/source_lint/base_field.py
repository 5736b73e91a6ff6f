"""A rule for source: nobody reads the base field alone, for a launch that sets one half leaves it unset.

In: one module. Out: a finding for each read, however it is spelled: an attribute, a lookup by name, a pattern, a format
string. A write, a definition and `hasattr` are no reads. Two kinds of reading are notes: the fallback beside a half,
which is how a pair is made, and a class that keeps a field of this name and no halves.

Source: SGLang #34264: seven decisions read a base field nobody had set.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from backstamp.findings import Finding, Level
from backstamp.source_lint.halves import halves_of, is_fallback
from backstamp.source_lint.source import Source, last_name, words_of

__all__ = ["FIX", "RULE", "WHY", "base_field"]

RULE: Final = "base-field"
WHY: Final = "a launch that sets one half (prefill, decode) leaves the base field unset, so it answers for nobody"
FIX: Final = "Ask the resolved pair for the half that is meant"

_GETTERS: Final = re.compile(r"_*(getattr(_static)?|get|read|fetch|look_?up)(_|$)|__(getattribute|getattr|getitem)__$")
_TAKERS: Final = ("pop", "setdefault")
_PATHS: Final = ("attrgetter", "itemgetter")


def base_field(source: Source, field: str) -> Iterator[Finding]:
    """Every read of the field, one finding a line."""
    found: dict[int, Finding] = {}
    nodes: list[ast.expr | ast.pattern] = [*_attributes(source, field), *_lookups(source, field)]
    nodes += _patterns(source, field)
    for node in nodes:
        finding = _finding(source, node, field)
        # a line that reads it twice is read once; a fault outweighs a note
        if finding.line not in found or finding.level == "fault":
            found[finding.line] = finding
    for loop, halves in _loops(source, field):
        needs = "one function that makes the pair" if halves else "the half that is meant"
        text = f"needs {needs}, got a loop over names that reads {field} among them"
        level: Level = "note" if halves else "fault"
        found.setdefault(loop.lineno, Finding(level, RULE, source.place(loop), text, FIX, source.file, loop.lineno))
    yield from found.values()


def _finding(source: Source, node: ast.expr | ast.pattern, field: str) -> Finding:
    place, line = source.place(node), node.lineno
    spelled = words_of(node) if isinstance(node, ast.expr) else f"a pattern that names {field}"
    if is_fallback(source, node, field):
        text = f"needs one function that makes the pair, got {spelled} as the fallback of a half"
        return Finding("note", RULE, place, text, "Make the pair in one place and list that file", source.file, line)
    if _is_own(source, node, field):
        text = f"needs to hold a half, got {spelled} of a class that keeps no halves"
        return Finding("note", RULE, place, text, "Name it for the half it was given", source.file, line)
    return Finding("fault", RULE, place, f"needs the half that is meant, got {spelled}", FIX, source.file, line)


def _attributes(source: Source, field: str) -> Iterator[ast.expr]:
    for node in source.of(ast.Attribute):
        if node.attr != field or isinstance(node.ctx, ast.Del):
            continue
        parent = source.parents.get(node)
        # x.field += ... reads it; x.field() is a method of that name; Args.field is the default a class declares
        if isinstance(node.ctx, ast.Store):
            wanted = isinstance(parent, ast.AugAssign)
        else:
            called = isinstance(parent, ast.Call) and parent.func is node
            wanted = not called and not _is_class(node.value)
        if wanted:
            yield node


def _is_class(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and bool(re.match(r"_*[A-Z]\w*[a-z]", node.id))


def _lookups(source: Source, field: str) -> Iterator[ast.expr]:
    for subscript in source.of(ast.Subscript):
        loads = isinstance(subscript.ctx, ast.Load) or isinstance(source.parents.get(subscript), ast.AugAssign)
        of_type = last_name(subscript.value) in ("Literal", "Annotated")
        if loads and not of_type and source.text(subscript.slice) == field:
            yield subscript
    for call in source.of(ast.Call):
        if any(field in texts for texts in (_asked(source, call), _formatted(source, call))):
            yield call
    for compare in source.of(ast.Compare):
        inquires = len(compare.ops) == 1 and isinstance(compare.ops[0], ast.In | ast.NotIn)
        # in a text or a list of words it is a word
        of_words = isinstance(compare.comparators[0], ast.Constant | ast.JoinedStr | ast.Tuple | ast.List | ast.Set)
        if inquires and not of_words and source.text(compare.left) == field:
            yield compare
        if _is_key_of_items(source, compare, field):
            yield compare
    for operation in source.of(ast.BinOp):
        template = source.text(operation.left) if isinstance(operation.op, ast.Mod) else None
        if template is not None and f"%({field})" in template:
            yield operation


def _is_key_of_items(source: Source, compare: ast.Compare, field: str) -> bool:
    """Whether a loop over keys and values, `.items()`, picks the field by its key."""
    sides = (compare.left, compare.comparators[0])
    keys = {side.id for side in sides if isinstance(side, ast.Name)}
    if len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq) or field not in map(source.text, sides):
        return False
    at: ast.AST | None = compare
    while at is not None:
        comprehends = isinstance(at, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp)
        for loop in [at] if isinstance(at, ast.For) else at.generators if comprehends else ():  # type: ignore[attr-defined]
            over, target = loop.iter, loop.target
            of_items = isinstance(over, ast.Call) and last_name(over.func) == "items"
            if of_items and isinstance(target, ast.Tuple) and target.elts and last_name(target.elts[0]) in keys:
                return True
        at = source.parents.get(at)
    return False


def _asked(source: Source, call: ast.Call) -> set[str]:
    """What a call looks up by name."""
    name = last_name(call.func)
    given = [*call.args, *(item.value for item in call.keywords if item.arg in ("name", "key", "field", "attr"))]
    texts = [text for text in map(source.text, given) if text is not None]
    if name in _PATHS:
        return {part for text in texts for part in text.split(".")}
    if name in _TAKERS:
        # a statement of its own takes nothing out to look at
        return set(texts[:1]) if not isinstance(source.parents.get(call), ast.Expr) else set()
    if name == "get" and call.args:
        # what stands second is the answer for a key that is not there
        texts = [text for text in (source.text(call.args[0]),) if text is not None]
    return set(texts) if _GETTERS.match(name) else set()


def _formatted(source: Source, call: ast.Call) -> set[str]:
    """What a template takes from what it is given: `{args.field}`, `{args[field]}`, `{field}`."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in ("format", "format_map"):
        return set()
    template = source.text(function.value) or ""
    own = {item.arg for item in call.keywords if item.arg}
    taken = set()
    for path in re.findall(r"\{([^{}!:]*)", template):
        head, *rest = re.split(r"[.\[]", path.replace("]", ""))
        taken |= {*rest, *({head} - own)}
    return taken


def _patterns(source: Source, field: str) -> Iterator[ast.pattern]:
    for pattern in source.of(ast.MatchClass):
        if field in pattern.kwd_attrs:
            yield pattern
    for mapping in source.of(ast.MatchMapping):
        if field in map(source.text, mapping.keys):
            yield mapping


def _loops(source: Source, field: str) -> Iterator[tuple[ast.expr | ast.stmt, bool]]:
    """Reads by the names a loop runs over, and whether the halves are among them."""
    pairs: list[tuple[ast.expr, ast.expr, ast.AST]] = [(node.target, node.iter, node) for node in source.of(ast.For)]
    for generator in source.of(ast.comprehension):
        pairs.append((generator.target, generator.iter, source.parents[generator]))
    for target, over, scope in pairs:
        items = source.items(over) if isinstance(target, ast.Name) else None
        if items is None or field not in items:
            continue
        assert isinstance(target, ast.Name)
        for node in ast.walk(scope):
            keys: list[ast.expr] = []
            if isinstance(node, ast.Call) and _GETTERS.match(last_name(node.func)):
                keys = node.args
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                keys = [node.slice]
            if any(isinstance(key, ast.Name) and key.id == target.id for key in keys):
                assert isinstance(node, ast.expr)
                yield node, halves_of(field) <= set(items)
                break


def _is_own(source: Source, node: ast.AST, field: str) -> bool:
    """Whether a class reads a field that it sets itself, and has no halves beside it."""
    if not isinstance(node, ast.Attribute) or last_name(node.value) not in ("self", "cls"):
        return False
    kind = source.class_around(node)
    if kind is None:
        return False
    names, sets = set(), False
    for item in ast.walk(kind):
        if isinstance(item, ast.Attribute | ast.Name):
            name = last_name(item)
            names.add(name)
            sets = sets or (name == field and isinstance(item.ctx, ast.Store) and _is_kept(source, item, kind))
    return sets and names.isdisjoint(halves_of(field))


def _is_kept(source: Source, item: ast.Attribute | ast.Name, kind: ast.ClassDef) -> bool:
    if isinstance(item, ast.Attribute):
        return last_name(item.value) in ("self", "cls")
    return source.parents.get(source.parents[item]) is kind
