"""Stored sinks in the dtype a library reads: one buffer a layer whose address never changes.

In: the layers a backend serves, with `sinks [Hq]`. Out: a tensor a layer, safe inside a recorded graph: the stored one
where the library reads it as it is, else our buffer, made when the backend is built. `plan` converts, and only what
changed, which is known by autograd's in-place counter (`Tensor._version`) and the address. `copy_` ticks that counter,
`param.data.copy_()` ticks nothing: whoever reloads weights that way calls `refresh_parameters()`. Nothing is allocated
after the backend is built.

.. versionadded:: 0.2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstamp.row_checks import refusal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from backstamp.attention import LayerSpec
    from backstamp.factories import BuildRequest

__all__ = ["SinkBuffers"]


@dataclass(slots=True)
class _Held:
    """One layer's sinks: the model's tensor, our copy (None where it is read as it is), and what was copied last."""

    stored: Tensor
    buffer: Tensor | None
    seen: tuple[int, int] | None = None


class SinkBuffers:
    """The sinks of a backend's layers, converted to the first dtype its library reads where it does not read theirs."""

    def __init__(self, request: BuildRequest, dtypes: tuple[torch.dtype, ...]) -> None:
        """`dtypes` are those the library reads, the first the one that others become."""
        self._request = request
        self._dtypes = dtypes
        self._held: dict[int, _Held] = {}
        for layer in request.layers:
            if layer.sinks is not None:
                buffer = None if self._reads(layer.sinks) else self._buffer_for(layer.sinks)
                self._held[layer.layer_id] = _Held(layer.sinks, buffer)

    def update(self) -> None:
        """Convert what changed since the last step; called in `plan`, outside any graph."""
        for held in self._held.values():
            if held.buffer is None:
                continue
            # a tensor made in inference mode has no counter: it is converted each time
            seen = None if held.stored.is_inference() else (held.stored._version, held.stored.data_ptr())
            if seen is None or seen != held.seen:
                held.buffer.copy_(held.stored.detach())
                held.seen = seen

    def refresh_parameters(self) -> None:
        """Convert every layer's sinks again, whatever their counters say."""
        for held in self._held.values():
            held.seen = None
        self.update()

    def of(self, layer: LayerSpec) -> Tensor | None:
        """A layer's sinks `[Hq]` in a dtype the library reads, contiguous; None without sinks.

        Another tensor than the stored one is copied into the same buffer, and stored from then on. Raises an
        `UnsupportedBatch` for a layer that has no buffer and needs one.
        """
        sinks = layer.sinks
        if sinks is None:
            return None
        held = self._held.get(layer.layer_id)
        if held is not None and held.stored is sinks:
            return sinks if held.buffer is None else held.buffer
        buffer = None if held is None else held.buffer
        if held is not None and buffer is not None and buffer.shape == sinks.shape:
            # the copy may be recorded: the next `plan` looks at the new tensor before any replay
            buffer.copy_(sinks.detach())
            held.stored, held.seen = sinks, None
            return buffer
        if buffer is None and self._reads(sinks):
            return sinks
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
        needed = f"those the object was built with, or {names} ones where it converts none"
        raise refusal(self._request, f"sinks of layer {layer.layer_id}", needed, f"{list(sinks.shape)} {sinks.dtype}")

    def _reads(self, sinks: Tensor) -> bool:
        return sinks.dtype in self._dtypes and sinks.is_contiguous()

    def _buffer_for(self, sinks: Tensor) -> Tensor:
        dtype = sinks.dtype if sinks.dtype in self._dtypes else self._dtypes[0]
        import torch

        # of inference mode it could be written in that mode alone
        with torch.inference_mode(False):
            return torch.empty(sinks.shape, dtype=dtype, device=sinks.device)
