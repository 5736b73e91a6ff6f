"""Reference attention in float64: the truth every kernel is checked against.

In: the call contract's `Batch`, caches, queries and `LayerSpec`. Out: float64 outputs and natural-log LSE on the CPU.
Written for reading, one request at a time, one mask, no tricks; it shares no code with any backend.

.. versionadded:: 0.1
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstamp.attention import Batch, KVIndex, LayerSpec, PagedKV, RaggedKV, TreeMask

__all__ = ["gather_row", "reference_attention", "relative_error", "row_pages", "tree_rows"]


def reference_attention(
    q: Tensor,
    kv: PagedKV | None,
    layer: LayerSpec,
    batch: Batch,
    *,
    new: RaggedKV | None = None,
    q_rope: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend a whole batch in float64.

    `q [T, Hq, Dk]` any dtype; returns `out [T, Hq, Dv]` and `lse [T, Hq]`, float64 on the CPU. Tokens that see
    nothing, pad rows included, get zeros and -inf. Sinks enter the output and stay out of the LSE.
    """
    q = q.double().cpu() if q_rope is None else torch.cat([q, q_rope], dim=-1).double().cpu()
    out = torch.zeros(q.shape[0], layer.num_qo_heads, layer.v_head_dim, dtype=torch.float64)
    lse = torch.full((q.shape[0], layer.num_qo_heads), float("-inf"), dtype=torch.float64)
    offsets = batch.qo_indptr.cpu().tolist()
    kv_lens = batch.kv_lens.cpu().tolist()
    for row in range(batch.num_rows):
        start, stop = offsets[row], offsets[row + 1]
        if stop == start or kv_lens[row] == 0:
            continue
        keys, values = _row_keys_values(row, kv, layer, batch, kv_lens[row], stop - start, new)
        visible = _visible(row, layer, batch, stop - start, kv_lens[row])
        out[start:stop], lse[start:stop] = _attend(q[start:stop], keys, values, visible, layer)
    return out, lse


def relative_error(answer: Tensor, truth: Tensor) -> float:
    """The norm of the difference over the norm of the truth; NaN in the answer gives NaN, which passes no bound."""
    answer, truth = answer.double().cpu(), truth.double().cpu()
    scale = truth.norm().item()
    return float((answer - truth).norm() / (scale if scale > 0 else 1.0))


def row_pages(index: KVIndex, row: int, kv_len: int) -> list[int]:
    """The page ids of one row, in order, from whichever index form is present."""
    count = -(-kv_len // index.page_size)
    if index.page_table is not None:
        return [int(page) for page in index.page_table[row, :count].tolist()]
    if index.kv_indptr is not None and index.kv_indices is not None:
        start = int(index.kv_indptr[row])
        return [int(page) for page in index.kv_indices[start : start + count].tolist()]
    if index.table is not None and index.row_ids is not None:
        return [int(page) for page in index.table[int(index.row_ids[row]), :count].tolist()]
    raise ValueError("KVIndex: needs page_table, kv_indptr with kv_indices, or table with row_ids; got none of them")


def gather_row(cache: Tensor, index: KVIndex, row: int, kv_len: int) -> Tensor:
    """One row's cached tokens `[kv_len, Hk, D]` from a cache `[P, page_size, Hk, D]`."""
    pages = torch.tensor(row_pages(index, row, kv_len), dtype=torch.long, device=cache.device)
    return cache[pages].flatten(0, 1)[:kv_len]


def tree_rows(tree: TreeMask, row: int, q_len: int, kv_len: int) -> Tensor:
    """Which of its step's tokens each token of one row sees: bool `[q_len, q_len]` on the CPU."""
    buffer = tree.buffer.cpu()
    if tree.kind == "qlen":
        return buffer[row, :q_len, :q_len].bool()
    assert tree.indptr is not None, "full and packed tree masks need indptr"
    start = int(tree.indptr[row])
    if tree.kind == "full":
        flat = buffer[start : start + q_len * kv_len]
    else:
        bits = torch.arange(q_len * kv_len)
        flat = (buffer[start + bits // 8] >> (bits % 8)) & 1
    return flat.reshape(q_len, kv_len)[:, kv_len - q_len :].bool()


def _row_keys_values(
    row: int, kv: PagedKV | None, layer: LayerSpec, batch: Batch, kv_len: int, q_len: int, new: RaggedKV | None
) -> tuple[Tensor, Tensor]:
    keys, values = [], []
    if new is not None:
        start, stop = int(new.kv_indptr[row]), int(new.kv_indptr[row + 1])
        cached = kv_len - (stop - start)
    else:
        cached = kv_len
    if kv is not None and cached > 0:
        k = gather_row(kv.k, batch.index, row, cached).double().cpu() * _scale(kv.k_scale)
        keys.append(k)
        if kv.v is None:
            values.append(k[..., : layer.v_head_dim])
        else:
            values.append(gather_row(kv.v, batch.index, row, cached).double().cpu() * _scale(kv.v_scale))
    if new is not None:
        keys.append(new.k[start:stop].double().cpu())
        values.append(new.v[start:stop].double().cpu())
    return torch.cat(keys), torch.cat(values)


def _scale(scale: float | Tensor | None) -> float | Tensor:
    if scale is None:
        return 1.0
    return scale.double().cpu() if isinstance(scale, Tensor) else scale


def _visible(row: int, layer: LayerSpec, batch: Batch, q_len: int, kv_len: int) -> Tensor:
    """Bool `[q_len, kv_len]`: the causal rule or the tree, then the window, then left padding."""
    keys = torch.arange(kv_len)
    positions = torch.arange(q_len) + kv_len - q_len
    key_positions = keys
    causal = batch.causal if isinstance(batch.causal, bool) else bool(int(batch.causal[row]))
    visible = keys[None, :] <= positions[:, None] if causal else torch.ones(q_len, kv_len, dtype=torch.bool)
    if batch.tree is not None:
        tree = tree_rows(batch.tree, row, q_len, kv_len)
        visible = torch.cat([torch.ones(q_len, kv_len - q_len, dtype=torch.bool), tree], dim=1)
        positions = kv_len - q_len + tree.sum(1) - 1
        key_positions = torch.cat([torch.arange(kv_len - q_len), positions])
    if layer.window_left >= 0:
        visible = visible & (positions[:, None] - key_positions[None, :] <= layer.window_left)
    if batch.kv_starts is not None:
        visible = visible & (keys[None, :] >= int(batch.kv_starts[row]))
    return visible


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, layer: LayerSpec) -> tuple[Tensor, Tensor]:
    share = layer.num_qo_heads // layer.num_kv_heads
    keys = keys.repeat_interleave(share, dim=1)
    values = values.repeat_interleave(share, dim=1)
    logits = torch.einsum("qhd,khd->qhk", q, keys) * layer.scale
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    if layer.alibi is not None:
        distance = (
            torch.arange(keys.shape[0])[None, :] - (torch.arange(q.shape[0]) + keys.shape[0] - q.shape[0])[:, None]
        )
        logits = logits + layer.alibi.double().cpu()[None, :, None] * distance[:, None, :]
    logits = logits.masked_fill(~visible[:, None, :], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    total = lse
    if layer.sinks is not None:
        total = torch.logaddexp(lse, layer.sinks.double().cpu()[None, :])
    weights = torch.where(torch.isinf(total)[..., None], 0.0, torch.exp(logits - total[..., None]))
    # a key no token sees may be padding that holds NaN, and 0 * NaN is NaN
    values = torch.where(visible.any(0)[:, None, None], values, 0.0)
    return torch.einsum("qhk,khd->qhd", weights.nan_to_num(0.0), values), lse
