"""The inner step of the attention tile: one block of keys and values folded into a running softmax.

In: a tile's queries and what each may see, the softmax so far (peak and weight per query, accumulators), where the
keys lie. Out: the softmax after the block. It loads no key, value or page id that no query of the tile sees.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backstamp_triton.masks import bounded_tanh, tree_bits, tree_depths

__all__ = ["fold_block"]


@triton.jit
def fold_block(
    n0,
    low,
    high,
    q0,
    q1,
    acc0,
    acc1,
    peak,
    weight,
    k_base,
    v_base,
    ids,
    k_stride_p,
    k_stride_n,
    v_stride_p,
    v_stride_n,
    query_end,
    position,
    prefix,
    q_len,
    kv_len,
    tree_base,
    token,
    valid,
    tree_stride_s,
    logit_scale,
    softcap_log2,
    window_left,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    V_IN_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INDEX: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold keys `[n0, n0 + BLOCK_N)` into the running softmax; MASKED False promises that every query sees them all."""
    n0 = tl.multiple_of(n0, BLOCK_N)
    n = n0 + tl.arange(0, BLOCK_N)
    live = (n >= low) & (n < high)
    if MASKED:
        visible = live[None, :] & (n[None, :] < query_end[:, None])
        key_position = n
        if TREE != "no":
            in_tree = n >= prefix
            bits = tree_bits(
                tree_base, token[:, None], (n - prefix)[None, :], valid[:, None] & (in_tree & live)[None, :],
                prefix, kv_len, tree_stride_s, TREE,
            )  # fmt: skip
            visible = visible & ((n < prefix)[None, :] | bits)
            if window_left is not None:
                depth = tree_depths(tree_base, n - prefix, in_tree & live, prefix, q_len, kv_len, tree_stride_s, TREE)
                key_position = tl.where(in_tree, prefix - 1 + depth, n)
        if window_left is not None:
            visible = visible & (position[:, None] - key_position[None, :] <= window_left)
        if TREE != "no":
            live = tl.max(visible.to(tl.int32), 0) > 0

    # where the keys lie; ids past the last page of the row are never loaded
    if INDEX == "ragged":
        page = ids + n
        inside = n * 0
    elif PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(ids + n0 // PAGE_SIZE).to(tl.int64)
        inside = n0 % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        page = tl.load(ids + n // PAGE_SIZE, mask=live if MASKED else None, other=0 if MASKED else None).to(tl.int64)
        inside = n % PAGE_SIZE
    k_rows = k_base + (page * k_stride_p + inside.to(tl.int64) * k_stride_n)
    k0 = _load_rows(k_rows, 0, D0, live, MASKED)
    logits = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    if D1 > 0:
        k1 = _load_rows(k_rows, D0, D1, live, MASKED)
        logits = tl.dot(q1, tl.trans(k1), logits, input_precision="ieee")

    if softcap_log2 is not None:
        logits = bounded_tanh(logits * logit_scale) * softcap_log2
        factor = 1.0
    else:
        factor = logit_scale
    if MASKED:
        logits = tl.where(visible, logits, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logits, 1) * factor)
    # a query that has seen nothing yet: -inf less -inf is NaN
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak) if MASKED else new_peak
    weights = tl.exp2(logits * factor - shift[:, None])
    decay = tl.exp2(peak - shift)
    weight = weight * decay + tl.sum(weights, 1)
    acc0 = acc0 * decay[:, None]
    if V_IN_K:
        acc0 = tl.dot(weights.to(k0.dtype), k0, acc0, input_precision="ieee")
    else:
        v_rows = v_base + (page * v_stride_p + inside.to(tl.int64) * v_stride_n)
        v0 = _load_rows(v_rows, 0, V0, live, MASKED)
        acc0 = tl.dot(weights.to(v0.dtype), v0, acc0, input_precision="ieee")
        if V1 > 0:
            v1 = _load_rows(v_rows, V0, V1, live, MASKED)
            acc1 = tl.dot(weights.to(v1.dtype), v1, acc1 * decay[:, None], input_precision="ieee")
    return acc0, acc1, new_peak, weight


@triton.jit
def _load_rows(rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, live, MASKED: tl.constexpr):
    """Columns `[FIRST, FIRST + WIDTH)` of a block of cached rows; zeros for rows that are not live."""
    pointers = rows[:, None] + (FIRST + tl.arange(0, WIDTH))[None, :]
    return tl.load(pointers, mask=live[:, None] if MASKED else None, other=0.0 if MASKED else None)
