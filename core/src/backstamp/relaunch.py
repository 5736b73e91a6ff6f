"""Launch a Triton kernel again without a look at its arguments, where the code for the like of them is at hand.

In: a kernel, its grid and arguments. Out: the launch. Triton looks at each argument of each launch for what its code is
cut to: dtype, divisibility by 16, the values 1 and None. A step launches the same code once a layer, so a backend that
knows when nothing of that has changed keeps the code beside the step. It imports no Triton.

.. versionadded:: 0.2
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Code", "Codes", "Kernel", "alignments", "launch"]


class Compiled(Protocol):
    """Machine code of a kernel: takes every argument in the kernel's order, constants among them."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]: ...


class Kernel(Protocol):
    """A function under `triton.jit`, whose launch answers its code; nothing under the interpreter."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled | None]: ...


class Code(NamedTuple):
    """Machine code, and the constants it was compiled for, in the kernel's order."""

    compiled: Compiled
    constants: tuple[object, ...]


#: Code by what its arguments must be alike in.
Codes = dict[Hashable, Code]


def launch(
    kernel: Kernel,
    codes: Codes,
    like: Hashable,
    grid: tuple[int, int, int],
    arguments: Sequence[object],
    constants: Callable[[], Mapping[str, object]],
    **options: object,
) -> None:
    """Launch `kernel` with `arguments` and, behind them in its own order, `constants`.

    Calls of one `like` in one `codes` must agree in all that Triton specializes on: which arguments are None, dtypes,
    constants and options, whether an address or a number is a multiple of 16, and numbers that are 1; on ROCm also
    whether storage fits in 2 GiB (`alignments` tells what is true of tensors). The current
    device must be one and the same. Source: triton 3.6 and 3.9, `JITFunction.run`, `CompiledKernel.__getitem__`.
    """
    code = codes.get(like)
    if code is not None:
        code.compiled[grid](*arguments, *code.constants)
        return
    named = constants()
    compiled = kernel[grid](*arguments, **named, **options)
    # the interpreter has no code
    if compiled is not None:
        codes[like] = Code(compiled, tuple(named.values()))


def alignments(*tensors: Tensor | None) -> tuple[object, ...]:
    """What Triton compiles for of tensors whose dtypes are known: which are absent, and which lie at 16 bytes.

    On ROCm also which fit in 2 GiB: those are read at offsets of 32 bits. Source: triton 3.9, `HIPBackend.
    get_tensor_specialization`.
    """
    if _is_rocm():
        return tuple([None if x is None else (x.data_ptr() % 16 == 0, _is_within_2gib(x)) for x in tensors])
    return tuple([None if tensor is None else tensor.data_ptr() % 16 == 0 for tensor in tensors])


def _is_within_2gib(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() < 1 << 31


@functools.cache
def _is_rocm() -> bool:
    # whoever has tensors has torch
    import torch

    return torch.version.hip is not None
