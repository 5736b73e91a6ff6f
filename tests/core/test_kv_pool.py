"""The speculative engine's cache: scattered pages, NaN wherever nobody wrote, tokens that move."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from backstamp.errors import BadInput
from backstamp.testing.kv_pool import KVPool


def test_pages_are_scattered_and_hold_nan_until_written_and_after_release() -> None:
    """Neighbouring tokens lie on unrelated pages; an unwritten or released slot cannot pass for a key."""
    pool = KVPool(16, 4, 2, 1, 8, 6)
    pages = pool.allocate(6)
    assert all(abs(after - before) != 1 for before, after in pairwise(pages))
    kv = pool.paged(1)
    assert kv.v is not None
    assert (kv.k.shape, kv.v.shape, kv.k.stride(-1)) == ((16, 4, 1, 8), (16, 4, 1, 6), 1)
    assert kv.k.isnan().all()
    assert kv.v.isnan().all()
    slots = pool.slots(pages, 3, 9)
    pool.write(1, torch.ones(6, 1, 8), torch.full((6, 1, 6), 2.0), slots)
    assert kv.k.flatten(0, 1)[slots].eq(1).all()
    assert kv.v.flatten(0, 1)[slots].eq(2).all()
    assert pool.paged(0).k.isnan().all()
    pool.release(pages)
    assert kv.k.isnan().all()
    assert pool.num_free == 16


def test_tokens_move_in_every_layer_even_onto_themselves() -> None:
    """Overlapping copies read everything before they write."""
    pool = KVPool(4, 4, 2, 1, 2, 2)
    pages = pool.allocate(2)
    marks = torch.arange(6.0)[:, None, None].expand(-1, 1, 2)
    for layer in (0, 1):
        pool.write(layer, marks, marks, pool.slots(pages, 0, 6))
    pool.copy_tokens(pool.slots(pages, 2, 6), pool.slots(pages, 1, 5))
    for layer in (0, 1):
        assert pool.paged(layer).k.flatten(0, 1)[pool.slots(pages, 0, 6), 0, 0].tolist() == [0, 2, 3, 4, 5, 5]


def test_a_table_ends_in_minus_one() -> None:
    """Entries past a row's tokens are no page, even where the row holds more pages."""
    index = KVPool(8, 4, 1, 1, 8, 8).index([[5, 2, 7], [3]], [9, 4])
    assert index.page_table is not None
    assert index.page_table.tolist() == [[5, 2, 7], [3, -1, -1]]


def test_more_pages_than_are_free_are_refused() -> None:
    """The pool never hands a page out twice."""
    pool = KVPool(4, 4, 1, 1, 8, 8)
    pool.allocate(3)
    with pytest.raises(BadInput, match="needs 2 free pages, got 1"):
        pool.allocate(2)
