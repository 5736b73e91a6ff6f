"""Sparse attention for Hopper: the work of `attend.py` in explicit copies, barriers and warpgroup products.

In: queries `[T, Hq, 576]` (or the rotary part apart), cache rows `[N, 1, 576]`, `Slots`. Out: outputs `[T, Hq, 512]`
and natural-log LSE, or one split's share of both. A program holds up to 64 heads of one token and two key blocks of 64
in flight: four warps gather rows, the left warpgroup scores a block and folds half the values, the right one the other
half with the weights the left one published. A row whose slot is -1 is never loaded, no address is formed in 32 bits,
and no block is folded before its barrier says so, nor released before its last read.
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

__all__ = ["attend_chosen"]

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
#: Shared memory of a block of rows: panels of 64 columns, 128-byte swizzle, as warpgroup products take them.
PANEL = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
#: Registers of a product of 64 queries and 64 keys, or 256 values; and of 64 rows by 64 columns to copy.
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
VALUES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# triton 3.9 renamed both
_copy_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit(do_not_specialize=["width"])
def attend_chosen(
    q_ptr, q_rope_ptr, rows_ptr, slots_ptr, ends_ptr, seen_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, sinks_ptr,
    width, q_stride_t, q_stride_h, q_rope_stride_t, q_rope_stride_h, rows_stride,
    out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, logit_scale,
    HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Attend up to 64 heads of one token; grid (T * head blocks, splits), blocks of a token side by side.

    `logit_scale` is the scale times log2(e).
    """
    token, _ = _place(HEADS)
    begin = 0
    end = gl.load(ends_ptr + token).to(gl.int32)
    end = gl.where(gl.load(seen_ptr + token) != 0, end, 0)
    if SPLIT:
        share = gl.cdiv(gl.cdiv(end, 64), gl.num_programs(1)) * 64
        begin = gl.program_id(1) * share
        end = gl.minimum(end, begin + share)
    slots = slots_ptr + token * width

    queries = _blocks(q_ptr.dtype.element_ty, [])
    keys = _blocks(q_ptr.dtype.element_ty, [2])
    weights = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [64, 64], PANEL)
    decays = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # both stages of a block's rotary part, of its values' low half, of the high half; every copying thread arrives
    full = _barriers(6, 128)
    empty = _barriers(6, 1)
    exchange = _barriers(2, 1)
    bars = (full, empty, exchange.index(0), exchange.index(1))
    inputs = (q_ptr, q_rope_ptr, q_stride_t, q_stride_h, q_rope_stride_t, q_rope_stride_h)
    outputs = (out_ptr, lse_ptr, part_ptr, part_lse_ptr, sinks_ptr)
    strides = (out_stride_t, out_stride_h, lse_stride_t, lse_stride_h)
    gl.warp_specialize(
        [
            (
                _attend_left,
                (inputs, queries, keys, weights, decays, bars, outputs, strides, slots, begin, end, logit_scale,
                 HEADS, SPLIT),
            ),
            (_attend_right, (keys[1], weights, decays, bars, outputs, strides, begin, end, HEADS, SPLIT)),
            (_gather_keys, (rows_ptr, rows_stride, slots, keys, full, empty, begin, end)),
        ],
        [4, 4],
        [192, 72],
    )  # fmt: skip


