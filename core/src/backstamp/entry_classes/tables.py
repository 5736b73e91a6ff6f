"""Which classes of a tree are entry classes: the lists that engines keep in source.

In: the modules of a folder. Out: a `Listed` for each row, and a `Trouble` for each statement of a list that cannot be
read whole.
Three forms are known: `EntryClass = X` or `[X, Y]` in a model module (SGLang); tables named `..._MODELS` of
`"Arch": ("module", "Class")` (vLLM); `ModelRegistry.register_model("Arch", "module:Class")`, a vLLM plugin's own.

Source: sglang 0.5.23 srt/models/registry.py:100; vllm 0.33.0 vllm/model_executor/models/registry.py:73, :655.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from backstamp.entry_classes.assigned import elements
from backstamp.entry_classes.engines import ENGINES, PLATFORMS, Engine
from backstamp.entry_classes.facts import Listed, Trouble
from backstamp.entry_classes.names import Names, added_by
from backstamp.entry_classes.platforms import holds, statements
from backstamp.entry_classes.registrations import rows_of_tables
from backstamp.entry_classes.tree import Module, Tree

__all__ = ["Table", "join", "list_classes"]

_ENTRY: Final = "EntryClass"
#: What changes a list in place.
_FILLS: Final = frozenset({"append", "extend", "insert", "remove", "pop", "clear"})


class Table(NamedTuple):
    """The entry classes that a tree lists, and the engine whose form most of them are listed in."""

    rows: tuple[Listed, ...]
    engines: tuple[Engine, ...]
    troubles: tuple[Trouble, ...] = ()


def list_classes(tree: Tree, names: Names) -> Table:
    """Every row of the lists that a folder's modules keep, on any platform."""
    forms: dict[str, dict[Listed, None]] = {"sglang": {}, "vllm": {}}
    troubles: dict[Trouble, None] = {}
    everywhere = [names, *(Names(tree, name) for name in PLATFORMS if name != names.platform)]
    for module in tree.read:
        for form, items in (("sglang", _of_modules(module, everywhere)), ("vllm", rows_of_tables(module, tree))):
            for item in items:
                if isinstance(item, Listed):
                    forms[form][item] = None
                else:
                    text = f"needs a list that can be read, got {ast.unparse(item)[:80]}"
                    shown = tree.shown(module.path)
                    troubles[Trouble("unread-list", module.path.stem, text, shown, item.lineno)] = None
    # one engine's model may carry a line of the other's over
    most = max(forms, key=lambda name: len(forms[name]))
    engines = (ENGINES[most],) if forms[most] else ()
    return Table((*forms["sglang"], *forms["vllm"]), engines, tuple(troubles))


def join(rows: Iterable[Listed]) -> tuple[Listed, ...]:
    """One row for each class, with every name that stands for it; a draft where one of them says so."""
    joined: dict[tuple[str, str], Listed] = {}
    for row in rows:
        key = (row.module, row.name)
        known = joined.get(key)
        archs = row.archs if known is None else tuple(dict.fromkeys((*known.archs, *row.archs)))
        draft = row.draft or (known.draft if known is not None else row.draft)
        joined[key] = row._replace(archs=archs, draft=draft)
    count = Counter(row.name for row in joined.values())
    # two classes of one name are told apart by what a config calls them; the list's own name is no class's
    count[_ENTRY] += 1
    return tuple(row._replace(label=row.name if count[row.name] == 1 else row.archs[0]) for row in joined.values())


def _of_modules(module: Module, everywhere: Sequence[Names]) -> Iterator[Listed | ast.stmt]:
    """`EntryClass` of a model module: all it is ever bound to or given, and the statements that cannot be read."""
    if _ENTRY not in module.text:
        return
    understood: set[ast.stmt] = set()
    for names in everywhere:
        for statement in statements(module.syntax.body, names.platform):
            value = _given_to_entry(statement)
            if value is None:
                continue
            understood.add(statement)
            for item in elements(value, module, names):
                if not isinstance(item, ast.Name | ast.Attribute):
                    yield statement
                elif (text := ast.unparse(item)) != _ENTRY:
                    yield Listed((text.rpartition(".")[2],), str(module.path), text)
        if original := names.imported_as(module, _ENTRY):
            yield Listed((original,), str(module.path), _ENTRY)
    yield from (statement for statement in _touching(module.syntax.body) if statement not in understood)


def _given_to_entry(statement: ast.stmt) -> ast.expr | None:
    """What a statement binds `EntryClass` to, or adds to it."""
    added = added_by(statement)
    if added is not None:
        return added[1] if added[0] == _ENTRY else None
    if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
        return None
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    if not any(isinstance(target, ast.Name) and target.id == _ENTRY for target in targets):
        return None
    # none at all is what a module without the name has
    nothing = isinstance(statement.value, ast.Constant) and statement.value.value is None
    return ast.Tuple([]) if nothing else statement.value


def _touching(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The smallest statements that bind, fill or empty `EntryClass`."""
    for statement in body:
        if isinstance(statement, ast.If):
            said = {holds(statement.test, platform) for platform in PLATFORMS}
            # a branch that no platform takes lists nothing
            yield from _touching(statement.body if said != {False} else ())
            yield from _touching(statement.orelse if said != {True} else ())
        elif isinstance(statement, ast.Try):
            handled = [part for handler in statement.handlers for part in handler.body]
            yield from _touching([*statement.body, *handled, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With):
            yield from _touching(statement.body)
        elif not isinstance(statement, ast.ImportFrom) and any(map(_touches, ast.walk(statement))):
            yield statement


def _touches(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id == _ENTRY and isinstance(node.ctx, ast.Store | ast.Del)
    if isinstance(node, ast.Subscript):
        held = node.value if isinstance(node.ctx, ast.Store | ast.Del) else None
    else:
        fills = isinstance(node, ast.Attribute) and node.attr in _FILLS
        held = node.value if isinstance(node, ast.Attribute) and fills else None
    return isinstance(held, ast.Name) and held.id == _ENTRY
