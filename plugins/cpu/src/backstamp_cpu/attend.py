"""The arithmetic of `torch_native`: gathered keys and a mask to outputs, by SDPA or spelled out in fp32.

In: `q [R, S, Hq, Dk]`, `k [R, K, Hk, Dk]`, `v [R, K, Hk, Dv]` of a group of R rows, and a bool mask `[R, S, K]` or
None. Out: `[R, S, Hq, Dv]`. SDPA has no softcap, no sinks, no ALiBi in fp32 and returns no LSE: those take the
explicit path. Keys that no token sees must hold finite numbers, because both paths multiply them by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backstamp.attention import LayerSpec

__all__ = ["attend_explicitly", "attend_with_sdpa", "needs_explicit_path"]


def needs_explicit_path(layer: LayerSpec, lse_wanted: bool) -> bool:
    """Whether the layer or the call asks for something SDPA cannot answer."""
    return lse_wanted or bool(layer.softcap) or layer.sinks is not None or layer.alibi is not None


def attend_with_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attend through `scaled_dot_product_attention`; a token that sees nothing gets zeros."""
    queries, heads = q.shape[1:3]
    kv_heads = k.shape[2]
    folded = heads != kv_heads and (queries == 1 or kv_heads == 1)
    # a fold reads each key once for all its query heads; enable_gqa may copy it for every head (MLA: 128 times)
    grouped = _fold(q, kv_heads) if folded else q.transpose(1, 2)
    bias = None if mask is None else mask[:, None]
    if folded and bias is not None and queries > 1:
        bias = bias.repeat(1, 1, heads // kv_heads, 1)
    answer = scaled_dot_product_attention(
        grouped,
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        scale=scale,
        enable_gqa=not folded and heads != kv_heads,
    )
    answer = _unfold(answer, queries, heads) if folded else answer.transpose(1, 2)
    if mask is None:
        return answer
    # what an SDPA backend answers for a fully masked query differs: NaN, zeros or a mean
    return answer.masked_fill(~mask.any(2)[:, :, None, None], 0.0)


def attend_explicitly(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, distance: Tensor | None, layer: LayerSpec
) -> tuple[Tensor, Tensor]:
    """Attend in fp32, one step a line: outputs `[R, S, Hq, Dv]` and natural-log LSE `[R, S, Hq]` without the sink.

    `distance [R, S, K]` is key position less query position, needed where the layer has ALiBi slopes.
    """
    rows, queries, heads, _ = q.shape
    kv_heads, keys = k.shape[2], k.shape[1]
    logits = _fold(q.float() * layer.scale, kv_heads) @ k.float().permute(0, 2, 3, 1)
    logits = logits.view(rows, heads, queries, keys)
    if layer.softcap:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    if layer.alibi is not None:
        assert distance is not None, "ALiBi counts distances"
        logits = logits + layer.alibi.float()[None, :, None, None] * distance[:, None]
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    total = lse if layer.sinks is None else torch.logaddexp(lse, layer.sinks.float()[None, :, None])
    # a token that sees nothing has -inf everywhere: against 0 its weights are zeros, against -inf they are NaN
    weights = torch.exp(logits - torch.where(torch.isinf(total), 0.0, total)[..., None])
    grouped = weights.view(rows, kv_heads, heads // kv_heads * queries, keys)
    answer = _unfold(grouped @ v.float().transpose(1, 2), queries, heads)
    return answer, lse.transpose(1, 2)


def _fold(q: Tensor, kv_heads: int) -> Tensor:
    """`[R, S, Hq, D]` to `[R, Hk, G * S, D]`: the G query heads of one key head stand side by side."""
    rows, queries, heads, dim = q.shape
    return q.transpose(1, 2).reshape(rows, kv_heads, heads // kv_heads * queries, dim)


def _unfold(answer: Tensor, queries: int, heads: int) -> Tensor:
    """`[R, Hk, G * S, D]` back to `[R, S, Hq, D]`."""
    return answer.reshape(answer.shape[0], heads, queries, answer.shape[-1]).transpose(1, 2)
