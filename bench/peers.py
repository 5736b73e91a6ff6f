"""Libraries called directly on the tensors of an attention shape: what stands beside our built backends.

In: an `AttentionStep`. Out: `Candidate`s, planned outside of what is timed. Those of prefill read contiguous keys, and
pay for no page table; a library that is not installed raises ImportError when it is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from backstamp.attention import KVIndex, PagedKV
from built import Candidate, Ready
from shapes import Shape, family_of
from steps import AttentionStep
from timing import versions

__all__ = ["attention_peers"]

_FLASHINFER = "flashinfer-python"


def attention_peers(shape: Shape) -> Iterator[Candidate]:
    """The libraries that have a function for this work."""
    family = family_of(shape)
    if shape.kv_dtype != "same":
        return
    if family == "sparse_mla":
        yield _peer("flash_mla sparse", _flash_mla_sparse)
    elif family == "mla":
        if shape.phase == "decode":
            yield _peer("flash_mla dense", _flash_mla)
        yield _peer("flashinfer MLA, fa3", _flashinfer_mla)
    elif shape.phase == "decode":
        yield _peer("flashinfer decode, tensor cores", lambda step: _flashinfer_decode(step, True))
        yield _peer("flashinfer decode, CUDA cores", lambda step: _flashinfer_decode(step, False))
        yield _peer("FA3 paged", _fa3_paged)
    elif shape.phase == "verify":
        if not shape.tree:
            yield _peer("flashinfer paged, fa2", lambda step: _flashinfer_paged(step, "fa2"))
            yield _peer("FA3 paged", _fa3_paged)
    else:
        yield _peer("fa3-fwd, contiguous KV", _fa3_fwd)
        yield _peer("flashinfer ragged, fa3", _flashinfer_ragged)
        if shape.page_size:
            yield _peer("FA3 paged", _fa3_paged)
            yield _peer("flashinfer paged, fa3", lambda step: _flashinfer_paged(step, "fa3"))
        if shape.work == "prefill" and shape.uniform:
            yield _peer("torch flex_attention, contiguous KV", _flex)


def _peer(name: str, prepare: Callable[[AttentionStep], Ready]) -> Candidate:
    return Candidate(name, True, prepare)


def _paged(step: AttentionStep) -> tuple[PagedKV, Any, KVIndex]:
    assert step.kv is not None, "a peer of paged keys"
    return step.kv, step.kv.v, step.batch.index


def _contiguous(step: AttentionStep) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of all rows `[N, Hk, D]`, and where each begins."""
    lens = step.batch.kv_lens
    starts = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    if step.new is not None:
        return step.new.k, step.new.v, starts
    kv, v, index = _paged(step)
    assert index.kv_indptr is not None, "every paged step has it"
    assert index.kv_indices is not None, "every paged step has it"
    halves = []
    for cache in (kv.k, v):
        rows = []
        for row, (_, length) in enumerate(step.shape.rows):
            pages = index.kv_indices[int(index.kv_indptr[row]) : int(index.kv_indptr[row + 1])].long()
            rows.append(cache[pages].flatten(0, 1)[:length])
        halves.append(torch.cat(rows))
    return halves[0], halves[1], starts


def _fa3_fwd(step: AttentionStep) -> Ready:
    import fa3_fwd_interface as fa3

    k, v, starts = _contiguous(step)
    batch = step.batch
    lens = (batch.max_q_len, batch.max_kv_len)

    def run() -> Tensor:
        out = fa3.flash_attn_varlen_func(
            step.q, k, v, batch.qo_indptr, starts, *lens, softmax_scale=step.layer.scale, causal=True
        )
        return out[0] if isinstance(out, tuple) else out

    return Ready(run, "fa3-fwd")


def _fa3_paged(step: AttentionStep) -> Ready:
    import flash_attn_interface as fa3

    kv, v, index = _paged(step)
    batch = step.batch

    def run() -> Tensor:
        out = fa3.flash_attn_with_kvcache(
            step.q,
            kv.k,
            v,
            cache_seqlens=batch.kv_lens,
            page_table=index.page_table,
            cu_seqlens_q=batch.qo_indptr,
            max_seqlen_q=batch.max_q_len,
            softmax_scale=step.layer.scale,
            causal=True,
        )
        return out[0] if isinstance(out, tuple) else out

    # both builds have this name to import
    built = "tokenspeed-fa3" if "tokenspeed-fa3" in versions() else "flash-attn-3"
    return Ready(run, built)


