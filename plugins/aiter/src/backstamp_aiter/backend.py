"""The factories: one `BuildRequest` to one `Built`; the only module that imports AITER, when something is built.

A factory holds the request against its row first, so that a refusal needs no library.
"""

from __future__ import annotations

from torch import Tensor

from backstamp.factories import BuildRequest, Built
from backstamp.step_checks import check_build, refusal
from backstamp_aiter.latent import LatentAttention, LatentRows
from backstamp_aiter.paged import PagedAttention

__all__ = ["LATENT_HEADS", "build_latent_decode", "build_latent_prefill", "build_paged"]

#: Query heads AITER's MLA takes in bf16 without a schedule of its own; a rank with fewer pads them, which we do not.
#: Source: SGLang 0.5.23, aiter_backend.py:584-610; vLLM's ROCM_AITER_MLA takes the same two.
LATENT_HEADS = (16, 128)


def build_paged(request: BuildRequest) -> Built:
    """Build `aiter` for paged MHA, GQA and MQA.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    check_build(request)
    # imported here: AITER asks for its chip when it is imported, and a described host has none
    from aiter.ops.triton.attention.unified_attention import unified_attention

    return Built("aiter", PagedAttention(request, unified_attention))


def build_latent_decode(request: BuildRequest) -> Built:
    """Build `aiter` for decode over an absorbed latent cache.

    Raises:
        UnsupportedBatch: what the row does not declare, or another number of query heads than 16 or 128.
    """
    _check_latent(request)
    from aiter.mla import mla_decode_fwd

    def attend(q: Tensor, cache: Tensor, out: Tensor, rows: LatentRows, scale: float) -> None:
        # by name: page_size and nhead_kv came between the lengths and the scale after 0.1.10
        mla_decode_fwd(
            q,
            cache,
            out,
            qo_indptr=rows.qo_indptr,
            kv_indptr=rows.kv_indptr,
            kv_indices=rows.slots,
            kv_last_page_lens=rows.last_page_lens,
            max_seqlen_q=rows.max_q_len,
            sm_scale=scale,
            logit_cap=0.0,
        )

    return Built("aiter", LatentAttention(request, attend))


def build_latent_prefill(request: BuildRequest) -> Built:
    """Build `aiter` for prefill over an absorbed latent cache.

    Raises:
        UnsupportedBatch: as `build_latent_decode`.
    """
    _check_latent(request)
    from aiter.mla import mla_prefill_fwd

    def attend(q: Tensor, cache: Tensor, out: Tensor, rows: LatentRows, scale: float) -> None:
        mla_prefill_fwd(
            q,
            cache,
            out,
            qo_indptr=rows.qo_indptr,
            kv_indptr=rows.kv_indptr,
            kv_indices=rows.slots,
            kv_last_page_lens=rows.last_page_lens,
            max_seqlen_q=rows.max_q_len,
            sm_scale=scale,
            logit_cap=0.0,
        )

    return Built("aiter", LatentAttention(request, attend))


def _check_latent(request: BuildRequest) -> None:
    check_build(request)
    for layer in request.layers:
        if layer.num_qo_heads not in LATENT_HEADS:
            needed = " or ".join(str(heads) for heads in LATENT_HEADS)
            found = f"{layer.num_qo_heads} in layer {layer.layer_id}"
            raise refusal(
                request, "num_qo_heads", needed, found, fix="Choose a tensor-parallel size that leaves as many"
            )
