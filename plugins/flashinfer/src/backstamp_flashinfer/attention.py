"""The MHA backend: holds a step against its row, plans the library's wrappers, and runs one a layer.

In: a `BuildRequest`, then the call contract's `Batch`, caches and layers. Out: outputs written in place, natural LSE.
`plan` does the host work from exact host lengths. The backend holds wrappers and a workspace, never the current batch.
One stream: shares of split keys pass through one workspace.

`forward` may wait for the device in one case: the first layer of a kind that `plan` left out plans its wrapper. What
served a step before waits until the device has copied that step's schedule; a new one allocates. Left out are all kinds
of an eager step where the object's layers are of several, ragged keys, and, for FA3, values whose strides are not their
keys'. Every other call, and every call of a step to capture, waits for nothing.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.sink_buffers import SinkBuffers
from backstamp.step_checks import IndexForm, check_batch, check_build, refusal
from backstamp_flashinfer.page_list import PageLists
from backstamp_flashinfer.routes import FA2_QUERY_TOKENS, LayerKind, choose_route, kind_of
from backstamp_flashinfer.rows import HostRows, read_rows, read_uniform_rows, refresh_batch, single_row
from backstamp_flashinfer.step import Keys, KnownLayer, Step
from backstamp_flashinfer.tensors import DTYPES, cover_pads, even_strides, refuse_odd_strides
from backstamp_flashinfer.trees import write_mask
from backstamp_flashinfer.wrappers import Planned, WrapperPool

__all__ = ["FlashInferAttention", "Step"]

_LN_2 = math.log(2.0)


class FlashInferAttention:
    """All five phases over a paged cache, and prefill over ragged keys, with and without sinks."""

    def __init__(self, request: BuildRequest, *, hopper: bool) -> None:
        check_build(request)
        self._request, self._hopper = request, hopper
        self._check_call = CallChecks(request)
        self._device = torch.device(request.device)
        self._page_lists = PageLists(request)
        self._pool = WrapperPool(self._device, DTYPES[request.dtype], request.page_size)
        # read as float32. Source: attention/_core.py:_sink_jit_args
        self._sinks = SinkBuffers(request, (torch.float32,))
        self._layers: dict[int, KnownLayer] = {}
        self._kinds = tuple(dict.fromkeys(kind_of(layer) for layer in request.layers))
        if hopper and "prefill" in request.phases:
            self._load_long()

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Size the workspace for the largest step to record; a step's own buffers are made when it is planned."""
        for kind in self._kinds:
            self._pool.reserve(kind, max_rows, max_tokens)

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Do the host half of a step. With a recorded `state`, give the same addresses new values.

        Raises:
            UnsupportedBatch: what the row does not declare, or a step of another shape than the recorded one.
        """
        form = check_batch(self._request, batch, capture=capture)
        self._sinks.update()
        if form == "none" and (batch.tree is not None or capture):
            found = "none, and a tree" if batch.tree is not None else "none, in a step to capture"
            raise refusal(self._request, "index", "the pages of a cache", found, phase=batch.phase)
        if state is not None and state.capture:
            return self._refresh(state, batch, form)
        if state is None or capture:
            step = Step(self._pool)
        else:
            step = state
            step.give_back()
        step.batch, step.form, step.capture = batch, form, capture
        self._read(step)
        if step.rows is not None and (capture or len(self._kinds) == 1):
            # several kinds wait for the first layer that needs them: a KV group seldom has them all. So do ragged keys
            for kind in self._kinds:
                self._plan_kind(step, kind, "paged")
        self._pool.trim()
        return step

    def refresh_parameters(self) -> None:
        """Convert sinks again after a reload of weights that ticks no counter, as `param.data.copy_()`."""
        self._sinks.refresh_parameters()

    def replan(self, state: Step) -> None:
        """Nothing a graph could record: the schedule is host work, and the tree is read in `forward`."""

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
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            cover_pads(out, lse, 0)
            return out
        known = self._layers.get(layer.layer_id)
        if known is None or known.spec is not layer:
            known = self._layers[layer.layer_id] = KnownLayer(layer, kind_of(layer))
        keys = self._keys(state, kv, known)
        rows = state.ragged if keys == "ragged" else state.rows
        used = 0 if rows is None else rows.num_tokens
        cover_pads(out, lse, used)
        if used == 0:
            return out
        planned = self._planned(state, known, keys)
        if used == batch.num_tokens:
            # a slice of everything costs as much as one of a part
            self._run(planned, state, q, kv, layer, new, out, lse)
        else:
            self._run(planned, state, q[:used], kv, layer, new, out[:used], None if lse is None else lse[:used])
        return out

    def _load_long(self) -> None:
        """Compile and load what long prompts run, which the short steps of `backstamp warm` never reach."""
        rows = single_row(self._request, FA2_QUERY_TOKENS + 1)
        pages = torch.zeros(rows.num_pages, dtype=torch.int32, device=self._device)
        for kind in self._kinds:
            route = choose_route(
                kind,
                hopper=True,
                ragged=False,
                tree=False,
                one_token=False,
                causal=True,
                max_q_len=rows.max_q_len,
                strides_differ=False,
                sizes={},
            )
            if route.backend == "fa3":
                planned = self._pool.take(route, kind)
                self._pool.plan(planned, rows, pages, causal=True)
                self._pool.give(planned)

    def _read(self, step: Step) -> None:
        """The host half of the step's rows, and the page list."""
        batch = step.batch
        step.rows = step.ragged = step.pages = None
        if batch.num_rows == 0 or batch.num_tokens == 0 or step.form == "none":
            return
        rows = read_uniform_rows(self._request, batch) if step.capture else read_rows(self._request, batch, paged=True)
        if rows.num_tokens > 0:
            step.rows = rows
            step.pages = self._page_lists.of(batch, step.form, rows)

    def _keys(self, step: Step, kv: PagedKV | None, known: KnownLayer) -> Keys:
        """Where a layer's keys lie, held against the step that was planned."""
        batch = step.batch
        if kv is None:
            if step.capture or batch.tree is not None:
                needed = "a cache, in a step to capture or with a tree"
                raise refusal(self._request, "kv", needed, "ragged keys", phase=batch.phase)
            step.ragged = step.ragged or read_rows(self._request, batch, paged=False)
            return "ragged"
        if known.kv() is not kv:
            assert kv.v is not None, "check_call refuses a cache without values"
            refuse_odd_strides(self._request, known.spec, ("kv.k", kv.k), ("kv.v", kv.v))
            # only the FA3 kernels mind: they step through keys and values with one stride
            known.keys = "paged" if kv.k.stride()[:2] == kv.v.stride()[:2] else "apart"
            known.kv = weakref.ref(kv)
        return known.keys

    def _planned(self, step: Step, known: KnownLayer, keys: Keys) -> Planned:
        """The plan a layer needs, made now in a step that met no such layer yet."""
        kind = known.kind
        planned = step.plans.get((kind, keys))
        if planned is None and keys == "apart":
            near = step.plans.get((kind, "paged"))
            planned = near if near is not None and near.route.backend == "fa2" else None
        if planned is None and step.capture:
            # planned for the step's first lengths and not since, or never: its numbers would be wrong
            needed = "a layer the object was built for, of a kind that ran before the step was planned again"
            found, fix = f"layer {known.spec.layer_id}", "Run every layer between the first plan and the next"
            raise refusal(self._request, "layer", needed, found, phase=step.batch.phase, fix=fix)
        return planned or self._plan_kind(step, kind, keys)

    def _plan_kind(self, step: Step, kind: LayerKind, keys: Keys) -> Planned:
        batch, rows = step.batch, step.rows_of(keys)
        assert isinstance(batch.causal, bool), "check_batch refuses causal tensors"
        sizes: dict[str, int] = {}
        if step.capture or batch.tree is not None:
            sizes = self._sizes(batch, rows, step.capture)
        route = choose_route(
            kind,
            hopper=self._hopper,
            ragged=keys == "ragged",
            tree=batch.tree is not None,
            one_token=rows.q_len == 1,
            causal=batch.causal,
            max_q_len=rows.max_q_len,
            strides_differ=keys == "apart",
            sizes=sizes,
        )
        planned = step.plans[kind, keys] = self._pool.take(route, kind)
        self._pool.plan(planned, rows, None if keys == "ragged" else step.pages, causal=batch.causal)
        return planned

    def _sizes(self, batch: Batch, rows: HostRows, capture: bool) -> dict[str, int]:
        """Fixed sizes: the graph key's bounds for a step to record, else the step's own, rounded to be met again."""
        if capture:
            kv_len = batch.max_kv_len
            pages = batch.num_rows * -(-kv_len // self._request.page_size)
        else:
            numbers = (rows.num_pages, int(rows.kv_lens.numpy().max()))
            pages, kv_len = (1 << max(0, number - 1).bit_length() for number in numbers)
        return {
            "rows": batch.num_rows,
            "tokens": rows.num_tokens,
            "pages": pages,
            "q_len": rows.max_q_len,
            "kv_len": kv_len,
        }

    def _refresh(self, step: Step, batch: Batch, form: IndexForm) -> Step:
        """Plan a recorded step's wrappers anew: those that its layers ran, all of them before any has.

        The others are dropped: no graph has recorded them, and they hold the lengths of an earlier step.
        """
        rows = read_uniform_rows(self._request, batch)
        pages = self._page_lists.of(batch, form, rows)
        # last of what may be refused: it writes
        step.batch, step.form = refresh_batch(self._request, step.batch, batch), form
        step.rows, step.pages = rows, pages
        assert isinstance(batch.causal, bool)
        if any(planned.ran for planned in step.plans.values()):
            for key in [key for key, planned in step.plans.items() if not planned.ran]:
                self._pool.give(step.plans.pop(key))
        for planned in step.plans.values():
            self._pool.plan(planned, rows, step.pages, causal=batch.causal)
        return step

    def _run(
        self,
        planned: Planned,
        step: Step,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        new: RaggedKV | None,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        tree = step.batch.tree
        if planned.mask is not None and tree is not None and planned.mask_layer in (None, layer.layer_id):
            # once a pass over the layers: a tree kernel may have filled the buffer since, and a graph records it
            write_mask(planned.mask, tree, planned.kind.window_left)
            planned.mask_layer = layer.layer_id
        planned.ran = True
        # FA2 writes rows that lie densely, and both write such an LSE
        target = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        base2 = lse
        if lse is not None and not lse.is_contiguous():
            base2 = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
        q = q if even_strides(q) else q.contiguous()
        tensors: tuple[object, ...]
        if kv is None:
            assert new is not None, "check_call refuses a layer without keys"
            tensors = (q, *(part if even_strides(part) else part.contiguous() for part in (new.k, new.v)))
        else:
            tensors = (q, (kv.k, kv.v))
        if layer.sinks is not None:
            tensors = (*tensors, self._sinks.of(layer), planned.kind.scale)
        planned.wrapper.run(*tensors, out=target, lse=base2, return_lse=lse is not None)
        if target is not out:
            out.copy_(target)
        if lse is not None:
            torch.mul(base2, _LN_2, out=lse)
