"""Attention sinks in fp32, whatever the model stores: `plan` converts them into buffers whose addresses never change.

In: layers with `sinks [Hq]`. Out: one fp32 tensor a layer, safe inside a recorded graph. A conversion is skipped while
the source's in-place counter and address stand still. That leans on autograd's `_version`: `copy_` ticks it,
`param.data.copy_()` ticks nothing, so whoever reloads weights calls `refresh_parameters()` of the backend.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import LayerSpec

__all__ = ["SinkBuffers"]


@dataclass(slots=True)
class _Held:
    """One layer's sinks: the model's tensor, our copy, and what the source looked like when it was copied."""

    source: Tensor
    buffer: Tensor
    seen: tuple[int, int] | None = None


class SinkBuffers:
    """The fp32 sinks of the layers a backend serves."""

    def __init__(self, layers: Iterable[LayerSpec]) -> None:
        self._held: dict[int, _Held] = {}
        for layer in layers:
            if layer.sinks is not None:
                self._hold(layer.layer_id, layer.sinks)

    def update(self) -> None:
        """Convert what changed since the last step; on the host, before a graph is recorded or replayed."""
        for held in self._held.values():
            if held.buffer is held.source:
                continue
            # a tensor made in inference mode has no counter to ask; reading it would raise
            seen = None if held.source.is_inference() else (held.source._version, held.source.data_ptr())
            if seen is None or seen != held.seen:
                held.buffer.copy_(held.source)
                held.seen = seen

    def refresh(self) -> None:
        """Convert everything again: weights were reloaded behind the counter's back."""
        for held in self._held.values():
            held.seen = None
        self.update()

    def of(self, layer: LayerSpec) -> Tensor | None:
        """A layer's sinks in fp32, or None."""
        if layer.sinks is None:
            return None
        held = self._held.get(layer.layer_id)
        if held is None or held.source is not layer.sinks:
            held = self._hold(layer.layer_id, layer.sinks)
            self.update()
        return held.buffer

    def _hold(self, layer_id: int, source: Tensor) -> _Held:
        ready = source.dtype is torch.float32 and source.is_contiguous()
        buffer = source if ready else torch.empty(source.shape, dtype=torch.float32, device=source.device)
        held = self._held[layer_id] = _Held(source, buffer)
        return held
