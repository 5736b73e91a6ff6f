"""The Triton kernel before flashinfer's prefill: heads over their norms, gates as the factors the library takes.

In: queries and keys as the convolution left them, raw or computed gates, and the device's count of tokens. Out: packed
queries and keys in their dtype, decay and beta in fp32, and zeros in the outputs of tokens of no row. One launch reads
and writes each of them once; the library's own preparation is a launch for the norms and a dozen for the gates. It
reads the count on the device and never waits for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstamp.attention import ComputedGates, RawGates

__all__ = ["Prepared", "prepare_tokens"]

#: Heads of queries and of keys a program takes: 16 KiB of each at 128 channels of 16 bits.
_HEADS = 64


class Prepared(NamedTuple):
    """`q`, `k [T, H, K]` of length one, and fp32 `decay`, `beta [T, HV]`; all packed, the decay as a factor."""

    q: Tensor
    k: Tensor
    decay: Tensor
    beta: Tensor


def prepare_tokens(q: Tensor, k: Tensor, gates: RawGates | ComputedGates, ends: Tensor, out: Tensor) -> Prepared:
    """Prepare the tokens of `q`; `out [T, HV, V]` is zeroed from token `ends[-1]` on.

    `q`, `k`, and `out` have a last stride of 1. A head's factor is `1 / sqrt(sum(x * x) + 1e-6)`, in fp32.
    """
    tokens, heads, dim = q.shape
    value_heads, value_dim = out.shape[1:]
    a, b = (gates.a, gates.b) if isinstance(gates, RawGates) else (gates.g, gates.beta)
    made = Prepared(
        q=torch.empty(q.shape, dtype=q.dtype, device=q.device),
        k=torch.empty(k.shape, dtype=k.dtype, device=k.device),
        decay=torch.empty(tokens, value_heads, dtype=torch.float32, device=q.device),
        beta=torch.empty(tokens, value_heads, dtype=torch.float32, device=q.device),
    )
    gates_each = triton.cdiv(_HEADS * value_heads, heads)
    _prepare[(triton.cdiv(tokens * heads, _HEADS),)](
        q,
        k,
        a,
        b,
        gates.A_log if isinstance(gates, RawGates) else None,
        gates.dt_bias if isinstance(gates, RawGates) else None,
        ends,
        *made,
        out,
        ends.shape[0] - 1,
        tokens,
        *q.stride()[:2],
        *k.stride()[:2],
        *a.stride(),
        *b.stride(),
        *out.stride()[:2],
        HEADS=heads,
        VALUE_HEADS=value_heads,
        K=dim,
        V=value_dim,
        EACH=_HEADS,
        GATES=gates_each,
        BLOCK_K=triton.next_power_of_2(dim),
        BLOCK_V=triton.next_power_of_2(value_dim),
        BLOCK_GATES=triton.next_power_of_2(gates_each),
        RAW=isinstance(gates, RawGates),
        num_warps=4,
    )
    return made


@triton.jit
def _to_unit(
    x_ptr, out_ptr, at, there, stride_token, stride_head, HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Heads `at`, counted over all tokens, over their norms."""
    ks = tl.arange(0, BLOCK_K)
    mask = there[:, None] & (ks < K)[None, :]
    source = (at // HEADS) * stride_token + (at % HEADS) * stride_head
    x = tl.load(x_ptr + source[:, None] + ks[None, :], mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
    tl.store(out_ptr + (at * K)[:, None] + ks[None, :], x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _prepare(
    q_ptr,
    k_ptr,
    a_ptr,
    b_ptr,
    rate_ptr,
    bias_ptr,
    ends_ptr,
    q_out_ptr,
    k_out_ptr,
    decay_ptr,
    beta_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    q_stride_token,
    q_stride_head,
    k_stride_token,
    k_stride_head,
    a_stride_token,
    a_stride_head,
    b_stride_token,
    b_stride_head,
    out_stride_token,
    out_stride_head,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    EACH: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_GATES: tl.constexpr,
    RAW: tl.constexpr,
):
    """Program i takes heads `[i * EACH, (i + 1) * EACH)` of queries and keys, and as many tokens' gates and outputs."""
    first = tl.program_id(0).to(tl.int64)
    at = first * EACH + tl.arange(0, EACH)
    there = at < num_tokens.to(tl.int64) * HEADS
    _to_unit(q_ptr, q_out_ptr, at, there, q_stride_token, q_stride_head, HEADS, K, BLOCK_K)
    _to_unit(k_ptr, k_out_ptr, at, there, k_stride_token, k_stride_head, HEADS, K, BLOCK_K)

    gate = tl.arange(0, BLOCK_GATES)
    at = first * GATES + gate
    there = (gate < GATES) & (at < num_tokens.to(tl.int64) * VALUE_HEADS)
    token, head = at // VALUE_HEADS, at % VALUE_HEADS
    g = tl.load(a_ptr + token * a_stride_token + head * a_stride_head, mask=there, other=0.0).to(tl.float32)
    beta = tl.load(b_ptr + token * b_stride_token + head * b_stride_head, mask=there, other=0.0).to(tl.float32)
    if RAW:
        x = g + tl.load(bias_ptr + head, mask=there, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(rate_ptr + head, mask=there, other=0.0).to(tl.float32))
        g = -rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        beta = 1.0 / (1.0 + tl.exp(-beta))
    tl.store(decay_ptr + at, tl.exp(g), mask=there)
    tl.store(beta_ptr + at, beta, mask=there)

    stop = tl.load(ends_ptr + num_rows).to(tl.int64) * VALUE_HEADS
    if (first + 1) * GATES > stop:
        vs = tl.arange(0, BLOCK_V)
        target = out_ptr + token * out_stride_token + head * out_stride_head
        mask = (there & (at >= stop))[:, None] & (vs < V)[None, :]
        tl.store(target[:, None] + vs[None, :], tl.zeros([BLOCK_GATES, BLOCK_V], out_ptr.dtype.element_ty), mask=mask)
