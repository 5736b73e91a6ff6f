"""What tokenspeed-mla's two functions do with their arguments, computed with torch.

In: the recorded calls. Out: outputs, and LSE of base 2 (decode) or e (prefill). What the library refuses fails here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.plugins.trtllm.attend import attend, pages_of
from tests.plugins.trtllm.flashinfer_mha import check_table
from tests.plugins.trtllm.flashinfer_mla import rows_of_ragged

__all__ = ["BEHAVIOURS"]


def decode(
    *,
    query: Tensor,
    kv_cache: Tensor,
    workspace_buffer: Tensor,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    softmax_scale: float,
    out: Tensor,
    return_lse: bool,
    local_visible_lens: Tensor,
) -> Any:
    """`query [B, q_len, Hq, 576]`; each query sees the first `local_visible_lens` keys, none of them zeros and -inf."""
    rows, q_len, heads, width = query.shape
    assert width == kv_lora_rank + qk_rope_head_dim == 576
    assert kv_cache.dim() == 3
    assert workspace_buffer.dtype is torch.int8
    assert max_seq_len > 0
    assert heads <= 128
    assert local_visible_lens.shape == (rows, q_len)
    assert local_visible_lens.dtype is torch.int32
    assert local_visible_lens.is_contiguous()
    assert bool((local_visible_lens <= seq_lens[:, None]).all())
    assert bool((local_visible_lens >= 0).all())
    assert out.is_contiguous()
    assert out.shape == (rows, q_len, heads, 512)
    check_table(block_tables, seq_lens)
    lse = torch.zeros(rows, q_len, heads)
    for row, kv_len in enumerate(seq_lens.tolist()):
        keys = pages_of(kv_cache, block_tables[row], kv_len)[:, None]
        seen = torch.arange(kv_len)[None, :] < local_visible_lens[row][:, None]
        answer, logs = attend(query[row], keys, keys[..., :512], seen, softmax_scale)
        empty = local_visible_lens[row][:, None, None] == 0
        out[row] = answer.masked_fill(empty, 0.0).to(out.dtype)
        lse[row] = logs / math.log(2.0)
    return (out, lse) if return_lse else out


def prefill(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seq_lens: Tensor,
    cum_seq_lens: Tensor,
    max_seq_len: int,
    batch_size: int,
    softmax_scale: float,
    is_causal: bool,
    return_lse: bool,
    cum_seq_lens_q: Tensor,
    max_seq_len_q: int,
    out: Tensor,
) -> Any:
    """Prefill over ragged keys."""
    assert is_causal
    assert batch_size == seq_lens.shape[0]
    assert max_seq_len == int(cum_seq_lens.diff().max())
    assert max_seq_len_q == int(cum_seq_lens_q.diff().max())
    assert out.is_contiguous()
    assert out.dtype is torch.bfloat16
    assert out.shape == (query.shape[0], query.shape[1], value.shape[2])
    lse = torch.empty(query.shape[:2])
    rows_of_ragged(query, key, value, cum_seq_lens_q, cum_seq_lens, softmax_scale, out, lse, 1.0)
    return (out, lse) if return_lse else out


BEHAVIOURS = {"tokenspeed_mla:tokenspeed_mla_decode": decode, "tokenspeed_mla:tokenspeed_mla_prefill": prefill}
