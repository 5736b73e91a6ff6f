"""The second half of a split: merges the shares several programs computed of one token and head.

In: partial outputs f32 `[T * Hq, splits, Dv]`, each normalised over its own keys, with their base-2 LSE
`[T * Hq, splits]`, -inf for a split that saw nothing (its share is unwritten and never used). Out: outputs, natural-log
LSE. The sink joins here, once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

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
    OVERLAP: tl.constexpr,
):
    """Merge the shares of one token and head; grid (T, Hq). OVERLAP: programs that write them may still run."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = (token * tl.num_programs(1) + head) * num_splits
    d = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    peak = float("-inf")
    weight = 0.0
    if OVERLAP:
        gdc_wait()
    for begin in range(0, num_splits, BLOCK_S):
        s = begin + tl.arange(0, BLOCK_S)
        there = s < num_splits
        lse2 = tl.load(part_lse_ptr + row + s, mask=there, other=float("-inf"))
        # both loads at once: what an unseen share holds is dropped after it is read
        part = tl.load(
            part_ptr + (row + s)[:, None] * V_DIM + d[None, :], mask=there[:, None] & (d < V_DIM)[None, :], other=0.0
        )
        part = tl.where((lse2 > float("-inf"))[:, None], part, 0.0)
        new_peak = tl.maximum(peak, tl.max(lse2, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - shift)
        share = tl.exp2(lse2 - shift)
        acc = acc * decay + tl.sum(part * share[:, None], 0)
        weight = weight * decay + tl.sum(share, 0)
        peak = new_peak
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = weight
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - shift)
    acc = tl.where(weight > 0, acc / tl.where(weight > 0, total, 1.0), 0.0)
    tl.store(out_ptr + token * out_stride_t + head * out_stride_h + d, acc.to(out_ptr.dtype.element_ty), mask=d < V_DIM)
    if lse_ptr is not None:
        lse2 = tl.where(weight > 0, shift + tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        tl.store(lse_ptr + token * lse_stride_t + head * lse_stride_h, lse2 * LN_2)
