"""The factory and the backend: a row at a time through `scaled_dot_product_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest, Built
from backstamp.step_checks import check_batch, check_build, check_call

__all__ = ["AcmeAttention", "build"]


def build(request: BuildRequest) -> Built:
    """Build `acme`.

    Raises:
        UnsupportedBatch: what the row does not declare.
    """
    check_build(request)
    return Built("acme", AcmeAttention(request))


@dataclass(frozen=True, slots=True)
class Step:
    """One planned step: (first token, queries, keys) of each row."""

    batch: Batch
    rows: tuple[tuple[int, int, int], ...]


class AcmeAttention:
    """The backend; it holds no workspace."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request

    def plan(self, batch: Batch, *, state: Step | None = None, capture: bool = False) -> Step:
        """Read the host lengths.

        Raises:
            UnsupportedBatch: what the row does not declare.
        """
        check_batch(self._request, batch, capture=capture)
        assert batch.qo_indptr_host is not None, "declared as an input"
        assert batch.kv_lens_host is not None
        starts, lens = batch.qo_indptr_host.tolist(), batch.kv_lens_host.tolist()
        return Step(batch, tuple((starts[row], starts[row + 1], lens[row]) for row in range(batch.num_rows)))

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
        assert batch.index.page_table is not None
        if out is None:
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        out.zero_()
        for row, (start, stop, length) in enumerate(state.rows):
            if start == stop or length == 0:
                continue
            pages = batch.index.page_table[row, : -(-length // self._request.page_size)].long()
            keys, values = (cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for cache in (kv.k, kv.v))
            answer = torch.nn.functional.scaled_dot_product_attention(
                q[start:stop].transpose(0, 1)[None],
                keys,
                values,
                attn_mask=_visible(stop - start, length, layer, causal=bool(batch.causal), device=q.device),
                scale=layer.scale,
                enable_gqa=True,
            )
            out[start:stop] = answer[0].transpose(0, 1)
        return out


def _visible(q_len: int, kv_len: int, layer: LayerSpec, *, causal: bool, device: torch.device) -> Tensor:
    """Bool `[q_len, kv_len]`: which keys each token sees."""
    at = torch.arange(kv_len - q_len, kv_len, device=device)[:, None]
    key = torch.arange(kv_len, device=device)[None, :]
    seen = key <= at if causal else torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return seen if layer.window_left < 0 else seen & (key >= at - layer.window_left)
