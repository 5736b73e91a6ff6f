"""What AITER's functions compute, from the same arguments, with torch on the CPU: behaviours of the stand-in.

They hold what the library's own code asks of its arguments, and know nothing of `backstamp`: shapes, dtypes, strides
and sizes are asserted as the kernels read them.
"""

from __future__ import annotations

import torch


def unified_attention(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    alibi_slopes=None,
    sinks=None,
):
    """Paged causal attention, ROCm/aiter's aiter/ops/triton/attention/unified_attention.py."""
    assert causal, "Only causal attention is supported"
    assert q_descale is None
    assert k_descale is None
    assert v_descale is None
    tokens, heads, _dim = q.shape
    _, page, kv_heads, _ = k.shape
    rows = len(seqused_k)
    assert cu_seqlens_q.shape == (rows + 1,)
    assert block_table.shape[0] >= rows
    assert {cu_seqlens_q.dtype, seqused_k.dtype, block_table.dtype} == {torch.int32}
    assert q.dtype == k.dtype == v.dtype == out.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert out.shape == (tokens, heads, v.shape[-1])
    assert q.stride(-1) == out.stride(-1) == 1
    # the kernel is handed the stride of a row of the table and none else
    assert block_table.shape[1] == 1 or block_table.stride(1) == 1
    assert cu_seqlens_q.stride(0) == seqused_k.stride(0) == 1
    assert sinks is None or sinks.shape == (heads,)
    assert max_seqlen_k >= int(seqused_k.max())
    window = 1 + window_size[0]
    for row in range(rows):
        if max_seqlen_q == 1:
            # ALL_DECODE: the kernel never reads the offsets
            start, stop = row, row + 1
        else:
            start, stop = int(cu_seqlens_q[row]), int(cu_seqlens_q[row + 1])
        length, count = int(seqused_k[row]), stop - start
        assert count <= max_seqlen_q
        if count == 0:
            continue
        pages = block_table[row, : -(-length // page)].long()
        keys = k[pages].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1)
        values = v[pages].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, 1)
        logits = torch.einsum("qhd,khd->hqk", q[start:stop].double(), keys) * softmax_scale
        if softcap > 0:
            logits = softcap * torch.tanh(logits / softcap)
        at = torch.arange(count)[:, None] + length - count
        key = torch.arange(length)[None, :]
        seen = key <= at
        if window > 0:
            seen = seen & (at - key < window)
        logits = logits.masked_fill(~seen, float("-inf"))
        if alibi_slopes is not None:
            # counted from the first query of the row: the softmax takes no notice of what a query adds to all keys
            logits = logits + alibi_slopes.double()[:, None, None] * (key - (length - count))
        if sinks is not None:
            logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, count, 1)], dim=-1)
            values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
        weights = torch.softmax(logits, -1).nan_to_num(0.0)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
    return out


def mla_forward(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    sm_scale,
    logit_cap,
):
    """Absorbed MLA over token slots, ROCm/aiter's aiter/mla.py, for `mla_decode_fwd` and `mla_prefill_fwd`."""
    assert logit_cap <= 0
    slots, page, kv_heads, dim = kv_buffer.shape
    assert (page, kv_heads, dim) == (1, 1, 576)
    assert kv_buffer.is_contiguous()
    tokens, heads, latent = o.shape
    assert (latent, q.shape) == (512, (tokens, heads, 576))
    assert heads in (16, 128)
    assert q.is_contiguous()
    assert o.is_contiguous()
    assert q.dtype == kv_buffer.dtype == o.dtype == torch.bfloat16
    rows = len(qo_indptr) - 1
    assert len(kv_indptr) == rows + 1
    assert len(kv_indices) == int(kv_indptr[-1])
    assert int(qo_indptr[-1]) == tokens
    assert torch.equal(kv_last_page_lens, torch.ones(rows, dtype=torch.int32))
    assert {t.dtype for t in (qo_indptr, kv_indptr, kv_indices, kv_last_page_lens)} == {torch.int32}
    for row in range(rows):
        start, stop = int(qo_indptr[row]), int(qo_indptr[row + 1])
        count = stop - start
        mine = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])]
        assert 0 < count <= max_seqlen_q
        assert count <= len(mine)
        assert int(mine.min()) >= 0
        assert int(mine.max()) < slots
        keys = kv_buffer[mine.long(), 0, 0].double()
        logits = torch.einsum("qhd,kd->hqk", q[start:stop].double(), keys) * sm_scale
        future = torch.arange(len(mine))[None, :] > torch.arange(count)[:, None] + len(mine) - count
        weights = torch.softmax(logits.masked_fill(future, float("-inf")), -1)
        o[start:stop] = torch.einsum("hqk,kd->qhd", weights, keys[:, :latent]).to(o.dtype)
    return o, None
