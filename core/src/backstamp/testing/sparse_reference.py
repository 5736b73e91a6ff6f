"""Reference of sparse attention: index logits, the choice of keys, attention over it; the truth sparse kernels meet.

In: the call contract's `Batch`, caches, queries, and choices in request space (a position of a token's own request,
-1 none). Out: results on the CPU, in float64 unless asked for float32. Written for reading, one token at a time, no
tricks; it shares no code with any backend. A choice that is -1, past the row or ahead of a causal token is not seen.

.. versionadded:: 0.2
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstamp.attention import Batch, LayerSpec, PagedKV
from backstamp.testing.reference import gather_row, row_pages

__all__ = ["reference_compressed", "reference_indexer", "reference_sparse", "reference_topk", "visible_lengths"]


def reference_indexer(
    q: Tensor, weights: Tensor, keys: PagedKV, batch: Batch, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Logits `[T, max_kv_len]`: for a key, the sum over index heads of weight times relu(query . key).

    `q [T, Hi, Di]`, `weights [T, Hi]`, `keys.k [P, page_size, 1, Di]` under the batch's index; -inf where a token may
    not look. Source: DeepSeek-V3.2-Exp's report, equation 1.
    """
    q, weights = q.cpu().to(dtype), weights.cpu().to(dtype)
    logits = torch.full((q.shape[0], max(1, batch.max_kv_len)), float("-inf"), dtype=dtype)
    rows, lengths = _rows_of_tokens(batch), visible_lengths(batch)
    for token, row in enumerate(rows):
        length = lengths[token]
        if length == 0:
            continue
        seen = gather_row(keys.k, batch.index, row, length)[:, 0].cpu().to(dtype)
        scores = torch.relu(q[token] @ seen.T)
        logits[token, :length] = weights[token] @ scores
    return logits


def reference_topk(logits: Tensor, topk: int) -> Tensor:
    """The `topk` best keys of each token, best first, `[T, topk]` i32, -1 where a token sees fewer."""
    chosen = torch.full((logits.shape[0], topk), -1, dtype=torch.int32)
    for token, row in enumerate(logits.cpu()):
        order = torch.argsort(row, descending=True, stable=True)[:topk]
        order = order[row[order] > float("-inf")]
        chosen[token, : len(order)] = order.to(torch.int32)
    return chosen


def reference_sparse(
    q: Tensor,
    kv: PagedKV,
    layer: LayerSpec,
    batch: Batch,
    indices: Tensor,
    *,
    q_rope: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attend over `indices [T, topk]` of a latent cache: `out [T, Hq, Dv]` and natural-log `lse [T, Hq]`.

    A key chosen twice counts twice, as every kernel has it. Tokens that see nothing get zeros and -inf.
    """
    q = q.cpu() if q_rope is None else torch.cat([q, q_rope], dim=-1).cpu()
    out, lse = _empty(q, layer, dtype)
    rows, lengths = _rows_of_tokens(batch), visible_lengths(batch)
    for token, row in enumerate(rows):
        chosen = [at for at in indices[token].tolist() if 0 <= at < lengths[token]]
        if chosen:
            keys = gather_row(kv.k, batch.index, row, lengths[token])[:, 0].cpu().to(dtype)[chosen]
            out[token], lse[token] = _attend(q[token].to(dtype), keys, layer)
    return out, lse


def reference_compressed(
    q: Tensor,
    kv: PagedKV,
    layer: LayerSpec,
    batch: Batch,
    indices: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attend over a window of plain entries and over compressed ones, one softmax, the sink in it once.

    `kv.k [P, page_size, 1, D]` are plain entries, `kv.v [P, page_size / rate, 1, D]` compressed ones or None.
    `indices [T, topk]` choose compressed entries, None means all; one is seen once all its `rate` tokens are.
    """
    q = q.cpu()
    out, lse = _empty(q, layer, dtype)
    rows, lengths = _rows_of_tokens(batch), _positions(batch)
    rate = 1 if kv.v is None else batch.index.page_size // kv.v.shape[1]
    for token, row in enumerate(rows):
        length = lengths[token]
        if length == 0:
            continue
        near = gather_row(kv.k, batch.index, row, length)[:, 0].cpu().to(dtype)
        parts = [near[max(0, length - layer.window_left - 1) :]]
        if kv.v is not None and length >= rate:
            pages = torch.tensor(row_pages(batch.index, row, length), device=kv.v.device)
            # both caches lie under one page table
            far = kv.v[pages].flatten(0, 1)[: length // rate, 0].cpu().to(dtype)
            chosen = range(len(far)) if indices is None else indices[token].tolist()
            parts.append(far[[at for at in chosen if 0 <= at < len(far)]])
        out[token], lse[token] = _attend(q[token].to(dtype), torch.cat(parts), layer)
    return out, lse


def visible_lengths(batch: Batch) -> list[int]:
    """How many of its row's first tokens each token may see; 0 for tokens of no row."""
    if batch.causal is True:
        return _positions(batch)
    kv_lens = batch.kv_lens.cpu().tolist()
    return [0 if row < 0 else kv_lens[row] for row in _rows_of_tokens(batch)]


def _positions(batch: Batch) -> list[int]:
    """Each token's position in its row, plus one; 0 for tokens of no row."""
    offsets, kv_lens = batch.qo_indptr.cpu().tolist(), batch.kv_lens.cpu().tolist()
    rows = _rows_of_tokens(batch)
    return [
        0 if row < 0 else max(0, kv_lens[row] - (offsets[row + 1] - offsets[row]) + token - offsets[row] + 1)
        for token, row in enumerate(rows)
    ]


def _rows_of_tokens(batch: Batch) -> list[int]:
    """The row of each token, -1 for padding tokens."""
    offsets = batch.qo_indptr.cpu().tolist()
    rows = [-1] * batch.num_tokens
    for row in range(batch.num_rows):
        rows[offsets[row] : offsets[row + 1]] = [row] * (offsets[row + 1] - offsets[row])
    return rows


def _empty(q: Tensor, layer: LayerSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape[0], layer.num_qo_heads, layer.v_head_dim, dtype=dtype)
    return out, torch.full((q.shape[0], layer.num_qo_heads), float("-inf"), dtype=dtype)


def _attend(q: Tensor, keys: Tensor, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    """One token `q [Hq, D]` over `keys [n, D]`, whose first Dv numbers are the values."""
    logits = q @ keys.T * layer.scale
    lse = torch.logsumexp(logits, dim=-1)
    total = lse if layer.sinks is None else torch.logaddexp(lse, layer.sinks.cpu().to(q.dtype))
    return torch.exp(logits - total[:, None]) @ keys[:, : layer.v_head_dim], lse
