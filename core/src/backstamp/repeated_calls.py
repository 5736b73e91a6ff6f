"""The check of a call that is like the last right one: what an engine pays for it, layer after layer, step after step.

In: what `check_call` takes. Out: nothing, or its refusal. A call is let through on a few comparisons of objects, shapes
and dtypes where every check would pass as it did before; it never lets one through that `check_call` refuses.

.. versionadded:: 0.2
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.call_checks import check_call
from backstamp.factories import BuildRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CallChecks"]


class CallChecks:
    """`check_call` for every call of one built object, at the price of a few comparisons once a call was right.

    A layer, its cache and its step are remembered as the objects they are, and none is kept alive: an engine that hands
    in one `PagedKV` a layer pays least. Another cache without scales of its own is compared by what its tensors are.
    Queries, chosen keys, outputs and LSE are compared in every call. Any other call goes through `check_call` whole:
    ragged keys, layers that look both ways, and those with tensors of their own, which may have been moved.
    """

    __slots__ = ("_batch", "_known", "_request")

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._known: dict[int, _Known] = {}
        self._batch: Callable[[], Batch | None] = _no_batch

    def __call__(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        batch: Batch,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> None:
        """Hold one layer's tensors against the row.

        Raises:
            UnsupportedBatch: the first field that does not fit.
        """
        known = self._known.get(layer.layer_id)
        # a cache that is gone is remembered as None, and is no cache
        if known is not None and kv is not None and new is None and self._batch() is batch:
            if known.tokens != batch.num_tokens:
                known = self._known[layer.layer_id] = known.of(batch.num_tokens)
            own_layer, own_kv, cache, tokens, dtype, device, q_shape, out_shape, rope_shape, lse_dtype, chosen = known
            # spelt out, and all in one place: a call of a helper costs as much as what it would compare
            if (
                own_layer() is layer
                and (own_kv() is kv or (cache is not None and cache == _cache_of(kv)))
                and q.shape == q_shape
                and q.dtype is dtype
                and q.device == device
                and q.stride()[2] == 1
                and (
                    out is None
                    or (out.shape == out_shape and out.dtype is dtype and out.device == device and out.stride()[2] == 1)
                )
                and (
                    rope_shape is None
                    if q_rope is None
                    else q_rope.shape == rope_shape
                    and q_rope.dtype is dtype
                    and q_rope.device == device
                    and q_rope.stride()[2] == 1
                )
                and (lse is None or (lse.dtype is lse_dtype and lse.shape == q_shape[:2] and lse.device == device))
                and (
                    indices is None
                    if chosen is None
                    else indices is not None
                    and indices.dtype is chosen
                    and indices.dim() == 2
                    and indices.shape[0] == tokens
                    and indices.stride()[1] == 1
                    and indices.device == device
                )
            ):
                return
        check_call(self._request, q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        if kv is not None and new is None:
            self._remember(q, kv, layer, batch, lse, q_rope, indices)

    def _remember(
        self,
        q: Tensor,
        kv: PagedKV,
        layer: LayerSpec,
        batch: Batch,
        lse: Tensor | None,
        q_rope: Tensor | None,
        indices: Tensor | None,
    ) -> None:
        if self._batch() is not batch:
            self._batch = weakref.ref(batch)
        if layer.attn_type != "decoder" or layer.sinks is not None or layer.alibi is not None:
            return
        tokens, heads = batch.num_tokens, layer.num_qo_heads
        self._known[layer.layer_id] = _Known(
            layer=weakref.ref(layer),
            kv=weakref.ref(kv),
            cache=_cache_of(kv),
            tokens=tokens,
            dtype=q.dtype,
            device=q.device,
            q_shape=(tokens, heads, layer.head_dim if q_rope is None else layer.v_head_dim),
            out_shape=(tokens, heads, layer.v_head_dim),
            rope_shape=None if q_rope is None else (tokens, heads, layer.head_dim - layer.v_head_dim),
            lse_dtype=None if lse is None else lse.dtype,
            index_dtype=None if indices is None else indices.dtype,
        )


class _Known(NamedTuple):
    """One layer whose last call was right, and what tensors of another call must be to be right again."""

    layer: Callable[[], LayerSpec | None]
    kv: Callable[[], PagedKV | None]
    cache: tuple[object, ...] | None
    tokens: int
    dtype: torch.dtype
    device: torch.device
    q_shape: tuple[int, int, int]
    out_shape: tuple[int, int, int]
    rope_shape: tuple[int, int, int] | None
    lse_dtype: torch.dtype | None
    index_dtype: torch.dtype | None

    def of(self, tokens: int) -> _Known:
        """The same in a step of another size."""
        return self._replace(
            tokens=tokens,
            q_shape=(tokens, *self.q_shape[1:]),
            out_shape=(tokens, *self.out_shape[1:]),
            rope_shape=None if self.rope_shape is None else (tokens, *self.rope_shape[1:]),
        )


def _cache_of(kv: PagedKV) -> tuple[object, ...] | None:
    """What `check_call` reads of a cache: another of the same is as right; None of one that brings scales."""
    k, v = kv.k, kv.v
    if kv.k_scale is not None or kv.v_scale is not None or kv.k_sf is not None or kv.v_sf is not None:
        return None
    of_k = (kv.layout, k.dtype, k.device, k.shape[1:], k.stride()[-1])
    return of_k if v is None else (*of_k, v.dtype, v.device, v.shape[1:], v.stride()[-1], v.shape[0] == k.shape[0])


def _no_batch() -> None:
    return None
