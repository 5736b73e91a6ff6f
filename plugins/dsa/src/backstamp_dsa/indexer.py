"""The indexer of DeepSeek sparse attention: which keys each token attends over.

In: index queries `[T, Hi, Di]`, their weights `[T, Hi]` f32, the paged index keys, a planned step. Out: `indices
[T, topk]` i32 in request space, best first, -1 where a token sees fewer keys. logits[t, n] is the sum over heads of
weights[t, h] * relu(q[t, h] . k[n]), over the keys a causal token may see; whatever factors a model puts on them are
in the weights. It never loads a key past a row's end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstamp.attention import PagedKV
from backstamp.factories import BuildRequest
from backstamp.jit_notice import compiling
from backstamp.step_checks import refusal
from backstamp_dsa.configs import logits_config
from backstamp_dsa.portable import chip_of
from backstamp_dsa.queries import flat_rows
from backstamp_dsa.slots import page_ids_of
from backstamp_dsa.steps import SparseStep

__all__ = ["DsaIndexer", "index_logits"]

#: Logits held at once: 256 MiB of f32.
LOGITS_PER_LAUNCH = 64 << 20


class DsaIndexer:
    """Chooses keys for `DsaAttention.forward`, by our own logits kernel and torch's top-k."""

    def __init__(self, request: BuildRequest) -> None:
        self._arch, _ = chip_of(request)
        self._request = request

    def select(
        self, q: Tensor, weights: Tensor, keys: PagedKV, state: SparseStep, topk: int, *, out: Tensor | None = None
    ) -> Tensor:
        """Choose `topk` keys a token.

        `q [T, Hi, Di]` and `keys.k [P, page_size, 1, Di]` have one dtype, Hi and Di are powers of two of at least 16;
        the pages are those of the attention's cache. `out [T, topk]` i32 is written in place and returned.

        Raises:
            UnsupportedBatch: shapes, dtypes or strides other than these.
        """
        batch = state.batch
        self._check(q, weights, keys, state)
        if out is None:
            out = torch.empty(q.shape[0], topk, dtype=torch.int32, device=q.device)
        if batch.num_rows == 0 or batch.num_tokens == 0:
            return out.fill_(-1)
        width = max(1, batch.max_kv_len)
        most = min(topk, width)
        for start in range(0, batch.num_tokens, max(1, LOGITS_PER_LAUNCH // width)):
            stop = min(batch.num_tokens, start + max(1, LOGITS_PER_LAUNCH // width))
            with compiling("dsa", f"indexer {self._request.dtype} {state.form}"):
                logits = self._logits(q, weights, keys, state, start, stop, width)
            best = torch.topk(logits, most, dim=-1)
            chosen = best.indices.masked_fill(best.values == float("-inf"), -1)
            out[start:stop, :most] = chosen
        out[:, most:] = -1
        return out

    def _logits(
        self, q: Tensor, weights: Tensor, keys: PagedKV, state: SparseStep, start: int, stop: int, width: int
    ) -> Tensor:
        """Logits `[stop - start, width]` f32 of a run of tokens, -inf where a token may not look."""
        batch = state.batch
        rows, slots_per_page = flat_rows(self._request, "keys.k", keys.k)
        ids, starts, stride = page_ids_of(batch, state.form)
        config = logits_config(self._arch, q.element_size())
        logits = torch.empty(stop - start, width, dtype=torch.float32, device=q.device)
        index_logits[(stop - start, triton.cdiv(width, config.block_n))](
            q,
            weights,
            rows,
            logits,
            batch.qo_indptr,
            batch.kv_lens,
            ids,
            starts,
            batch.num_rows,
            start,
            width,
            q.stride(0),
            q.stride(1),
            weights.stride(0),
            weights.stride(1),
            rows.stride(0),
            logits.stride(0),
            stride,
            self._request.page_size,
            slots_per_page,
            HEADS=q.shape[1],
            DIM=q.shape[2],
            INDEX=state.form,
            CAUSAL=batch.causal is True,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        return logits

    def _check(self, q: Tensor, weights: Tensor, keys: PagedKV, state: SparseStep) -> None:
        tokens = state.batch.num_tokens
        heads, dim = (q.shape[1], q.shape[2]) if q.dim() == 3 else (0, 0)
        for field, fits, needed, found in (
            ("q", q.dim() == 3 and q.shape[0] == tokens, f"[{tokens}, Hi, Di]", list(q.shape)),
            ("q", _is_block(heads) and _is_block(dim), "Hi and Di powers of two, at least 16", list(q.shape)),
            ("weights", tuple(weights.shape) == (tokens, heads), f"[{tokens}, {heads}]", list(weights.shape)),
            ("weights", weights.dtype is torch.float32, "torch.float32", weights.dtype),
            ("keys.k", keys.k.dtype is q.dtype, f"{q.dtype}, as the queries", keys.k.dtype),
            ("keys.k", keys.k.shape[-1] == dim, f"keys of {dim} numbers", list(keys.k.shape)),
            ("keys.k", keys.k.shape[1] == self._request.page_size, f"pages of {self._request.page_size}", keys.k.shape),
            ("q", q.stride(-1) == 1, "a last stride of 1", list(q.stride())),
        ):
            if not fits:
                raise refusal(self._request, f"indexer {field}", needed, str(found), phase=state.batch.phase)


def _is_block(size: int) -> bool:
    return size >= 16 and size & (size - 1) == 0


@triton.jit(do_not_specialize=["num_rows", "first_token", "width"])
def index_logits(
    q_ptr,
    weights_ptr,
    rows_ptr,
    logits_ptr,
    qo_indptr,
    kv_lens,
    page_ids,
    page_rows,
    num_rows,
    first_token,
    width,
    q_stride_t,
    q_stride_h,
    weights_stride_t,
    weights_stride_h,
    rows_stride,
    logits_stride,
    page_ids_stride,
    page_size,
    slots_per_page,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Logits of one token over one block of its row's keys; grid (tokens, key blocks)."""
    token = first_token + tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = 0
    above = num_rows
    while row < above:
        middle = (row + above + 1) // 2
        begins = tl.load(qo_indptr + middle).to(tl.int32) <= token
        row = tl.where(begins, middle, row)
        above = tl.where(begins, above, middle - 1)
    real = row < num_rows
    start = tl.load(qo_indptr + row).to(tl.int32)
    stop = tl.load(qo_indptr + row + 1, mask=real, other=0).to(tl.int32)
    kv_len = tl.load(kv_lens + row, mask=real, other=0).to(tl.int32)
    limit = kv_len
    if CAUSAL:
        limit = tl.minimum(kv_len, kv_len - (stop - start) + (token - start) + 1)
    ids = page_ids
    if INDEX == "page_table":
        ids += row.to(tl.int64) * page_ids_stride
    elif INDEX == "indirect":
        ids += tl.load(page_rows + row, mask=real, other=0).to(tl.int64) * page_ids_stride
    else:
        ids += tl.load(page_rows + row, mask=real, other=0).to(tl.int64)
    live = n < tl.where(real, limit, 0)
    page = tl.load(ids + n // page_size, mask=live, other=0).to(tl.int64)
    rows = rows_ptr + (page * slots_per_page + n % page_size) * rows_stride
    h = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    q = tl.load(q_ptr + token.to(tl.int64) * q_stride_t + h[:, None] * q_stride_h + d[None, :])
    k = tl.load(rows[:, None] + d[None, :], mask=live[:, None], other=0.0)
    scores = tl.maximum(tl.dot(q, tl.trans(k), input_precision="ieee"), 0.0)
    weights = tl.load(weights_ptr + token.to(tl.int64) * weights_stride_t + h * weights_stride_h)
    total = tl.sum(scores * weights[:, None], 0)
    out = logits_ptr + tl.program_id(0).to(tl.int64) * logits_stride + n
    tl.store(out, tl.where(live, total, float("-inf")), mask=n < width)
