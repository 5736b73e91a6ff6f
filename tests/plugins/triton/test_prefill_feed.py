"""The loading warp of the Hopper prefill kernel, run as Python: every tile once, and no page that no query sees."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from backstamp_triton.prefill_feed import feed
from backstamp_triton.prefill_queue import post, take
from tests.plugins.triton.gluon_python import Pointer, Program, python_of

BLOCK, STAGES = 128, 2
#: (query tokens, keys) of rows: one, none and several tiles each; over two lots of 32 rows.
STEPS = {
    "one row": ((512, 512),),
    "one short row": ((3, 700),),
    "rows of a tile": ((32, 8192),) * 8,
    "rows apart": ((65, 65), (1, 40), (0, 17), (130, 300), (33, 97)),
    "a full lot": ((40, 90),) * 31,
    "a lot and the padding": ((40, 90),) * 32,
    "two lots": tuple((37 * row % 110, 37 * row % 110 + 11 * row % 90) for row in range(70)),
    "empty rows": ((0, 0),) * 40 + ((5, 9),) + ((0, 3),) * 30,
    "no keys": ((17, 0), (40, -3), (2, 2)),
}


class Told:
    """What one program tells the warpgroups, and the boxes it copies for each tile."""

    def __init__(self) -> None:
        self.tiles: list[tuple[int, int, int, int]] = []
        self.boxes: list[list[tuple[int, int]]] = []

    def post(self, tickets, full, empty, turn, row, first, head, split) -> None:
        """Keep a tile; turns count up."""
        assert turn == len(self.tiles)
        self.tiles.append((int(row), int(first), int(head), int(split)))
        self.boxes.append([])

    def copy(self, desc, place, bar, target) -> None:
        """Keep where a box of keys or values comes from."""
        self.boxes[-1].append((desc, int(place[0])))


class Anything:
    """A barrier, a piece of shared memory, a layout."""

    dtype = layout = None

    def index(self, at):
        """Any of its parts."""
        return self


def run(rows, pads=0, heads=2, pack=4, splits=1, programs=132, page=64, causal="yes", window=None) -> list[Told]:
    """Every program of a launch; ids past the keys of a row are -1."""
    q_lens, kv_lens = (np.array(of, dtype=np.int64) for of in zip(*rows, strict=True))
    starts = np.concatenate([[0], np.cumsum(q_lens)])
    width = max(1, -(-int(kv_lens.max()) // page))
    table = np.arange(1, 1 + len(rows) * width).reshape(len(rows), width)
    table = np.where(np.arange(width) * page < kv_lens[:, None], table, -1)
    step = (len(rows), int(starts[-1]) + pads, splits, Pointer(starts), Pointer(kv_lens), None)
    found = []
    nothing = Anything()
    barrier = SimpleNamespace(wait=_nothing, expect=_nothing, arrive=_nothing)
    for number in range(programs):
        told = Told()
        loading = python_of(
            feed,
            Program(number, programs),
            post=told.post,
            copy_box=told.copy,
            _clear=_nothing,
            mbarrier=barrier,
            fence_async_shared=_nothing,
            recast=_anything,
        )
        index = (Pointer(table.ravel()), None, width)
        places = (0, 0, page)
        loading(
            *("k", "v", nothing, nothing, nothing, (nothing,) * 7, index, step, places, places, window),
            *(heads, 1, 128 // pack, BLOCK, 128, 128, page, min(page, BLOCK), "page_table", causal, STAGES),
        )
        found.append(told)
    return found


def _anything(*given) -> Anything:
    """Shared memory under another shape."""
    return Anything()


def _nothing(*given, **named) -> None:
    """What a CPU has no part in."""


def tiles_of(rows, pads, heads, tokens, splits):
    """Every tile of a step, each once."""
    counts = [-(-q_len // tokens) for q_len, _ in rows] + [-(-pads // tokens)]
    every = ((row, at * tokens) for row, count in enumerate(counts) for at in range(count))
    return sorted((*tile, *of) for tile, of in itertools.product(every, itertools.product(range(heads), range(splits))))


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("programs", "splits", "pads"), [(132, 1, 0), (132, 2, 200), (3, 3, 1), (1, 1, 0)])
def test_every_tile_is_told_once_and_the_programs_share_them(rows, programs, splits, pads):
    """Whatever rows there are: none twice, none left out, none that no token fills; shares differ by one tile."""
    told = run(rows, pads, splits=splits, programs=programs)
    assert all(of.tiles[-1] == (-1, 0, 0, 0) for of in told)
    tiles = sorted(tile for of in told for tile in of.tiles[:-1])
    assert tiles == tiles_of(rows, pads, 2, 32, splits)
    counts = [len(of.tiles) for of in told]
    assert max(counts) - min(counts) <= 1


def test_the_longest_tiles_are_dealt_first_and_back_again():
    """Eight tiles of one row to three programs: who takes the longest of one round takes the shortest of the next."""
    told = run(((1024, 1024),), heads=1, pack=1, programs=3)
    assert [[tile[1] // 128 for tile in of.tiles[:-1]] for of in told] == [[7, 2, 1], [6, 3, 0], [5, 4]]


@pytest.mark.parametrize("causal", ["yes", "no"])
@pytest.mark.parametrize("window", [None, 127])
@pytest.mark.parametrize("page", [16, 64, 256])
def test_only_pages_that_a_query_sees_are_copied(page, window, causal):
    """Ids past a row's keys are -1 and never copied; every block is a whole one, keys and values alike."""
    rows = STEPS["rows apart"]
    for of in run(rows, page=page, window=window, causal=causal, programs=5):
        for (row, *_), boxes in zip(of.tiles[:-1], of.boxes[:-1], strict=True):
            width = max(1, -(-300 // page))
            first = (1 + row * width) * page
            last = first + -(-rows[row][1] // page) * page
            keys, values = ([at for desc, at in boxes if desc == side] for side in "kv")
            assert keys == values
            assert len(keys) % (2 * BLOCK // min(page, BLOCK)) == 0
            assert all(first <= at < last for at in keys)


def test_shares_of_a_tile_read_its_blocks_between_them():
    """Three programs, one tile of 1000 keys in three shares: eight blocks in all, the last of a share first."""
    (first, second, third) = run(((16, 1000),), heads=1, splits=3, programs=3, page=128)
    blocks = [[at // 128 - 1 for desc, at in of.boxes[0] if desc == "k"][::2] for of in (first, second, third)]
    assert sorted(block for share in blocks for block in share) == list(range(8))
    assert all(share == sorted(share, reverse=True) for share in blocks)


def test_a_tile_without_keys_still_runs_one_block():
    """It is cleared whole: its queries' answers are zeros."""
    for of in run(STEPS["no keys"], programs=2):
        assert all(boxes for boxes in of.boxes[:-1])


def test_a_ticket_waits_until_the_last_one_was_read():
    """Turn by turn: the first is written at once, each later one behind the phase in which the last was read."""
    log: list[tuple[object, ...]] = []
    barrier = SimpleNamespace(
        wait=lambda bar, phase: log.append(("wait", bar, phase)), arrive=lambda bar, count: log.append(("arrive", bar))
    )
    memory = SimpleNamespace()
    memory.store = lambda ticket: log.append(("store",)) or setattr(memory, "load", lambda layout: ticket)
    program = Program(0, 1)
    posting, taking = (python_of(of, program, mbarrier=barrier) for of in (post, take))
    for turn in range(3):
        posting(memory, "told", "read", turn, 7 + turn, 64, 3, 1)
        assert tuple(map(int, taking(memory, "told", "read", turn))) == (7 + turn, 64, 3, 1)
        written = [("wait", "read", 1 - turn % 2), ("store",), ("arrive", "told")]
        assert log[-5:] == [*written, ("wait", "told", turn % 2), ("arrive", "read")]
