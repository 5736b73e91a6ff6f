"""The arithmetic of one Hopper tile over a latent cache: 64 queries, in two warpgroups that own half the values each.

In: queries and key blocks in shared memory, the barriers that say when a block is full. Out: outputs `[T, Hq, 512]` and
natural-log LSE, or one split's share of both for `combine.py`. The left warpgroup scores a block, publishes weights and
decay, and folds values 0 to 255; the right one folds the rest with what was published. They must never fold a block
before its barrier says so, nor release it before their last read.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backstamp_triton.gluon_names import copy_rows

__all__ = ["PANEL", "attend_left", "attend_right"]

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
#: Shared memory of a block of rows: panels of 64 columns, 128-byte swizzle, as the copy engine and wgmma take them.
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
#: Registers of a product of 64 queries and 64 keys, or 256 values.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))


@gluon.jit
def attend_left(
    inputs, queries, keys, weights, decays, bars, outputs, strides, tile, begin, end, logit_scale,
    HEADS: gl.constexpr, PACK: gl.constexpr, CAUSAL: gl.constexpr, SPLIT: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Score keys `[begin, end)`, fold the first half of their values, answer that half and the LSE."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    _copy_queries(inputs, queries, tile, HEADS, PACK)
    q_low, q_high, q_rope = queries
    k_low, k_high, k_rope = keys
    full, empty, shared = bars
    _, lse_ptr, _, part_lse_ptr, sinks_ptr = outputs
    token, q_token, head, valid = _tile_rows(tile, HEADS, PACK, ROW)
    _, _, q_len, kv_len, _ = tile
    ends = gl.minimum(kv_len - q_len + token + 1, end)
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    blank = gl.full([64, 64], 0.0, gl.float32, SCORES)
    acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
    peak = gl.full([64], float("-inf"), gl.float32, ROW)
    weight = gl.full([64], 0.0, gl.float32, ROW)
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        phase = block // 2 & 1
        _wait_for_copy(full.index(stage), phase, FENCE)
        logits = warpgroup_mma(q_rope, k_rope.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        logits = warpgroup_mma(q_low, k_low.index(stage).permute((1, 0)), logits, is_async=True)
        _wait_for_copy(full.index(2 + stage), phase, FENCE)
        logits = warpgroup_mma(q_high, k_high.index(stage).permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        if CAUSAL:
            logits = gl.where(columns[None, :] < (ends - n0)[:, None], logits, float("-inf"))
        else:
            logits = gl.where((columns < end - n0)[None, :], logits, float("-inf"))
        new_peak = gl.maximum(peak, gl.max(logits, 1) * logit_scale)
        # an early token of the tile may see nothing of a block: -inf less -inf is NaN
        shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        shares = gl.exp2(logits * logit_scale - shift[:, None])
        decay = gl.exp2(peak - shift)
        weight = weight * decay + gl.sum(shares, 1)
        peak = new_peak
        shares16 = shares.to(k_low.dtype)
        _wait_for_right(empty, block)
        weights.store(shares16)
        decays.store(decay)
        fence_async_shared()
        mbarrier.arrive(shared, count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
        acc = warpgroup_mma(
            gl.convert_layout(shares16, gl.DotOperandLayout(0, VALUES, 2)), k_low.index(stage), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)

    # no launch of the merge from here, as the tile kernel has it: that costs a lone row 12 to 15%
    seen = weight > 0
    lse2 = gl.where(seen, peak + gl.log2(gl.where(seen, weight, 1.0)), float("-inf"))
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head, mask=valid, other=0.0).to(gl.float32) * LOG2_E
        weight += gl.exp2(sink - gl.where(seen, peak, 0.0))
    inverse = gl.where(seen, 1.0 / gl.where(seen, weight, 1.0), 0.0)
    _wait_for_right(empty, gl.cdiv(gl.maximum(end - begin, 0), 64))
    decays.store(inverse)
    mbarrier.arrive(shared, count=1)
    if SPLIT:
        part_rows = (q_token * HEADS + head) * gl.num_programs(1) + gl.program_id(1)
        gl.store(part_lse_ptr + part_rows, lse2, mask=valid)
    elif lse_ptr is not None:
        gl.store(lse_ptr + q_token * strides[2] + head * strides[3], lse2 * LN_2, mask=valid)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, VALUES))
    _store_half(acc, inverse, outputs, strides, tile, 0, HEADS, PACK, SPLIT)


@gluon.jit
def attend_right(
    k_high, weights, decays, bars, outputs, strides, tile, begin, end,
    HEADS: gl.constexpr, PACK: gl.constexpr, SPLIT: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """Fold the second half of the values of keys `[begin, end)` with the published weights, and answer it."""
    full, empty, shared = bars
    acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        mbarrier.wait(shared, block & 1)
        acc = acc * decays.load(gl.SliceLayout(1, VALUES))[:, None]
        # full long since, and still to be waited for: the wait makes the copy visible to this warpgroup
        _wait_for_copy(full.index(2 + stage), block // 2 & 1, FENCE)
        acc = warpgroup_mma(weights, k_high.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(2 + stage), count=1)
    mbarrier.wait(shared, gl.cdiv(gl.maximum(end - begin, 0), 64) & 1)
    inverse = decays.load(gl.SliceLayout(1, VALUES))
    _store_half(acc, inverse, outputs, strides, tile, 1, HEADS, PACK, SPLIT)


@gluon.jit
def _wait_for_copy(bar, phase, FENCE: gl.constexpr):
    """Wait until a part of a block is there; FENCE: threads stored it, which products see past a fence only."""
    mbarrier.wait(bar, phase)
    if FENCE:
        fence_async_shared()


@gluon.jit
def _wait_for_right(empty, block):
    """Wait until the right warpgroup has folded the block before this one, and with it the weights published for it."""
    mbarrier.wait(empty.index(2 + (block + 1) % 2), ((block + 1) // 2 & 1) ^ 1)


@gluon.jit
def _copy_queries(inputs, queries, tile, HEADS: gl.constexpr, PACK: gl.constexpr):
    """Copy a tile's queries, zeros for rows that are none."""
    q_ptr, q_rope_ptr, q_stride_t, q_stride_h, q_rope_stride_t, q_rope_stride_h = inputs
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    _, q_token, head, valid = _tile_rows(tile, HEADS, PACK, gl.SliceLayout(1, LAYOUT))
    rows = q_ptr + (q_token * q_stride_t + head * q_stride_h)
    if q_rope_ptr is not None:
        rope_rows = q_rope_ptr + (q_token * q_rope_stride_t + head * q_rope_stride_h)
    else:
        rope_rows = rows + 512
    wide = gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT))
    narrow = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    low, high, rope = queries
    copy_rows(rope, rope_rows[:, None] + narrow[None, :], mask=valid[:, None])
    copy_rows(low, rows[:, None] + wide[None, :], mask=valid[:, None])
    copy_rows(high, rows[:, None] + (256 + wide)[None, :], mask=valid[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _store_half(
    acc, inverse, outputs, strides, tile, SIDE: gl.constexpr,
    HEADS: gl.constexpr, PACK: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Store 256 of the 512 values; `inverse` is one over the weight, 0 where nothing was seen."""
    out_ptr, _, part_ptr, _, _ = outputs
    _, q_token, head, valid = _tile_rows(tile, HEADS, PACK, gl.SliceLayout(1, VALUES))
    columns = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, VALUES))
    acc = acc * inverse[:, None]
    if SPLIT:
        # a split that saw nothing is known by its LSE; its share is never read
        part_rows = ((q_token * HEADS + head) * gl.num_programs(1) + gl.program_id(1)) * 512
        gl.store(part_ptr + part_rows[:, None] + columns[None, :], acc, mask=(valid & (inverse > 0))[:, None])
    else:
        rows = out_ptr + (q_token * strides[0] + head * strides[1])
        gl.store(rows[:, None] + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])


@gluon.jit
def _tile_rows(tile, HEADS: gl.constexpr, PACK: gl.constexpr, LAYOUT: gl.constexpr):
    """Of each of a tile's 64 rows: the token within its row of the batch, the token in `q`, the head, whether real."""
    first, start, q_len, _, head_block = tile
    m = gl.arange(0, 64, layout=LAYOUT)
    token = first + m // PACK
    head = head_block * PACK + m % PACK
    valid = (m < 64 // PACK * PACK) & (token < q_len) & (head < HEADS)
    return token, (start + token).to(gl.int64), head, valid
