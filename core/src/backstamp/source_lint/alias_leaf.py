"""A rule for source: no leaf of a factory answers an alias, for an alias that is never a kernel is never a stamp.

In: one module, the aliases that name no kernel, and the factories that are declared. Out: a finding for each `Built`,
pair or stamp that says one, and for each declared factory of which it cannot be told what it answers.

Source: SGLang #34264: a draft-extend backend stamped with the key that was asked for crashed its first forward.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from typing import Final

from backstamp.catalogue import Catalogue
from backstamp.findings import Finding
from backstamp.source_lint.leaves import Answer, Leaves, assigned
from backstamp.source_lint.source import Source, last_name, words_of

__all__ = ["FIX", "RULE", "WHY", "alias_leaf", "aliases_of", "declared_in", "untold"]

RULE: Final = "alias-leaf"
WHY: Final = "a stamp names the kernel that runs, and an alias runs nothing: it names other kernels"
FIX: Final = "Answer the name of the kernel that is built"

_STAMPS: Final = re.compile(r"(prefill|decode)_attention_backend_str$")
_NO_BACKENDS: Final = (ast.Constant, ast.JoinedStr, ast.List, ast.Dict, ast.Set, ast.Compare, ast.BinOp, ast.UnaryOp)
_FACTORY: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*$")


def aliases_of(catalogue: Catalogue) -> frozenset[str]:
    """Keys that only name other kernels; a key may also be the name of the first of its kernels."""
    return frozenset(at.alias.key for at in catalogue.aliases.values() if at.alias.key not in at.alias.kernels)


def alias_leaf(source: Source, aliases: frozenset[str]) -> Iterator[Finding]:
    """Every leaf and stamp of a module that says one of the aliases."""
    for node, answer in _said(source, Leaves(source)):
        if answer.kernel in aliases:
            text = f"needs the name of a kernel, got the alias {answer.kernel!r} in {answer.words}"
            yield Finding("fault", RULE, source.place(node), text, FIX, source.file, answer.line)


def _said(source: Source, leaves: Leaves) -> Iterator[tuple[ast.AST, Answer]]:
    """Every name a leaf or a stamp of the module says, with its node."""
    for call in source.of(ast.Call):
        yield from ((call, answer) for answer in leaves.made_by(call))
        for stamped in _stamped(call):
            yield from ((call, answer) for answer in leaves.names(stamped, call))
    for pair in source.of(ast.Tuple):
        if _is_answer(source, pair):
            yield from ((pair, answer) for answer in leaves.names(pair.elts[0], pair))
    for node in source.of(ast.Assign):
        stamped_by = [value for target, value in assigned(node) if _STAMPS.match(_attribute(target))]
        for value in dict.fromkeys(stamped_by):
            yield from ((node, answer) for answer in leaves.names(value, node))


def _attribute(target: ast.expr) -> str:
    return target.attr if isinstance(target, ast.Attribute) else ""


def _is_answer(source: Source, pair: ast.Tuple) -> bool:
    """Whether a tuple is a name and a backend, or none, that a function or lambda returns."""
    parent = source.parents.get(pair)
    while isinstance(parent, ast.IfExp):
        parent = source.parents.get(parent)
    if not isinstance(parent, ast.Return | ast.Lambda) or len(pair.elts) != 2:
        return False
    # ("fa3", "fa3") is a pair of names, ("fa3", True) an answer to a question, ("fa3", int(x)) a parsed text
    backend = pair.elts[1]
    if isinstance(backend, ast.Call):
        made = last_name(backend.func)
        return not (isinstance(backend.func, ast.Name) and hasattr(builtins, made)) and not made.endswith("Error")
    of_words = isinstance(backend, _NO_BACKENDS) and not (isinstance(backend, ast.Constant) and backend.value is None)
    return not of_words and source.text(backend) is None


def _stamped(call: ast.Call) -> Iterator[ast.expr]:
    """The expressions for a kernel, where a call makes or sets a stamp."""
    name = last_name(call.func)
    # of another kind of row, a kernel may be what was asked for
    of_stamp = name == "Stamp" or (name == "replace" and bool(call.args) and "stamp" in words_of(call.args[0]).lower())
    for item in call.keywords:
        if item.arg is not None and (_STAMPS.match(item.arg) or (of_stamp and item.arg == "kernel")):
            yield item.value
    key = call.args[1] if name == "setattr" and len(call.args) == 3 else None
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and _STAMPS.match(key.value):
        yield call.args[2]


def declared_in(source: Source) -> Iterator[str]:
    """The factories, `module:callable`, that the offers of a module declare."""
    for call in source.of(ast.Call):
        for item in call.keywords if last_name(call.func) in ("Offer", "replace") else ():
            text = source.text(item.value) if item.arg == "factory" else None
            if text is not None and _FACTORY.match(text):
                yield text


def untold(source: Source, functions: Iterable[str]) -> Iterator[Finding]:
    """The faults of functions of a module that are declared as factories and answer what cannot be told."""
    leaves = Leaves(source)
    fix = "Return Built with the name written in it, here or through functions of this module"
    for function in functions:
        unknown = [Answer(None, 0, "no function of that name")]
        for answer in leaves.answers(function) if function in leaves.functions else unknown:
            if answer.kernel is None:
                text = f"needs Built with a name that can be read, got {answer.words} in a declared factory"
                yield Finding("fault", RULE, function, text, fix, source.file, answer.line)
