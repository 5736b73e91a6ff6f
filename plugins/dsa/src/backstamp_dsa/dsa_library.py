"""sgl-flash-mla's two ways to attend over chosen slots.

In: queries, a cache, `Slots`. Out: answers in the caller's tensors. The only module of kernel `dsa` that calls the
library; it is imported when a row that names it is built. Slots were bounded before: the library checks no bounds.
"""

from __future__ import annotations

import flash_mla
import torch
from torch import Tensor

from backstamp.attention import LayerSpec, PagedKV
from backstamp.factories import BuildRequest
from backstamp.step_checks import refusal
from backstamp_dsa.portable import chip_of
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

__all__ = ["PACKED_BYTES", "LibraryPacked", "LibraryRows"]

#: A token of layout fp8_ds_mla: 512 e4m3 numbers, 4 fp32 scales, 64 bf16 numbers of the rotary part.
#: Source: FlashMLA, csrc/kernels/kv_cache_format.h, format V32.
PACKED_BYTES = 656


class LibraryRows:
    """`flash_mla_sparse_fwd` over a plain bf16 cache, in every phase."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        self._zero = torch.zeros((), dtype=torch.bfloat16, device=request.device)

    def slots_per_page(self, kv: PagedKV) -> int:
        """Rows between two pages."""
        check_aligned(self._request, "kv.k", kv.k)
        return rows_per_page(self._request, "kv.k", kv.k)

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv: PagedKV,
        chosen: Slots,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `SparseKernel`."""
        rows, _ = flat_rows(self._request, "kv.k", kv.k)
        query = whole_query(q, q_rope, library_heads(self._request, layer.num_qo_heads))
        found, _, found_lse = flash_mla.flash_mla_sparse_fwd(
            query,
            rows,
            chosen.slots[:, None],
            layer.scale,
            d_v=layer.v_head_dim,
            topk_length=chosen.ends,
            # the current kernels take head dim 512 alone: 576 is served by the legacy ones, on SM90 and on SM100
            use_legacy=True,
        )
        store_answer(found, found_lse, chosen.seen, self._zero, out, lse)


class LibraryPacked:
    """`flash_mla_with_kvcache` with indices over a cache of layout fp8_ds_mla: each token is a row of one query."""

    def __init__(self, request: BuildRequest) -> None:
        self._request = request
        # SM90 loads 16 bytes at a time; SM100 has a tensor map of token rows (_C_legacy: "must be a multiple of")
        self._page_bytes = PACKED_BYTES if chip_of(request)[0] in ("10.0", "10.3") else 16
        self._zero = torch.zeros((), dtype=torch.bfloat16, device=request.device)

    def slots_per_page(self, kv: PagedKV) -> int:
        """The library divides a slot by the page size itself."""
        page_size, width = kv.k.shape[1], kv.k.shape[-1]
        if kv.k.dtype is not torch.uint8 or width != PACKED_BYTES or kv.k.stride(1) != PACKED_BYTES:
            found = f"{list(kv.k.shape)} {kv.k.dtype}, strides {list(kv.k.stride())}"
            raise refusal(self._request, "kv.k", f"[P, {page_size}, 1, {PACKED_BYTES}] uint8, pages contiguous", found)
        check_aligned(self._request, "kv.k", kv.k, self._page_bytes)
        return page_size

    def attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv: PagedKV,
        chosen: Slots,
        layer: LayerSpec,
        step: SparseStep,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """See `SparseKernel`."""
        heads, width = library_heads(self._request, layer.num_qo_heads), chosen.slots.shape[1]
        query = whole_query(q, q_rope, heads)
        for run in chunks_of(query.shape[0], heads):
            tokens = run.stop - run.start
            found, found_lse = flash_mla.flash_mla_with_kvcache(
                query[run, None],
                kv.k,
                None,
                None,
                layer.v_head_dim,
                kept_of(step.schedules, (tokens, heads, width), lambda: flash_mla.get_mla_metadata()[0]),
                softmax_scale=layer.scale,
                is_fp8_kvcache=True,
                indices=chosen.slots[run, None],
                use_legacy=True,
            )
            part_lse = None if lse is None else lse[run]
            store_answer(found[:, 0], found_lse[..., 0], chosen.seen[run], self._zero, out[run], part_lse)
