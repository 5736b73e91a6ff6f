"""XQA on SM90 and SM12x: decode of one token a row, and of drafts under a mask, through flashinfer's XQA entry.

In: the call contract's batches, caches and layers. Out: attention outputs, written in place. Steps of at most one token
a row take the plain kernel; others take the ragged speculative one, whose rows may have any length up to the ladder's
top. Where some rows of a plain step have no token, every token goes in as a row.
Bound is `xqa_batch_decode_with_kv_cache` itself, because `trtllm_batch_decode_with_kv_cache` picks a kernel by chip
under one name and cannot take ragged rows here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from flashinfer.decode import xqa_batch_decode_with_kv_cache
from flashinfer.utils import get_device_sm_count
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.sink_buffers import SinkBuffers
from backstamp.step_checks import check_batch, check_build, refusal
from backstamp_trtllm.draft_masks import fill_tree
from backstamp_trtllm.launches import Announcer, bmm_scales, deliver, landing, nothing_seen, silence, zeros
from backstamp_trtllm.steps import Step, new_mask, plan_step, refresh_step, update_step
from backstamp_trtllm.token_fill import TokenFill

__all__ = ["LADDER", "XqaAttention"]

#: Draft lengths a module is compiled for: the length is in the module's name, so a few wide ones serve every length.
LADDER = (8, 32, 128)
#: What flashinfer cuts off the workspace for semaphores.
SEMAPHORE_BYTES = 8 << 20
#: Source: mha.cu, `persistentQ`: the query heads of one KV head lie in one tile of 16 KiB, which is 32 heads of 256.
MOST_HEADS_A_GROUP = 32


@dataclass(slots=True)
class XqaStep:
    """A step as the kernel takes it.

    Attributes:
        drafts: the ladder's rung it runs on; 0 for the plain kernel.
        table, kv_lens: `[R, W]` i32 and `[R]` i32, of the step's rows, or of its tokens where those are the rows.
        mask: which tokens of its row each token sees; None for the plain kernel.
        owner: the layer that fills a tree's mask.
    """

    step: Step
    drafts: int
    table: Tensor
    kv_lens: Tensor
    mask: Tensor | None = None
    owner: int | None = None


class XqaAttention:
    """All phases but prefill, over a paged cache. Steps may alternate, on one stream: they share a workspace."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        for spec in request.layers:
            self._check_group(spec)
        self._announce = Announcer(request.kernel)
        self._sinks = SinkBuffers(request, (torch.float32,))
        device = torch.device(request.device)
        self._fill_tokens = TokenFill(request.kernel)
        widest = max((spec.num_qo_heads // spec.num_kv_heads * spec.head_dim for spec in request.layers), default=4096)
        # Source: mha.cu, split rows go through scratch only where rows and heads leave multiprocessors idle, so at
        # most one share of a rung's rows for each of them; a quarter more for row maxima and sums
        shares = get_device_sm_count(device) * LADDER[-1] * widest * 2
        self._workspace = zeros(SEMAPHORE_BYTES + shares * 5 // 4 + (1 << 20), request.device)

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step owns what it writes, and the workspace has its final size."""

    def refresh_parameters(self) -> None:
        """Convert the sinks again, after a weight reload that no in-place counter saw."""
        self._sinks.refresh_parameters()

    def plan(self, batch: Batch, *, state: XqaStep | None = None, capture: bool = False) -> XqaStep:
        """Check the batch; lay out its draft mask where rows have more than one token.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        check_batch(self._request, batch, capture=capture)
        if batch.max_q_len > LADDER[-1]:
            raise refusal(
                self._request, "max_q_len", f"at most {LADDER[-1]} tokens a row", str(batch.max_q_len),
                phase=batch.phase, fix="Run it as prefill",
            )  # fmt: skip
        self._sinks.update()
        if state is not None and state.step.serves(capture):
            refresh_step(self._request, state.step, batch)
            state.owner = None
            _fill_table(state)
            return state
        drafts = 0 if batch.max_q_len <= 1 else next(rung for rung in LADDER if rung >= batch.max_q_len)
        # a tree's mask is filled in `forward`, because the engine may write the tree after planning
        causal = drafts if batch.tree is None else 0
        step = plan_step(batch, self._fill_tokens, capture=capture, every_token=True, drafts=causal)
        if step.q_len == 1 or step.tokens is None:
            return XqaStep(step, 0, step.table, step.kv_lens)
        if drafts:
            mask = step.tokens.mask if causal else new_mask(batch.num_tokens, drafts, batch.kv_lens.device)
            return XqaStep(step, drafts, step.table, step.kv_lens, mask)
        table = step.table.new_empty(batch.num_tokens, step.table.shape[1])
        planned = XqaStep(step, 0, table, step.tokens.visible)
        _fill_table(planned)
        return planned

    def replan(self, state: XqaStep) -> None:
        """Read lengths, and a tree that was filled since, again."""
        update_step(state.step)
        _fill_table(state)
        if state.step.batch.tree is not None and state.mask is not None:
            fill_tree(state.mask, state.step, state.drafts)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: XqaStep,
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
        self._check_layer(kv.k, kv.v, layer, batch)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        self._fill_tree(state, layer)
        bmm1_scale, bmm2_scale = bmm_scales(layer, kv)
        written = landing(out)
        group = layer.num_qo_heads // layer.num_kv_heads
        windowed = "window" if layer.window_left >= 0 else "no window"
        with self._announce.first(
            self._request.dtype, self._request.kv_dtype, "page", self._request.page_size, "head_dim", layer.head_dim,
            "group", group, windowed, "drafts", state.drafts,
        ):  # fmt: skip
            xqa_batch_decode_with_kv_cache(
                query=q.contiguous(),
                kv_cache=(kv.k, kv.v),
                workspace_buffer=self._workspace,
                block_tables=state.table,
                seq_lens=state.kv_lens,
                max_seq_len=batch.max_kv_len,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                window_left=layer.window_left,
                out=written,
                sinks=self._sinks.of(layer),
                kv_layout="NHD",
                q_len_per_req=state.drafts or 1,
                # two 16-bit words for each of ours
                mask=None if state.mask is None else state.mask.view(torch.uint16),
                q_cu_seq_lens=step.qo_indptr if state.drafts else None,
            )
        silence(step.dead, written)
        return deliver(out, written)

    def _fill_tree(self, state: XqaStep, layer: LayerSpec) -> None:
        """The tree's mask, once a step, in the first layer's call: what a graph records there runs in every replay."""
        if state.mask is None or state.step.batch.tree is None or state.owner not in (None, layer.layer_id):
            return
        state.owner = layer.layer_id
        fill_tree(state.mask, state.step, state.drafts)

    def _check_group(self, layer: LayerSpec) -> None:
        group = layer.num_qo_heads // layer.num_kv_heads
        if group > MOST_HEADS_A_GROUP:
            needed = f"at most {MOST_HEADS_A_GROUP} query heads a KV head"
            raise refusal(self._request, f"num_qo_heads of layer {layer.layer_id}", needed, str(group))

    def _check_layer(self, k: Tensor, v: Tensor, layer: LayerSpec, batch: Batch) -> None:
        """What XQA needs beyond the row: one set of strides for keys and values, in whole heads."""
        self._check_group(layer)
        if k.stride() != v.stride() or any(stride % layer.head_dim for stride in k.stride()[:3]):
            needed = f"keys and values of the same strides, in multiples of {layer.head_dim}"
            raise refusal(self._request, "kv strides", needed, f"{k.stride()} and {v.stride()}", phase=batch.phase)


def _fill_table(state: XqaStep) -> None:
    """Each token's pages, where tokens are rows."""
    step = state.step
    if state.table is not step.table and step.tokens is not None:
        torch.index_select(step.table, 0, step.tokens.rows, out=state.table)
