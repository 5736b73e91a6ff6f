"""Third step of reading source: a class statement → the hooks it answers, bases and later assignments included.

In: a `Tree`, a platform and the names of hooks. Out: an `EntryClass`. A hook counts where `getattr` would find
something on the class or, for what `__init__` sets, on its instance: a def, an assignment that is not None, a name
imported into the class body. A bare annotation is nothing. Bases are asked left to right, depth first; one that cannot
be read is told, and what it answers is not known.

.. versionadded:: 0.2
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from backstamp.entry_classes.assigned import assigned_in, bound_in
from backstamp.entry_classes.facts import ClassRef, EntryClass, Listed, Trouble
from backstamp.entry_classes.names import Names, Unread, is_foundation
from backstamp.entry_classes.reach import Reach
from backstamp.entry_classes.tree import Module, Tree

if TYPE_CHECKING:
    import griffe

__all__ = ["Reader"]

#: Decorators by their last word: those of the standard library, and those that engines put on models.
#: Source: vllm 0.33.0 compilation/decorators.py, multimodal/registry.py, model_executor/models/interfaces_base.py.
_GIVE_NO_HOOK: Final = frozenset(
    {
        "dataclass",
        "default_pooling_type",
        "deprecated",
        "final",
        "register_omni_processor",
        "register_processor",
        "runtime_checkable",
        "support_torch_compile",
        "total_ordering",
    }
)


@dataclass(eq=False)
class Reader:
    """Reads the classes of one tree on one platform.

    `on_class` are the hooks a loader asks the class for, before there is an instance; `markers` are the functions whose
    call makes a layer a gated one.
    """

    tree: Tree
    platform: str
    hooks: tuple[str, ...]
    on_class: frozenset[str] = frozenset()
    markers: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> Names:
        """What names stand for on this platform."""
        return Names(self.tree, self.platform)

    @cached_property
    def reach(self) -> Reach:
        """What code builds and calls on this platform."""
        return Reach(self.tree, self.platform, self.markers)

    def ref_of(self, listed: Listed) -> ClassRef | Unread:
        """The class statement behind one row of a registry."""
        module = self.tree.module(Path(listed.module)) if listed.module.endswith(".py") else None
        if module is not None:
            return self.names.resolve(module, listed.name)
        return self.names.resolve_in(listed.module, listed.name)

    def read(self, listed: Listed) -> EntryClass | Unread:
        """One entry class; `Unread` where its class statement is not among the files that may be read."""
        ref = self.ref_of(listed)
        if isinstance(ref, Unread):
            return ref
        module, found = self._class(ref)
        if found is None:
            return Unread(f"{listed.name}, which is no class")
        unread: dict[str, None] = {}
        hooks = frozenset(hook for hook in self.hooks if self._has(ref, hook, unread, set()))
        markers = self.reach.markers_of(ref) if self.markers else frozenset()
        return EntryClass(
            name=listed.label or listed.name,
            archs=tuple(dict.fromkeys((*listed.archs, listed.name, ref.name))),
            file=self.tree.shown(module.path),
            line=found.lineno or 0,
            hooks=hooks,
            unread=tuple(unread),
            markers=markers,
            draft=listed.draft,
            decorators=self._decorators(module, found),
        )

    def _decorators(self, module: Module, found: griffe.Class) -> tuple[str, ...]:
        """The decorators of a class that may give it a hook."""
        node = module.class_statements.get((found.name, found.lineno or 0))
        every = [ast.unparse(item) for item in node.decorator_list] if node is not None else []
        return tuple(text for text in every if text.partition("(")[0].rpartition(".")[2] not in _GIVE_NO_HOOK)

    def _has(self, ref: ClassRef, hook: str, unread: dict[str, None], seen: set[ClassRef]) -> bool:
        """Whether a class answers a hook; `unread` gathers the bases that could not be asked."""
        said = self._says(ref, hook, unread, seen)
        return bool(said)

    def _says(self, ref: ClassRef, hook: str, unread: dict[str, None], seen: set[ClassRef]) -> bool | None:
        """What the first of a class and its bases that knows the name says: something, or None in its place."""
        if ref in seen:
            return None
        seen.add(ref)
        module, found = self._class(ref)
        if found is None:
            unread[ref.name] = None
            return None
        given = self._given.get(ref, {})
        # what was deleted may be inherited
        own = given[hook] if hook in given else self._own(module, found, hook)
        if own is not None:
            return own
        for base in found.bases:
            # Generic[T] stands on Generic
            text = str(base).partition("[")[0]
            behind = self.names.base_of(module, ref, text)
            if isinstance(behind, Unread):
                if not is_foundation(behind):
                    unread[behind.dotted] = None
                continue
            inherited = self._says(behind, hook, unread, seen)
            if inherited is not None:
                return inherited
        return None

    def _own(self, module: Module, found: griffe.Class, hook: str) -> bool | None:
        """Whether a class body has a hook: something, None in its place, or no word of it."""
        import griffe

        node = module.class_statements.get((found.name, found.lineno or 0))
        own = bound_in(node.body, hook, self.platform) if node is not None else None
        member = found.members.get(hook)
        if own is not None or hook in self.on_class or not isinstance(member, griffe.Attribute):
            return own
        # what __init__ sets, an instance has
        if "instance-attribute" not in member.labels or member.value is None:
            return None
        return str(member.value) != "None"

    def _class(self, ref: ClassRef) -> tuple[Module, griffe.Class | None]:
        module = self.tree.module(Path(ref.file))
        assert module is not None
        return module, module.class_named(ref.name)

    @cached_property
    def notes(self) -> tuple[Trouble, ...]:
        """The places where a module may give a class a hook, and which class or which hook could not be read."""
        return tuple(self._assignments[1])

    @property
    def _given(self) -> dict[ClassRef, dict[str, bool | None]]:
        """What modules of the tree give classes after their statements."""
        return self._assignments[0]

    @cached_property
    def _assignments(self) -> tuple[dict[ClassRef, dict[str, bool | None]], list[Trouble]]:
        given: dict[ClassRef, dict[str, bool | None]] = {}
        unread: list[Trouble] = []
        wanted = frozenset(self.hooks)
        for module in self._assigning((*self.hooks, "setattr")):
            for owner, attribute, present, line in assigned_in(module, self.names):
                ref = self.names.resolve(module, owner) if owner else None
                is_class = isinstance(ref, ClassRef) and self._class(ref)[1] is not None
                if isinstance(ref, ClassRef) and attribute in wanted:
                    given.setdefault(ref, {})[attribute] = present
                elif (attribute in wanted and not owner) or (not attribute and is_class):
                    text = f"was not read; it may give {owner or 'a class'} {attribute or 'a hook'}"
                    shown = self.tree.shown(module.path)
                    unread.append(Trouble("unread-assignment", module.path.stem, text, shown, line))
        return given, unread

    def _assigning(self, wanted: Iterable[str]) -> list[Module]:
        """The modules read so far whose text has one of the names at all."""
        every = [module for module in self.tree.modules.values() if module is not None]
        return [module for module in every if any(name in module.text for name in wanted)]
