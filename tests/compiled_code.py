"""Stands for a Triton kernel and for its code, in tests of who runs whose code; and tensors that code is cut to.

In: a kernel as it is decorated. Out: what it, or its code, is launched with. Nothing is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Code", "Kernel", "apart", "constants_of", "shifted"]


class Kernel:
    """Keeps by name what a kernel is launched with, in `first`, and what its code is launched with, in `again`."""

    def __init__(self, kernel: Any) -> None:
        self.names = list(inspect.signature(kernel.fn).parameters)
        self.first: list[dict[str, Any]] = []
        self.again: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Code]:
        def run(*arguments: object, **named: object) -> Code:
            bound = dict(zip(self.names, arguments, strict=False)) | named
            # options of the launch stand behind
            assert list(bound)[: len(self.names)] == self.names
            self.first.append(bound)
            return Code(self)

        return run


class Code:
    """A kernel's machine code takes all its arguments in order."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given: self.kernel.again.append(dict(zip(self.kernel.names, given, strict=True)))


def constants_of(launched: dict[str, Any]) -> dict[str, Any]:
    """What code was compiled for."""
    return {name: value for name, value in launched.items() if name.isupper()}


def apart(tensor: Tensor, dim: int = 0) -> Tensor:
    """The same numbers at an address of 16, twice as far apart in one dimension."""
    strides = list(tensor.stride())
    strides[dim] *= 2
    return _laid(tensor, strides, 0)


def shifted(tensor: Tensor) -> Tensor:
    """The same numbers and strides, one number past an address of 16."""
    return _laid(tensor, list(tensor.stride()), 1)


def _laid(tensor: Tensor, strides: list[int], past: int) -> Tensor:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    flat = torch.zeros(extent + 16, dtype=tensor.dtype)
    start = (-flat.data_ptr() % 16) // tensor.element_size() + past
    return flat.as_strided(tensor.shape, strides, start).copy_(tensor)
