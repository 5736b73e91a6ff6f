"""What the parity check compares: one entry class as a loader would find it, wherever it was read.

In and out: frozen data. It holds no rule of its own.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["ClassRef", "EntryClass", "Listed", "Trouble", "Uncovered", "Violation"]


class ClassRef(NamedTuple):
    """A class or function statement: the file it stands in, absolute, and its name there."""

    file: str
    name: str


class Listed(NamedTuple):
    """One row of an engine's registry: an entry class by the names a model config may ask for.

    `module` is the file that lists it or the dotted module it lies in; `name` is its name there. `draft` says what the
    table it stands in says; None where the table does not tell drafts from targets. `label` is what reports call it.
    """

    archs: tuple[str, ...]
    module: str
    name: str
    draft: bool | None = None
    label: str = ""


class EntryClass(NamedTuple):
    """One entry class on one platform.

    Attributes:
        name: what reports call it. archs: every name that stands for it.
        file: its source, as reports show it; empty for a live class without one. line: of its class statement.
        hooks: those of the hooks asked for that it answers, its own, inherited or assigned after it.
        unread: bases that could not be read, dotted; what they answer is not known.
        markers: functions of a gated layer that its code, or that of what it builds, calls.
        draft: see `Listed`.
        decorators: what its statement is handed to, but for those that are known to give it no hook.
    """

    name: str
    archs: tuple[str, ...]
    file: str
    line: int
    hooks: frozenset[str]
    unread: tuple[str, ...] = ()
    markers: frozenset[str] = frozenset()
    draft: bool | None = None
    decorators: tuple[str, ...] = ()


class Trouble(NamedTuple):
    """Something that could not be read: a file that does not parse, a listed class that is not there."""

    rule: str
    subject: str
    text: str
    file: str = ""
    line: int = 0


class Violation(NamedTuple):
    """One hook that only one class of a pair has.

    `file` and `line` are those of the class that lacks it; `platforms` are where, empty for everywhere the pair is.
    """

    draft: str
    target: str
    hook: str
    missing_on: Literal["draft", "target"]
    file: str = ""
    line: int = 0
    platforms: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """One line: the pair, the hook and the side that lacks it."""
        has = "target" if self.missing_on == "draft" else "draft"
        where = f" on {', '.join(self.platforms)}" if self.platforms else ""
        pair = f"{self.draft} (draft of {self.target})"
        return f"{pair}: the {self.missing_on} lacks {self.hook}{where}, which the {has} has"


class Uncovered(NamedTuple):
    """An entry class that builds gated layers, by `markers`, and does not answer the gate's hook."""

    name: str
    hook: str
    markers: tuple[str, ...]
    file: str = ""
    line: int = 0
    platforms: tuple[str, ...] = ()
