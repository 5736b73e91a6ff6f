"""Masks and logit shaping inside the attention tile: tree bits, tree depths, the bounded tanh of a softcap.

In: positions as the tile knows them. Out: booleans, depths, capped logits. Nothing here reads keys or values.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["bounded_tanh", "tree_bits", "tree_depths"]

MINUS_TWO_LOG2_E = tl.constexpr(-2.8853900817779268)
DEPTH_BLOCK = tl.constexpr(32)


@triton.jit
def bounded_tanh(x):
    """tanh by exp2 of a negative argument: never overflows, within a float32 ulp of 1 everywhere."""
    decay = tl.exp2(tl.abs(x) * MINUS_TWO_LOG2_E)
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def tree_bits(tree, token, other, mask, prefix, kv_len, stride_s, TREE: tl.constexpr):
    """Whether `token` sees `other`, both counted within the step; False where not `mask`.

    `tree` points at the row's first element (qlen, full) or byte (packed).
    """
    if TREE == "qlen":
        found = tl.load(tree + token.to(tl.int64) * stride_s + other, mask=mask, other=0)
        return found != 0
    cell = token.to(tl.int64) * kv_len + (prefix + other)
    if TREE == "full":
        found = tl.load(tree + cell, mask=mask, other=0)
        return found != 0
    packed = tl.load(tree + cell // 8, mask=mask, other=0).to(tl.int64)
    return ((packed >> (cell % 8)) & 1) != 0


@triton.jit
def tree_depths(tree, token, mask, prefix, q_len, kv_len, stride_s, TREE: tl.constexpr):
    """How many of the step's tokens each `token` sees, itself included: i32, 0 where not `mask`."""
    depth = tl.zeros_like(token).to(tl.int32)
    for begin in range(0, q_len, DEPTH_BLOCK):
        other = begin + tl.arange(0, DEPTH_BLOCK)
        bits = tree_bits(
            tree, token[:, None], other[None, :], mask[:, None] & (other < q_len)[None, :],
            prefix, kv_len, stride_s, TREE,
        )  # fmt: skip
        depth += tl.sum(bits.to(tl.int32), 1)
    return depth
