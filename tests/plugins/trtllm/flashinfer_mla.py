"""What flashinfer's MLA functions do with their arguments, computed with torch.

In: the recorded calls. Out: outputs and LSE in the base the library has. Wrong dtypes, shapes and page tables fail.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.plugins.trtllm.attend import attend, causal, pages_of
from tests.plugins.trtllm.flashinfer_mha import check_counters, check_table

__all__ = ["BEHAVIOURS"]


def mla(
    *,
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor,
    bmm1_scale: float,
    bmm2_scale: float,
    backend: str,
    lse: Tensor | None,
    return_lse: bool,
    cute_dsl_impl: str,
    cum_seq_lens_q: Tensor | None,
    max_q_len: int | None,
    multi_ctas_kv_counter_buffer: Tensor | None,
    return_lse_base: str,
) -> Any:
    """Absorbed MLA: `query [B, q_len, Hq, 576]`, or `[T, Hq, 576]` with cumulative lengths."""
    page_size, heads = kv_cache.shape[-2], query.shape[-2]
    assert kv_cache.dim() == 3
    assert (kv_lora_rank, qk_rope_head_dim) == (512, 64)
    assert query.shape[-1] == kv_cache.shape[-1] == 576
    assert workspace_buffer.numel() >= 128 << 20
    assert out.is_contiguous()
    assert out.shape == (*query.shape[:-1], 512)
    check_table(block_tables, seq_lens)
    if backend == "trtllm-gen":
        assert page_size in (32, 64)
        assert heads <= 64 or heads == 128
        assert cum_seq_lens_q is None or not return_lse, "the library refuses LSE of ragged rows"
        assert multi_ctas_kv_counter_buffer is not None
        check_counters(multi_ctas_kv_counter_buffer, seq_lens.shape[0], heads)
    else:
        assert backend == "cute-dsl"
        assert cute_dsl_impl == "monolithic"
        assert multi_ctas_kv_counter_buffer is None
        assert block_tables.shape[1] % max(1, 128 // page_size) == 0, "rows of the table cover whole tiles"
    rows = seq_lens.shape[0]
    if cum_seq_lens_q is None:
        assert max_q_len is None
        assert query.dim() == 4
        assert query.shape[0] == rows
        starts = [row * query.shape[1] for row in range(rows + 1)]
    else:
        assert query.dim() == 3
        assert cum_seq_lens_q.dtype is torch.int32
        assert cum_seq_lens_q.numel() == rows + 1
        starts = cum_seq_lens_q.tolist()
        assert max_q_len is not None
        assert max_q_len >= max(starts[row + 1] - starts[row] for row in range(rows)) > 0
    tokens, target = query.reshape(-1, heads, 576), out.view(-1, heads, 512)
    for row, kv_len in enumerate(seq_lens.tolist()):
        span = slice(starts[row], starts[row + 1])
        assert kv_len <= max_seq_len
        if span.start == span.stop:
            continue
        keys = pages_of(kv_cache, block_tables[row], kv_len)[:, None]
        seen = causal(span.stop - span.start, kv_len)
        answer, logs = attend(tokens[span], keys, keys[..., :512], seen, bmm1_scale)
        target[span] = (answer * bmm2_scale).to(out.dtype)
        if return_lse:
            assert lse is not None
            assert lse.shape == (tokens.shape[0], heads)
            assert lse.is_contiguous()
            lse[span] = logs if return_lse_base == "basee" else logs / math.log(2.0)
    return (out, lse) if return_lse else out


def ragged(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    workspace_buffer: Tensor,
    seq_lens: Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: Tensor,
    cum_seq_lens_kv: Tensor,
    enable_pdl: bool | None,
    is_causal: bool,
    return_lse: bool,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    q_seq_lens_cpu: Tensor,
    kv_seq_lens_cpu: Tensor,
) -> Any:
    """Prefill over ragged keys; rows the host lengths call empty are left out of the launch."""
    assert backend == "trtllm-gen"
    assert is_causal
    assert window_left == -1
    assert enable_pdl is None
    assert (query.shape[2], key.shape[2], value.shape[2]) == (192, 192, 128)
    assert o_sf_scale == 1.0
    assert workspace_buffer.numel() >= 128 << 20
    assert q_seq_lens_cpu.tolist() == cum_seq_lens_q.diff().tolist()
    assert kv_seq_lens_cpu.tolist() == cum_seq_lens_kv.diff().tolist() == seq_lens.tolist()
    assert max_q_len == int(q_seq_lens_cpu.max())
    assert max_kv_len == int(kv_seq_lens_cpu.max())
    assert out.is_contiguous()
    assert out.shape == (query.shape[0], query.shape[1], 128)
    rows_of_ragged(query, key, value, cum_seq_lens_q, cum_seq_lens_kv, bmm1_scale, out, lse, 1 / math.log(2.0))
    assert (lse is not None) is return_lse
    assert batch_size == seq_lens.shape[0]
    assert bmm2_scale == 1.0
    return (out, lse) if return_lse else out


def rows_of_ragged(
    query: Tensor, key: Tensor, value: Tensor, q_ends: Tensor, kv_ends: Tensor, scale: float, out: Tensor,
    lse: Tensor | None, base: float,
) -> None:  # fmt: skip
    """Attend row by row; LSE is multiplied by `base`. Rows without queries or keys are not written."""
    starts, bounds = q_ends.tolist(), kv_ends.tolist()
    for row in range(len(starts) - 1):
        span, keys = slice(starts[row], starts[row + 1]), slice(bounds[row], bounds[row + 1])
        q_len, kv_len = span.stop - span.start, keys.stop - keys.start
        if q_len and kv_len:
            answer, logs = attend(query[span], key[keys], value[keys], causal(q_len, kv_len), scale)
            out[span] = answer.to(out.dtype)
            if lse is not None:
                lse[span] = logs * base


BEHAVIOURS = {
    "flashinfer.mla:trtllm_batch_decode_with_kv_cache_mla": mla,
    "flashinfer.prefill:trtllm_ragged_attention_deepseek": ragged,
}
