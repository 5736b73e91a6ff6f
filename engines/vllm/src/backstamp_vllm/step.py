"""One planned step of one KV group: what the builder hands to the layers.

In: a vLLM step's common metadata. Out: the contract's `Batch`, split where two kernels serve it, and each part planned
once. It makes no copy of vLLM's tensors and holds nothing beyond its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from backstamp.attention import AttentionBackend, Batch, KVIndex
from backstamp.forward import split_batch
from backstamp_vllm.runner import Halves

__all__ = ["Part", "StepMetadata", "batch_of", "plan_parts"]


class Part(NamedTuple):
    """One backend's share of a step: its tokens and its planned state."""

    backend: AttentionBackend[object]
    tokens: slice
    state: object


class StepMetadata(AttentionMetadata):
    """The planned parts of a step, by what serves a layer; each layer is bound to its place."""

    def __init__(self, parts: Sequence[Sequence[Part]]) -> None:
        self.parts = parts


def batch_of(step: CommonAttentionMetadata, page_size: int) -> Batch:
    """The step as the contract has it, of vLLM's own tensors."""
    rows, tokens = step.num_reqs, step.num_actual_tokens
    decode_rows, _, decode_tokens, _ = split_decodes_and_prefills(step)
    return Batch(
        phase="decode" if decode_rows == rows else "prefill",
        causal=step.causal,
        num_rows=rows,
        num_tokens=tokens,
        max_q_len=step.max_query_len,
        max_kv_len=step.max_seq_len,
        num_decode_rows=decode_rows,
        num_decode_tokens=decode_tokens,
        decode_q_len=1 if decode_rows else None,
        qo_indptr=step.query_start_loc[: rows + 1],
        kv_lens=step.seq_lens[:rows],
        index=KVIndex(page_size=page_size, page_table=step.block_table_tensor[:rows]),
        slot_mapping=step.slot_mapping[:tokens],
        qo_indptr_host=step.query_start_loc_cpu[: rows + 1],
        # exact: the bound differs only where drafts may be rejected, and speculation is refused
        kv_lens_host=step.seq_lens_cpu_upper_bound[:rows],
    )


def plan_parts(halves: Halves, batch: Batch) -> tuple[Part, ...]:
    """One call where one kernel serves both halves; else the leading decode rows and the rest apart."""
    if halves.prefill is halves.decode:
        whole = slice(0, batch.num_tokens)
        return (Part(halves.prefill, whole, halves.prefill.plan(batch)),)
    parts: list[Part] = []
    start = 0
    for backend, share in zip((halves.decode, halves.prefill), split_batch(batch), strict=True):
        if share is not None:
            tokens = slice(start, start := start + share.num_tokens)
            parts.append(Part(backend, tokens, backend.plan(share)))
    return tuple(parts)
