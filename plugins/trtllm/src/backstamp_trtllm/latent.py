"""Absorbed MLA on SM100 and SM103 through flashinfer's one MLA function: trtllm-gen and CuTe DSL decode kernels.

In: batches over a latent cache `[P, page, 1, 576]`, queries of 576, or of 512 with a rotary part of 64. Out: latent
outputs `[T, Hq, 512]`, and natural-log LSE. Rows of equal length go in as they are, ragged rows packed, prefill among
them: the keys a token sees end at itself in both. The backend is named in every call, so that the stamp is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashinfer.mla import trtllm_batch_decode_with_kv_cache_mla
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build
from backstamp_trtllm.latent_dims import (
    KV_LORA_RANK,
    QK_NOPE_HEAD_DIM,
    QK_ROPE_HEAD_DIM,
    check_heads,
    whole_query,
)
from backstamp_trtllm.launches import Announcer, deliver, landing, nothing_seen, silence, zeros
from backstamp_trtllm.steps import Step, plan_step, refresh_step, update_step
from backstamp_trtllm.token_fill import TokenFill
from backstamp_trtllm.token_steps import token_steps
from backstamp_trtllm.workspaces import WORKSPACE_BYTES, counters

__all__ = ["LatentAttention"]


@dataclass(frozen=True, slots=True)
class _Rows:
    """How one call sees the step: the query's shape, its page table and lengths, and what ragged rows need."""

    query: Tensor
    table: Tensor
    kv_lens: Tensor
    cum_seq_lens_q: Tensor | None = None
    max_q_len: int | None = None


class LatentAttention:
    """MLA by one of the function's backends. Steps may alternate, on one stream: they share workspace and counters."""

    def __init__(self, request: BuildRequest, backend: Literal["trtllm-gen", "cute-dsl"]) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._backend = backend
        self._gen = backend == "trtllm-gen"
        # Source: trtllm_gen_backend.py, "does not support 64 < num_heads_q < 128"; CuTe DSL tiles hold 128 rows
        check_heads(request, gap=self._gen)
        self._announce = Announcer(request.kernel)
        self._fill_tokens = TokenFill(request.kernel)
        # Source: mla/_utils.py, CuTe DSL needs page tables whose rows cover whole tiles of 128 tokens
        self._table_multiple = 1 if self._gen else max(1, 128 // request.page_size)
        self._workspace = zeros(WORKSPACE_BYTES, request.device)
        # where LSE of ragged rows is asked for, every token is a row
        self._counters = counters(request, rows=max(request.max_rows, request.max_tokens)) if self._gen else None

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step owns what it writes, and the workspaces have their final size."""

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Check the batch and lay out its page table.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        check_batch(self._request, batch, capture=capture)
        if state is not None and state.serves(capture):
            return refresh_step(self._request, state, batch)
        return plan_step(
            batch,
            self._fill_tokens,
            capture=capture,
            every_token=self._gen,
            table_multiple=self._table_multiple,
        )

    def replan(self, state: Step) -> None:
        """Read lengths again."""
        update_step(state)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: Step,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer; see `backstamp.attention.AttentionBackend.forward`."""
        batch = state.batch
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        assert kv is not None, "check_call found a paged cache"
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        written = landing(out)
        written_lse = None if lse is None else landing(lse)
        rows = self._rows(whole_query(q, q_rope), state, with_lse=lse is not None)
        with self._announce.first(
            self._backend, self._request.dtype, "page", self._request.page_size, "heads", layer.num_qo_heads,
            "q_len", state.q_len or "ragged", "lse" if lse is not None else "no lse",
        ):  # fmt: skip
            trtllm_batch_decode_with_kv_cache_mla(
                query=rows.query,
                kv_cache=kv.k.squeeze(2),
                workspace_buffer=self._workspace,
                qk_nope_head_dim=QK_NOPE_HEAD_DIM,
                kv_lora_rank=KV_LORA_RANK,
                qk_rope_head_dim=QK_ROPE_HEAD_DIM,
                block_tables=rows.table,
                seq_lens=rows.kv_lens,
                max_seq_len=batch.max_kv_len,
                out=written.view(*rows.query.shape[:-1], KV_LORA_RANK),
                bmm1_scale=layer.scale,
                bmm2_scale=1.0,
                backend=self._backend,
                lse=written_lse,
                return_lse=lse is not None,
                # sinks would need the modular one, which has no LSE; this row declares none
                cute_dsl_impl="auto" if self._gen else "monolithic",
                cum_seq_lens_q=rows.cum_seq_lens_q,
                max_q_len=rows.max_q_len,
                multi_ctas_kv_counter_buffer=self._counters,
                return_lse_base="basee",
            )
        silence(state.dead, written, written_lse)
        if lse is not None and written_lse is not None:
            deliver(lse, written_lse)
        return deliver(out, written)

    def _rows(self, query: Tensor, state: Step, *, with_lse: bool) -> _Rows:
        """Equal rows, packed ragged rows, or, where trtllm-gen must also write LSE, every token as a row."""
        heads, width = query.shape[1:]
        if state.q_len:
            return _Rows(query.reshape(-1, state.q_len, heads, width), state.table, state.kv_lens)
        if self._gen and with_lse:
            # Source: trtllm_gen_backend.py, "does not support return_lse/lse with cum_seq_lens_q"
            each = token_steps(state)
            return _Rows(query[:, None], each.table, each.visible)
        return _Rows(query, state.table, state.kv_lens, state.qo_indptr, state.batch.max_q_len)
