"""Launching the Hopper latent kernel: which calls it takes, and the launches around it.

In: what `forward` was handed, once the row's checks have let it through. Out: whether this kernel serves it, and if so
the answer in the caller's `out` and `lse`. What it does not serve falls to the tile kernel: same backend, same name. It
reads shapes, strides and addresses, never a value on the device; it holds the backend's workspace, never a batch. A
cache is described once for each place it lies at.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backstamp.jit_notice import Announcer
from backstamp.relaunch import alignments
from backstamp.relaunch import launch as relaunch
from backstamp_triton.addresses import KEPT_VIEWS, MemoryAt
from backstamp_triton.latent_parts import PANEL
from backstamp_triton.latent_tile import attend_latent
from backstamp_triton.launches import Chip, launch_of
from backstamp_triton.layers import PreparedLayer
from backstamp_triton.steps import Step
from backstamp_triton.tile_launch import merge_shares, sink_dtype

__all__ = ["REGISTERS", "LatentKernel", "LatentRows", "box_of", "latent_rows"]

#: Registers of each warp at launch, all of a multiprocessor's; the two computing warpgroups then take over what the
#: copying warps leave.
REGISTERS = 168


class LatentRows(NamedTuple):
    """A cache `[P, page_size, 1, 576]` as rows of 576: how many there are, and how many from one page to the next.

    `boxes` describes them to the copy engine, where pages are whole boxes.
    """

    count: int
    per_page: int
    boxes: TensorDescriptor | None


class LatentKernel:
    """Absorbed MLA on SM90; calls of one object may follow one another on one stream."""

    def __init__(self, chip: Chip, shares: Tensor, share_lse: Tensor, compiles: Announcer) -> None:
        self._chip = chip
        self._shares = shares
        self._share_lse = share_lse
        self._compiles = compiles

    def rows_of(
        self, q: Tensor, q_rope: Tensor | None, cache: Tensor, known: PreparedLayer, step: Step
    ) -> LatentRows | None:
        """The cache of a call that this kernel takes: no window, softcap, tree, left padding or causal rule by row, and
        tensors that can be copied by 16 bytes. None for any other call.
        """
        takes = (
            known.shape[1:] == (1, 576, 512)
            and known.window_left is None
            and known.softcap_log2 is None
            and step.tree == "no"
            and step.causal != "rows"
            and step.batch.kv_starts is None
            and _by_16_bytes(q)
            and (q_rope is None or _by_16_bytes(q_rope))
        )
        return latent_rows(cache) if takes else None

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        cache: Tensor,
        rows: LatentRows,
        known: PreparedLayer,
        step: Step,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend one layer over what `rows_of` answered."""
        batch, spec, page_ids = step.batch, known.spec, step.page_ids
        page_size = cache.shape[1]
        launch = launch_of("latent", self._chip, known, step)
        split = launch.splits > 1
        q_strides, out_strides = q.stride()[:2], out.stride()[:2]
        q_rope_strides = (0, 0) if q_rope is None else q_rope.stride()[:2]
        lse_strides = (0, 0) if lse is None else lse.stride()
        sinks, with_lse = "" if spec.sinks is None else "sinks", "" if lse is None else "lse"
        parts = "" if q_rope is None else "q_rope"
        like = (
            *("latent", spec.num_qo_heads, page_size, rows.per_page, cache.stride(1), rows.boxes is None),
            *(q_strides, q_rope_strides, out_strides, lse_strides),
            *(alignments(q, q_rope, cache, out, lse, spec.sinks), sink_dtype(spec)),
        )
        with self._compiles.first(launch.what, step.form, "pages of", page_size, parts, sinks, with_lse):
            relaunch(
                attend_latent,
                launch.codes,
                like,
                (launch.slots * known.head_blocks, launch.splits, 1),
                (
                    q,
                    q_rope,
                    cache if rows.boxes is None else None,
                    rows.boxes,
                    out,
                    None if split else lse,
                    self._shares if split else None,
                    self._share_lse if split else None,
                    None if split else spec.sinks,
                    batch.qo_indptr,
                    batch.kv_lens,
                    page_ids,
                    step.page_rows,
                    batch.num_rows,
                    batch.num_tokens,
                    0 if page_ids is None else page_ids.stride(0),
                    rows.per_page,
                    cache.stride(1),
                    *q_strides,
                    *q_rope_strides,
                    *out_strides,
                    *lse_strides,
                    known.logit_scale,
                ),
                lambda: {
                    "HEADS": spec.num_qo_heads,
                    "PACK": known.pack,
                    "PAGE_SIZE": page_size,
                    "INDEX": step.form,
                    "CAUSAL": step.causal == "yes",
                    "ONE_TOKEN": step.one_token,
                    "SPLIT": split,
                },
                num_warps=4,
                maxnreg=REGISTERS,
            )
        if not split:
            return
        with self._compiles.first("merge of", launch.what, launch.merged_at_once, sinks, with_lse):
            shares = self._shares, self._share_lse
            merge_shares(shares, out, lse, known, step, launch)


def box_of(page_size: int) -> list[int] | None:
    """Rows and columns of one box of the copy engine: no page border within it, no more rows than a block of keys.

    None where pages are no such boxes, or so small that one row after the other is as good.
    """
    return [min(page_size, 64), 64] if page_size in (16, 32) or page_size % 64 == 0 else None


def latent_rows(cache: Tensor) -> LatentRows | None:
    """A cache as this kernel reads it.

    None where rows cannot be copied by 16 bytes, or pages lie no whole number of rows apart.
    """
    return _rows_at(cache.data_ptr(), cache.dtype, cache.shape, cache.stride())


@functools.lru_cache(maxsize=KEPT_VIEWS)
def _rows_at(address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> LatentRows | None:
    (pages, page_size), row = shape[:2], strides[1]
    between = strides[0] if pages > 1 else page_size * row
    if pages == 0 or row % 16 or row < 576 or between % row or address % 16:
        return None
    count = (pages - 1) * (between // row) + page_size
    if count >= 1 << 31:
        return None
    box = box_of(page_size)
    boxes = None
    if box is not None:
        boxes = TensorDescriptor(MemoryAt(address, dtype), [count, 576], [row, 1], box, PANEL.value)
    return LatentRows(count, between // row, boxes)


def _by_16_bytes(queries: Tensor) -> bool:
    """Whether every query begins at a multiple of 16 bytes, by strides the compiler knows for multiples of 16."""
    token, head, _ = queries.stride()
    return token % 16 == 0 and head % 16 == 0 and queries.data_ptr() % 16 == 0