@gluon.jit
def _blocks(dtype: gl.constexpr, stages: gl.constexpr):
    """64 rows of 576 numbers: values 0 to 255, 256 to 511, the rotary part."""
    low = gl.allocate_shared_memory(dtype, stages + [64, 256], PANEL)
    high = gl.allocate_shared_memory(dtype, stages + [64, 256], PANEL)
    rope = gl.allocate_shared_memory(dtype, stages + [64, 64], PANEL)
    return low, high, rope


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Barriers, each of so many arrivals a phase."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.jit
def _place(HEADS: gl.constexpr):
    """The token of this program, and the first of its heads."""
    BLOCKS: gl.constexpr = (HEADS + 63) // 64
    return (gl.program_id(0) // BLOCKS).to(gl.int64), gl.program_id(0) % BLOCKS * 64


@gluon.jit
def _rows_of(HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """The token of this program, the heads of its 64 rows, and which of those are real."""
    token, first = _place(HEADS)
    head = first + gl.arange(0, 64, layout=LAYOUT)
    return token, head, head < HEADS


@gluon.jit
def _gather_keys(rows_ptr, rows_stride, slots, keys, full, empty, begin, end):
    """Keep two blocks of the rows at `slots[begin:end]` in flight, zeros where a slot is -1."""
    at = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, ROWS))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    slot = gl.load(slots + at, mask=at < end, other=-1)
    low, high, rope = keys
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        phase = (block // 2 & 1) ^ 1
        live = (slot >= 0)[:, None]
        rows = rows_ptr + gl.where(slot >= 0, slot, 0).to(gl.int64) * rows_stride
        places = rows[:, None] + columns[None, :]
        # the next block's slots are under way before this one's room is free
        at += 64
        slot = gl.load(slots + at, mask=at < end, other=-1)
        mbarrier.wait(empty.index(stage), phase)
        _copy_rows(rope.index(stage), places + 512, mask=live)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        mbarrier.wait(empty.index(2 + stage), phase)
        _gather_half(low.index(stage), places, live)
        async_copy.mbarrier_arrive(full.index(2 + stage), increment_count=False)
        mbarrier.wait(empty.index(4 + stage), phase)
        _gather_half(high.index(stage), places + 256, live)
        async_copy.mbarrier_arrive(full.index(4 + stage), increment_count=False)


@gluon.jit
def _gather_half(half, places, live):
    """Copy 256 columns of 64 rows, 64 at a time: a thread holds few addresses."""
    if _RENAMED:
        panels = half.reinterpret(half.dtype, [4, 64, 64], PANEL)
    else:
        panels = half._reinterpret(half.dtype, [4, 64, 64], PANEL)
    for panel in gl.static_range(4):
        _copy_rows(panels.index(panel), places + panel * 64, mask=live)


@gluon.jit
def _attend_left(
    inputs, queries, keys, weights, decays, bars, outputs, strides, slots, begin, end, logit_scale,
    HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Score the chosen keys, fold the first half of their values, answer that half and the LSE."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    _copy_queries(inputs, queries, HEADS)
    q_low, q_high, q_rope = queries
    k_low, k_high, k_rope = keys
    full, empty, shared, taken = bars
    _, lse_ptr, _, part_lse_ptr, sinks_ptr = outputs
    at = begin + gl.arange(0, 64, layout=gl.SliceLayout(0, SCORES))
    slot = gl.load(slots + at, mask=at < end, other=-1)
    blank = gl.full([64, 64], 0.0, gl.float32, SCORES)
    acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
    peak = gl.full([64], float("-inf"), gl.float32, ROW)
    weight = gl.full([64], 0.0, gl.float32, ROW)
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        phase = block // 2 & 1
        # these copies are a thread's own stores: a fence orders them before the products
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        logits = warpgroup_mma(q_rope, k_rope.index(stage).permute((1, 0)), blank, use_acc=False, is_async=True)
        mbarrier.wait(full.index(2 + stage), phase)
        fence_async_shared()
        logits = warpgroup_mma(q_low, k_low.index(stage).permute((1, 0)), logits, is_async=True)
        mbarrier.wait(full.index(4 + stage), phase)
        fence_async_shared()
        logits = warpgroup_mma(q_high, k_high.index(stage).permute((1, 0)), logits, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(empty.index(stage), count=1)
        logits = gl.where((slot >= 0)[None, :], logits, float("-inf"))
        at += 64
        slot = gl.load(slots + at, mask=at < end, other=-1)
        new_peak = gl.maximum(peak, gl.max(logits, 1) * logit_scale)
        # a block may hold nothing but -1: -inf less -inf is NaN
        shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        shares = gl.exp2(logits * logit_scale - shift[:, None])
        decay = gl.exp2(peak - shift)
        weight = weight * decay + gl.sum(shares, 1)
        peak = new_peak
        shares16 = shares.to(k_low.dtype)
        mbarrier.wait(taken, (block & 1) ^ 1)
        weights.store(shares16)
        decays.store(decay)
        fence_async_shared()
        mbarrier.arrive(shared, count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
        acc = warpgroup_mma(
            gl.convert_layout(shares16, gl.DotOperandLayout(0, VALUES, 2)), k_low.index(stage), acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(2 + stage), count=1)

    token, head, valid = _rows_of(HEADS, ROW)
    some = weight > 0
    lse2 = gl.where(some, peak + gl.log2(gl.where(some, weight, 1.0)), float("-inf"))
    if sinks_ptr is not None and not SPLIT:
        sink = gl.load(sinks_ptr + head, mask=valid, other=0.0).to(gl.float32) * LOG2_E
        weight += gl.exp2(sink - gl.where(some, peak, 0.0))
    inverse = gl.where(some, 1.0 / gl.where(some, weight, 1.0), 0.0)
    mbarrier.wait(taken, (gl.cdiv(gl.maximum(end - begin, 0), 64) & 1) ^ 1)
    decays.store(inverse)
    mbarrier.arrive(shared, count=1)
    if SPLIT:
        shares_at = (token * HEADS + head) * gl.num_programs(1) + gl.program_id(1)
        gl.store(part_lse_ptr + shares_at, lse2, mask=valid)
    elif lse_ptr is not None:
        gl.store(lse_ptr + token * strides[2] + head * strides[3], lse2 * LN_2, mask=valid)
    _store_half(acc, gl.convert_layout(inverse, gl.SliceLayout(1, VALUES)), outputs, strides, 0, HEADS, SPLIT)


@gluon.jit
def _attend_right(
    k_high, weights, decays, bars, outputs, strides, begin, end, HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Fold the second half of the chosen keys' values with the published weights, and answer it."""
    full, empty, shared, taken = bars
    acc = gl.full([64, 256], 0.0, gl.float32, VALUES)
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        mbarrier.wait(shared, block & 1)
        acc = acc * decays.load(gl.SliceLayout(1, VALUES))[:, None]
        # full long since, and still to be waited for: the wait makes the copies visible to this warpgroup
        mbarrier.wait(full.index(4 + stage), block // 2 & 1)
        fence_async_shared()
        acc = warpgroup_mma(weights, k_high.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(empty.index(4 + stage), count=1)
    mbarrier.wait(shared, gl.cdiv(gl.maximum(end - begin, 0), 64) & 1)
    _store_half(acc, decays.load(gl.SliceLayout(1, VALUES)), outputs, strides, 1, HEADS, SPLIT)


@gluon.jit
def _copy_queries(inputs, queries, HEADS: gl.constexpr):
    """Copy this program's queries, zeros for heads that are none."""
    q_ptr, q_rope_ptr, q_stride_t, q_stride_h, q_rope_stride_t, q_rope_stride_h = inputs
    token, head, valid = _rows_of(HEADS, gl.SliceLayout(1, ROWS))
    rows = q_ptr + (token * q_stride_t + head * q_stride_h)
    if q_rope_ptr is not None:
        rope_rows = q_rope_ptr + (token * q_rope_stride_t + head * q_rope_stride_h)
    else:
        rope_rows = rows + 512
    wide = gl.arange(0, 256, layout=gl.SliceLayout(0, ROWS))
    narrow = gl.arange(0, 64, layout=gl.SliceLayout(0, ROWS))
    low, high, rope = queries
    _copy_rows(rope, rope_rows[:, None] + narrow[None, :], mask=valid[:, None])
    _copy_rows(low, rows[:, None] + wide[None, :], mask=valid[:, None])
    _copy_rows(high, rows[:, None] + (256 + wide)[None, :], mask=valid[:, None])
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _store_half(
    acc, inverse, outputs, strides, SIDE: gl.constexpr, HEADS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Store 256 of the 512 values; `inverse` is one over the weight, 0 where nothing was seen."""
    out_ptr, _, part_ptr, _, _ = outputs
    token, head, valid = _rows_of(HEADS, gl.SliceLayout(1, VALUES))
    columns = SIDE * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, VALUES))
    acc = acc * inverse[:, None]
    if SPLIT:
        # a share that saw nothing is known by its LSE and never read
        shares_at = ((token * HEADS + head) * gl.num_programs(1) + gl.program_id(1)) * 512
        gl.store(part_ptr + shares_at[:, None] + columns[None, :], acc, mask=(valid & (inverse > 0))[:, None])
    else:
        rows = out_ptr + (token * strides[0] + head * strides[1])
        gl.store(rows[:, None] + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=valid[:, None])
