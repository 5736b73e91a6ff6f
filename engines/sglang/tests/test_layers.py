"""Layers and caches of SGLang's as the contract has them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVCache, MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from backstamp.errors import Refused
from backstamp_sglang.layers import CacheViews, check_pool, spec_of


def layer(**changed: object) -> RadixAttention:
    """One layer of SGLang's."""
    return RadixAttention(
        **{"num_heads": 4, "head_dim": 8, "scaling": 0.3, "num_kv_heads": 2, "layer_id": 5, **changed}
    )


def test_a_layer_is_sglangs_own_numbers() -> None:
    """SGLang's window already leaves the token itself out, and it has 0 and -1 for none."""
    spec = spec_of(layer(sliding_window_size=31, logit_cap=20.0, v_head_dim=16))
    assert (spec.window_left, spec.softcap, spec.v_head_dim, spec.layer_id, spec.scale) == (31, 20.0, 16, 5, 0.3)
    assert spec_of(layer(sliding_window_size=0)).window_left == spec_of(layer()).window_left == -1


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "a decoder layer"),
        ({"is_cross_attention": True}, "a decoder layer"),
        ({"logit_cap": 2.0, "logit_capping_method": "rpe"}, "capped by tanh"),
        ({"pos_encoding_mode": "ALIBI"}, "rotation"),
    ],
    ids=["encoder", "cross", "cap", "alibi"],
)
def test_a_layer_the_contract_has_no_word_for_is_refused(changed: dict[str, object], needed: str) -> None:
    """Better no start than logits of another kind."""
    with pytest.raises(Refused, match=needed):
        spec_of(layer(**changed))


class Pool:
    """One layer's buffers, as a pool of SGLang's hands them out."""

    is_quantized_kv_cache = False
    store_dtype = dtype = torch.float32

    def __init__(self, layout: str, k: torch.Tensor) -> None:
        self.kv_cache_layout, self.k, self.v = layout, k, 2 * k

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.k, self.v


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_a_cache_is_read_through_views(layout: str) -> None:
    """Both layouts of SGLang's pools are the contract's `[P, page, Hk, D]`: not a byte is copied."""
    rows = torch.arange(5 * 4 * 2 * 8, dtype=torch.float32).view(20, 2, 8)
    hnd = rows.view(5, 4, 2, 8).transpose(1, 2).contiguous()
    pool = Pool(layout, rows if layout == "nhd" else hnd)
    views = CacheViews(pool, 4)
    kv = views.of(0)
    assert kv.k.shape == kv.v.shape == (5, 4, 2, 8)
    assert kv.k.untyped_storage().data_ptr() == pool.k.untyped_storage().data_ptr()
    assert torch.equal(kv.k[3, 1], rows[13])
    assert views.of(0) is kv


class Rows(MHATokenToKVPool):
    """A pool of SGLang's by kind, without its buffers."""

    is_quantized_kv_cache = False

    def __init__(self, layout: str = "nhd", stored: torch.dtype = torch.float32, quantised: bool = False) -> None:
        self.kv_cache_layout, self.dtype, self.store_dtype = layout, torch.float32, stored
        self.is_quantized_kv_cache = quantised


def pool_of(kind: type[KVCache], **parts: object) -> KVCache:
    """A pool made of others, without buffers of its own."""
    pool = kind.__new__(kind)
    vars(pool).update(parts)
    return pool


PACKED = {
    "kind": Pool("nhd", torch.zeros(1)),
    "vectorised": Rows("vectorized_5d"),
    "quantised": Rows(quantised=True),
    "stored": Rows(stored=torch.uint8),
    "window": pool_of(SWAKVPool, full_kv_pool=Rows(), swa_kv_pool=Rows("vectorized_5d")),
    "full": pool_of(SWAKVPool, full_kv_pool=Rows("vectorized_5d"), swa_kv_pool=Rows()),
    "hybrid": pool_of(HybridLinearKVPool, full_kv_pool=Rows("vectorized_5d")),
}


@pytest.mark.parametrize("packed", PACKED)
def test_a_pool_of_other_bytes_is_refused(packed: str) -> None:
    """AITER's vectorised layout has no strided view; quantised bytes are no rows of the model's dtype."""
    with pytest.raises(Refused, match="the cache: needs plain rows of the model's dtype"):
        check_pool(PACKED[packed])


def test_pools_of_plain_rows_are_taken() -> None:
    """One pool, one with slots of the windows' own, one beside recurrent states."""
    check_pool(Rows())
    check_pool(Rows("hnd"))
    check_pool(pool_of(SWAKVPool, full_kv_pool=Rows(), swa_kv_pool=Rows()))
    check_pool(pool_of(HybridLinearKVPool, full_kv_pool=Rows()))


def test_a_cache_that_moved_is_viewed_anew() -> None:
    """SGLang may give a layer other buffers, and may have a rest that fills no page."""
    pool = Pool("nhd", torch.zeros(21, 2, 8))
    views = CacheViews(pool, 4)
    first = views.of(0)
    assert views.of(0) is first
    pool.k = torch.ones(21, 2, 8)
    assert views.of(0).k.data_ptr() == pool.k.data_ptr()
    assert views.of(0).k.shape == (5, 4, 2, 8)


def test_logits_of_a_temperature_by_length_are_refused() -> None:
    """Grok sets it on a layer that is made."""
    scaled = layer()
    scaled.xai_temperature_len = 4
    with pytest.raises(Refused, match="layer 5: needs logits of one temperature"):
        spec_of(scaled)
