"""The page list of a step, which the library reads: one launch that gathers it out of any form of index.

In: a checked index, the host's offsets of each row's pages, a device. Out: one list of page ids on the device. Sizes
are the host's: no device value is read, and no id past a row's last page, which may be stale or -1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstamp.attention import Batch, KVIndex
from backstamp.factories import BuildRequest
from backstamp.jit_notice import Announcer
from backstamp.relaunch import Codes, launch
from backstamp.step_checks import IndexForm, refusal
from backstamp_flashinfer.rows import HostRows

__all__ = ["PageLists", "gather_pages"]

#: Ids a program copies at a time.
BLOCK = 512
#: Most programs a row: a lone prompt of a million tokens in pages of one is shared out, and short rows idle few.
PROGRAMS_PER_ROW = 64


class PageLists:
    """Makes the page lists of one object's steps, on its device."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._device = torch.device(request.device)
        self._compiles = Announcer("flashinfer")
        self._codes: Codes = {}

    def of(self, batch: Batch, form: IndexForm, rows: HostRows) -> Tensor:
        """The page ids of all rows, in order, `[num_pages]` i32: entries past a row's last page are left out.

        Raises:
            UnsupportedBatch: an index that lists fewer pages than the rows' keys fill.
        """
        ids, starts, stride = _index_of(batch.index, form)
        listed, filled = (ids.shape[0], rows.num_pages) if form == "csr" else (ids.shape[1], rows.max_pages)
        if listed < filled:
            # read on, it would answer the next row's pages
            field = {"csr": "index.kv_indices", "page_table": "index.page_table"}.get(form, "index.table")
            needed = f"the {filled} pages of all rows" if form == "csr" else f"the {filled} pages of the longest row"
            raise refusal(self._request, field, needed, str(listed), phase=batch.phase)
        if form == "csr" and ids.shape[0] == rows.num_pages and ids.dtype == torch.int32:
            # every row has its pages listed, so a list of no more entries than pages has no slack: it is the answer
            return ids
        pages = torch.empty(rows.num_pages, dtype=torch.int32, device=self._device)
        if rows.num_pages == 0:
            return pages
        indptr = rows.page_indptr.to(self._device, non_blocking=True)
        # all that the kernel is compiled for
        like = ("page list", form, ids.dtype, "" if starts is None else starts.dtype)
        # as torch and the library do, and Triton does not: on the device of the tensors, whichever is current
        with self._compiles.first(*like), torch.cuda.device_of(pages):
            launch(
                gather_pages,
                self._codes,
                like,
                (len(rows.kv_lens), min(-(-rows.num_pages // BLOCK), PROGRAMS_PER_ROW), 1),
                (ids, starts, indptr, pages, stride),
                lambda: {"FORM": form, "BLOCK": BLOCK},
            )
        return pages


def _index_of(index: KVIndex, form: IndexForm) -> tuple[Tensor, Tensor | None, int]:
    """The page ids of a form, the tensor that says where a row's begin, and the stride between rows of a table."""
    if form == "page_table":
        assert index.page_table is not None, "the form was checked"
        return index.page_table, None, index.page_table.stride(0)
    if form == "indirect":
        assert index.table is not None, "the form was checked"
        return index.table, index.row_ids, index.table.stride(0)
    assert index.kv_indices is not None, "the form was checked"
    return index.kv_indices, index.kv_indptr, 0


# nothing is specialized on: addresses and strides change with every step, and one code serves them all
@triton.jit(do_not_specialize=["ids", "starts", "indptr", "pages", "stride"])
def gather_pages(ids, starts, indptr, pages, stride, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a share of one row's ids to its place in the list; grid (rows, shares).

    `ids`, `starts` any whole numbers; `indptr [rows + 1]` i32 says where a row's ids go.
    """
    row = tl.program_id(0)
    first = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - first
    if FORM == "page_table":
        ids += row.to(tl.int64) * stride
    elif FORM == "indirect":
        ids += tl.load(starts + row).to(tl.int64) * stride
    else:
        ids += tl.load(starts + row).to(tl.int64)
    for begin in range(tl.program_id(1) * BLOCK, count, tl.num_programs(1) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        page = tl.load(ids + at, mask=at < count, other=0)
        tl.store(pages + first + at, page.to(tl.int32), mask=at < count)
