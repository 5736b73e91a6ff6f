"""FMHA v2 on SM90 and SM12x: prefill over a paged cache, whose pages are gathered into one pool a layer.

In: the call contract's batches with exact host lengths. Out: attention outputs, written in place. The kernel addresses
every page as a whole block relative to one base pointer, K before V, and multiplies the unused tail of a last page by
zero: a NaN there would show. So each layer's used pages are gathered, and the tails of the last ones cleared, in a
pool of our own; the engine's cache is only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from flashinfer.prefill import trtllm_fmha_v2_prefill
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.sink_buffers import SinkBuffers
from backstamp.step_checks import check_batch, check_build
from backstamp_trtllm.launches import Announcer, deliver, landing, nothing_seen, silence, zeros
from backstamp_trtllm.steps import Step, plan_step
from backstamp_trtllm.token_fill import TokenFill

__all__ = ["FmhaV2Prefill"]

Numbers: TypeAlias = "npt.NDArray[np.integer]"

#: The scheduler's tile counter is all that these kernels keep in it.
WORKSPACE_BYTES = 1 << 20


@dataclass(slots=True)
class GatherStep:
    """A step over its gathered pages: N used pages in row order, and one more that rows without keys point at.

    Attributes:
        used_tokens: query tokens that belong to rows; pads follow them.
        max_q_len, max_kv_len: exact.
        page_ids: `[N + 1]` i32, which page of the cache each gathered one is.
        table: `[B, 2, W]` i32, where each row's pages lie in the pool: K, then V.
        last: `[B + 1]` i64 each row's last page, then the one more.
        unused: `[B + 1, page, 1, 1]` bool, slots of those pages past `kv_len`.
    """

    step: Step
    used_tokens: int
    max_q_len: int
    max_kv_len: int
    page_ids: Tensor
    table: Tensor
    last: Tensor
    unused: Tensor


class FmhaV2Prefill:
    """Prefill with cached prefixes, windows, softcap and sinks."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._announce = Announcer(request.kernel)
        self._fill_tokens = TokenFill(request.kernel)
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
        step = plan_step(batch, self._fill_tokens, capture=False, kv_indptr=True)
        assert batch.qo_indptr_host is not None, "check_batch found host lengths"
        assert batch.kv_lens_host is not None, "check_batch found host lengths"
        rows, page_size = batch.num_rows, self._request.page_size
        # small vectors: a call of numpy costs a fifth of one of torch
        q_ends, kv_lens = batch.qo_indptr_host.numpy()[: rows + 1], batch.kv_lens_host.numpy()[:rows]
        pages = _host_pages(kv_lens, page_size, step.table.shape[1])
        total, widest = int(pages[0, rows]), max(1, int(pages[3].max()))
        device = batch.kv_lens.device
        starts, last, tails, counts, shift = torch.from_numpy(pages).to(device, non_blocking=True).unbind()
        table = torch.empty(rows, 2, widest, dtype=torch.int32, device=device)
        columns = torch.arange(widest, device=device)
        # past a row's pages the table may point at its neighbour's: the kernel stops at the row's own count
        torch.add(starts[:rows, None], columns, out=table[:, 0]).clamp_(max=total)
        # V's blocks follow the N + 1 blocks of K
        torch.add(table[:, 0], total + 1, out=table[:, 1])
        return GatherStep(
            step,
            used_tokens=int(q_ends[rows]),
            max_q_len=int((q_ends[1:] - q_ends[:-1]).max()) if rows else 0,
            max_kv_len=int(kv_lens.max()) if rows else 0,
            page_ids=_page_ids(step, counts[:rows], shift[:rows], total),
            table=table,
            last=last,
            unused=(torch.arange(page_size, device=device) >= tails[:, None])[:, :, None, None],
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
                cum_seq_lens_kv=step.kv_indptr,
                block_tables=state.table,
                out=written[:used],
                sinks=self._sinks.of(layer),
                logits_soft_cap_scale=layer.softcap or None,
                # named, because a window of no key before self would else be taken for none
                mask_mode="sliding_window" if layer.window_left >= 0 else "causal",
                window_left=layer.window_left,
            )

    def _gather(self, k: Tensor, v: Tensor, state: GatherStep) -> tuple[Tensor, Tensor]:
        """The used pages of one layer, K and V halves of one allocation, clear past each row's last token."""
        pool = torch.empty(2, state.page_ids.shape[0], *k.shape[1:], dtype=k.dtype, device=k.device)
        torch.index_select(k, 0, state.page_ids, out=pool[0])
        torch.index_select(v, 0, state.page_ids, out=pool[1])
        tails = pool.index_select(1, state.last).masked_fill_(state.unused, 0.0)
        pool.index_copy_(1, state.last, tails)
        return pool[0], pool[1]


def _host_pages(kv_lens: Numbers, page_size: int, width: int) -> Numbers:
    """`[5, B + 1]` i64 of the rows, and one more that holds the page behind all of theirs.

    Where a row's pages start in the pool, its last page there, the tokens on that page, how many pages it has, and
    where its ids begin in a page table of `width` columns, less their place in the pool.
    """
    rows = len(kv_lens)
    pages = np.zeros((5, rows + 1), np.int64)
    starts, last, tails, counts, shift = pages
    counts[:rows] = -(-kv_lens // page_size)
    starts[1:] = counts[:rows].cumsum()
    last[:] = starts[rows]
    np.copyto(last[:rows], starts[1:] - 1, where=counts[:rows] > 0)
    tails[:rows] = kv_lens - np.maximum(counts[:rows] - 1, 0) * page_size
    shift[:] = np.arange(rows + 1) * width - starts
    return pages


def _page_ids(step: Step, counts: Tensor, shift: Tensor, total: int) -> Tensor:
    """Cache ids of the gathered pages in row order, then page 0 for rows without keys."""
    ids = torch.zeros(total + 1, dtype=torch.int32, device=step.table.device)
    if total:
        at = torch.repeat_interleave(shift, counts, output_size=total)
        at += torch.arange(total, device=ids.device)
        torch.index_select(step.table.view(-1), 0, at, out=ids[:total])
    return ids
