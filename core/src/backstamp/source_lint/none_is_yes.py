"""A rule for source: no function answers yes about no backend.

In: one module. Out: a finding for each function or lambda that answers a question by what a backend is not
(`backend != "fa3"`, `backend not in (...)`, a list of refusals before `return True`), so that None, which is none of
them, is a yes. A fault where None is known to arrive: an optional parameter or field, or a field of the launch that an
operator may leave unset. A note where that cannot be told.

Source: SGLang #34264: a deny list said yes of a backend nobody had set, and a kernel for Triton alone was taken.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Final, Literal, TypeAlias

from backstamp.findings import Finding
from backstamp.source_lint.deny_lists import is_none, is_word, yes_by_default
from backstamp.source_lint.plain_forms import plain_form
from backstamp.source_lint.source import Function, Source, inside, last_name, words_of

__all__ = ["FIX", "RULE", "WHY", "none_is_yes"]

RULE: Final = "none-is-yes"
WHY: Final = "None is on no list of refusals, so no backend at all is answered with yes"
FIX: Final = "List the backends that may, or refuse None first"

Arrives: TypeAlias = Literal["known", "open", "never"]

_SPEAKS: Final = re.compile(r"(^|_)backend(_(str|name|type|key|kind))?$", re.IGNORECASE)
#: A question by these names is one whose yes refuses.
_SAFE_YES: Final = re.compile(
    r"(^|_)(fall_?back|unset|missing|unsupported|refuses?|rejects?|lacks?)(_|$)", re.IGNORECASE
)
#: A word of its own for "no backend" says that None does not arrive.
_WORDS_FOR_NONE: Final = frozenset({"", "none", "auto", "default", "disabled", "off"})


def none_is_yes(source: Source, field: str) -> Iterator[Finding]:
    """Every predicate of a module that is true for None; `field` is the operator's base field."""
    launch = {field, f"prefill_{field}", f"decode_{field}"}
    for (function, _), (compare, kept) in _subjects(source).items():
        subject = _side(compare)
        arrives = _arrival(source, function, subject, launch)
        # of what a field keeps, only what is known is told
        if arrives == "never" or (arrives == "open" and (kept or not _says_words(source, compare))):
            continue
        given = not isinstance(subject, ast.Name) or _parameter(function, subject.id) is not None
        if yes_by_default(source, _until(function, kept), subject, given=given):
            yield _finding(source, function, compare, arrives)


def _finding(source: Source, function: Function | ast.Lambda, compare: ast.Compare, arrives: Arrives) -> Finding:
    subject = words_of(_side(compare))
    place = source.place(function)
    text = f"needs a no, or an error, where {subject} is None, got yes by {words_of(compare)}"
    if _SAFE_YES.search(place.rpartition(".")[2]):
        return Finding(
            "note", RULE, place, f"{text}, unless that yes is the safe answer", FIX, source.file, compare.lineno
        )
    if arrives == "open":
        return Finding("note", RULE, place, f"{text}, if None arrives", FIX, source.file, compare.lineno)
    return Finding("fault", RULE, place, text, FIX, source.file, compare.lineno)


def _may_answer_yes_or_no(function: Function | ast.Lambda) -> bool:
    """Whether a function is a question: it is annotated as one, or every value it returns may be a yes or a no."""
    if isinstance(function, ast.Lambda):
        return _is_boolean(function.body)
    if function.returns is not None:
        return "bool" in (last_name(function.returns), _constant(function.returns))
    values = [node.value for node in inside(function) if isinstance(node, ast.Return)]
    return bool(values) and all(value is not None and _is_boolean(value) for value in values)


def _is_boolean(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool)
    return not isinstance(node, ast.Tuple | ast.List | ast.Dict | ast.Set | ast.JoinedStr | ast.BinOp)


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _subjects(source: Source) -> dict[tuple[Function | ast.Lambda, str], tuple[ast.Compare, ast.Assign | None]]:
    """What is compared that speaks of a backend, each by its first comparison, with the field that keeps the answer.

    It is a question where a function answers it, or where a method keeps it: `self.use_triton = backend != "fa3"`.
    """
    found: dict[tuple[Function | ast.Lambda, str], tuple[ast.Compare, ast.Assign | None]] = {}
    for at, node in _comparisons(source):
        of_names = len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn | ast.IsNot)
        if of_names and not is_none(node.comparators[0]) and _SPEAKS.search(_spoken(_side(node))):
            function = source.function_around(at)
            answers = function is not None and _may_answer_yes_or_no(function)
            kept = None if answers else _field_of(source, at)
            if function is not None and (answers or kept is not None):
                found.setdefault((function, ast.unparse(_side(node))), (node, kept))
    return found


def _field_of(source: Source, node: ast.AST) -> ast.Assign | None:
    """The statement that keeps an answer on `self`, as it is or turned round."""
    parent = source.parents.get(node)
    while isinstance(parent, ast.BoolOp | ast.UnaryOp):
        node, parent = parent, source.parents.get(parent)
    kept = isinstance(parent, ast.Assign) and any(
        isinstance(target, ast.Attribute) and last_name(target.value) == "self" and not _SAFE_YES.search(target.attr)
        for target in parent.targets
    )
    return parent if kept else None  # type: ignore[return-value]


