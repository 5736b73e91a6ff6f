"""What one layer asks of a library, in no library's words: the border between `attention.py` and the bindings.

In: checked tensors. Out: a `LayerCall`, and what a binding must do with it. It holds no batch and imports no library.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp_fa3.steps import Step

__all__ = ["LayerCall", "Library"]


class LayerCall(NamedTuple):
    """One layer of one step.

    Attributes:
        q, k, v: `q [T, Hq, D]`; paged `k, v [P, page, Hk, D*]`, or ragged `[N, Hk, D*]` with `kv_indptr [B+1]`.
            Absorbed MLA: the rotary parts, with `v` the latent part of the cache.
        q_v: the latent part of an absorbed query `[T, Hq, Dv]`, or None.
        out: `[T, Hq, Dv]`, written in place.
        kv_indptr: offsets of ragged keys, None where they lie in pages.
        sinks: `[Hq]` in the dtype the library reads, or None.
        leftpad: `[B]` i32 of zeros where the library must not load whole pages, else None.
        causal: whether a token sees positions up to its own only.
        with_lse: whether the LSE is asked for.
    """

    layer: LayerSpec
    step: Step
    q: Tensor
    k: Tensor
    v: Tensor
    q_v: Tensor | None
    out: Tensor
    kv_indptr: Tensor | None
    sinks: Tensor | None
    leftpad: Tensor | None
    causal: bool
    with_lse: bool

    @property
    def window(self) -> tuple[int, int]:
        """Keys before and after self, -1 for all; the causal rule makes the right side 0 where there is a left one."""
        left = self.layer.window_left
        return left, 0 if left >= 0 and self.causal else -1


class Library(Protocol):
    """One build of FlashAttention, called."""

    def attend(self, call: LayerCall) -> Tensor | None:
        """Write `call.out`, and answer the natural-log LSE as `[T, Hq]` f32 of any strides where it was asked for."""
        ...