def _flashinfer_ragged(step: AttentionStep) -> Ready:
    import flashinfer

    k, v, starts = _contiguous(step)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(_workspace(step), "NHD", backend="fa3")
    wrapper.plan(step.batch.qo_indptr, starts, *_sizes(step), causal=True, q_data_type=torch.bfloat16)
    return Ready(lambda: wrapper.run(step.q, k, v), _FLASHINFER)


def _flashinfer_paged(step: AttentionStep, backend: str) -> Ready:
    import flashinfer

    kv, v, index = _paged(step)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(step), "NHD", backend=backend)
    last = ((step.batch.kv_lens - 1) % index.page_size + 1).int()
    wrapper.plan(
        step.batch.qo_indptr,
        index.kv_indptr,
        index.kv_indices,
        last,
        *_sizes(step),
        index.page_size,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    return Ready(lambda: wrapper.run(step.q, (kv.k, v)), _FLASHINFER)


def _flashinfer_decode(step: AttentionStep, tensor_cores: bool) -> Ready:
    import flashinfer

    kv, v, index = _paged(step)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(step), "NHD", use_tensor_cores=tensor_cores)
    last = ((step.batch.kv_lens - 1) % index.page_size + 1).int()
    dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(index.kv_indptr, index.kv_indices, last, *_sizes(step), index.page_size, **dtypes)
    return Ready(lambda: wrapper.run(step.q, (kv.k, v)), _FLASHINFER)


def _flashinfer_mla(step: AttentionStep) -> Ready:
    import flashinfer

    kv, _, index = _paged(step)
    batch, layer = step.batch, step.layer
    latent, rotary = layer.v_head_dim, layer.head_dim - layer.v_head_dim
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(step), backend="fa3")
    sizes = (layer.num_qo_heads, latent, rotary, index.page_size, True, layer.scale, torch.bfloat16, torch.bfloat16)
    wrapper.plan(batch.qo_indptr, index.kv_indptr, index.kv_indices, batch.kv_lens, *sizes)
    nope, rope = step.q[..., :latent].contiguous(), step.q[..., latent:].contiguous()
    cache = kv.k.squeeze(2)
    return Ready(lambda: wrapper.run(nope, rope, cache[..., :latent], cache[..., latent:]), _FLASHINFER)


def _flash_mla(step: AttentionStep) -> Ready:
    from flash_mla import flash_mla_interface as library

    kv, _, index = _paged(step)
    schedule, _ = library.get_mla_metadata()
    q, layer = step.q[:, None], step.layer

    def run() -> Tensor:
        found = library.flash_mla_with_kvcache(
            q,
            kv.k,
            index.page_table,
            step.batch.kv_lens,
            layer.v_head_dim,
            schedule,
            None,
            softmax_scale=layer.scale,
            causal=False,
            use_legacy=True,
        )
        return found[0][:, 0]

    return Ready(run, "sgl-flash-mla")


def _flash_mla_sparse(step: AttentionStep) -> Ready:
    """On slots: where each choice lies in the cache is found outside of what is timed."""
    from flash_mla import flash_mla_interface as library

    kv, _, index = _paged(step)
    assert index.page_table is not None, "every paged step has it"
    assert step.indices is not None, "a sparse step has them"
    lens = torch.tensor([q for q, _ in step.shape.rows], device=step.q.device)
    table = index.page_table.repeat_interleave(lens, 0)
    chosen = step.indices.long()
    slots = (table.gather(1, chosen // index.page_size).long() * index.page_size + chosen % index.page_size).int()
    rows, layer = kv.k.view(-1, 1, step.layer.head_dim), step.layer
    slots = slots[:, None].contiguous()

    def run() -> Tensor:
        return library.flash_mla_sparse_fwd(step.q, rows, slots, layer.scale, layer.v_head_dim, use_legacy=True)[0]

    return Ready(run, "sgl-flash-mla")


def _flex(step: AttentionStep) -> Ready:
    """torch's compiled flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    k, v, _ = _contiguous(step)
    rows, length = len(step.shape.rows), step.shape.rows[0][1]
    q, k, v = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in (step.q, k, v))
    device = str(step.q.device)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=device)
    # on the CPU the compiled one has no grouped queries; what is timed there are no figures
    call: Any = flex_attention if step.q.device.type == "cpu" else torch.compile(flex_attention)

    def run() -> Tensor:
        return call(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    return Ready(run, "torch")


def _workspace(step: AttentionStep) -> Tensor:
    return torch.empty(512 << 20, device=step.q.device, dtype=torch.uint8)


def _sizes(step: AttentionStep) -> tuple[int, int, int]:
    return step.layer.num_qo_heads, step.layer.num_kv_heads, step.layer.head_dim
