"""The portable sparse attention kernel: each token attends over the cache rows its slots name, absorbed MLA.

In: queries `[T, Hq, D0 + D1]` (or the rotary part apart), cache rows `[N, 1, D0 + D1]`, `Slots`. Out: outputs
`[T, Hq, D0]` and natural-log LSE, or one split's share of both. Values are the first D0 numbers of a key. A program
holds a few heads of one token. It must never load a row whose slot is -1, nor form an address in 32 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attend_slots", "merge_shares"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=["width"])
def attend_slots(
    q_ptr,
    q_rope_ptr,
    rows_ptr,
    slots_ptr,
    ends_ptr,
    seen_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    width,
    q_stride_t,
    q_stride_h,
    q_rope_stride_t,
    q_rope_stride_h,
    rows_stride,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    logit_scale,
    HEADS: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend a few heads of one token; grid (T, head blocks, splits). `logit_scale` is the scale times log2(e)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    valid = head < HEADS
    d0 = tl.arange(0, D0)
    q_rows = token * q_stride_t + head * q_stride_h
    q0 = tl.load(q_ptr + q_rows[:, None] + d0[None, :], mask=valid[:, None], other=0.0)
    if D1 > 0:
        d1 = tl.arange(0, D1)
        if q_rope_ptr is not None:
            rope_rows = token * q_rope_stride_t + head * q_rope_stride_h
            q1 = tl.load(q_rope_ptr + rope_rows[:, None] + d1[None, :], mask=valid[:, None], other=0.0)
        else:
            q1 = tl.load(q_ptr + D0 + q_rows[:, None] + d1[None, :], mask=valid[:, None], other=0.0)
    begin = 0
    end = tl.where(tl.load(seen_ptr + token), tl.load(ends_ptr + token), 0)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end, BLOCK_N), tl.num_programs(2)) * BLOCK_N
        begin = tl.program_id(2) * share
        end = tl.minimum(end, begin + share)

    acc = tl.zeros([BLOCK_H, D0], tl.float32)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_H], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        at = n0 + tl.arange(0, BLOCK_N)
        slot = tl.load(slots_ptr + token * width + at, mask=at < end, other=-1)
        live = slot >= 0
        rows = rows_ptr + tl.where(live, slot, 0).to(tl.int64) * rows_stride
        k0 = tl.load(rows[:, None] + d0[None, :], mask=live[:, None], other=0.0)
        logits = tl.dot(q0, tl.trans(k0), input_precision="ieee")
        if D1 > 0:
            k1 = tl.load(rows[:, None] + (D0 + d1)[None, :], mask=live[:, None], other=0.0)
            logits = tl.dot(q1, tl.trans(k1), logits, input_precision="ieee")
        logits = tl.where(live[None, :], logits * logit_scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        # a block may hold nothing but -1: -inf less -inf is NaN
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(peak - shift)
        weight = weight * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(k0.dtype), k0, acc * decay[:, None], input_precision="ieee")
        peak = new_peak

    some = weight > 0
    lse2 = tl.where(some, peak + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
    if sinks_ptr is not None and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        weight += tl.exp2(sink - tl.where(some, peak, 0.0))
    acc = tl.where(some[:, None], acc / tl.where(some, weight, 1.0)[:, None], 0.0)
    if SPLIT:
        shares = (token * HEADS + head) * tl.num_programs(2) + tl.program_id(2)
        tl.store(part_lse_ptr + shares, lse2, mask=valid)
        # a share that saw nothing is known by its LSE and never read
        tl.store(part_ptr + (shares * D0)[:, None] + d0[None, :], acc, mask=(valid & some)[:, None])
    else:
        out_rows = out_ptr + token * out_stride_t + head * out_stride_h
        tl.store(out_rows[:, None] + d0[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])
        if lse_ptr is not None:
            tl.store(lse_ptr + token * lse_stride_t + head * lse_stride_h, lse2 * LN_2, mask=valid)


@triton.jit(do_not_specialize=["num_shares"])
def merge_shares(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    num_shares,
    part_stride_t,
    part_stride_h,
    part_stride_s,
    part_lse_stride_t,
    part_lse_stride_h,
    part_lse_stride_s,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    BASE_2: tl.constexpr,
    D: tl.constexpr,
):
    """Merge the shares of one token and head, each normalised over its own keys; grid (T, Hq). The sink joins here.

    BASE_2 says that the shares' LSE are base 2, else natural; -inf or NaN is a share that saw nothing, never read.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    part = part_ptr + token * part_stride_t + head * part_stride_h
    part_lse = part_lse_ptr + token * part_lse_stride_t + head * part_lse_stride_h
    factor = 1.0 if BASE_2 else LOG2_E
    peak = float("-inf")
    weight = 0.0
    acc = tl.zeros([D], tl.float32)
    for share in range(num_shares):
        lse2 = tl.load(part_lse + share * part_lse_stride_s) * factor
        # neither -inf nor NaN
        some = tl.abs(lse2) < float("inf")
        lse2 = tl.where(some, lse2, float("-inf"))
        new_peak = tl.maximum(peak, lse2)
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        value = tl.load(part + share * part_stride_s + d, mask=d < tl.where(some, D, 0), other=0.0).to(tl.float32)
        decay = tl.exp2(peak - shift)
        grows = tl.exp2(lse2 - shift)
        acc = acc * decay + value * grows
        weight = weight * decay + grows
        peak = new_peak
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = weight
    if sinks_ptr is not None:
        total += tl.exp2(tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E - shift)
    acc = tl.where(weight > 0, acc / tl.where(weight > 0, total, 1.0), 0.0)
    tl.store(out_ptr + token * out_stride_t + head * out_stride_h + d, acc.to(out_ptr.dtype.element_ty))
    if lse_ptr is not None:
        lse2 = tl.where(weight > 0, shift + tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        tl.store(lse_ptr + token * lse_stride_t + head * lse_stride_h, lse2 * LN_2)
