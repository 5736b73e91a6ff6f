"""Absorbed MLA through torch-npu's `npu_fused_infer_attention_score_v2`, a row's queries at most 16 at a time.

In: the call contract with exact host lengths. Out: outputs in place; a row without queries or keys gets zeros. `plan`
cuts longer rows into pieces that see the keys up to their own last token. Never holds the current batch, and never
reads a device value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.repeated_calls import CallChecks
from backstamp.row_checks import dtype_name
from backstamp.step_checks import check_batch, refusal
from backstamp_ascend.live import LiveRows, live_rows
from backstamp_ascend.paged import MOST_ROWS, Attend, flat_cache, hidden_triangle

__all__ = ["LATENT", "MOST_QUERIES", "LatentAttention", "LatentStep"]

#: Latent part of a cache row; the rest is its rotary part.
LATENT: Final = 512
#: Queries of one row in a call. Source: torch-npu 2.14.0 _op_plugin_docs.py:8577, "query_rope": 1 to 16.
MOST_QUERIES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What one call attends.

    Attributes:
        tokens: the step's tokens in it, as in `LiveRows`.
        q_ends: queries up to the end of each piece. kv_lens: keys each piece sees.
        block_table: `[number of pieces, W]` i32 into the cache.
        pages: i64 pages of the cache that are read, in the order of `packed_table`, which counts them from 0.
        single: every piece is one query.
    """

    tokens: slice | Tensor
    q_ends: Sequence[int]
    kv_lens: Sequence[int]
    block_table: Tensor
    pages: Tensor
    packed_table: Tensor
    single: bool


@dataclass(slots=True)
class LatentStep:
    """One planned step; no pieces where nothing is to be attended."""

    batch: Batch
    pieces: Pieces | None


class LatentAttention:
    """The backend of one latent cache, in either of its two layouts."""

    def __init__(self, request: BuildRequest, attend: Attend) -> None:
        self._request = request
        self._check_call = CallChecks(request)
        self._attend = attend
        self._triangle = hidden_triangle(request.device)

    def plan(self, batch: Batch, *, state: LatentStep | None = None, capture: bool = False) -> LatentStep:
        """Find the rows to attend and cut them, from the host lengths.

        Raises:
            UnsupportedBatch: what the row does not declare, or more pieces than one call takes.
        """
        rows = live_rows(batch, check_batch(self._request, batch, capture=capture))
        pieces = None if rows is None else _cut(rows, self._request.page_size)
        if pieces is not None and len(pieces.q_ends) > MOST_ROWS:
            needed = f"at most {MOST_ROWS} pieces of {MOST_QUERIES} queries"
            raise refusal(self._request, "num_tokens", needed, str(len(pieces.q_ends)), phase=batch.phase)
        if state is None:
            return LatentStep(batch, pieces)
        state.batch, state.pieces = batch, pieces
        return state

    def forward(
        self,
        q: Tensor,
        kv: PagedKV | None,
        layer: LayerSpec,
        state: LatentStep,
        *,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        new: RaggedKV | None = None,
        q_rope: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Attend one layer: `q [T, Hq, 576]`, or 512 with `q_rope`, to `out [T, Hq, 512]`.

        In the layout "latent_rope" `kv.k [P, page, 1, 512]` is the latent and `kv.v [P, page, 1, 64]` its rotary part.

        Raises:
            UnsupportedBatch: what the row does not declare, or a latent cache in parts that are not contiguous.
        """
        batch, pieces = state.batch, state.pieces
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        assert kv is not None, "check_call refuses a step without a cache"
        if out is None:
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if pieces is None:
            return out.zero_()
        if pieces.q_ends[-1] < batch.num_tokens:
            out.zero_()
        nope, rope = (q[..., :LATENT], q[..., LATENT:]) if q_rope is None else (q, q_rope)
        latent, keys_rope, block_table = self._cache(kv, pieces)
        answer, _ = self._attend(
            nope[pieces.tokens].contiguous(),
            latent,
            latent,
            query_rope=rope[pieces.tokens].contiguous(),
            key_rope=keys_rope,
            # for one query a piece the library takes no mask, for more it takes nothing but this
            atten_mask=None if pieces.single else self._triangle,
            actual_seq_qlen=list(pieces.q_ends),
            actual_seq_kvlen=list(pieces.kv_lens),
            block_table=block_table,
            num_query_heads=layer.num_qo_heads,
            num_key_value_heads=layer.num_kv_heads,
            softmax_scale=layer.scale,
            input_layout="TND",
            sparse_mode=0 if pieces.single else 3,
            block_size=self._request.page_size,
        )
        out[pieces.tokens] = answer
        return out

    def _cache(self, kv: PagedKV, pieces: Pieces) -> tuple[Tensor, Tensor, Tensor]:
        """Latent `[P, page, 512]`, rotary part `[P, page, 64]`, and the block table into them."""
        if kv.layout == "rows":
            # the library takes no strides: the pages of the step are copied apart
            rows = kv.k.index_select(0, pieces.pages)[:, :, 0]
            return rows[..., :LATENT].contiguous(), rows[..., LATENT:].contiguous(), pieces.packed_table
        for name, tensor, width in (("kv.k", kv.k, LATENT), ("kv.v", kv.v, 64)):
            wanted = (self._request.page_size, 1, width)
            if tensor is None or tuple(tensor.shape[1:]) != wanted or dtype_name(tensor) != self._request.dtype:
                found = "None" if tensor is None else f"{list(tensor.shape)} {tensor.dtype}"
                raise refusal(self._request, name, f"[P, {', '.join(map(str, wanted))}] {self._request.dtype}", found)
        assert kv.v is not None
        latent, rope = flat_cache(self._request, "kv.k", kv.k), flat_cache(self._request, "kv.v", kv.v)
        return latent, rope, pieces.block_table


def _cut(rows: LiveRows, page_size: int) -> Pieces:
    """Cut rows into pieces; piece i of a row ends where the row's keys would end had it stopped there."""
    of_row, q_lens, kv_lens = [], [], []
    for row, (q_len, kv_len) in enumerate(zip(rows.q_lens, rows.kv_lens, strict=True)):
        for start in range(0, q_len, MOST_QUERIES):
            stop = min(start + MOST_QUERIES, q_len)
            of_row.append(row)
            q_lens.append(stop - start)
            kv_lens.append(kv_len - q_len + stop)
    device = rows.block_table.device
    which = torch.tensor(of_row).to(device)
    counts = [-(-length // page_size) for length in rows.kv_lens]
    row_of_page = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    column = torch.cat([torch.arange(count) for count in counts])
    packed = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    packed[row_of_page, column] = torch.arange(len(column), dtype=torch.int32)
    return Pieces(
        tokens=rows.tokens,
        q_ends=list(accumulate(q_lens)),
        kv_lens=kv_lens,
        block_table=rows.block_table[which],
        pages=rows.block_table[row_of_page.to(device), column.to(device)].long(),
        packed_table=packed[of_row].to(device),
        single=all(length == 1 for length in q_lens),
    )
