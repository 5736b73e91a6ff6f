"""The device half of a dense step's launch, in one launch of its own: lengths, page table, and which tokens see a key.

In: a checked batch and a `Launch` whose tensors are there. Out: their values. It reads no device value on the host and
may be planned over another batch's tensors at any time. It never hands on an id past a row's end, which may be -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from backstamp.jit_notice import Announcer
from backstamp.relaunch import Codes, launch

if TYPE_CHECKING:
    from torch import Tensor

    from backstamp.attention import Batch
    from backstamp_dsa.dense_steps import Launch

__all__ = ["LaunchFill", "fill_kernel"]

#: Numbers a program writes at a time, and the most programs a row.
BLOCK: Final = 256
PROGRAMS_PER_ROW: Final = 64


class LaunchFill:
    """Fills the launches of one object's steps; the kernel is compiled for dtypes and absent tensors alone."""

    def __init__(self) -> None:
        self._compiles = Announcer("flashmla")
        self._codes: Codes = {}

    def fill(self, batch: Batch, into: Launch) -> None:
        """Write `kv_lens`, `table` and, where tokens lie as the batch has them, `seen`."""
        ids = batch.index.page_table
        assert ids is not None, "the row declares page tables alone"
        seen: Tensor | None = into.seen if into.padding is None else None
        width = into.table.shape[1]
        like = (
            *("dense launch", ids.dtype),
            "all rows" if into.rows is None else "some rows",
            "padded" if seen is None else "",
        )
        # as torch does, and Triton does not: on the device of the tensors, whichever is current
        with self._compiles.first(*like), torch.cuda.device_of(into.table):
            launch(
                fill_kernel,
                self._codes,
                like,
                (into.num_rows, min(-(-max(width, into.q_len) // BLOCK), PROGRAMS_PER_ROW), 1),
                (
                    batch.kv_lens,
                    into.rows,
                    ids,
                    into.kv_lens,
                    into.table,
                    seen,
                    ids.stride(0),
                    ids.shape[1],
                    width,
                    batch.index.page_size,
                    into.behind,
                    into.q_len,
                ),
                lambda: {"BLOCK": BLOCK},
            )


# nothing is specialized on: addresses and sizes change with every step, and one code serves them all
@triton.jit(
    do_not_specialize=[
        "kv_lens",
        "rows",
        "ids",
        "lens",
        "table",
        "seen",
        "ids_stride",
        "ids_width",
        "width",
        "page_size",
        "behind",
        "q_len",
    ]
)
def fill_kernel(
    kv_lens,
    rows,
    ids,
    lens,
    table,
    seen,
    ids_stride,
    ids_width,
    width,
    page_size,
    behind,
    q_len,
    BLOCK: tl.constexpr,
):
    """A share of one row of a launch; grid (rows of the launch, shares)."""
    row = tl.program_id(0).to(tl.int64)
    source = row
    if rows is not None:
        source = tl.load(rows + row)
    kv_len = tl.load(kv_lens + source) - behind
    if tl.program_id(1) == 0:
        # the library takes no empty row: its answer is thrown away
        tl.store(lens + row, tl.maximum(kv_len, 1))
    begin = tl.program_id(1) * BLOCK
    step = tl.num_programs(1) * BLOCK
    pages = tl.minimum((tl.maximum(kv_len, 0) + page_size - 1) // page_size, ids_width)
    for first in range(begin, width, step):
        at = first + tl.arange(0, BLOCK)
        page = tl.load(ids + source * ids_stride + at, mask=at < pages, other=0)
        tl.store(table + row * width + at, page.to(tl.int32), mask=at < width)
    if seen is not None:
        for first in range(begin, q_len, step):
            at = first + tl.arange(0, BLOCK)
            tl.store(seen + row * q_len + at, tl.full([BLOCK], 1, tl.int1) & (kv_len > 0), mask=at < q_len)
