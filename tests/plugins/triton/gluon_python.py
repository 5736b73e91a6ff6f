"""Runs a Gluon function as the Python it is written in, one program at a time: Gluon itself has no interpreter.

In: a function under `gluon.jit`, and stand-ins for what it calls that a CPU has not. Out: a Python function over numpy
arrays. Layouts, barriers and warps are nothing here: it tells what is computed and read, not when.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.experimental.gluon import GluonJITFunction
from triton.language import constexpr

__all__ = ["Lanes", "Pointer", "Program", "python_of"]


class Lanes(np.ndarray):
    """A tensor of a program, or one number of it."""

    def to(self, dtype: type) -> Lanes:
        """The same numbers as another dtype."""
        return self.astype(dtype)


def lanes(values: Any) -> Lanes:
    """Numbers as a program has them."""
    return np.asarray(values).view(Lanes)


class Pointer:
    """An address in a tensor's memory, or a block of them."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + np.asarray(offset))

    def load(self, mask: Any, other: Any) -> Lanes:
        """What lies there; an address outside the memory is an error where the mask reads it."""
        at, read = np.broadcast_arrays(np.asarray(self.at), True if mask is None else np.asarray(mask))
        inside = (at >= 0) & (at < self.memory.size)
        assert (inside | ~read).all(), f"read {at[read & ~inside]} of {self.memory.size}"
        return lanes(np.where(read, self.memory[np.where(read, at, 0)], 0 if other is None else other))


class Program:
    """`gluon.language` of one program of a grid."""

    int32, int64 = np.int32, np.int64
    constexpr = staticmethod(lambda value: value)
    static_range = staticmethod(range)
    where = staticmethod(lambda *given: lanes(np.where(*given)))
    maximum = staticmethod(lambda *given: lanes(np.maximum(*given)))
    minimum = staticmethod(lambda *given: lanes(np.minimum(*given)))
    sum = staticmethod(lambda x, axis: lanes(np.sum(x, axis)))
    max = staticmethod(lambda x, axis: lanes(np.max(x, axis)))
    arange = staticmethod(lambda begin, end, layout=None: lanes(np.arange(begin, end)))
    BlockedLayout = staticmethod(lambda *given: None)
    num_warps = staticmethod(lambda: 1)

    def __init__(self, number: int, programs: int) -> None:
        self._number, self._programs = number, programs

    def program_id(self, axis: int) -> int:
        """Its place in the grid."""
        return self._number

    def num_programs(self, axis: int) -> int:
        """Programs of the grid."""
        return self._programs

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None) -> Lanes:
        """What lies at an address."""
        return pointer.load(mask, other)

    def associative_scan(self, x: Lanes, axis: int, combine: Callable[[Any, Any], Any]) -> Lanes:
        """Each number combined with those before it."""
        found = [x[0]]
        for number in x[1:]:
            found.append(combine(found[-1], number))
        return lanes(found)


def python_of(function: GluonJITFunction, program: Program, **names: Any) -> Callable[..., Any]:
    """The function, and those it calls, as Python; `names` stand in for what they find under those names."""
    made: dict[int, Callable[..., Any]] = {}

    def python(of: GluonJITFunction) -> Callable[..., Any]:
        if id(of) not in made:
            known: dict[str, Any] = {}
            made[id(of)] = types.FunctionType(of.fn.__code__, known)
            known |= {name: names.get(name, here(name, value)) for name, value in of.fn.__globals__.items()}
        return made[id(of)]

    def here(name: str, value: Any) -> Any:
        if name == "gl":
            return program
        if isinstance(value, constexpr):
            return value.value
        return python(value) if isinstance(value, GluonJITFunction) else value

    return python(function)
