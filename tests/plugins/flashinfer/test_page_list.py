"""The page list a step's wrappers read: the engine's own where it is exact, gathered in one launch where it is not."""

from __future__ import annotations

import contextlib

import pytest
import torch

from backstamp.attention import Batch, KVIndex
from backstamp.errors import UnsupportedBatch
from backstamp.testing.requests import request_for
from backstamp_flashinfer import page_list
from backstamp_flashinfer.page_list import PageLists
from backstamp_flashinfer.plugin import MHA
from backstamp_flashinfer.rows import HostRows
from tests.compiled_code import Kernel, constants_of

WHOLE = (torch.int32, torch.int64)


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
        max_pages=int((ints[1:] - ints[:-1]).max()),
        max_q_len=1,
        q_len=1,
    )


def _csr(
    starts: list[int], ids: list[int], dtype: torch.dtype = torch.int32, starts_dtype: torch.dtype = torch.int32
) -> KVIndex:
    return KVIndex(
        page_size=16, kv_indptr=torch.tensor(starts, dtype=starts_dtype), kv_indices=torch.tensor(ids, dtype=dtype)
    )


def _lists() -> PageLists:
    return PageLists(request_for(MHA, page_size=16, dtype="bf16"))


def _batch(index: KVIndex) -> Batch:
    """Only what a page list reads of it."""
    lens = torch.zeros(0, dtype=torch.int32)
    return Batch(
        phase="decode",
        num_rows=0,
        num_tokens=0,
        max_q_len=1,
        max_kv_len=16,
        qo_indptr=lens,
        kv_lens=lens,
        index=index,
        causal=True,
    )


def _listed(index, form, rows):
    pages = _lists().of(_batch(index), form, rows)
    assert pages.dtype == torch.int32
    assert pages.shape == (rows.num_pages,)
    return pages.tolist()


def test_a_list_without_slack_is_read_where_it_lies():
    """No launch gathers what is there already."""
    index = _csr([0, 2, 3], [7, 5, 9])
    assert _lists().of(_batch(index), "csr", _rows(0, 2, 3)) is index.kv_indices


@pytest.mark.parametrize("starts_dtype", WHOLE)
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
def test_any_other_list_is_gathered_as_i32(starts, ids, dtype, starts_dtype):
    """Entries past a row's last page are left out, wherever the list has them."""
    assert _listed(_csr(starts, ids, dtype, starts_dtype), "csr", _rows(0, 2, 3)) == [7, 5, 9]


@pytest.mark.parametrize("dtype", WHOLE)
@pytest.mark.parametrize("wide", [False, True], ids=["dense", "columns-of-a-wider"])
@pytest.mark.parametrize("form", ["page_table", "indirect-i32", "indirect-i64"])
def test_a_table_is_read_through_its_strides(form, wide, dtype):
    """Rows of a table may lie apart, and more of them than the step has; what a row does not own is left out."""
    table = torch.tensor([[7, 5, -1], [8, 8, 8], [9, -1, -1], [6, 4, 3]], dtype=dtype)
    if wide:
        table = torch.cat([table, torch.full_like(table, -1)], 1)[:, :3]
    if form == "page_table":
        index, expected = KVIndex(page_size=16, page_table=table), [7, 5, 9, 6, 4, 3]
        rows = _rows(0, 2, 2, 3, 6)
    else:
        ids = torch.tensor([2, 3, 0], dtype=torch.int32 if form == "indirect-i32" else torch.int64)
        index = KVIndex(page_size=16, table=table, row_ids=ids)
        rows, expected = _rows(0, 1, 4, 6), [9, 6, 4, 3, 7, 5]
    assert _listed(index, form.partition("-")[0], rows) == expected


