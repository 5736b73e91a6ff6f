"""MLA prefill over this step's up-projected keys and values, `[N, Hk, 192]` and `[N, Hk, 128]`, which lie in no cache.

In: batches with `new`. Out: `[T, Hq, 128]` and natural-log LSE, for an engine that merges parts itself. Two libraries
do it: flashinfer's `trtllm_ragged_attention_deepseek` and tokenspeed-mla's `tokenspeed_mla_prefill`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, check_build
from backstamp_trtllm.launches import Announcer, deliver, landing, nothing_seen, silence
from backstamp_trtllm.ragged_steps import RaggedStep, plan_ragged

__all__ = ["Launch", "RaggedPrefill"]

#: (q, new, layer, step, out, lse): attend into `out`, and into `lse` where it is a tensor, in natural logarithms.
Launch: TypeAlias = "Callable[[Tensor, RaggedKV, LayerSpec, RaggedStep, Tensor, Tensor | None], None]"


class RaggedPrefill:
    """Prefill of rows whose keys all belong to this step."""

    def __init__(self, request: BuildRequest, launch: Launch) -> None:
        check_build(request)
        self._request = request
        self._check_call = CallChecks(request)
        self._launch = launch
        self._announce = Announcer(request.kernel)

    def plan(self, batch: Batch, *, state: RaggedStep | None = None, capture: bool = False) -> RaggedStep:
        """Check the batch. Nothing of `state` is kept.

        Raises an `UnsupportedBatch` naming the field, what it must be and what it is.
        """
        check_batch(self._request, batch, capture=capture)
        return plan_ragged(batch)

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: RaggedStep,
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
        assert new is not None, "check_call found ragged keys"
        if out is None:
            out = q.new_empty(q.shape[0], layer.num_qo_heads, layer.v_head_dim)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return nothing_seen(out, lse)
        written = landing(out)
        written_lse = None if lse is None else landing(lse)
        used, keys = state.used_tokens, state.used_keys
        if used and keys:
            part = RaggedKV(k=new.k[:keys], v=new.v[:keys], kv_indptr=new.kv_indptr)
            part_lse = None if written_lse is None else written_lse[:used]
            with self._announce.first("ragged prefill", self._request.dtype, "lse" if lse is not None else "no lse"):
                self._launch(q[:used], part, layer, state, written[:used], part_lse)
        silence(state.dead, written, written_lse)
        if lse is not None and written_lse is not None:
            deliver(lse, written_lse)
        return deliver(out, written)
