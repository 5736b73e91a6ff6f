"""The host's half of the Hopper prefill kernel: which calls it takes, the cache as TMA descriptors, the launch.

In: what the backend would give the tile kernel. Out: descriptors, or None where the tile kernel must run. Nothing here
reads a device value. A cache is described once for each place it lies at: a descriptor costs more than the rest of a
call.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

from backstamp.relaunch import alignments
from backstamp.relaunch import launch as relaunch
from backstamp_triton.addresses import KEPT_VIEWS, MemoryAt
from backstamp_triton.tile_launch import sink_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from backstamp_triton.layers import PreparedLayer
    from backstamp_triton.steps import Launch, Step

__all__ = ["PANEL", "CacheView", "attend_views", "piece_rows", "view_keys_and_values"]

#: Rows (tokens times packed heads) under which the tile kernel's smaller tiles are faster.
FEW_ROWS = 64
#: Columns of a descriptor's box.
PANEL = 64


class CacheView(NamedTuple):
    """Keys or values as a two-dimensional TMA descriptor: rows a head and a page are apart, columns a head is apart."""

    descriptor: object
    head_rows: int
    head_cols: int
    page_stride: int


def view_keys_and_values(
    k: Tensor, v: Tensor, known: PreparedLayer, step: Step, page_size: int
) -> tuple[int, CacheView, CacheView] | None:
    """Rows of one copy, keys and values as descriptors; None where this kernel does not take the call.

    `page_size` is 0 for ragged keys and values.
    """
    batch = step.batch
    if not known.prefill_block or known.pack * batch.max_q_len < FEW_ROWS:
        return None
    if step.tree != "no" or batch.kv_starts is not None:
        return None
    rows = piece_rows(page_size, known.prefill_block)
    if not rows:
        return None
    k_view = _view(k.data_ptr(), k.dtype, k.shape, k.stride(), rows)
    v_view = _view(v.data_ptr(), v.dtype, v.shape, v.stride(), rows)
    return None if k_view is None or v_view is None else (rows, k_view, v_view)


def attend_views(
    q: Tensor,
    views: tuple[int, CacheView, CacheView],
    out: Tensor,
    lse: Tensor | None,
    shares: tuple[Tensor, Tensor] | None,
    index: tuple[str, Tensor | None, Tensor | None, int],
    known: PreparedLayer,
    step: Step,
    launch: Launch,
    processors: int,
) -> None:
    """Attend one layer of one step; `index` is its form, page ids, per-row tensor and page size."""
    from backstamp_triton.prefill_hopper import attend_prefill

    batch, spec = step.batch, known.spec
    rows, k_view, v_view = views
    form, page_ids, page_rows, page_size = index
    part, part_lse = (None, None) if shares is None else shares
    group = spec.num_qo_heads // spec.num_kv_heads
    heads = spec.num_kv_heads * -(-group // launch.pack)
    tiles = launch.slots * heads * launch.splits
    q_strides, out_strides, lse_strides = q.stride(), out.stride(), (0, 0) if lse is None else lse.stride()
    like = (
        *("prefill", form, page_size, known.shape, known.window_left, known.softcap_log2 is None),
        *(q_strides, out_strides, lse_strides, k_view[1:], v_view[1:], rows),
        *(alignments(q, out, lse, spec.sinks, page_rows), sink_dtype(spec)),
    )
    relaunch(
        attend_prefill,
        launch.codes,
        like,
        (min(tiles, processors), 1, 1),
        (
            q,
            k_view.descriptor,
            v_view.descriptor,
            out,
            lse,
            part,
            part_lse,
            spec.sinks,
            batch.qo_indptr,
            batch.kv_lens,
            batch.causal if step.causal == "rows" else None,
            page_ids,
            page_rows,
            batch.num_rows,
            batch.num_tokens,
            launch.splits,
            0 if page_ids is None else page_ids.stride(0),
            *q_strides[:2],
            *out_strides[:2],
            *lse_strides,
            *k_view[1:],
            *v_view[1:],
            known.logit_scale,
            known.softcap_log2,
            known.window_left,
        ),
        lambda: {
            "HEADS": heads,
            "GROUP": group,
            "PACK": launch.pack,
            "DK": spec.head_dim,
            "DV": spec.v_head_dim,
            "PAGE_SIZE": max(page_size, 1),
            "ROWS": rows,
            "INDEX": form,
            "CAUSAL": step.causal,
            "BLOCK_N": launch.config.block_n,
            "STAGES": launch.config.num_stages,
        },
        num_warps=launch.config.num_warps,
    )


def piece_rows(page_size: int, block: int) -> int:
    """Rows one copy brings: a page or a block of them; 0 where pages are no boxes of whole swizzles of eight rows."""
    if not page_size:
        return block
    return min(page_size, block) if page_size >= 8 and page_size & (page_size - 1) == 0 else 0


@functools.lru_cache(maxsize=KEPT_VIEWS)
def _view(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], rows: int
) -> CacheView | None:
    """Pages `[P, N, Hk, D]`, or ragged `[T, Hk, D]`, as one matrix; None where strides or alignment allow no TMA.

    Source: CUDA driver API, cuTensorMapEncodeTiled: an address and strides of 16-byte multiples, coordinates in int32.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    heads, dim = shape[-2:]
    row_stride, head_stride = strides[-3:-1]
    pages, page_stride = (shape[0], strides[0]) if len(shape) == 4 else (1, 0)
    apart = head_stride >= row_stride
    step = [page_stride, head_stride] if apart else [page_stride]
    width = dim if apart else (heads - 1) * head_stride + dim
    if row_stride < width or any(stride % row_stride for stride in step):
        return None
    head_rows, head_cols = (head_stride // row_stride, 0) if apart else (0, head_stride)
    height = (pages - 1) * (page_stride // row_stride) + (heads - 1) * head_rows + shape[-3]
    if strides[-1] != 1 or address % 16 or row_stride * dtype.itemsize % 16 or not 0 < height < 1 << 31:
        return None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    base = MemoryAt(address, dtype)
    descriptor = TensorDescriptor(base, [height, width], [row_stride, 1], [rows, PANEL], layout)
    return CacheView(descriptor, head_rows, head_cols, page_stride // row_stride)