@pytest.mark.parametrize("block", [1, 4, 16])
@pytest.mark.parametrize("programs", [1, 3])
def test_a_long_row_is_shared_out(block, programs, monkeypatch):
    """Whatever a program copies at a time, and however few of them a row has, each id lands once and in its place."""
    monkeypatch.setattr(page_list, "BLOCK", block)
    monkeypatch.setattr(page_list, "PROGRAMS_PER_ROW", programs)
    table = torch.randperm(4 * 25, generator=torch.Generator().manual_seed(0)).view(4, 25)
    expected = [*table[0, :23].tolist(), *table[2, :4].tolist(), *table[3].tolist()]
    assert _listed(KVIndex(page_size=16, page_table=table), "page_table", _rows(0, 23, 23, 27, 52)) == expected


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (KVIndex(page_size=16, page_table=torch.zeros(2, 2).int()), "index.page_table: the 3 pages of the longest row"),
        (
            KVIndex(page_size=16, table=torch.zeros(4, 2).int(), row_ids=torch.zeros(2).int()),
            "index.table: the 3 pages of the longest row",
        ),
        (_csr([0, 3, 4], [7, 5, 9]), "index.kv_indices: the 4 pages of all rows"),
    ],
    ids=["page_table", "indirect", "csr"],
)
def test_keys_past_the_listed_pages_are_refused(index, told):
    """A row that is read on past its table has its neighbour's pages, and the last one anybody's memory."""
    with pytest.raises(UnsupportedBatch) as refused:
        _lists().of(_batch(index), _form_of(index), _rows(0, 3, 4))
    assert f"needs {told}, got {2 if 'longest' in told else 3}" in str(refused.value)


def test_the_launch_is_made_on_the_device_of_the_list(monkeypatch):
    """Triton launches on the current device, which may be another."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: asked.append(tensor) or contextlib.nullcontext())
    pages = _lists().of(_batch(_table(torch.int32)), "page_table", _rows(0, 2, 3))
    assert [tensor is pages for tensor in asked] == [True]


@pytest.mark.parametrize("form", ["page_table", "csr"])
def test_a_step_without_pages_launches_nothing(form, monkeypatch):
    """Rows before their first key: a grid of no program is no launch."""
    kernel = Kernel(page_list.gather_pages)
    monkeypatch.setattr(page_list, "gather_pages", kernel)
    table = torch.full((2, 3), -1)
    index = KVIndex(page_size=16, page_table=table, kv_indptr=torch.tensor([0, 3, 6]), kv_indices=table.flatten())
    assert _listed(index, form, _rows(0, 0, 0)) == []
    assert not kernel.first


def _table(dtype: torch.dtype, width: int = 4) -> KVIndex:
    return KVIndex(page_size=16, page_table=torch.zeros(2, width, dtype=dtype))


def _indirect(dtype: torch.dtype, ids: torch.dtype) -> KVIndex:
    return KVIndex(page_size=16, table=torch.zeros(2, 4, dtype=dtype), row_ids=torch.zeros(2, dtype=ids))


def test_later_steps_run_the_code_of_the_first(monkeypatch):
    """Of any sizes and strides, with their own tensors: nothing of those is compiled for."""
    kernel = Kernel(page_list.gather_pages)
    monkeypatch.setattr(page_list, "gather_pages", kernel)
    lists = _lists()
    lists.of(_batch(_table(torch.int32)), "page_table", _rows(0, 2, 3))
    index, rows = _table(torch.int32, 5000), _rows(0, 1, 4001)
    pages = lists.of(_batch(index), "page_table", rows)
    (first,), (again,) = kernel.first, kernel.again
    assert constants_of(again) == constants_of(first)
    assert again["ids"] is index.page_table
    assert again["pages"] is pages
    assert again["stride"] == 5000
    assert again["starts"] is None
    assert again["indptr"].tolist() == rows.page_indptr.tolist()


@pytest.mark.parametrize(
    ("form", "index"),
    [
        ("page_table", _table(torch.int64)),
        ("indirect", _indirect(torch.int32, torch.int64)),
        ("indirect", _indirect(torch.int64, torch.int32)),
        ("indirect", _indirect(torch.int64, torch.int64)),
        ("csr", _csr([0, 2, 4], [0] * 4)),
        ("csr", _csr([0, 2, 4], [0] * 4, starts_dtype=torch.int64)),
        ("csr", _csr([0, 2, 4], [0] * 4, torch.int64, torch.int64)),
    ],
)
def test_what_the_code_is_compiled_for_is_not_run_by_other_code(form, index, monkeypatch):
    """The form of the index, and each dtype in it."""
    kernel = Kernel(page_list.gather_pages)
    monkeypatch.setattr(page_list, "gather_pages", kernel)
    lists = _lists()
    for before in (_table(torch.int32), _indirect(torch.int32, torch.int32), _csr([0, 2, 4], [0] * 4, torch.int64)):
        lists.of(_batch(before), _form_of(before), _rows(0, 2, 3))
    lists.of(_batch(index), form, _rows(0, 2, 3))
    assert (len(kernel.first), len(kernel.again)) == (4, 0)


def _form_of(index: KVIndex) -> str:
    return "page_table" if index.page_table is not None else "csr" if index.table is None else "indirect"
