"""Other projects' kernels on the same tensors, called directly."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backstamp.testing.reference import gather_row
from shapes import DIM, HEADS, KV_HEADS, LATENT, MLA_HEADS, ROTARY, Data


def peers(data: Data) -> list[tuple[str, str, Callable[[], Callable[[], Tensor]]]]:
    """Other projects' kernels, called directly."""
    if data.shape.work == "prefill":
        return [("torch flex_attention, contiguous KV", "torch", lambda: flex_peer(data))]
    if data.shape.work == "decode":
        return [
            ("flashinfer decode, tensor cores", "flashinfer", lambda: flashinfer_peer(data, True)),
            ("flashinfer decode, CUDA cores", "flashinfer", lambda: flashinfer_peer(data, False)),
        ]
    return [("flashinfer MLA, fa3", "flashinfer", lambda: flashinfer_mla_peer(data))]


def flex_peer(data: Data) -> Callable[[], Tensor]:
    """torch's compiled flex_attention on keys already gathered: it pays for no page table."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape = data.shape
    rows = [
        gather_row(cache, data.batch.index, row, shape.kv_len)
        for cache in (data.kv.k, data.kv.v)
        for row in range(shape.rows)
    ]
    k, v = (torch.stack(half).transpose(1, 2) for half in (rows[: shape.rows], rows[shape.rows :]))
    q = data.q.view(shape.rows, shape.q_len, HEADS, DIM).transpose(1, 2)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, shape.q_len, shape.kv_len, device="cuda")
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).reshape(-1, HEADS, DIM)


def flashinfer_peer(data: Data, tensor_cores: bool) -> Callable[[], Tensor]:
    """flashinfer's paged decode on the same pages."""
    import flashinfer

    shape, index = data.shape, data.batch.index
    workspace = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    last = torch.full((shape.rows,), shape.page_size, dtype=torch.int32, device="cuda")
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(index.kv_indptr, index.kv_indices, last, HEADS, KV_HEADS, DIM, shape.page_size, **dtypes)
    return lambda: wrapper.run(data.q, (data.kv.k, data.kv.v))


def flashinfer_mla_peer(data: Data) -> Callable[[], Tensor]:
    """flashinfer's MLA decode on the same pages."""
    import flashinfer

    shape, batch, index = data.shape, data.batch, data.batch.index
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, device="cuda", dtype=torch.uint8), backend="fa3"
    )
    sizes = (MLA_HEADS, LATENT, ROTARY, shape.page_size, False, data.layer.scale, torch.bfloat16, torch.bfloat16)
    wrapper.plan(batch.qo_indptr, index.kv_indptr, index.kv_indices, batch.kv_lens, *sizes)
    nope, rope = data.q[..., :LATENT].contiguous(), data.q[..., LATENT:].contiguous()
    cache = data.kv.k.squeeze(2)
    return lambda: wrapper.run(nope, rope, cache[..., :LATENT], cache[..., LATENT:])
