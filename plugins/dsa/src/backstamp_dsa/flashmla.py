"""Dense absorbed MLA through sgl-flash-mla's Hopper kernel: kernel `flashmla`, in every phase.

In: a `BuildRequest`, then batches, a paged latent cache of 64-token pages and queries. Out: outputs and natural-log
LSE. The library's schedule depends on the key lengths and nothing in it notices when they change: each plan makes its
own. The object holds no batch.
"""

from __future__ import annotations

import flash_mla
import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build, refusal
from backstamp_dsa.dense_fill import LaunchFill
from backstamp_dsa.dense_steps import DenseStep, Launch, cut, refill
from backstamp_dsa.queries import check_aligned, nothing_seen, store_answer
from backstamp_dsa.steps import renew

__all__ = ["FlashMla"]


class FlashMla:
    """Dense latent attention, in launches of one query length each."""

    def __init__(self, request: BuildRequest) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._fills = LaunchFill()
        self._heads = sorted({layer.num_qo_heads for layer in request.layers})
        dtype = torch.float16 if request.dtype == "fp16" else torch.bfloat16
        self._zero = torch.zeros((), dtype=dtype, device=request.device)

    def init_graphs(self, max_rows: int, max_tokens: int) -> None:
        """Nothing to allocate: a step brings its own buffers, and a state planned again keeps them."""

    def plan(self, batch: Batch, *, state: DenseStep | None = None, capture: bool = False) -> DenseStep:
        """Check the batch and cut it into launches; schedules made for other lengths are forgotten.

        Raises:
            UnsupportedBatch: the batch asks for what the row does not declare.
        """
        form = check_batch(self._request, batch, capture=capture)
        if state is None:
            step = cut(batch, form, max(self._heads, default=128), capture, self._fills)
        else:
            step = state
            if not step.whole:
                needed = "a state of rows of one query length, or one planned for capture"
                raise refusal(self._request, "state", needed, "a state cut by query lengths", fix="Plan a new state")
            self._hold_length(step, batch)
            renew(self._request, step.batch, step.form, batch, form)
            refill(step, self._fills)
            if capture and not step.captured:
                # what the library filled for an eager step is its own: a graph reads those of `_reschedule`
                for launch in step.launches:
                    launch.schedules.clear()
                step.captured = True
        for launch in step.launches:
            self._reschedule(launch, step.captured)
        return step

    def replan(self, state: DenseStep) -> None:
        """Nothing: the row declares a host plan, so an engine plans before each replay."""

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: DenseStep,
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
        if kv is None:
            raise refusal(self._request, "kv", "a paged latent cache", "None", phase=batch.phase)
        check_aligned(self._request, "kv.k", kv.k)
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        if not state.whole and sum(launch.num_tokens for launch in state.launches) != batch.num_tokens:
            # padding tokens belong to no launch, and their outputs must be finite
            nothing_seen(out, lse)
        query = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
        for launch in state.launches:
            self._run(launch, query, kv, layer, state, out, lse)
        return out

    def _run(
        self, launch: Launch, q: Tensor, kv: PagedKV, layer: LayerSpec, step: DenseStep, out: Tensor, lse: Tensor | None
    ) -> None:
        heads, tokens = layer.num_qo_heads, launch.tokens if launch.padding is None else launch.padding.tokens
        if tokens is not None:
            places = q.index_select(0, tokens)
        elif launch.num_tokens == q.shape[0]:
            # a slice of everything costs as much as one of a part
            places = q
        else:
            run = slice(launch.first, launch.first + launch.num_tokens)
            places, out, lse = q[run], out[run], None if lse is None else lse[run]
        found, found_lse = flash_mla.flash_mla_with_kvcache(
            places.reshape(launch.num_rows, launch.q_len, heads, layer.head_dim),
            kv.k,
            launch.table,
            launch.kv_lens,
            layer.v_head_dim,
            self._schedule(launch, heads, step.captured),
            softmax_scale=layer.scale,
            causal=step.batch.causal is True,
            is_fp8_kvcache=False,
            use_legacy=True,
        )
        answer = found.flatten(0, 1)
        answer_lse = None if lse is None else found_lse.transpose(1, 2).flatten(0, 1)
        if launch.padding is not None:
            answer = answer.index_select(0, launch.padding.places)
            if answer_lse is not None:
                answer_lse = answer_lse.index_select(0, launch.padding.places)
        if tokens is None or launch.padding is not None:
            store_answer(answer, answer_lse, launch.seen, self._zero, out, lse)
            return
        out.index_copy_(0, tokens, torch.where(launch.seen[:, None, None], answer, self._zero))
        if lse is not None and answer_lse is not None:
            lse.index_copy_(0, tokens, answer_lse.masked_fill(~launch.seen[:, None], float("-inf")))

    def _hold_length(self, step: DenseStep, batch: Batch) -> None:
        """Launches over a caller's own tokens hold every row to one query length."""
        for launch in step.launches:
            if launch.padding is None and batch.decode_q_len != launch.q_len:
                needed, found = f"{launch.q_len}, as planned before", str(batch.decode_q_len)
                raise refusal(self._request, "decode_q_len", needed, found, fix="Plan a new state")

    def _reschedule(self, launch: Launch, captured: bool) -> None:
        """Forget schedules made for other lengths; those a graph reads are written anew in place."""
        if not captured:
            launch.schedules.clear()
            return
        for heads in sorted({*self._heads, *launch.schedules}):
            made, splits = flash_mla.get_mla_decoding_metadata(
                launch.kv_lens, launch.q_len * heads, 1, is_fp8_kvcache=False, use_legacy=True
            )
            schedule = launch.schedules.get(heads)
            if schedule is None:
                schedule = launch.schedules[heads] = flash_mla.get_mla_metadata()[0]
                schedule.tile_scheduler_metadata, schedule.num_splits = made, splits
            else:
                schedule.tile_scheduler_metadata.copy_(made)
                schedule.num_splits.copy_(splits)

    def _schedule(self, launch: Launch, heads: int, captured: bool) -> object:
        """The schedule of one launch and head count: empty, for the library's first call to fill, unless captured."""
        if heads not in launch.schedules:
            if captured:
                needed = f"one of the head counts it was built for, {self._heads}"
                raise refusal(self._request, "num_qo_heads of a captured step", needed, str(heads))
            launch.schedules[heads] = flash_mla.get_mla_metadata()[0]
        return launch.schedules[heads]
