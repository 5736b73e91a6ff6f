"""DeepSeek V4 attention: a window of plain entries and the compressed entries behind it, one softmax, one sink.

In: a `BuildRequest`, then batches, queries `[T, Hq, 512]`, `kv.k` the cache of plain entries `[P, page_size, 1, D]`,
`kv.v` that of compressed entries `[P, page_size / rate, 1, D]` or None in a layer without, both under the batch's page
table. `indices [T, topk]` i32 choose compressed entries in request space; without them a layer sees them all. Out:
attention in `out`. An entry is visible once all `rate` tokens it stands for are (transformers 5.24, deepseek_v4).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, refusal
from backstamp_dsa.queries import nothing_seen
from backstamp_dsa.slots import INDEX_SPACE, find_slots, padded
from backstamp_dsa.steps import Slots, SparseStep, renew

__all__ = ["CompressedAttention", "CompressedKernel", "compress_rate", "sinks_of"]


class CompressedKernel(Protocol):
    """One library's attention over chosen slots of two caches."""

    def slots_per_page(self, field: str, cache: Tensor) -> int:
        """How many slots lie between the starts of two pages of a cache."""
        ...

    def attend(
        self,
        q: Tensor,
        kv: PagedKV,
        near: Slots,
        far: Slots | None,
        sinks: Tensor | None,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
    ) -> None:
        """Write outputs `[T, Hq, Dv]`: `near` are slots of `kv.k`, `far` of `kv.v`."""
        ...


class CompressedAttention:
    """The attention object of kernel `dsv4` where a library takes slots."""

    def __init__(self, request: BuildRequest, kernel: CompressedKernel) -> None:
        self.index_space = INDEX_SPACE
        self._kernel = kernel
        self._request = request
        self._check_call = CallChecks(request)
        self._compiles = Announcer("dsv4")

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step refers to the batch's own tensors."""

    def plan(self, batch: Batch, *, state: SparseStep | None = None, capture: bool = False) -> SparseStep:
        """Check the batch; with `state`, give a planned step its values at the same addresses.

        Raises:
            UnsupportedBatch: the batch asks for what the row does not declare.
        """
        form = check_batch(self._request, batch, capture=capture)
        if state is None:
            return SparseStep(batch, form)
        renew(self._request, state.batch, state.form, batch, form)
        return state

    def replan(self, state: SparseStep) -> None:
        """Nothing to do on the device: kernels read the batch's tensors themselves."""

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: SparseStep,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer over its window and its compressed entries."""
        batch = state.batch
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        if kv is None or layer.window_left < 0 or q_rope is not None:
            found = f"kv {kv is not None}, window_left {layer.window_left}, q_rope {q_rope is not None}"
            raise refusal(self._request, "layer", "a cache, a window, and queries in one tensor", found)
        rate = compress_rate(self._request, kv, indices)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        slots_per_page = self._kernel.slots_per_page("kv.k", kv.k)
        with self._compiles.first(self._request.layout, state.form):
            near = find_slots(
                state,
                indices=None,
                width=padded(layer.window_left + 1),
                window=layer.window_left + 1,
                entries_per_page=self._request.page_size,
                slots_per_page=slots_per_page,
            )
            far = self._far(batch, state, kv, indices, rate)
            self._kernel.attend(q, kv, near, far, sinks_of(layer), layer, state, out)
        return out

    def _far(self, batch: Batch, state: SparseStep, kv: PagedKV, indices: Tensor | None, rate: int) -> Slots | None:
        """Slots of compressed entries, None in a layer without."""
        if kv.v is None:
            return None
        width = indices.shape[1] if indices is not None else batch.max_kv_len // rate
        return find_slots(
            state,
            indices=indices,
            width=padded(width),
            rate=rate,
            entries_per_page=self._request.page_size // rate,
            slots_per_page=self._kernel.slots_per_page("kv.v", kv.v),
        )


def compress_rate(request: BuildRequest, kv: PagedKV, indices: Tensor | None) -> int:
    """Tokens a compressed entry of a layer stands for; 1 in a layer without.

    Raises:
        UnsupportedBatch: a page of compressed entries that is no whole fraction of a page, or a choice of none.
    """
    if kv.v is None:
        if indices is not None:
            raise refusal(request, "indices", "None in a layer without compressed entries", str(list(indices.shape)))
        return 1
    entries = kv.v.shape[1]
    if kv.v.dim() != 4 or entries < 1 or request.page_size % entries or kv.v.dtype is not kv.k.dtype:
        needed = f"[P, {request.page_size} / rate, 1, {kv.k.shape[-1]}] {kv.k.dtype}"
        raise refusal(request, "kv.v", needed, f"{list(kv.v.shape)} {kv.v.dtype}")
    return request.page_size // entries


def sinks_of(layer: LayerSpec) -> Tensor | None:
    """The layer's sinks, contiguous; the row declares fp32 and no conversion."""
    return None if layer.sinks is None else layer.sinks.contiguous()
