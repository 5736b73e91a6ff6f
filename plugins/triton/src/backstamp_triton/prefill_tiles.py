"""The arithmetic of one Hopper prefill tile: which queries it has, what they see, and how logits become weights.

In: the step's row tensors and a tile, or a block of logits. Out: places and bounds, or weights with the running peak.
Both halves of the kernel read a tile by `bound`, so they agree on every block. It loads no query, key or value.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["HALF", "bound", "query_rows", "soften"]

#: Queries of one warpgroup: the rows of a wgmma.
HALF = gl.constexpr(64)
MINUS_TWO_LOG2_E = gl.constexpr(-2.8853900817779268)


@gluon.jit
def bound(row, first, split, step, window_left, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """What one tile's queries are, and its share of the blocks of keys they see: one at least."""
    num_rows, num_tokens, num_splits, qo_indptr, kv_lens, causal_rows = step
    start = gl.load(qo_indptr + row).to(gl.int32)
    has_keys = row < num_rows
    stop = gl.load(qo_indptr + row + 1, mask=has_keys, other=0).to(gl.int32)
    q_len = gl.where(has_keys, stop, num_tokens) - start
    # a pad row may carry a negative length
    kv_len = gl.maximum(gl.load(kv_lens + row, mask=has_keys, other=0).to(gl.int32), 0)
    prefix = kv_len - q_len
    causal = 0
    if CAUSAL == "yes":
        causal = 1
    elif CAUSAL == "rows":
        causal = (gl.load(causal_rows + row, mask=has_keys, other=0) != 0).to(gl.int32)
    high = kv_len
    if CAUSAL != "no":
        last = gl.minimum(first + TOKENS, q_len) - 1
        high = gl.maximum(gl.where(causal != 0, gl.minimum(prefix + last + 1, kv_len), kv_len), 0)
    low = 0
    if window_left is not None:
        low = gl.minimum(gl.maximum(prefix + first - window_left, 0), gl.maximum(high - 1, 0))
    begin = low // BLOCK_N
    total = gl.maximum((high + BLOCK_N - 1) // BLOCK_N - begin, 0)
    # shares differ by one block at most
    share_begin = total * split // num_splits
    blocks = total * (split + 1) // num_splits - share_begin
    # a share without keys still runs one block, past the last key anybody sees: all of it is masked
    begin += gl.where(blocks > 0, share_begin, total)
    return (start, q_len, kv_len, causal), (low, high, begin, gl.maximum(blocks, 1))


@gluon.jit
def query_rows(
    WARPGROUP: gl.constexpr,
    head,
    first,
    q_len,
    HEAD_BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Token (within its row), query head and validity of the warpgroup's 64 queries."""
    m = WARPGROUP * HALF + gl.arange(0, HALF, LAYOUT)
    token = first + m // PACK
    group_head = head % HEAD_BLOCKS * PACK + m % PACK
    valid = (m < 2 * HALF // PACK * PACK) & (token < q_len) & (group_head < GROUP)
    return token, head // HEAD_BLOCKS * GROUP + group_head, valid


@gluon.jit
def soften(logits, peak, n0, sight, shaping, window_left, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights of one block under the new peak, that peak, and what the sums so far decay by."""
    logit_scale, softcap_log2 = shaping
    begins, ends, low_all, high_all = sight
    if softcap_log2 is not None:
        # tanh by exp2 of a negative argument: never overflows
        x = logits * logit_scale
        shrunk = gl.exp2(gl.abs(x) * MINUS_TWO_LOG2_E)
        size = (1.0 - shrunk) / (1.0 + shrunk)
        logits = gl.where(x < 0, -size, size) * softcap_log2
        factor = 1.0
    else:
        factor = logit_scale
    edge = n0 + BLOCK_N > high_all
    if window_left is not None:
        edge = edge | (n0 < low_all)
    if edge:
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        visible = n[None, :] < ends[:, None]
        if window_left is not None:
            visible = visible & (n[None, :] >= begins[:, None])
        logits = gl.where(visible, logits, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(logits, 1) * factor)
    # a query that has seen nothing yet: -inf less -inf is NaN
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(logits * factor - shift[:, None])
    return weights, new_peak, gl.exp2(peak - shift)
