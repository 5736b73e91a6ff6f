"""Paged MHA through torch-npu's `npu_fused_infer_attention_score_v2`, in one call or in a call a row.

In: the call contract with exact host lengths. Out: outputs and the LSE in place; a row without queries or keys gets
zeros and -inf. Never holds the current batch, never copies a cache, and never reads a device value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import check_batch, refusal
from backstamp_ascend.live import LiveRows, live_rows

__all__ = ["MASK_SIZE", "MOST_ROWS", "PagedAttention", "PagedStep", "flat_cache", "hidden_triangle"]

#: Side of the triangle the library takes as its causal mask, for rows of any length. Source: torch-npu 2.14.0
#: _op_plugin_docs.py:8577, "sparse_mode": 2, 3 and 4 take (2048, 2048).
MASK_SIZE: Final = 2048
#: Rows of one packed call. Source: as above, "TND": at most 4096 lengths.
MOST_ROWS: Final = 4096
#: No bound on the keys before or after self.
_ALL: Final = 2**31 - 1

#: Queries, keys, values and keyword arguments to (outputs, LSE): `npu_fused_infer_attention_score_v2`.
Attend: TypeAlias = Callable[..., "tuple[Tensor, Tensor]"]


@dataclass(slots=True)
class PagedStep:
    """One planned step; no rows where nothing is to be attended."""

    batch: Batch
    rows: LiveRows | None


class PagedAttention:
    """The backend; `packed` says that the library takes all rows in one call."""

    def __init__(self, request: BuildRequest, attend: Attend, *, packed: bool) -> None:
        self._request = request
        self._check_call = CallChecks(request)
        self._attend = attend
        self._packed = packed
        self._triangle = hidden_triangle(request.device)

    def plan(self, batch: Batch, *, state: PagedStep | None = None, capture: bool = False) -> PagedStep:
        """Find the rows to attend, from the host lengths.

        Raises:
            UnsupportedBatch: what the row does not declare, or more rows than one call takes.
        """
        rows = live_rows(batch, check_batch(self._request, batch, capture=capture))
        if self._packed and rows is not None and len(rows.q_lens) > MOST_ROWS:
            found = f"{len(rows.q_lens)} with queries"
            raise refusal(self._request, "num_rows", f"at most {MOST_ROWS}", found, phase=batch.phase)
        if state is None:
            return PagedStep(batch, rows)
        state.batch, state.rows = batch, rows
        return state

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
            UnsupportedBatch: what the row does not declare, or a cache that is not contiguous.
        """
        batch, rows = state.batch, state.rows
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        assert kv is not None, "check_call refuses a step without a cache"
        assert kv.v is not None
        if out is None:
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if rows is None or rows.num_tokens < batch.num_tokens:
            out.zero_()
            if lse is not None:
                lse.fill_(float("-inf"))
        if rows is None:
            return out
        keys, values = (flat_cache(self._request, name, x) for name, x in (("kv.k", kv.k), ("kv.v", kv.v)))
        queries = q[rows.tokens].contiguous()
        parts = self._in_one if self._packed else self._row_by_row
        answers, logs = zip(*parts(queries, keys, values, layer, state, rows, lse is not None), strict=True)
        out[rows.tokens] = answers[0] if len(answers) == 1 else torch.cat(answers)
        if lse is not None:
            lse[rows.tokens] = logs[0] if len(logs) == 1 else torch.cat(logs)
        return out

    def _in_one(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, state: PagedStep, rows: LiveRows, lse: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows, `q [T, Hq, D]`: outputs `[T, Hq, D]`, LSE `[T, Hq]`."""
        mode, mask, before, after = self._mask(state.batch, layer)
        answer, log = self._attend(
            q,
            k,
            v,
            atten_mask=mask,
            # ends of rows among the queries, but lengths among the keys, which are found by the block table
            actual_seq_qlen=list(accumulate(rows.q_lens)),
            actual_seq_kvlen=list(rows.kv_lens),
            block_table=rows.block_table,
            learnable_sink=layer.sinks,
            num_query_heads=layer.num_qo_heads,
            num_key_value_heads=layer.num_kv_heads,
            softmax_scale=layer.scale,
            pre_tokens=before,
            next_tokens=after,
            input_layout="TND",
            sparse_mode=mode,
            block_size=self._request.page_size,
            return_softmax_lse=lse,
        )
        yield answer, log[..., 0] if lse else log

    def _row_by_row(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerSpec, state: PagedStep, rows: LiveRows, lse: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of one query share a call, `q [R, 1, Hq, D]`; any other has its own, `q [1, S, Hq, D]`."""
        decode = all(length == 1 for length in rows.q_lens)
        size = len(rows.q_lens) if decode else 1
        start = 0
        for first in range(0, len(rows.q_lens), size):
            part = slice(first, first + size)
            length = rows.q_lens[first]
            # one query sees every key of its row, and the library takes no triangle for it
            mode, mask, before, after = (0, None, _ALL, _ALL) if length == 1 else self._mask(state.batch, layer)
            answer, log = self._attend(
                q[start : start + size * length].unflatten(0, (size, length)),
                k,
                v,
                atten_mask=mask,
                actual_seq_qlen=list(rows.q_lens[part]),
                actual_seq_kvlen=list(rows.kv_lens[part]),
                block_table=rows.block_table[part],
                num_query_heads=layer.num_qo_heads,
                num_key_value_heads=layer.num_kv_heads,
                softmax_scale=layer.scale,
                pre_tokens=before,
                next_tokens=after,
                input_layout="BSND",
                sparse_mode=mode,
                block_size=self._request.page_size,
                return_softmax_lse=lse,
            )
            # [B, Hq, S, 1] for this layout
            yield answer.flatten(0, 1), log[..., 0].transpose(1, 2).flatten(0, 1) if lse else log
            start += size * length

    def _mask(self, batch: Batch, layer: LayerSpec) -> tuple[int, Tensor | None, int, int]:
        """Sparse mode, mask, and keys before and after self: both are counted from the end of a row's keys.

        Source: torch-npu 2.14.0 _op_plugin_docs.py:8577, "sparse_mode"; SGLang 0.5.23, ascend_backend.py:1747.
        """
        if layer.window_left >= 0:
            return 4, self._triangle, layer.window_left, 0 if batch.causal else _ALL
        if batch.causal:
            return 3, self._triangle, _ALL, _ALL
        return 0, None, _ALL, _ALL


def hidden_triangle(device: str) -> Tensor:
    """The mask the library takes for every causal row: bool, True where a key is hidden, 4 MiB."""
    return torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu_(1)


def flat_cache(request: BuildRequest, name: str, cache: Tensor) -> Tensor:
    """A cache `[P, page, Hk, D]` as the library takes it, `[P, page, Hk * D]`: the same memory.

    Raises:
        UnsupportedBatch: a cache that is not contiguous, or of 2**31 numbers or more, which the library counts in i32.
    """
    if not cache.is_contiguous():
        needed = "a contiguous cache: the library takes no other"
        raise refusal(request, name, needed, f"strides {list(cache.stride())}")
    if cache.numel() >= 2**31:
        raise refusal(request, name, "fewer than 2**31 numbers a layer", str(cache.numel()))
    return cache.view(*cache.shape[:2], -1)
