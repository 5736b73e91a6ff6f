"""The device step between a selection and a kernel: request-local positions → slots of the cache, in one launch.

In: `indices [T, K]` i32 in request space (position of a token of the same request, -1 none), or a rule (the window,
every compressed entry), and the step's row tensors. Out: `Slots`. No value is read by the host. It never forms a slot
of a page that the row does not own, nor one a causal token must not see: the libraries behind it check no bounds.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from backstamp.attention import Batch
from backstamp.relaunch import alignments, launch
from backstamp.step_checks import IndexForm
from backstamp_dsa.steps import Slots, SparseStep, kept_of

__all__ = ["INDEX_SPACE", "SLOT_MULTIPLE", "find_slots", "padded", "page_ids_of"]

#: What an index of a selection counts: tokens (or compressed entries) of its own request, from 0.
INDEX_SPACE: Final = "request"
#: Widths of a slot list are multiples of this. Source: sgl-flash-mla 1.0.0 takes `topk % (2*B_TOPK)` with B_TOPK 64 in
#: its SM90 prefill, and rows of indices at multiples of 32 bytes.
SLOT_MULTIPLE: Final = 128


def padded(width: int) -> int:
    """The width of a slot list for so many choices."""
    return max(1, -(-width // SLOT_MULTIPLE)) * SLOT_MULTIPLE


def page_ids_of(batch: Batch, form: IndexForm) -> tuple[Tensor, Tensor | None, int]:
    """The page ids of a step's index, the tensor that says where a row's begin, and the stride between rows."""
    index = batch.index
    if form == "page_table":
        assert index.page_table is not None
        return index.page_table, None, index.page_table.stride(0)
    if form == "indirect":
        assert index.table is not None
        return index.table, index.row_ids, index.table.stride(0)
    assert index.kv_indices is not None
    return index.kv_indices, index.kv_indptr, 0


def find_slots(
    step: SparseStep,
    *,
    indices: Tensor | None,
    width: int,
    entries_per_page: int,
    slots_per_page: int,
    rate: int = 1,
    window: int = 0,
) -> Slots:
    """Slots of every token's choices; the next layer's of the step are written over them.

    Choices are `indices`, else the last `window` positions up to the token's own, else every entry. `entries_per_page`
    is how many a page holds, `slots_per_page` how far apart pages lie, in slots; with `rate` each entry stands for so
    many tokens and is visible once they all are.
    """
    batch, form = step.batch, step.form
    ids, starts, stride = page_ids_of(batch, form)
    source = "given" if indices is not None else "window" if window else "all"
    topk, indices_stride = (0, 0) if indices is None else (indices.shape[1], indices.stride(0))
    found = kept_of(step.slots, (source, width), lambda: _empty_slots(batch, width))
    launch(
        slot_kernel,
        step.codes,
        ("slots", source, width, entries_per_page, slots_per_page, rate, indices_stride, alignments(indices)),
        (batch.num_tokens, 1, 1),
        (
            indices,
            *found,
            batch.qo_indptr,
            batch.kv_lens,
            ids,
            starts,
            batch.num_rows,
            topk,
            width,
            indices_stride,
            stride,
            entries_per_page,
            slots_per_page,
            rate,
            window,
        ),
        lambda: {
            "SOURCE": source,
            "INDEX": form,
            "CAUSAL": batch.causal is True,
            "BLOCK": min(512, triton.next_power_of_2(width)),
        },
        num_warps=4,
    )
    return found


def _empty_slots(batch: Batch, width: int) -> Slots:
    device, tokens = batch.kv_lens.device, batch.num_tokens
    return Slots(
        torch.empty(tokens, width, dtype=torch.int32, device=device),
        torch.empty(tokens, dtype=torch.int32, device=device),
        torch.empty(tokens, dtype=torch.bool, device=device),
    )


# sizes change with every step: no kernel of its own for one that happens to be 1 or a multiple of 16
@triton.jit(do_not_specialize=["num_rows", "topk", "width", "window"])
def slot_kernel(
    indices_ptr,
    slots_ptr,
    ends_ptr,
    seen_ptr,
    qo_indptr,
    kv_lens,
    page_ids,
    page_rows,
    num_rows,
    topk,
    width,
    indices_stride,
    page_ids_stride,
    entries_per_page,
    slots_per_page,
    rate,
    window,
    SOURCE: tl.constexpr,
    INDEX: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slots of one token; grid (T). SOURCE: "given", "window" or "all"."""
    token = tl.program_id(0)
    # the row whose tokens hold this one; past the last row lie padding tokens, which see nothing
    row = 0
    above = num_rows
    while row < above:
        middle = (row + above + 1) // 2
        begins = tl.load(qo_indptr + middle).to(tl.int32) <= token
        row = tl.where(begins, middle, row)
        above = tl.where(begins, above, middle - 1)
    real = row < num_rows
    start = tl.load(qo_indptr + row).to(tl.int32)
    stop = tl.load(qo_indptr + row + 1, mask=real, other=0).to(tl.int32)
    kv_len = tl.load(kv_lens + row, mask=real, other=0).to(tl.int32)
    limit = kv_len
    if CAUSAL or SOURCE == "window":
        limit = tl.minimum(kv_len, kv_len - (stop - start) + (token - start) + 1)
    entries = tl.where(real, tl.maximum(limit, 0) // rate, 0)
    ids = page_ids
    if INDEX == "page_table":
        ids += row.to(tl.int64) * page_ids_stride
    elif INDEX == "indirect":
        ids += tl.load(page_rows + row, mask=real, other=0).to(tl.int64) * page_ids_stride
    else:
        ids += tl.load(page_rows + row, mask=real, other=0).to(tl.int64)
    last = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, width, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        if SOURCE == "given":
            chosen = tl.load(indices_ptr + token.to(tl.int64) * indices_stride + at, mask=at < topk, other=-1)
        elif SOURCE == "window":
            chosen = tl.where(at < window, entries - window + at, -1)
        else:
            chosen = at
        visible = (chosen >= 0) & (chosen < entries) & (at < width)
        page = tl.load(ids + chosen // entries_per_page, mask=visible, other=0).to(tl.int32)
        slot = page * slots_per_page + chosen % entries_per_page
        tl.store(slots_ptr + token.to(tl.int64) * width + at, tl.where(visible, slot, -1), mask=at < width)
        last = tl.maximum(last, tl.where(visible, at + 1, 0))
    end = tl.max(last, 0)
    # no library loop is entered with nothing to do: one slot of -1 is masked, an empty loop may be a hang
    tl.store(ends_ptr + token, tl.maximum(end, 1))
    tl.store(seen_ptr + token, end > 0)
