"""The runners of a process, by the config each was made for: layers and builders of one model ask for the same one.

In: a `VllmConfig`, or one of our names. Out: the living runner. It keeps none alive: layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Living", "Runner"]


class Runner(Protocol):
    """What is kept: a plan under one of our names."""

    name: str

    def tell_plan(self) -> None:
        """Say in vLLM's log what will run."""


_R = TypeVar("_R", bound=Runner)


class Living(Generic[_R]):
    """One runner a config; `make` resolves its plan."""

    def __init__(self, make: Callable[[VllmConfig], _R]) -> None:
        self._make = make
        # a runner holds its config, so an id in here is that of a living one
        self._runners: WeakValueDictionary[int, _R] = WeakValueDictionary()

    def of(self, config: VllmConfig) -> _R:
        """The runner of a config, whose plan is told once.

        Raises:
            BackstampError: as `make`.
        """
        runner = self._runners.get(id(config))
        if runner is None:
            runner = self._runners[id(config)] = self._make(config)
            runner.tell_plan()
        return runner

    def named(self, name: str) -> _R | None:
        """A runner whose config asks for a name, if one lives."""
        return next((runner for runner in self._runners.values() if runner.name == name), None)
