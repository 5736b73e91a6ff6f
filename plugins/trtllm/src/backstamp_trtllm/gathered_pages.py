"""Where the pages of a step lie once they are gathered, from exact host lengths: one copy and one launch.

In: a step's page table on the device, key counts of its rows on the host. Out: `GatheredPages`. Nothing waits for the
device, and no id past a row's last page is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from backstamp.jit_notice import Announcer
from backstamp.relaunch import Codes, launch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatheredPages", "PageLayout", "lay_out_kernel"]

Numbers: TypeAlias = "npt.NDArray[np.integer]"

#: Numbers a program writes at a time, and the most programs a row.
BLOCK: Final = 256
PROGRAMS_PER_ROW: Final = 64


class GatheredPages(NamedTuple):
    """N used pages in row order, and one more that rows without keys point at.

    Attributes:
        page_ids: `[N + 1]` i32, which page of the cache each gathered one is; the one more is page 0.
        table: `[B, 2, W]` i32, where each row's pages lie in the pool: K, then V, whose blocks follow the N + 1 of K.
        last: `[B + 1]` i64 each row's last page, then the one more.
        unused: `[B + 1, page, 1, 1]` bool, slots of those pages past the row's keys.
        kv_indptr: `[B + 1]` i32 cumulative key counts.
    """

    page_ids: Tensor
    table: Tensor
    last: Tensor
    unused: Tensor
    kv_indptr: Tensor


class PageLayout:
    """Lays out the pages of one object's steps."""

    def __init__(self, kernel: str) -> None:
        self._compiles = Announcer(kernel)
        self._codes: Codes = {}

    def of(self, table: Tensor, kv_lens: Numbers, max_kv_len: int, page_size: int) -> GatheredPages:
        """`table [B, W]` i32 contiguous, on the device; `kv_lens [B]` i32 on the host, the largest of them."""
        rows, device = len(kv_lens), table.device
        # where a row's pages start in the pool, and its keys among all
        bounds = np.zeros((2, rows + 1), np.int32)
        np.add.accumulate(-(-kv_lens // page_size), out=bounds[0, 1:])
        np.add.accumulate(kv_lens, out=bounds[1, 1:])
        total, widest = bounds.item(rows), max(1, -(-max_kv_len // page_size))
        starts, kv_indptr = torch.from_numpy(bounds).to(device, non_blocking=True).unbind()
        pages = GatheredPages(
            page_ids=torch.empty(total + 1, dtype=torch.int32, device=device),
            table=torch.empty(rows, 2, widest, dtype=torch.int32, device=device),
            last=torch.empty(rows + 1, dtype=torch.int64, device=device),
            unused=torch.empty(rows + 1, page_size, 1, 1, dtype=torch.bool, device=device),
            kv_indptr=kv_indptr,
        )
        # as torch does, and Triton does not: on the device of the tensors, whichever is current
        with self._compiles.first("gathered pages"), torch.cuda.device_of(table):
            launch(
                lay_out_kernel,
                self._codes,
                "gathered pages",
                (rows + 1, min(-(-max(widest, page_size) // BLOCK), PROGRAMS_PER_ROW), 1),
                (starts, kv_indptr, table, *pages[:4], rows, table.shape[1], widest, page_size),
                lambda: {"BLOCK": BLOCK},
            )
        return pages


# nothing is specialized on: addresses and sizes change with every step, and one code serves them all
@triton.jit(
    do_not_specialize=[
        "starts",
        "kv_indptr",
        "ids",
        "page_ids",
        "table",
        "last",
        "unused",
        "rows",
        "ids_width",
        "width",
        "page_size",
    ]
)
def lay_out_kernel(
    starts,
    kv_indptr,
    ids,
    page_ids,
    table,
    last,
    unused,
    rows,
    ids_width,
    width,
    page_size,
    BLOCK: tl.constexpr,
):
    """A share of one row, or of the one more behind them; grid (rows + 1, shares)."""
    row = tl.program_id(0)
    total = tl.load(starts + rows)
    start = tl.load(starts + row)
    behind = tl.minimum(row + 1, rows)
    count = tl.load(starts + behind) - start
    # the tokens on the last page
    tail = tl.load(kv_indptr + behind) - tl.load(kv_indptr + row) - tl.maximum(count - 1, 0) * page_size
    if tl.program_id(1) == 0:
        tl.store(last + row, tl.where(count > 0, start + count - 1, total).to(tl.int64))
        tl.store(page_ids + total, 0, mask=row == rows)
    begin = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    for first in range(begin, page_size, step):
        slot = first + tl.arange(0, BLOCK)
        tl.store(unused + row.to(tl.int64) * page_size + slot, slot >= tail, mask=slot < page_size)
    # past a row's pages the table may point at its neighbour's: the kernel stops at the row's own count
    for first in range(begin, tl.where(row < rows, width, 0), step):
        at = first + tl.arange(0, BLOCK)
        page = tl.load(ids + row.to(tl.int64) * ids_width + at, mask=at < count, other=0)
        tl.store(page_ids + start + at, page, mask=at < count)
        place = tl.minimum(start + at, total)
        keys = table + row.to(tl.int64) * 2 * width + at
        tl.store(keys, place, mask=at < width)
        tl.store(keys + width, place + total + 1, mask=at < width)
