"""`intel_amx`: paged attention in bf16 matrix products that oneDNN runs on a CPU's AMX tiles.

In: the call contract, queries and caches in bf16. Out: outputs in place. Rows, masks and the gather are
`torch_native`'s; the arithmetic is here, in blocks of keys: both products in bf16 with fp32 sums, the softmax in fp32.
Never takes SDPA or fp32 products instead. The numbers are right on any CPU; AMX makes them fast, and `backend.py`
refuses to build the kernel where AMX is out of reach.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp_cpu.native import Arithmetic, TorchNative

__all__ = ["BLOCK_KEYS", "IntelAmx", "attend_in_blocks"]

#: Keys a block: 512 keys of 128 bf16 numbers are 128 KiB, which stay in the second-level cache between two products.
BLOCK_KEYS = 512


class IntelAmx(TorchNative):
    """The backend; what it serves and refuses is `torch_native`'s, in bf16 alone."""

    def arithmetic(self, layer: LayerSpec, lse_wanted: bool) -> tuple[Arithmetic, torch.dtype]:
        """One way for every layer: softcap, sinks, ALiBi and the LSE are all steps of it."""
        return attend_in_blocks, torch.bfloat16


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, distance: Tensor | None, layer: LayerSpec
) -> tuple[Tensor, Tensor]:
    """Attend a group block by block, as `backstamp_cpu.native.Arithmetic`; a token that sees nothing gets zeros."""
    rows, queries, heads, head_dim = q.shape
    num_keys, kv_heads = k.shape[1:3]
    share = heads // kv_heads
    products = rows * kv_heads
    # the query heads of one key head stand side by side: each key is multiplied once for all of them
    grouped = q.transpose(1, 2).reshape(products, share * queries, head_dim)
    slopes = None if layer.alibi is None else _per_query(layer.alibi.float(), rows, queries, products)
    top = q.new_full((products, share * queries, 1), float("-inf"), dtype=torch.float32)
    total = torch.zeros_like(top)
    summed = top.new_zeros(products, share * queries, v.shape[-1])
    for start in range(0, num_keys, BLOCK_KEYS):
        block = slice(start, min(start + BLOCK_KEYS, num_keys))
        logits = _products_in_fp32(grouped, _by_head(k[:, block])).mul_(layer.scale)
        if layer.softcap:
            logits = layer.softcap * torch.tanh(logits / layer.softcap)
        if slopes is not None:
            assert distance is not None, "ALiBi counts distances"
            logits = logits + slopes * _for_heads(distance[:, :, block], kv_heads, share)
        if mask is not None:
            logits = logits.masked_fill(~_for_heads(mask[:, :, block], kv_heads, share), float("-inf"))
        higher = torch.maximum(top, logits.amax(-1, keepdim=True))
        # against 0 the weights of a token that has seen nothing yet are zeros; against -inf they are NaN
        base = torch.where(torch.isinf(higher), 0.0, higher)
        weights = torch.exp(logits - base)
        kept = torch.exp(top - base)
        total = total * kept + weights.sum(-1, keepdim=True)
        summed = summed * kept + torch.bmm(weights.bfloat16(), _by_head(v[:, block]))
        top = higher
    lse = top + torch.log(total)
    answer = summed / torch.where(total > 0, total, 1.0)
    if layer.sinks is not None:
        sinks = _per_query(layer.sinks.float(), rows, queries, products)
        answer = answer * torch.exp(lse - torch.logaddexp(lse, sinks))
    answer = answer.reshape(rows, heads, queries, -1).transpose(1, 2)
    return answer, lse.reshape(rows, heads, queries).transpose(1, 2)


def _products_in_fp32(q: Tensor, k: Tensor) -> Tensor:
    """`q k^T` of `[N, M, D]` and `[N, K, D]` in bf16, as fp32 `[N, M, K]`.

    A bf16 product of torch sums in fp32 and answers in bf16, which moves a logit of 20 by 0.04. What the rounding took
    away is a second product, whose sum starts at minus the first; both together miss 3e-6 of the logits.
    """
    transposed = k.transpose(1, 2)
    rounded = torch.bmm(q, transposed)
    return rounded.float() + torch.baddbmm(rounded, q, transposed, beta=-1)


def _by_head(keys: Tensor) -> Tensor:
    """`[R, K, Hk, D]` to `[R * Hk, K, D]`."""
    return keys.transpose(1, 2).reshape(-1, keys.shape[1], keys.shape[3])


def _for_heads(bits: Tensor, kv_heads: int, share: int) -> Tensor:
    """`[R, S, K]` to `[R * Hk, G * S, K]`: every head of a row sees the same."""
    rows, queries, keys = bits.shape
    return bits[:, None, None].expand(rows, kv_heads, share, queries, keys).reshape(rows * kv_heads, -1, keys)


def _per_query(by_head: Tensor, rows: int, queries: int, products: int) -> Tensor:
    """One number a query head `[Hq]` to `[R * Hk, G * S, 1]`."""
    return by_head[None, :, None].expand(rows, -1, queries).reshape(products, -1, 1)
