"""Splitting a mixed batch: disjoint slices, rebased offsets, and never a reordering."""

from __future__ import annotations

from dataclasses import replace

import torch

from backstamp.attention import Batch, KVIndex
from backstamp.forward import split_batch

MIXED = Batch(
    phase="prefill",
    num_rows=4,
    num_tokens=9,
    max_q_len=4,
    max_kv_len=20,
    num_decode_rows=2,
    num_decode_tokens=2,
    decode_q_len=1,
    qo_indptr=torch.tensor([0, 1, 2, 5, 9], dtype=torch.int32),
    kv_lens=torch.tensor([7, 3, 20, 4], dtype=torch.int32),
    index=KVIndex(
        page_size=4,
        page_table=torch.arange(20, dtype=torch.int32).reshape(4, 5),
        kv_indptr=torch.tensor([0, 2, 3, 8, 9], dtype=torch.int32),
        kv_indices=torch.arange(9, dtype=torch.int32),
        table=torch.arange(20, dtype=torch.int32).reshape(4, 5),
        row_ids=torch.tensor([3, 2, 1, 0]),
    ),
    qo_indptr_host=torch.tensor([0, 1, 2, 5, 9], dtype=torch.int32),
    kv_lens_host=torch.tensor([7, 3, 20, 4], dtype=torch.int32),
    slot_mapping=torch.arange(9),
    token_rows=torch.tensor([0, 1, 2, 2, 2, 3, 3, 3, 3], dtype=torch.int32),
)


def test_leading_decode_rows_and_the_rest_are_disjoint() -> None:
    """Each side has its own rows, tokens and index, and the tail's offsets start at zero."""
    decode, rest = split_batch(MIXED)
    assert (decode.phase, decode.num_rows, decode.num_tokens, decode.max_q_len) == ("decode", 2, 2, 1)
    assert (rest.phase, rest.num_rows, rest.num_tokens) == ("prefill", 2, 7)
    assert decode.qo_indptr.tolist() == [0, 1, 2]
    assert rest.qo_indptr.tolist() == [0, 3, 7]
    assert rest.qo_indptr_host.tolist() == [0, 3, 7]
    assert (decode.kv_lens.tolist(), rest.kv_lens.tolist()) == ([7, 3], [20, 4])
    assert rest.index.page_table.tolist() == MIXED.index.page_table[2:].tolist()
    assert rest.index.kv_indptr.tolist() == [3, 8, 9]
    assert rest.index.row_ids.tolist() == [1, 0]
    assert rest.slot_mapping.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert rest.token_rows.tolist() == [0, 0, 0, 1, 1, 1, 1]


def test_the_tails_offsets_may_live_in_a_buffer_of_fixed_address() -> None:
    """A graph-captured tail keeps its address from step to step."""
    buffer = torch.zeros(8, dtype=torch.int32)
    _, rest = split_batch(MIXED, buffer)
    assert rest.qo_indptr.data_ptr() == buffer.data_ptr()
    assert buffer[:3].tolist() == [0, 3, 7]


def test_rows_that_are_not_decode_first_go_to_prefill_whole() -> None:
    """Backstamp never reorders: without a split point prefill takes all."""
    decode, rest = split_batch(replace(MIXED, num_decode_rows=0, num_decode_tokens=0))
    assert decode is None
    assert (rest.phase, rest.num_rows, rest.num_tokens) == ("prefill", 4, 9)


def test_a_batch_of_decode_rows_only_has_no_rest() -> None:
    """One side empty is None, not an empty batch."""
    only = replace(MIXED, num_rows=2, num_tokens=2, qo_indptr=MIXED.qo_indptr[:3], kv_lens=MIXED.kv_lens[:2])
    decode, rest = split_batch(only)
    assert rest is None
    assert decode.num_rows == 2
