"""What torch-npu's functions compute, from the same arguments, with torch on the CPU: behaviours of the stand-in.

They hold what the library's own documentation asks of its arguments (torch-npu 2.14.0, _op_plugin_docs.py), and know
nothing of `backstamp`.
"""

from __future__ import annotations

from itertools import pairwise

import torch

BF16, FP16 = torch.bfloat16, torch.float16
ALL = 2147483647


def fused_attention(
    query,
    key,
    value,
    *,
    num_query_heads,
    num_key_value_heads,
    softmax_scale,
    input_layout,
    sparse_mode,
    block_size,
    actual_seq_qlen,
    actual_seq_kvlen,
    block_table,
    atten_mask=None,
    query_rope=None,
    key_rope=None,
    learnable_sink=None,
    pre_tokens=ALL,
    next_tokens=ALL,
    return_softmax_lse=False,
):
    """`npu_fused_infer_attention_score_v2` over pages, in layouts TND and BSND."""
    assert all(x.is_contiguous() for x in (query, key, value, block_table))
    assert query.dtype == key.dtype == value.dtype
    heads, width = query.shape[-2:]
    assert heads == num_query_heads
    assert heads % num_key_value_heads == 0
    assert heads // num_key_value_heads <= 64
    assert key.shape == value.shape
    assert key.shape[1:] == (block_size, num_key_value_heads * width)
    assert block_table.dtype is torch.int32
    assert all(type(length) is int for length in (*actual_seq_qlen, *actual_seq_kvlen))
    if input_layout == "TND":
        assert query.dim() == 3
        starts = [0, *actual_seq_qlen]
        assert starts[-1] == query.shape[0]
        flat = query
    else:
        assert input_layout == "BSND"
        assert query.dim() == 4
        assert query.shape[0] == len(actual_seq_qlen)
        assert set(actual_seq_qlen) == {query.shape[1]}
        starts = [row * query.shape[1] for row in range(query.shape[0] + 1)]
        flat = query.flatten(0, 1)
    rows = len(starts) - 1
    q_lens = [stop - start for start, stop in pairwise(starts)]
    assert len(actual_seq_kvlen) == rows == block_table.shape[0] <= 4096
    assert block_table.shape[1] >= max(-(-length // block_size) for length in actual_seq_kvlen)
    assert all(0 < q_len <= kv_len for q_len, kv_len in zip(q_lens, actual_seq_kvlen, strict=True))
    hold_the_mask(atten_mask, sparse_mode)
    if query_rope is not None:
        hold_the_latent_rules(query, query_rope, key_rope, key, q_lens, sparse_mode, block_size)
    elif input_layout == "TND":
        assert query.dtype is BF16
        assert width in (128, 192)
        assert sparse_mode in (0, 3, 4)
        assert block_size in (128, 256, 384, 512)
    else:
        assert query.dtype in (FP16, BF16)
        assert width % 16 == 0
        assert num_query_heads * width < 65535
        assert block_size in (128, 256, 384, 512)
        # with one query a row the library reads neither the mode nor the tokens before and after
        assert query.shape[1] > 1 or (sparse_mode == 0 and atten_mask is None)
    if learnable_sink is not None:
        assert input_layout == "TND"
        assert learnable_sink.dtype is BF16
        assert learnable_sink.shape == (heads,)
        assert width <= 128
    answer = torch.empty_like(flat)
    log = torch.empty(flat.shape[0], heads)
    for row in range(rows):
        part, length = slice(starts[row], starts[row + 1]), actual_seq_kvlen[row]
        pages = block_table[row, : -(-length // block_size)].long()
        k, v = (x[pages].flatten(0, 1)[:length].unflatten(-1, (-1, width)).double() for x in (key, value))
        q = flat[part].double()
        if query_rope is not None:
            q = torch.cat([q, query_rope[part].double()], -1)
            rope = key_rope[pages].flatten(0, 1)[:length].unflatten(-1, (-1, 64)).double()
            k = torch.cat([k, rope], -1)
        k, v = (x.repeat_interleave(heads // num_key_value_heads, 1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
        logits = logits.masked_fill(hidden(len(q), length, sparse_mode, pre_tokens, next_tokens), float("-inf"))
        log[part] = logits.logsumexp(-1).T.float()
        if learnable_sink is not None:
            logits = torch.cat([logits, learnable_sink.double()[:, None, None].expand(-1, len(q), 1)], -1)
            v = torch.cat([v, v.new_zeros(1, *v.shape[1:])])
        answer[part] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v).to(flat.dtype)
    if not return_softmax_lse:
        return answer.view(query.shape), torch.zeros(1)
    if input_layout == "TND":
        return answer, log[..., None]
    return answer.view(query.shape), log.unflatten(0, query.shape[:2]).transpose(1, 2)[..., None].contiguous()


def hold_the_mask(mask, sparse_mode):
    """The triangle for modes 2 to 4, True where hidden; none for mode 0 here."""
    if sparse_mode == 0:
        assert mask is None
        return
    assert sparse_mode in (3, 4)
    assert mask.dtype is torch.bool
    assert torch.equal(mask, ~torch.ones(2048, 2048, dtype=torch.bool).tril())


def hold_the_latent_rules(query, query_rope, key_rope, key, q_lens, sparse_mode, block_size):
    """ "query_rope" with a query of 512."""
    assert query.shape[-1] == 512
    assert query.shape[1] in (1, 2, 4, 8, 16, 32, 64, 128)
    assert query.dtype in (FP16, BF16)
    assert query_rope.shape == (*query.shape[:2], 64)
    assert key_rope.shape == (*key.shape[:2], 64)
    assert query_rope.dtype == key_rope.dtype == query.dtype
    assert query_rope.is_contiguous()
    assert key_rope.is_contiguous()
    assert max(q_lens) <= 16
    assert sparse_mode == (0 if max(q_lens) == 1 else 3)
    assert block_size in (16, 128)


def hidden(q_len, kv_len, sparse_mode, before, after):
    """Bool `[q_len, kv_len]`: both sides of a band are counted from where the last query meets the last key."""
    at = torch.arange(q_len)[:, None] + kv_len - q_len
    key = torch.arange(kv_len)[None, :]
    if sparse_mode == 0:
        return torch.zeros(q_len, kv_len, dtype=torch.bool)
    if sparse_mode == 3:
        return key > at
    return (at - key > before) | (key - at > after)
