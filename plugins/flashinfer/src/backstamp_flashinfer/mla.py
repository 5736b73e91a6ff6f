"""The MLA backend: absorbed attention over the latent cache through the library's one MLA wrapper.

In: a `BuildRequest`, then the call contract's `Batch`, latent cache and layers. Out: latent outputs written in place,
natural LSE. `plan` does the host work; the library also reads the smallest and largest page id there, one sync.
`forward` never syncs. FA3 on Hopper, FA2 elsewhere, named outright: "auto" may pick another library's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build, refusal
from backstamp_flashinfer.page_list import PageLists
from backstamp_flashinfer.rows import HostRows, read_rows, read_uniform_rows, refresh_batch
from backstamp_flashinfer.tensors import DTYPES, cover_pads, even_strides, refuse_odd_strides
from backstamp_flashinfer.wrappers import WORKSPACE_BYTES, Fence

__all__ = ["FlashInferMLA", "MLAStep"]

#: Widths of the latent and the rotary part of a cached token.
LATENT, ROPE = 512, 64
_PARTS = (LATENT, ROPE)


@dataclass(slots=True)
class MLAStep:
    """A planned step: the batch, its host half (None where no token belongs to a row), and a wrapper by heads and
    scale. `capture`: buffers stay at their addresses."""

    batch: Batch
    rows: HostRows | None
    capture: bool
    wrappers: dict[tuple[int, float], BatchMLAPagedAttentionWrapper] = field(default_factory=dict)


class FlashInferMLA:
    """All five phases over the latent cache; verify as a chain, for the wrapper takes no mask."""

    def __init__(self, request: BuildRequest, *, hopper: bool) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._backend = "fa3" if hopper else "fa2"
        self._device = torch.device(request.device)
        self._dtype = DTYPES[request.dtype]
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._device)
        self._compiles = Announcer("flashinfer")
        self._page_lists = PageLists(request)
        self._fence = Fence(self._device)
        self._kinds = tuple(dict.fromkeys((layer.num_qo_heads, layer.scale) for layer in request.layers))

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: the workspace does not grow with a step, and its buffers are made in `plan`."""

    def plan(self, batch: Batch, *, state: MLAStep | None = None, capture: bool = False) -> MLAStep:
        """Do the host half of a step. With a recorded `state`, give the same addresses new values.

        Raises:
            UnsupportedBatch: what the row does not declare, a step of another shape than the recorded one, or a step
                the library's own planner refuses.
        """
        form = check_batch(self._request, batch, capture=capture)
        if state is not None and state.capture:
            batch = refresh_batch(self._request, state.batch, batch)
            rows = read_uniform_rows(self._request, batch)
        else:
            rows = self._read(batch, capture)
        pages = None if rows is None else self._page_lists.of(batch, form, rows)
        if state is None:
            state = MLAStep(batch, rows, capture)
        elif not state.capture:
            state.capture = capture
            state.wrappers.clear()
        state.batch, state.rows = batch, rows
        if rows is not None and pages is not None:
            # the library gives up pinned memory with a plan, and the next may be given it while a copy still runs
            self._fence.wait()
            for kind in self._kinds:
                if kind not in state.wrappers:
                    state.wrappers[kind] = self._wrapper(batch, capture)
                self._plan_wrapper(state.wrappers[kind], kind, batch, rows, pages)
            self._fence.mark()
        return state

    def replan(self, state: MLAStep) -> None:
        """Nothing a graph could record: the schedule is host work."""

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: MLAStep,
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
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            cover_pads(out, lse, 0)
            return out
        used = 0 if state.rows is None else state.rows.num_tokens
        cover_pads(out, lse, used)
        if used == 0:
            return out
        wrapper = state.wrappers.get((layer.num_qo_heads, layer.scale))
        if wrapper is None:
            needed = "a layer of the heads and scale of one the object was built for"
            found = f"layer {layer.layer_id} with {layer.num_qo_heads} heads and scale {layer.scale}"
            raise refusal(self._request, "layer", needed, found, phase=batch.phase)
        assert kv is not None, "check_call refuses a call without a cache"
        refuse_odd_strides(self._request, layer, ("kv.k", kv.k))
        if used == batch.num_tokens:
            # a slice of everything costs as much as one of a part
            self._run(wrapper, q, q_rope, kv.k, out, lse)
        else:
            part = slice(used)
            rope, natural = (None if whole is None else whole[part] for whole in (q_rope, lse))
            self._run(wrapper, q[part], rope, kv.k, out[part], natural)
        return out

    def _run(
        self,
        wrapper: BatchMLAPagedAttentionWrapper,
        q: Tensor,
        q_rope: Tensor | None,
        cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        q = q if even_strides(q) else q.contiguous()
        if q_rope is not None and not even_strides(q_rope):
            q_rope = q_rope.contiguous()
        query = q.split_with_sizes(_PARTS, -1) if q_rope is None else (q, q_rope)
        target = out if even_strides(out) else torch.empty_like(out, memory_format=torch.contiguous_format)
        # planned with an LSE for every layer, because one plan serves calls with and without
        natural = lse
        if lse is None or not lse.is_contiguous():
            natural = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        wrapper.run(
            query=query,
            kv_cache=cache.squeeze(2).split_with_sizes(_PARTS, -1),
            out=target,
            lse=natural,
            return_lse=True,
            return_lse_base_on_e=True,
        )
        if target is not out:
            out.copy_(target)
        if lse is not None and natural is not lse:
            lse.copy_(natural)

    def _read(self, batch: Batch, capture: bool) -> HostRows | None:
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return None
        if capture:
            return read_uniform_rows(self._request, batch)
        rows = read_rows(self._request, batch, paged=True)
        return rows if rows.num_tokens else None

    def _wrapper(self, batch: Batch, capture: bool) -> BatchMLAPagedAttentionWrapper:
        if not capture:
            return BatchMLAPagedAttentionWrapper(self._workspace, backend=self._backend)
        most = batch.num_rows * -(-batch.max_kv_len // self._request.page_size)
        sizes = (batch.num_rows + 1, batch.num_rows + 1, max(1, most), batch.num_rows)
        qo_indptr, kv_indptr, kv_indices, kv_len_arr = (
            torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes
        )
        return BatchMLAPagedAttentionWrapper(
            self._workspace,
            use_cuda_graph=True,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
            backend=self._backend,
        )

    def _plan_wrapper(
        self,
        wrapper: BatchMLAPagedAttentionWrapper,
        kind: tuple[int, float],
        batch: Batch,
        rows: HostRows,
        pages: Tensor,
    ) -> None:
        heads, scale = kind
        try:
            with self._compiles.first("mla", self._backend, str(self._dtype).removeprefix("torch."), LATENT, ROPE):
                wrapper.plan(
                    metadata=MLAPlanMetadata.csr(rows.qo_indptr, rows.page_indptr, pages, rows.kv_lens),
                    num_heads=heads,
                    head_dim_ckv=LATENT,
                    head_dim_kpe=ROPE,
                    page_size=self._request.page_size,
                    # one query a row sees every key either way, and the planner takes more head counts then
                    causal=bool(batch.causal) and rows.max_q_len > 1,
                    sm_scale=scale,
                    q_data_type=self._dtype,
                    kv_data_type=self._dtype,
                    query_layout="split",
                    kv_cache_layout="split",
                    lse_mode="basee",
                )
        except ValueError as error:
            # what its schedule cannot hold, or a head count whose causal tiles would lose a key
            needed = "a step that flashinfer's MLA planner takes"
            raise refusal(self._request, "step", needed, str(error), phase=batch.phase) from error
