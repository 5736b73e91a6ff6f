"""Attention of one row in float32, for the stand-ins of the libraries these tests have no machine for.

In: queries, keys, values and what each query sees. Out: outputs and natural-log LSE. A query that sees nothing gets
NaN, because what the kernels write for it is undefined; a NaN value times a probability of zero is NaN, as on a chip.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attend", "causal", "pages_of"]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`q [n, Hq, Dk]`, `k [m, Hk, Dk]`, `v [m, Hk, Dv]`, `visible [n, m]` bool: `out [n, Hq, Dv]`, `lse [n, Hq]`."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
    logits = torch.einsum("nhd,mhd->nhm", q.float(), k) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible[:, None, :], -torch.inf)
    lse = logits.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float()[None, :].expand_as(lse))
    out = torch.einsum("nhm,mhd->nhd", (logits - total[..., None]).exp(), v)
    return out.masked_fill(lse[..., None] == -torch.inf, torch.nan), lse


def causal(q_len: int, kv_len: int, window_left: int = -1) -> Tensor:
    """`[q_len, kv_len]` bool: keys up to each query's own place, and from its window on."""
    place = torch.arange(kv_len - q_len, kv_len)[:, None]
    keys = torch.arange(kv_len)[None, :]
    seen = keys <= place
    return seen & (keys >= place - window_left) if window_left >= 0 else seen


def pages_of(cache: Tensor, ids: Tensor, kv_len: int) -> Tensor:
    """The first `kv_len` tokens of the pages `ids` names: `[kv_len, ...]`. Ids past them are never looked at."""
    page_size = cache.shape[1]
    used = ids[: -(-kv_len // page_size)].long()
    assert used.numel() * page_size >= kv_len, "the page table is too narrow for the row"
    assert bool(((used >= 0) & (used < cache.shape[0])).all()), "a page outside the cache"
    return cache[used].flatten(0, 1)[:kv_len]
