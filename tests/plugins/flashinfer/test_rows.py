"""The page list a step's wrappers read: the engine's own where it is exact, gathered anew where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex
from backstamp.testing.batches import make_batch
from backstamp.testing.requests import request_for
from backstamp_flashinfer.plugin import MHA
from backstamp_flashinfer.rows import HostRows, read_rows, row_pages


def _rows(*page_indptr: int) -> HostRows:
    ints = torch.tensor(page_indptr, dtype=torch.int32)
    lens = (ints[1:] - ints[:-1]) * 16
    return HostRows(
        qo_indptr=torch.arange(len(ints), dtype=torch.int32),
        kv_lens=lens,
        page_indptr=ints,
        last_page_len=torch.where(lens > 0, 16, 0).int(),
        num_tokens=len(lens),
        num_pages=page_indptr[-1],
        max_q_len=1,
        q_len=1,
    )


def test_a_pad_row_of_negative_length_has_no_page():
    """Engines pad with any length; a page list that went backwards would be read out of bounds."""
    request = request_for(MHA, page_size=16, dtype="bf16")
    batch = replace(
        make_batch([1, 1, 1], [20, 16, 5]).batch,
        qo_indptr_host=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        kv_lens_host=torch.tensor([20, 16, -20], dtype=torch.int32),
    )
    rows = read_rows(request, batch, paged=False)
    assert rows.page_indptr.tolist() == [0, 2, 3, 3]
    assert rows.last_page_len.tolist() == [4, 16, 0]


def _csr(starts: list[int], ids: list[int], dtype: torch.dtype = torch.int32) -> KVIndex:
    return KVIndex(
        page_size=16, kv_indptr=torch.tensor(starts, dtype=torch.int32), kv_indices=torch.tensor(ids, dtype=dtype)
    )


def test_a_list_without_slack_is_read_where_it_lies():
    """No launch gathers what is there already."""
    index = _csr([0, 2, 3], [7, 5, 9])
    assert row_pages(index, "csr", _rows(0, 2, 3), torch.device("cpu")) is index.kv_indices


@pytest.mark.parametrize(
    ("starts", "ids", "dtype"),
    [
        ([0, 3, 5], [7, 5, -1, 9, -1], torch.int32),
        ([1, 3, 4], [-1, 7, 5, 9], torch.int32),
        ([0, 2, 3], [7, 5, 9, -1], torch.int32),
        ([0, 2, 3], [7, 5, 9], torch.int64),
    ],
    ids=["slack-after-rows", "starts-later", "longer-list", "i64"],
)
def test_any_other_list_is_gathered_as_i32(starts, ids, dtype):
    """Entries past a row's last page are left out, wherever the list has them."""
    pages = row_pages(_csr(starts, ids, dtype), "csr", _rows(0, 2, 3), torch.device("cpu"))
    assert pages.dtype == torch.int32
    assert pages.tolist() == [7, 5, 9]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wide", [False, True], ids=["dense", "columns-of-a-wider"])
@pytest.mark.parametrize("form", ["page_table", "indirect"])
def test_a_table_is_read_through_its_strides(form, wide, dtype):
    """Rows of a table may lie apart, and more of them than the step has; what a row does not own is left out."""
    table = torch.tensor([[7, 5, -1], [8, 8, 8], [9, -1, -1], [6, 4, 3]], dtype=dtype)
    if wide:
        table = torch.cat([table, torch.full_like(table, -1)], 1)[:, :3]
    if form == "page_table":
        index, expected = KVIndex(page_size=16, page_table=table), [7, 5, 9, 6, 4, 3]
        rows = _rows(0, 2, 2, 3, 6)
    else:
        index = KVIndex(page_size=16, table=table, row_ids=torch.tensor([2, 3, 0], dtype=torch.int32))
        rows, expected = _rows(0, 1, 4, 6), [9, 6, 4, 3, 7, 5]
    pages = row_pages(index, form, rows, torch.device("cpu"))
    assert pages.dtype == torch.int32
    assert pages.tolist() == expected
