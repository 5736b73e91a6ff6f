"""Paged MHA through AITER's `unified_attention`: one call a layer, every phase.

In: the call contract. Out: outputs in place. `plan` checks and reads no device value, so every step can be captured;
the tensors of the batch that a state was planned with go to the library as they are, and a later batch's values are
copied into them. Never holds the current batch: that is the state's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, refusal

__all__ = ["PagedAttention", "PagedStep"]


@dataclass(slots=True)
class PagedStep:
    """One planned step, read at every forward and graph replay.

    Attributes:
        batch: the batch it was planned with, whose tensors a graph may have recorded.
        page_table: `[B, W]` i32, that batch's.
        tokens: query tokens that belong to rows.
        max_q_len: what the library is told of the longest row.
        captured: whether a graph may have recorded it, so that no host number of a batch may count.
    """

    batch: Batch
    page_table: Tensor
    tokens: int
    max_q_len: int
    captured: bool


class PagedAttention:
    """The backend; it has no workspace: the library allocates its partial sums itself."""

    def __init__(self, request: BuildRequest, unified_attention: Callable[..., Tensor]) -> None:
        self._request = request
        self._check_call = CallChecks(request)
        self._unified_attention = unified_attention
        self._compiles = Announcer("aiter")

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step refers to the batch's own tensors."""

    def plan(self, batch: Batch, *, state: PagedStep | None = None, capture: bool = False) -> PagedStep:
        """Check the batch and note its sizes; with `state`, at the addresses that it was planned with.

        Raises:
            UnsupportedBatch: what the row does not declare, or another launch than the planned one.
        """
        check_batch(self._request, batch, capture=capture)
        step = PagedStep(batch, self._page_table(batch), _tokens(batch, capture), _max_q_len(batch), capture)
        return step if state is None else self._refresh(state, step)

    def replan(self, state: PagedStep) -> None:
        """Nothing to do on the device: the library reads lengths and pages from the batch's tensors."""

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: PagedStep,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer; see `backstamp.attention.AttentionBackend.forward`.

        Raises:
            UnsupportedBatch: what the row does not declare.
        """
        batch, tokens, rows = state.batch, state.tokens, state.batch.num_rows
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        if out is None:
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if rows == 0 or tokens < batch.num_tokens:
            out[0 if rows == 0 else tokens :].zero_()
        if rows == 0 or tokens == 0:
            return out
        assert kv is not None, "check_call refuses a step without a cache"
        assert kv.v is not None
        with self._compiles.first(*_variant(self._request, layer, state)):
            self._unified_attention(
                q=q[:tokens],
                k=kv.k,
                v=kv.v,
                out=out[:tokens],
                cu_seqlens_q=batch.qo_indptr[: rows + 1],
                max_seqlen_q=state.max_q_len,
                # the library takes the number of rows from this tensor's length
                seqused_k=batch.kv_lens[:rows],
                max_seqlen_k=batch.max_kv_len,
                softmax_scale=layer.scale,
                causal=True,
                # keys before self and after it; (-1, -1) is no window
                window_size=(-1, -1) if layer.window_left < 0 else (layer.window_left, 0),
                block_table=state.page_table,
                softcap=layer.softcap,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                alibi_slopes=layer.alibi,
                sinks=layer.sinks,
            )
        return out

    def _page_table(self, batch: Batch) -> Tensor:
        """The batch's table, whose rows may lie apart; the shared checks hold the strides of all else."""
        table = batch.index.page_table
        assert table is not None, "the row declares no other form"
        if table.dtype is not torch.int32:
            raise refusal(self._request, "index.page_table", "torch.int32", str(table.dtype), phase=batch.phase)
        return table

    def _refresh(self, state: PagedStep, fresh: PagedStep) -> PagedStep:
        """Copy a new batch's values to where the planned step has its own; a graph may have recorded the addresses."""
        old, new = state.batch, fresh.batch
        size, rows = new.index.page_size, new.num_rows
        width = min(max(1, -(-new.max_kv_len // size)), fresh.page_table.shape[1])
        for name, fits, bound, found in (
            ("num_rows", rows == old.num_rows, str(old.num_rows), rows),
            ("num_tokens", new.num_tokens == old.num_tokens, str(old.num_tokens), new.num_tokens),
            # told 1, the library never reads the offsets
            ("max_q_len", fresh.max_q_len <= state.max_q_len, f"at most {state.max_q_len}", fresh.max_q_len),
            ("max_kv_len", new.max_kv_len <= old.max_kv_len, f"at most {old.max_kv_len}", new.max_kv_len),
            (
                "index.page_table",
                width <= state.page_table.shape[1],
                f"at most {state.page_table.shape[1]} wide",
                width,
            ),
        ):
            if not fits:
                needed = f"{bound}, as planned"
                raise refusal(self._request, name, needed, str(found), phase=new.phase, fix="Plan a new state")
        pairs = (
            ("qo_indptr", old.qo_indptr[: rows + 1], new.qo_indptr[: rows + 1]),
            ("kv_lens", old.kv_lens[:rows], new.kv_lens[:rows]),
            ("index.page_table", state.page_table[:rows, :width], fresh.page_table[:rows, :width]),
        )
        # what the engine keeps at a fixed address is up to date already
        kept = [target.data_ptr() == source.data_ptr() for _, target, source in pairs]
        for (name, target, source), same in zip(pairs, kept, strict=True):
            if same and rows > 1 and target.stride(0) != source.stride(0):
                needed, found = f"rows {target.stride(0)} apart, as planned", str(source.stride(0))
                raise refusal(self._request, name, needed, found, phase=new.phase, fix="Plan a new state")
        for (_, target, source), same in zip(pairs, kept, strict=True):
            if not same:
                target.copy_(source)
        if not state.captured:
            state.tokens = fresh.tokens
        return state


def _variant(request: BuildRequest, layer: LayerSpec, state: PagedStep) -> tuple[object, ...]:
    """What decides which of the library's Triton kernels a call compiles, in words for the announcement."""
    return (
        "paged",
        request.dtype,
        f"{layer.num_qo_heads}/{layer.num_kv_heads} heads d{layer.head_dim}",
        "one token a row" if state.max_q_len == 1 else "ragged rows",
        "window" if layer.window_left >= 0 else "",
        "softcap" if layer.softcap else "",
        "sinks" if layer.sinks is not None else "",
        "alibi" if layer.alibi is not None else "",
    )


def _tokens(batch: Batch, capture: bool) -> int:
    """Query tokens that belong to rows, where the host knows; what a graph replays is padded to its own size."""
    host = batch.qo_indptr_host
    if capture or host is None or not batch.host_exact:
        return batch.num_tokens
    return int(host[batch.num_rows])


def _max_q_len(batch: Batch) -> int:
    """The longest row in queries, as the library is told it.

    At 1 the library takes token i for row i and never reads the offsets. A step may say so only where each of its
    rows has its one token; any other goes by its offsets, which the number 2 asks for.
    """
    one_each = batch.num_rows == batch.num_tokens == batch.num_decode_rows and batch.decode_q_len == 1
    host = batch.qo_indptr_host
    if not one_each and host is not None and batch.host_exact and batch.max_q_len == 1:
        one_each = host[: batch.num_rows + 1].tolist() == list(range(batch.num_rows + 1))
    return 1 if one_each else max(batch.max_q_len, 2)
