"""The factory and the backend: it answers the name it claims, `triton`; the stamp adds whose that is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest, Built
from backstamp.step_checks import check_batch, check_build, check_call, refusal
from swift_triton.kernel import attend

__all__ = ["SwiftAttention", "build"]


def build(request: BuildRequest) -> Built:
    """Build this distribution's `triton`.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    check_build(request)
    return Built("triton", SwiftAttention(request))


@dataclass(frozen=True, slots=True)
class Step:
    """One planned step; `rows [T]` i32 is the row of each token, -1 of none."""

    batch: Batch
    rows: Tensor


class SwiftAttention:
    """The backend; it holds no workspace."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Find the row of each token, on the device.

        Raises:
            UnsupportedBatch: what the row does not declare.
        """
        check_batch(self._request, batch, capture=capture)
        tokens = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.qo_indptr.device)
        ends = batch.qo_indptr[1 : batch.num_rows + 1].contiguous()
        rows = torch.searchsorted(ends, tokens, right=True, out_int32=True)
        return Step(batch, torch.where(rows < batch.num_rows, rows, -1))

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
        check_call(self._request, q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        assert kv is not None, "check_call refuses a step without a cache"
        assert kv.v is not None
        if out is None:
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        elif out.stride(-1) != 1:
            raise refusal(self._request, "out", "a last stride of 1", str(out.stride(-1)))
        if batch.num_tokens:
            attend(q, kv.k, kv.v, out, state.rows, batch, layer)
        return out
