"""What flashinfer's XQA, FMHA v2 and trtllm-gen functions do with their arguments, computed with torch.

Each refuses what the library or its kernel would refuse or read wrongly: dtypes, shapes, contiguity, strides, widths
of masks, buffers that must start at zero. What a kernel leaves unwritten stays unwritten here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.plugins.trtllm.attend import attend, causal, pages_of

__all__ = ["BEHAVIOURS"]

SM_COUNT = 132


def xqa(
    *,
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    window_left: int,
    out: Tensor,
    sinks: Tensor | None,
    kv_layout: str,
    q_len_per_req: int,
    mask: Tensor | None,
    q_cu_seq_lens: Tensor | None,
) -> Tensor:
    """Decode, and ragged drafts under packed masks whose rows are 16-bit words."""
    k, v = kv_cache
    assert kv_layout == "NHD"
    assert k.shape[1] in (16, 32, 64, 128)
    assert k.stride() == v.stride(), "the kernel has one set of strides"
    assert all(stride % k.shape[-1] == 0 for stride in k.stride()[:3]), "strides are counted in heads"
    assert query.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == query.shape
    assert out.dtype == query.dtype
    check_table(block_tables, seq_lens)
    check_sinks(sinks, query.shape[1])
    assert workspace_buffer.dtype is torch.uint8
    assert workspace_buffer.numel() > 8 << 20
    assert not workspace_buffer[: 8 << 20].any(), "semaphores start at zero"
    rows = seq_lens.shape[0]
    if q_cu_seq_lens is None:
        assert q_len_per_req == 1
        assert mask is None
        assert query.shape[0] == rows
        starts = list(range(rows + 1))
    else:
        assert q_len_per_req > 1, "the library asserts the longest draft"
        assert q_cu_seq_lens.dtype is torch.int32
        assert q_cu_seq_lens.is_contiguous()
        assert q_cu_seq_lens.numel() == rows + 1
        assert mask is not None
        assert mask.dtype is torch.uint16
        assert mask.shape == (query.shape[0], -(-q_len_per_req // 32) * 2)
        assert mask.is_contiguous()
        starts = q_cu_seq_lens.tolist()
    for row, kv_len in enumerate(seq_lens.tolist()):
        span = slice(starts[row], starts[row + 1])
        q_len = span.stop - span.start
        assert q_len <= q_len_per_req
        if q_len == 0:
            continue
        seen = causal(q_len, kv_len, window_left)
        if mask is not None and kv_len:
            words = mask[span].to(torch.int64)
            bits = (words[..., None] >> torch.arange(16)) & 1
            own = bits.flatten(1)[:, :q_len].bool()
            tree = torch.ones(q_len, kv_len, dtype=torch.bool)
            tree[:, kv_len - q_len :] = own
            place = torch.arange(kv_len - q_len, kv_len)[:, None]
            near = torch.arange(kv_len)[None, :] >= place - window_left if window_left >= 0 else tree
            seen = tree & near
        keys, values = (pages_of(part, block_tables[row], kv_len) for part in (k, v))
        out[span] = (attend(query[span], keys, values, seen, bmm1_scale, sinks=sinks)[0] * bmm2_scale).to(out.dtype)
    return out


def fmha_v2(
    *,
    qkv: tuple[Tensor, tuple[Tensor, Tensor]],
    input_layout: str,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    block_tables: Tensor,
    out: Tensor,
    sinks: Tensor | None,
    logits_soft_cap_scale: float | None,
    mask_mode: str,
    window_left: int,
) -> Tensor:
    """Prefill: every page is a whole block relative to K's base pointer, and unused slots are multiplied by zero."""
    query, (k, v) = qkv
    assert input_layout == "Q_PAGED_KV_NHD"
    assert query.dtype is torch.bfloat16
    assert query.is_contiguous()
    assert out.is_contiguous()
    assert out.shape == query.shape
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert k.shape == v.shape
    block = k[0].numel()
    apart = (v.data_ptr() - k.data_ptr()) // k.element_size()
    assert apart > 0
    assert apart % block == 0
    assert block_tables.dtype is torch.int32
    assert block_tables.is_contiguous()
    assert tuple(block_tables.shape[:2]) == (batch_size, 2)
    check_sinks(sinks, query.shape[1])
    assert not workspace_buffer.any(), "the tile counter starts at zero"
    q_ends, kv_ends = cum_seq_lens_q.tolist(), cum_seq_lens_kv.tolist()
    assert len(q_ends) == len(kv_ends) == batch_size + 1
    assert q_ends[-1] == query.shape[0], "the kernel takes the total from the query"
    assert max_q_len == int(cum_seq_lens_q.diff().max())
    assert max_kv_len == int(cum_seq_lens_kv.diff().max())
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert mask_mode in ("causal", "sliding_window")
    window = window_left if mask_mode == "sliding_window" or 0 < window_left < max_kv_len else -1
    pool = torch.as_strided(k, (2 * k.shape[0], *k.shape[1:]), k.stride(), k.storage_offset())
    for row in range(batch_size):
        span, kv_len = slice(q_ends[row], q_ends[row + 1]), kv_ends[row + 1] - kv_ends[row]
        q_len = span.stop - span.start
        if q_len == 0 or kv_len == 0:
            continue
        pages = -(-kv_len // k.shape[1])
        keys, values = (pool[block_tables[row, half, :pages].long()].flatten(0, 1) for half in (0, 1))
        seen = torch.zeros(q_len, keys.shape[0], dtype=torch.bool)
        seen[:, :kv_len] = causal(q_len, kv_len, window)
        keys = keys.float()
        keys[kv_len:] = 0
        answer, _ = attend(
            query[span], keys, values, seen, bmm1_scale, softcap=logits_soft_cap_scale or 0.0, sinks=sinks
        )
        out[span] = (answer * bmm2_scale).to(out.dtype)
    return out


def gen_decode(
    *,
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    window_left: int,
    out: Tensor,
    sinks: Tensor | None,
    kv_layout: str,
    backend: str,
    q_len_per_req: int | None,
    max_q_len: int | None,
    cum_seq_lens_q: Tensor | None,
    lse: Tensor | None,
    multi_ctas_kv_counter_buffer: Tensor,
) -> Tensor:
    """trtllm-gen's decode: rows of one length, or ragged where `q_len_per_req` is None."""
    assert backend == "trtllm-gen", "auto is another kernel on another chip"
    rows = seq_lens.shape[0]
    if q_len_per_req is None:
        assert max_q_len is not None
        assert cum_seq_lens_q is not None
        starts = cum_seq_lens_q.tolist()
        assert max(starts[row + 1] - starts[row] for row in range(rows)) <= max_q_len
    else:
        assert (max_q_len, cum_seq_lens_q) == (None, None)
        assert query.shape[0] == rows * q_len_per_req
        starts = [row * q_len_per_req for row in range(rows + 1)]
    check_counters(multi_ctas_kv_counter_buffer, rows, query.shape[1])
    return _gen(
        query, kv_cache, block_tables, seq_lens, max_seq_len, bmm1_scale, bmm2_scale, window_left, out, sinks, lse,
        starts, kv_layout, workspace_buffer,
    )  # fmt: skip


def gen_context(
    *,
    query: Tensor,
    kv_cache: tuple[Tensor, Tensor],
    workspace_buffer: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: Any,
    bmm2_scale: Any,
    batch_size: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    window_left: int,
    out: Tensor,
    kv_layout: str,
    sinks: Tensor | None,
    lse: Tensor | None,
    multi_ctas_kv_counter_buffer: Tensor,
    backend: str,
) -> Tensor:
    """trtllm-gen's context function."""
    assert backend == "trtllm-gen"
    assert batch_size == seq_lens.shape[0]
    assert cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert int(cum_seq_lens_q.diff().max()) <= max_q_len
    check_counters(multi_ctas_kv_counter_buffer, batch_size, query.shape[1])
    return _gen(
        query, kv_cache, block_tables, seq_lens, max_kv_len, bmm1_scale, bmm2_scale, window_left, out, sinks, lse,
        cum_seq_lens_q.tolist(), kv_layout, workspace_buffer,
    )  # fmt: skip


def _gen(
    query: Tensor, kv_cache: tuple[Tensor, Tensor], tables: Tensor, seq_lens: Tensor, max_kv_len: int,
    bmm1_scale: Any, bmm2_scale: Any, window_left: int, out: Tensor, sinks: Tensor | None, lse: Tensor | None,
    starts: list[int], kv_layout: str, workspace: Tensor,
) -> Tensor:  # fmt: skip
    k, v = kv_cache
    assert kv_layout == "NHD"
    assert k.stride() == v.stride(), "V's strides are K's"
    assert workspace.numel() >= 128 << 20
    assert out.is_contiguous()
    assert out.shape == query.shape
    check_table(tables, seq_lens)
    check_sinks(sinks, query.shape[1])
    for row, kv_len in enumerate(seq_lens.tolist()):
        span = slice(starts[row], starts[row + 1])
        assert kv_len <= max_kv_len
        if span.start == span.stop:
            continue
        seen = causal(span.stop - span.start, kv_len, window_left)
        keys, values = (pages_of(part, tables[row], kv_len) for part in (k, v))
        answer, logs = attend(query[span], keys, values, seen, float(bmm1_scale), sinks=sinks)
        out[span] = (answer * float(bmm2_scale)).to(out.dtype)
        if lse is not None:
            # base 2, as lse.cuh has it
            lse[span] = logs / math.log(2.0)
    return out


def check_table(tables: Tensor, seq_lens: Tensor) -> None:
    """A page table is read as rows of its width, whatever its strides say."""
    assert tables.dtype is torch.int32
    assert tables.is_contiguous()
    assert seq_lens.dtype is torch.int32
    assert seq_lens.is_contiguous()
    assert tables.shape[0] == seq_lens.shape[0]


def check_sinks(sinks: Tensor | None, heads: int) -> None:
    """Sinks are read as float32."""
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous() and sinks.shape == (heads,))


def check_counters(counters: Tensor, rows: int, heads: int) -> None:
    """Zero, and of the size the library says."""
    assert counters.numel() >= counter_bytes(batch_size=rows, num_qo_heads=heads, sm_count=SM_COUNT)
    assert not counters.any()


def counter_bytes(*, batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """The library's own formula."""
    return -(-max(batch_size * num_qo_heads, sm_count) // 8) * 8 * 4


BEHAVIOURS = {
    "flashinfer.decode:xqa_batch_decode_with_kv_cache": xqa,
    "flashinfer.prefill:trtllm_fmha_v2_prefill": fmha_v2,
    "flashinfer.decode:trtllm_batch_decode_with_kv_cache": gen_decode,
    "flashinfer.prefill:trtllm_batch_context_with_kv_cache": gen_context,
    "flashinfer.utils:get_device_sm_count": lambda *, device: SM_COUNT,
    "flashinfer.utils:get_trtllm_gen_multi_ctas_kv_counter_bytes": counter_bytes,
}
