"""Launching the Hopper latent kernel: which calls it takes, and the launches around it.

In: what `forward` was handed, once the row's checks have let it through. Out: whether this kernel serves it, and if so
the answer in the caller's `out` and `lse`. What it does not serve falls to the tile kernel: same backend, same name. It
reads shapes, strides and addresses, never a value on the device; it holds the backend's workspace, never a batch.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backstamp.jit_notice import Announcer
from backstamp_triton.configs import split_count
from backstamp_triton.latent_parts import PANEL
from backstamp_triton.latent_tile import attend_latent
from backstamp_triton.launches import Chip, merged_at_once
from backstamp_triton.layers import PreparedLayer
from backstamp_triton.steps import Step
from backstamp_triton.tile_launch import merge_shares

__all__ = ["REGISTERS", "LatentKernel", "box_of", "latent_rows"]

#: Registers of each warp at launch, all of a multiprocessor's; the two computing warpgroups then take over what the
#: copying warps leave.
REGISTERS = 168


class LatentKernel:
    """Absorbed MLA on SM90; calls of one object may follow one another on one stream."""

    def __init__(self, chip: Chip, shares: Tensor, share_lse: Tensor, compiles: Announcer) -> None:
        self._chip = chip
        self._shares = shares
        self._share_lse = share_lse
        self._compiles = compiles

    def serves(self, q: Tensor, q_rope: Tensor | None, cache: Tensor, known: PreparedLayer, step: Step) -> bool:
        """Whether this kernel takes a call: no window, softcap, tree, left padding or causal rule by row, and tensors
        that can be copied by 16 bytes.
        """
        return (
            known.shape[1:] == (1, 576, 512)
            and known.window_left is None
            and known.softcap_log2 is None
            and step.tree == "no"
            and step.causal != "rows"
            and step.batch.kv_starts is None
            and _by_16_bytes(q)
            and (q_rope is None or _by_16_bytes(q_rope))
            and latent_rows(cache) is not None
        )

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        cache: Tensor,
        known: PreparedLayer,
        step: Step,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend one layer that this kernel serves."""
        batch, spec, page_ids = step.batch, known.spec, step.page_ids
        found = latent_rows(cache)
        assert found is not None, "serves() refuses such a cache"
        num_rows, rows_per_page = found
        page_size, rows_stride = cache.shape[1], cache.stride(1)
        box = box_of(page_size)
        boxes = None if box is None else TensorDescriptor(cache, [num_rows, 576], [rows_stride, 1], box, PANEL.value)
        slots, splits = self._launch(known, step)
        split = splits > 1
        lse_strides = (0, 0) if lse is None else lse.stride()
        sinks, with_lse = "" if spec.sinks is None else "sinks", "" if lse is None else "lse"
        what = ("latent,", spec.num_qo_heads, "heads", step.what, "split" if split else "")
        parts = "" if q_rope is None else "q_rope"
        with self._compiles.first(*what, step.form, "pages of", page_size, parts, sinks, with_lse):
            attend_latent[(slots * known.head_blocks, splits)](
                q,
                q_rope,
                cache if boxes is None else None,
                boxes,
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
                rows_per_page,
                rows_stride,
                q.stride(0),
                q.stride(1),
                0 if q_rope is None else q_rope.stride(0),
                0 if q_rope is None else q_rope.stride(1),
                out.stride(0),
                out.stride(1),
                lse_strides[0],
                lse_strides[1],
                known.logit_scale,
                HEADS=spec.num_qo_heads,
                PACK=known.pack,
                PAGE_SIZE=page_size,
                INDEX=step.form,
                CAUSAL=step.causal == "yes",
                ONE_TOKEN=step.one_token,
                SPLIT=split,
                num_warps=4,
                maxnreg=REGISTERS,
            )
        if not split:
            return
        block_s = merged_at_once(splits)
        with self._compiles.first("merge of", *what, block_s, sinks, with_lse):
            merge_shares((self._shares, self._share_lse), out, lse, known, step, splits, block_s)

    def _launch(self, known: PreparedLayer, step: Step) -> tuple[int, int]:
        """Slots for tiles, and how many programs share a tile's keys, from host sizes alone."""
        batch, tokens = step.batch, 64 // known.pack
        if step.one_token:
            slots = row_tiles = max(batch.num_rows, batch.num_tokens)
        else:
            # each row may leave its last tile part empty, and the padding tokens form one more row
            row_tiles = -(-batch.num_tokens // tokens)
            slots = row_tiles + batch.num_rows + 1
        blocks, most = -(-batch.max_kv_len // 64), self._chip.most_splits(step, known)
        return slots, split_count(row_tiles * known.head_blocks, blocks, self._chip.processors, most)


def box_of(page_size: int) -> list[int] | None:
    """Rows and columns of one box of the copy engine: no page border within it, no more rows than a block of keys.

    None where pages are no such boxes, or so small that one row after the other is as good.
    """
    return [min(page_size, 64), 64] if page_size in (16, 32) or page_size % 64 == 0 else None


def latent_rows(cache: Tensor) -> tuple[int, int] | None:
    """A cache `[P, page_size, 1, 576]` as rows of 576: how many there are, and how many from one page to the next.

    None where rows cannot be copied by 16 bytes, or pages lie no whole number of rows apart.
    """
    pages, page_size = cache.shape[:2]
    row = cache.stride(1)
    between = cache.stride(0) if pages > 1 else page_size * row
    if pages == 0 or row % 16 or row < 576 or between % row or cache.data_ptr() % 16:
        return None
    rows = (pages - 1) * (between // row) + page_size
    return None if rows >= 1 << 31 else (rows, between // row)


def _by_16_bytes(queries: Tensor) -> bool:
    """Whether every query begins at a multiple of 16 bytes, by strides the compiler knows for multiples of 16."""
    return queries.data_ptr() % 16 == 0 and queries.stride(0) % 16 == 0 and queries.stride(1) % 16 == 0
