"""Bring the keys of some rows together: from paged caches, from this step's ragged tokens, or from both.

In: spans of positions and the slot of the answer each span fills. Out: `k [slots, Hk, Dk]` and `v [slots, Hk, Dv]`.
Reads no page id past a row's cached tokens and no token outside a span; a slot that no span fills holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from backstamp.attention import KVIndex, LayerSpec, PagedKV, RaggedKV
from backstamp_cpu.rows import Span

__all__ = ["KeySource", "count_up", "host_ints", "locate_keys", "read_keys", "repeated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySource:
    """Where the keys of a group lie.

    Attributes:
        slots: number of keys in the answer.
        pages, offsets: `[C]` i64 page and token in the page of each cached key, or None.
        cached_slots: `[C]` i64 slots they fill; None when they fill all slots in order.
        new_tokens, new_slots: the same for keys in `RaggedKV`.
    """

    slots: int
    pages: Tensor | None = None
    offsets: Tensor | None = None
    cached_slots: Tensor | None = None
    new_tokens: Tensor | None = None
    new_slots: Tensor | None = None


def locate_keys(
    spans: Sequence[Span],
    first_slots: Sequence[int],
    slots: int,
    index: KVIndex,
    cached_lens: Sequence[int],
    new_starts: Sequence[int] | None,
    device: torch.device,
) -> KeySource:
    """Find the keys of `spans`; span i fills the slots from `first_slots[i]`.

    Row b has its positions below `cached_lens[b]` in the cache and the others in `RaggedKV` from `new_starts[b]`.
    """
    cached = [
        (s.row, s.start, min(s.stop, cached_lens[s.row]), slot) for s, slot in zip(spans, first_slots, strict=True)
    ]
    cached = [piece for piece in cached if piece[1] < piece[2]]
    pages = offsets = cached_slots = new_tokens = new_slots = None
    if cached:
        lens = [stop - start for _, start, stop, _ in cached]
        rows = repeated([row for row, _, _, _ in cached], lens, device)
        positions = count_up([start for _, start, _, _ in cached], lens, device)
        pages = _page_ids(index, rows, positions // index.page_size)
        offsets = positions % index.page_size
        if not _in_order([slot for _, _, _, slot in cached], lens, slots):
            cached_slots = count_up([slot for _, _, _, slot in cached], lens, device)
    if new_starts is not None:
        new = [(max(s.start, cached_lens[s.row]), s, slot) for s, slot in zip(spans, first_slots, strict=True)]
        new = [piece for piece in new if piece[0] < piece[1].stop]
        if new:
            lens = [s.stop - start for start, s, _ in new]
            first_tokens = [new_starts[s.row] + start - cached_lens[s.row] for start, s, _ in new]
            new_tokens = count_up(first_tokens, lens, device)
            first = [slot + start - s.start for start, s, slot in new]
            if not _in_order(first, lens, slots):
                new_slots = count_up(first, lens, device)
    return KeySource(
        slots=slots,
        pages=pages,
        offsets=offsets,
        cached_slots=cached_slots,
        new_tokens=new_tokens,
        new_slots=new_slots,
    )


def read_keys(
    source: KeySource, kv: PagedKV | None, new: RaggedKV | None, layer: LayerSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gather one layer's keys and values in `dtype`, caches multiplied by their scales in fp32."""
    k_parts: list[tuple[Tensor, Tensor | None]] = []
    v_parts: list[tuple[Tensor, Tensor | None]] = []
    if kv is not None and source.pages is not None and source.offsets is not None:
        k = _dequantised(kv.k[source.pages, source.offsets], kv.k_scale, dtype)
        k_parts.append((k, source.cached_slots))
        if kv.v is None:
            v_parts.append((k[..., : layer.v_head_dim], source.cached_slots))
        else:
            v = _dequantised(kv.v[source.pages, source.offsets], kv.v_scale, dtype)
            v_parts.append((v, source.cached_slots))
    if new is not None and source.new_tokens is not None:
        k_parts.append((new.k[source.new_tokens].to(dtype), source.new_slots))
        v_parts.append((new.v[source.new_tokens].to(dtype), source.new_slots))
    return _assembled(k_parts, source.slots), _assembled(v_parts, source.slots)


def host_ints(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Python numbers as an i64 tensor on a device."""
    return torch.tensor(numbers, dtype=torch.long).to(device)


def _page_ids(index: KVIndex, rows: Tensor, columns: Tensor) -> Tensor:
    if index.page_table is not None:
        return index.page_table[rows, columns].long()
    if index.kv_indptr is not None and index.kv_indices is not None:
        return index.kv_indices[index.kv_indptr[rows].long() + columns].long()
    assert index.table is not None, "check_call refuses a cache without an index"
    assert index.row_ids is not None
    return index.table[index.row_ids[rows], columns].long()


def repeated(labels: Sequence[int], lens: Sequence[int], device: torch.device) -> Tensor:
    """Each label as often as its piece is long."""
    counts = host_ints(lens, device)
    return torch.repeat_interleave(host_ints(labels, device), counts, output_size=sum(lens))


def count_up(starts: Sequence[int], lens: Sequence[int], device: torch.device) -> Tensor:
    """The numbers `start .. start + len` of each piece, all pieces one after the other."""
    shifts, total = [], 0
    for start, length in zip(starts, lens, strict=True):
        shifts.append(start - total)
        total += length
    return repeated(shifts, lens, device) + torch.arange(total, device=device)


def _in_order(first_slots: Sequence[int], lens: Sequence[int], slots: int) -> bool:
    """Whether these pieces fill every slot, one after the other."""
    at = 0
    for first, length in zip(first_slots, lens, strict=True):
        if first != at:
            return False
        at += length
    return at == slots


def _dequantised(cached: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    if scale is None:
        return cached.to(dtype)
    return (cached.float() * scale).to(dtype)


def _assembled(parts: Sequence[tuple[Tensor, Tensor | None]], slots: int) -> Tensor:
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0]
    first = parts[0][0]
    # zeros, not empty: a masked key still enters a product, and NaN times zero is NaN
    whole = first.new_zeros(slots, *first.shape[1:])
    for part, fills in parts:
        whole[fills if fills is not None else slice(None)] = part
    return whole
