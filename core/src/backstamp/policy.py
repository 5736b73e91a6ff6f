"""How strictly a launch is read, and whose kernels `auto` may take.

In: what the operator says. Out: one frozen `Policy`, its distributions' names as packaging compares them.

.. versionadded:: 0.1
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from backstamp.errors import BadInput
from backstamp.request_checks import check_flag
from backstamp.text import canonical, qualified

__all__ = ["BYPASSABLE", "Policy"]

#: Checks of an installation that an operator may switch off; the machine's and the model's may not be.
BYPASSABLE: Final = frozenset({"companion", "library_version", "library_unknown"})

Layers: TypeAlias = Literal["auto", "uniform", "per_layer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How strictly a launch is read.

    Attributes:
        strict: every warning about a lost, changed or failed choice is an error.
        layers: "uniform" one kernel for all layers of a component, "per_layer" the best for each, "auto" uniform
            where one kernel can and per layer where none can.
        allow, deny: distributions that may, or may not, be chosen by `auto`; an empty `allow` allows all. A lock's
            distributions are an `allow` list.
        duplicates: `distribution:name` for each name two distributions claim: that one's is meant.
        bypass: check codes the operator switched off, recorded on the stamp ("companion", "library_version").
        keep_graph: `auto` ranks kernels that keep the engine's CUDA-graph level above those that lose it.
        per_rank: ranks on unlike hosts may run unlike kernels; without it one kernel must serve them all.

    Raises:
        BadInput: a value of another type, an unknown word, or a distribution both allowed and denied.
    """

    strict: bool = False
    layers: Layers = "auto"
    duplicates: frozenset[str] = frozenset()
    keep_graph: bool = False
    per_rank: bool = False
    allow: frozenset[str] = frozenset()
    deny: frozenset[str] = frozenset()
    bypass: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self._check_types()
        unknown = sorted(self.bypass - BYPASSABLE)
        if unknown:
            raise BadInput("--bypass", needed=f"codes among {', '.join(sorted(BYPASSABLE))}", found=", ".join(unknown))
        for name in sorted(self.duplicates):
            if not all(name.partition(":")):
                raise BadInput("--duplicate", needed="distribution:name", found=repr(name))
        # a frozen class has no other way to keep what it was given in one spelling
        for of, names in (("allow", self.allow), ("deny", self.deny)):
            object.__setattr__(self, of, frozenset(map(canonical, names)))
        object.__setattr__(self, "duplicates", frozenset(map(qualified, self.duplicates)))
        if self.allow & self.deny:
            both = ", ".join(sorted(self.allow & self.deny))
            raise BadInput("--allow and --deny", needed="a distribution in one of them", found=f"{both} in both")

    def _check_types(self) -> None:
        for flag, said in (
            ("--strict", self.strict),
            ("--keep-graph", self.keep_graph),
            ("policy, per_rank", self.per_rank),
        ):
            check_flag(flag, said, optional=False)
        if self.layers not in get_args(Layers):
            raise BadInput("--layers", needed=" or ".join(get_args(Layers)), found=repr(self.layers))
        for flag, names in (
            ("--allow", self.allow),
            ("--deny", self.deny),
            ("--duplicate", self.duplicates),
            ("--bypass", self.bypass),
        ):
            # a word alone would be read letter by letter
            if not isinstance(names, Set) or not all(isinstance(name, str) and name.strip() for name in names):
                raise BadInput(flag, needed="a set of words", found=repr(names))
