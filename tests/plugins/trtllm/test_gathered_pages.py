"""Where a step's gathered pages lie, laid out in one launch of our own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backstamp_trtllm import gathered_pages
from backstamp_trtllm.gathered_pages import PageLayout
from tests.ahead import Job, compile_ahead
from tests.compiled_code import Kernel, constants_of

LENS = {"ragged": (65, 0, 64, 1, 129, 0), "one": (300,), "keyless": (0, 0), "none": ()}


def laid_out(kv_lens, page_size, width=20):
    """The layout of rows over a table whose ids past a row's end are -1."""
    numbers = np.array(kv_lens, np.int32)
    table = torch.arange(1, 1 + len(kv_lens) * width, dtype=torch.int32).view(len(kv_lens), width)
    table = table.masked_fill(torch.arange(width) * page_size >= torch.tensor(numbers)[:, None], -1)
    return table, PageLayout("fmha_v2").of(table, numbers, max(kv_lens, default=0), page_size)


@pytest.mark.parametrize("block", [4, 256])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("name", LENS)
def test_pages_are_laid_out_in_row_order(name, page_size, block, monkeypatch):
    """And one more behind them, which rows without keys point at; no id of a table is read past a row's end."""
    monkeypatch.setattr(gathered_pages, "BLOCK", block)
    monkeypatch.setattr(gathered_pages, "PROGRAMS_PER_ROW", 2)
    kv_lens = LENS[name]
    table, pages = laid_out(kv_lens, page_size)
    counts = [-(-length // page_size) for length in kv_lens]
    starts = [sum(counts[:row]) for row in range(len(counts))]
    total, widest = sum(counts), max(1, *counts, 1)
    owned = [table[row, page].item() for row, count in enumerate(counts) for page in range(count)]
    assert pages.page_ids.tolist() == [*owned, 0]
    assert pages.last.tolist() == [*(s + c - 1 if c else total for s, c in zip(starts, counts, strict=True)), total]
    assert pages.kv_indptr.tolist() == [sum(kv_lens[:row]) for row in range(len(kv_lens) + 1)]
    keys = [[min(start + at, total) for at in range(widest)] for start in starts]
    assert pages.table.shape == (len(kv_lens), 2, widest)
    assert pages.table[:, 0].tolist() == keys
    assert pages.table[:, 1].tolist() == [[place + total + 1 for place in row] for row in keys]
    tails = [length - max(0, count - 1) * page_size for length, count in zip(kv_lens, counts, strict=True)]
    assert pages.unused.shape == (len(kv_lens) + 1, page_size, 1, 1)
    assert pages.unused.flatten(1).tolist() == [[slot >= tail for slot in range(page_size)] for tail in (*tails, 0)]
    assert [pages.page_ids.dtype, pages.table.dtype, pages.kv_indptr.dtype] == [torch.int32] * 3
    assert [pages.last.dtype, pages.unused.dtype] == [torch.int64, torch.bool]


def test_later_steps_run_the_code_of_the_first(monkeypatch):
    """With their own tensors and sizes: nothing of those is compiled for."""
    kernel = Kernel(gathered_pages.lay_out_kernel)
    monkeypatch.setattr(gathered_pages, "lay_out_kernel", kernel)
    layout, table = PageLayout("fmha_v2"), torch.zeros(1, 30, dtype=torch.int32)
    layout.of(torch.zeros(3, 1, dtype=torch.int32), np.array([1, 2, 3], np.int32), 3, 64)
    pages = layout.of(table, np.array([480], np.int32), 480, 16)
    (first,), (again,) = kernel.first, kernel.again
    assert constants_of(again) == constants_of(first)
    assert again["ids"] is table
    assert all(again[name] is getattr(pages, name) for name in ("page_ids", "table", "last", "unused", "kv_indptr"))
    assert [again[name] for name in ("rows", "ids_width", "width", "page_size")] == [1, 30, 30, 16]


def test_the_kernel_compiles_once_for_all_addresses_and_sizes(tmp_path):
    """For every kind of chip its library has kernels for."""
    pointers = dict.fromkeys(("starts", "kv_indptr", "ids", "page_ids", "table"), "*i32")
    numbers = dict.fromkeys(("rows", "ids_width", "width", "page_size"), "i32")
    signature = pointers | {"last": "*i64", "unused": "*i1"} | numbers
    job = Job("backstamp_trtllm.gathered_pages:lay_out_kernel", (90, 120), signature, {"BLOCK": 256})
    (answer,) = compile_ahead([job], tmp_path)
    assert min(answer["code"].values()) > 0
    assert answer["looked_at"] == []
