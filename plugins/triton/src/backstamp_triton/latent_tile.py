"""The latent-cache kernel for Hopper: absorbed MLA over pages, in explicit copies, barriers and warpgroup products.

In: queries `[T, Hq, 576]` (or the rotary part apart), the cache's rows, the step's row tensors. Out: outputs and
natural-log LSE, or one split's share for `combine.py`. A tile is 64 queries (tokens of one row times heads) by two key
blocks of 64 in flight: one warp copies boxes of pages, or four gather rows where pages are no whole boxes; two
warpgroups compute (`latent_parts.py`). No value of a slot past the keys a tile sees may reach a product (padding may
hold NaN), and no address is formed in 32 bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backstamp_triton.gluon_names import copy_box, copy_rows, recast
from backstamp_triton.latent_parts import PANEL, attend_left, attend_right

__all__ = ["attend_latent"]


# sizes change every step: no kernel of its own for a row count of 1 or a multiple of 16
@gluon.jit(do_not_specialize=["num_rows", "num_tokens"])
def attend_latent(
    q_ptr, q_rope_ptr, rows_ptr, rows_desc, out_ptr, lse_ptr, part_ptr, part_lse_ptr, sinks_ptr,
    qo_indptr, kv_lens, page_ids, page_rows, num_rows, num_tokens, page_ids_stride, rows_per_page, rows_stride,
    q_stride_t, q_stride_h, q_rope_stride_t, q_rope_stride_h,
    out_stride_t, out_stride_h, lse_stride_t, lse_stride_h, logit_scale,
    HEADS: gl.constexpr, PACK: gl.constexpr, PAGE_SIZE: gl.constexpr, INDEX: gl.constexpr, CAUSAL: gl.constexpr,
    ONE_TOKEN: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Attend one tile; grid (tiles * head blocks, splits), blocks of a tile side by side.

    Absent tensors are None. A tile packs `64 // PACK` tokens with PACK heads. Pages lie `rows_per_page` of the cache's
    rows apart; `rows_desc` copies boxes of a page (at most 64 rows) by 64 columns of them, without it rows are gathered
    at `rows_ptr`. `logit_scale` is the scale times log2(e). INDEX: "page_table", "csr" or "indirect". ONE_TOKEN: no row
    holds more than one token, so program i is row i.
    """
    TOKENS: gl.constexpr = 64 // PACK
    HEAD_BLOCKS: gl.constexpr = (HEADS + PACK - 1) // PACK
    # rows: tokens past the last row are padding and form one more row, without keys
    total = gl.load(qo_indptr + num_rows).to(gl.int32)
    if ONE_TOKEN:
        row = gl.program_id(0) // HEAD_BLOCKS
        start = gl.load(qo_indptr + gl.minimum(row, num_rows)).to(gl.int32)
        stop = gl.load(qo_indptr + gl.minimum(row + 1, num_rows)).to(gl.int32)
        # the i-th row without a token answers for the i-th padding token
        has_token = stop > start
        start = gl.where(has_token, start, total + row - start)
        stop = gl.minimum(start + 1, num_tokens)
        first = 0
    else:
        # row b's tiles begin at slot `qo_indptr[b] // TOKENS + b`; heavy (late) tiles of a causal row go first
        slot = (gl.num_programs(0) - 1 - gl.program_id(0)) // HEAD_BLOCKS
        row = 0
        above = num_rows
        while row < above:
            middle = (row + above + 1) // 2
            begins = gl.load(qo_indptr + middle).to(gl.int32) // TOKENS + middle
            row = gl.where(begins <= slot, middle, row)
            above = gl.where(begins <= slot, above, middle - 1)
        start = gl.load(qo_indptr + row).to(gl.int32)
        stop = gl.load(qo_indptr + gl.minimum(row + 1, num_rows)).to(gl.int32)
        has_token = row < num_rows
        stop = gl.where(has_token, stop, num_tokens)
        first = (slot - (start // TOKENS + row)) * TOKENS
    q_len = stop - start
    if first < q_len:
        # the padding row's loads are another row's, so that no load waits for another one's answer
        known = gl.minimum(row, num_rows - 1)
        # a pad row may carry a negative length
        kv_len = gl.where(has_token, gl.maximum(gl.load(kv_lens + known).to(gl.int32), 0), 0)
        if INDEX == "page_table":
            ids = page_ids + known.to(gl.int64) * page_ids_stride
        elif INDEX == "indirect":
            ids = page_ids + gl.load(page_rows + known).to(gl.int64) * page_ids_stride
        else:
            ids = page_ids + gl.load(page_rows + known).to(gl.int64)
        end = kv_len
        if CAUSAL:
            end = gl.maximum(gl.minimum(kv_len - q_len + gl.minimum(first + TOKENS, q_len), kv_len), 0)
        last_page = gl.maximum(end - 1, 0) // PAGE_SIZE
        begin = 0
        if SPLIT:
            share = gl.cdiv(gl.cdiv(end, 64), gl.num_programs(1)) * 64
            begin = gl.program_id(1) * share
            end = gl.minimum(end, begin + share)

        GATHER: gl.constexpr = rows_desc is None
        queries = _blocks(q_ptr.dtype.element_ty, [])
        keys = _blocks(q_ptr.dtype.element_ty, [2])
        weights = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [64, 64], PANEL)
        decays = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        # both stages of what the left warpgroup folds, the rotary part with it, and of what the right one does; then
        # the parts of a cut block
        full = _barriers(6, 128 if GATHER else 1)
        empty = _barriers(4, 1)
        bars = (full, empty, _barriers(1, 1).index(0))
        tile = (first, start, q_len, kv_len, gl.program_id(0) % HEAD_BLOCKS)
        inputs = (q_ptr, q_rope_ptr, q_stride_t, q_stride_h, q_rope_stride_t, q_rope_stride_h)
        outputs = (out_ptr, lse_ptr, part_ptr, part_lse_ptr, sinks_ptr)
        strides = (out_stride_t, out_stride_h, lse_stride_t, lse_stride_h)
        gl.warp_specialize(
            [
                (
                    attend_left,
                    (inputs, queries, keys, weights, decays, bars, outputs, strides, tile, begin, end, logit_scale,
                     HEADS, PACK, CAUSAL, SPLIT, GATHER),
                ),
                (
                    attend_right,
                    (keys[1], weights, decays, bars, outputs, strides, tile, begin, end, HEADS, PACK, SPLIT, GATHER),
                ),
                (
                    _bring_keys,
                    (rows_ptr, rows_stride, rows_desc, ids, keys, full, empty, begin, end, rows_per_page, last_page,
                     PAGE_SIZE),
                ),
            ],
            [4, 4 if GATHER else 1],
            [192, 72 if GATHER else 56],
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
def _bring_keys(
    rows_ptr, rows_stride, rows_desc, ids, keys, full, empty, begin, end, rows_per_page, last_page,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Keep two blocks of keys `[begin, end)` in flight."""
    if rows_desc is None:
        _gather_keys(rows_ptr, rows_stride, ids, keys, full, empty, begin, end, rows_per_page, PAGE_SIZE)
    else:
        _copy_keys(rows_desc, ids, keys, full, empty, begin, end, rows_per_page, last_page, PAGE_SIZE)


@gluon.jit
def _gather_keys(
    rows_ptr, rows_stride, ids, keys, full, empty, begin, end, rows_per_page, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Row by row, from pages of any size; zeros past the end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = begin + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    page = gl.load(ids + at // PAGE_SIZE, mask=at < end, other=0)
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        phase = (block // 2 & 1) ^ 1
        live = (at < end)[:, None]
        rows = rows_ptr + (page.to(gl.int64) * rows_per_page + at % PAGE_SIZE) * rows_stride
        places = rows[:, None] + columns[None, :]
        # the next block's page ids are under way before this one's room is free
        at += 64
        page = gl.load(ids + at // PAGE_SIZE, mask=at < end, other=0)
        mbarrier.wait(empty.index(stage), phase)
        copy_rows(keys[2].index(stage), places + 512, mask=live)
        _gather_half(keys[0].index(stage), places, live)
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        mbarrier.wait(empty.index(2 + stage), phase)
        _gather_half(keys[1].index(stage), places + 256, live)
        async_copy.mbarrier_arrive(full.index(2 + stage), increment_count=False)


@gluon.jit
def _gather_half(half, places, live):
    """Copy 256 columns of 64 rows, 64 at a time: a thread holds few addresses."""
    panels = _panels(half, 4)
    for panel in gl.static_range(4):
        copy_rows(panels.index(panel), places + panel * 64, mask=live)


@gluon.jit
def _copy_keys(
    rows_desc, ids, keys, full, empty, begin, end, rows_per_page, last_page, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Box by box, from pages that are whole boxes or share one; the last block's values past the end are zeroed."""
    BOX: gl.constexpr = PAGE_SIZE if PAGE_SIZE < 64 else 64
    for n0 in range(begin, end, 64):
        block = (n0 - begin) // 64
        stage = block % 2
        phase = (block // 2 & 1) ^ 1
        whole = end - n0 >= 64
        rows = ()
        for i in gl.static_range(64 // BOX):
            # past the last page comes the last page again: what it brings is masked and zeroed
            page = gl.minimum((n0 + i * BOX) // PAGE_SIZE, last_page)
            rows = rows + (gl.load(ids + page).to(gl.int32) * rows_per_page + (n0 + i * BOX) % PAGE_SIZE,)
        # each part once its own room is free
        bar = full.index(gl.where(whole, stage, 4))
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(bar, 64 * 320 * 2)
        _copy_part(rows_desc, rows, keys[2].index(stage), bar, 512, BOX)
        _copy_part(rows_desc, rows, keys[0].index(stage), bar, 0, BOX)
        bar = full.index(gl.where(whole, 2 + stage, 5))
        mbarrier.wait(empty.index(2 + stage), phase)
        mbarrier.expect(bar, 64 * 256 * 2)
        _copy_part(rows_desc, rows, keys[1].index(stage), bar, 256, BOX)
        if not whole:
            mbarrier.wait(full.index(4), 0)
            mbarrier.wait(full.index(5), 0)
            _zero_rows(keys[0].index(stage), end - n0)
            _zero_rows(keys[1].index(stage), end - n0)
            fence_async_shared()
            mbarrier.arrive(full.index(stage), count=1)
            mbarrier.arrive(full.index(2 + stage), count=1)


@gluon.jit
def _copy_part(rows_desc, rows, part, bar, COLUMN: gl.constexpr, BOX: gl.constexpr):
    """Copy 64 rows of some columns, box by box."""
    PANELS: gl.constexpr = part.shape[1] // 64
    panels = _panels(part, PANELS)
    for i in gl.static_range(64 // BOX):
        for panel in gl.static_range(PANELS):
            box = panels.index(panel).slice(i * BOX, BOX, 0)
            copy_box(rows_desc, [rows[i], COLUMN + panel * 64], bar, box)


@gluon.jit
def _zero_rows(values, valid):
    """Zero the rows of a half block from `valid` on: a weight of zero times NaN is NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    m = gl.arange(0, 16, layout=gl.SliceLayout(1, LAYOUT))
    panels = _panels(values, 4)
    for panel in range(4):
        for i in gl.static_range(4):
            if valid < i * 16 + 16:
                rows = panels.index(panel).slice(i * 16, 16, 0)
                kept = gl.where((m < valid - i * 16)[:, None], rows.load(LAYOUT), 0.0)
                rows.store(kept.to(values.dtype))


@gluon.jit
def _panels(part, PANELS: gl.constexpr):
    """64 rows as panels of 64 columns."""
    dtype: gl.constexpr = part.dtype
    return recast(part, dtype, [PANELS, 64, 64], PANEL)
