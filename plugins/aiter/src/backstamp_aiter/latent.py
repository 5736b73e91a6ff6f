"""Absorbed MLA through AITER: rows that have queries and keys, over slots of single tokens.

In: the call contract with exact host lengths. Out: outputs in place; a row without queries or keys is left out of the
call and gets zeros. `plan` counts pages out into token slots, because AITER takes a row's length from its slice of
them. Never holds the current batch, and never reads a device value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, RaggedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.repeated_calls import CallChecks
from backstamp.step_checks import IndexForm, check_batch, refusal

__all__ = ["LatentAttention", "LatentRows", "LatentStep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentRows:
    """The R rows of a step that are attended, T of its tokens, N of its keys.

    Attributes:
        tokens: the rows' query tokens, a slice where they are neighbours, else i64 `[T]`.
        qo_indptr, kv_indptr: `[R+1]` i32 over the tokens and over `slots`.
        slots: `[N]` i32, page times page size and token in the page.
        last_page_lens: `[R]` i32 ones: a page of this index is a token.
        max_q_len: query tokens of the longest row.
    """

    tokens: slice | Tensor
    qo_indptr: Tensor
    kv_indptr: Tensor
    slots: Tensor
    last_page_lens: Tensor
    max_q_len: int


#: The library's function for one row of the plugin: q, cache, out, rows, scale.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, LatentRows, float], None]


@dataclass(slots=True)
class LatentStep:
    """One planned step; no rows where nothing is to be attended."""

    batch: Batch
    rows: LatentRows | None


class LatentAttention:
    """The backend; `attend` is the library's function for the phases it was built for."""

    def __init__(
        self, request: BuildRequest, attend: Callable[[Tensor, Tensor, Tensor, LatentRows, float], None]
    ) -> None:
        self._request = request
        self._check_call = CallChecks(request)
        self._attend = attend
        self._compiles = Announcer("aiter")

    def plan(self, batch: Batch, *, state: LatentStep | None = None, capture: bool = False) -> LatentStep:
        """Find the rows to attend and their slots, from the host lengths.

        Raises:
            UnsupportedBatch: what the row does not declare.
        """
        form = check_batch(self._request, batch, capture=capture)
        rows = _live_rows(batch, form)
        if state is None:
            return LatentStep(batch, rows)
        state.batch, state.rows = batch, rows
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

        Raises:
            UnsupportedBatch: what the row does not declare, or a cache that is not contiguous.
        """
        batch, rows = state.batch, state.rows
        self._check_call(q, kv, layer, batch, out=out, lse=lse, new=new, q_rope=q_rope, indices=indices)
        assert kv is not None, "check_call refuses a step without a cache"
        if not kv.k.is_contiguous():
            found = f"strides {list(kv.k.stride())}"
            raise refusal(self._request, "kv.k", "a contiguous cache: the library counts rows of it", found)
        if out is None:
            out = q.new_empty(batch.num_tokens, layer.num_qo_heads, layer.v_head_dim)
        if rows is None:
            return out.zero_()
        queries = q if q_rope is None else torch.cat([q, q_rope], dim=-1)
        queries = queries[rows.tokens].contiguous()
        # the library writes its whole output as if contiguous; tokens of no row get zeros
        in_place = isinstance(rows.tokens, slice) and out[rows.tokens].is_contiguous()
        shape = (queries.shape[0], layer.num_qo_heads, layer.v_head_dim)
        answer = out[rows.tokens] if in_place else q.new_empty(shape)
        if queries.shape[0] < batch.num_tokens:
            out.zero_()
        # its modules are built when a function of theirs is first called
        with self._compiles.first("latent", batch.phase, self._request.dtype, layer.num_qo_heads, "heads"):
            self._attend(queries, kv.k.view(-1, 1, 1, layer.head_dim), answer, rows, layer.scale)
        if not in_place:
            out[rows.tokens] = answer
        return out


def _live_rows(batch: Batch, form: IndexForm) -> LatentRows | None:
    assert batch.qo_indptr_host is not None, "declared as an input"
    assert batch.kv_lens_host is not None
    starts = batch.qo_indptr_host[: batch.num_rows + 1].tolist()
    lens = batch.kv_lens_host[: batch.num_rows].tolist()
    live = [row for row in range(batch.num_rows) if starts[row + 1] > starts[row] and lens[row] > 0]
    if not live:
        return None
    device = batch.kv_lens.device
    q_lens = [starts[row + 1] - starts[row] for row in live]
    kv_lens = [lens[row] for row in live]
    row_ids = torch.tensor(live)
    of_key = torch.repeat_interleave(row_ids, torch.tensor(kv_lens))
    positions = torch.cat([torch.arange(length) for length in kv_lens])
    slots = _slots(batch.index, form, of_key.to(device), positions.to(device))
    return LatentRows(
        tokens=_tokens(live, starts, device),
        qo_indptr=_indptr(q_lens, device),
        kv_indptr=_indptr(kv_lens, device),
        slots=slots,
        last_page_lens=torch.ones(len(live), dtype=torch.int32, device=device),
        max_q_len=max(q_lens),
    )


def _slots(index: KVIndex, form: IndexForm, rows: Tensor, positions: Tensor) -> Tensor:
    """Token slots `[N]` i32 of positions of rows."""
    columns = positions // index.page_size
    if form == "page_table":
        assert index.page_table is not None
        pages = index.page_table[rows, columns]
    elif form == "csr":
        assert index.kv_indptr is not None
        assert index.kv_indices is not None
        pages = index.kv_indices[index.kv_indptr[rows].long() + columns]
    else:
        assert index.table is not None
        assert index.row_ids is not None
        pages = index.table[index.row_ids[rows], columns]
    return (pages.long() * index.page_size + positions % index.page_size).int()


def _tokens(live: list[int], starts: list[int], device: torch.device) -> slice | Tensor:
    first, last = live[0], live[-1]
    count = sum(starts[row + 1] - starts[row] for row in live)
    if starts[last + 1] - starts[first] == count:
        return slice(starts[first], starts[last + 1])
    return torch.cat([torch.arange(starts[row], starts[row + 1]) for row in live]).to(device)


def _indptr(lens: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
