"""trtllm-gen on SM100 and SM103: MHA and GQA in every phase, through flashinfer's two batch functions.

In: the call contract's batches, caches and layers. Out: attention outputs, written in place, and natural-log LSE.
Prefill takes the context function; every other phase takes the decode function with its backend named, because "auto"
there would be another kernel on another chip.
"""

from __future__ import annotations

import torch
from flashinfer.decode import trtllm_batch_decode_with_kv_cache
from flashinfer.prefill import trtllm_batch_context_with_kv_cache
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.sink_buffers import SinkBuffers
from backstamp.step_checks import check_batch, check_build, refusal
from backstamp_trtllm.launches import LN2, Announcer, bmm_scales, deliver, landing, nothing_seen, silence, zeros
from backstamp_trtllm.steps import Step, plan_step, refresh_step, update_step
from backstamp_trtllm.token_fill import TokenFill
from backstamp_trtllm.workspaces import WORKSPACE_BYTES, counters

__all__ = ["GenAttention"]


class GenAttention:
    """All five phases over a paged cache. Steps may alternate, on one stream: they share workspace and counters."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._announce = Announcer(request.kernel)
        self._fill_tokens = TokenFill(request.kernel)
        self._sinks = SinkBuffers(request, (torch.float32,))
        self._workspace = zeros(WORKSPACE_BYTES, request.device)
        self._counters = counters(request)

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step owns what it writes, and the workspaces have their final size."""

    def refresh_parameters(self) -> None:
        """Convert the sinks again, after a weight reload that no in-place counter saw."""
        self._sinks.refresh_parameters()

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Check the batch; add up key counts where the context function will run.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        check_batch(self._request, batch, capture=capture)
        self._sinks.update()
        if state is not None and state.serves(capture):
            return refresh_step(self._request, state, batch)
        return plan_step(batch, self._fill_tokens, capture=capture, kv_indptr=batch.phase == "prefill")

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
        assert kv.v is not None, "and its values"
        if kv.k.stride() != kv.v.stride():
            # Source: trtllm_fmha_kernel_launcher.cu, V's strides are K's
            needed = "keys and values of the same strides"
            raise refusal(
                self._request, "kv strides", needed, f"{kv.k.stride()} and {kv.v.stride()}", phase=batch.phase
            )
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        written = landing(out)
        run = self._context if batch.phase == "prefill" else self._decode
        run(q, (kv.k, kv.v), layer, state, bmm_scales(layer, kv), written, lse)
        if lse is not None:
            # Source: lse.cuh writes base-2 logarithms
            lse.mul_(LN2)
        silence(state.dead, written, lse)
        return deliver(out, written)

    def _context(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        layer: LayerSpec,
        state: Step,
        scales: tuple[float | Tensor, float | Tensor],
        written: Tensor,
        lse: Tensor | None,
    ) -> None:
        batch = state.batch
        with self._announce.first("context kernels", self._request.dtype):
            trtllm_batch_context_with_kv_cache(
                query=q,
                kv_cache=kv,
                workspace_buffer=self._workspace,
                block_tables=state.table,
                seq_lens=state.kv_lens,
                max_q_len=batch.max_q_len,
                max_kv_len=batch.max_kv_len,
                bmm1_scale=scales[0],
                bmm2_scale=scales[1],
                batch_size=batch.num_rows,
                cum_seq_lens_q=state.qo_indptr,
                cum_seq_lens_kv=state.kv_indptr,
                window_left=layer.window_left,
                out=written,
                kv_layout="NHD",
                sinks=self._sinks.of(layer),
                lse=lse,
                multi_ctas_kv_counter_buffer=self._counters,
                backend="trtllm-gen",
            )

    def _decode(
        self,
        q: Tensor,
        kv: tuple[Tensor, Tensor],
        layer: LayerSpec,
        state: Step,
        scales: tuple[float | Tensor, float | Tensor],
        written: Tensor,
        lse: Tensor | None,
    ) -> None:
        batch, ragged = state.batch, state.q_len == 0
        with self._announce.first("decode kernels", self._request.dtype, self._request.kv_dtype):
            trtllm_batch_decode_with_kv_cache(
                query=q,
                kv_cache=kv,
                workspace_buffer=self._workspace,
                block_tables=state.table,
                seq_lens=state.kv_lens,
                max_seq_len=batch.max_kv_len,
                bmm1_scale=scales[0],
                bmm2_scale=scales[1],
                window_left=layer.window_left,
                out=written,
                sinks=self._sinks.of(layer),
                kv_layout="NHD",
                backend="trtllm-gen",
                # its default is 1, and only None makes it read the ragged arguments
                q_len_per_req=None if ragged else state.q_len,
                max_q_len=batch.max_q_len if ragged else None,
                cum_seq_lens_q=state.qo_indptr if ragged else None,
                lse=lse,
                multi_ctas_kv_counter_buffer=self._counters,
            )
