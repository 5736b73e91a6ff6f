"""Paged MHA through AITER's `unified_attention`: one call a layer, every phase.

In: the call contract. Out: outputs in place. `plan` checks and reads no device value, so every step can be captured;
the engine's own tensors go to the library as they are. Never holds the current batch: that is the state's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.step_checks import check_batch, check_call

__all__ = ["PagedAttention", "PagedStep"]


@dataclass(slots=True)
class PagedStep:
    """One planned step; `tokens` of its queries belong to rows, and `max_q_len` is what the library is told."""

    batch: Batch
    tokens: int
    max_q_len: int


class PagedAttention:
    """The backend; it has no workspace: the library allocates its partial sums itself."""

    def __init__(self, request: BuildRequest, unified_attention: Callable[..., Tensor]) -> None:
        self._request = request
        self._unified_attention = unified_attention
        self._compiles = Announcer("aiter")

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step refers to the batch's own tensors."""

    def plan(self, batch: Batch, *, state: PagedStep | None = None, capture: bool = False) -> PagedStep:
        """Check the batch and note its sizes; with `state`, in place.

        Raises:
            UnsupportedBatch: what the row does not declare.
        """
        check_batch(self._request, batch, capture=capture)
        tokens, max_q_len = _tokens(batch, capture), _max_q_len(batch)
        if state is None:
            return PagedStep(batch, tokens, max_q_len)
        state.batch, state.tokens, state.max_q_len = batch, tokens, max_q_len
        return state

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
        check_call(self._request, q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
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
                block_table=batch.index.page_table,
                softcap=layer.softcap,
                q_descale=None,
                k_descale=None,
                v_descale=None,
                alibi_slopes=layer.alibi,
                sinks=layer.sinks,
            )
        return out


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