def _until(function: Function | ast.Lambda, kept: ast.Assign | None) -> Sequence[ast.stmt] | ast.expr:
    """What decides an answer: a whole body, or what stands before a field that keeps it, and its value."""
    if kept is None or isinstance(function, ast.Lambda):
        return function.body
    if kept not in function.body:
        # in a branch, which may have asked about None
        return []
    return [*function.body[: function.body.index(kept)], ast.Return(kept.value)]


def _comparisons(source: Source) -> Iterator[tuple[ast.AST, ast.Compare]]:
    """Every comparison in the order of lines, each in its plain form, with the node of the tree it stands for."""
    nodes: list[ast.expr | ast.stmt] = [*source.of(ast.Compare), *source.of(ast.Match), *source.of(ast.Call)]
    for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
        form = plain_form(node)
        if isinstance(form, ast.Compare):
            yield node, form
        elif form is not node:
            # what stands in the cases of a match has its own place
            asks = [form.test] if isinstance(form, ast.If) else [form]
            while isinstance(form, ast.If) and form.orelse and isinstance(form.orelse[0], ast.If):
                form = form.orelse[0]
                asks.append(form.test)
            yield from ((node, part) for ask in asks for part in ast.walk(ask) if isinstance(part, ast.Compare))


def _side(node: ast.Compare) -> ast.expr:
    """The side of a comparison that is asked about."""
    side = node.comparators[0] if is_word(node.left) else node.left
    return side.value if isinstance(side, ast.NamedExpr) else side


def _spoken(node: ast.expr) -> str:
    """The word an expression goes by: a name, an attribute, or the key of a lookup."""
    key = _key_of(node)
    return key if key else last_name(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def _key_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "get", "getenv"):
        at = 1 if last_name(node.func) == "getattr" else 0
        return str(_constant(node.args[at])) if len(node.args) > at else ""
    return str(_constant(node.slice)) if isinstance(node, ast.Subscript) else ""


def _says_words(source: Source, node: ast.Compare) -> bool:
    """Whether a comparison is with names of backends as an operator types them, none of them a word for no backend."""
    other = node.left if _side(node) is node.comparators[0] else node.comparators[0]
    texts = source.items(other) or (source.text(other),)
    return all(text is not None and text.lower() not in _WORDS_FOR_NONE for text in texts)


def _arrival(source: Source, function: Function | ast.Lambda, node: ast.expr, launch: set[str]) -> Arrives:
    """Whether None arrives in an expression: known, never, or open where it cannot be told."""
    if _key_of(node):
        return _of_lookup(node, launch)
    if isinstance(node, ast.Name):
        parameter = _parameter(function, node.id)
        if parameter is not None:
            return _of_annotation(*parameter)
        value = source.locals_of(function).get(node.id)
        # what a function resolved is what this rule asks for
        plain = isinstance(value, ast.Attribute) or (value is not None and _key_of(value))
        return _arrival(source, function, value, launch) if value is not None and plain else "never"
    if not isinstance(node, ast.Attribute):
        return "never"
    if last_name(node.value) in ("self", "cls"):
        return _of_own_field(source, function, node.attr, launch)
    return "known" if node.attr in launch else "open"


def _of_lookup(node: ast.expr, launch: set[str]) -> Arrives:
    if isinstance(node, ast.Subscript):
        return "known" if _key_of(node) in launch else "open"
    assert isinstance(node, ast.Call)
    name = last_name(node.func)
    default = node.args[2 if name == "getattr" else 1 :]
    if name == "getattr" and not default:
        return "known" if _key_of(node) in launch else "open"
    # a default of its own arrives in place of None
    return "known" if not default or is_none(default[0]) else "never"


def _parameter(function: Function | ast.Lambda, name: str) -> tuple[ast.expr | None, ast.expr | None] | None:
    """The annotation and the default of a parameter; None where there is no parameter of that name."""
    given = function.args
    by_place = (*given.posonlyargs, *given.args)
    defaults: Sequence[ast.expr | None] = (*[None] * (len(by_place) - len(given.defaults)), *given.defaults)
    for argument, default in (
        *zip(by_place, defaults, strict=True),
        *zip(given.kwonlyargs, given.kw_defaults, strict=True),
    ):
        if argument.arg == name:
            return argument.annotation, default
    return None


def _of_annotation(annotation: ast.expr | None, default: ast.expr | None) -> Arrives:
    words = ast.unparse(annotation) if annotation is not None else ""
    if is_none(default) or re.search(r"\b(Optional|None)\b", words):
        return "known"
    # a str that is annotated is still handed None by a caller who has one
    return "open" if not words or re.fullmatch(r"['\"]?(str|Any|object)['\"]?", words) else "never"


def _of_own_field(source: Source, function: ast.AST, name: str, launch: set[str]) -> Arrives:
    """What the class of a method says of its field: by an annotation, or by what a parameter gives it."""
    kind = source.class_around(function)
    found: list[Arrives] = []
    for node in ast.walk(kind) if kind is not None else ():
        if isinstance(node, ast.AnnAssign) and last_name(node.target) == name:
            found.append(_of_annotation(node.annotation, node.value))
        elif isinstance(node, ast.Assign) and any(last_name(target) == name for target in node.targets):
            around = source.function_around(node)
            given = _parameter(around, node.value.id) if around and isinstance(node.value, ast.Name) else None
            found.append("known" if is_none(node.value) else _of_annotation(*given) if given else "open")
    if "known" in found or name in launch:
        return "known"
    return "never" if found and set(found) == {"never"} else "open"
