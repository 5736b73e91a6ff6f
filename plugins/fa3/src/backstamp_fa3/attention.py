"""The backend: checks a step in `plan`, hands each layer to one build of FlashAttention in `forward`.

In: the call contract's `Batch`, caches and layers. Out: outputs written in place. `plan` reads no device value and has
no host half, so any step can be captured where the row says so. The backend holds constants and buffers of a fixed
address, never the current batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.row_checks import refusal
from backstamp.sink_buffers import SinkBuffers
from backstamp.step_checks import check_batch
from backstamp_fa3.calls import LayerCall, Library
from backstamp_fa3.steps import Step, clear_unseen, mark_unseen, new_step, refresh

__all__ = ["FlashAttention"]


class FlashAttention:
    """MHA, GQA, MQA or absorbed MLA over one build.

    `whole_pages` is the page size from which the build may load pages whole, their unused slots too: those may hold
    NaN, and 0 times NaN is NaN. From there on it is told of left padding, of none, which makes it load slot by slot.
    `keyless` says that it answers nothing sensible for tokens of a row without keys; `sink_dtypes` are those it reads.
    """

    def __init__(
        self,
        request: BuildRequest,
        library: Library,
        *,
        whole_pages: int | None = None,
        keyless: bool = False,
        sink_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,),
    ) -> None:
        self._request = request
        self._check_call = CallChecks(request)
        self._library = library
        self._keyless = keyless
        device = torch.device(request.device)
        self._sinks = SinkBuffers(request, sink_dtypes)
        self._positions = torch.arange(request.max_tokens, dtype=torch.int32, device=device)
        by_slot = whole_pages is not None and request.page_size >= whole_pages
        self._no_padding = torch.zeros(request.max_rows, dtype=torch.int32, device=device) if by_slot else None

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: buffers have their final size, steps refer to the batch's own tensors."""

    def refresh_parameters(self) -> None:
        """Convert the sinks again, after a weight reload by `param.data`, which ticks no counter."""
        self._sinks.refresh_parameters()

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Check the batch and note what `forward` needs; with `state`, bring its tensors up to date in place.

        A step to capture whose state was not is a new one: a graph records marks that an eager state may lack.
        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        form = check_batch(self._request, batch, capture=capture)
        step = new_step(self._request, batch, form, capture=capture, keyless=self._keyless)
        self._sinks.update()
        if state is not None and (state.captured or not capture):
            step = refresh(self._request, state, step)
        mark_unseen(step, self._positions)
        return step

    def replan(self, state: Step) -> None:
        """Mark tokens that see nothing; libraries read the batch's other tensors themselves."""
        mark_unseen(state, self._positions)

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
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        no_keys = batch.max_kv_len == 0 or (new is not None and new.k.shape[0] == 0)
        if batch.num_rows == 0 or batch.num_tokens == 0 or batch.max_q_len == 0 or no_keys:
            # libraries launch nothing here, and leave the LSE +inf
            return _nothing_seen(out, lse)
        call = self._call(q, kv, layer, state, out, new, q_rope, lse is not None)
        found = self._library.attend(call)
        if lse is not None:
            assert found is not None, "it was asked for"
            lse.copy_(found)
        clear_unseen(state, out, lse)
        return out

    def _call(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: Step,
        out: Tensor,
        new: RaggedKV | None,
        q_rope: Tensor | None,
        with_lse: bool,
    ) -> LayerCall:
        rows = state.batch.num_rows
        causal = state.batch.causal is True
        if kv is None:
            assert new is not None, "one of the two was checked to be there"
            k, v, q_v, indptr, leftpad = new.k, new.v, None, new.kv_indptr[: rows + 1], None
            self._strides(new.k.stride(-1), new.v.stride(-1), state)
        else:
            assert state.page_table is not None, "check_call refuses a cache without an index"
            leftpad = None if self._no_padding is None else self._no_padding[:rows]
            indptr = None
            if kv.v is None:
                latent = layer.v_head_dim
                k, v = kv.k[..., latent:], kv.k[..., :latent]
                q, q_v = (q[..., latent:], q[..., :latent]) if q_rope is None else (q_rope, q)
            else:
                k, v, q_v = kv.k, kv.v, None
        return LayerCall(layer, state, q, k, v, q_v, out, indptr, self._sinks.of(layer), leftpad, causal, with_lse)

    def _strides(self, of_k: int, of_v: int, state: Step) -> None:
        if of_k != 1 or of_v != 1:
            needed, found = "a last stride of 1", f"{of_k} and {of_v}"
            raise refusal(self._request, "new.k and new.v", needed, found, phase=state.batch.phase)


def _nothing_seen(out: Tensor, lse: Tensor | None) -> Tensor:
    if lse is not None:
        lse.fill_(float("-inf"))
    return out.zero_()
