"""The kernel: one program a query token and head, over pages, with a running softmax."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from backstamp.attention import Batch, LayerSpec

__all__ = ["attend"]

_KEYS = 32


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: Tensor, batch: Batch, layer: LayerSpec) -> None:
    """`q [T, Hq, D]` over caches `[P, page, Hk, D]` to `out [T, Hq, D]`; `rows [T]` i32 is -1 for a token of none."""
    table = batch.index.page_table
    assert table is not None
    _attend[(q.shape[0], layer.num_qo_heads)](
        q,
        k,
        v,
        out,
        rows,
        batch.qo_indptr,
        batch.kv_lens,
        table,
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:2],
        table.stride(0),
        layer.scale,
        layer.softcap,
        layer.window_left,
        SHARE=layer.num_qo_heads // layer.num_kv_heads,
        PAGE=k.shape[1],
        DIM=layer.head_dim,
        KEYS=_KEYS,
        SOFTCAP=layer.softcap > 0,
        WINDOW=layer.window_left >= 0,
    )


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    rows_ptr,
    qo_indptr,
    kv_lens,
    table,
    q_token,
    q_head,
    k_page,
    k_slot,
    k_head,
    v_page,
    v_slot,
    v_head,
    out_token,
    out_head,
    table_row,
    scale,
    softcap,
    window_left,
    SHARE: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, DIM)
    row = tl.load(rows_ptr + token)
    here = row >= 0
    stop = tl.load(qo_indptr + row + 1, mask=here, other=0)
    # one past the last key this token sees
    end = tl.load(kv_lens + row, mask=here, other=0) - (stop - token) + 1
    end = tl.where(here, end, 0)
    query = tl.load(q_ptr + token * q_token + head * q_head + dims).to(tl.float32)
    top = -float("inf")
    total = 0.0
    summed = tl.zeros([DIM], dtype=tl.float32)
    for start in range(0, end, KEYS):
        at = start + tl.arange(0, KEYS)
        seen = at < end
        if WINDOW:
            seen = seen & (at >= end - 1 - window_left)
        page = tl.load(table + row * table_row + at // PAGE, mask=seen, other=0).to(tl.int64)
        slot = at % PAGE
        k_at = page * k_page + slot * k_slot + (head // SHARE) * k_head
        v_at = page * v_page + slot * v_slot + (head // SHARE) * v_head
        keys = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=seen[:, None], other=0.0).to(tl.float32)
        logits = tl.sum(keys * query[None, :], axis=1) * scale
        if SOFTCAP:
            # tanh by exp, which every version has
            logits = softcap * (1 - 2 / (tl.exp(2 * logits / softcap) + 1))
        logits = tl.where(seen, logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(logits - base)
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(weights, axis=0)
        summed = summed * kept + tl.sum(weights[:, None] * values, axis=0)
        top = higher
    answer = summed / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + token * out_token + head * out_head + dims, answer.to(out_ptr.dtype.element_ty))
