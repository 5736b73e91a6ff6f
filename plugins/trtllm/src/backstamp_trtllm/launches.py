"""Helpers of a launch that every kernel here shares: what it says before a first compile, and what it does to outputs.

In: a kernel's name, keys of compiled variants, output tensors. Out: a context manager around the launch; contiguous
outputs that end up in the engine's own. Nothing here reads a value on a device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backstamp.attention import LayerSpec, PagedKV
from backstamp.jit_notice import Announcer

__all__ = ["LN2", "Announcer", "bmm_scales", "deliver", "landing", "nothing_seen", "silence", "zeros"]

#: Base-2 logarithms times this are natural ones.
LN2 = math.log(2.0)


def zeros(size: int, device: str, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A workspace: these kernels keep counters in it, which must start at zero and which they reset themselves."""
    return torch.zeros(size, dtype=dtype, device=device)


def landing(out: Tensor) -> Tensor:
    """Where a kernel that takes no strides writes: `out [T, Hq, Dv]` itself, or a contiguous tensor like it."""
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def deliver(out: Tensor, written: Tensor) -> Tensor:
    """`out` with what was written for it."""
    if written is not out:
        out.copy_(written)
    return out


def nothing_seen(out: Tensor, lse: Tensor | None) -> Tensor:
    """`out` of a step in which no token has a row: zeros, and an LSE of -inf. Nothing is launched for it."""
    if lse is not None:
        lse.fill_(-math.inf)
    return out.zero_()


def silence(dead: Tensor | None, out: Tensor, lse: Tensor | None = None) -> None:
    """Give tokens that see no key zeros and -inf; `dead [T, 1, 1]` bool, None where there are none."""
    if dead is None:
        return
    out.masked_fill_(dead, 0.0)
    if lse is not None:
        lse.masked_fill_(dead.view(-1, 1), -math.inf)


def bmm_scales(layer: LayerSpec, kv: PagedKV) -> tuple[float | Tensor, float | Tensor]:
    """The factors on the two products, with the scales of a stored cache folded in; a tensor scale stays one."""
    k_scale = 1.0 if kv.k_scale is None else kv.k_scale
    v_scale = 1.0 if kv.v_scale is None else kv.v_scale
    return layer.scale * k_scale, v_scale
