"""Layers and their caches as the contract has them: from SGLang's `RadixAttention` and its pool of keys and values.

In: a layer of a loaded model, or the pool and a layer's index. Out: a `LayerSpec`, or views of the layer's cache. It
copies nothing, and refuses what no kernel is handed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from backstamp.attention import LayerSpec, PagedKV
from backstamp.errors import Refused

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache
    from torch import Tensor

__all__ = ["CacheViews", "check_pool", "linear_spec_of", "spec_of"]


def spec_of(layer: RadixAttention) -> LayerSpec:
    """A layer as a kernel needs to know it, from SGLang's own numbers: those of this rank.

    Raises:
        Refused: the layer scales or masks logits in a way the contract has no word for.
    """
    for needed, wrong in (
        ("a decoder layer", layer.attn_type != AttentionType.DECODER or layer.is_cross_attention),
        ("logits capped by tanh", layer.logit_cap > 0 and layer.logit_capping_method != "tanh"),
        ("logits of one temperature", layer.xai_temperature_len > 0),
        ("positions in the model's own rotation", layer.pos_encoding_mode != "NONE"),
    ):
        if wrong:
            raise Refused(f"backstamp-sglang, layer {layer.layer_id}", needed=needed, found="another")
    return LayerSpec(
        layer_id=layer.layer_id,
        num_qo_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        v_head_dim=layer.v_head_dim,
        scale=float(layer.scaling),
        # SGLang's window leaves the token itself out
        window_left=layer.sliding_window_size,
        softcap=float(layer.logit_cap),
    )


def linear_spec_of(layer: RadixLinearAttention) -> LayerSpec:
    """A recurrent layer as a kernel needs to know it, from SGLang's own numbers: those of this rank."""
    return LayerSpec(
        layer_id=layer.layer_id,
        num_qo_heads=layer.num_k_heads,
        num_kv_heads=layer.num_v_heads,
        head_dim=layer.head_k_dim,
        v_head_dim=layer.head_v_dim,
        scale=layer.head_k_dim**-0.5,
    )


def check_pool(pool: KVCache) -> None:
    """Refuse a pool whose bytes are not plain rows of the model's own dtype, in any of its parts.

    Raises:
        Refused: its kind, its layout or its dtype is another.
    """
    parts = [pool]
    if isinstance(pool, SWAKVPool):
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
    elif isinstance(pool, HybridLinearKVPool):
        parts = [pool.full_kv_pool]
    for part in parts:
        found = type(part).__name__
        if isinstance(part, MHATokenToKVPool):
            if (
                part.kv_cache_layout in ("nhd", "hnd")
                and not part.is_quantized_kv_cache
                and part.store_dtype == part.dtype
            ):
                continue
            found = f"layout {part.kv_cache_layout}, {part.store_dtype}"
        raise Refused("backstamp-sglang, the cache", needed="plain rows of the model's dtype", found=found)


class CacheViews:
    """SGLang's buffers as `[pages, page_size, heads, dim]`, viewed once for each buffer."""

    def __init__(self, pool: KVCache, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._views: dict[int, tuple[Tensor, PagedKV]] = {}

    def of(self, layer_id: int) -> PagedKV:
        """The cache of one layer, when SGLang says that it is there: it may still be on its way from the host."""
        k, v = self._pool.get_kv_buffer(layer_id)
        known = self._views.get(layer_id)
        if known is None or known[0] is not k:
            known = self._views[layer_id] = k, PagedKV(k=self._paged(k), v=self._paged(v))
        return known[1]

    def _paged(self, rows: Tensor) -> Tensor:
        if rows.ndim == 4:
            # [pages, heads, page_size, dim]
            return rows.transpose(1, 2)
        pages = rows.shape[0] // self._page_size
        return rows[: pages * self._page_size].view(pages, self._page_size, *rows.shape[1:])
