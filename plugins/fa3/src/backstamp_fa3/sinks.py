"""Stored sinks in the dtype a library reads: one buffer a layer whose address never changes.

In: the layers' stored sinks. Out: tensors of the wanted dtype. A copy is made again only when the parameter changed,
which is known by autograd's in-place counter (`Tensor._version`) and the address. `copy_` ticks that counter,
`param.data.copy_()` ticks nothing: whoever reloads weights that way calls `refresh_parameters()`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import LayerSpec

__all__ = ["SinkBuffers"]


@dataclass(slots=True)
class _Kept:
    stored: Tensor
    seen: tuple[int, int] | None
    buffer: Tensor


class SinkBuffers:
    """The sinks of a backend's layers, converted to the first dtype its library reads where it does not read theirs."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self._dtypes = dtypes
        self._kept: dict[int, _Kept] = {}

    def update(self, layers: tuple[LayerSpec, ...]) -> None:
        """Convert what changed since the last step; called in `plan`, outside any graph."""
        for layer in layers:
            if layer.sinks is not None:
                self.read(layer.layer_id, layer.sinks)

    def refresh_parameters(self) -> None:
        """Convert every layer's sinks at the next `update`, whatever their counters say."""
        for kept in self._kept.values():
            kept.seen = None

    def read(self, layer_id: int, stored: Tensor) -> Tensor:
        """One layer's sinks `[Hq]` in a dtype the library reads, contiguous."""
        dtype = stored.dtype if stored.dtype in self._dtypes else self._dtypes[0]
        if stored.dtype is dtype and stored.is_contiguous():
            return stored
        kept = self._kept.get(layer_id)
        if kept is None:
            buffer = torch.empty(stored.shape, dtype=dtype, device=stored.device)
            kept = self._kept[layer_id] = _Kept(stored, None, buffer)
        # a tensor made in inference mode has no counter: it is converted each time
        seen = None if stored.is_inference() else (stored._version, stored.data_ptr())
        if seen is None or seen != kept.seen:
            kept.buffer.copy_(stored)
            kept.stored, kept.seen = stored, seen
        return kept.buffer
