"""The tensors of a dense launch, written in one launch of our own."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch

from backstamp.attention import KVIndex
from backstamp.testing.batches import make_batch
from backstamp_dsa import dense_fill
from backstamp_dsa.dense_fill import LaunchFill
from backstamp_dsa.dense_steps import Launch, Padding
from tests.compiled_code import Kernel, constants_of

LENS = (300, 0, -4, 64, 65, 1)


def batch_of(dtype=torch.int32, width=6):
    """Rows of `LENS` over pages of 64; -1 past a row's end."""
    batch = make_batch([1] * len(LENS), [max(1, kv_len) for kv_len in LENS], page_size=64).batch
    table = torch.arange(1, 1 + len(LENS) * width, dtype=dtype).view(len(LENS), width)
    table = table.masked_fill(torch.arange(width) * 64 >= torch.tensor(LENS)[:, None], -1)
    lens = torch.tensor(LENS, dtype=torch.int32)
    return replace(batch, kv_lens=lens, index=KVIndex(page_size=64, page_table=table))


def launch_of(rows=None, q_len=3, behind=0, width=6, padding=None):
    """A launch whose tensors hold what no fill would write."""
    count = len(LENS) if rows is None else len(rows)
    return Launch(
        rows=None if rows is None else torch.tensor(rows),
        q_len=q_len,
        behind=behind,
        first=0,
        tokens=None,
        padding=padding,
        kv_lens=torch.full((count,), -7, dtype=torch.int32),
        table=torch.full((count, width), -7, dtype=torch.int32),
        seen=(torch.arange(count * q_len) % 2).bool(),
    )


def test_the_launch_is_made_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, which may be another."""
    asked = []
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: asked.append(tensor) or contextlib.nullcontext())
    launch = launch_of()
    LaunchFill().fill(batch_of(), launch)
    assert [tensor is launch.table for tensor in asked] == [True]


@pytest.mark.parametrize("block", [2, 4, 256])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("behind", [0, 2, 64])
@pytest.mark.parametrize("rows", [None, [4, 0, 2]], ids=["all", "some"])
@pytest.mark.parametrize("width", [6, 8])
def test_a_launch_is_filled(rows, behind, dtype, block, width, monkeypatch):
    """Lengths of at least 1, no id that a row does not own, and no token of a row without keys is seen."""
    monkeypatch.setattr(dense_fill, "BLOCK", block)
    monkeypatch.setattr(dense_fill, "PROGRAMS_PER_ROW", 2)
    batch, launch = batch_of(dtype), launch_of(rows, behind=behind, width=width)
    LaunchFill().fill(batch, launch)
    for place, row in enumerate(range(len(LENS)) if rows is None else rows):
        length = max(0, LENS[row] - behind)
        pages = -(-length // 64)
        assert launch.kv_lens[place] == max(1, length)
        assert launch.table[place].tolist() == [*batch.index.page_table[row, :pages].tolist(), *[0] * (width - pages)]
        assert launch.seen[3 * place : 3 * place + 3].tolist() == [length > 0] * 3


def test_a_row_of_a_table_is_read_no_further_than_it_goes():
    """A length may count more pages than the table has columns: what follows in memory is another row's."""
    batch, launch = batch_of(width=3), launch_of()
    LaunchFill().fill(batch, launch)
    assert launch.table[0].tolist() == [1, 2, 3, 0, 0, 0]


def test_what_a_padded_launch_sees_is_left_to_its_padding():
    """Its `seen` counts the batch's tokens."""
    launch = launch_of(padding=Padding(tokens=torch.zeros(18), places=torch.zeros(6)))
    before = launch.seen.clone()
    LaunchFill().fill(batch_of(), launch)
    assert torch.equal(launch.seen, before)
    assert launch.kv_lens.tolist() == [300, 1, 1, 64, 65, 1]


PADDED = Padding(tokens=torch.zeros(18), places=torch.zeros(6))


@pytest.mark.parametrize(
    ("dtype", "changes", "counts"),
    [
        (torch.int32, {"q_len": 900, "behind": 1, "width": 5000}, (1, 1)),
        (torch.int64, {}, (2, 0)),
        (torch.int32, {"rows": [4, 0, 2]}, (2, 0)),
        (torch.int32, {"padding": PADDED}, (2, 0)),
    ],
    ids=["sizes", "ids", "some-rows", "padded"],
)
def test_later_steps_run_the_code_of_the_first_where_it_is_the_same(dtype, changes, counts, monkeypatch):
    """With their own tensors and sizes; what Triton compiles for is another code."""
    kernel = Kernel(dense_fill.fill_kernel)
    monkeypatch.setattr(dense_fill, "fill_kernel", kernel)
    fills, batch, launch = LaunchFill(), batch_of(dtype), launch_of(**changes)
    fills.fill(batch_of(), launch_of())
    fills.fill(batch, launch)
    assert (len(kernel.first), len(kernel.again)) == counts
    (first, *_), last = kernel.first, (kernel.first + kernel.again)[-1]
    assert constants_of(last) == constants_of(first)
    assert last["lens"] is launch.kv_lens
    assert last["ids"] is batch.index.page_table
    assert (last["q_len"], last["behind"], last["width"]) == (launch.q_len, launch.behind, launch.table.shape[1])
