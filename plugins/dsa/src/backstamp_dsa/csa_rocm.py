"""DeepSeek V4 attention through aiter's sparse decode kernel on gfx950, in every phase.

In: queries, caches and slots. Out: answers in the caller's `out`. The call is bound from a caller, not from the
library: SGLang 0.5.23, python/sglang/srt/layers/attention/hip_flash_mla.py:99-142. It skips only -1, so lengths are in
the slots. Not yet run on hardware.
"""

from __future__ import annotations

import inspect

import torch
from aiter.ops.triton.attention.pa_decode_sparse import pa_decode_sparse
from torch import Tensor

from backstamp.attention import LayerSpec, PagedKV
from backstamp.errors import NotInstalled
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal
from backstamp_dsa.queries import store_answer
from backstamp_dsa.steps import Slots, SparseStep

__all__ = ["AiterV4"]


class AiterV4:
    """`pa_decode_sparse` over a window's cache and a compressed one, plain or packed, one row of slots a token."""

    def __init__(self, request: BuildRequest) -> None:
        # the function is older than its second cache
        if "extra_cache" not in inspect.signature(pa_decode_sparse).parameters:
            raise NotInstalled(
                f"attention kernel {request.kernel!r} on {request.device}",
                needed="an amd-aiter whose pa_decode_sparse takes extra_cache",
                found="one that does not",
                fix="Install a newer amd-aiter",
            )
        self._request = request
        self._zero = torch.zeros((), dtype=torch.bfloat16, device=request.device)

    def slots_per_page(self, field: str, cache: Tensor) -> int:
        """The kernel divides a slot by the page size itself; it steps from token to token densely."""
        if cache.shape[2] != 1 or cache.stride(-1) != 1 or cache.stride(1) != cache.shape[-1]:
            found = f"{list(cache.shape)}, strides {list(cache.stride())}"
            raise refusal(self._request, field, "[P, entries, 1, D] with contiguous pages", found)
        return cache.shape[1]

    def attend(
        self,
        q: Tensor,
        kv: PagedKV,
        near: Slots,
        far: Slots | None,
        sinks: Tensor | None,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
    ) -> None:
        """See `CompressedKernel`."""
        extra: dict[str, Tensor] = {}
        if far is not None and kv.v is not None:
            extra = {
                "extra_cache": kv.v.squeeze(2),
                "extra_indices": far.slots.flatten(),
                "extra_indptr": _offsets(far.slots),
            }
        found = pa_decode_sparse(
            q.contiguous(),
            kv.k.squeeze(2),
            near.slots.flatten(),
            _offsets(near.slots),
            _sinks(sinks, layer, q.device),
            layer.scale,
            **extra,
        )
        store_answer(found, None, near.seen, self._zero, out, None)


def _offsets(slots: Tensor) -> Tensor:
    """`[T + 1]` i32: where each token's slots begin in the flat list."""
    tokens, width = slots.shape
    return torch.arange(0, (tokens + 1) * width, width, dtype=torch.int32, device=slots.device)


def _sinks(sinks: Tensor | None, layer: LayerSpec, device: torch.device) -> Tensor:
    """The kernel takes sinks always: one of -inf adds nothing."""
    if sinks is not None:
        return sinks
    return torch.full((layer.num_qo_heads,), float("-inf"), dtype=torch.float32, device=device)
