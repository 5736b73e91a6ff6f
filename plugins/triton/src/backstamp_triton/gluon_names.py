"""Gluon's names that have changed between the releases of Triton this plugin takes (3.6 on), under one name each.

In: the installed Triton. Out: device functions for the Hopper kernels. It must hold nothing but the differences.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

__all__ = ["copy_box", "copy_rows", "recast"]

# one box of a descriptor into shared memory; `async_copy_global_to_shared` was removed after 3.6
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# addresses into shared memory, renamed likewise
copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.jit
def _recast_private(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    return buffer._reinterpret(dtype, shape, layout)


@gluon.jit
def _recast_public(buffer, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    return buffer.reinterpret(dtype, shape, layout)


# the same bytes of shared memory under another shape; private up to 3.6
recast = _recast_public if hasattr(gl.shared_memory_descriptor, "reinterpret") else _recast_private
