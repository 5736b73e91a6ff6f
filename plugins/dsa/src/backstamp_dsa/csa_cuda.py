"""DeepSeek V4 attention through sgl-flash-mla: its sparse prefill call over plain rows, its decode call over packed.

In: queries, caches and slots. Out: answers in the caller's `out`. The only module of kernel `dsv4` that calls this
library. Plain rows lie in two tensors and the call takes one: two calls without a sink, merged by their LSE with it.
"""

from __future__ import annotations

import flash_mla
import torch
from torch import Tensor

from backstamp.attention import LayerSpec, PagedKV
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal
from backstamp_dsa.portable import chip_of, merge_two
from backstamp_dsa.queries import (
    check_aligned,
    chunks_of,
    flat_rows,
    library_heads,
    rows_per_page,
    store_answer,
    whole_query,
)
from backstamp_dsa.steps import Slots, SparseStep, kept_of

__all__ = ["PACKED_BYTES", "LibraryPackedV4", "LibraryRowsV4"]

#: A token of layout fp8_dsv4: 448 e4m3 numbers, 64 bf16 numbers, 7 ue8m0 scales and one byte more; a page holds the
#: numbers of all its tokens first, then their scales. Source: FlashMLA, csrc/kernels/kv_cache_format.h, format V4.
PACKED_BYTES = 584


class LibraryRowsV4:
    """`flash_mla_sparse_fwd` at head dim 512: Hopper's kernels are the legacy ones, Blackwell's the current ones."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        arch, _ = chip_of(request)
        # README of sgl-flash-mla 1.0.0: "An SM100 / SM103 GPU for the current kernels; the frozen ones also cover SM90"
        self._legacy = arch not in ("10.0", "10.3")
        self._zero = torch.zeros((), dtype=torch.bfloat16, device=request.device)

    def slots_per_page(self, field: str, cache: Tensor) -> int:
        """Rows between two pages."""
        check_aligned(self._request, field, cache)
        return rows_per_page(self._request, field, cache)

    def attend(
        self,
        q: Tensor,
        kv: PagedKV,
        near: Slots,
        far: Slots | None,
        sinks: Tensor | None,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
    ) -> None:
        """See `CompressedKernel`."""
        heads = library_heads(self._request, layer.num_qo_heads)
        query = whole_query(q, None, heads)
        if far is None or kv.v is None:
            found, _ = self._call(query, "kv.k", kv.k, near, padded_sinks(sinks, heads), layer)
            store_answer(found, None, near.seen, self._zero, out, None)
            return
        parts = [self._call(query, field, cache, chosen, None, layer) for field, cache, chosen in (
            ("kv.k", kv.k, near), ("kv.v", kv.v, far),
        )]  # fmt: skip
        real = slice(layer.num_qo_heads)
        part = torch.stack([found[:, real] for found, _ in parts])
        part_lse = torch.stack(
            [
                found_lse[:, real].masked_fill(~chosen.seen[:, None], float("-inf"))
                for (_, found_lse), chosen in zip(parts, (near, far), strict=True)
            ]
        )
        merge_two(part, part_lse, step, out, None, sinks)

    def _call(
        self, query: Tensor, field: str, cache: Tensor, chosen: Slots, sinks: Tensor | None, layer: LayerSpec
    ) -> tuple[Tensor, Tensor]:
        rows, _ = flat_rows(self._request, field, cache)
        found, _, found_lse = flash_mla.flash_mla_sparse_fwd(
            query,
            rows,
            chosen.slots[:, None],
            layer.scale,
            d_v=layer.v_head_dim,
            attn_sink=sinks,
            topk_length=chosen.ends,
            use_legacy=self._legacy,
        )
        return found, found_lse


class LibraryPackedV4:
    """`flash_mla_with_kvcache` over both packed caches in one call: each token is a row of one query."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        # SM90 loads 16 bytes at a time; SM100 has a tensor map of 576-byte rows (_C_legacy: "must be a multiple of")
        self._page_bytes = 576 if chip_of(request)[0] in ("10.0", "10.3") else 16
        self._zero = torch.zeros((), dtype=torch.bfloat16, device=request.device)

    def slots_per_page(self, field: str, cache: Tensor) -> int:
        """The library divides a slot by the page size itself."""
        if cache.dtype is not torch.uint8 or cache.shape[-1] != PACKED_BYTES or cache.stride(1) != PACKED_BYTES:
            found = f"{list(cache.shape)} {cache.dtype}, strides {list(cache.stride())}"
            needed = f"[P, entries, 1, {PACKED_BYTES}] uint8, pages contiguous"
            raise refusal(self._request, field, needed, found)
        check_aligned(self._request, field, cache, self._page_bytes)
        return cache.shape[1]

    def attend(
        self,
        q: Tensor,
        kv: PagedKV,
        near: Slots,
        far: Slots | None,
        sinks: Tensor | None,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
    ) -> None:
        """See `CompressedKernel`."""
        heads = library_heads(self._request, layer.num_qo_heads)
        query = whole_query(q, None, heads)
        sink = padded_sinks(sinks, heads)
        for run in chunks_of(query.shape[0], heads):
            # a schedule holds the library to everything it was made for, the size of the other cache's pages too
            entries, choices = (0, 0) if far is None or kv.v is None else (kv.v.shape[1], far.slots.shape[1])
            shape = (run.stop - run.start, heads, near.slots.shape[1], choices, entries)
            found, _ = flash_mla.flash_mla_with_kvcache(
                query[run, None],
                kv.k,
                None,
                None,
                layer.v_head_dim,
                kept_of(step.schedules, shape, lambda: flash_mla.get_mla_metadata()[0]),
                softmax_scale=layer.scale,
                is_fp8_kvcache=True,
                indices=near.slots[run, None],
                attn_sink=sink,
                extra_k_cache=kv.v,
                extra_indices_in_kvcache=None if far is None else far.slots[run, None],
                # the current kernels read V4.1 alone: V4's format is the legacy ones', on SM90 and on SM100
                use_legacy=True,
            )
            store_answer(found[:, 0], None, near.seen[run], self._zero, out[run], None)


def padded_sinks(sinks: Tensor | None, heads: int) -> Tensor | None:
    """`[heads]` f32 sinks, zeros for the heads that are padding."""
    if sinks is None or sinks.shape[0] == heads:
        return sinks
    return torch.cat([sinks, sinks.new_zeros(heads - sinks.shape[0])])
