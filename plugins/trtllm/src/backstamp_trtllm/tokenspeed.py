"""tokenspeed-mla on SM100 and SM103: absorbed MLA in every phase by its decode kernel.

In: batches over a latent cache `[P, page, 1, 576]`. Out: latent outputs `[T, Hq, 512]`, and natural-log LSE. Rows of
equal length go in as they are. Of ragged rows, prefill's among them, every token goes in as a row of one query: the
kernel takes equal lengths only and is compiled for one of them, so padding would compile for each longest row. How
many keys each query sees is always handed over (`local_visible_lens`), which also makes rows without keys defined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenspeed_mla import tokenspeed_mla_decode
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build
from backstamp_trtllm.latent_dims import KV_LORA_RANK, QK_ROPE_HEAD_DIM, check_heads, whole_query
from backstamp_trtllm.launches import LN2, Announcer, deliver, landing, nothing_seen, silence, zeros
from backstamp_trtllm.steps import Step, plan_step, refresh_step, update_step
from backstamp_trtllm.token_fill import TokenFill

__all__ = ["TokenspeedMla"]

#: Split-KV partials: one 128-row tile of (512 + 1) floats for each multiprocessor, of which these chips have up to 160.
WORKSPACE_BYTES = 160 * 128 * (KV_LORA_RANK + 1) * 4


@dataclass(slots=True)
class TokenspeedStep:
    """A step, and it again as the kernel takes it: R rows of `q_len` queries, `visible [R, q_len]` keys each."""

    step: Step
    q_len: int
    table: Tensor
    kv_lens: Tensor
    visible: Tensor


class TokenspeedMla:
    """MLA in every phase. Steps may alternate, on one stream: they share a workspace."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        # Source: mla_decode_fp16.py, can_implement: H > 128 has no tile
        check_heads(request, gap=False)
        self._request = request
        self._check_call = CallChecks(request)
        self._announce = Announcer(request.kernel)
        self._fill_tokens = TokenFill(request.kernel)
        self._workspace = zeros(WORKSPACE_BYTES, request.device, torch.int8)

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step owns what it writes, and the workspace has its final size."""

    def plan(self, batch: Batch, *, state: TokenspeedStep | None = None, capture: bool = False) -> TokenspeedStep:
        """Check the batch; count the keys each token sees.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        check_batch(self._request, batch, capture=capture)
        if state is not None and state.step.serves(capture):
            refresh_step(self._request, state.step, batch)
            self._fill(state)
            return state
        multiple = max(1, 128 // self._request.page_size)
        step = plan_step(batch, self._fill_tokens, capture=capture, always_tokens=True, table_multiple=multiple)
        if step.tokens is None:
            return TokenspeedStep(step, 1, step.table, step.kv_lens, step.kv_lens)
        if step.q_len:
            visible = step.tokens.visible.view(batch.num_rows, step.q_len)
            return TokenspeedStep(step, step.q_len, step.table, step.kv_lens, visible)
        table = step.table.new_empty(batch.num_tokens, step.table.shape[1])
        planned = TokenspeedStep(step, 1, table, step.tokens.visible, step.tokens.visible[:, None])
        self._fill(planned)
        return planned

    def replan(self, state: TokenspeedStep) -> None:
        """Read lengths and pages again."""
        update_step(state.step)
        self._fill(state)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: TokenspeedStep,
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
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        written = landing(out)
        query = whole_query(q, q_rope)
        shape = (state.table.shape[0], state.q_len, layer.num_qo_heads)
        with self._announce.first(
            self._request.dtype, "page", self._request.page_size, "heads", layer.num_qo_heads, "q_len", state.q_len,
            "lse" if lse is not None else "no lse",
        ):  # fmt: skip
            answer = tokenspeed_mla_decode(
                query=query.reshape(*shape, query.shape[-1]),
                kv_cache=kv.k.squeeze(2),
                workspace_buffer=self._workspace,
                kv_lora_rank=KV_LORA_RANK,
                qk_rope_head_dim=QK_ROPE_HEAD_DIM,
                block_tables=state.table,
                seq_lens=state.kv_lens,
                max_seq_len=batch.max_kv_len,
                softmax_scale=layer.scale,
                out=written.view(*shape, KV_LORA_RANK),
                return_lse=lse is not None,
                local_visible_lens=state.visible,
            )
        if lse is not None:
            # Source: mla_decode_fp16.py, its LSE is base 2
            lse.copy_(answer[1].view(batch.num_tokens, layer.num_qo_heads)).mul_(LN2)
        silence(step.dead, written, lse)
        return deliver(out, written)

    def _fill(self, state: TokenspeedStep) -> None:
        """Each token's page-table row, where tokens are rows."""
        if state.table is not state.step.table and state.step.tokens is not None:
            torch.index_select(state.step.table, 0, state.step.tokens.rows, out=state.table)
