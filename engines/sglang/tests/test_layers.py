"""Layers and caches of SGLang's as the contract has them."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

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


def test_a_packed_pool_is_refused() -> None:
    """AITER's vectorised layout has no strided view."""
    with pytest.raises(Refused, match="plain rows"):
        check_pool(Pool("vectorized_5d", torch.zeros(1)))
