"""Reference of sparse attention: index logits, the choice of keys, attention over it; the truth sparse kernels meet.

In: the call contract's `Batch`, caches, queries, and choices in request space (a position of a token's own request,
-1 none). Out: results on the CPU, in float64 unless asked for float32. Written for reading, one token at a time, no
tricks; it shares no code with any backend. A choice that is -1, past the row or ahead of a causal token is not seen.

.. versionadded:: 0.2
"""

from __future__ import annotations

from collections.abc import Iterator

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
    lengths = visible_lengths(batch)
    for row, kv_len, tokens in _rows(batch):
        seen = gather_row(keys.k, batch.index, row, kv_len)[:, 0].cpu().to(dtype)
        for token in tokens:
            scores = torch.relu(q[token] @ seen[: lengths[token]].T)
            logits[token, : lengths[token]] = weights[token] @ scores
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
    lengths = visible_lengths(batch)
    for row, kv_len, tokens in _rows(batch):
        keys = gather_row(kv.k, batch.index, row, kv_len)[:, 0].cpu().to(dtype)
        for token in tokens:
            chosen = [at for at in indices[token].tolist() if 0 <= at < lengths[token]]
            if chosen:
                out[token], lse[token] = _attend(q[token].to(dtype), keys[chosen], layer)
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
    lengths = _positions(batch)
    rate = 1 if kv.v is None else batch.index.page_size // kv.v.shape[1]
    for row, kv_len, tokens in _rows(batch):
        near = gather_row(kv.k, batch.index, row, kv_len)[:, 0].cpu().to(dtype)
        far = near[:0]
        if kv.v is not None:
            # both caches lie under one page table
            pages = torch.tensor(row_pages(batch.index, row, kv_len), device=kv.v.device)
            far = kv.v[pages].flatten(0, 1)[: kv_len // rate, 0].cpu().to(dtype)
        for token in tokens:
            length = lengths[token]
            chosen = range(length // rate) if indices is None else indices[token].tolist()
            entries = far[[at for at in chosen if 0 <= at < length // rate]] if kv.v is not None else far
            keys = torch.cat([near[max(0, length - layer.window_left - 1) : length], entries])
            if len(keys):
                out[token], lse[token] = _attend(q[token].to(dtype), keys, layer)
    return out, lse


def visible_lengths(batch: Batch) -> list[int]:
    """How many of its row's first tokens each token may see; 0 for tokens of no row."""
    lengths = _positions(batch)
    if batch.causal is not True:
        for _, kv_len, tokens in _rows(batch):
            lengths[tokens.start : tokens.stop] = [kv_len] * len(tokens)
    return lengths


def _positions(batch: Batch) -> list[int]:
    """Each token's position in its row, plus one; 0 for tokens of no row."""
    lengths = [0] * batch.num_tokens
    for _, kv_len, tokens in _rows(batch):
        for token in tokens:
            lengths[token] = max(0, kv_len - (tokens.stop - token) + 1)
    return lengths


def _rows(batch: Batch) -> Iterator[tuple[int, int, range]]:
    """Each row that has keys: its number, its length, its tokens."""
    offsets, kv_lens = batch.qo_indptr.cpu().tolist(), batch.kv_lens.cpu().tolist()
    for row in range(batch.num_rows):
        if kv_lens[row]:
            yield row, kv_lens[row], range(offsets[row], offsets[row + 1])


def _empty(q: Tensor, layer: LayerSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q.shape[0], layer.num_qo_heads, layer.v_head_dim, dtype=dtype)
    return out, torch.full((q.shape[0], layer.num_qo_heads), float("-inf"), dtype=dtype)


def _attend(q: Tensor, keys: Tensor, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    """One token `q [Hq, D]` over `keys [n, D]`, whose first Dv numbers are the values."""
    logits = q @ keys.T * layer.scale
    lse = torch.logsumexp(logits, dim=-1)
    total = lse if layer.sinks is None else torch.logaddexp(lse, layer.sinks.cpu().to(q.dtype))
    return torch.exp(logits - total[:, None]) @ keys[:, : layer.v_head_dim], lse
