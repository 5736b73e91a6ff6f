"""What sgl-flash-mla 1.0.0 documents, computed with torch: the behaviours of its stand-in.

In: a `FakeLibrary` of its recorded signatures. Out: functions that check what the library's C++ checks (csrc/api of the
same sources: shapes, dtypes, strides, head counts) and compute the answer on the CPU. What the library leaves undefined
is NaN here: tokens that see nothing. A schedule made for other lengths or shapes is an error, where the library would
take it in silence. Exported from `flash_mla` as the wheel's `__init__` does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from backstamp.testing.packed_latent import unpack
from tests.libraries.fake import FakeLibrary

__all__ = ["SPARSE", "WITH_CACHE", "install"]

MODULE = "flash_mla.flash_mla_interface"
SPARSE = f"{MODULE}:flash_mla_sparse_fwd"
WITH_CACHE = f"{MODULE}:flash_mla_with_kvcache"
METADATA = f"{MODULE}:get_mla_metadata"
DECODING_METADATA = f"{MODULE}:get_mla_decoding_metadata"
EXPORTED = ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata", "get_mla_decoding_metadata")


@dataclass
class Schedule:
    """Its `FlashMLASchedMeta`: filled by the first call, for what that call was."""

    config: dict[str, object] | None = None
    tile_scheduler_metadata: Tensor | None = None
    num_splits: Tensor | None = None


def install(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """The stand-in, with its behaviours."""
    library = FakeLibrary("sgl-flash-mla", monkeypatch)
    library.on(SPARSE, sparse_fwd)
    library.on(WITH_CACHE, with_kvcache)
    library.on(METADATA, lambda **_: (Schedule(), None))
    library.on(DECODING_METADATA, decoding_metadata)
    for name in EXPORTED:
        setattr(sys.modules["flash_mla"], name, getattr(sys.modules[MODULE], name))
    return library


def decoding_metadata(
    seqlens_k, num_q_tokens_per_head_k, h_k, h_q=None, is_fp8_kvcache=False, topk=None, use_legacy=False
):
    """A schedule hoisted out of the call: here the lengths it is for."""
    assert use_legacy
    assert not is_fp8_kvcache
    assert topk is None
    assert h_k == 1
    assert num_q_tokens_per_head_k > 0
    return seqlens_k.clone(), torch.full((seqlens_k.shape[0] + 1,), num_q_tokens_per_head_k, dtype=torch.int32)


def sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None, use_legacy=False):
    """`csrc/api/sparse_prefill.cpp`: q [s, h, d], kv [n, 1, d], indices [s, 1, topk] i32."""
    tokens, heads, width = q.shape
    assert q.dtype is kv.dtype is torch.bfloat16
    assert indices.dtype is torch.int32
    assert heads in (64, 128)
    assert d_v == 512
    assert q.stride(-1) == kv.stride(-1) == indices.stride(-1) == 1
    assert width == 512 or (width == 576 and use_legacy), "the current kernels take head dim 512 alone"
    assert kv.shape[1:] == (1, width)
    assert indices.shape[:2] == (tokens, 1)
    assert indices.shape[2] % 128 == 0
    check_sink(attn_sink, heads)
    assert topk_length.shape == (tokens,)
    assert topk_length.dtype is torch.int32
    assert int(topk_length.min()) >= 1
    out = torch.full((tokens, heads, d_v), float("nan"), dtype=q.dtype)
    lse = torch.full((tokens, heads), float("nan"))
    for token in range(tokens):
        slots = indices[token, 0, : int(topk_length[token])]
        attend(
            q[token], kv[slots[(slots >= 0) & (slots < kv.shape[0])].long(), 0], sm_scale, attn_sink, out, lse, token
        )
    return out, lse, lse


def with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=None, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    use_legacy=False,
):  # fmt: skip
    """`csrc/api/dense_decode.cpp` without indices, `csrc/api/sparse_decode.cpp` with: q [b, s, h, d]."""
    assert use_legacy
    assert softmax_scale is not None
    assert num_splits is None
    assert head_dim_v == 512
    assert isinstance(tile_scheduler_metadata, Schedule)
    if indices is None:
        assert not is_fp8_kvcache
        assert extra_k_cache is None
        return dense(q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, softmax_scale, causal)
    batch, one, heads, width = q.shape
    assert is_fp8_kvcache
    assert not causal
    assert one == 1
    assert heads in (64, 128)
    assert q.dtype is torch.bfloat16
    assert q.stride(-1) == 1
    check_sink(attn_sink, heads)
    config = {"b": batch, "h": heads, "page": k_cache.shape[1], "topk": indices.shape[-1]}
    if extra_k_cache is not None:
        config |= {"extra page": extra_k_cache.shape[1], "extra topk": extra_indices_in_kvcache.shape[-1]}
    known = tile_scheduler_metadata.config
    assert known is None or known == config, f"a schedule made for {known} was handed {config}"
    tile_scheduler_metadata.config = config
    if tile_scheduler_metadata.tile_scheduler_metadata is None:
        # of its shapes alone: no topk_length is handed over
        made = torch.tensor(list(config.values()), dtype=torch.int32)
        tile_scheduler_metadata.tile_scheduler_metadata, tile_scheduler_metadata.num_splits = made, made.clone()
    layout = "fp8_ds_mla" if width == 576 else "fp8_dsv4"
    pairs = [(k_cache, indices), (extra_k_cache, extra_indices_in_kvcache)]
    out = torch.full((batch, 1, heads, head_dim_v), float("nan"), dtype=q.dtype)
    lse = torch.full((batch, heads, 1), float("nan"))
    for token in range(batch):
        keys = torch.cat([packed_keys(cache, slots[token, 0], layout) for cache, slots in pairs if cache is not None])
        attend(q[token, 0], keys, softmax_scale, attn_sink, out[:, 0], lse[..., 0], token)
    return out, lse


def packed_keys(cache: Tensor, slots: Tensor, layout: str) -> Tensor:
    """Rows of a packed cache by slot, page by page; only -1 is nothing."""
    assert slots.dtype is torch.int32
    assert slots.stride(-1) == 1
    assert cache.dtype is torch.uint8
    page_size = cache.shape[1]
    assert cache.stride(1) == cache.shape[-1], "the whole block must be contiguous"
    slots = slots[slots != -1].long()
    assert bool(((slots >= 0) & (slots < cache.shape[0] * page_size)).all()), "no bounds are checked"
    return unpack(cache[slots // page_size], layout)[torch.arange(len(slots)), slots % page_size, 0]


def dense(q, k_cache, block_table, cache_seqlens, schedule, scale, causal):
    """Dense decode: rows of one query length, causal from a row's end; every table entry it may prefetch is a page."""
    batch, q_len, heads, width = q.shape
    assert q.dtype is k_cache.dtype
    assert q.dtype in (torch.bfloat16, torch.float16)
    assert width in (576, 512)
    assert batch > 0
    assert k_cache.shape[1:] == (64, 1, width)
    assert k_cache.stride(-1) == q.stride(-1) == 1
    assert block_table.dtype is cache_seqlens.dtype is torch.int32
    assert block_table.shape[0] == batch
    assert cache_seqlens.shape == (batch,)
    assert cache_seqlens.is_contiguous()
    assert int(cache_seqlens.min()) >= 1
    assert bool(((block_table >= 0) & (block_table < k_cache.shape[0])).all()), "no bounds are checked"
    if schedule.tile_scheduler_metadata is None:
        schedule.tile_scheduler_metadata, schedule.num_splits = decoding_metadata(
            cache_seqlens, q_len * heads, 1, use_legacy=True
        )
    assert torch.equal(schedule.tile_scheduler_metadata, cache_seqlens), "a schedule made for other lengths"
    assert int(schedule.num_splits[0]) == q_len * heads, "a schedule made for other queries"
    out = torch.full((batch, q_len, heads, 512), float("nan"), dtype=q.dtype)
    lse = torch.full((batch, heads, q_len), float("nan"))
    for row in range(batch):
        length = int(cache_seqlens[row])
        keys = k_cache[block_table[row, : -(-length // 64)].long()].flatten(0, 1)[:length, 0]
        for token in range(q_len):
            seen = length - q_len + token + 1 if causal and q_len > 1 else length
            attend(q[row, token], keys[: max(0, seen)], scale, None, out[row], lse[row].T, token)
    return out, lse


def attend(q, keys, scale, sink, out, lse, at) -> None:
    """One token over its keys; what it does not see leaves out and lse as they are."""
    if not len(keys):
        return
    logits = q.double() @ keys.double().T * scale
    total = lse[at] = torch.logsumexp(logits, dim=-1)
    if sink is not None:
        total = torch.logaddexp(total, sink.double())
    out[at] = (torch.exp(logits - total[:, None]) @ keys[:, :512].double()).to(out.dtype)


def check_sink(sink: Tensor | None, heads: int) -> None:
    """`attn_sink`: [heads] f32, contiguous."""
    assert sink is None or (sink.dtype is torch.float32 and sink.shape == (heads,) and sink.is_contiguous())
