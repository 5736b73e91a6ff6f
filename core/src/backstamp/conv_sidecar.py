"""A draft's own short convolutions beside its attention: what wraps the draft-extend backend of such a draft.

In: a built, stamped backend. Out: the same calls, and `convolve` on convolution windows the draft keeps for each
request. The wrapper carries the stamp of what it wraps, and never decides which kernel runs.

Source: SGLang #33023, which wraps the single draft-extend backend and refuses a container of steps.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from backstamp.errors import UnsupportedBatch
from backstamp.stamp import copy_stamp

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import Batch

__all__ = ["ConvSidecar", "wrap_with_convolutions"]

#: What engines call of an attention backend.
_CALLS: Final = ("plan", "forward", "init_graphs", "replan", "refresh_parameters")


def wrap_with_convolutions(backend: object) -> ConvSidecar:
    """Wrap a stamped backend; the wrapper carries its stamp.

    Raises:
        Unstamped: the backend carries none.
    """
    wrapper = ConvSidecar(backend)
    copy_stamp(wrapper, backend)
    return wrapper


class ConvSidecar:
    """An attention backend with the short convolutions of the layers around it; `inner` is what it wraps."""

    def __init__(self, inner: object) -> None:
        self.inner = inner
        # the wrapped object's own functions: attention pays nothing for the wrapper, and has what the object has
        for name in _CALLS:
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))

    def convolve(
        self, x: Tensor, weight: Tensor, batch: Batch, windows: Tensor, slots: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Causal depthwise convolution of each row's tokens, which follow its window; the window moves on in place.

        `x [T, C]`, `weight [C, K]`, `bias [C]`, `windows [N, C, K - 1]` oldest token first, `slots [B]` i32 with -1
        for pad rows, whose outputs are of an empty window and change none. Answers `[T, C]`. It never syncs.

        Raises:
            UnsupportedBatch: a weight of one tap, which has no window to keep.
        """
        import torch

        if weight.shape[1] < 2:
            raise UnsupportedBatch(
                "short convolution", needed="a weight of at least 2 taps", found=str(weight.shape[1])
            )
        if x.shape[0] == 0 or batch.num_rows == 0:
            return torch.zeros_like(x)
        taps, tokens = weight.shape[1], torch.arange(x.shape[0], device=x.device)
        starts, stops = batch.qo_indptr[: batch.num_rows], batch.qo_indptr[1 : batch.num_rows + 1]
        # tokens behind the last row are padding, and read the last row's window
        rows = torch.searchsorted(stops, tokens, right=True).clamp(max=batch.num_rows - 1)
        held = windows[slots.clamp(min=0).long()] * (slots >= 0)[:, None, None]
        places = tokens - starts[rows]
        out = torch.zeros_like(x) if bias is None else bias.expand_as(x).clone()
        for tap in range(taps):
            back = taps - 1 - tap
            before = held[rows, :, (places + tap).clamp(0, taps - 2)]
            out += weight[:, tap] * torch.where((places >= back)[:, None], x[(tokens - back).clamp(min=0)], before)
        self._move(x, windows, slots, held, starts, stops)
        return out

    def _move(self, x: Tensor, windows: Tensor, slots: Tensor, held: Tensor, starts: Tensor, stops: Tensor) -> None:
        """Let each row's window end with its last token."""
        import torch

        width = windows.shape[2]
        place = torch.arange(width, device=x.device)[None, :] + (stops - starts - width)[:, None]
        fresh = x[(starts[:, None] + place).clamp(0, x.shape[0] - 1)].transpose(1, 2)
        kept = held.gather(2, (place + width).clamp(0, width - 1)[:, None, :].expand_as(held))
        moved = torch.where((place >= 0)[:, None, :], fresh, kept)
        # which row owns a slot, -1 none: pads never do, and no index has to be counted on the host
        numbers = torch.arange(slots.shape[0], device=x.device)
        owner = torch.full((windows.shape[0],), -1, device=x.device)
        owner.scatter_reduce_(0, slots.clamp(min=0).long(), torch.where(slots >= 0, numbers, -1), "amax")
        windows.copy_(torch.where((owner >= 0)[:, None, None], moved[owner.clamp(min=0)], windows))
