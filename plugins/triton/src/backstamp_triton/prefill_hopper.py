"""The Hopper prefill kernel: tiles of 128 queries, two warpgroups of wgmma and a loading warp, written in Gluon.

In: queries `[T, Hq, Dk]` (bf16 or fp16), keys and values as TMA descriptors, the step's row tensors. Out: outputs
`[T, Hq, Dv]` and natural-log LSE, or one share of both for `combine.py`. Programs stay on their multiprocessor and take
tile after tile, so that one tile's keys load while the last one is stored. `prefill_launch.py` says which work comes
here; the tile kernel does all other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backstamp_triton.gluon_names import recast
from backstamp_triton.prefill_feed import PANEL, feed
from backstamp_triton.prefill_queue import take
from backstamp_triton.prefill_tiles import HALF, bound, query_rows, soften

__all__ = ["attend_prefill"]

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


# sizes change every step: no kernel of its own for a row count of 1 or a multiple of 16
@gluon.jit(do_not_specialize=["num_rows", "num_tokens", "num_splits"])
def attend_prefill(
    q_ptr,
    k_desc,
    v_desc,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    qo_indptr,
    kv_lens,
    causal_rows,
    page_ids,
    page_rows,
    num_rows,
    num_tokens,
    num_splits,
    page_ids_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    lse_stride_t,
    lse_stride_h,
    k_head_rows,
    k_head_cols,
    k_page_stride,
    v_head_rows,
    v_head_cols,
    v_page_stride,
    logit_scale,
    softcap_log2,
    window_left,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    INDEX: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Attend every tile of `128 // PACK` tokens by PACK heads, its keys in `num_splits` shares; any grid, four warps.

    Absent tensors are None; `logit_scale`, `softcap_log2`, INDEX and CAUSAL as in `tile.attend_tile`. Descriptors are
    two-dimensional, in boxes of ROWS by 64: key `n` of a page is row `page * page_stride + n + head * head_rows`, from
    column `head * head_cols` on.
    """
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    TOKENS: gl.constexpr = 2 * HALF // PACK
    HEAD_BLOCKS: gl.constexpr = (GROUP + PACK - 1) // PACK
    PIECES: gl.constexpr = STAGES * (BLOCK_N // ROWS)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_halves = gl.allocate_shared_memory(dtype, [2, HALF, DK], SHARED)
    k_pieces = gl.allocate_shared_memory(dtype, [PIECES * (DK // PANEL), ROWS, PANEL], SHARED)
    v_pieces = gl.allocate_shared_memory(dtype, [PIECES * (DV // PANEL), ROWS, PANEL], SHARED)
    # panels of a block lie one after the other, whatever pieces they were loaded in
    k_blocks = recast(k_pieces, dtype, [STAGES, BLOCK_N, DK], SHARED)
    v_blocks = recast(v_pieces, dtype, [STAGES, BLOCK_N, DV], SHARED)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    tail = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    # the tile that comes next: written by the loading warp, read by both warpgroups
    tickets = gl.allocate_shared_memory(gl.int32, [4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    read = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        # both warpgroups read every block
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    mbarrier.init(tail, count=1)
    mbarrier.init(told, count=1)
    mbarrier.init(read, count=2)
    fence_async_shared()

    bars = (k_full, k_empty, v_full, v_empty, tail, told, read)
    step = (num_rows, num_tokens, num_splits, qo_indptr, kv_lens, causal_rows)
    tensors = (q_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, sinks_ptr)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h)
    shaping = (logit_scale, softcap_log2)
    index = (page_ids, page_rows, page_ids_stride)
    k_places = (k_head_rows, k_head_cols, k_page_stride)
    v_places = (v_head_rows, v_head_cols, v_page_stride)
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, tensors, strides, q_halves, k_blocks, v_blocks, tickets, bars, step, shaping, window_left,
                    HEADS, HEAD_BLOCKS, GROUP, PACK, BLOCK_N, DK, DV, CAUSAL, STAGES,
                ),
            ),
            (
                _attend,
                (
                    1, tensors, strides, q_halves, k_blocks, v_blocks, tickets, bars, step, shaping, window_left,
                    HEADS, HEAD_BLOCKS, GROUP, PACK, BLOCK_N, DK, DV, CAUSAL, STAGES,
                ),
            ),
            (
                feed,
                (
                    k_desc, v_desc, k_pieces, v_pieces, tickets, bars, index, step, k_places, v_places, window_left,
                    HEADS, HEAD_BLOCKS, TOKENS, BLOCK_N, DK, DV, PAGE_SIZE, ROWS, INDEX, CAUSAL, STAGES,
                ),
            ),
        ],
        # a second warpgroup that multiplies, and one warp that loads; registers a thread
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _attend(
    WARPGROUP: gl.constexpr,
    tensors,
    strides,
    q_halves,
    k_blocks,
    v_blocks,
    tickets,
    bars,
    step,
    shaping,
    window_left,
    HEADS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    GROUP: gl.constexpr,
    PACK: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warpgroup's half of every tile of this program."""
    TOKENS: gl.constexpr = 2 * HALF // PACK
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 2)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    # 16 bytes a thread, whole rows side by side
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    WIDE_ROWS: gl.constexpr = gl.SliceLayout(1, WIDE)
    q_ptr, out_ptr, lse_ptr, part_ptr, part_lse_ptr, sinks_ptr = tensors
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, lse_stride_h = strides
    k_full, k_empty, v_full, v_empty, _tail, told, read = bars
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    q_half = q_halves.index(WARPGROUP)
    turn = 0
    taken = 0
    row, first, head, split = take(tickets, told, read, taken)
    while row >= 0:
        queries, keys = bound(row, first, split, step, window_left, TOKENS, BLOCK_N, CAUSAL)
        start, q_len, kv_len, causal = queries
        _low, _high, begin, blocks = keys
        token, q_head, valid = query_rows(WARPGROUP, head, first, q_len, HEAD_BLOCKS, GROUP, PACK, WIDE_ROWS)
        rows = (start + token).to(gl.int64) * q_stride_t + q_head * q_stride_h
        d = gl.arange(0, DK, gl.SliceLayout(0, WIDE))
        q_half.store(gl.load(q_ptr + rows[:, None] + d[None, :], mask=valid[:, None], other=0.0))
        fence_async_shared()

        # what each query sees: keys `[begins, ends)`, of which all of the tile see `[low_all, high_all)`
        token, q_head, valid = query_rows(WARPGROUP, head, first, q_len, HEAD_BLOCKS, GROUP, PACK, S_ROWS)
        position = kv_len - q_len + token
        ends = gl.where(valid, kv_len, 0)
        high_all = kv_len
        if CAUSAL != "no":
            ends = gl.where(causal != 0, gl.minimum(ends, position + 1), ends)
            high_all = gl.where(causal != 0, gl.minimum(kv_len - q_len + first + 1, kv_len), kv_len)
        begins = position
        low_all = 0
        if window_left is not None:
            begins = position - window_left
            low_all = kv_len - q_len + gl.minimum(first + TOKENS, q_len) - 1 - window_left
        sight = (begins, ends, low_all, high_all)

        unused = gl.zeros([HALF, BLOCK_N], gl.float32, S_LAYOUT)
        acc = gl.zeros([HALF, DV], gl.float32, O_LAYOUT)
        peak = gl.full([HALF], float("-inf"), gl.float32, S_ROWS)
        n0 = (begin + blocks - 1) * BLOCK_N
        stage = turn % STAGES
        mbarrier.wait(k_full.index(stage), (turn // STAGES) & 1)
        logits = warpgroup_mma(q_half, k_blocks.index(stage).permute((1, 0)), unused, use_acc=False, is_async=True)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, peak, decay = soften(logits, peak, n0, sight, shaping, window_left, BLOCK_N, S_LAYOUT)
        weight = gl.sum(weights, 1)
        p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        ahead = turn + 1
        mbarrier.wait(k_full.index(ahead % STAGES), (ahead // STAGES) & 1, pred=blocks > 1)
        for block in range(1, blocks):
            # the products of this block's logits and of the last one's output run at once
            n0 -= BLOCK_N
            v_stage = turn % STAGES
            v_phase = (turn // STAGES) & 1
            turn += 1
            stage = turn % STAGES
            logits = warpgroup_mma(q_half, k_blocks.index(stage).permute((1, 0)), unused, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc = warpgroup_mma(p, v_blocks.index(v_stage), acc, is_async=True)
            logits = warpgroup_mma_wait(1, deps=[logits])
            mbarrier.arrive(k_empty.index(stage), count=1)
            weights, peak, decay = soften(logits, peak, n0, sight, shaping, window_left, BLOCK_N, S_LAYOUT)
            weight = weight * decay + gl.sum(weights, 1)
            # waiting for keys here, not before they are used, keeps the exponentials above the wait below: the
            # assembler moves them past it otherwise, and nothing runs beside the matrix unit
            ahead = turn + 1
            mbarrier.wait(k_full.index(ahead % STAGES), (ahead // STAGES) & 1, pred=block + 1 < blocks)
            acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(decay, O_ROWS)[:, None]
            p = gl.convert_layout(weights.to(dtype), P_LAYOUT)
        v_stage = turn % STAGES
        mbarrier.wait(v_full.index(v_stage), (turn // STAGES) & 1)
        turn += 1
        acc = warpgroup_mma(p, v_blocks.index(v_stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)

        seen = weight > 0
        lse2 = gl.where(seen, peak + gl.log2(gl.where(seen, weight, 1.0)), float("-inf"))
        places = (start + token).to(gl.int64)
        if part_ptr is not None:
            # the sink joins where shares are merged
            places = (places * (HEADS // HEAD_BLOCKS * GROUP) + q_head) * step[2] + split
            gl.store(part_lse_ptr + places, lse2, mask=valid)
        else:
            if lse_ptr is not None:
                gl.store(lse_ptr + places * lse_stride_t + q_head * lse_stride_h, lse2 * LN_2, mask=valid)
            if sinks_ptr is not None:
                sink = gl.load(sinks_ptr + q_head, mask=valid, other=0.0).to(gl.float32) * LOG2_E
                weight += gl.exp2(sink - gl.where(seen, peak, 0.0))
        inverse = gl.where(seen, 1.0 / gl.where(seen, weight, 1.0), 0.0)
        acc = acc * gl.convert_layout(inverse, O_ROWS)[:, None]
        if part_ptr is not None:
            e = gl.arange(0, DV, gl.SliceLayout(0, O_LAYOUT))
            rows = gl.convert_layout(places, O_ROWS) * DV
            # a share that saw nothing is known by its LSE and never read
            keep = gl.convert_layout(valid & seen, O_ROWS)
            gl.store(part_ptr + rows[:, None] + e[None, :], acc, mask=keep[:, None])
        else:
            token, q_head, valid = query_rows(WARPGROUP, head, first, q_len, HEAD_BLOCKS, GROUP, PACK, WIDE_ROWS)
            rows = (start + token).to(gl.int64) * out_stride_t + q_head * out_stride_h
            e = gl.arange(0, DV, gl.SliceLayout(0, WIDE))
            gl.store(out_ptr + rows[:, None] + e[None, :], gl.convert_layout(acc.to(dtype), WIDE), mask=valid[:, None])
        taken += 1
        row, first, head, split = take(tickets, told, read, taken)
