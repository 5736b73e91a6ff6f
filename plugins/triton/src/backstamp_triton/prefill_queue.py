"""Which tile of the Hopper prefill kernel runs next: found by the loading warp, told to the warpgroups.

In: the step's row tensors. Out: tiles, counted from the last row's last on, so that those with the most keys to read
come first: row, shares and heads of one tile lie side by side. There are no others: a tile that no row fills would
leave its program idle while another has two. It loads no query, key or value.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

__all__ = ["ROWS_AT_ONCE", "count_tiles", "find_tile", "post", "take"]

#: Rows whose tiles are counted at once: one for each thread of a warp.
ROWS_AT_ONCE = gl.constexpr(32)


@gluon.jit
def count_tiles(step, at, TOKENS: gl.constexpr):
    """Tiles of a head up to and with each of the rows `[at, at + ROWS_AT_ONCE)`, and of all of them.

    The tokens past the last row are one more row, of padding.
    """
    num_rows, num_tokens, _num_splits, qo_indptr, _kv_lens, _causal_rows = step
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = at + gl.arange(0, ROWS_AT_ONCE, LAYOUT)
    begin = gl.load(qo_indptr + row, mask=row <= num_rows, other=0).to(gl.int32)
    end = gl.load(qo_indptr + row + 1, mask=row < num_rows, other=0).to(gl.int32)
    end = gl.where(row == num_rows, num_tokens, end)
    tiles = (gl.maximum(end - begin, 0) + TOKENS - 1) // TOKENS
    return gl.associative_scan(tiles, 0, _add), gl.sum(tiles, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def find_tile(number, counted, at, after):
    """Row and first tile of it for the tile `number` of a head, which is one of the rows counted from `at` on.

    `counted` is what `count_tiles` answered; `after` counts the tiles of the rows behind them.
    """
    upto, total = counted
    below = total - 1 - (number - after)
    before = upto <= below
    row = at + gl.sum(before.to(gl.int32), 0)
    return row, below - gl.max(gl.where(before, upto, 0), 0)


@gluon.jit
def post(tickets, full, empty, turn, row, first, head, split):
    """Tell the warpgroups of the next tile, once both have read the last one; a row below 0 ends them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    field = gl.arange(0, 4, LAYOUT)
    ticket = gl.where(field == 0, row, gl.where(field == 1, first, gl.where(field == 2, head, split)))
    mbarrier.wait(empty, (turn & 1) ^ 1)
    tickets.store(ticket)
    mbarrier.arrive(full, count=1)


@gluon.jit
def take(tickets, full, empty, turn):
    """The next tile: row, first token of it, head group, share."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    mbarrier.wait(full, turn & 1)
    ticket = tickets.load(LAYOUT)
    mbarrier.arrive(empty, count=1)
    field = gl.arange(0, 4, LAYOUT)
    row = gl.sum(gl.where(field == 0, ticket, 0), 0)
    first = gl.sum(gl.where(field == 1, ticket, 0), 0)
    head = gl.sum(gl.where(field == 2, ticket, 0), 0)
    split = gl.sum(gl.where(field == 3, ticket, 0), 0)
    return row, first, head, split
