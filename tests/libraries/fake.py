"""A stand-in for a kernel library that is not installed here: its recorded signatures, and behaviours a test gives.

In: `tests/libraries/<distribution>.json`, written by `record.py`. Out: modules in `sys.modules` whose callables hold
every call against the recorded signature, remember it, and answer by the test's own function. It stands only for a
library or a machine we do not have: a wrong name or a missing argument is the TypeError the library would raise.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Call:
    """One call: the function's path, and its arguments by parameter name, defaults left out."""

    path: str
    arguments: Mapping[str, Any]


@dataclass
class FakeLibrary:
    """Install the recorded functions of one distribution for the length of a test.

    `on(path, behaviour)` says what a function answers: `behaviour(**arguments)`, a method's with `self` first. A
    function without one fails the test that calls it.
    """

    distribution: str
    monkeypatch: pytest.MonkeyPatch
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        record = json.loads((FOLDER / f"{self.distribution}.json").read_text("utf-8"))
        self.version: str = record["version"]
        self.functions: dict[str, dict[str, Any]] = record["functions"]
        self._behaviours: dict[str, Callable[..., Any]] = {}
        for path, found in self.functions.items():
            self._install(path, signature_of(found["parameters"]))

    def on(self, path: str, behaviour: Callable[..., Any]) -> None:
        """Say what a recorded function answers."""
        assert path in self.functions, f"{path} was never recorded from {self.distribution}"
        self._behaviours[path] = behaviour

    def called(self, path: str) -> list[Mapping[str, Any]]:
        """The arguments of each call of one function, in order."""
        return [call.arguments for call in self.calls if call.path == path]

    def _install(self, path: str, signature: inspect.Signature) -> None:
        module_name, _, qualname = path.partition(":")
        owner: Any = self._module(module_name)
        *parents, name = qualname.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                setattr(owner, parent, type(parent, (), {}))
            owner = getattr(owner, parent)

        def call(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            arguments = dict(bound.arguments)
            self.calls.append(Call(path, {key: value for key, value in arguments.items() if key != "self"}))
            if path not in self._behaviours:
                if name == "__init__":
                    return None
                raise AssertionError(f"{path} was called and has no behaviour")
            answer = self._behaviours[path](**arguments)
            return None if name == "__init__" else answer

        call.__name__ = name
        call.__signature__ = signature
        setattr(owner, name, call)

    def _module(self, name: str) -> ModuleType:
        """The module of a dotted name, and its parents, as fakes."""
        parent, _, child = name.rpartition(".")
        if name not in sys.modules or not getattr(sys.modules[name], "__fake__", False):
            module = ModuleType(name)
            module.__dict__["__fake__"] = True
            module.__path__ = []
            self.monkeypatch.setitem(sys.modules, name, module)
        if parent:
            setattr(self._module(parent), child, sys.modules[name])
        return sys.modules[name]


def signature_of(rows: list[list[str | None]]) -> inspect.Signature:
    """A recorded signature; defaults matter only by being there."""
    return inspect.Signature(
        [
            inspect.Parameter(
                str(name),
                getattr(inspect.Parameter, str(kind)),
                default=inspect.Parameter.empty if default is None else default,
            )
            for name, kind, default in rows
        ]
    )
