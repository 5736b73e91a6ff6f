"""The second half of a split: merges the shares several programs computed of one token and head.

In: partial outputs f32 `[T * Hq, splits, Dv]`, each normalised over its own keys, with their base-2 LSE
`[T * Hq, splits]`, -inf for a split that saw nothing (its share is unwritten and never read). Out: outputs, natural-log
LSE. The sink joins here, once.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["combine_splits"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["num_splits"])
def combine_splits(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    num_splits,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Merge the shares of one token and head; grid (T, Hq)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (token * tl.num_programs(1) + head) * num_splits
    d = tl.arange(0, BLOCK_V)
    peak = float("-inf")
    for begin in range(0, num_splits, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        lse2 = tl.load(part_lse_ptr + row + s, mask=s < num_splits, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(lse2, 0))
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    acc = tl.zeros([BLOCK_V], tl.float32)
    weight = 0.0
    for begin in range(0, num_splits, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        lse2 = tl.load(part_lse_ptr + row + s, mask=s < num_splits, other=float("-inf"))
        share = tl.exp2(lse2 - shift)
        seen = lse2 > float("-inf")
        part = tl.load(
            part_ptr + (row + s)[:, None] * V_DIM + d[None, :], mask=seen[:, None] & (d < V_DIM)[None, :], other=0.0
        )
        acc += tl.sum(part * share[:, None], 0)
        weight += tl.sum(share, 0)
    total = weight
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - shift)
    acc = tl.where(weight > 0, acc / tl.where(weight > 0, total, 1.0), 0.0)
    tl.store(out_ptr + token * out_stride_t + head * out_stride_h + d, acc.to(out_ptr.dtype.element_ty), mask=d < V_DIM)
    if lse_ptr is not None:
        lse2 = tl.where(weight > 0, shift + tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        tl.store(lse_ptr + token * lse_stride_t + head * lse_stride_h, lse2 * LN_2)
