"""FMHA v2 on SM90 and SM12x: prefill over a paged cache, whose pages are gathered into one pool a layer.

In: the call contract's batches with exact host lengths. Out: attention outputs, written in place. The kernel addresses
every page as a whole block relative to one base pointer, K before V, and multiplies the unused tail of a last page by
zero: a NaN there would show. So each layer's used pages are gathered, and the tails of the last ones cleared, in a
pool of our own; the engine's cache is only read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.prefill import trtllm_fmha_v2_prefill
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.sink_buffers import SinkBuffers
from backstamp.step_checks import check_batch, check_build
from backstamp_trtllm.gathered_pages import GatheredPages, PageLayout
from backstamp_trtllm.launches import Announcer, deliver, landing, nothing_seen, silence, zeros
from backstamp_trtllm.steps import Step, plan_step
from backstamp_trtllm.token_fill import TokenFill

__all__ = ["FmhaV2Prefill"]

#: The scheduler's tile counter is all that these kernels keep in it.
WORKSPACE_BYTES = 1 << 20


@dataclass(slots=True)
class GatherStep:
    """A step over its gathered pages.

    Attributes:
        used_tokens: query tokens that belong to rows; pads follow them.
        max_q_len, max_kv_len: exact.
    """

    step: Step
    used_tokens: int
    max_q_len: int
    max_kv_len: int
    pages: GatheredPages


class FmhaV2Prefill:
    """Prefill with cached prefixes, windows, softcap and sinks."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._announce = Announcer(request.kernel)
        self._fill_tokens = TokenFill(request.kernel)
        self._lay_out = PageLayout(request.kernel)
        self._sinks = SinkBuffers(request, (torch.float32,))
        self._workspace = zeros(WORKSPACE_BYTES, request.device)

    def refresh_parameters(self) -> None:
        """Convert the sinks again, after a weight reload that no in-place counter saw."""
        self._sinks.refresh_parameters()

    def plan(self, batch: Batch, *, state: GatherStep | None = None, capture: bool = False) -> GatherStep:
        """Check the batch and lay out the gathered pages from its host lengths. Nothing of `state` is kept.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        check_batch(self._request, batch, capture=capture)
        self._sinks.update()
        step = plan_step(batch, self._fill_tokens, capture=False)
        assert batch.qo_indptr_host is not None, "check_batch found host lengths"
        assert batch.kv_lens_host is not None, "check_batch found host lengths"
        rows = batch.num_rows
        # small vectors: a call of numpy costs a fifth of one of torch
        q_ends, kv_lens = batch.qo_indptr_host.numpy()[: rows + 1], batch.kv_lens_host.numpy()[:rows]
        max_kv_len = int(kv_lens.max()) if rows else 0
        return GatherStep(
            step,
            used_tokens=int(q_ends[rows]),
            max_q_len=int((q_ends[1:] - q_ends[:-1]).max()) if rows else 0,
            max_kv_len=max_kv_len,
            pages=self._lay_out.of(step.table, kv_lens, max_kv_len, self._request.page_size),
        )

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: GatherStep,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer; see `backstamp.attention.AttentionBackend.forward`."""
        step, batch = state.step, state.step.batch
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        assert kv is not None, "check_call found a paged cache"
        assert kv.v is not None, "and its values"
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        written = landing(out)
        if state.used_tokens and state.max_kv_len:
            keys, values = self._gather(kv.k, kv.v, state)
            self._launch(q, keys, values, layer, state, written)
        silence(step.dead, written)
        return deliver(out, written)

    def _launch(
        self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, state: GatherStep, written: Tensor
    ) -> None:
        step, used = state.step, state.used_tokens
        with self._announce.first("prefill", self._request.dtype, "Q_PAGED_KV_NHD"):
            trtllm_fmha_v2_prefill(
                qkv=(q[:used].contiguous(), (keys, values)),
                input_layout="Q_PAGED_KV_NHD",
                workspace_buffer=self._workspace,
                seq_lens=step.kv_lens,
                max_q_len=state.max_q_len,
                max_kv_len=state.max_kv_len,
                bmm1_scale=layer.scale,
                bmm2_scale=1.0,
                batch_size=step.batch.num_rows,
                cum_seq_lens_q=step.qo_indptr,
                cum_seq_lens_kv=state.pages.kv_indptr,
                block_tables=state.pages.table,
                out=written[:used],
                sinks=self._sinks.of(layer),
                logits_soft_cap_scale=layer.softcap or None,
                # named, because a window of no key before self would else be taken for none
                mask_mode="sliding_window" if layer.window_left >= 0 else "causal",
                window_left=layer.window_left,
            )

    def _gather(self, k: Tensor, v: Tensor, state: GatherStep) -> tuple[Tensor, Tensor]:
        """The used pages of one layer, K and V halves of one allocation, clear past each row's last token."""
        pool = torch.empty(2, state.pages.page_ids.shape[0], *k.shape[1:], dtype=k.dtype, device=k.device)
        torch.index_select(k, 0, state.pages.page_ids, out=pool[0])
        torch.index_select(v, 0, state.pages.page_ids, out=pool[1])
        tails = pool.index_select(1, state.pages.last).masked_fill_(state.pages.unused, 0.0)
        pool.index_copy_(1, state.pages.last, tails)
        return pool[0], pool[1]
