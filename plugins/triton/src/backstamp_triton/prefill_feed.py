"""The loading half of the Hopper prefill kernel: which tile runs next, and its keys and values by TMA.

In: the step's row tensors, the cache as TMA descriptors, shared memory and its barriers. Out: full blocks, announced on
their barriers. One warp runs it beside the two warpgroups of `prefill_hopper.py`, and tells them each tile. It must
never read a page id past the keys some query sees, and leaves zeros where a value block has rows that no query sees
(there the cache may hold NaN).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backstamp_triton.gluon_names import copy_box, recast
from backstamp_triton.prefill_queue import ROWS_AT_ONCE, count_tiles, find_tile, post
from backstamp_triton.prefill_tiles import bound

__all__ = ["PANEL", "feed"]

#: Columns of one shared-memory panel: 128 bytes, the widest swizzle.
PANEL = gl.constexpr(64)


@gluon.jit
def feed(
    k_desc,
    v_desc,
    k_pieces,
    v_pieces,
    tickets,
    bars,
    index,
    step,
    k_places,
    v_places,
    window_left,
    HEADS: gl.constexpr,
    HEAD_BLOCKS: gl.constexpr,
    TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ROWS: gl.constexpr,
    INDEX: gl.constexpr,
    CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Find every tile of this program, tell it, and load its blocks, the last one first."""
    PIECES: gl.constexpr = BLOCK_N // ROWS
    # bytes of a row; fp16 and bf16 alone come here
    K_BYTES: gl.constexpr = BLOCK_N * DK * 2
    V_BYTES: gl.constexpr = BLOCK_N * DV * 2
    k_full, k_empty, v_full, v_empty, tail, told, read = bars
    page_ids, page_rows, page_ids_stride = index
    num_rows = step[0]
    dtype: gl.constexpr = v_pieces.dtype
    EIGHTS: gl.constexpr = STAGES * (DV // PANEL) * (BLOCK_N // 8)
    SHARED: gl.constexpr = v_pieces.layout
    v_eights = recast(v_pieces, dtype, [EIGHTS, 8, PANEL], SHARED)
    turn = 0
    tails = 0
    posted = 0
    num_splits = step[2]
    programs = gl.num_programs(0)
    tile = gl.program_id(0)
    # rows are counted in lots, from the last on; tiles only grow
    at = num_rows // ROWS_AT_ONCE * ROWS_AT_ONCE
    after = 0
    counted = count_tiles(step, at, TOKENS)
    # a row of padding is always there
    more = num_rows >= 0
    while more:
        number = tile // num_splits // HEADS
        while (number - after >= counted[1]) & (at > 0):
            after += counted[1]
            at -= ROWS_AT_ONCE
            counted = count_tiles(step, at, TOKENS)
        more = number - after < counted[1]
        if more:
            head = tile // num_splits % HEADS
            split = tile % num_splits
            row, nth = find_tile(number, counted, at, after)
            first = nth * TOKENS
            post(tickets, told, read, posted, row, first, head, split)
            posted += 1
            # every second round the other way about: tiles grow shorter, and who had the longest gets the shortest
            tile = posted * programs + gl.where(posted % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
            queries, keys = bound(row, first, split, step, window_left, TOKENS, BLOCK_N, CAUSAL)
            _start, _q_len, kv_len, _causal = queries
            low, high, begin, blocks = keys
            kv_head = head // HEAD_BLOCKS
            some = row < num_rows
            if INDEX == "page_table":
                ids = page_ids + row.to(gl.int64) * page_ids_stride
            elif INDEX == "indirect":
                ids = page_ids + gl.load(page_rows + row, mask=some, other=0).to(gl.int64) * page_ids_stride
            elif INDEX == "csr":
                ids = page_ids + gl.load(page_rows + row, mask=some, other=0).to(gl.int64)
            else:
                ids = gl.load(page_rows + row, mask=some, other=0).to(gl.int32)
            # a tile that sees nothing is cleared whole: what it loads is a page of somebody else's
            stop = gl.where(high > low, kv_len, low)
            pages = (ids, low // PAGE_SIZE, gl.maximum(high - 1, 0) // PAGE_SIZE, high > low)
            for block in range(begin + blocks - 1, begin - 1, -1):
                n0 = block * BLOCK_N
                stage = turn % STAGES
                phase = (turn // STAGES) & 1
                turn += 1
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                full = k_full.index(stage)
                mbarrier.expect(full, K_BYTES)
                _load(k_desc, k_pieces, full, stage, n0, pages, kv_head, k_places, DK, ROWS, PIECES, PAGE_SIZE, INDEX)
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                full = v_full.index(stage)
                if (n0 + BLOCK_N > stop) | (n0 < low):
                    mbarrier.expect(tail, V_BYTES)
                    _load(
                        v_desc, v_pieces, tail, stage, n0, pages, kv_head, v_places, DV, ROWS, PIECES, PAGE_SIZE, INDEX
                    )
                    mbarrier.wait(tail, tails & 1)
                    tails += 1
                    _clear(v_eights, stage, n0, low, stop, DV, BLOCK_N)
                    fence_async_shared()
                    mbarrier.arrive(full, count=1)
                else:
                    mbarrier.expect(full, V_BYTES)
                    _load(
                        v_desc, v_pieces, full, stage, n0, pages, kv_head, v_places, DV, ROWS, PIECES, PAGE_SIZE, INDEX
                    )
    post(tickets, told, read, posted, -1, 0, 0, 0)


@gluon.jit
def _load(
    desc,
    pieces,
    bar,
    stage,
    n0,
    pages,
    kv_head,
    places,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    PIECES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    INDEX: gl.constexpr,
):
    """Start the copies of one block: pieces of at most a page, by panels of 64 columns."""
    ids, first_page, last_page, some = pages
    head_rows, head_cols, page_stride = places
    PANELS: gl.constexpr = DIM // PANEL
    for piece in gl.static_range(PIECES):
        n = n0 + piece * ROWS
        if INDEX == "ragged":
            at = ids + n + kv_head * head_rows
        else:
            # a piece that nobody sees is loaded from a page somebody does: every block brings the same bytes
            entry = gl.minimum(gl.maximum(n // PAGE_SIZE, first_page), last_page)
            page = gl.load(ids + entry, mask=some, other=0).to(gl.int32)
            at = page * page_stride + n % PAGE_SIZE + kv_head * head_rows
        for panel in gl.static_range(PANELS):
            target = pieces.index((stage * PANELS + panel) * PIECES + piece)
            copy_box(desc, [at, kv_head * head_cols + panel * PANEL], bar, target)


@gluon.jit
def _clear(eights, stage, n0, low, stop, DIM: gl.constexpr, BLOCK_N: gl.constexpr):
    """Write zeros over a value block's rows outside `[low, stop)`, eight rows at a time."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    EIGHTS: gl.constexpr = BLOCK_N // 8
    for panel in gl.static_range(DIM // PANEL):
        for eight in range(EIGHTS):
            first = n0 + eight * 8
            if (first + 8 > stop) | (first < low):
                view = eights.index((stage * (DIM // PANEL) + panel) * EIGHTS + eight)
                n = first + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
                seen = (n >= low) & (n < stop)
                rows = view.load(LAYOUT)
                view.store(gl.where(seen[:, None], rows, gl.zeros_like(rows)))
